"""Messages between real processes that are lost, doubled, late or garbage: a run ends as it would without."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
from between import Between, Fault, Forward, Message, Proxy, standing
from processes import wait_until

from orchestrator import testing
from orchestrator.archive import Archive
from orchestrator.commands import client
from orchestrator.serving.dialing import orchestrator_at
from warpsmith.errors import ServiceLate
from warpsmith.v1 import optimization_service_pb2 as messages
from warpsmith.v1 import run_pb2, verdict_pb2

pytestmark = pytest.mark.faults

TRIALS = 12
DEADLINE_SECONDS = 1.0
"""That the orchestrator waits for an agent's answer."""
BUDGET = run_pb2.Budget(wall_seconds=120, trial_count=TRIALS)
METHODS = {
    "synthesis": "SynthesizeCandidate",
    "compile": "CompileCandidate",
    "correctness": "VerifyArtifact",
    "benchmark": "MeasureArtifact",
    "reasoning": "ProposeHypotheses",
}


def lost(message: Message, _: Forward) -> bytes:
    """Never reaches the agent."""
    message.left.wait()
    return b""


def unanswered(message: Message, forward: Forward) -> bytes:
    """The agent has done its work, and nobody hears of it in time."""
    answer = forward(message.request)
    message.left.wait()
    return answer


def doubled(message: Message, forward: Forward) -> bytes:
    """Arrives twice."""
    forward(message.request)
    return forward(message.request)


def slow(message: Message, forward: Forward) -> bytes:
    """Takes most of the time that it may take."""
    answer = forward(message.request)
    message.left.wait(0.6 * DEADLINE_SECONDS)
    return answer


def garbage(_: Message, __: Forward) -> bytes:
    """Is no message."""
    return b"\xff" + random.Random(1).randbytes(200)


def empty(_: Message, __: Forward) -> bytes:
    """Is a message that says nothing."""
    return b""


FAULTS: dict[str, Fault] = {each.__name__: each for each in (lost, unanswered, doubled, slow, garbage, empty)}


def sometimes(fault: Fault, every: int) -> Fault:
    """The fault for one message of so many, the second first."""
    count = itertools.count(1)

    def chosen(message: Message, forward: Forward) -> bytes:
        return fault(message, forward) if next(count) % every == 2 else forward(message.request)

    return chosen


@pytest.fixture(scope="module")
def between(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Between]:
    with standing(tmp_path_factory.mktemp("between"), {"DEADLINE_SECONDS": str(DEADLINE_SECONDS)}) as made:
        yield made


@pytest.fixture(autouse=True)
def healed(between: Between) -> Iterator[None]:
    yield
    for proxy in between.proxies.values():
        proxy.faults.clear()


def require_whole(between: Between, run: run_pb2.Run) -> None:
    """The run has all of its trials, each program once, all of them right."""
    assert run.state == run_pb2.RUN_STATE_FASTER, f"{run.message}\n{between.log}"
    assert "ended early" not in run.message
    archive = Archive.in_directory(between.place / "runs")
    trials = archive.trials(run.id)
    archive.close()
    assert len({trial.candidate.program.digest for trial in trials}) == len(trials) == run.trial_count == TRIALS
    assert {trial.verdict.state for trial in trials} == {verdict_pb2.VERDICT_STATE_PASS}
    assert [trial.number for trial in trials] == list(range(1, TRIALS + 1))


def begin(between: Between, name: str) -> run_pb2.Run:
    return client.create(between.client, testing.task(name), BUDGET, "", fresh=True)


@pytest.mark.parametrize("fault", FAULTS)
def test_messages_to_every_agent_that_go_wrong_cost_a_run_time_and_no_candidate(between: Between, fault: str) -> None:
    rare = 10 if fault in ("lost", "unanswered", "slow") else 5
    for name, proxy in between.proxies.items():
        proxy.faults[METHODS[name]] = sometimes(FAULTS[fault], rare)
        proxy.seen.clear()
    run = begin(between, fault)
    require_whole(between, client.follow(between.client, run.id, lambda _: None))
    assert all(proxy.seen[METHODS[name]] > 1 for name, proxy in between.proxies.items()), "each had one that went wrong"
    assert between.process.poll() is None


def test_an_agent_that_says_garbage_alone_ends_a_run_with_its_name_and_nothing_is_charged(between: Between) -> None:
    between.proxies["correctness"].faults["VerifyArtifact"] = garbage
    run = begin(between, "garbage")
    ended = client.follow(between.client, run.id, lambda _: None)
    assert ended.state == run_pb2.RUN_STATE_FAILED
    assert "VerifyArtifact: INTERNAL" in ended.message
    assert ended.trial_count == 0


def test_an_answer_to_a_new_run_that_is_lost_begins_no_second_one(between: Between) -> None:
    with Proxy(between.orchestrator_address).standing() as proxy:
        proxy.faults["CreateRun"] = unanswered
        before = len(client.latest(between.client, 100))
        through = orchestrator_at(f"127.0.0.1:{proxy.port}")
        long = run_pb2.Budget(wall_seconds=120, trial_count=1000)
        request = messages.CreateRunRequest(task=testing.task("unheard"), budget=long, fresh=True)
        with pytest.raises(ServiceLate, match="CreateRun: DEADLINE_EXCEEDED"):
            through.CreateRun(request, timeout=DEADLINE_SECONDS)
        assert proxy.seen["CreateRun"] == 1
        unheard, *others = client.latest(between.client, 100)
        assert (unheard.task.name, len(others)) == ("unheard", before), "it is there to be watched, once"
        proxy.faults["CancelRun"] = doubled
        through.CancelRun(messages.CancelRunRequest(run_id=unheard.id), timeout=30)
    wait_until(lambda: client.latest(between.client, 1)[0].state == run_pb2.RUN_STATE_CANCELLED)


def test_a_watcher_whose_connection_breaks_hears_every_event_once(
    between: Between, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "PAUSES_S", (0.05,) * 1200)
    heard: list[int] = []
    run = begin(between, "watched")
    with Proxy(between.orchestrator_address).standing() as first:
        heard += first_events(first, run.id, 5)
    with Proxy(between.orchestrator_address).standing() as second:
        request = messages.WatchRunRequest(run_id=run.id, after=heard[-1])
        heard += [each.event.number for each in orchestrator_at(f"127.0.0.1:{second.port}").WatchRun(request)]
    assert heard == list(range(1, len(heard) + 1))
    require_whole(between, between.client.GetRun(messages.GetRunRequest(run_id=run.id), timeout=30).run)


def first_events(proxy: Proxy, run_id: str, count: int) -> list[int]:
    """Numbers of the first events of a run, of a stream that is left then."""
    stream = orchestrator_at(f"127.0.0.1:{proxy.port}").WatchRun(messages.WatchRunRequest(run_id=run_id))
    return [each.event.number for each in itertools.islice(stream, count)]
