"""Makes the scripts of k8s/ importable; they are no package, because people run them by path."""

from __future__ import annotations

import sys
from pathlib import Path

K8S = Path(__file__).parents[2] / "k8s"
sys.path[:0] = [str(K8S), str(K8S / "monitoring")]
