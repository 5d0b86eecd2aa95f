"""Every command that a page shows is one that there is: of `warpsmith`, of make, of `python -m`, of the Python API.

Commands are read by the command line's own parser and not run. What stands in a sentence may be a part of one.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

import warpsmith
from orchestrator.commands.cli import app

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMANDS = typer.main.get_command(app).commands
FENCED = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^    .*", re.MULTILINE)
SPAN = re.compile(r"`([^`]+)`", re.DOTALL)
PLACEHOLDER = "COMMAND"
of_each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def shown(text: str) -> Iterator[tuple[str, bool]]:
    """Each line of a page's blocks, which is whole, and what stands between ` in its sentences, which need not be."""
    text = text.replace("\\\n", " ")
    for _, block in FENCED.findall(text):
        yield from ((line.strip(), True) for line in block.splitlines())
    rest = FENCED.sub("", text)
    yield from ((line.strip(), True) for line in INDENTED.findall(rest))
    yield from ((" ".join(span.split()), False) for span in SPAN.findall(INDENTED.sub("", rest)))


def commands(text: str) -> Iterator[tuple[list[str], bool]]:
    """The words after `warpsmith` of each command; in `runs | show RUN` they are two commands."""
    for line, is_whole in shown(text):
        told = re.sub(r"^(?:[A-Z_]+=\S+ |\$ )*", "", line)
        if not re.match(r"warpsmith [\w-]", told):
            continue
        words = shlex.split(told.removeprefix("warpsmith "), comments=True)
        while "|" in words and words[(at := words.index("|")) + 1] in COMMANDS:
            yield words[:at], is_whole
            words = words[at + 1 :]
        ends = (at for at, word in enumerate(words) if word in ("|", ">", "2>", "&", "&&", ";"))
        yield words[: next(ends, len(words))], is_whole


def refused(words: list[str], is_whole: bool) -> str:
    """Why the command line would not take these words; empty when it would."""
    name, *rest = words
    if name in (PLACEHOLDER, "--version", "--help"):
        return ""
    if name not in COMMANDS:
        return f"there is no command {name}"
    command = COMMANDS[name]
    if not is_whole:
        known = {each for option in command.params for each in (*option.opts, *option.secondary_opts)}
        given = {word.partition("=")[0] for word in rest if word.startswith("-") and len(word) > 1}
        return "".join(f"{name} has no {option} " for option in sorted(given - known - {"--help"}))
    try:
        command.make_context(name, rest)
    except Exception as error:  # of click, of which typer may carry a copy
        return f"{name}: {error}"
    return ""


@of_each_page
def test_each_command_of_a_page_is_taken_by_the_command_line(page: Path) -> None:
    assert not [why for words, is_whole in commands(page.read_text()) if (why := refused(words, is_whole))]


@pytest.mark.parametrize(
    "text",
    [
        "    warpsmith optimize m.py --bugdet 5s",
        "    warpsmith runs | judge",
        "```\nwarpsmith watch A B\n```",
        "    warpsmith runs --limit many",
        "Say `warpsmith tune`.",
        "Say `warpsmith up\n--listening`.",
    ],
)
def test_a_command_that_is_not_there_is_found(text: str) -> None:
    assert [why for words, is_whole in commands(text) if (why := refused(words, is_whole))]


def test_the_start_and_the_tasks_show_commands() -> None:
    for name, least in (("index", 5), ("how-to", 25)):
        assert len(list(commands((ROOT / "docs" / f"{name}.md").read_text()))) >= least, name


@of_each_page
def test_each_target_and_module_of_a_page_is_there(page: Path) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line, _ in shown(page.read_text()):
        told = re.sub(r"^[A-Z_]+=\S+ ", "", line)
        if told.startswith("make "):
            words = shlex.split(told, comments=True)[1:]
            assert {word for word in words if re.fullmatch(r"[a-z0-9-]+", word)} <= targets, line
        for name in re.findall(r"^python -m ((?:benchmarks|warpsmith)[\w.]*)", told):
            assert importlib.util.find_spec(name), line
        for name in re.findall(r"^python ((?:docs|tests|benchmarks)/\S+)", told):
            assert (ROOT / name).is_file(), line


@pytest.mark.parametrize(("name", "least"), [("how-to", 2), ("python", 2)])
def test_each_call_of_the_python_api_has_arguments_that_there_are(name: str, least: int) -> None:
    blocks = FENCED.findall((ROOT / "docs" / f"{name}.md").read_text())
    nodes = [node for language, block in blocks if language == "python" for node in ast.walk(ast.parse(block))]
    calls = [
        node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("warpsmith.optimize")
    ]
    assert len(calls) >= least
    for call in calls:
        function = getattr(warpsmith, ast.unparse(call.func).removeprefix("warpsmith."))
        inspect.signature(function).bind(*call.args, **{str(keyword.arg): keyword for keyword in call.keywords})
