"""Makes the scripts of docs/results importable; they are no package, because people run them by path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "results"))
