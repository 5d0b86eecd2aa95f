"""A database that is locked, full or away is waited for, and nothing that a run has found is lost or kept twice."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from prometheus_client import REGISTRY

from orchestrator import archive as archive_module
from orchestrator import testing
from orchestrator.archive import FILE_NAME, Archive
from orchestrator.serving.story import Story
from warpsmith.errors import ArchiveFault
from warpsmith.v1 import run_pb2, trial_pb2


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Archive]:
    monkeypatch.setattr(archive_module, "BUSY_MILLISECONDS", 20)
    made = Archive.in_directory(tmp_path)
    made.put_run(run_pb2.Run(id="r", task=testing.task()))
    yield made
    made.close()


def waiting() -> float:
    return REGISTRY.get_sample_value("warpsmith_archive_waiting") or 0.0


def refused() -> float:
    return REGISTRY.get_sample_value("warpsmith_archive_refused_total") or 0.0


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def add(archive: Archive, number: int) -> None:
    archive.add_trial("r", trial_pb2.Trial(number=number), run_pb2.RunEvent(number=number))


def test_what_is_found_while_the_database_is_locked_is_kept_once_when_it_is_free(
    archive: Archive, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    archive.patience_seconds = 60.0
    with closing(sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        writers = [threading.Thread(target=add, args=(archive, number)) for number in (1, 2, 3)]
        for each in writers:
            each.start()
        until(lambda: waiting() == 3)
        other.execute("ROLLBACK")
        for each in writers:
            each.join(30)
    assert [trial.number for trial in archive.trials("r")] == [1, 2, 3]
    assert [event.number for event in archive.events("r")] == [1, 2, 3]
    assert waiting() == 0
    said = [each.getMessage() for each in caplog.records]
    assert "database is locked" in said[0]
    assert "it is tried again for 60 s" in said[0]
    assert "the archive takes what is found again, after" in said[-1]


def test_nothing_is_told_of_a_trial_that_waits(archive: Archive, tmp_path: Path) -> None:
    archive.patience_seconds = 60.0
    story = Story(archive, run_pb2.Run(id="r", task=testing.task()))
    with closing(sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        writer = threading.Thread(target=story.trial_ended, args=(trial_pb2.Trial(number=1),))
        writer.start()
        until(lambda: waiting() == 1)
        assert (story.events, story.trials) == ([], [])
        other.execute("ROLLBACK")
        writer.join(30)
    assert story.events == archive.events("r")
    assert [event.trial.number for event in story.events] == [1]


def test_a_disk_that_is_full_for_a_while_fails_no_trial(archive: Archive) -> None:
    archive.patience_seconds = 60.0

    def limit(pages: int) -> Callable[[Any, Any], None]:
        return lambda connection, _: connection.execute(f"PRAGMA max_page_count={pages}")

    with closing(sqlite3.connect(archive.folder / FILE_NAME)) as connection:  # type: ignore[operator]
        (count,) = connection.execute("PRAGMA page_count").fetchone()
    full, large = limit(count), trial_pb2.Trial(number=1)
    large.verdict.detail = "x" * 200_000
    sa.event.listen(archive._engine, "connect", full)
    archive._engine.dispose()
    writer = threading.Thread(target=archive.add_trial, args=("r", large))
    writer.start()
    until(lambda: waiting() == 1)
    sa.event.remove(archive._engine, "connect", full)
    archive._engine.dispose()
    writer.join(30)
    assert archive.trials("r") == [large]


def test_patience_ends_and_the_fault_is_told(archive: Archive, tmp_path: Path) -> None:
    archive.patience_seconds = 0.3
    with closing(sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        before = refused()
        with pytest.raises(ArchiveFault, match="database is locked"):
            add(archive, 1)
    assert waiting() == 0
    add(archive, 1)
    assert refused() == before + 1


def test_a_commit_whose_answer_was_lost_is_not_made_twice(archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    archive.patience_seconds = 60.0
    written, writing = [0], archive.writing

    @contextmanager
    def answerless() -> Iterator[sa.Connection]:
        with writing() as connection:
            yield connection
        written[0] += 1
        if written[0] == 1:
            lost = sa.exc.OperationalError("COMMIT", None, Exception("server closed the connection unexpectedly"))
            raise ArchiveFault("cannot write") from lost

    monkeypatch.setattr(archive, "writing", answerless)
    add(archive, 1)
    assert written == [2]
    assert [trial.number for trial in archive.trials("r")] == [1]


def test_what_time_does_not_mend_is_told_at_once(archive: Archive) -> None:
    archive.patience_seconds = 600.0
    add(archive, 1)
    with pytest.raises(ArchiveFault, match="UNIQUE constraint failed"):
        add(archive, 1)
