"""`warpsmith report --html`: where the page goes, what it replaces, and what it refuses."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from orchestrator.commands import cli
from orchestrator.pages import page_file
from warpsmith.errors import BadInput, NotFound

Report = Callable[..., Result]


@pytest.fixture
def page(kept: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Report:
    """`report ...` on an ended run, in a folder of the test's own."""
    monkeypatch.chdir(tmp_path_factory.mktemp("pages"))
    return lambda *arguments: CliRunner().invoke(cli.app, ["report", *arguments, "--runs", str(kept)])


def test_the_page_is_a_file_whose_name_is_told(page: Report) -> None:
    done = page("last", "--html", "softmax.html")
    assert (done.exit_code, done.output) == (0, "softmax.html\n")
    assert page_file.MARK in Path("softmax.html").read_text()


def test_a_later_report_replaces_an_earlier_one_and_an_empty_file(page: Report) -> None:
    Path("softmax.html").touch()
    for _ in range(2):
        assert page("--html", "softmax.html").exit_code == 0
    assert os.listdir() == ["softmax.html"]


@pytest.mark.parametrize("name", ["-", "/dev/stdout"])
def test_the_page_goes_to_stdout_where_that_is_asked_for(page: Report, name: str) -> None:
    done = page("--html", name)
    assert done.output.startswith("<!DOCTYPE html>")
    assert done.output.rstrip().endswith("</html>")
    assert not os.listdir()


def test_what_is_no_report_stays(page: Report) -> None:
    Path("thesis.html").write_text("<!DOCTYPE html><p>mine")
    refused = page("--html", "thesis.html").exception
    assert isinstance(refused, BadInput)
    assert str(refused).startswith("thesis.html: is no report of ours, so it stays; ")
    assert Path("thesis.html").read_text() == "<!DOCTYPE html><p>mine"


def test_a_place_that_can_hold_no_page_is_one_clear_error(page: Report) -> None:
    Path("folder").mkdir()
    Path("link.html").symlink_to("elsewhere.html")
    for place, said in {
        "folder": "folder: ",
        "link.html": f"{Path.cwd()}/link.html: ",
        "no/x.html": "no/x.html: cannot be",
    }.items():
        refused = page("--html", place).exception
        assert isinstance(refused, BadInput)
        assert str(refused).startswith(said)
    assert sorted(os.listdir()) == ["folder", "link.html"]


@pytest.mark.parametrize("arguments", [["--html", "x.html", "--json"], ["--html", ""]])
def test_what_contradicts_itself_is_refused_before_anything_is_read(page: Report, arguments: list[str]) -> None:
    refused = page(*arguments, "nowhere").exception
    assert isinstance(refused, BadInput)
    assert str(refused).startswith("--html names a file")


def test_a_run_that_is_not_kept_is_named(page: Report) -> None:
    refused = page("1999", "--html", "x.html").exception
    assert isinstance(refused, NotFound)
    assert "1999" in str(refused)
    assert not os.listdir()
