"""GPU memory for outputs: how descriptors reach a worker, and what happens where there is none."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpu_bench.session import Session
from gpu_bench.values.keys import Key
from gpu_bench.workers import outbox, parcels
from gpu_bench.workers.outbox import Outbox, Passage
from gpu_bench.workers.sharing import SharedMemory, lay_out
from warpsmith.v1 import benchmark_service_pb2, judging_pb2, task_pb2, verdict_pb2


@pytest.fixture
def passage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Passage]:
    made = Passage()
    monkeypatch.setenv(outbox.PASSAGE_VARIABLE, str(made.inherited))
    yield made
    made.close()


def test_a_worker_without_a_gpu_keeps_to_the_file(passage: Passage, monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor = os.memfd_create("outputs")
    shared = SharedMemory(descriptor)
    regions, size = lay_out([(Key.output(0), torch.zeros(4))])
    os.ftruncate(descriptor, size)
    passage.send(descriptor)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert shared.move(size) == 0
    (place,) = shared.tensors(regions)
    assert place.device.type == "cpu"
    os.close(descriptor)


def test_outputs_lie_where_the_outbox_is_until_the_worker_moves_back(monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor = os.memfd_create("outputs")
    shared = SharedMemory(descriptor)
    regions, size = lay_out([(Key.output(0), torch.zeros(3)), (Key.output(1), torch.zeros(2, 2))])
    os.ftruncate(descriptor, size)
    memory = torch.zeros(size, dtype=torch.uint8)  # in the place of a GPU's
    monkeypatch.setattr(outbox, "received", lambda _: memory)
    assert shared.move(size) == size
    first, second = shared.tensors(regions)
    first.fill_(1.0)
    second.fill_(2.0)
    assert memory[regions[1].offset_bytes :].view(torch.float32)[:4].tolist() == [2.0] * 4
    assert shared.move(0) == 0
    assert [tensor.sum().item() for tensor in shared.tensors(regions)] == [0.0, 0.0]
    os.close(descriptor)


def test_a_session_whose_workers_cannot_map_it_goes_on_through_the_host(
    small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptor = os.memfd_create("not memory of a GPU")
    monkeypatch.setattr(Outbox, "make", staticmethod(lambda size: Outbox(descriptor, size)))
    monkeypatch.setattr(parcels, "LEAST_BYTES", 0)
    made = Session(small.task())
    begin = made._workers.begin_outbox
    monkeypatch.setattr(made._workers, "begin_outbox", lambda prepared: _as_on_a_gpu(made, begin, prepared))
    program = small.kernel_program(small.softmax)
    case = benchmark_service_pb2.ComparisonCase(family=verdict_pb2.VALUE_FAMILY_TASK, seed=3)
    response = made.compare(program, small.compiled(program), [case])
    assert not response.HasField("fault"), response.fault
    assert response.comparisons[0].outputs[0].rms_ratio <= 4
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    made.close()


def _as_on_a_gpu(made: Session, begin: Any, prepared: Any) -> None:
    made.task.target = task_pb2.TARGET_CUDA
    begin(prepared)
    made.task.target = task_pb2.TARGET_CPU


class Moving:
    """A worker that maps whatever is sent to it."""

    alive = True

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def call(self, method: str, request: judging_pb2.MoveRequest, *_: Any, **__: Any) -> judging_pb2.Moved:
        assert method == "move"
        self.sizes.append(request.total_bytes)
        return judging_pb2.Moved(total_bytes=request.total_bytes)


def test_an_outbox_is_made_anew_where_more_is_needed_and_no_size_that_was_refused_is_tried_again(
    passage: Passage, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def make(size: int) -> Outbox | None:
        asked.append(size)
        return Outbox(os.memfd_create("memory"), size) if size < 4 << 30 else None

    monkeypatch.setattr(Outbox, "make", staticmethod(make))
    workers: list[Any] = [Moving(), Moving()]
    held = parcels.Parcels(passage, 1.0)
    sizes = [1 << 30, 1 << 28, 2 << 30, 4 << 30, 8 << 30]
    found = []
    for size in sizes:
        found.append(held.hold(size))
        held.share(lambda: workers)
    assert found == [True, True, True, False, False]
    assert asked == [1 << 30, 2 << 30, 4 << 30]
    assert workers[0].sizes == workers[1].sizes == [1 << 30, 0, 2 << 30, 0], "each leaves the old one first"
    assert held.hold(1 << 28), "less than what was refused"
    held.give_up()


def test_what_was_pinned_is_let_go_before_its_pages_are(monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor, calls = os.memfd_create("outputs"), list[tuple[str, int]]()
    shared = SharedMemory(descriptor)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, size, _: calls.append(("pin", address)) or int(size > 8192),
        cudaHostUnregister=lambda address: calls.append(("unpin", address)) or 0,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    told = []
    real = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, **options: told.append(options) or real(*size))
    for size in (4096, 8192, 16384, 32768):
        os.ftruncate(descriptor, size)
        shared.tensors([])
    assert [what for what, _ in calls] == ["pin", "unpin", "pin", "unpin", "pin", "pin"]
    assert calls[0] == ("pin", calls[1][1])
    assert told == [{"device": "cuda"}] * 2, "the error of a refusal is taken out of the runtime"
    os.close(descriptor)


def test_where_there_is_no_gpu_none_is_made() -> None:
    if not torch.cuda.is_available():
        assert Outbox.make(1 << 20) is None


def test_of_the_descriptors_that_wait_the_last_is_taken_and_the_others_are_closed() -> None:
    there, here = socket.socketpair()
    first, last = os.memfd_create("first"), os.memfd_create("last")
    with there, here:
        for descriptor in (first, last):
            socket.send_fds(there, [b"!"], [descriptor])
        before = len(os.listdir("/proc/self/fd"))
        taken = outbox.last_sent(here)
        assert os.path.samestat(os.fstat(taken), os.fstat(last))
        assert len(os.listdir("/proc/self/fd")) == before + 1
        with pytest.raises(outbox.OutboxFault, match="no descriptor came"):
            outbox.last_sent(here)
    for descriptor in (first, last, taken):
        os.close(descriptor)
