"""The page on plugins: each example, installed as the page says, fits its role and is not used until it is chosen."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent_compile.servicer import CompileServicer
from agent_correctness.servicer import checks
from gpu_bench.judging.loaded import executor_of
from gpu_bench.running.host import HostExecutor
from warpsmith import plugins, testing
from warpsmith.errors import UnknownPlugin
from warpsmith.v1 import task_pb2

PAGE = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text()
_EXAMPLE = re.compile(r"^<!-- plugin: (\w+) (\w+):(\w+) -->\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXAMPLES = {role: SimpleNamespace(module=module, made=made, text=text)
            for role, module, made, text in _EXAMPLE.findall(PAGE)}  # fmt: skip
MEMBERS = {
    "reasoner": ("propose",),
    "synthesizer": ("analyze", "synthesize", "repair"),
    "toolchain": ("name", "target", "missing", "describe", "compile", "close"),
    "check": ("name", "cases", "judge"),
    "executor": ("target", "load", "synchronize"),
    "schedule": ("name", "target", "settings", "accepts", "defaults", "alternatives", "footprint", "emit"),
    "search": ("next",),
    "exporter": ("export",),
}
"""What the Protocol of each role asks for; a lowering is a mapping."""


def install(site: Path, package: str) -> None:
    """All examples as one distribution, as pip would leave it."""
    site.mkdir()
    held = site / f"{package}-1.0.dist-info"
    held.mkdir()
    (held / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"[warpsmith.{role}]\n{each.module} = {each.module}:{each.made}\n" for role, each in EXAMPLES.items()]
    (held / "entry_points.txt").write_text("".join(lines))
    for each in EXAMPLES.values():
        (site / f"{each.module}.py").write_text(each.text)


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    site = tmp_path_factory.mktemp("plugins") / "site"
    install(site, "page_plugins")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        yield site
    for each in EXAMPLES.values():
        sys.modules.pop(each.module, None)


@pytest.fixture(scope="module")
def synthesizer() -> Any:
    """One for all, which remembers what it captured."""
    return plugins.load("synthesizer", EXAMPLES["synthesizer"].module)


def suite(role: str) -> Callable[[Any], list[str]]:
    module, _, name = testing.SUITES[role].partition(":")
    check: Callable[[Any], list[str]] = getattr(importlib.import_module(module), name)
    return check


def test_the_page_has_a_short_example_of_every_role_and_says_how_each_is_packaged_and_chosen() -> None:
    assert sorted(EXAMPLES) == sorted(plugins.ROLES) == sorted(testing.SUITES)
    for role, each in EXAMPLES.items():
        assert len(each.text.splitlines()) <= 25, role
        assert f"| [{role}](#{role}) |" in PAGE
        assert f"`warpsmith.{role}`" in PAGE
    assert '[project.entry-points."warpsmith.check"]\nstrict = "strict:Strict"\n' in PAGE


@pytest.mark.parametrize("role", [role for role in EXAMPLES if role != "synthesizer"])
def test_an_example_fits_its_role(role: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = EXAMPLES[role].module
    code = testing.main([role, name])
    assert (capsys.readouterr().out, code) == (f"{role} {name}: fits\n", 0)


def test_the_synthesizer_fits_its_role(synthesizer: Any) -> None:
    assert testing.check_synthesizer(lambda: synthesizer) == []


class Planted:
    """A plugin with another member in place of its own, or without it."""

    def __init__(self, plugin: object, name: str, *member: object) -> None:
        self._plugin, self._name, self._member = plugin, name, member

    def __getattr__(self, name: str) -> Any:
        if name != self._name:
            return getattr(self._plugin, name)
        if not self._member:
            raise AttributeError(name)
        return self._member[0]


def no_answer(*_: object) -> None:
    """Whatever it is asked."""


def no_argument_fits(*, wanted: int) -> int:
    return wanted


def faulty(*_: object) -> int:
    return {}["what the author forgot"]


def ends(*_: object) -> None:
    raise SystemExit(0)


FAULTS = {
    "missing": (),
    "gives None": (no_answer,),
    "gives something else": (lambda *_: object(),),
    "takes other arguments": (no_argument_fits,),
    "raises": (faulty,),
    "ends the process": (ends,),
    "is no method": (SimpleNamespace(),),
}


@pytest.mark.parametrize(
    ("role", "name", "fault"),
    [
        (role, name, fault)
        for role, names in MEMBERS.items()
        for name in names
        for fault in FAULTS
        if name not in ("close", "synchronize") or not fault.startswith("gives")  # that is not looked at
    ],
)
def test_each_fault_of_each_member_is_a_line_that_names_it(role: str, name: str, fault: str, synthesizer: Any) -> None:
    make: Any = plugins.find(role, EXAMPLES[role].module)
    shared = {"synthesizer": lambda: synthesizer}.get(role, make)
    found = suite(role)(lambda *card: Planted(shared(*card), name, *FAULTS[fault]))
    assert found
    assert name in "".join(found)
    assert not any("\n" in each or "AttributeError" in each for each in found), found


@pytest.mark.parametrize("name", ["program", "device", "elsewhere", "bind", "keep"])
def test_what_an_executor_loads_has_all_that_is_asked_of_it(name: str) -> None:
    executor = plugins.load("executor", EXAMPLES["executor"].module)
    lacking = Planted(executor, "load", lambda *arguments: Planted(executor.load(*arguments), name))
    assert suite("executor")(lambda: lacking) == [f"what load gives has no {name}"]


@pytest.mark.parametrize("role", EXAMPLES)
def test_what_cannot_be_made_is_a_line(role: str) -> None:
    assert suite(role)(no_answer) == ["it gives None where it is called to make the plugin"]
    (found,) = suite(role)(faulty)
    assert found.startswith("it raises KeyError: 'what the author forgot' (test_plugin_page.py, line ")
    (found,) = suite(role)(no_argument_fits)
    assert found.startswith("it does not take ")


@pytest.mark.parametrize(
    ("role", "right", "wrong", "says"),
    [
        ("reasoner", "best[: request.limit]", "best * 9", "9 hypotheses where 4 were asked for"),
        ("reasoner", 'raise BadInput("the request has no analysis with groups")', "pass", "is not refused"),
        ("toolchain", 'f"{PRAGMA}\\n{program.sources[0].text}"', '"oops"', "a right source is rejected: "),
        ("check", "> 2.0", "> 0.5", "it finds fault with comparisons that are right: output 0 is 1.0x off"),
        ("check", "seed_from(draw)", "7", "cases gives the same seeds at every judging"),
        ("check", 'name = "strict"', 'name = "values"', "its name is 'values'"),
        ("executor", "> 64", "> 0", "raises ProgramFault: 1 steps; 64 at most"),
        ("schedule", 'name = "small_blocks"', 'name = "cuda_pointwise"', "is the name of a schedule of"),
        ("schedule", "threads=128", "threads=4096", "settings that it names are refused"),
        ("lowering", '"hypot": ', '"exp": ', "it has handlers of exp, which have one"),
        ("lowering", '{"hypot": elementwise(2, Kind.DEFAULT, hypot)}', "{1: hypot}", "1 is not an operation's name"),
        ("search", "if state.is_new(hypothesis)", "if parent == PLAN_ZERO", "proposes what has been tried"),
        ("exporter", "SOURCES = ", "SOURCES = = ", "is not Python: "),
        ("exporter", "_sources.py", " sources.py", "which nothing can import"),
        ("exporter", "{sources!r}", "{sources!r}  # {__import__('time').perf_counter_ns()}", "equal runs give"),
    ],
)  # fmt: skip
def test_an_example_that_is_broken_does_not_fit(role: str, right: str, wrong: str, says: str) -> None:
    each = EXAMPLES[role]
    assert each.text.count(right) == 1
    spoiled: dict[str, Any] = {"__name__": each.module}
    exec(compile(each.text.replace(right, wrong), f"{each.module}.py", "exec"), spoiled)
    assert says in "\n".join(suite(role)(spoiled[each.made]))


def test_a_plugin_that_does_not_import_does_not_fit(
    installed: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "strict", raising=False)
    (installed / "strict.py").write_text("class Lax: ...\n")
    importlib.invalidate_caches()
    try:
        assert testing.main(["check", "strict"]) == 1
    finally:
        (installed / "strict.py").write_text(EXAMPLES["check"].text)
        sys.modules.pop("strict", None)
        importlib.invalidate_caches()
    said = capsys.readouterr().out
    assert said.startswith("- check 'strict' (strict:Strict) does not import: AttributeError: ")
    assert said.endswith("check strict: 1 finding\n")


def test_what_is_installed_is_used_when_it_is_chosen_and_not_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WARPSMITH_CACHE_DIR", str(tmp_path))
    assert [each.name for each in checks()] == ["memory", "overfit", "values", "precision"]
    assert type(executor_of(task_pb2.TARGET_CPU)) is HostExecutor
    assert "unroll-loops" not in compiled_by()
    for role in ("check", "executor", "toolchain"):
        monkeypatch.setenv(plugins.variable(role), EXAMPLES[role].module)
    assert [each.name for each in checks()] == ["memory", "overfit", "values", "precision", "strict"]
    assert type(executor_of(task_pb2.TARGET_CPU)).__name__ == "ShortPrograms"
    assert "unroll-loops" in compiled_by()


def compiled_by() -> str:
    """What the compile agent would compile a program for a processor with."""
    servicer = CompileServicer()
    try:
        return servicer._compiler.toolchain(task_pb2.TARGET_CPU).describe()
    finally:
        servicer.close()


def test_a_name_of_two_packages_is_refused_and_both_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(tmp_path / "other", "other_plugins")
    monkeypatch.syspath_prepend(tmp_path / "other")
    with pytest.raises(UnknownPlugin, match=r"'strict' is in .*: other_plugins .* and page_plugins "):
        plugins.require("check", "strict")
    plugins.require("check", "values")
