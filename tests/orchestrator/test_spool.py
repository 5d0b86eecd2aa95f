"""What waits for a late archive is in a file: whoever goes on with the run commits it once, or it is set aside."""

from __future__ import annotations

import fcntl
import logging
import os
import resource
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa
from prometheus_client import REGISTRY

from orchestrator import archive as archive_module
from orchestrator import testing
from orchestrator.archive import FILE_NAME, Archive
from orchestrator.archiving import spool as spool_module
from orchestrator.archiving import writer
from orchestrator.archiving.spool import Record, Spool
from orchestrator.archiving.tables import RUNS
from orchestrator.commands import cli
from orchestrator.serving import taking_up
from orchestrator.serving.ownership import Owner
from orchestrator.serving.story import Story
from warpsmith.errors import ArchiveFault, RunLost
from warpsmith.v1 import run_pb2, trial_pb2

MEBIBYTE = 1 << 20


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Archive]:
    monkeypatch.setattr(archive_module, "BUSY_MILLISECONDS", 20)
    monkeypatch.setattr(writer, "LATE_SECONDS", 0.1)
    made = Archive.in_directory(tmp_path)
    made.patience_seconds, made.spool = 60.0, Spool(tmp_path / "spool", MEBIBYTE)
    yield made
    made.close()


@pytest.fixture
def either(database_url: str, tmp_path: Path) -> Iterator[Archive]:
    """Of SQLite or of PostgreSQL."""
    made = Archive(database_url)
    made.spool = Spool(tmp_path / "spool", MEBIBYTE)
    yield made
    made.close()


@contextmanager
def locked(archive: Archive) -> Iterator[None]:
    with closing(sqlite3.connect(archive.folder / FILE_NAME, isolation_level=None)) as other:  # type: ignore[operator]
        other.execute("BEGIN EXCLUSIVE")
        yield
        other.execute("ROLLBACK")


def run_of(archive: Archive) -> run_pb2.Run:
    """A run that is searched, in the archive."""
    run = run_pb2.Run(id="r", task=testing.task(), state=run_pb2.RUN_STATE_SEARCHING)
    run.budget.wall_seconds = 60
    archive.put_run(run)
    return run


def trial_of(number: int) -> trial_pb2.Trial:
    trial = trial_pb2.Trial(number=number)
    trial.candidate.program.digest = f"{number:064}"
    trial.candidate.program.sources.add(name="kernel.cpp", text=f"// {number}")
    trial.candidate.program.sources.add(name="shared.hpp", text="// of all")
    return trial


def left_with(archive: Archive, count: int = 3, *, run: bool = True) -> Path:
    """The file of an orchestrator that was killed with so many trials waiting; its run is there unless it says not."""
    owner = Owner(archive, stays=True)
    if run:
        run_of(archive)
    assert archive.spool is not None
    file = archive.spool.begin("r", owner.name, 0)
    for number in range(1, count + 1):
        assert file.add(Record(trial_of(number), run_pb2.RunEvent(number=number, trial=trial_of(number))))
    file.close()
    owner.close()
    return file.path


def taken_up(archive: Archive) -> Story:
    """By the next orchestrator."""
    owner = Owner(archive, stays=True)
    ((run_id, before),) = owner.left()
    story = taking_up.taken_up(archive, owner, run_id, before)
    owner.close()
    return story


def numbers(archive: Archive) -> list[int]:
    assert [event.number for event in archive.events("r")] == [trial.number for trial in archive.trials("r")]
    return [trial.number for trial in archive.trials("r")]


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def until(is_so: Callable[[], bool]) -> None:
    ended = threading.Event()
    for _ in range(2000):
        if is_so():
            return
        ended.wait(0.01)
    raise AssertionError


def sample(name: str) -> float:
    return REGISTRY.get_sample_value(name) or 0.0


# ---- while an archive is late --------------------------------------------------------------------------


def test_a_healthy_archive_needs_no_file(archive: Archive, tmp_path: Path) -> None:
    story = Story(archive, run_of(archive))
    story.trial_ended(trial_of(1))
    assert numbers(archive) == [1]
    assert not (tmp_path / "spool").exists()


