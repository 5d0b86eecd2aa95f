"""Python that others wrote is read without a warning and without opening a file, whatever is wrong with it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from warpsmith.sandbox import python_text

ROOT = Path(__file__).parents[2]
READ = """
import sys
from orchestrator.tasks import intake, reduced_shapes
from orchestrator.trust import judge
from warpsmith.sandbox import python_text
names = set()
# What we open below a folder of our own has no mode here.
sys.addaudithook(lambda event, told: names.add(str(told[0])) if event == "open" and told[1] else None)
for what in (
    lambda: intake.read(intake.Request("sub/m.py")),
    lambda: judge._labels(open("sub/m.py", "rb").read()),
    lambda: reduced_shapes.reduce(open("sub/m.py").read(), reduced_shapes.STEPS[0]),
    lambda: python_text.literal(open("sub/m.py").read()),
):
    try:
        what()
    except Exception:
        pass
print(*sorted(names & {"m.py", "<unknown>", "<string>"}))
"""


@pytest.mark.parametrize(
    "text", ["pattern = '\\d'\nclass Model: ...\ndef get_inputs(): ...\n", "x = (\n", "if 1:\nx\n"]
)
def test_no_file_of_the_current_directory_is_opened_or_shown(text: str, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "m.py").write_text(text)
    (tmp_path / "secret").write_text("\x1b[31mTHE SECRET\n" * 9)
    for name in ("m.py", "<unknown>", "<string>"):
        (tmp_path / name).symlink_to("secret")
    command = [sys.executable, "-W", "always::SyntaxWarning", "-W", "always::DeprecationWarning", "-c", READ]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    assert (said.stdout.strip(), "SECRET" in said.stderr, "invalid escape" in said.stderr) == ("", False, False)


def test_a_module_is_read_whatever_the_compiler_thinks_of_its_strings() -> None:
    assert python_text.parse(b"pattern = '\\d'").body  # warnings are errors here
    assert python_text.literal(r" '\d'") == r"\d"
    with pytest.raises(SyntaxError):
        python_text.parse("x = (")


@pytest.mark.parametrize("text", ["x", "(", "{[]: 1}", "-" * 100_000 + "1", "[" * 150, "'\0'", "\ud800"])
def test_what_is_no_literal_is_one_kind_of_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        python_text.literal(text)


def test_no_other_module_of_the_command_line_reads_python() -> None:
    reading = re.compile(r"\bast\.(?:parse|literal_eval)\(")
    modules = [path.name for path in (ROOT / "orchestrator").rglob("*.py") if reading.search(path.read_text())]
    assert modules == ["foreign_text.py"]  # it reads back what it has written
