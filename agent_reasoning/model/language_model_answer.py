"""The JSON schema of a model's answer, and what is made of an answer that may be anything.

The one idea: an answer becomes choices or a complaint with a reason, never an exception. A server that enforces the
schema leaves nothing to complain about; one that does not is held to it here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from warpsmith.models.json_answer import last_object, whole_items, without_thoughts
from warpsmith.models.language_model import Answer
from warpsmith.models.untrusted import one_line

GAINS = (0.8, 0.9, 1.0, 1.05, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 10.0)
"""Gains that the schema offers: a free number may be written with any count of digits."""
GAIN_LIMITS = (0.1, 100.0)
REASON_CHARACTERS = 120
"""At most 128: xgrammar 0.2.8, which vLLM 0.32.0 uses, fails on longer repetitions in a pattern (xgrammar #863)."""
REASON_PATTERN = f"^[A-Za-z0-9 ,.;:()%/+=_-]{{1,{REASON_CHARACTERS}}}$"
"""A pattern and not `maxLength`: under that alone a string may hold control characters, which is no JSON."""


class Fault(StrEnum):
    """Why an answer cannot be used; also a label of metrics."""

    EMPTY = "empty"
    CUT_OFF = "cut_off"
    NOT_JSON = "not_json"
    WRONG_SHAPE = "wrong_shape"
    ILLEGAL = "illegal"
    REPEATED = "repeated"


@dataclass(frozen=True)
class Choice:
    """An option that the model chose."""

    option: int
    gain: float | None
    """Expected speedup; None where it gave none that can be used."""
    reason: str
    """One line, perhaps empty."""


@dataclass(frozen=True)
class Chosen:
    """At least one choice of an open option, in the model's order, none twice."""

    choices: tuple[Choice, ...]
    dropped_count: int
    """Choices beside them that were not open."""


@dataclass(frozen=True)
class Complaint:
    """Nothing in the answer can be used."""

    fault: Fault
    text: str
    """For the model: what to do better. Holds nothing of its answer."""


def schema(open_options: Sequence[int], count: int) -> dict[str, Any]:
    """What an answer must be: 1 to `count` hypotheses, each with an open option."""
    hypothesis = {
        "type": "object",
        "properties": {
            "reason": {"type": "string", "pattern": REASON_PATTERN},
            "option": {"type": "integer", "enum": list(open_options)},
            "gain": {"type": "number", "enum": list(GAINS)},
        },
        "required": ["reason", "option", "gain"],
        "additionalProperties": False,
    }
    return {
        "type": "object",
        "properties": {"hypotheses": {"type": "array", "minItems": 1, "maxItems": count, "items": hypothesis}},
        "required": ["hypotheses"],
        "additionalProperties": False,
    }


def read(answer: Answer, open_options: Collection[int], option_count: int, most: int) -> Chosen | Complaint:
    """What the model chose; `option_count` is how many options there are, tried ones included."""
    text = without_thoughts(answer)
    if not text.strip():
        fault = Fault.CUT_OFF if answer.is_cut_off else Fault.EMPTY
        return Complaint(fault, "it was empty")
    found = last_object(text, "hypotheses")
    if found is None and answer.is_cut_off:
        found = {"hypotheses": items} if (items := whole_items(text, "hypotheses")) else None
    if found is None:
        if answer.is_cut_off:
            return Complaint(Fault.CUT_OFF, "it was cut off before its end; give one hypothesis with a short reason")
        return Complaint(Fault.NOT_JSON, 'it held no JSON object with "hypotheses"')
    listed = found["hypotheses"]
    if not isinstance(listed, list) or not listed or not all(isinstance(each, dict) for each in listed):
        return Complaint(Fault.WRONG_SHAPE, '"hypotheses" must be a list of objects with reason, option and gain')
    numbers = [each.get("option") for each in listed]
    chosen: dict[int, Choice] = {}
    for each, number in zip(listed, numbers, strict=True):
        if _is_whole(number) and number in open_options and number not in chosen and len(chosen) < most:
            reason = each.get("reason")
            text = one_line(reason, REASON_CHARACTERS) if isinstance(reason, str) else ""
            chosen[number] = Choice(number, _gain(each.get("gain")), text)
    if chosen:
        outside = sum(not _is_whole(number) or number not in open_options for number in numbers)
        return Chosen(tuple(chosen.values()), outside)
    if not any(map(_is_whole, numbers)):
        return Complaint(Fault.WRONG_SHAPE, '"option" must be a whole number')
    if any(_is_whole(number) and 0 <= number < option_count for number in numbers):
        return Complaint(Fault.REPEATED, "the chosen options are not open: they have been tried, or were not shown")
    return Complaint(Fault.ILLEGAL, "there are no options with these numbers")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _gain(value: object) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        gain = float(value)
    except OverflowError:
        return None
    if not math.isfinite(gain) or gain <= 0:
        return None
    low, high = GAIN_LIMITS
    return min(high, max(low, gain))
