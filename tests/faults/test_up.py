"""`warpsmith up` when what it keeps up is killed, or it is itself: runs under way go on, and so do who watches them."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from authority import Authority
from grpc_health.v1 import health_pb2, health_pb2_grpc
from processes import AGENTS, Place, find, optimize, place, require_result, require_uncharged, up, wait_until

from orchestrator.archive import Archive
from warpsmith.service import wait_until_healthy
from warpsmith.settings import TLS_VARIABLES
from warpsmith.transport import Tls

pytestmark = pytest.mark.faults

BACK_SECONDS = 5.0
"""In which a service that was killed answers again."""


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Place]:
    with place(tmp_path, FAKE_CALL_SECONDS="0.03") as made:
        yield made


def test_every_service_of_up_is_killed_in_turn_and_a_watched_run_ends_with_its_result(here: Place) -> None:
    services = up(here)
    search = optimize(here, "--server", "runs")
    back = dict[str, float]()
    for count, name in enumerate([*AGENTS, "orchestrator"], start=1):
        killed = time.monotonic()
        services.kill_service(name)
        services.wait_for("it is started again now", count)
        assert f"the {name} service ended with code -9" in services.said
        assert wait_until_healthy(services.address(name), 60), services.said
        back[name] = time.monotonic() - killed
    require_result(here, search)
    require_uncharged(here)
    print("\nback after " + ", ".join(f"{name} {seconds:.1f} s" for name, seconds in back.items()))
    assert max(back.values()) <= BACK_SECONDS
    assert search.said.count("the orchestrator is away: waiting for it") <= 1
    assert services.end() == 143


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_up_is_ended_and_started_again_and_a_watched_run_goes_on(here: Place, number: int) -> None:
    services = up(here)
    search = optimize(here, "--server", "runs")
    services.end(number)
    search.wait_for("the orchestrator is away: waiting for it, ")
    up(here)
    search.wait_for("taken up again after ")
    require_result(here, search)
    assert search.said.count("the orchestrator is away") == search.said.count("the orchestrator is back") == 1


def test_ctrl_c_on_up_says_of_a_run_under_way_that_it_is_kept_and_the_next_up_goes_on_with_it(here: Place) -> None:
    services = up(here)
    search = optimize(here, "--server", "runs")
    assert services.end(signal.SIGINT) == 0, services.said
    archive = Archive.in_directory(here.path / "runs")
    (run,) = archive.runs()
    count = len(archive.trials(run.id))
    archive.close()
    told = re.search(
        r"run (\S+) \(good\) is left after (\d+) trials, and kept: the next `warpsmith up` goes on with it\n",
        services.said,
    )
    assert told, services.said
    assert told[1] == run.id
    assert 3 <= int(told[2]) <= count
    assert run.message == f"left after {count} trials: the next orchestrator takes it up"
    up(here)
    search.wait_for(f"taken up again after {count} trials")
    require_result(here, search)


def test_a_command_that_is_killed_leaves_a_run_that_only_resume_goes_on_with(here: Place) -> None:
    search = optimize(here)
    assert search.end(signal.SIGKILL) == -9
    up(here)

    def is_told() -> bool:
        listed = here.start("runs")
        listed.process.wait(60)
        return "goes on with it" in listed.said

    wait_until(is_told)  # its orchestrator ends by itself, soon after
    resumed = here.start("resume", "last")
    resumed.wait_for("taken up again after ")
    assert find(resumed.process.pid, "-m impatient_orchestrator")
    require_result(here, resumed)  # who resumes is told the whole story


def test_a_bench_that_is_killed_goes_on_inside_its_module(here: Place) -> None:
    (here.path / "modules").mkdir()
    (here.path / "good.py").rename(here.path / "modules" / "good.py")
    command = ("bench", "modules", "--target", "cpu", "--budget", "5m", "--trials", "60", "--results", "results.jsonl")
    killed = here.start(*command)
    killed.wait_for("good #3 ")
    killed.end(signal.SIGKILL)
    again = here.start(*command)
    again.wait_for("taken up again after ")
    require_result(here, again)
    require_uncharged(here)
    verdicts = [json.loads(line)["verdict"] for line in (here.path / "results.jsonl").read_text().splitlines()]
    assert verdicts == ["UNDER_WAY", "PASS"]
    done = here.start(*command)
    assert done.process.wait(60) == 0
    assert "#1 " not in done.said, "there is nothing left to do"


def test_up_with_certificates_speaks_no_plain_text_and_takes_renewed_ones_in_the_midst_of_a_run(here: Place) -> None:
    first = Authority("this year's")
    tls = first.issue(here.path / "tls", "orchestrator")
    here.environment = {
        **here.environment,
        **dict(zip(TLS_VARIABLES, map(str, (tls.certificate, tls.key, tls.authority)), strict=True)),
    }
    services = up(here, "--listen", "127.0.0.1:0")
    places = [line.split()[-1] for line in services.said.splitlines() if "  " in line]
    assert len(places) == len(AGENTS) + 2
    search = optimize(here, "--server", "runs")
    for each in places:
        with grpc.insecure_channel(each) as plain, pytest.raises(grpc.RpcError) as refused:
            health_pb2_grpc.HealthStub(plain).Check(health_pb2.HealthCheckRequest())
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE, each  # type: ignore[attr-defined]
    old = tls.certificate.read_bytes()
    Authority("next year's").issue(here.path / "tls", "orchestrator")
    assert tls.certificate.read_bytes() != old
    services.kill_service("compile")  # whoever calls it again connects anew, with the new ones
    services.wait_for("it is started again now")
    require_result(here, search)
    listed = here.start("runs", "--server", places[-1])
    assert listed.process.wait(60) == 0, listed.said
    assert services.end() == 143


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda tls: tls.key.unlink(), r"tls\.key: cannot be read \(No such file or directory\); see WARPSMITH_TLS_"),
        (lambda tls: tls.certificate.write_text("none"), r"tls\.key: are no certificate with its key in PEM"),
        (lambda tls: tls.authority.write_text("none"), r"ca\.crt: holds no certificate in PEM"),
        (lambda tls: tls.authority.write_bytes(Authority("b").certificate), r"unable to get local issuer certificate"),
        (lambda tls: Authority("c").issue(tls.key.parent, "synthesis"), r"not valid for 'orchestrator'"),
    ],
)
def test_up_says_in_one_sentence_which_certificate_it_cannot_use(
    here: Place, spoil: Callable[[Tls], object], said: str
) -> None:
    tls = Authority("ours").issue(here.path / "tls", "orchestrator")
    spoil(tls)
    here.environment = dict(zip(TLS_VARIABLES, map(str, (tls.certificate, tls.key, tls.authority)), strict=True))
    services = here.start("up")
    assert services.process.wait(60) == 2, services.said
    assert len(services.said.splitlines()) == 1
    assert re.search(said, services.said), services.said
