"""Whether a timing may be called faster, once its labels are known.

The one idea: the rule stands here and nowhere else. A speedup beyond doubt (`statistics.faster`) is one condition; no
label may speak against it. Code that adds a label or takes a speedup back calls `settle` again. It measures nothing,
and needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from gpu_bench.timing.statistics import threshold
from warpsmith.v1 import timing_pb2

FLOOR_REJECT = timing_pb2.FLAG_FLOOR_REJECT
"""Faster than physics allows."""
FLOOR_SUSPECT = timing_pb2.FLAG_FLOOR_SUSPECT
"""Faster than any sweep of this machine."""
OUTPUT_CONSTANT = timing_pb2.FLAG_OUTPUT_CONSTANT
"""On values as the task draws them every output stays the same, as far as rounding goes."""
OUTPUT_ZERO = timing_pb2.FLAG_OUTPUT_ZERO
"""There every output is all zeros."""
INPUT_UNUSED = timing_pb2.FLAG_INPUT_UNUSED
"""Some input does not influence any output, on any values that were tried."""
INPUT_UNRESOLVED = timing_pb2.FLAG_INPUT_UNRESOLVED
"""On values as the task draws them a coarse output does not show whether an eighth of some input was read."""
SLOWER_ON_FRESH_VALUES = timing_pb2.FLAG_SLOWER_ON_FRESH_VALUES
"""First calls on values that nothing can have kept an answer for do not show the speedup: it is not believed."""

NEVER_FASTER: Final = frozenset({
    FLOOR_REJECT, FLOOR_SUSPECT, SLOWER_ON_FRESH_VALUES,
    OUTPUT_CONSTANT, OUTPUT_ZERO, INPUT_UNUSED, INPUT_UNRESOLVED,
})  # fmt: skip
"""Labels of times that are not believed, and of references whose answer can be had without computing it."""


def settle(timing: timing_pb2.Timing, labels: Iterable[timing_pb2.Flag.ValueType] = ()) -> None:
    """Adds labels, and takes back `faster` where one speaks against it or the interval no longer clears the noise."""
    timing.raised[:] = dict.fromkeys([*timing.raised, *labels])
    is_clear = timing.speedup_fastest.low > threshold(timing.noise_floor)
    timing.faster = timing.faster and is_clear and NEVER_FASTER.isdisjoint(timing.raised)
