"""What one client may have of a service, and what it can keep from others: nothing."""

from __future__ import annotations

import re
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest

from warpsmith import service, tokens
from warpsmith.errors import LimitReached, ServiceGone
from warpsmith.service import admission, handlers
from warpsmith.service.admission import Admission
from warpsmith.settings import ClientLimits, Settings
from warpsmith.v1 import optimization_service_pb2 as api
from warpsmith.v1 import optimization_service_pb2_grpc as api_grpc

EVENTS = 400
EVENT_BYTES = 100_000
"""Of all events together, more than a connection takes for who does not read."""


class Telling(api_grpc.OptimizationServiceServicer):
    """Gives what is asked for; a stream of large events ends, and then says so."""

    def __init__(self, limits: ClientLimits) -> None:
        self.admission = Admission(limits)
        self.left = threading.Event()

    def GetRun(self, request: api.GetRunRequest, context: object) -> api.GetRunResponse:
        del context
        response = api.GetRunResponse()
        response.run.id = request.run_id[:8]
        return response

    async def WatchRun(self, request: api.WatchRunRequest, context: object) -> AsyncIterator[api.WatchRunResponse]:
        del context
        try:
            for number in range(request.after + 1, EVENTS + 1):
                response = api.WatchRunResponse()
                response.event.number = number
                response.event.run.message = "x" * EVENT_BYTES
                yield response
        finally:
            self.left.set()


@pytest.fixture
def telling() -> Telling:
    return Telling(ClientLimits(runs=1, watchers=2, request_bytes=1000))


@pytest.fixture
def serving(telling: Telling, tmp_path: Path) -> Iterator[service.Serving]:
    (tmp_path / "tokens").write_text("a" * 20 + " read ann\n" + "b" * 20 + " read bob\n")
    settings = Settings(port=0, drain_seconds=0.1, token_file=tmp_path / "tokens")
    running = service.start("limits", api_grpc.add_OptimizationServiceServicer_to_server, telling, settings)
    yield running
    running.stop()


def of(serving: service.Serving, name: str, tmp_path: Path, **patience: object) -> api_grpc.OptimizationServiceStub:
    """A client that shows the token of a name."""
    (tmp_path / name).write_text(name[0] * 20)

    def stub(channel: grpc.Channel) -> api_grpc.OptimizationServiceStub:
        return api_grpc.OptimizationServiceStub(tokens.showing(channel, tmp_path / name))

    return service.dial(stub, f"127.0.0.1:{serving.port}", service.Patience(**patience))  # type: ignore[arg-type]


def watch(client: api_grpc.OptimizationServiceStub, after: int = 0) -> Iterator[int]:
    return (reply.event.number for reply in client.WatchRun(api.WatchRunRequest(run_id="r", after=after)))


def test_who_watches_too_often_is_told_whose_limit_it_is_and_others_go_on(
    serving: service.Serving, tmp_path: Path
) -> None:
    ann, bob = of(serving, "ann", tmp_path), of(serving, "bob", tmp_path)
    watches = [watch(ann), watch(ann)]
    assert [next(each) for each in watches] == [1, 1]
    said = "ann watches as often as one client may, 2 times (WARPSMITH_MOST_WATCHERS): try again in 30 s"
    with pytest.raises(LimitReached, match=f"^{re.escape(said)}$") as refused:
        next(watch(ann))
    assert refused.value.retry_seconds == 30.0
    assert next(watch(bob)) == 1
    assert list(watches[0]) == list(range(2, EVENTS + 1))
    assert next(watch(ann)) == 1


def test_a_request_that_is_too_large_for_one_client_is_refused_for_good(
    serving: service.Serving, tmp_path: Path
) -> None:
    client = of(serving, "ann", tmp_path)
    assert client.GetRun(api.GetRunRequest(run_id="r" * 900)).run.id == "rrrrrrrr"
    said = r"^ann has sent a request of 2003 bytes; one may have 1000 \(WARPSMITH_MOST_REQUEST_BYTES\)$"
    with pytest.raises(LimitReached, match=said) as refused:
        client.GetRun(api.GetRunRequest(run_id="r" * 2000))
    assert refused.value.retry_seconds == 0.0


def test_a_client_that_was_refused_for_now_says_so_and_asks_again_when_it_was_told_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission, "RETRY_SECONDS", 0.05)
    limits = Admission(ClientLimits(runs=1))
    count, heard = 1, list[str]()

    class Counting(api_grpc.OptimizationServiceServicer):
        def CreateRun(self, request: api.CreateRunRequest, context: handlers.Call) -> api.CreateRunResponse:
            del request
            limits.require_run(context.caller, count)
            return api.CreateRunResponse()

    def ended(why: str) -> None:
        nonlocal count
        heard.append(why)
        count = 0

    add = api_grpc.add_OptimizationServiceServicer_to_server
    running = service.start("limits", add, Counting(), Settings(port=0, drain_seconds=0.1))
    try:
        place = f"127.0.0.1:{running.port}"
        hasty = service.dial(api_grpc.OptimizationServiceStub, place, service.Patience(budget_seconds=0.01))
        with pytest.raises(LimitReached, match=r"^who calls without a name has as many runs"):
            hasty.CreateRun(api.CreateRunRequest())
        service.dial(api_grpc.OptimizationServiceStub, place, service.Patience(waits=ended)).CreateRun(
            api.CreateRunRequest()
        )
        assert len(heard) == 1
        assert "WARPSMITH_MOST_RUNS" in heard[0]
    finally:
        running.stop()


def test_a_call_that_sends_no_request_is_ended(serving: service.Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "SILENT_SECONDS", 0.05)
    hung_up = threading.Event()

    def nothing() -> Iterator[bytes]:
        hung_up.wait(60)
        yield from ()

    with grpc.insecure_channel(f"127.0.0.1:{serving.port}") as bare:
        shown = (("authorization", "Bearer " + "a" * 20),)
        try:
            for method in ("GetRun", "WatchRun"):
                call = bare.stream_unary(f"/warpsmith.v1.OptimizationService/{method}")
                with pytest.raises(grpc.RpcError, match="the call has sent no request within 0 s"):
                    call(nothing(), metadata=shown, timeout=30)
        finally:
            hung_up.set()


def test_a_reader_that_takes_nothing_is_sent_away_with_a_place_to_go_on_from(
    serving: service.Serving, telling: Telling, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handlers, "SLOW_SECONDS", 0.2)
    client = of(serving, "ann", tmp_path)
    slow, numbers = watch(client), []
    numbers.append(next(slow))
    assert telling.left.wait(30), "the run's events are held for nobody"
    with pytest.raises(ServiceGone, match="its reader took nothing for 0 s: ask again from its last message"):
        numbers.extend(slow)
    assert 1 < len(numbers) < EVENTS
    numbers += watch(client, after=numbers[-1])
    assert numbers == list(range(1, EVENTS + 1))
