"""Memory between a session's workers: who runs short is tried once more, after the other gave back what it can."""

from __future__ import annotations

import contextlib
import weakref

import pytest
import torch

from gpu_bench.judging.loaded import may_keep
from gpu_bench.running.executor import ProgramFault
from gpu_bench.workers import room
from gpu_bench.workers.shortage import Shortages
from warpsmith.errors import WorkerFault, WorkerRaised
from warpsmith.v1 import judging_pb2, verdict_pb2


class Fake:
    """A worker that raises what it is told to, call by call, and then answers."""

    def __init__(self, *raises: Exception, alive: bool = True) -> None:
        self.raises, self.alive = list(raises), alive
        self.calls: list[str] = []

    def call(self, method: str, request: object, response: object, deadline_s: float) -> str:
        """As `Worker.call`."""
        del request, response, deadline_s
        self.calls.append(method)
        if self.raises:
            raise self.raises.pop(0)
        return "answer"


def raised(kind: str) -> WorkerRaised:
    return WorkerRaised("truth: no memory", kind=kind, trace="")


def asked(worker: Fake, other: Fake | None) -> str:
    request, kind = judging_pb2.TruthRequest(), judging_pb2.Truth
    return room.call(worker, other, "truth", request, kind, 1.0)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("kind", sorted(room.SHORT))
def test_who_runs_short_is_asked_once_more_when_the_other_gave_back(kind: str) -> None:
    worker, other = Fake(raised(kind)), Fake()
    assert asked(worker, other) == "answer"
    assert (worker.calls, other.calls) == (["truth", "truth"], ["give_back"])
    twice = Fake(raised(kind), raised(kind))
    with pytest.raises(WorkerRaised):
        asked(twice, Fake())


def test_other_failures_are_told_at_once_and_nobody_is_disturbed() -> None:
    worker, other = Fake(raised("ValueError")), Fake()
    with pytest.raises(WorkerRaised):
        asked(worker, other)
    assert (worker.calls, other.calls) == (["truth"], [])


def test_a_worker_that_is_gone_or_cannot_give_back_is_no_fault_of_the_one_that_asks() -> None:
    assert asked(Fake(raised("TruthTooLarge")), None) == "answer"
    gone = Fake(alive=False)
    assert asked(Fake(raised("TruthTooLarge")), gone) == "answer"
    assert not gone.calls
    assert asked(Fake(raised("TruthTooLarge")), Fake(WorkerFault("no such method"))) == "answer"


def test_a_shortage_is_the_first_once_for_each_question() -> None:
    shortages = Shortages()
    assert shortages.is_first("look", 1, 7)
    assert shortages.is_first("truth", 1, 7)
    assert not shortages.is_first("look", 1, 7)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("tried to allocate 16.00 GiB"),
        MemoryError(),
        RuntimeError("CUDA error: out of memory"),
        ProgramFault(verdict_pb2.FAILURE_KIND_RESOURCE, "launch of run: CUDA_ERROR_OUT_OF_MEMORY"),
    ],
)
def test_the_first_want_of_memory_of_a_question_arrives_as_one_that_others_are_asked_for(error: Exception) -> None:
    shortages = Shortages()
    with pytest.raises(torch.OutOfMemoryError) as first:
        shortages.ask(error, "a program", 7)
    assert type(first.value).__name__ in room.SHORT
    shortages.ask(error, "a program", 7)
    with pytest.raises(torch.OutOfMemoryError):
        shortages.ask(error, "a program", 8)


def test_what_no_memory_that_is_given_back_would_help_is_nobody_elses() -> None:
    shortages = Shortages()
    for name in ("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "entry run asks for 300000 bytes of dynamic shared memory"):
        shortages.ask(ProgramFault(verdict_pb2.FAILURE_KIND_RESOURCE, name), "a program")


def test_what_was_made_up_to_the_want_of_memory_is_gone_when_it_is_told() -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    def act() -> None:
        workspace = torch.ones(4)
        made.append(weakref.ref(workspace))
        raise torch.OutOfMemoryError("no more")

    with pytest.raises(torch.OutOfMemoryError) as met:
        act()
    with pytest.raises(torch.OutOfMemoryError):
        Shortages().ask(met.value, "a program")
    assert made[0]() is None


def test_what_this_process_can_do_without_is_dropped_before_others_are_asked() -> None:
    dropped: list[str] = []
    shortages = Shortages(lambda: dropped.append("graphs"))
    for _ in range(2):
        with contextlib.suppress(torch.OutOfMemoryError):
            shortages.ask(MemoryError(), "a program")
    assert dropped == ["graphs"]


def test_memory_is_kept_while_it_is_little_or_much_is_free_beside_small_tensors() -> None:
    gib = 1 << 30
    assert may_keep(4 * gib, 5 * gib, 140 * gib, 60 * gib)
    assert may_keep(40 * gib, 60 * gib, 140 * gib, 13 * gib)
    assert not may_keep(40 * gib, 60 * gib, 140 * gib, 15 * gib)
    # Two processes of 43 GiB left 5 free beside a task that was made ready, and a final met its end.
    assert not may_keep(20 * gib, 50 * gib, 140 * gib, 13 * gib)
