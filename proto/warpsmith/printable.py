"""Makes text of others safe to show to a person: in a terminal, a log, a table.

The one idea: what a terminal would obey, or what would show a text as another one, is written out as Python writes it
(`\\x1b`, `\\u202e`), so that nothing is hidden and nothing is done; the rest stays as it is. Only what we write begins
a line: a text of others is one, or what follows its first is indented. For what a language model reads see
`untrusted`, which takes such characters away.
"""

from __future__ import annotations

import logging
import re
import unicodedata

ACTING = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories: control, format (zero width, direction), surrogates, private, unassigned, separators."""

MOST_CHARACTERS = 1 << 16
"""As much of one text as a person reads in a terminal."""
LINE_CHARACTERS = 2000


def lines(text: str, most_characters: int = MOST_CHARACTERS) -> str:
    """The text with newlines and tabs as its only control characters; a longer one loses its middle, and says so."""
    if len(text) > most_characters:
        half = most_characters // 2
        text = f"{text[:half]}\n[cut: {len(text)} characters in all]\n{text[-half:]}"
    return "".join(c if c in "\n\t" or c.isprintable() else _written_out(c) for c in text.replace("\r\n", "\n"))


def line(text: str, most_characters: int = LINE_CHARACTERS) -> str:
    """The text as one line; "…" says that it was cut."""
    words = " ".join(re.split(r"[\n\t ]+", lines(text[: most_characters + 1]).strip()))
    return words if len(words) <= most_characters else words[: most_characters - 1] + "…"


def row(text: str, most_characters: int = MOST_CHARACTERS) -> str:
    """The text as one line that keeps its spaces, for what is written in columns."""
    return re.sub(r"[\n\t]", " ", lines(text, most_characters))


def block(text: str, most_characters: int = MOST_CHARACTERS) -> str:
    """The text as lines of which only the first begins at the margin: none of the others passes for a line of ours."""
    return lines(text, most_characters).replace("\n", "\n    ")


def quotation(text: str, most_characters: int = LINE_CHARACTERS) -> str:
    """The text as one line that is marked as quoted."""
    inner = re.sub("[“”]", '"', line(text, most_characters))
    return f"“{inner}”"


def _written_out(c: str) -> str:
    # Spaces of other widths are shown as what they are; they neither hide nor move anything.
    return c if unicodedata.category(c) not in ACTING else c.encode("unicode_escape").decode()


class LogFormatter(logging.Formatter):
    """Log lines of which each record begins one: what follows within a record is indented."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as text."""
        return block(super().format(record))
