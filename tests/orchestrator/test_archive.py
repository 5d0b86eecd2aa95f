"""The archive: what is kept, found again, reused, and what happens when nothing can be written."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from google.protobuf.message import Message

from orchestrator import archive as kept
from orchestrator import testing
from orchestrator.archive import FILE_NAME, Archive
from orchestrator.commands import report
from orchestrator.trust import record
from warpsmith import digest
from warpsmith.errors import ArchiveFault, BadInput, NotFound
from warpsmith.v1 import candidate_pb2, run_pb2, timing_pb2, trial_pb2, verdict_pb2


def run_of(
    identifier: str, created_at: float = 1.0, speedup: float = 0.0, *, task: str = "fake", shape: str = ""
) -> run_pb2.Run:
    run = run_pb2.Run(
        id=identifier,
        task=testing.task(task),
        created_at=created_at,
        device=timing_pb2.Device(name="fake"),
        shape_digest=shape,
    )
    if speedup:
        run.best.CopyFrom(trial_of(1, speedup, "author"))
    return run


def trial_of(number: int, speedup: float, *names: str) -> trial_pb2.Trial:
    return trial_pb2.Trial(
        number=number,
        candidate=candidate_pb2.Candidate(moves=[testing.move(each) for each in names]),
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
    assert known(archive, run_of("b")) == [["author"], ["author", "tile"]]
    elsewhere = run_of("b")
    elsewhere.device.name = "another device"
    assert known(archive, elsewhere) == []
    archive.close()


def known(archive: Archive, run: run_pb2.Run) -> list[list[str]]:
    """The names of the moves that a run begins with."""
    return [list(map(testing.name_of, moves)) for moves in archive.known_moves(run)]


def test_what_won_a_task_of_the_same_shape_comes_after_what_won_the_task_itself(database_url: str) -> None:
    archive = Archive(database_url)
    for name, speedup, moved in (("alike", 3.0, "tile"), ("own", 1.5, "author"), ("other", 9.0, "split")):
        shape = "another shape" if name == "other" else "shape"
        archive.put_run(run_of(name, task="fake" if name == "own" else name, shape=shape))
        archive.add_trial(name, trial_of(1, speedup, moved))
    archive.add_trial("alike", trial_of(2, 2.0, "author"))
    assert known(archive, run_of("new", shape="shape")) == [["author"], ["tile"]], "each once, the other shape never"
    assert known(archive, run_of("new", task="unseen", shape="shape")) == [["tile"], ["author"]]
    assert known(archive, run_of("new", task="unseen")) == [], "runs without a shape are not of one shape"
    elsewhere = run_of("new", shape="shape")
    elsewhere.device.name = "another device"
    assert known(archive, elsewhere) == []
    archive.close()


def test_a_task_with_enough_of_its_own_is_not_filled_up(database_url: str) -> None:
    archive = Archive(database_url)
    for name in ("fake", "alike"):
        archive.put_run(run_of(name, task=name, shape="shape"))
        for number in range(1, 5):
            archive.add_trial(name, trial_of(number, 1.0 + number, f"{name}_{number}"))
    found = known(archive, run_of("new", shape="shape"))
    assert found == [["fake_4"], ["fake_3"], ["fake_2"]]
    assert len(found) == kept.KNOWN_COUNT
    archive.close()


def test_a_kernel_that_was_written_for_one_task_is_not_tried_on_another_of_its_shape(database_url: str) -> None:
    archive = Archive(database_url)
    archive.put_run(run_of("alike", task="alike", shape="shape"))
    archive.add_trial("alike", trial_of(1, 3.0, "author", "write"))
    archive.add_trial("alike", trial_of(2, 2.0, "author"))
    assert known(archive, run_of("new", shape="shape")) == [["author"]]
    assert known(archive, run_of("new", task="alike", shape="shape")) == [["author", "write"], ["author"]]
    archive.close()


def test_baselines_are_known_of_the_latest_run_that_timed_them_on_the_same_device(database_url: str) -> None:
    archive = Archive(database_url)
    here = timing_pb2.Environment(device="fake", driver="580", torch="2.13.0", thread_count=2)

    def put(name: str, created_at: float, median_ns: float, *, is_kept: bool = False, **other: object) -> None:
        run = run_of(name, created_at)
        run.reference.arms.add(kind=timing_pb2.ARM_KIND_EAGER, median_ns=median_ns)
        run.reference.is_kept = is_kept
        run.reference.environment.CopyFrom(here)
        for field, value in other.items():
            setattr(run.reference.environment, field, value)
        archive.put_run(run)

    digest = run_of("new").task.digest
    assert archive.known_reference(digest, here) is None
    put("first", 1.0, 1.0)
    put("latest", 2.0, 2.0, seed=7)
    put("scaled", 3.0, 3.0, is_kept=True)
    put("another driver", 4.0, 4.0, driver="590")
    put("another torch", 5.0, 5.0, torch="2.14.0")
    put("fewer threads", 6.0, 6.0, thread_count=1)
    archive.put_run(run_of("ended early", 7.0))
    archive.put_run(run_of("another task", 8.0, task="other"))
    found = archive.known_reference(digest, here)
    assert found is not None
    assert found.arms[0].median_ns == 2.0
    assert archive.known_reference("nothing", here) is None
    archive.close()


OLD_TABLES = sa.MetaData()
"""The archive as it was made before runs had a shape."""
OLD_RUNS = sa.Table(
    "runs",
    OLD_TABLES,
    sa.Column("id", sa.String(40), primary_key=True),
    sa.Column("task_digest", sa.String(64), nullable=False, index=True),
    sa.Column("task_name", sa.Text, nullable=False),
    sa.Column("target", sa.Integer, nullable=False),
    sa.Column("device", sa.Text, nullable=False),
    sa.Column("state", sa.Integer, nullable=False),
    sa.Column("created_at", sa.Float, nullable=False, index=True),
    sa.Column("speedup", sa.Float, nullable=False),
    sa.Column("message", sa.LargeBinary, nullable=False),
)


def add_as_before(connection: sa.Connection, identifier: str) -> None:
    """What an orchestrator of before writes."""
    run = run_of(identifier, speedup=2.0)
    row = {"id": run.id, "task_digest": run.task.digest, "task_name": "fake", "target": 1, "device": "fake", "state": 1}
    connection.execute(
        sa.insert(OLD_RUNS), {**row, "created_at": 1.0, "speedup": 2.0, "message": run.SerializeToString()}
    )


def old_archive(url: str) -> sa.Engine:
    """An archive of before with one run in it."""
    engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        OLD_TABLES.create_all(connection)
        add_as_before(connection, "old")
    return engine


def test_an_archive_of_an_older_release_keeps_its_runs_and_learns_shapes(database_url: str) -> None:
    before = old_archive(database_url)
    for round_number in range(2):  # the second time there is nothing to add
        archive = Archive(database_url)
        assert archive.run("old").id == "old"
        assert known(archive, run_of("new", shape="shape")) == [["author"]]
        assert known(archive, run_of("new", task="unseen", shape="shape")) == [["author"]] * round_number
        assert known(archive, run_of("new", task="unseen")) == [], "the shape of the old run is unknown"
        archive.put_run(run_of("alike", speedup=3.0, task="alike", shape="shape"))
        assert known(archive, run_of("new", task="unseen", shape="shape")) == [["author"]]
        archive.close()
    assert "ix_runs_shape_digest" in {index["name"] for index in sa.inspect(before).get_indexes("runs")}
    with before.begin() as connection:
        add_as_before(connection, "later")  # the older release is still there
    before.dispose()
    archive = Archive(database_url)
    assert {run.id for run in archive.runs()} == {"old", "alike", "later"}
    archive.close()


def test_an_archive_of_an_older_release_is_read_without_being_changed(tmp_path: Path) -> None:
    old_archive(f"sqlite:///{tmp_path / FILE_NAME}").dispose()
    before = (tmp_path / FILE_NAME).read_bytes()
    reader = Archive.reading(tmp_path)
    assert reader.run("last").id == "old"
    reader.close()
    assert (tmp_path / FILE_NAME).read_bytes() == before


def test_an_archive_to_which_a_later_release_added_a_column_and_a_table_is_read_and_written(tmp_path: Path) -> None:
    Archive.in_directory(tmp_path).close()
    later = sa.MetaData()
    sa.Table(
        "notes", later, sa.Column("of", sa.String(40), primary_key=True), sa.Column("at", sa.BigInteger, index=True)
    )
    engine = sa.create_engine(f"sqlite:///{tmp_path / FILE_NAME}")
    with engine.begin() as connection:
        later.create_all(connection)
        connection.exec_driver_sql("ALTER TABLE runs ADD COLUMN pages INTEGER DEFAULT '0' NOT NULL")
    engine.dispose()
    archive = Archive.in_directory(tmp_path)
    archive.put_run(run_of("a"))
    archive.close()
    reader = Archive.reading(tmp_path)
    assert reader.run("last").id == "a"
    reader.close()


EARLIER = json.loads((Path(__file__).parent / "earlier_release.json").read_text())
"""What an archive held before arms, flags, engines and stages were enums, and what the release of then printed."""


def earlier_archive(tmp_path: Path) -> Archive:
    """An archive with the rows that the earlier release wrote."""
    archive = Archive(f"sqlite:///{tmp_path / FILE_NAME}")
    run = run_pb2.Run.FromString(base64.b64decode(EARLIER["run"]))
    archive.put_run(run)
    for text in EARLIER["trials"]:
        archive.add_trial(run.id, trial_pb2.Trial.FromString(base64.b64decode(text)))
    for number, text in enumerate(EARLIER["events"], 1):
        event = run_pb2.RunEvent.FromString(base64.b64decode(text))
        event.number = number
        archive.put_run(run, event)
    return archive


def test_what_an_earlier_release_archived_opens_and_shows_the_same(tmp_path: Path) -> None:
    archive, printed = earlier_archive(tmp_path), EARLIER["printed"]
    run = archive.run("last")
    trials = archive.trials(run.id)
    assert report.as_json(run) == printed["json"]
    assert report.row(run) == printed["row"]
    assert report.funnel(trials) == printed["funnel"]
    assert [report.trial_line(trial) for trial in trials] == printed["trials"]
    assert [report.as_json(each) for each in archive.runs()] == [printed["json"]]
    of_run, of_trial = archive.events(run.id)
    assert report.row(of_run.run)[3:6] == printed["row"][3:6]
    assert report.trial_line(of_trial.trial) == printed["trials"][-1]
    assert archive.known_moves(run)[0] == list(run.best.candidate.moves)
    assert digest.of_moves(run.best.candidate.moves) == run.best.candidate.digest
    archive.close()


def test_nothing_that_is_read_from_an_earlier_archive_has_a_field_of_then(tmp_path: Path) -> None:
    archive = earlier_archive(tmp_path)
    for message in (archive.run("last"), *archive.trials(archive.run("last").id)):
        assert not list(deprecated_within(message))
    archive.close()


def test_a_record_of_an_earlier_release_is_read_and_contradicts_itself_no_more_than_then(tmp_path: Path) -> None:
    place = tmp_path / "old.record.json"
    place.write_text(json.dumps(EARLIER["record"]))
    run, found = record.read(place)
    assert found == EARLIER["printed"]["contradictions"]
    assert report.as_json(run) == EARLIER["printed"]["json"]
    assert not list(deprecated_within(run))


def deprecated_within(message: Message) -> Iterator[str]:
    """The deprecated fields that are set anywhere in a message."""
    for field, value in message.ListFields():
        if field.GetOptions().deprecated:
            yield field.full_name
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for each in value if field.is_repeated else [value]:
                yield from deprecated_within(each)


def test_two_that_open_an_older_archive_at_once_do_not_add_a_column_twice(tmp_path: Path) -> None:
    Archive.in_directory(tmp_path).close()
    url = f"sqlite:///{tmp_path / FILE_NAME}"
    opened: list[Archive] = []
    with sa.create_engine(url).connect() as first:
        first.exec_driver_sql("DROP INDEX ix_runs_shape_digest")
        first.exec_driver_sql("ALTER TABLE runs DROP COLUMN shape_digest")
        first.exec_driver_sql("BEGIN IMMEDIATE")
        first.exec_driver_sql("ALTER TABLE runs ADD COLUMN shape_digest VARCHAR(64) DEFAULT '' NOT NULL")
        second = threading.Thread(target=lambda: opened.append(Archive(url)))
        second.start()
        second.join(0.5)
        assert not opened, "it waits for the first one's column"
        first.commit()
        second.join(20)
    assert len(opened) == 1
    opened[0].close()


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
