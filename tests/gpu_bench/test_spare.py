"""The process of a final that is made ahead: what it does beforehand, and what is left where it fails."""

from __future__ import annotations

from typing import Any, cast

import pytest

from gpu_bench.pytorch.compiler_cache import CompilerCache
from gpu_bench.session import Session
from gpu_bench.workers.reserve import Lot
from gpu_bench.workers.spare import Spare
from warpsmith.errors import WorkerFault
from warpsmith.sandbox.worker import Worker
from warpsmith.v1 import task_pb2

CPU, CUDA = task_pb2.TARGET_CPU, task_pb2.TARGET_CUDA


class Told:
    """A process that notes what it is told."""

    def __init__(self, failing: str = "") -> None:
        self.told: list[str] = []
        self._failing = failing

    def start(self, cache: CompilerCache) -> Worker:
        assert cache.directory.exists()
        return cast(Worker, self)

    def open(self, worker: Worker) -> None:
        assert worker is cast(Any, self)
        self.call("open")

    def call(self, method: str, *_: object, **__: object) -> None:
        self.told.append(method)
        if method == self._failing:
            raise WorkerFault("no")

    def close(self) -> None:
        self.told.append("close")


def spare_of(process: Told, target: task_pb2.Target.ValueType) -> Spare:
    return Spare(process.start, process.open, None, target, 10.0)


def test_on_a_processor_it_has_the_baselines_before_it_is_taken() -> None:
    process = Told()
    spare = spare_of(process, CPU)
    assert spare.worker() is not None
    assert process.told == ["open", "prepare_baselines"]
    assert spare.taken() is cast(Any, process)
    assert process.told == ["open", "prepare_baselines"]
    spare.close()


def test_on_a_gpu_it_opens_the_task_when_it_is_taken() -> None:
    process = Told()
    spare = spare_of(process, CUDA)
    assert spare.worker() is not None
    assert process.told == ["warm_up"]
    assert spare.taken() is cast(Any, process)
    assert process.told == ["warm_up", "open"]
    spare.close()


@pytest.mark.parametrize("failing", ["warm_up", "open"])
def test_where_it_fails_neither_process_nor_cache_is_left(failing: str) -> None:
    process = Told(failing)
    spare = spare_of(process, CUDA)
    assert spare.taken() is None
    assert process.told[-1] == "close"
    assert not spare.cache.directory.exists()


def test_where_a_lot_has_one_waiting_none_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    class Waiting:
        descriptor, passage, cache = -1, None, None

        def close(self) -> None: ...

    session = Session(task_pb2.Task(target=CUDA), lot=cast(Lot, Waiting()))
    monkeypatch.setattr(session._workers, "preparation", lambda: pytest.fail("asked"))
    session.expect_final()
    assert session._workers._spare is None
