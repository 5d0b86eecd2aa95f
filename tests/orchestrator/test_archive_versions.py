"""Schema versions: what earlier releases wrote opens and is brought up to date, what a later one wrote is refused."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from orchestrator import testing
from orchestrator.archive import FILE_NAME, Archive
from orchestrator.archiving import repair, versions
from orchestrator.archiving.tables import TABLES, VERSION
from orchestrator.commands import cli
from warpsmith.errors import BadInput
from warpsmith.v1 import run_pb2, trial_pb2

BEFORE_VERSIONS = """
CREATE TABLE runs (id VARCHAR(40) NOT NULL, task_digest VARCHAR(64) NOT NULL, task_name TEXT NOT NULL,
  target INTEGER NOT NULL, device TEXT NOT NULL, state INTEGER NOT NULL, created_at FLOAT NOT NULL,
  speedup FLOAT NOT NULL, message {bytes} NOT NULL, shape_digest VARCHAR(64) DEFAULT '' NOT NULL,
  owner VARCHAR(40) DEFAULT '' NOT NULL, attempt_count INTEGER DEFAULT '0' NOT NULL,
  stop_asked INTEGER DEFAULT '0' NOT NULL, PRIMARY KEY (id));
CREATE INDEX ix_runs_created_at ON runs (created_at);
CREATE INDEX ix_runs_task_digest ON runs (task_digest);
CREATE INDEX ix_runs_shape_digest ON runs (shape_digest);
CREATE TABLE trials (run_id VARCHAR(40) NOT NULL, number INTEGER NOT NULL, program_digest VARCHAR(64) NOT NULL,
  verdict INTEGER NOT NULL, speedup FLOAT NOT NULL, message {bytes} NOT NULL,
  PRIMARY KEY (run_id, number), FOREIGN KEY(run_id) REFERENCES runs (id));
CREATE TABLE events (run_id VARCHAR(40) NOT NULL, number INTEGER NOT NULL, message {bytes} NOT NULL,
  PRIMARY KEY (run_id, number), FOREIGN KEY(run_id) REFERENCES runs (id));
CREATE TABLE groups (run_id VARCHAR(40) NOT NULL, form VARCHAR(64) NOT NULL, device TEXT NOT NULL,
  median_ns FLOAT NOT NULL, message {bytes} NOT NULL, PRIMARY KEY (run_id, form),
  FOREIGN KEY(run_id) REFERENCES runs (id));
