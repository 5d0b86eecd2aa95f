"""What the hostile suite runs on: the product's own compiler, sessions and judge, and a look at what was left behind.

`--scoreboard FILE` writes how many cases were caught and how many honest programs were accepted, from the outcomes of
the run itself.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the lists of cases are plain modules beside the tests

import hostile_programs
import hostile_tasks
from hostile_traces import Traces, own_place

from agent_compile.compiler import Compiler
from agent_compile.toolchains.gxx import Gxx
from agent_compile.toolchains.toolchain import Limits as CompileLimits
from agent_compile.toolchains.toolchain import Rejected
from agent_correctness.judge import Judge
from gpu_bench.limits import Limits
from gpu_bench.session import Session
from warpsmith import digest
from warpsmith.sandbox import jail
from warpsmith.v1 import (
    artifact_pb2,
    benchmark_service_pb2,
    candidate_pb2,
    correctness_service_pb2,
    timing_pb2,
    verdict_pb2,
)

HANG_SECONDS, PATIENT_SECONDS = 5.0, 60.0
"""What programs get that hang, half of the product's; and all others, which a machine that stalls must not blame."""
COMPILE_SECONDS = 6.0
"""What sources get that are to be given up."""
TIMES = 10
"""How often a kernel is timed that has to be caught by it."""


@pytest.fixture(scope="session")
def rung(request: pytest.FixtureRequest) -> Iterator[jail.Rung]:
    """The rung under test: the one that was asked for, as if no other worked here, or the machine's strongest."""
    asked = request.config.getoption("rung", None)
    here = jail.probe()
    chosen = jail.Rung(asked) if asked else here[0]
    assert chosen in here, f"{chosen.value} does not work on this machine; these do: {[each.value for each in here]}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jail, "probe", lambda: (chosen,))
        yield chosen


@pytest.fixture(scope="session")
def traces(rung: jail.Rung) -> Iterator[Traces]:
    """A temporary directory of the suite's own, so that anything left in it shows."""
    del rung
    with own_place() as made:
        yield made


# ---- from text to binary -----------------------------------------------------------------------------------


@contextmanager
def _compiler(limits: CompileLimits) -> Iterator[Compiler]:
    """The product's compiler, without a cache."""
    made = Compiler([Gxx(limits=limits)], None)
    yield made
    made.close()


@pytest.fixture(scope="session")
def compiler(traces: Traces) -> Iterator[Compiler]:
    """As patient as the product's."""
    del traces
    with _compiler(CompileLimits(memory_bytes=1 << 30)) as made:
        yield made


@pytest.fixture(scope="session")
def hasty_compiler(traces: Traces) -> Iterator[Compiler]:
    """For sources that are to be given up."""
    del traces
    with _compiler(CompileLimits(wall_seconds=COMPILE_SECONDS, memory_bytes=1 << 30)) as made:
        yield made


@functools.cache
def _built_bare(text: str) -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        source, output = Path(directory, "kernel.cpp"), Path(directory, "kernel.so")
        source.write_text(text)
        command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-fopenmp", "-w", str(source), "-o", str(output)]
        subprocess.run(command, check=True, timeout=60)
        return output.read_bytes()


def least_ns(timing: timing_pb2.Timing) -> float:
    """The least sample of the candidate: load only ever adds."""
    return min(sample for arm in timing.arms if arm.kind == timing_pb2.ARM_KIND_CANDIDATE for sample in arm.samples_ns)


def bare_artifact(program: candidate_pb2.Program) -> artifact_pb2.Artifact:
    """The program through g++ alone, as if the compile policy had missed what is in it."""
    content = _built_bare(program.sources[0].text)
    return artifact_pb2.Artifact(
        digest=digest.digest(content),
        program_digest=program.digest,
        format=artifact_pb2.BINARY_FORMAT_SHARED_OBJECT,
        content=content,
    )


# ---- the bench -----------------------------------------------------------------------------------------------


