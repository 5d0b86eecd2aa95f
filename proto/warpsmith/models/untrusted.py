"""Makes text from modules, compilers, profilers and models safe to show to a model; `printable` does so for people.

The one idea: such text is data. Control and invisible characters go, nothing in it looks like a chat template's
marks, it is cut to a size, and it stands between two lines with a tag made from its own digest, which it therefore
cannot forge. What a model then makes of it is still only a choice among what is allowed.
"""

from __future__ import annotations

import re
import unicodedata

from warpsmith.digest import digest, short
from warpsmith.printable import ACTING

_ESCAPE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|.)", re.DOTALL)
"""Terminal escape sequences, which would leave their printable ends."""
_MARK = re.compile(r"(?<=<)(?=[|/!\w\uff5c])|(?<=\[)(?=/?(INST|SYS|AVAILABLE|TOOL))")
"""Where chat templates' marks such as <|im_end|>, </s>, <think> and [INST] are broken up by a space."""


def plain(text: str, most_characters: int) -> str:
    """The text with newlines and tabs as its only control characters, cut to a size; says how much was cut."""
    head = text[: 4 * most_characters + 64]  # what is beyond cannot come back by dropping characters; bounds the work
    head = _ESCAPE.sub("", head.replace("\r\n", "\n").replace("\r", "\n"))
    head = "".join(c for c in head if c in "\n\t" or unicodedata.category(c) not in ACTING)
    head = _MARK.sub(" ", head)
    if len(head) <= most_characters and len(text) <= 4 * most_characters + 64:
        return head
    return f"{head[:most_characters]}\n[cut: {len(text)} characters in all]"


def one_line(text: str, most_characters: int) -> str:
    """The same as a single line without a tail of spaces; "…" says that it was cut."""
    words = " ".join(_MARK.sub(" ", plain(text, 2 * most_characters)).split())
    return words if len(words) <= most_characters else words[: most_characters - 1].rstrip() + "…"


def quoted(name: str, text: str, most_characters: int) -> str:
    """The text as a block that says where it begins and ends."""
    content = plain(text, most_characters).strip("\n")
    tag = f"{name} {short(digest(name, content))}"
    return f"BEGIN {tag}\n{content}\nEND {tag}"
