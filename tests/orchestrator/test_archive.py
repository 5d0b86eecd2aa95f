"""The archive: what is kept, found again, reused, and what happens when nothing can be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator import testing
from orchestrator.archive import FILE_NAME, Archive
from warpsmith.errors import ArchiveFault, BadInput, NotFound
from warpsmith.v1 import candidate_pb2, run_pb2, timing_pb2, trial_pb2, verdict_pb2


def run_of(identifier: str, created_at: float = 1.0, speedup: float = 0.0) -> run_pb2.Run:
    run = run_pb2.Run(id=identifier, task=testing.task(), created_at=created_at, device=timing_pb2.Device(name="fake"))
    if speedup:
        run.best.CopyFrom(trial_of(1, speedup, "author"))
    return run


def trial_of(number: int, speedup: float, *operations: str) -> trial_pb2.Trial:
    return trial_pb2.Trial(
        number=number,
        candidate=candidate_pb2.Candidate(moves=[testing.move(each) for each in operations]),
        verdict=verdict_pb2.Verdict(state=verdict_pb2.VERDICT_STATE_PASS),
        timing=timing_pb2.Timing(speedup_fastest=timing_pb2.Speedup(median=speedup)),
    )


def test_runs_trials_and_events_come_back_in_order(database_url: str) -> None:
    archive = Archive(database_url)
    archive.put_run(run_of("a", 1.0))
    archive.put_run(run_of("b", 2.0))
    for number in (2, 1):
        archive.add_trial("a", trial_of(number, 1.5, "author"), run_pb2.RunEvent(number=number))
    assert [run.id for run in archive.runs()] == ["b", "a"]
    assert [trial.number for trial in archive.trials("a")] == [1, 2]
    assert [event.number for event in archive.events("a", after=1)] == [2]
    archive.close()


def test_a_run_is_found_by_the_beginning_of_its_identifier(database_url: str) -> None:
    archive = Archive(database_url)
    for place, name in enumerate(("2026-ab", "2026-cd")):
        archive.put_run(run_of(name, place))
    assert archive.run("2026-c").id == "2026-cd"
    assert archive.run("last").id == "2026-cd"
    with pytest.raises(NotFound, match="several runs"):
        archive.run("2026")
    with pytest.raises(NotFound, match="no run 'x'"):
        archive.run("x")
    archive.close()


def test_the_database_survives_a_power_cut(tmp_path: Path) -> None:
    archive = Archive.in_directory(tmp_path)
    with archive._engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2
    archive.close()


def test_known_moves_put_winners_first_and_repeat_nothing(database_url: str) -> None:
    archive = Archive(database_url)
    archive.put_run(run_of("a", speedup=1.5))
    archive.add_trial("a", trial_of(1, 1.6, "author"))
    archive.add_trial("a", trial_of(2, 3.0, "author", "tile"))
    archive.add_trial("a", trial_of(3, 0.5, "tile"))
    known = archive.known_moves(testing.task().digest, "fake")
    assert [[move.operation for move in moves] for moves in known] == [["author"], ["author", "tile"]]
    assert archive.known_moves(testing.task().digest, "another device") == []
    archive.close()


def test_a_directory_that_cannot_be_made_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be written"):
        Archive.in_directory(tmp_path / "file" / "runs")


def test_a_full_disk_is_one_clear_error_and_what_is_there_stays_readable(tmp_path: Path) -> None:
    archive = Archive.in_directory(tmp_path)
    archive.put_run(run_of("a"))
    with archive._engine.connect() as connection:
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
        connection.exec_driver_sql(f"PRAGMA max_page_count={pages}")
    big = trial_of(1, 2.0, "author")
    big.hypothesis.rationale = "x" * 1_000_000
    with pytest.raises(ArchiveFault, match=r"full.*stays readable"):
        archive.add_trial("a", big)
    assert archive.run("a").id == "a"
    archive.close()
    reader = Archive.reading(tmp_path)
    assert reader.run("a").id == "a"
    reader.close()


def test_reading_needs_no_right_to_write(tmp_path: Path) -> None:
    archive = Archive.in_directory(tmp_path)
    archive.put_run(run_of("a"))
    archive.close()
    reader = Archive.reading(tmp_path)
    assert reader.runs()[0].id == "a"
    with pytest.raises(ArchiveFault, match="readonly"):
        reader.put_run(run_of("b"))
    reader.close()


def test_a_directory_without_runs_says_so(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no runs are kept here"):
        Archive.reading(tmp_path)


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"not a database" * 100)
    with pytest.raises(ArchiveFault, match="not a database"):
        Archive.in_directory(tmp_path)
