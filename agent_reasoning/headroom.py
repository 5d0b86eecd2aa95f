"""Decides whether there is anything to win: the fastest baseline against the least time the task can take.

Source of the threshold: below 5 % a search costs more than it can give (docs/measurement.md).
"""

from __future__ import annotations

from agent_reasoning import wording
from warpsmith.contract import words
from warpsmith.v1 import timing_pb2

AT_FLOOR = 1.05
"""Fastest baseline over floor up to which a search is not begun."""


def at_floor(reference: timing_pb2.ReferenceReport) -> str:
    """Cost against benefit in one sentence when the fastest baseline is within 5 % of the floor; else empty."""
    fastest = fastest_ns(reference)
    if fastest <= 0 or reference.floor_ns <= 0 or fastest > AT_FLOOR * reference.floor_ns:
        return ""
    name = _fastest_arm(reference)
    if fastest <= reference.floor_ns:
        return (
            f"The fastest baseline ({name}, {wording.duration(fastest)}) is at the floor of "
            f"{wording.duration(reference.floor_ns)}: there is nothing left to save, so a search would only cost time."
        )
    saving, percent = fastest - reference.floor_ns, 100 * (fastest / reference.floor_ns - 1)
    return (
        f"The fastest baseline ({name}, {wording.duration(fastest)}) is within {percent:.1f} % of the floor of "
        f"{wording.duration(reference.floor_ns)}: a perfect kernel would save {wording.duration(saving)} a call, "
        "which does not pay for a search."
    )


def fastest_ns(reference: timing_pb2.ReferenceReport) -> float:
    """Median of the fastest baseline; 0 when none was timed."""
    times = {arm.kind: arm.median_ns for arm in reference.arms if not arm.failure and arm.median_ns > 0}
    return times.get(reference.fastest_arm) or min(times.values(), default=0.0)


def _fastest_arm(reference: timing_pb2.ReferenceReport) -> str:
    fastest = fastest_ns(reference)
    return next((words.arm(arm.kind) for arm in reference.arms if arm.median_ns == fastest), "unknown")
