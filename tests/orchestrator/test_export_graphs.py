"""Exported programs that launch all steps as one CUDA graph: when one is captured, replayed, and given up."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from orchestrator.exports.carried import cuda_graphs
from orchestrator.exports.carried.cuda_graphs import _WsGraphs


class Device:
    """Stands in for a GPU: runs, captures and replays `steps`, which doubles the first tensor."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.stream = 7
        self.refuses = False
        self._thread = threading.local()
        self.current: object = "the caller's"
        self._static: list[tuple[torch.Tensor, torch.Tensor]] = []
        device = self

        class Graph:
            held: Any = None

            def capture_begin(self, *, pool: object, capture_error_mode: str) -> None:
                assert (pool, capture_error_mode, device.current) == ("pool", "thread_local", ("stream", -1))
                device.is_capturing = True

            def capture_end(self) -> None:
                device.is_capturing = False
                if device.refuses:
                    raise RuntimeError("operation failed due to a previous error during capture")
                self.held = device._static.pop()

            def replay(self) -> None:
                device.done.append("replay")
                assert device.graphs._lock.locked(), "another thread's replay would overwrite the results"
                x, y = self.held
                y.copy_(2 * x)

        @contextlib.contextmanager
        def stream(wanted: object) -> Iterator[None]:
            before, device.current = device.current, wanted
            try:
                yield
            finally:
                device.current = before

        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "stream", stream)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
        monkeypatch.setattr(torch.cuda, "Stream", lambda index: ("stream", index))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.is_capturing)
        self.graphs = _WsGraphs(self.steps, lambda _: self.stream)

    @property
    def is_capturing(self) -> bool:
        return getattr(self._thread, "is_capturing", False)

    @is_capturing.setter
    def is_capturing(self, value: bool) -> None:
        self._thread.is_capturing = value

    def steps(self, tensors: list[torch.Tensor], owner: int | None) -> tuple[torch.Tensor]:
        if self.is_capturing:
            self.done.append(f"capture for {owner}")
            if self.refuses:
                raise RuntimeError("operation not permitted when stream is capturing")
            self._static.append((tensors[0], torch.zeros_like(tensors[0])))
            return (self._static[-1][1],)
        self.done.append("steps")
        return (2 * tensors[0],)

    def call(self, x: torch.Tensor) -> torch.Tensor:
        (y,) = self.graphs([x])
        assert torch.equal(y, 2 * x)
        return y

    def taken(self) -> list[str]:
        done, self.done = self.done, []
        return done


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def test_a_graph_is_captured_where_addresses_come_again_and_then_replayed(device: Device) -> None:
    x = torch.arange(3.0)
    results = [device.call(x) for _ in range(3)]
    assert device.taken() == ["steps", "capture for 7", "replay", "replay"]
    assert len({result.data_ptr() for result in results}) == 3, "the next replay would overwrite a result"
    x.fill_(5.0)
    assert torch.equal(device.call(x), torch.full((3,), 10.0)), "a graph reads what lies there now"


def test_results_keep_their_strides(device: Device) -> None:
    x = torch.arange(6.0).view(2, 3).T
    for _ in range(3):
        assert device.call(x).stride() == x.stride()


def test_other_addresses_and_other_streams_run_step_by_step_at_first(device: Device) -> None:
    x = torch.arange(3.0)
    device.call(x), device.call(x)
    device.taken()
    device.call(torch.arange(3.0))
    device.stream = 8
    device.call(x)
    assert device.taken() == ["steps", "steps"]


def test_the_least_recently_used_graph_goes(device: Device) -> None:
    tensors = [torch.full((3,), float(number)) for number in range(_WsGraphs.MOST + 1)]
    for x in tensors[:-1]:
        for _ in range(10):
            device.call(x)
    device.call(tensors[0])
    device.call(tensors[-1]), device.call(tensors[-1])
    device.taken()
    device.call(tensors[0]), device.call(tensors[1])
    assert device.taken() == ["replay", "steps"]


def test_memory_that_no_graph_has_any_more_is_not_used_again(device: Device) -> None:
    x, others = torch.zeros(3), [torch.full((3,), float(number)) for number in range(_WsGraphs.MOST)]
    device.call(x), device.call(x)
    device.stream = 8
    for other in others:
        for _ in range(10):
            device.call(other)
    assert list(device.graphs._places) == [(-1, 8)]
    device.stream = 7
    device.call(x), device.call(x)
    assert device.taken()[-2:] == ["capture for 7", "replay"]


def test_where_graphs_are_hardly_replayed_no_more_are_captured(device: Device) -> None:
    tensors = [torch.full((3,), float(number)) for number in range(_WsGraphs.MOST + 4)]
    for _ in range(6):
        for x in tensors:
            device.call(x)
    assert device.taken().count("capture for 7") == _WsGraphs.MOST


def test_addresses_that_never_come_again_are_forgotten(device: Device) -> None:
    held = [torch.zeros(1) for _ in range(_WsGraphs.REMEMBERED + 1)]
    for x in [*held, held[0]]:
        device.call(x)
    assert set(device.taken()) == {"steps"}


def test_what_cannot_be_captured_runs_step_by_step_for_good(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    device.refuses = True
    taken_back: list[tuple[int, object]] = []
    monkeypatch.setattr(cuda_graphs, "_ws_take_back", lambda *of: taken_back.append(of))
    x = torch.arange(3.0)
    for _ in range(4):
        device.call(x)
    assert device.taken() == ["steps", "capture for 7", "steps", "steps", "steps"]
    assert taken_back == [("pool",)]
    assert device.current == "the caller's", "what the caller does next is in order with what it did before"


def test_within_a_capture_of_the_callers_the_steps_become_part_of_it(device: Device) -> None:
    x = torch.arange(3.0)
    device.call(x), device.call(x)
    device.taken()
    device.is_capturing = True
    device.graphs([x])
    assert device.taken() == ["capture for None"], "its own memory that stays zero is that of the stream"


def test_threads_get_their_own_results(device: Device) -> None:
    tensors = [torch.full((1 << 14,), float(number)) for number in range(4)]
    wrong: list[BaseException] = []

    def work(x: torch.Tensor) -> None:
        try:
            for _ in range(50):
                device.call(x)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(x,)) for x in tensors * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
