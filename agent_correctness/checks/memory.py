"""Memory: nothing written or read outside buffers, every element written, inputs left alone, equal every time.

The one idea: these come before values, because a stray read or an unwritten element makes values wrong by accident,
and the accident is not what a repair needs to hear.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from agent_correctness.checks.check import Case, Finding, Judgement, Passed, seed_from, where
from warpsmith.v1 import task_pb2, timing_pb2, verdict_pb2

Look = Callable[[verdict_pb2.Comparison], Finding | None]


class MemoryCheck:
    """Looks at canaries, mutated sources, poison and repeats of every comparison."""

    name = "memory"

    def cases(self, task: task_pb2.Task, tier: timing_pb2.Tier.ValueType, draw: random.Random) -> Sequence[Case]:
        """The task's own values."""
        del task, tier
        return [(verdict_pb2.VALUE_FAMILY_TASK, seed_from(draw))]

    def judge(self, comparisons: Sequence[verdict_pb2.Comparison]) -> Judgement:
        """As `Check.judge`. A broken canary is told before what it may have caused."""
        for look in _LOOKS:
            for comparison in comparisons:
                finding = look(comparison)
                if finding is not None:
                    return finding
        return Passed()


def _written_outside(comparison: verdict_pb2.Comparison) -> Finding | None:
    if not comparison.broken_canaries:
        return None
    return Finding(
        verdict_pb2.FAILURE_KIND_WRONG_OUT_OF_BOUNDS,
        f"memory just outside {_names(comparison.broken_canaries)} was written ({where(comparison)})",
    )


def _read_outside(comparison: verdict_pb2.Comparison) -> Finding | None:
    if not comparison.stray_read_outputs or comparison.unrepeatable_outputs:
        return None
    return Finding(
        verdict_pb2.FAILURE_KIND_WRONG_OUT_OF_BOUNDS,
        f"{_names(comparison.stray_read_outputs)} depends on memory outside every buffer: something reads out of "
        f"bounds ({where(comparison)})",
    )


def _mutated(comparison: verdict_pb2.Comparison) -> Finding | None:
    if not comparison.mutated_sources:
        return None
    return Finding(
        verdict_pb2.FAILURE_KIND_WRONG_INPUT_MUTATED,
        f"{_names(comparison.mutated_sources)} was changed, which the module does not do ({where(comparison)})",
    )


def _unwritten(comparison: verdict_pb2.Comparison) -> Finding | None:
    for error in comparison.outputs:
        if error.unwritten_count:
            elements = "element was" if error.unwritten_count == 1 else "elements were"
            return Finding(
                verdict_pb2.FAILURE_KIND_WRONG_UNINITIALIZED,
                f"output {error.output}: {error.unwritten_count} {elements} never written ({where(comparison)})",
            )
    return None


def _read_unwritten(comparison: verdict_pb2.Comparison) -> Finding | None:
    if not comparison.uninitialized_read_outputs or comparison.unrepeatable_outputs:
        return None
    return Finding(
        verdict_pb2.FAILURE_KIND_WRONG_UNINITIALIZED,
        f"{_names(comparison.uninitialized_read_outputs)} depends on memory that nothing had written: a workspace or "
        f"an output is read before it is filled ({where(comparison)})",
    )


def _dirty(comparison: verdict_pb2.Comparison) -> Finding | None:
    if not comparison.dirty_workspaces:
        return None
    return Finding(
        verdict_pb2.FAILURE_KIND_WRONG_UNINITIALIZED,
        f"workspace {_names(comparison.dirty_workspaces)} is not left zero, as the next call expects it "
        f"({where(comparison)})",
    )


def _unrepeatable(comparison: verdict_pb2.Comparison) -> Finding | None:
    if not comparison.unrepeatable_outputs:
        return None
    first = f"; the first to differ is what {comparison.unlike_step} makes" if comparison.unlike_step else ""
    return Finding(
        verdict_pb2.FAILURE_KIND_WRONG_NONDETERMINISTIC,
        f"{_names(comparison.unrepeatable_outputs)} differs between two runs on equal inputs ({where(comparison)})"
        f"{first}. A race does that, and so do atomics that add floats in whatever order blocks come, which are "
        "refused: what is not equal to the bit cannot be told from a stray read. Let each block store its part, and "
        "add the parts in a fixed order: in a second step, or in the block that comes last",
    )


_LOOKS: tuple[Look, ...] = (
    _written_outside, _mutated, _unwritten, _dirty, _unrepeatable, _read_outside, _read_unwritten,
)  # fmt: skip


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
