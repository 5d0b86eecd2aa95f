"""What a run does about a language model: when to have it write a kernel, and what to do while its server is away.

The one idea: a model is one source among others. Each plan has one kernel of its slowest group written, as the second
thing that is tried on it; where the server is away, that waits, other work goes on, and the run says so. Nothing here
asks a model: that is the agents' work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from warpsmith.v1 import analysis_pb2, hypothesis_pb2, trial_pb2

SOURCE = "vllm"
REST_SECONDS = 10.0
"""How long after a server was found away it is asked again; as long as the agents themselves leave it alone."""

ItemT = TypeVar("ItemT")


def asks_model(moves: Sequence[analysis_pb2.Move]) -> bool:
    """Whether a list of moves ends with a kernel that is not written yet."""
    return bool(moves) and moves[-1].kind == analysis_pb2.MOVE_KIND_WRITE and not moves[-1].text


def is_written(moves: Sequence[analysis_pb2.Move]) -> bool:
    """Whether the last of some moves is a kernel that a model wrote, or is to write."""
    return bool(moves) and moves[-1].kind == analysis_pb2.MOVE_KIND_WRITE


def was_answered(hypothesis: hypothesis_pb2.Hypothesis) -> bool:
    """Whether a model must have answered for this to become a candidate: it was to write, or it mended."""
    return asks_model(hypothesis.moves) or (is_written(hypothesis.moves) and hypothesis.source == SOURCE)


def with_write(
    analysis: analysis_pb2.Analysis, proposed: Sequence[hypothesis_pb2.Hypothesis], parent: trial_pb2.Trial | None
) -> list[hypothesis_pb2.Hypothesis]:
    """The proposals on a plan with a written kernel as the second, where the synthesizer offers to have one written.

    Of a plan with kernels of ours it is the slowest of their groups that is written; where all is library calls, the
    kernel that the best proposal ends with, since one call alone leaves little to gain.
    """
    legal = {item.move.group: item for item in analysis.legal_moves if item.move.kind == analysis_pb2.MOVE_KIND_WRITE}
    ours = [
        group for group in analysis.groups if group.name in legal and group.computed_by == analysis_pb2.ENGINE_AUTHORED
    ]
    moves = list(analysis.moves)
    if ours:
        took = {step.group: step.median_ns for step in parent.timing.steps} if parent is not None else {}
        slowest = max(
            ours, key=lambda group: (took.get(group.name, 0.0), group.cost.read_bytes + group.cost.write_bytes)
        )
        name = slowest.name
    elif legal and proposed and (own := _last_kernel(proposed[0])):
        moves, name = list(proposed[0].moves), own
    else:
        return list(proposed)
    written = hypothesis_pb2.Hypothesis(
        moves=[*moves, analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_WRITE, group=name)],
        new_move_count=len(moves) + 1 - len(analysis.moves),
        predicted_speedup=1.0,
        rationale=f"a language model writes the kernel of {name}",
        source=SOURCE,
    )
    return [*proposed[:1], written, *proposed[1:]]


def _last_kernel(hypothesis: hypothesis_pb2.Hypothesis) -> str:
    """The group of the last kernel of ours that a hypothesis makes; empty for none."""
    made = [
        move.group
        for move in hypothesis.moves
        if move.kind in (analysis_pb2.MOVE_KIND_AUTHOR, analysis_pb2.MOVE_KIND_FUSE)
    ]
    return made[-1] if made else ""


@dataclass
class Absence(Generic[ItemT]):
    """Which agents miss their model, and what waits for it. Used by one thread."""

    changed: Callable[[str], None]
    """Hears why the run waits, or the empty text when it no longer does."""
    rest_seconds: float = REST_SECONDS
    waiting: list[tuple[float, ItemT]] = field(default_factory=list)
    """When each may be tried again, and what."""
    _away: dict[str, str] = field(default_factory=dict)

    @property
    def reason(self) -> str:
        """Why the run waits; empty where no model is missed."""
        return next(iter(self._away.values()), "")

    def heard(self, agent: str, reason: str) -> None:
        """An agent said why its model is away, or, with no reason, that it answered."""
        before = self.reason
        if reason:
            self._away[agent] = reason
        elif self._away.pop(agent, ""):
            # It is the same server: what waits for it need wait no longer.
            self.waiting = [(0.0, item) for _, item in self.waiting]
        if bool(self.reason) != bool(before):
            self.changed(self.reason)

    def forget(self) -> None:
        """Misses nothing any more: the search is over."""
        self.waiting = []
        for agent in list(self._away):
            self.heard(agent, "")

    def postpone(self, item: ItemT) -> None:
        """Keeps something for later."""
        self.waiting.append((time.monotonic() + self.rest_seconds, item))

    def due(self) -> list[ItemT]:
        """What may be tried again now; it is no longer kept."""
        now = time.monotonic()
        ready = [item for at, item in self.waiting if at <= now]
        self.waiting = [(at, item) for at, item in self.waiting if at > now]
        return ready
