"""The command line: its commands, their options, and what they show."""

from __future__ import annotations

import importlib


def main() -> None:
    """Entry point of `warpsmith`, as `cli.main`: Ctrl-C while libraries load, which takes seconds, is no traceback."""
    try:
        command_line = importlib.import_module("orchestrator.commands.cli")
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    command_line.main()
