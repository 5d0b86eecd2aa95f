"""What is damaged is found, what is readable is saved, and nothing of a user's is overwritten."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from orchestrator import testing
from orchestrator.archive import FILE_NAME, Archive
from orchestrator.archiving import repair
from orchestrator.commands import cli
from orchestrator.serving.ownership import Owner
from warpsmith.errors import ArchiveFault, BadInput
from warpsmith.v1 import run_pb2, trial_pb2

RUNS, TRIALS = 40, 12
HEADER = "// a header\n" * 20


def trial_of(number: int) -> trial_pb2.Trial:
    """One whose program has a header that all share."""
    trial = trial_pb2.Trial(number=number)
    trial.candidate.program.sources.add(name="kernel.cpp", text=f"kernel {number}")
    trial.candidate.program.sources.add(name="rows.hpp", text=HEADER)
    return trial


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A directory with many runs, whose file has no companions."""
    place = tmp_path / "runs"
    archive = Archive.in_directory(place)
    for number in range(RUNS):
        run = run_pb2.Run(id=f"run-{number:03}", task=testing.task(), created_at=1.0 + number, message="m" * 300)
        archive.put_run(run, run_pb2.RunEvent(number=1, run=run))
        for trial in range(1, TRIALS + 1):
            archive.add_trial(run.id, trial_of(trial), run_pb2.RunEvent(number=1 + trial))
    archive.close()
    with closing(sqlite3.connect(place / FILE_NAME)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return place


def cut_in_half(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def overwritten_pages(file: Path) -> None:
    content = bytearray(file.read_bytes())
    page = 4096
    for number in range(12, len(content) // page, 5):
        content[number * page : (number + 1) * page] = b"\xff" * page
    file.write_bytes(content)


def flipped_bytes(file: Path) -> None:
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("UPDATE trials SET message = x'ff01' WHERE number = 3")
        connection.execute("UPDATE events SET message = 5 WHERE number = 2 AND run_id = 'run-001'")
        connection.commit()


DAMAGES = [cut_in_half, overwritten_pages, flipped_bytes]


def test_a_sound_archive_is_called_so(runs: Path) -> None:
    found = repair.check(runs)
    assert found.is_sound
    assert {table.name: table.readable for table in found.tables} == {
        "runs": RUNS, "trials": RUNS * TRIALS, "events": RUNS * (TRIALS + 1), "groups": 0, "texts": 1,
    }  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda each: each.__name__)
def test_what_is_readable_is_saved_and_the_damaged_file_stays(runs: Path, damage: Callable[[Path], None]) -> None:
    file = runs / FILE_NAME
    damage(file)
    before = file.read_bytes()
    checked = repair.check(runs)
    assert not checked.is_sound
    assert file.read_bytes() == before, "to check changes nothing"
    found, aside = repair.recover(runs)
    assert aside.read_bytes() == before
    assert sorted(each.name for each in runs.iterdir() if not each.name.startswith("owner")) == [FILE_NAME, aside.name]
    assert repair.check(runs).is_sound
    counts = {table.name: table.readable for table in found.tables}
    assert counts == {table.name: table.readable for table in repair.check(runs).tables}
    assert counts["runs"] > 5
    archive = Archive.reading(runs)
    saved = archive.runs(limit=1000)
    assert len(saved) == counts["runs"]
    assert sum(len(archive.trials(run.id)) for run in saved) == counts["trials"]
    archive.close()


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda each: each.__name__)
def test_who_reads_a_damaged_archive_is_told_how_to_recover_it(runs: Path, damage: Callable[[Path], None]) -> None:
    damage(runs / FILE_NAME)
    archive = Archive.reading(runs)
    with pytest.raises((BadInput, ArchiveFault), match="`warpsmith archive recover` saves what is readable"):
        [archive.trials(run.id) for run in archive.runs(limit=1000)]
    archive.close()


def test_flipped_bytes_cost_their_rows_and_no_others(runs: Path) -> None:
    flipped_bytes(runs / FILE_NAME)
    found, _ = repair.recover(runs)
    lost = {table.name: table.damaged for table in found.tables if table.damaged}
    assert lost == {"trials": RUNS, "events": 1}
    assert {table.name: table.readable for table in found.tables}["trials"] == RUNS * (TRIALS - 1)


def test_programs_are_kept_whole_and_what_they_share_once(runs: Path) -> None:
    archive = Archive.reading(runs)
    assert archive.trials("run-003") == [trial_of(number) for number in range(1, TRIALS + 1)]
    light = archive.trials("run-003", after=4, limit=1, with_programs=False)
    assert [(each.number, list(each.candidate.program.sources)) for each in light] == [(5, [])]
    archive.close()
    assert (runs / FILE_NAME).read_bytes().count(HEADER.encode()) == 1


def test_a_trial_whose_text_is_lost_is_told_and_left_out(runs: Path) -> None:
    with closing(sqlite3.connect(runs / FILE_NAME)) as connection:
        connection.execute("UPDATE texts SET content = x'00'")
        connection.execute("UPDATE trials SET texts = 5 WHERE number = 1")
        connection.execute("UPDATE trials SET texts = '' WHERE number = 2")
        connection.commit()
    found, _ = repair.recover(runs)
    told = {table.name: (table.readable, table.damaged, table.orphaned) for table in found.tables}
    assert told["texts"] == (0, 1, 0)
    assert told["trials"] == (RUNS, 0, RUNS * (TRIALS - 1))
    archive = Archive.reading(runs)
    assert [trial.number for trial in archive.trials("run-003")] == [2]
    archive.close()


@pytest.mark.parametrize("change", ["SET texts = 5", "SET texts = x'ff'", "SET texts = texts || ' ' || texts"])
def test_a_row_that_names_texts_that_are_not_there_is_damaged(runs: Path, change: str) -> None:
    with closing(sqlite3.connect(runs / FILE_NAME)) as connection:
        connection.execute(f"UPDATE trials {change}")
        connection.commit()
    archive = Archive.reading(runs)
    with pytest.raises(BadInput, match="what is kept of run “run-003” is damaged, or not ours"):
        archive.trials("run-003")
    archive.close()


def test_trials_of_a_run_that_is_lost_are_counted(runs: Path) -> None:
    with closing(sqlite3.connect(runs / FILE_NAME)) as connection:
        connection.execute("UPDATE runs SET message = 'no bytes' WHERE id = 'run-007'")
        connection.commit()
    found, _ = repair.recover(runs)
    assert {table.name: table.orphaned for table in found.tables} == {
        "runs": 0, "trials": TRIALS, "events": TRIALS + 1, "groups": 0, "texts": 0,
    }  # fmt: skip


def test_what_holds_nothing_is_left_where_it_is(runs: Path) -> None:
    file = runs / FILE_NAME
    file.write_bytes(b"\xff" * 20_000)
    for work in (repair.check, repair.recover):
        with pytest.raises(BadInput, match=r"not even its tables can be read: .*; move it away to begin anew"):
            work(runs)
    assert file.read_bytes() == b"\xff" * 20_000


def test_an_archive_at_work_is_checked_and_copied_and_not_replaced(runs: Path, tmp_path: Path) -> None:
    archive = Archive.in_directory(runs)
    owner = Owner(archive, stays=True)
    archive.put_run(run_pb2.Run(id="new", task=testing.task(), created_at=1.0))
    assert repair.check(runs).is_sound
    copy = tmp_path / "copy" / FILE_NAME
    copy.parent.mkdir()
    assert repair.back_up(runs, copy) == copy.stat().st_size
    with pytest.raises(BadInput, match="an orchestrator is at work on it"):
        repair.recover(runs)
    owner.close()
    archive.close()
    kept = Archive.reading(copy.parent)
    assert len(kept.runs(limit=1000)) == RUNS + 1
    kept.close()
    with pytest.raises(BadInput, match="is there already; a back-up never replaces a file"):
        repair.back_up(runs, copy)


def test_a_strangers_programs_are_not_run(runs: Path) -> None:
    with closing(sqlite3.connect(runs / FILE_NAME)) as connection:
        connection.executescript("DROP TABLE groups; CREATE VIEW groups AS SELECT randomblob(9) AS message, 1 AS rowid")
    for work in (repair.check, repair.recover):
        with pytest.raises(BadInput, match="is no plain table or index"):
            work(runs)


def test_the_commands_say_what_they_found(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["warpsmith", "archive", *arguments, "--runs", str(runs)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    code, out, _ = command("check")
    assert (code, "trials        480 readable\n" in out) == (0, True)
    assert command("backup", str(tmp_path / "a.sqlite3"))[0] == 0
    flipped_bytes(runs / FILE_NAME)
    code, out, err = command("check")
    assert (code, "trials        440 readable, 40 damaged\n" in out) == (1, True)
    assert "`warpsmith archive recover` takes what is readable" in err
    code, out, _ = command("recover")
    assert code == 0
    assert f"{runs}/{FILE_NAME}.damaged-" in out
    assert command("check")[0] == 0
