"""The words by which people and files know what the contract says: the values of its enums, and the way back.

The one idea: a word is the value's own name without the enum's prefix, so no module keeps a second list; a value that
this version does not know, because a later one sent it, is its number. It knows nothing of what a value means.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from google.protobuf.descriptor import EnumDescriptor

from warpsmith.v1 import analysis_pb2, judging_pb2, run_pb2, task_pb2, tensor_pb2, timing_pb2, trial_pb2, verdict_pb2

_MOST_MOVES = 8
"""That a line names one by one."""


def engine(value: analysis_pb2.Engine.ValueType) -> str:
    """ "library" or "authored"; empty where none is set."""
    return _word(analysis_pb2.Engine.DESCRIPTOR, value).lower()


def engine_of(word: str) -> analysis_pb2.Engine.ValueType:
    """The engine of a word; unspecified for another."""
    return analysis_pb2.Engine.ValueType(_value(analysis_pb2.Engine.DESCRIPTOR, word))


def move_kind(value: analysis_pb2.MoveKind.ValueType) -> str:
    """ "fuse", "set" and so on; empty where none is set."""
    return _word(analysis_pb2.MoveKind.DESCRIPTOR, value).lower()


def move_kind_of(word: str) -> analysis_pb2.MoveKind.ValueType:
    """The kind of move of a word; unspecified for another."""
    return analysis_pb2.MoveKind.ValueType(_value(analysis_pb2.MoveKind.DESCRIPTOR, word))


def move(value: analysis_pb2.Move) -> str:
    """ "set softmax and 3 alike reduce=ring threads=256" and so on."""
    others = f"and {len(value.also)} alike" if value.also else ""
    integers = (f"{name}={number}" for name, number in sorted(value.arguments.items()))
    return " ".join(filter(None, (move_kind(value.kind), value.group, others, value.choice, *integers)))


def moves(values: Sequence[analysis_pb2.Move]) -> str:
    """Each move, or of many how often each: "28 times author cuda_product, 12 times fuse" and so on."""
    if len(values) <= _MOST_MOVES:
        return ", ".join(map(move, values))

    def alike(value: analysis_pb2.Move) -> str:
        is_fuse = value.kind == analysis_pb2.MOVE_KIND_FUSE  # whose choice is another group
        return f"{move_kind(value.kind)} {'' if is_fuse else value.choice}".strip()

    counts = Counter(map(alike, values))
    return ", ".join(f"{count} times {what}" if count > 1 else what for what, count in counts.items())


def arm(value: timing_pb2.ArmKind.ValueType) -> str:
    """ "eager", "compile_max_autotune" and so on; empty where none is set."""
    return _word(timing_pb2.ArmKind.DESCRIPTOR, value).lower()


def arm_of(word: str) -> timing_pb2.ArmKind.ValueType:
    """The kind of arm of a word; unspecified for another."""
    return timing_pb2.ArmKind.ValueType(_value(timing_pb2.ArmKind.DESCRIPTOR, word))


def flag(value: timing_pb2.Flag.ValueType) -> str:
    """ "FLOOR_REJECT" and so on, in capitals; empty where none is set."""
    return _word(timing_pb2.Flag.DESCRIPTOR, value)


def flag_of(word: str) -> timing_pb2.Flag.ValueType:
    """The flag of a word; unspecified for another."""
    return timing_pb2.Flag.ValueType(_value(timing_pb2.Flag.DESCRIPTOR, word))


def region_kind(value: judging_pb2.RegionKind.ValueType) -> str:
    """ "output", "state" and so on; empty where none is set."""
    return _word(judging_pb2.RegionKind.DESCRIPTOR, value).lower()


def stage(value: trial_pb2.Stage.ValueType) -> str:
    """ "compile", "verify" and so on; empty where none is set."""
    return _word(trial_pb2.Stage.DESCRIPTOR, value).lower()


def run_state(value: run_pb2.RunState.ValueType) -> str:
    """ "SEARCHING", "FASTER" and so on, in capitals; empty where none is set."""
    return _word(run_pb2.RunState.DESCRIPTOR, value)


def target(value: task_pb2.Target.ValueType) -> str:
    """ "cpu" or "cuda"; empty where none is set."""
    return _word(task_pb2.Target.DESCRIPTOR, value).lower()


def tier(value: timing_pb2.Tier.ValueType) -> str:
    """ "screening" or "final"; empty where none is set."""
    return _word(timing_pb2.Tier.DESCRIPTOR, value).lower()


def precision(value: task_pb2.Precision.ValueType) -> str:
    """ "fp32", "tf32" and so on; empty where none is set."""
    return _word(task_pb2.Precision.DESCRIPTOR, value).lower()


def dtype(value: tensor_pb2.Dtype.ValueType) -> str:
    """ "float32" and so on; empty where none is set."""
    return _word(tensor_pb2.Dtype.DESCRIPTOR, value).lower()


def verdict_state(value: verdict_pb2.VerdictState.ValueType) -> str:
    """ "PASS", "FAIL" or "INFRA"; empty where none is set."""
    return _word(verdict_pb2.VerdictState.DESCRIPTOR, value)


def failure_kind(value: verdict_pb2.FailureKind.ValueType) -> str:
    """ "WRONG_VALUE", "TIMEOUT" and so on, in capitals; empty where none is set."""
    return _word(verdict_pb2.FailureKind.DESCRIPTOR, value)


def value_family(value: verdict_pb2.ValueFamily.ValueType) -> str:
    """ "normal", "constant_rows" and so on; empty where none is set."""
    return _word(verdict_pb2.ValueFamily.DESCRIPTOR, value).lower()


def yardstick(verdict: verdict_pb2.Verdict) -> str:
    """What a verdict's error is a multiple of."""
    return "what TF32 makes, which PyTorch's settings allow" if verdict.by_tf32 else "PyTorch's own"


def _prefix(kind: EnumDescriptor) -> str:
    return str(kind.values_by_number[0].name).removesuffix("UNSPECIFIED")


def _word(kind: EnumDescriptor, value: int) -> str:
    if value == 0:
        return ""
    known = kind.values_by_number.get(value)
    return str(known.name).removeprefix(_prefix(kind)) if known else str(value)


def _value(kind: EnumDescriptor, word: str) -> int:
    known = kind.values_by_name.get(f"{_prefix(kind)}{word.upper()}")
    return int(known.number) if known else 0
