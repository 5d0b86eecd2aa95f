"""`python -m warpsmith.testing`: see the package."""

import sys

from warpsmith.testing import main

raise SystemExit(main(sys.argv[1:]))
