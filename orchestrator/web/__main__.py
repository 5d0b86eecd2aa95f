"""`python -m orchestrator.web`: `warpsmith web`, for an image whose entry point is Python's `-m`."""

import sys

from orchestrator.commands.cli import main

sys.argv[1:1] = ["web"]
main()
