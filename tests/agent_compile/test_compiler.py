"""The way from a program to an artifact: policy, cache, toolchain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent_compile import compiler as compiler_module
from agent_compile.cache import Cache
from agent_compile.compiler import Compiler
from agent_compile.servicer import CompileServicer
from agent_compile.toolchains.gxx import Gxx
from agent_compile.toolchains.toolchain import Compiled, Outcome, Rejected
from warpsmith import testing
from warpsmith.contract import program_parts
from warpsmith.errors import BadInput
from warpsmith.v1 import artifact_pb2, candidate_pb2, task_pb2, verdict_pb2

COUNT = 12


class OfParts:
    """A toolchain whose binary is the text; refuses a text that says so."""

    name = "parts"
    target: task_pb2.Target.ValueType = task_pb2.TARGET_CUDA

    def __init__(self) -> None:
        self.seen: list[str] = []

    def missing(self) -> str:
        return ""

    def describe(self) -> str:
        return "parts 1.0"

    def compile(self, program: candidate_pb2.Program) -> Outcome:
        text = program.sources[0].text
        self.seen.append(text)
        if "refused" in text:
            return Rejected(verdict_pb2.FAILURE_KIND_COMPILE_ERROR, "error: refused")
        made = [artifact_pb2.KernelResources(entry=step.launch.entry) for step in program.steps]
        return Compiled(text.encode(), artifact_pb2.BINARY_FORMAT_CUBIN, made)

    def close(self) -> None: ...


def in_parts(bodies: dict[int, str], head: str = "// some moves") -> candidate_pb2.Program:
    made = candidate_pb2.Program(target=task_pb2.TARGET_CUDA, architecture="sm_90a")
    texts = [f"void k{number}() {{{bodies.get(number, '')}}}\n" for number in range(COUNT)]
    made.sources.add(name="kernel.cu", text=program_parts.joined(head, texts))
    for number in range(COUNT):
        made.steps.add().launch.entry = f"k{number}"
    return made


def test_a_program_of_many_kernels_is_compiled_in_parts_each_kept_for_itself(tmp_path: Path) -> None:
    toolchain = OfParts()
    compiler = Compiler([toolchain], Cache(tmp_path))
    first, same = compiler.compile(in_parts({})), compiler.compile(in_parts({}, head="// other moves"))
    assert (first.cached, same.cached, len(toolchain.seen)) == (False, True, COUNT)
    whole = first.outcome
    assert isinstance(whole, artifact_pb2.Artifact)
    assert [whole.content, *whole.further] == [f"void k{number}() {{}}\n".encode() for number in range(COUNT)]
    assert [each.entry for each in whole.resources] == [f"k{number}" for number in range(COUNT)]
    changed = compiler.compile(in_parts({3: "return;"}))
    assert (changed.cached, len(toolchain.seen)) == (False, COUNT + 1)
    assert isinstance(changed.outcome, artifact_pb2.Artifact)
    assert changed.outcome.digest != whole.digest
    assert changed.outcome.further[2] == b"void k3() {return;}\n"


def test_a_part_that_is_refused_refuses_the_program_and_is_remembered(tmp_path: Path) -> None:
    toolchain = OfParts()
    compiler = Compiler([toolchain], Cache(tmp_path))
    for _ in range(2):
        refused = compiler.compile(in_parts({0: "refused"})).outcome
        assert isinstance(refused, Rejected)
        assert refused.diagnostics == "error: refused"
    assert sum("refused" in text for text in toolchain.seen) == 1


class Counting:
    """A toolchain that answers what it was told and counts."""

    name = "counting"
    target: task_pb2.Target.ValueType = task_pb2.TARGET_CPU

    def __init__(self, outcome: Outcome | None = None, lack: str = "") -> None:
        self.outcome = outcome or Compiled(b"binary", artifact_pb2.BINARY_FORMAT_SHARED_OBJECT)
        self.lack = lack
        self.count = 0
        self.closed = False

    def missing(self) -> str:
        return self.lack

    def describe(self) -> str:
        return "counting 1.0"

    def compile(self, program: candidate_pb2.Program) -> Outcome:
        assert program.sources
        self.count += 1
        return self.outcome

    def close(self) -> None:
        self.closed = True


def test_equal_programs_are_compiled_once(program: Any, tmp_path: Path) -> None:
    toolchain = Counting()
    compiler = Compiler([toolchain], Cache(tmp_path))
    first, second = compiler.compile(program("int a;\n")), compiler.compile(program("int a;\n"))
    assert (first.cached, second.cached, toolchain.count) == (False, True, 1)
    assert first.outcome == second.outcome
    assert isinstance(first.outcome, artifact_pb2.Artifact)
    assert first.outcome.digest
    assert first.outcome.toolchain == "counting 1.0"


def test_an_artifact_that_older_rules_let_through_is_made_again(
    program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toolchain = Counting()
    Compiler([toolchain], Cache(tmp_path)).compile(program("int a;\n"))
    monkeypatch.setattr(compiler_module, "_RULES", "others")
    assert not Compiler([toolchain], Cache(tmp_path)).compile(program("int a;\n")).cached
    assert toolchain.count == 2


def test_programs_that_differ_in_buffers_share_a_binary_under_their_own_names(program: Any, tmp_path: Path) -> None:
    toolchain = Counting()
    compiler = Compiler([toolchain], Cache(tmp_path))
    one, other = program("int a;\n"), program("int a;\n")
    other.buffers.add(name="x")
    first, second = compiler.compile(one).outcome, compiler.compile(other).outcome
    assert toolchain.count == 1
    assert isinstance(first, artifact_pb2.Artifact)
    assert isinstance(second, artifact_pb2.Artifact)
    assert first.program_digest != second.program_digest
    assert first.digest == second.digest


@pytest.mark.parametrize(
    ("kind", "count"), [(verdict_pb2.FAILURE_KIND_COMPILE_ERROR, 1), (verdict_pb2.FAILURE_KIND_COMPILE_LIMIT, 2)]
)
def test_errors_are_remembered_and_limits_are_not(
    program: Any, tmp_path: Path, kind: verdict_pb2.FailureKind.ValueType, count: int
) -> None:
    toolchain = Counting(Rejected(kind, "kernel.cpp:1: error"))
    compiler = Compiler([toolchain], Cache(tmp_path))
    answers = [compiler.compile(program("int a;\n")).outcome for _ in range(2)]
    assert answers == [toolchain.outcome, toolchain.outcome]
    assert toolchain.count == count


def test_a_refused_source_never_reaches_the_toolchain(program: Any) -> None:
    toolchain = Counting()
    outcome = Compiler([toolchain], None).compile(program("#include <thread>\n")).outcome
    assert isinstance(outcome, Rejected)
    assert toolchain.count == 0


def test_a_program_of_library_calls_needs_no_compiler() -> None:
    made = candidate_pb2.Program(target=task_pb2.TARGET_CPU)
    made.steps.add(group="out", library=candidate_pb2.LibraryCall(target="aten.relu.default"))
    outcome = Compiler([], None).compile(made).outcome
    assert isinstance(outcome, artifact_pb2.Artifact)
    assert outcome.format == artifact_pb2.BINARY_FORMAT_NONE
    assert outcome.program_digest


def test_launches_without_sources_are_a_compile_error(program: Any) -> None:
    made = program("")
    del made.sources[:]
    outcome = Compiler([], None).compile(made).outcome
    assert isinstance(outcome, Rejected)
    assert outcome.kind == verdict_pb2.FAILURE_KIND_COMPILE_ERROR


def test_the_first_toolchain_that_can_compile_is_used(program: Any) -> None:
    broken, working = Counting(lack="no NVRTC library: pip install it"), Counting()
    Compiler([broken, working], None).compile(program("int a;\n"))
    assert (broken.count, working.count) == (0, 1)


def test_no_toolchain_is_the_machines_fault_and_no_target_the_callers(program: Any) -> None:
    with pytest.raises(BadInput, match="no NVRTC"):
        Compiler([Counting(lack="no NVRTC library")], None).compile(program("int a;\n"))
    with pytest.raises(BadInput, match="no toolchain for cpu is installed"):
        Compiler([], None).compile(program("int a;\n"))
    made = program("int a;\n")
    for nobodys in (0, 11):  # not set, and of a later version of the contract
        made.ClearField("target")
        made.MergeFromString(bytes([0x08, nobodys]))
        with pytest.raises(BadInput, match="names no target"):
            Compiler([], None).compile(made)


def test_the_service_fits_its_role_and_closes_its_compilers(gxx: Gxx) -> None:
    servicer = CompileServicer(Compiler([gxx], None))
    context: Any = None
    assert testing.check_compile(lambda request: servicer.CompileCandidate(request, context)) == []
    toolchain = Counting()
    CompileServicer(Compiler([toolchain], None)).close()
    assert toolchain.closed