def test_a_run_goes_on_while_its_trials_wait_in_a_file_and_nothing_is_told_of_them(archive: Archive) -> None:
    assert archive.spool is not None
    story = Story(archive, run_of(archive))
    with locked(archive):
        for number in range(1, 6):
            story.trial_ended(trial_of(number))
        (file,) = archive.spool.files()
        assert [record.message for record in spool_module.read(file).records] == list(map(trial_of, range(1, 6)))
        assert (story.events, story.trials) == ([], [])
        assert sample("warpsmith_spool_records") == 5
        assert sample("warpsmith_spool_bytes") > 0
    ended = run_pb2.Run(id="r", task=testing.task(), state=run_pb2.RUN_STATE_NO_FASTER)
    story.run_changed(ended)
    assert archive.run("r").state == run_pb2.RUN_STATE_NO_FASTER
    assert archive.trials("r") == list(map(trial_of, range(1, 6)))
    assert archive.events("r") == story.events
    assert archive.spool.files() == []
    assert (sample("warpsmith_spool_records"), sample("warpsmith_spool_bytes")) == (0, 0)


def test_what_is_taken_from_a_trial_after_it_was_written_is_kept(archive: Archive) -> None:
    story, trial = Story(archive, run_of(archive)), trial_of(1)
    with locked(archive):
        story.trial_ended(trial)
        del trial.candidate.program.sources[:]
    story.run_changed(run_pb2.Run(id="r", task=testing.task(), state=run_pb2.RUN_STATE_NO_FASTER))
    assert archive.trials("r") == [trial_of(1)]
    assert not story.trials[0].candidate.program.sources, "memory need not hold it"


