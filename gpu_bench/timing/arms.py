"""The names by which arms are timed, and the contract's kinds of arms.

The one idea: a clock takes readings of anything under a name, a call that does nothing too; what goes into a record is
of a kind, whose word is the name. It needs no torch.
"""

from __future__ import annotations

from warpsmith.contract import words
from warpsmith.v1 import timing_pb2

CANDIDATE = words.arm(timing_pb2.ARM_KIND_CANDIDATE)
EAGER = words.arm(timing_pb2.ARM_KIND_EAGER)
COMPILE = words.arm(timing_pb2.ARM_KIND_COMPILE)
MAX_AUTOTUNE = words.arm(timing_pb2.ARM_KIND_COMPILE_MAX_AUTOTUNE)
EAGER_GRAPH = words.arm(timing_pb2.ARM_KIND_EAGER_GRAPH)
CHANNELS_LAST = words.arm(timing_pb2.ARM_KIND_CHANNELS_LAST)
REDUCE_OVERHEAD = words.arm(timing_pb2.ARM_KIND_COMPILE_REDUCE_OVERHEAD)
COMPILE_CHANNELS_LAST = words.arm(timing_pb2.ARM_KIND_COMPILE_CHANNELS_LAST)
CUDNN_BENCHMARK = words.arm(timing_pb2.ARM_KIND_CUDNN_BENCHMARK)
COMPILE_FROZEN = words.arm(timing_pb2.ARM_KIND_COMPILE_FROZEN)
REWRITTEN = words.arm(timing_pb2.ARM_KIND_REWRITTEN)
AA_COPY = words.arm(timing_pb2.ARM_KIND_AA_COPY)

_KINDS = {words.arm(kind): kind for kind in timing_pb2.ArmKind.values()}


def kind(name: str) -> timing_pb2.ArmKind.ValueType:
    """The kind of an arm of the record; unspecified for no name. Another name is a mistake of ours: KeyError."""
    return _KINDS[name]
