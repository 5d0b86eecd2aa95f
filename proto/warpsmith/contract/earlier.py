"""Reads messages that an earlier version wrote: from an archive, from a record, from a service not yet replaced.

The one idea: a field that became another one is translated here and nowhere else, in the message as it was read, so
that all other code knows the new field only. What an earlier version wrote and this code cannot translate
stays where it is. Nothing here writes an old field. Settings of schedules that have other names by now are renamed
likewise, whatever schedule they are of: so no schedule may give an old name to a setting of its own (`is_taken`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from warpsmith.contract import words
from warpsmith.v1 import analysis_pb2, trial_pb2, verdict_pb2

MessageT = TypeVar("MessageT", bound=Message)

_SETTINGS: Mapping[str, str] = {
    "ahead": "prefetch",
    "blocks": "min_blocks",
    "depth": "stages",
    "end": "epilogue",
    "group": "raster",
    "items": "vectors",
    "overlap": "dependent_launch",
    "pack": "vector_width",
    "packs": "vectors",
    "slices": "split_k",
    "splits": "ctas",
    "turns": "ping_pong",
}
"""What settings were called → what they are called."""
_VALUES: Mapping[str, Mapping[str, str]] = {
    "epilogue": {"held": "overlapped"},
    "loads": {"once": "evict_first", "shared": "cached"},
    "reduce": {
        "ahead": "prefetched",
        "hold": "resident",
        "roll": "ring",
        "stream": "pipelined",
        "two_pass": "two_kernels",
    },
}
"""The same of words that settings may be, by what settings are called."""


def translated(message: MessageT) -> MessageT:
    """The message itself, with whatever is old in it, at any depth, under the fields of today."""
    if translate := _OLD.get(message.DESCRIPTOR.full_name):
        translate(message)
    for name, is_repeated in _ways(message.DESCRIPTOR):
        if is_repeated:
            for each in getattr(message, name):
                translated(each)
        elif message.HasField(name):
            translated(getattr(message, name))
    return message


def setting(name: str, word: str) -> tuple[str, str]:
    """A setting's name and its word, as they are called today."""
    name = _SETTINGS.get(name, name)
    return name, _VALUES.get(name, {}).get(word, word)


def is_taken(name: str, words_of: Iterable[str] = ()) -> bool:
    """Whether a setting of this name, that may be these words, would be taken for an older one."""
    return any(setting(name, word) != (name, word) for word in ("", *words_of))


@functools.lru_cache(4096)  # the trials of a run set much the same
def choice(text: str) -> str:
    """What a move sets, such as "loads=once,overlap=no", in today's words and in the order of today's names."""
    pairs = [part.partition("=") for part in text.split(",")]
    renamed = [setting(name, word) for name, _, word in pairs]
    if all((name, word) == now for (name, _, word), now in zip(pairs, renamed, strict=True)):
        return text
    return ",".join(f"{name}={word}" if word else name for name, word in sorted(renamed))


@functools.cache
def _ways(descriptor: Descriptor) -> tuple[tuple[str, bool], ...]:
    """Fields of a message that may lead to something old, each with whether it is repeated: most messages have none."""
    return tuple(
        (field.name, field.is_repeated)
        for field in descriptor.fields
        if field.message_type is not None and _within(field.message_type, set())
    )


def _within(descriptor: Descriptor, seen: set[str]) -> bool:
    """Whether messages of this kind are old ones or hold some; maps hold none."""
    if descriptor.full_name in _OLD:
        return True
    if descriptor.full_name in seen or descriptor.GetOptions().map_entry:
        return False
    seen.add(descriptor.full_name)
    return any(each.message_type is not None and _within(each.message_type, seen) for each in descriptor.fields)


def _of_engine(message: Any) -> None:
    """A group or the time of a step: `engine` was a word."""
    if message.engine and (known := words.engine_of(message.engine)):
        message.computed_by = known
        message.ClearField("engine")


def _of_group(group: Any) -> None:
    """A group: settings had other names, and some of their words were others."""
    _of_engine(group)
    _rename(group.parameters)
    _rename(group.choices)
    for name in _VALUES.keys() & group.choices.keys():
        _, group.choices[name] = setting(name, group.choices[name])


def _rename(settings: MutableMapping[str, Any]) -> None:
    for name in _SETTINGS.keys() & settings.keys() if settings else ():
        settings[_SETTINGS[name]] = settings.pop(name)


def _of_move(move: Any) -> None:
    """A move: `operation` was a word, settings had other names."""
    if move.operation and (known := words.move_kind_of(move.operation)):
        move.kind = known
        move.ClearField("operation")
    if move.kind == analysis_pb2.MOVE_KIND_SET:
        move.choice = choice(move.choice)
        _rename(move.arguments)


def _of_arm(arm: Any) -> None:
    """An arm: `name` was a word."""
    if arm.name and (known := words.arm_of(arm.name)):
        arm.kind = known
        arm.ClearField("name")


def _of_fastest_and_flags(message: Any, fastest: str) -> None:
    """Of a timing or of a reference's report: the fastest arm was a word, and flags were."""
    if (word := getattr(message, fastest)) and (known := words.arm_of(word)):
        message.fastest_arm = known
        message.ClearField(fastest)
    if message.flags:
        message.raised.extend(flag for flag in map(words.flag_of, message.flags) if flag)
        message.flags[:] = [word for word in message.flags if not words.flag_of(word)]


def _of_stage(trial: Any) -> None:
    """A judged trial: where it ended was to be seen from what it lacks, and from its verdict's sentence."""
    if trial.ended_at or trial.verdict.state not in (verdict_pb2.VERDICT_STATE_PASS, verdict_pb2.VERDICT_STATE_FAIL):
        return
    detail = trial.verdict.detail
    if trial.HasField("timing"):
        trial.ended_at = trial_pb2.STAGE_TIMED
    elif not trial.HasField("artifact"):
        trial.ended_at = trial_pb2.STAGE_COMPILE
    elif detail.startswith("while timed") or detail.endswith("move the task's data or compute its products"):
        trial.ended_at = trial_pb2.STAGE_MEASURE
    else:
        trial.ended_at = trial_pb2.STAGE_VERIFY


_OLD: Mapping[str, Callable[[Any], None]] = {
    "warpsmith.v1.Arm": _of_arm,
    "warpsmith.v1.Group": _of_group,
    "warpsmith.v1.Move": _of_move,
    "warpsmith.v1.ReferenceReport": functools.partial(_of_fastest_and_flags, fastest="fastest"),
    "warpsmith.v1.StepTime": _of_engine,
    "warpsmith.v1.Timing": functools.partial(_of_fastest_and_flags, fastest="fastest_baseline"),
    "warpsmith.v1.Trial": _of_stage,
}
"""What to do with a message of which some field is old, by its name."""
