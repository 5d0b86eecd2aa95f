"""Entry point of `warpsmith`: Ctrl-C while its libraries load, which takes seconds, ends it without a traceback."""

from __future__ import annotations

import importlib


def main() -> None:
    """As `cli.main`."""
    try:
        command_line = importlib.import_module("orchestrator.commands.cli")
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    command_line.main()


if __name__ == "__main__":
    main()
