"""`make check` finds modules, classes and functions that have outgrown one reader."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def check(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("module_sizes")


def of_lines(head: str, count: int) -> str:
    """A definition of so many lines."""
    return f"{head}\n" + "    x = 1\n" * (count - 1)


@pytest.mark.parametrize(
    ("head", "most"), [("class Long:", 250), ("def long() -> None:", 60), ("async def long() -> None:", 60)]
)
def test_what_is_one_line_too_long_is_named_with_its_file_and_lines(check: ModuleType, head: str, most: int) -> None:
    kind = "class Long" if most == 250 else "function long"
    assert not list(check.outgrown("room/a.py", of_lines(head, most)))
    (said,) = check.outgrown("room/a.py", "\n" + of_lines(head, most + 1))
    assert said == f"room/a.py:2: {kind} has {most + 1} lines; {most} at most"


def test_a_function_within_a_class_is_seen(check: ModuleType) -> None:
    method = "".join(f"    {line}\n" for line in of_lines("def long(self) -> None:", 61).splitlines())
    (said,) = check.outgrown("room/a.py", f"class Short:\n{method}")
    assert said == "room/a.py:2: function long has 61 lines; 60 at most"


def test_a_module_of_tests_is_held_to_its_own_length_alone(check: ModuleType) -> None:
    assert not list(check.outgrown("tests/room/test_a.py", of_lines("class Long:", 500)))
    (said,) = check.outgrown("tests/room/test_a.py", of_lines("class Long:", 501))
    assert said == "tests/room/test_a.py: 501 lines; 500 at most"


def test_what_is_too_long_in_a_new_file_fails_the_check(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    check.subprocess.run(["git", "init", "--quiet"], check=True)
    assert check.main() == 0
    (tmp_path / "a.py").write_text(of_lines("class Writer:", 251))
    assert check.main() == 1
    assert "a.py:1: class Writer has 251 lines; 250 at most" in capsys.readouterr().out