def test_a_full_spool_says_its_bound_once_and_the_run_waits(
    archive: Archive, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    archive.spool = Spool(tmp_path / "spool", 1000)
    story = Story(archive, run_of(archive))
    with locked(archive):
        ended = threading.Event()

        def search() -> None:
            for number in range(1, 9):
                story.trial_ended(trial_of(number))
            ended.set()

        thread = in_thread(search)
        until(lambda: "of at most 1000 bytes" in caplog.text)
        (file,) = archive.spool.files()
        assert 0 < len(spool_module.read(file).records) < 8
        assert not ended.is_set()
        assert file.stat().st_size <= 1000
    thread.join(30)
    assert numbers(archive) == list(range(1, 9))
    assert caplog.text.count("takes nothing") == 1
    assert archive.spool.files() == []


def test_a_folder_that_cannot_be_written_is_said_once_and_the_run_waits(
    archive: Archive, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "spool").write_text("in its place")
    story = Story(archive, run_of(archive))
    with locked(archive):
        thread = in_thread(lambda: [story.trial_ended(trial_of(number)) for number in (1, 2, 3)])
        until(lambda: "takes nothing" in caplog.text)
        assert thread.is_alive()
    thread.join(30)
    assert numbers(archive) == [1, 2, 3]
    assert caplog.text.count("takes nothing") == 1


def test_a_disk_that_fills_in_the_midst_of_a_record_leaves_those_before_it(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool", MEBIBYTE)
    file = spool.begin("r", "stays-1", 0)
    records = [Record(trial_of(number), run_pb2.RunEvent(number=number)) for number in (1, 2)]
    assert file.add(records[0])
    before, limits = file.path.stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (before + 10, limits[1]))
    try:
        assert not file.add(records[1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.path.stat().st_size == before
    assert file.add(records[1])
    assert spool_module.read(file.path).records == records
    file.close()


def test_what_is_found_is_kept_when_patience_has_ended_and_the_archive_is_back(archive: Archive) -> None:
    archive.patience_seconds = 0.3
    story, failed = Story(archive, run_of(archive)), threading.Event()

    def search() -> None:
        for number in range(1, 1000):
            try:
                story.trial_ended(trial_of(number))
            except ArchiveFault:
                failed.set()
                return

    with locked(archive):
        thread = in_thread(search)
        assert failed.wait(30)
    thread.join(30)
    story.run_changed(run_pb2.Run(id="r", task=testing.task(), state=run_pb2.RUN_STATE_FAILED))
    count = len(archive.trials("r"))
    assert count > 1
    assert [trial.number for trial in archive.trials("r")] == list(range(1, count + 1))
    assert archive.events("r") == story.events
    assert story.ended
    assert story.is_archived


def test_a_run_that_is_left_while_its_archive_is_late_says_so_in_the_file(archive: Archive) -> None:
    owner = Owner(archive, stays=True)
    story = Story(archive, run_of(archive))
    with locked(archive):
        story.trial_ended(trial_of(1))
        story.leave("left after 0 trials")
        with pytest.raises(RunLost):
            story.trial_ended(trial_of(2))
    owner.close()
    story = taken_up(archive)
    assert [trial.number for trial in story.trials] == [1]
    assert archive.run("r").message == "left after 0 trials"
    assert [event.number for event in archive.events("r")] == [1, 2]
    assert story.first == 3


# ---- who goes on with it -------------------------------------------------------------------------------


def test_the_next_orchestrator_has_every_trial_once(either: Archive) -> None:
    file = left_with(either)
    story = taken_up(either)
    assert [trial.number for trial in story.trials] == numbers(either) == [1, 2, 3]
    assert story.first == 4
    assert either.trials("r") == list(map(trial_of, (1, 2, 3)))
    assert not file.exists()


def test_what_the_archive_had_before_the_kill_is_not_written_twice(archive: Archive) -> None:
    left_with(archive)
    archive.owner = str(archive.rows(sa.select(RUNS.c.owner))[0].owner)
    archive.add_trial("r", trial_of(1), run_pb2.RunEvent(number=1, trial=trial_of(1)))
    taken_up(archive)
    assert numbers(archive) == [1, 2, 3]


def test_a_delivery_that_fails_is_made_again(archive: Archive) -> None:
    file = left_with(archive)
    assert archive.spool is not None
    with locked(archive), pytest.raises(ArchiveFault, match="locked"):
        archive.spool.deliver_all(archive.writing)
    assert file.exists()
    archive.spool.deliver_all(archive.writing)
    assert numbers(archive) == [1, 2, 3]


def test_a_run_that_another_went_on_with_meanwhile_keeps_its_own_trials_and_the_file_is_set_aside(
    either: Archive, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = sample("warpsmith_spool_set_aside_total")
    file = left_with(either)
    spool, either.spool = either.spool, None  # it has a folder of its own
    assert spool is not None
    taken_up(either).trial_ended(trial_of(9))
    spool.deliver_all(either.writing)
    assert [trial.number for trial in either.trials("r")] == [9]
    assert not file.exists()
    aside = tmp_path / "spool" / "r.aside"
    assert len(spool_module.read(aside).records) == 3
    assert f"{file}: run r has been taken up since, so its 3 records do not count; it is set aside as r.aside" in (
        caplog.text
    )
    assert sample("warpsmith_spool_set_aside_total") == before + 1


def test_a_run_that_is_lost_while_its_trials_wait_has_them_set_aside(archive: Archive, tmp_path: Path) -> None:
    story = Story(archive, run_of(archive))
    with locked(archive):
        story.trial_ended(trial_of(1))
        archive.owner = "another"
    until(lambda: story.is_left)
    assert archive.trials("r") == []
    assert (tmp_path / "spool" / "r.aside").exists()


def test_what_is_refused_at_once_leaves_no_file(archive: Archive, tmp_path: Path) -> None:
    story = Story(archive, run_of(archive))
    archive.owner = "another"
    with pytest.raises(RunLost):
        story.trial_ended(trial_of(1))
    assert story.is_left
    assert not (tmp_path / "spool").exists()


def test_a_second_file_of_a_run_that_is_set_aside_replaces_none(archive: Archive, tmp_path: Path) -> None:
    for _ in range(2):
        file = left_with(archive, run=not (tmp_path / "spool").exists())
        file.write_bytes(b"garbage")
        assert archive.spool is not None
        archive.spool.deliver_all(archive.writing)
    assert sorted(each.name for each in (tmp_path / "spool").iterdir()) == ["r.2.aside", "r.aside"]


@pytest.mark.parametrize("cut", [1, 5, 60])
def test_a_torn_last_record_is_cut_off(archive: Archive, cut: int, caplog: pytest.LogCaptureFixture) -> None:
    file = left_with(archive)
    os.truncate(file, file.stat().st_size - cut)
    taken_up(archive)
    assert numbers(archive) == [1, 2]
    assert "no whole record, and are cut off" in caplog.text
    assert not file.exists()


@pytest.mark.parametrize("garbage", [b"", b"\0" * 100, b"warpsmith spool 1\n", b"warpsmith spool 2\n" + b"x" * 99])
def test_a_file_that_is_no_spool_is_set_aside_in_one_sentence(
    archive: Archive, garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    file = left_with(archive)
    file.write_bytes(garbage)
    caplog.clear()
    taken_up(archive)
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR] == [
        f"{file}: it is no spool of ours; it is set aside as r.aside"
    ]
    assert file.with_suffix(".aside").read_bytes() == garbage


def test_of_a_file_that_is_damaged_in_its_midst_what_comes_before_counts(archive: Archive) -> None:
    file = left_with(archive)
    content = bytearray(file.read_bytes())
    place = content.index(b"// 2")
    content[place] ^= 1
    file.write_bytes(content)
    taken_up(archive)
    assert numbers(archive) == [1]
    assert file.with_suffix(".aside").exists()


def test_a_file_that_somebody_writes_is_left_alone(archive: Archive) -> None:
    file = left_with(archive)
    with file.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert archive.spool is not None
        archive.spool.deliver_all(archive.writing)
        assert file.exists()
    archive.spool.deliver_all(archive.writing)
    assert numbers(archive) == [1, 2, 3]


def test_a_file_whose_writer_is_ending_is_waited_for_before_its_run_is_taken_up(archive: Archive) -> None:
    file = left_with(archive)
    stories: list[Story] = []
    with file.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        owner = Owner(archive, stays=True)
        ((run_id, before),) = owner.left()
        thread = in_thread(lambda: stories.append(taking_up.taken_up(archive, owner, run_id, before)))
        thread.join(0.1)
        assert archive.trials("r") == []
    thread.join(30)
    owner.close()
    assert [trial.number for trial in stories[0].trials] == [1, 2, 3]


def test_a_folder_in_which_nothing_can_be_removed_stops_nobody(
    archive: Archive, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = left_with(archive)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    assert archive.spool is not None
    for _ in range(3):
        archive.spool.deliver_all(archive.writing)
    assert numbers(archive) == [1, 2, 3]
    assert file.exists()
    assert caplog.text.count("cannot be read or cleared") == 1


def test_a_folder_that_others_can_write_is_not_believed(archive: Archive, tmp_path: Path) -> None:
    left_with(archive)
    (tmp_path / "spool").chmod(0o777)
    assert archive.spool is not None
    archive.spool.deliver_all(archive.writing)
    assert archive.trials("r") == []


def test_check_tells_what_waits_and_what_was_set_aside(
    archive: Archive, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    left_with(archive)
    (tmp_path / "spool" / "old.aside").write_text("garbage")
    monkeypatch.setattr("sys.argv", ["warpsmith", "archive", "check", "--runs", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    said = capsys.readouterr().out.replace("\n", " ")
    assert "old.aside: it is no spool of ours; set aside" in said
    assert "r.spool: trials 1 to 3 of run " in said
    assert "; waits for the archive" in said


def test_a_file_of_a_run_that_no_archive_has_is_set_aside(archive: Archive) -> None:
    file = left_with(archive, run=False)
    assert archive.spool is not None
    archive.spool.deliver_all(archive.writing)
    assert file.with_suffix(".aside").exists()
