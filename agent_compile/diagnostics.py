"""Makes compiler messages fit to show, to store and to give to a model: short, located, without our directories.

The first errors are kept, because the later ones usually follow from them. Knows no particular compiler.
"""

from __future__ import annotations

import re

LIMIT = 4000
"""Most characters of a diagnostic."""

_MARK = "\n[...]"
# Escape sequences whole (colours), then every other control character but newline and tab; also the Unicode marks
# that reorder text, which could make a person read something else than what is there.
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b.")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")
# NVRTC and nvcc write "kernel.cu(41): error"; g++ writes "kernel.cpp:41:7: error". One form is enough.
_PARENTHESES = re.compile(r"^(?P<file>[\w./-]+)\((?P<line>\d+)\):", re.MULTILINE)
_NOISE = re.compile(
    r"^(?:ptxas info .*|ptxas +\. .*|\s*\d+ bytes stack frame, .*|Remark: The warnings can be suppressed.*|"
    r"compilation terminated\.|cc1plus: .*-W(?:fatal-errors|error).*|\s*)$",
    re.IGNORECASE,
)


def tidy(text: str, *, directory: str = "", limit: int = LIMIT) -> str:
    """The messages without control characters, resource notes and `directory`, at most `limit` characters.

    Locations read "kernel.cu:41: error: ..." whatever the compiler. A cut is marked by a last line "[...]".
    """
    # A flood is cut before the regular expressions see it, with room for what they remove.
    text = text[: 16 * limit]
    if directory:
        text = text.replace(directory.rstrip("/") + "/", "").replace(directory, ".")
    text = _CONTROL.sub("", _ESCAPE.sub("", text.replace("\r\n", "\n")))
    text = _PARENTHESES.sub(r"\g<file>:\g<line>:", text)
    lines = [line.rstrip() for line in text.split("\n") if not _NOISE.match(line)]
    text = "\n".join(lines).strip()
    if len(text) > limit:
        text = text[: limit - len(_MARK)].rstrip() + _MARK
    return text
