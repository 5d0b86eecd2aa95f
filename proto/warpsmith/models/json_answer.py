"""Finds what a model answered, wherever it stands: after thoughts, in a fence, between words.

The one idea: a model that thinks aloud writes drafts first, so what it thought is not read, and of several answers the
last one counts.
"""

from __future__ import annotations

import json
import re
from typing import Any

from warpsmith.models.language_model import Answer

STARTS_TRIED = 128
"""Places at which an object is looked for, from the end: enough for the longest answer that makes sense, and for any
text in time that grows with its length and no faster. An opening brace of C++ is none: no name in quotes follows it."""
_START = re.compile(r'\{\s{0,100}"')
_BETWEEN = re.compile(r"[\s,]*")
_THOUGHT_BEGINS = "<think>"
_THOUGHT_ENDS = ("</think>", "</thinking>", "[/THINK]")


def without_thoughts(answer: Answer) -> str:
    """The text after the last thought; none where the answer was cut off while the model still thought."""
    text = answer.text
    for mark in _THOUGHT_ENDS:
        text = text.rpartition(mark)[2]
    if answer.is_cut_off and _THOUGHT_BEGINS in text:
        text = text.partition(_THOUGHT_BEGINS)[0]
    return text


def last_object(text: str, *keys: str) -> dict[str, Any] | None:
    """The last object with one of these keys at least that is not part of another such one; never raises."""
    decoder = json.JSONDecoder()
    found: dict[str, Any] | None = None
    end = 0
    for start in [match.start() for match in _START.finditer(text)][-STARTS_TRIED:]:
        if start < end:
            continue
        try:
            value, after = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and not value.keys().isdisjoint(keys):
            found, end = value, after
    return found


def whole_items(text: str, key: str) -> list[dict[str, Any]]:
    """Of an answer that was cut off in the last list of objects under a key, those objects that are whole."""
    decoder = json.JSONDecoder()
    found: list[dict[str, Any]] = []
    rest = text.rpartition(f'"{key}"')[2]
    begin = re.match(r"\s*:\s*\[", rest)
    at = begin.end() if begin else len(rest)
    while (between := _BETWEEN.match(rest, at)) is not None:
        try:
            item, at = decoder.raw_decode(rest, between.end())
        except (ValueError, RecursionError):
            break
        if isinstance(item, dict):
            found.append(item)
    return found