@dataclass
class Bench:
    """The judge with one warm session at a time: that of the module asked for last."""

    compiler: Compiler
    traces: Traces
    rung: jail.Rung | None = None
    places: dict[str, str] = field(default_factory=dict)
    """What stands for "{secret}" and the like in a case's text."""
    _module: str = ""
    _built: dict[str, artifact_pb2.Artifact | Rejected] = field(default_factory=dict)
    """What the compiler made of programs by digest: the controls come again and again."""
    _session: Session | None = None

    def verdict(
        self,
        module: hostile_tasks.Module,
        program: candidate_pb2.Program,
        *,
        bare: bool = False,
        edit: Callable[[candidate_pb2.Program], object] | None = None,
        tier: timing_pb2.Tier.ValueType = timing_pb2.TIER_FINAL,
        hangs: bool = False,
    ) -> verdict_pb2.Verdict:
        """Compiles and judges, as the product does; `edit` changes the program after it was compiled."""
        if bare:
            artifact = bare_artifact(program)
        else:
            if program.digest not in self._built:
                self._built[program.digest] = self.compiler.compile(program).outcome
            outcome = self._built[program.digest]
            if isinstance(outcome, Rejected):
                return verdict_pb2.Verdict(
                    state=verdict_pb2.VERDICT_STATE_FAIL, kind=outcome.kind, detail=outcome.diagnostics
                )
            artifact = artifact_pb2.Artifact()
            artifact.CopyFrom(outcome)
        if edit is not None:
            edit(program)
            program.digest = digest.of_program(program)
            artifact.program_digest = program.digest
        request = correctness_service_pb2.VerifyArtifactRequest(
            task=module.task(), program=program, artifact=artifact, tier=tier
        )
        session = self.session(module)
        session._limits = Limits(hang_seconds=HANG_SECONDS if hangs else PATIENT_SECONDS)
        return Judge(self).verify(request)

    def bare(self, program: candidate_pb2.Program) -> artifact_pb2.Artifact:
        """The program built without the compile policy."""
        return bare_artifact(program)

    def hostile(self, case: hostile_programs.Hostile) -> verdict_pb2.Verdict:
        """The verdict on a hostile kernel. One that has to be caught while it is timed is timed until it is: on a busy
        machine it may be called one by one, where it does all the work; so it is let go on only where it took its time.
        """
        headers = hostile_tasks.HEADERS + case.headers
        made = hostile_tasks.program(
            case.module, [self.filled(case.body)], ahead=self.filled(case.ahead), headers=headers
        )
        hangs = "TIMEOUT" in case.kinds
        verdict = self.verdict(case.module, made, bare=case.bare, edit=case.edit, tier=case.tier, hangs=hangs)
        if not case.timed or verdict.state != verdict_pb2.VERDICT_STATE_PASS:
            return verdict
        for _ in range(TIMES):
            measured = self.measured(case.module, made, bare=case.bare)
            if measured.HasField("fault"):
                verdict.state, verdict.kind = verdict_pb2.VERDICT_STATE_FAIL, measured.fault.kind
                verdict.detail = f"while timed: {measured.fault.detail}"
                break
            if (least := least_ns(measured.timing)) < 0.9 * (usual := self.usual_ns(case.module)):
                verdict.detail = f"timed at {least:.0f} ns, where all the work takes {usual:.0f}"
                break
        return verdict

    def measured(
        self, module: hostile_tasks.Module, program: candidate_pb2.Program, *, bare: bool = False
    ) -> benchmark_service_pb2.MeasureArtifactResponse:
        """A screening of a program that was judged before."""
        artifact = bare_artifact(program) if bare else self._built[program.digest]
        assert isinstance(artifact, artifact_pb2.Artifact)
        request = benchmark_service_pb2.MeasureArtifactRequest(
            task=module.task(), program=program, artifact=artifact, tier=timing_pb2.TIER_SCREENING
        )
        return self.session(module).measure(request)

    def usual_ns(self, module: hostile_tasks.Module) -> float:
        """Time of a right program of the module: the least sample of a screening, for load only ever adds."""
        return least_ns(self.measured(module, self.honest(module)).timing)

    def warm(self, module: hostile_tasks.Module) -> None:
        """Makes sure that both workers of the module's session are there, and the compiler's."""
        if not module.honest:  # plan zero compiles nothing
            softmax = hostile_tasks.SOFTMAX
            self.compiler.compile(hostile_tasks.program(softmax, [softmax.honest]))
        if self._session is None or self._module != module.name:
            assert self.control(module).state == verdict_pb2.VERDICT_STATE_PASS

    def control(self, module: hostile_tasks.Module) -> verdict_pb2.Verdict:
        """The verdict on a right program of the module."""
        return self.verdict(module, self.honest(module), tier=timing_pb2.TIER_SCREENING)

    def honest(self, module: hostile_tasks.Module) -> candidate_pb2.Program:
        """A right program: the plain kernel, or else plan zero."""
        if module.honest:
            return hostile_tasks.program(module, [module.honest])
        return captured_plan(module)

    def filled(self, text: str) -> str:
        """A case's text with its places filled in."""
        for name, value in self.places.items():
            text = text.replace("{" + name + "}", value)
        return text

    def session(self, module: hostile_tasks.Module) -> Session:
        """The session of a module; the one before is closed."""
        if self._session is None or self._module != module.name:
            self.close()
            self._session = Session(module.task(), rung=self.rung, limits=Limits(hang_seconds=PATIENT_SECONDS))
            self._module = module.name
        return self._session

    def compare(
        self, request: benchmark_service_pb2.CompareOutputsRequest
    ) -> benchmark_service_pb2.CompareOutputsResponse:
        """As `Comparer.compare`, on the open session."""
        assert self._session is not None
        return self._session.compare(request.program, request.artifact, request.cases)

    def close(self) -> None:
        """Ends the session."""
        if self._session is not None:
            self._session.close()
            self._session = None


