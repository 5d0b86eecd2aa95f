"""Finds the JSON object in a model's answer, wherever it stands: in a fence, after thinking, between words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

STARTS_TRIED = 32
"""Opening braces at which an object is looked for."""


def objects(text: str, *keys: str) -> Iterator[dict[str, Any]]:
    """Objects with one of these keys at least, in order; never raises."""
    decoder = json.JSONDecoder()
    start = -1
    for _ in range(STARTS_TRIED):
        start = text.find("{", start + 1)
        if start < 0:
            return
        try:
            found, _end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict) and not found.keys().isdisjoint(keys):
            yield found
