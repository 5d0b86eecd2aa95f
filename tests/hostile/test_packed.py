"""Folders, runs and records that a stranger has packed: nothing outside them is read, written or quoted."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import struct
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator import archive as archives
from orchestrator.archive import FILE_NAME, Archive
from orchestrator.commands import cli, directory_bench
from orchestrator.commands.client import InProcess
from orchestrator.serving.local import METRICS, SERVICES_FILE, TARGETS_FILE, LocalServices
from orchestrator.tasks import intake
from orchestrator.trust import record
from warpsmith import digest
from warpsmith.errors import BadInput, WarpsmithError
from warpsmith.testing import softmax_task
from warpsmith.v1 import optimization_service_pb2 as messages
from warpsmith.v1 import run_pb2, tensor_pb2, trial_pb2

pytestmark = pytest.mark.hostile

COMMAND = [sys.executable, "-c", "from orchestrator.commands.cli import main; main()"]
SECRET = "aws_secret_access_key = 12345"
MODULE = """
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return x * 2
class ModelNew(Model):
    pass
def get_inputs():
    return [torch.ones(4)]
"""
STAND_IN = """
from warpsmith.service import serve
from warpsmith.v1 import correctness_service_pb2_grpc as pb
serve("stand-in", pb.add_CorrectnessServiceServicer_to_server, lambda _: pb.CorrectnessServiceServicer())
"""
ESCAPES = ["../../taken", "/tmp/warpsmith-taken", "a/b", "..", "x\0y", "x\ny", "\x1b]0;title\x07", "x" * 5000]


@pytest.fixture
def behind(tmp_path: Path) -> Path:
    """The user's credentials, beside the folder `packed` that a stranger has packed."""
    (tmp_path / "packed").mkdir()
    (tmp_path / "credentials").write_text(f"[default]\n{SECRET}\n")
    return tmp_path / "credentials"


