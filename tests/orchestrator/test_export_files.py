"""`warpsmith export`: what it writes over, and what it refuses before anything is written."""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from orchestrator.commands import cli
from orchestrator.exports import export_files
from orchestrator.trust import record
from warpsmith import digest
from warpsmith.errors import BadInput
from warpsmith.sandbox import private_files
from warpsmith.testing import softmax_task
from warpsmith.v1 import optimization_service_pb2 as messages
from warpsmith.v1 import run_pb2

Export = Callable[..., Result]


def finished(identifier: str) -> run_pb2.Run:
    """A run with a winner."""
    run = run_pb2.Run(id=identifier, state=run_pb2.RUN_STATE_FASTER, task=softmax_task())
    run.task.digest = digest.of_task(run.task)
    run.best.timing.faster = True
    return run


def kernel(identifier: str) -> str:
    return f"# softmax, made faster by Warpsmith (run {identifier}).\n"


@pytest.fixture
def export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Export:
    """`export RUN ...` in a folder of the test's own, with a server that knows a run of each identifier."""
    server = types.SimpleNamespace(
        ExportBest=lambda asked, **_: messages.ExportBestResponse(file_name="own.py", text=kernel(asked.run_id)),
        GetRun=lambda asked, **_: messages.GetRunResponse(run=finished(asked.run_id)),
    )
    monkeypatch.setattr(cli.client, "reading", lambda *_: contextlib.nullcontext(server))
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(cli.app, ["export", *arguments])


def held() -> dict[str, str]:
    return {name: Path(name).read_text() for name in os.listdir()}


def test_kernel_and_record_replace_those_of_an_earlier_export(export: Export) -> None:
    for run in ("one", "one", "two"):
        assert export(run, "-o", "foo.py").exit_code == 0
        assert held() == {"foo.py": kernel(run), "foo.record.json": record.text(finished(run))}
    Path("foo.py").unlink()
    assert export("two", "-o", "foo.py").exit_code == 0, "the same record is no loss"


def test_a_kernels_file_without_a_record_is_replaced(export: Export) -> None:
    Path("foo.py").write_text("anything")
    assert export("one", "-o", "foo.py").exit_code == 0
    assert Path("foo.py").read_text() == kernel("one")


def _of_another_run() -> None:
    Path("foo.record.json").write_text(record.text(finished("other")))


def _beside_another_kernel() -> None:
    _of_another_run()
    Path("foo.py").write_text(kernel("third"))


def _linked() -> None:
    Path("foo.py").write_text(kernel("other"))
    Path("kept.json").write_text(record.text(finished("other")))
    Path("foo.record.json").symlink_to("kept.json")


def _text(text: str) -> Callable[[], None]:
    def plant() -> None:
        Path("foo.py").write_text(kernel("other"))
        Path("foo.record.json").write_text(text)

    return plant


@pytest.mark.parametrize(
    ("plant", "why"),
    [
        (_of_another_run, "is the record of run other, which foo.py is not of"),
        (_beside_another_kernel, "is the record of run other, which foo.py is not of"),
        (_linked, "is a symbolic link"),
        (_text("my own notes"), "is no record"),
        (_text('{"mine": 1}'), "is no record"),
        (_text('{"format": "warpsmith-record-1", "digest": "", "run": {"mine": 1}}'), "a damaged record"),
    ],
)
def test_a_file_in_the_records_place_that_does_not_belong_to_the_kernel_is_kept(
    export: Export, plant: Callable[[], None], why: str
) -> None:
    plant()
    before = held()
    said = export("one", "-o", "foo.py")
    assert isinstance(said.exception, BadInput)
    assert f"foo.record.json: {why}" in str(said.exception)
    assert "move it away, or name another file with --output" in str(said.exception)
    assert held() == before


@pytest.mark.parametrize("name", ["foo.py", "foo.record.json"])
def test_a_pipe_in_the_way_of_either_stays(export: Export, name: str) -> None:
    os.mkfifo(name)
    assert isinstance(export("one", "-o", "foo.py").exception, BadInput)
    assert os.listdir() == [name]
    assert Path(name).is_fifo()


