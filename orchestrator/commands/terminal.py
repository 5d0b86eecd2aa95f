"""What commands write: every text on its way to a terminal passes here, because any of it may be foreign.

The one idea: a text is one line, whatever it holds, so that no text of others begins one of its own. Only a file that
was asked for is written as it is, and trouble of several lines is indented after its first.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.text import Text

from warpsmith import printable

CELL_CHARACTERS = 1000
STDOUT = (Path("-"), Path("/dev/stdout"))
"""Names of files that mean no file."""


def tell(*rows: str) -> None:
    """Results of one line each that keep their columns, on stdout."""
    for each in rows:
        print(printable.row(each), flush=True)


def tell_line(text: str) -> None:
    """A result of one line, on stdout."""
    print(printable.line(text), flush=True)


def note(text: str) -> None:
    """A line that is no result, on stderr."""
    print(printable.row(text), file=sys.stderr, flush=True)


def trouble(text: str) -> None:
    """What went wrong in several lines, on stderr."""
    print(printable.block(text), file=sys.stderr, flush=True)


def tell_file(text: str) -> None:
    """The content of a file, on stdout: as it is, where no terminal would obey it."""
    print(printable.lines(text, len(text)) if sys.stdout.isatty() else text, end="", flush=True)


def cell(text: str) -> Text:
    """A cell of a table: what is in brackets is no markup."""
    return Text(printable.line(text, CELL_CHARACTERS))