def warpsmith(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command to its end."""
    return subprocess.run([*COMMAND, *arguments], cwd=place, capture_output=True, text=True, timeout=120, check=False)


# ---- modules -------------------------------------------------------------------------------------------


def _entry(packed: Path, behind: Path) -> None:
    (packed / "m.py").symlink_to(behind)


def _sibling(packed: Path, behind: Path) -> None:
    (packed / "m.py").write_text(f"import layers\n{MODULE}")
    (packed / "layers.py").symlink_to(behind)


def _in_a_package(packed: Path, behind: Path) -> None:
    (packed / "m.py").write_text(f"import layers\n{MODULE}")
    (packed / "layers").mkdir()
    (packed / "layers" / "__init__.py").write_text("")
    (packed / "layers" / "deep.py").symlink_to(behind)


def _package(packed: Path, behind: Path) -> None:
    (packed / "m.py").write_text(f"import layers\n{MODULE}")
    elsewhere = behind.with_name("elsewhere")
    elsewhere.mkdir()
    (elsewhere / "__init__.py").write_text(SECRET)
    (packed / "layers").symlink_to(elsewhere)


LINKS = [_entry, _sibling, _in_a_package, _package]


@pytest.mark.parametrize(
    ("plant", "command"),
    [
        *[(plant, command) for plant in LINKS for command in (["optimize", "m.py"], ["judge", "m.py", "m.py"])],
        (_entry, ["optimize", "m:Model", "--input", "float32[4]"]),
    ],
)
def test_a_link_in_a_modules_folder_is_refused_by_name_and_never_read(
    behind: Path, plant: Callable[[Path, Path], None], command: list[str]
) -> None:
    packed = behind.with_name("packed")
    plant(packed, behind)
    said = warpsmith(packed, *command)
    assert said.returncode == 2, said
    assert "is a symbolic link, and links are not followed" in said.stderr
    assert "aws" not in said.stdout + said.stderr


@pytest.mark.parametrize("plant", LINKS)
def test_a_folder_of_modules_with_a_link_costs_that_module_its_line(
    behind: Path, plant: Callable[[Path, Path], None]
) -> None:
    packed = behind.with_name("packed")
    plant(packed, behind)
    (packed / "honest.py").write_text(MODULE)

    def read(path: Path, _: float) -> run_pb2.Run:
        return run_pb2.Run(task=intake.read(intake.Request(str(path))), state=run_pb2.RUN_STATE_NO_FASTER)

    found = directory_bench.bench(directory_bench.entries(packed), behind.with_name("results"), read)
    verdicts = {line["file"]: line["verdict"] for line in found}
    assert verdicts["honest.py"] == "NO_FASTER"
    assert verdicts["m.py"] == "BAD_INPUT"
    assert "aws" not in json.dumps(found)


def test_a_file_that_was_not_named_is_not_quoted_when_it_does_not_parse(behind: Path) -> None:
    packed = behind.with_name("packed")
    (packed / "m.py").write_text(f"import layers\n{MODULE}")
    (packed / "layers.py").write_text("global aws_secret_access_key; def aws(\n'aws")
    with pytest.raises(BadInput, match=r"layers\.py:\d: syntax error$") as refused:
        intake.read(intake.Request(str(packed / "m.py")))
    assert "aws" not in str(refused.value)


# ---- runs folders --------------------------------------------------------------------------------------


@pytest.mark.parametrize("companion", ["", "-wal", "-shm", "-journal"])
@pytest.mark.parametrize("kind", ["symbolic", "dangling", "hard"])
def test_a_link_in_place_of_the_database_is_refused_for_reading_and_writing(
    behind: Path, companion: str, kind: str
) -> None:
    runs = behind.with_name("packed")
    Archive.in_directory(runs).close()
    place = runs / f"{FILE_NAME}{companion}"
    place.unlink(missing_ok=True)
    if kind == "hard":
        os.link(behind, place)
    else:
        place.symlink_to(behind if kind == "symbolic" else behind.with_name("nowhere"))
    for opening in (Archive.in_directory, Archive.reading):
        with pytest.raises(BadInput, match=rf"{place.name}: (is a symbolic link|has other names)"):
            opening(runs)
    assert not behind.with_name("nowhere").exists()
    assert behind.read_text() == f"[default]\n{SECRET}\n"


def test_a_whole_command_refuses_a_packed_database(behind: Path) -> None:
    packed = behind.with_name("packed")
    (packed / "runs").mkdir()
    (packed / "runs" / FILE_NAME).symlink_to(behind)
    for command in (["runs"], ["show"], ["export"]):
        said = warpsmith(packed, *command)
        assert (said.returncode, said.stdout) == (2, "")
        assert f"{FILE_NAME}: is a symbolic link" in said.stderr
    assert behind.read_text() == f"[default]\n{SECRET}\n"


@pytest.mark.parametrize(
    "made",
    [
        "DROP TABLE runs; CREATE VIEW runs AS WITH RECURSIVE n(id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM n) "
        "SELECT * FROM n",
        "CREATE TRIGGER late AFTER INSERT ON trials BEGIN DELETE FROM events; END",
        "DROP TABLE runs; CREATE VIRTUAL TABLE runs USING fts5(message)",
        "DROP TABLE runs; CREATE TABLE runs (id TEXT, message BLOB AS (hex(zeroblob(100000000))))",
        "DROP TABLE runs; CREATE TABLE runs (id TEXT, message BLOB DEFAULT (hex(zeroblob(100000000))))",
        "DROP TABLE runs; CREATE TABLE runs (id TEXT, message BLOB CHECK (length(hex(zeroblob(100000000))) > 0))",
        "CREATE INDEX ix_late ON runs (hex(zeroblob(100000000)))",
        "CREATE INDEX ix_late ON runs (id) WHERE length(hex(zeroblob(100000000))) > 0",
        # A schema that cannot be read in full, and says otherwise what it is.
        """
        DROP TABLE runs; CREATE TABLE runs (id TEXT, message BLOB AS (zeroblob(900000000))); CREATE TABLE aaa (x);
        PRAGMA writable_schema=ON;
        UPDATE sqlite_master SET sql='CREATE/**/VIRTUAL TABLE aaa USING nosuchmodule(x)', rootpage=0 WHERE name='aaa'
        """,
    ],
)
def test_a_database_in_which_something_would_run_is_refused_unread(behind: Path, made: str) -> None:
    runs = behind.with_name("packed")
    Archive.in_directory(runs).close()
    with contextlib.closing(sqlite3.connect(runs / FILE_NAME)) as packed:
        packed.executescript(made)
    for opening in (Archive.in_directory, lambda place: Archive.reading(place).runs()):
        with pytest.raises(BadInput, match="is no plain table"):
            opening(runs)


def hot_journal(database: Path, named: Path) -> bytes:
    """A rollback journal of one page, of a transaction that another database's journal, the named file, is part of."""
    page, magic, name = database.read_bytes()[:4096], bytes.fromhex("d9d505f920a163d7"), os.fsencode(named)
    head = magic + struct.pack(">IIIII", 1, 0, database.stat().st_size // 4096, 512, 4096)
    record = struct.pack(">I", 1) + page + struct.pack(">I", sum(page[3896:0:-200]))
    tail = struct.pack(">I", (1 << 30) // 4096 + 1) + name + struct.pack(">II", len(name), sum(name)) + magic
    return head.ljust(512, b"\0") + record + tail


def test_a_journal_that_would_delete_a_file_is_refused_and_the_file_stays(
    behind: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "JOURNAL_SECONDS", 0.05)
    runs = behind.with_name("packed")
    with contextlib.closing(sqlite3.connect(runs / FILE_NAME)) as packed:
        packed.execute("CREATE TABLE innocent (a)")
    journal = runs / f"{FILE_NAME}-journal"
    journal.write_bytes(hot_journal(runs / FILE_NAME, behind))
    for opening in (Archive.in_directory, Archive.reading):
        with pytest.raises(BadInput, match=rf"{journal}: .*move it away"):
            opening(runs)
    assert behind.read_text() == f"[default]\n{SECRET}\n"
    with contextlib.closing(sqlite3.connect(runs / FILE_NAME)) as packed:
        packed.execute("SELECT * FROM innocent")
    assert not behind.exists(), "SQLite itself deletes it"


def test_the_journal_of_one_who_makes_the_database_at_this_moment_is_waited_for(tmp_path: Path) -> None:
    journal = tmp_path / f"{FILE_NAME}-journal"
    journal.write_bytes(bytes(512))
    ending = threading.Timer(0.2, journal.unlink)
    ending.start()
    Archive.in_directory(tmp_path).close()
    ending.join()


@pytest.mark.parametrize("table", ["runs", "trials", "events"])
@pytest.mark.parametrize("value", [b"\xff\xff\xff", "text", 7, 1 << 60])
def test_a_row_that_is_no_message_is_refused_by_the_name_of_its_run(tmp_path: Path, table: str, value: object) -> None:
    archive = Archive.in_directory(tmp_path)
    archive.put_run(finished("theirs"), run_pb2.RunEvent(number=1))
    archive.add_trial("theirs", trial_pb2.Trial(number=1))
    put_messages(tmp_path, table, value)
    read = {
        "runs": archive.runs,
        "trials": lambda: archive.trials("theirs"),
        "events": lambda: archive.events("theirs"),
    }
    with pytest.raises(BadInput, match=rf"{FILE_NAME}.*“theirs” is damaged, or not ours"):
        read[table]()
    archive.close()


def put_messages(runs: Path, table: str, value: object) -> None:
    """Puts a value in place of all messages of a table."""
    with contextlib.closing(sqlite3.connect(runs / FILE_NAME)) as packed:
        packed.execute(f"UPDATE {table} SET message = ?", [value])
        packed.commit()


@pytest.mark.parametrize("created_at", [1e300, -1e300, float("inf"), float("nan"), 253402300800.0])
def test_a_run_of_no_time_that_there_is_is_one_clear_error(tmp_path: Path, created_at: float) -> None:
    archive = Archive.in_directory(tmp_path / "runs")
    archive.put_run(finished("theirs"))
    archive.close()
    put_messages(tmp_path / "runs", "runs", run_pb2.Run(id="theirs", created_at=created_at).SerializeToString())
    said = warpsmith(tmp_path, "runs")
    assert (said.returncode, said.stdout) == (2, "")
    assert len(said.stderr.splitlines()) == 1
    assert "“theirs” is damaged, or not ours" in said.stderr


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return {"benchmark": "stand_in", "orchestrator": "stand_in"}


@pytest.mark.parametrize("name", ["logs", "logs/benchmark.log", "logs/orchestrator.log"])
def test_a_link_in_place_of_a_log_is_refused(behind: Path, modules: dict[str, str], name: str) -> None:
    runs = behind.with_name("packed")
    target = behind
    if name == "logs":
        target = behind.with_name("elsewhere")
        target.mkdir()
    else:
        (runs / "logs").mkdir()
    (runs / name).symlink_to(target)
    with pytest.raises(BadInput, match=rf"{name}: is a symbolic link"):
        LocalServices(runs, modules=modules).start()
    assert behind.read_text() == f"[default]\n{SECRET}\n"
    assert target == behind or os.listdir(target) == []


def test_links_in_place_of_what_is_published_are_replaced(behind: Path, modules: dict[str, str]) -> None:
    runs = behind.with_name("packed")
    for name in (SERVICES_FILE, TARGETS_FILE):
        (runs / name).symlink_to(behind)
        (runs / f"{name}.{os.getpid()}.partial").symlink_to(behind)
    with LocalServices(runs, modules=modules, environment={METRICS: "0"}):
        assert "orchestrator" in json.loads((runs / SERVICES_FILE).read_text())
    assert behind.read_text() == f"[default]\n{SECRET}\n"


def test_a_link_in_place_of_benchs_results_is_refused(behind: Path) -> None:
    results = behind.with_name("packed") / "bench-modules-1of1.jsonl"
    results.symlink_to(behind)
    with pytest.raises(BadInput, match="is a symbolic link"):
        directory_bench.read_results(results)
    with pytest.raises(WarpsmithError, match="is a symbolic link"):
        directory_bench._append(results, {"a": 1})
    assert behind.read_text() == f"[default]\n{SECRET}\n"


@pytest.mark.parametrize("address", ["127.0.0.1:9", "elsewhere:50051", "unix-abstract:x", "unix:x", "", 7, None, ["x"]])
def test_a_runs_folder_sends_nobody_to_an_address_that_we_do_not_publish(tmp_path: Path, address: object) -> None:
    (tmp_path / "runs").mkdir(mode=0o700)
    (tmp_path / "runs" / SERVICES_FILE).write_text(json.dumps({"orchestrator": address}))
    said = warpsmith(tmp_path, "cancel")
    assert said.returncode == 2
    assert "no command is under way in runs" in said.stderr or "write unix:/path" in said.stderr


# ---- runs and records ----------------------------------------------------------------------------------


def finished(name: str) -> run_pb2.Run:
    """A run with a winner, whose names are all the same."""
    run = run_pb2.Run(id=name[:40], state=run_pb2.RUN_STATE_FASTER, created_at=1.0, message=name)
    run.task.CopyFrom(softmax_task())
    run.task.name = name
    run.task.digest = digest.of_task(run.task)
    run.best.timing.faster = True
    run.best.timing.speedup_fastest.median = 2.0
    buffer = run.best.candidate.program.buffers.add(name="y")
    buffer.spec.dtype = tensor_pb2.DTYPE_FLOAT32
    run.best.candidate.program.outputs.append("y")
    return run


@pytest.mark.parametrize("name", ESCAPES)
def test_the_export_of_a_run_whose_names_are_paths_stays_in_the_folder(tmp_path: Path, name: str) -> None:
    work = tmp_path / "a" / "b" / "work"
    work.mkdir(parents=True)
    archive = Archive.in_directory(work / "runs")
    archive.put_run(finished(name))
    archive.close()
    before = sorted(tmp_path.rglob("*"))
    said = warpsmith(work, "export", "last")
    assert said.returncode == 0, said.stderr
    new = [place for place in tmp_path.rglob("*") if place not in before]
    written = [place for place in new if not place.name.startswith(FILE_NAME)]
    assert len(written) == 2, written
    assert all(place.parent == work and place.name.isprintable() for place in written)
    assert not Path("/tmp/warpsmith-taken_warpsmith.py").exists()
    assert "\x1b" not in said.stdout


@pytest.mark.parametrize("name", ESCAPES)
def test_neither_a_server_nor_a_command_takes_a_path_for_the_name_of_an_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    archive = Archive.in_directory(tmp_path / "runs")
    archive.put_run(finished(name))
    reply = InProcess(archive).ExportBest(messages.ExportBestRequest(run_id="last"))
    assert Path(reply.file_name).name == reply.file_name
    work = tmp_path / "a" / "b"
    work.mkdir(parents=True)
    monkeypatch.chdir(work)
    server = types.SimpleNamespace(
        ExportBest=lambda *_, **__: messages.ExportBestResponse(file_name=f"{name}.py", text="# theirs"),
        GetRun=lambda *_, **__: messages.GetRunResponse(run=finished("any")),
    )
    monkeypatch.setattr(cli.client, "reading", lambda *_: contextlib.nullcontext(server))
    assert not CliRunner().invoke(cli.app, ["export", "last"]).exit_code
    assert len(list(work.iterdir())) == 2
    archive.close()


@pytest.mark.parametrize("name", ESCAPES)
def test_commands_show_a_strangers_names_on_one_line_and_obey_nothing_in_them(tmp_path: Path, name: str) -> None:
    archive = Archive.in_directory(tmp_path / "runs")
    archive.put_run(finished(name))
    archive.close()
    for command in (["runs"], ["show"], ["report"]):
        said = warpsmith(tmp_path, *command)
        assert said.returncode == 0, said.stderr
        assert not set(said.stdout) & set("\x00\x1b\x07\r"), command
    assert len(warpsmith(tmp_path, "runs").stdout.splitlines()) == 1


@pytest.mark.parametrize("name", ESCAPES)
def test_a_record_whose_names_are_paths_is_refused_unquoted(tmp_path: Path, name: str) -> None:
    (tmp_path / "r.json").write_text(record.text(finished(name)))
    with pytest.raises(BadInput, match="is no name") as refused:
        record.read(tmp_path / "r.json")
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("path", ["../x.py", "/etc/x.py", "a\0.py", "a\n.py", ""])
def test_a_task_from_elsewhere_whose_sources_leave_the_folder_is_refused(path: str) -> None:
    task = softmax_task()
    task.sources.add(path=path, content=b"")
    task.digest = digest.of_task(task)
    with pytest.raises(BadInput, match="source path"):
        intake.accept(task)


def test_a_record_that_is_another_file_is_not_quoted(behind: Path) -> None:
    contents = (SECRET, json.dumps({"run": {SECRET: 1}, "digest": SECRET, "format": SECRET}))
    as_record = json.dumps({"run": {SECRET: 1}, "digest": "", "format": record.FORMAT})
    for content in (*contents, as_record):
        behind.write_text(content)
        with pytest.raises(BadInput) as refused:
            record.read(behind)
        assert "aws" not in str(refused.value)
