"""Reads Python that others wrote, without running it and without a word to the terminal.

The one idea: of what it reads the compiler warns, and for the line of a warning or an error Python opens the file that
it was named, from the current directory on. So it is named none, and its warnings are dropped.
"""

from __future__ import annotations

import ast
import threading
import warnings

_NO_FILE = ""
"""A name that no file has. The compiler looks for one called `<unknown>` as for any other."""
_filters = threading.Lock()
"""What is done with warnings is set for the whole process."""


def parse(text: str | bytes) -> ast.Module:
    """The syntax tree of a module. Raises SyntaxError, ValueError, RecursionError or MemoryError for what is none."""
    with _filters, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text, filename=_NO_FILE)


def literal(text: str) -> object:
    """The value of a literal. Raises ValueError for what is none, or too deep to be read."""
    try:
        with _filters, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.literal_eval(ast.parse(text.strip(), filename=_NO_FILE, mode="eval"))
    except (SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError("no literal, or too deep") from error