@pytest.mark.parametrize(
    ("output", "why"),
    [
        ("", "--output '.': names no file"),
        ("/", "--output '/': names no file"),
        ("..", "..: is a directory"),
        ("x" * 300, "cannot be written (File name too long)"),
        ("x" * 250 + ".py", "cannot be written (File name too long)"),
        ("nowhere/foo.py", "nowhere/foo.py: cannot be written (No such file or directory)"),
    ],
)
def test_an_output_that_is_no_file_is_said_and_nothing_is_written(export: Export, output: str, why: str) -> None:
    said = export("one", "-o", output)
    assert isinstance(said.exception, BadInput)
    assert why in str(said.exception)
    assert held() == {}


@pytest.mark.parametrize("output", ["-", "/dev/stdout"])
def test_stdout_is_written_to_and_not_replaced(export: Export, monkeypatch: pytest.MonkeyPatch, output: str) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("nothing is replaced")

    monkeypatch.setattr("warpsmith.sandbox.private_files.replace", never)
    assert export("one", "-o", output).stdout == kernel("one")


@pytest.fixture
def folder(export: Export, monkeypatch: pytest.MonkeyPatch) -> Export:
    """`export` of a run whose flavour writes a folder of two files."""
    files = [("pyproject.toml", "[project]\n"), ("own/kernel.py", "X = 1\n")]
    made = [messages.ExportedFile(path=path, text=text) for path, text in files]
    server = types.SimpleNamespace(
        ExportBest=lambda *_, **__: messages.ExportBestResponse(file_name="own", files=made),
        GetRun=lambda asked, **_: messages.GetRunResponse(run=finished(asked.run_id)),
    )
    monkeypatch.setattr(cli.client, "reading", lambda *_: contextlib.nullcontext(server))
    return export


def test_a_flavour_of_many_files_writes_a_folder_with_all_of_them(folder: Export) -> None:
    assert folder("one", "--flavour", "package").stdout == "own\n"
    assert Path("own/own/kernel.py").read_text() == "X = 1\n"
    assert sorted(os.listdir("own")) == ["own", "pyproject.toml"]
    assert os.listdir() == ["own"], "nothing half-written is left"


@pytest.mark.parametrize("stands", ["a folder with a file in it", "a file", "a link"])
def test_a_folder_replaces_nothing(folder: Export, stands: str) -> None:
    match stands:
        case "a file":
            Path("there").write_text("kept")
        case "a link":
            Path("there").symlink_to("elsewhere")
        case _:
            Path("there").mkdir()
            Path("there/mine").write_text("kept")
    found = folder("one", "--flavour", "package", "-o", "there")
    assert isinstance(found.exception, BadInput)
    assert "move it away, or name another with --output" in str(found.exception)
    assert os.listdir() == ["there"]


def test_a_folder_goes_to_no_stdout(folder: Export) -> None:
    found = folder("one", "--flavour", "package", "-o", "-")
    assert "writes a folder, which stdout cannot be" in str(found.exception)


@pytest.mark.parametrize("path", ["../escaped.py", "/tmp/escaped.py", "a/../../escaped.py"])
def test_a_path_that_leads_out_of_the_folder_is_refused(export: Export, path: str) -> None:
    del export
    with pytest.raises(BadInput, match="stay inside"):
        export_files.write_folder(Path("made"), {"kept.py": "", path: ""})
    assert os.listdir() == []


@pytest.mark.parametrize(
    ("suggested", "name"),
    [
        ("rows_warpsmith.py", "rows_warpsmith.py"),
        ("x" * 300 + ".cu", "x" * private_files.NAME_BYTES + ".cu"),
        ("rows_warpsmith", "rows_warpsmith"),
        ("../../.bashrc", "bashrc"),
        ("rows.\x1b[31m", "rows._31m"),
    ],
)
def test_a_name_that_a_server_suggests_is_one_part_of_a_path_of_plain_letters(suggested: str, name: str) -> None:
    assert export_files.own_name(suggested) == name


def test_files_of_a_folder_that_stand_in_each_others_way_are_not_told_as_one_that_is_there(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be written"):
        export_files.write_folder(tmp_path / "made", {"p": "a file", "p/q": "below it"})
    assert list(tmp_path.iterdir()) == []