def captured_plan(module: hostile_tasks.Module) -> candidate_pb2.Program:
    """Plan zero of a module, captured in this process: the modules are ours."""
    from warpsmith.graphs import capture, task_module

    with tempfile.TemporaryDirectory() as directory:
        loaded = task_module.load(module.task(), Path(directory))
    return hostile_tasks.plan_zero(capture.capture(loaded.build(), loaded.inputs(0)))


@pytest.fixture(scope="session")
def bench(compiler: Compiler, traces: Traces, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """The bench, beside what an escape would reach: a secret, two services, our own process and environment."""
    place = tmp_path_factory.mktemp("outside")
    (place / "secret").write_text("HOSTILE_SECRET")
    os.environ["HOSTILE_SECRET"] = "x"
    with socket.create_server(("127.0.0.1", 0)) as service, socket.socket(socket.AF_UNIX) as local:
        local.bind(str(place / "service.sock"))
        local.listen()
        places = {
            "secret": str(place / "secret"),
            "escaped": str(place / "escaped"),
            "socket": str(place / "service.sock"),
            "port": str(service.getsockname()[1]),
            "pid": str(os.getpid()),
        }
        made = Bench(compiler, traces, places=places)
        yield made
        made.close()
    del os.environ["HOSTILE_SECRET"]
    assert sorted(path.name for path in place.iterdir()) == ["secret", "service.sock"]


@pytest.fixture(scope="session")
def plan_of() -> Callable[[hostile_tasks.Module], candidate_pb2.Program]:
    """Plan zero of a module."""
    return captured_plan


# ---- the scoreboard ------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    """The scoreboard's file, and the rung of the jail."""
    parser.addoption("--scoreboard", metavar="FILE", help="write the hostile suite's scoreboard there")
    parser.addoption("--rung", metavar="NAME", help="run the hostile suite on this rung: bubblewrap, unshare, landlock")


_SCORES: dict[tuple[str, str], Counter[str]] = {}
_FAILED: list[str] = []
_DEFENCES: dict[str, bool] = {}
"""Defence → whether a hostile case got through without it, and did not with it."""


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Writes on the report what it is of, for it may come from another process; a case is a parameter called `case`."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if "_needs_" in item.name or "_need_" in item.name or item.name.startswith("test_without_"):
        report.user_properties.append(("defence", re.sub(r"\b(on|off)-|-?\b(on|off)\b", "", item.name)))
    case = getattr(getattr(item, "callspec", None), "params", {}).get("case")
    if case is not None:
        side = "honest" if item.function.__name__.startswith("test_an_honest") else "hostile"  # type: ignore[attr-defined]
        report.user_properties.append(("case", (side, case.category, case.name)))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Counts the outcome of every case and defence."""
    told: dict[str, Any] = dict(report.user_properties)
    if "defence" in told:
        _DEFENCES[told["defence"]] = _DEFENCES.get(told["defence"], True) and not report.failed
    if "case" not in told or (report.when != "call" and not report.failed):
        return
    side, category, name = told["case"]
    right = {"hostile": "caught", "honest": "accepted"}[side]
    undecided = "undecided" in told
    _SCORES.setdefault((side, category), Counter())[right if report.passed and not undecided else "not"] += 1
    if undecided:
        _FAILED.append(f"{category}: {name} (not decided on this machine: neither accepted nor caught)")
    elif not report.passed:
        _FAILED.append(f"{category}: {name}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Writes the scoreboard where one was asked for."""
    file = session.config.getoption("scoreboard", None)
    if not file or hasattr(session.config, "workerinput"):
        return
    rung = session.config.getoption("rung", None) or jail.choose().value
    lines = [
        "# The hostile suite on the CPU target",
        "",
        f"Jail: {rung}. {platform.machine()}, {os.cpu_count()} processors, Linux {platform.release().split('-')[0]}, "
        f"Python {platform.python_version()}.",
        "",
        "| cases | caught | of |",
        "| --- | ---: | ---: |",
    ]
    for side, right, title in (("hostile", "caught", "all hostile"), ("honest", "accepted", "all honest (accepted)")):
        rows = {category: counts for (which, category), counts in _SCORES.items() if which == side}
        total = Counter[str]()
        for category, counts in sorted(rows.items()):
            total += counts
            lines.append(f"| {category} | {counts[right]} | {counts.total()} |")
        lines.append(f"| **{title}** | **{total[right]}** | **{total.total()}** |")
    shown = f"{sum(_DEFENCES.values())} of {len(_DEFENCES)}"
    lines += ["", f"{shown} defences let something hostile through where they are taken away.", ""]
    lines += [f"- not as expected: {name}" for name in _FAILED]
    asked = session.config.getoption("rung", None)
    options = f" --rung {asked}" if asked else ""
    command = f"python -m pytest -m hostile tests/hostile{options} --scoreboard {file}"
    lines += [
        "" if _FAILED else "Nothing was accepted that should not be, and nothing honest refused.",
        "",
        f"Made by `{command}`.",
        "",
    ]
    Path(file).write_text("\n".join(lines))
