"""GPU memory for outputs: how descriptors reach a worker, and what happens where there is none."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gpu_bench.session import Session
from gpu_bench.values.keys import Key
from gpu_bench.workers import outbox, parcels
from gpu_bench.workers.outbox import Outbox, Passage
from gpu_bench.workers.sharing import SharedMemory, lay_out
from warpsmith.v1 import benchmark_service_pb2, task_pb2, verdict_pb2


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
