"""What commands write: every text on its way to a terminal passes here, because any of it may be foreign."""

from __future__ import annotations

import sys

from rich.text import Text

from warpsmith import printable

CELL_CHARACTERS = 1000


def tell(text: str) -> None:
    """A result, on stdout."""
    print(printable.lines(text), flush=True)


def tell_line(text: str) -> None:
    """A result of one line, on stdout."""
    print(printable.line(text), flush=True)


def note(text: str) -> None:
    """What is no result, on stderr."""
    print(printable.lines(text), file=sys.stderr, flush=True)


def tell_file(text: str) -> None:
    """The content of a file, on stdout: as it is, where no terminal would obey it."""
    print(printable.lines(text, len(text)) if sys.stdout.isatty() else text, end="", flush=True)


def cell(text: str) -> Text:
    """A cell of a table: what is in brackets is no markup."""
    return Text(printable.line(text, CELL_CHARACTERS))
