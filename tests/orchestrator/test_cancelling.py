"""Runs of others that their users want no more of: under way elsewhere, left, or taken up unasked."""

from __future__ import annotations

from pathlib import Path

import pytest
from left_runs import at_trial, ended, hosted, left

from orchestrator import testing
from orchestrator.archive import Archive
from orchestrator.commands import cli, client
from orchestrator.serving import ownership, taking_up
from orchestrator.serving.ownership import Owner
from warpsmith.v1 import run_pb2


@pytest.mark.parametrize("stays", [True, False])
def test_a_run_of_one_command_that_is_gone_is_cancelled_at_once_and_can_be_resumed(
    archive: Archive, stays: bool
) -> None:
    left(archive, at_trial(4), owner=Owner(archive, stays=False))
    with hosted(archive, world := testing.World(), stays=stays) as host:
        stopped = host.cancel("left")
        assert stopped == archive.run("left") == host.cancel("left")
        assert (stopped.state, stopped.awaits_resume) == (run_pb2.RUN_STATE_CANCELLED, False)
        assert stopped.message.startswith("stopped by the user after its orchestrator had ended")
        assert (stopped.best_trial > 0, stopped.best.timing.faster) == (True, False)
        assert stopped.best.candidate.program.sources
        assert [event.number for event in archive.events("left")] == list(range(1, len(archive.events("left")) + 1))
        assert not world.calls["VerifyArtifact"]
        host.resume("left")
        assert ended(host).state == run_pb2.RUN_STATE_FASTER


def test_who_cancels_a_run_that_is_taken_up_unasked_has_its_best_judged(archive: Archive) -> None:
    left(archive, at_trial(3))
    owner = Owner(archive, stays=True)
    asked = taking_up.cancelled(archive, owner, "left")
    assert (asked.state, asked.message) == (
        run_pb2.RUN_STATE_SEARCHING,
        "left when its orchestrator ended: the next one takes it up by itself",
    )
    assert not asked.awaits_resume
    owner.close()
    archive.owner = ""
    with hosted(archive, testing.World()) as host:
        run = ended(host)
    assert run.state == run_pb2.RUN_STATE_CANCELLED
    assert (run.trial_count, run.best.timing.faster) == (3, True)


def test_a_run_that_is_under_way_elsewhere_is_cancelled_there(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "RENEW_SECONDS", 0.05)
    endless = testing.World(choices={"author": [f"c{number}" for number in range(10_000)]}, seconds=0.01)
    with hosted(archive, endless) as host, hosted(archive, testing.World()) as other:
        run = host.create(testing.task(), run_pb2.Budget(wall_seconds=600), "exhaustive", fresh=True)
        for event in testing.heard(host.watch(run.id, 0)):
            if event.trial.number == 2:
                assert other.cancel(run.id).id == run.id
        assert host.run(run.id).state == run_pb2.RUN_STATE_CANCELLED


def test_who_reads_a_directory_sees_whether_the_orchestrator_of_a_run_lives(tmp_path: Path) -> None:
    archive = Archive.in_directory(tmp_path)
    owner = Owner(archive, stays=False)
    archive.put_run(run_pb2.Run(id="r", task=testing.task(), state=run_pb2.RUN_STATE_SEARCHING, message="searching"))
    with client.reading("", tmp_path) as orchestrator:
        assert client.latest(orchestrator, 9)[0].message == "searching"
        owner.close()
        (run,) = client.latest(orchestrator, 9)
    assert (run.message, run.awaits_resume) == (
        "left when its orchestrator ended: `warpsmith resume r` goes on with it",
        True,
    )
    archive.close()


def test_warpsmith_cancel_ends_what_was_left_where_no_orchestrator_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = Archive.in_directory(tmp_path)
    for stays in (False, True):
        left(archive, at_trial(2), owner=Owner(archive, stays=stays), id=f"left-{stays}")
        monkeypatch.setattr("sys.argv", ["warpsmith", "cancel", f"left-{stays}", "--runs", str(tmp_path)])
        with pytest.raises(SystemExit) as exited:
            cli.main()
        assert (exited.value.code, capsys.readouterr().out) == (0, f"left-{stays}: CANCELLED\n")
        assert archive.run(f"left-{stays}").state == run_pb2.RUN_STATE_CANCELLED
    archive.close()