CREATE INDEX ix_groups_form ON groups (form);
CREATE TABLE owners (name VARCHAR(40) NOT NULL, seen_at FLOAT NOT NULL, PRIMARY KEY (name))
"""
"""The last layout without a version, as its release made it."""


def engine_at(url: str) -> sa.Engine:
    return sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))


def before_versions(url: str) -> str:
    """Such an archive at a URL, with a run and its trial."""
    engine, run = engine_at(url), run_pb2.Run(id="old", task=testing.task(), created_at=1.0)
    with engine.begin() as connection:
        for statement in BEFORE_VERSIONS.format(bytes="BLOB" if "sqlite" in url else "BYTEA").split(";"):
            connection.exec_driver_sql(statement)
        row = {"run": run.SerializeToString(), "trial": trial_pb2.Trial(number=1).SerializeToString()}
        connection.execute(
            sa.text("INSERT INTO runs VALUES ('old', 'd', 'fake', 1, 'fake', 1, 1.0, 0.0, :run, '', '', 0, 0)"), row
        )
        connection.execute(sa.text("INSERT INTO trials VALUES ('old', 1, 'p', 1, 0.0, :trial)"), row)
    engine.dispose()
    return url


def version_at(url: str) -> str:
    engine = engine_at(url)
    with engine.connect() as connection:
        (found,) = connection.execute(sa.select(VERSION.c.version_num)).scalars()
    engine.dispose()
    return str(found)


def written_by_a_later_release(url: str) -> str:
    Archive(url).close()
    engine = engine_at(url)
    with engine.begin() as connection:
        connection.execute(sa.update(VERSION).values(version_num="9000"))
    engine.dispose()
    return url


def test_an_archive_of_before_versions_opens_with_its_runs_and_has_the_last_version_from_then_on(
    database_url: str,
) -> None:
    before_versions(database_url)
    for _ in range(2):
        archive = Archive(database_url)
        assert [run.id for run in archive.runs()] == ["old"]
        assert [trial.number for trial in archive.trials("old")] == [1]
        archive.close()
        assert version_at(database_url) == versions.LATEST
    archive, new = Archive(database_url), trial_pb2.Trial(number=2)
    for name in ("kernel.cpp", "header.hpp"):
        new.candidate.program.sources.add(name=name, text=f"// {name}")
    archive.add_trial("old", new)
    assert archive.trials("old", after=1) == [new]
    archive.close()


def test_an_archive_of_before_versions_is_read_without_being_changed(tmp_path: Path) -> None:
    before_versions(f"sqlite:///{tmp_path / FILE_NAME}")
    before = (tmp_path / FILE_NAME).read_bytes()
    with closing(Archive.reading(tmp_path)) as reader:
        assert [trial.number for trial in reader.trials("old")] == [1]
    assert (tmp_path / FILE_NAME).read_bytes() == before


@pytest.mark.parametrize("begin", [lambda url: url, before_versions], ids=["new", "older"])
def test_a_new_archive_and_one_that_was_brought_up_to_date_have_the_tables_of_the_code(
    database_url: str, begin: Callable[[str], str]
) -> None:
    Archive(begin(database_url)).close()
    engine = engine_at(database_url)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"version_table": VERSION.name})
        told = sa.MetaData()
        for table in TABLES.sorted_tables:
            if table is not VERSION:
                table.to_metadata(told)
        assert compare_metadata(context, told) == []
    engine.dispose()


def test_the_last_revision_is_the_one_that_the_code_names() -> None:
    config = Config()
    config.set_main_option("script_location", "orchestrator.archiving:migrations")
    assert ScriptDirectory.from_config(config).get_heads() == [versions.LATEST]


def test_an_archive_of_a_later_release_is_refused_by_name_and_left_as_it_is(tmp_path: Path) -> None:
    written_by_a_later_release(f"sqlite:///{tmp_path / FILE_NAME}")
    before = (tmp_path / FILE_NAME).read_bytes()
    said = (
        rf"{FILE_NAME}: its schema has version “9000”, of a later release; Warpsmith .* knows {versions.LATEST} at most"
    )

    def read(place: Path) -> None:
        with closing(Archive.reading(place)) as reader:
            reader.runs()

    for work in (Archive.in_directory, read, repair.check, repair.recover):
        with pytest.raises(BadInput, match=rf"{tmp_path}/{said}: open it with that release, or name another"):
            work(tmp_path)
    assert (tmp_path / FILE_NAME).read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == [FILE_NAME]


@pytest.mark.postgres
def test_a_database_of_a_later_release_is_refused_without_its_password(postgresql: object) -> None:
    url = written_by_a_later_release(postgresql.url("later"))  # type: ignore[attr-defined]
    with pytest.raises(BadInput, match=r"postgresql\+psycopg://.*: its schema has version “9000”"):
        Archive(url)
    assert version_at(url) == "9000"


def test_many_that_open_an_older_archive_at_once_bring_it_up_to_date_once(
    database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    before_versions(database_url)
    caplog.set_level("INFO", "warpsmith.orchestrator")
    opened: list[Archive] = []
    opening = [threading.Thread(target=lambda: opened.append(Archive(database_url))) for _ in range(4)]
    for each in opening:
        each.start()
    for each in opening:
        each.join(60)
    assert [len(archive.runs()) for archive in opened] == [1] * 4
    for archive in opened:
        archive.close()
    said = [each.getMessage() for each in caplog.records if each.name == "warpsmith.orchestrator"]
    assert said == [f"the archive's schema was older than versions and is {versions.LATEST} now"]


def test_two_processes_that_open_an_older_archive_at_once_both_have_it(tmp_path: Path) -> None:
    url = before_versions(f"sqlite:///{tmp_path / FILE_NAME}")
    program = f"from orchestrator.archive import Archive; print(len(Archive({url!r}).runs()))"
    both = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [each.communicate(timeout=60)[0] for each in both] == ["1\n", "1\n"]
    assert version_at(url) == versions.LATEST


def test_a_revision_that_fails_leaves_the_archive_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = before_versions(f"sqlite:///{tmp_path / FILE_NAME}")
    monkeypatch.setattr("alembic.op.create_table", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Archive(url)
    monkeypatch.undo()
    with sa.create_engine(url).connect() as connection:
        assert not sa.inspect(connection).has_table(VERSION.name)
    archive = Archive(url)
    assert [run.id for run in archive.runs()] == ["old"]
    archive.close()


def test_alembic_is_loaded_only_where_an_archive_is_not_up_to_date(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path;"
        "from orchestrator.archive import Archive; from orchestrator.commands import cli;"
        "place = Path(sys.argv[1]); Archive.in_directory(place).close(); Archive.in_directory(place).close();"
        "Archive.reading(place).runs(); print('alembic' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, capture_output=True, text=True)
    assert ran.stdout == "False\n"


def test_archive_check_tells_the_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def told() -> str:
        monkeypatch.setattr(sys, "argv", ["warpsmith", "archive", "check", "--runs", str(tmp_path)])
        with pytest.raises(SystemExit):
            cli.main()
        return capsys.readouterr().out.splitlines()[0]

    before_versions(f"sqlite:///{tmp_path / FILE_NAME}")
    assert (
        told()
        == f"schema version none: older than versions; the next command that writes brings it to {versions.LATEST}"
    )
    Archive.in_directory(tmp_path).close()
    assert told() == f"schema version {versions.LATEST}"
