"""The hostile suite on a GPU: `python tests/hostile/hostile_gpu.py` (a Hopper GPU; pytest is not needed).

The one idea: the product's own compiler, sessions and judge, case by case, and after each a right kernel that has to
pass in a process that is as good as new. Cases that only time shows, the references that are no match, and what the
judging costs come after. Every line is printed as it ends.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import hostile_kernels as kernels
import hostile_sanitizer
import hostile_solutions as solutions
import hostile_tally
import hostile_tasks as tasks

from agent_compile.compiler import Compiler
from agent_compile.nvrtc import Nvrtc
from agent_compile.toolchain import Rejected
from agent_correctness.judge import Judge
from gpu_bench.machine import Machine
from gpu_bench.session import Session
from gpu_bench.solution_session import SolutionSession
from orchestrator.judge import concluded
from warpsmith import digest
from warpsmith.v1 import (
    artifact_pb2,
    benchmark_service_pb2,
    candidate_pb2,
    correctness_service_pb2,
    task_pb2,
    timing_pb2,
    verdict_pb2,
)

PASS, FAIL = verdict_pb2.VERDICT_STATE_PASS, verdict_pb2.VERDICT_STATE_FAIL
SCREENING, FINAL = timing_pb2.TIER_SCREENING, timing_pb2.TIER_FINAL
_PROBE = """
import ctypes
driver = ctypes.CDLL("libcuda.so.1")
device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
assert driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0
assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0 and driver.cuCtxSetCurrent(context) == 0
assert driver.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(1 << 20)) == 0
assert driver.cuMemsetD8_v2(memory, ctypes.c_ubyte(1), ctypes.c_size_t(1 << 20)) == 0
assert driver.cuCtxSynchronize() == 0
"""
"""From a fresh process: the GPU does something for it. In a container the driver lists no processes."""


def kind_of(verdict: verdict_pb2.Verdict) -> str:
    """Without FAILURE_KIND_."""
    return verdict_pb2.FailureKind.Name(verdict.kind).removeprefix("FAILURE_KIND_")


@dataclass
class Bench:
    """One warm session at a time."""

    compiler: Compiler = field(default_factory=lambda: Compiler([Nvrtc()], None))
    machine: Machine = field(default_factory=Machine)
    _session: Session | None = None
    _name: str = ""
    _artifacts: dict[str, artifact_pb2.Artifact | Rejected] = field(default_factory=dict)

    def session(self, module: tasks.Module) -> Session:
        """The session of a module; the one before is closed."""
        return self._opened(module.name, lambda: Session(
            kernels.task(module), machine=self.machine))  # fmt: skip

    def solution_session(self, reference: str) -> SolutionSession:
        """The session of a reference for solutions."""
        task = task_pb2.Task(
            name="reference", entry_path="model.py", class_name="Model", target=task_pb2.TARGET_CUDA,
            precision=task_pb2.PRECISION_FP32,
            sources=[task_pb2.SourceFile(path="model.py", content=reference.encode())],
        )  # fmt: skip
        task.digest = digest.of_task(task)
        made = self._opened(reference, lambda: SolutionSession(task, machine=self.machine))
        assert isinstance(made, SolutionSession)
        return made

    def _opened(self, name: str, make: Callable[[], Session]) -> Session:
        if self._session is None or self._name != name:
            self.close()
            self._session, self._name = make(), name
        return self._session

    def close(self) -> None:
        """Ends the session."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def compiled(
        self, module: tasks.Module, kernel: kernels.Kernel
    ) -> tuple[candidate_pb2.Program, artifact_pb2.Artifact | Rejected]:
        """The kernel as a program of the module, compiled as the product does it; an edit comes after."""
        program = kernels.program(module, [kernel])
        if program.digest not in self._artifacts:
            self._artifacts[program.digest] = self.compiler.compile(program).outcome
        made = self._artifacts[program.digest]
        if isinstance(made, Rejected):
            return program, made
        artifact = artifact_pb2.Artifact()
        artifact.CopyFrom(made)
        if kernel.edit is not None:
            kernel.edit(program)
            program.digest = artifact.program_digest = digest.of_program(program)
        return program, artifact

    def verdict(self, kernel: kernels.Kernel, tier: timing_pb2.Tier.ValueType = FINAL) -> verdict_pb2.Verdict:
        """The verdict on a kernel."""
        program, artifact = self.compiled(kernel.module, kernel)
        if isinstance(artifact, Rejected):
            return verdict_pb2.Verdict(state=FAIL, kind=artifact.kind, detail=artifact.diagnostics)
        return judged(self.session(kernel.module), program, artifact, tier)

    def timing(self, kernel: kernels.Kernel, tier: timing_pb2.Tier.ValueType = SCREENING) -> timing_pb2.Timing:
        """The times of a right kernel."""
        program, artifact = self.compiled(kernel.module, kernel)
        assert isinstance(artifact, artifact_pb2.Artifact), artifact
        return measured(self.session(kernel.module), program, artifact, tier)

    def candidate_ns(self, kernel: kernels.Kernel) -> float:
        """Median of three screenings."""
        return statistics.median(arm_ns(self.timing(kernel), "candidate") for _ in range(3))


def judged(
    session: Session,
    program: candidate_pb2.Program,
    artifact: artifact_pb2.Artifact,
    tier: timing_pb2.Tier.ValueType,
) -> verdict_pb2.Verdict:
    """The product's judge on a session."""

    class Comparer:
        def compare(
            self, asked: benchmark_service_pb2.CompareOutputsRequest
        ) -> benchmark_service_pb2.CompareOutputsResponse:
            return session.compare(asked.program, asked.artifact, asked.cases)

    request = correctness_service_pb2.VerifyArtifactRequest(
        task=session.task, program=program, artifact=artifact, tier=tier
    )
    return Judge(Comparer()).verify(request)


def measured(
    session: Session,
    program: candidate_pb2.Program,
    artifact: artifact_pb2.Artifact,
    tier: timing_pb2.Tier.ValueType,
) -> timing_pb2.Timing:
    """The times of a program."""
    answer = session.measure(
        benchmark_service_pb2.MeasureArtifactRequest(task=session.task, program=program, artifact=artifact, tier=tier)
    )
    assert answer.HasField("timing"), answer.fault.detail
    return answer.timing


def arm_ns(timing: timing_pb2.Timing, name: str) -> float:
    """Median of an arm."""
    return next(arm.median_ns for arm in timing.arms if arm.name == name)


def is_free(seconds: float) -> bool:
    """Whether a fresh process gets work done on the GPU within that time."""
    try:
        return subprocess.run([sys.executable, "-c", _PROBE], timeout=seconds, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


# ---- the checks; each raises AssertionError with its reason, or gives a sentence ----------------------------


def check_kernel(bench: Bench, kernel: kernels.Kernel) -> str:
    """A hostile kernel fails with its kind, in time, and a right one passes straight after."""
    session = bench.session(kernel.module)
    if session.jail_rung == "":
        assert bench.verdict(kernels.honest(kernel.module), SCREENING).state == PASS
    tier = SCREENING if kernel.module.name in ("million", "wide") else FINAL
    begin = time.monotonic()
    verdict = bench.verdict(kernel, tier)
    seconds = time.monotonic() - begin
    assert verdict.state == FAIL, f"{verdict_pb2.VerdictState.Name(verdict.state)}: {verdict.detail}"
    assert kind_of(verdict) in kernel.kinds, f"{kind_of(verdict)}: {verdict.detail}"
    assert seconds < kernel.seconds, f"{seconds:.1f} s"
    control = bench.verdict(kernels.honest(kernel.module), SCREENING)
    assert control.state == PASS, f"the control: {kind_of(control)}: {control.detail}"
    return f"{kind_of(verdict)} in {seconds:.1f} s"


def check_honest(bench: Bench, kernel: kernels.Kernel) -> str:
    """A right kernel passes."""
    verdict = bench.verdict(kernel, SCREENING if kernel.module.name in ("million", "wide") else FINAL)
    assert verdict.state == PASS, f"{kind_of(verdict)}: {verdict.detail}"
    return verdict.detail


def check_spin(bench: Bench) -> str:
    """After a kernel that spins on all multiprocessors the GPU is free in 10 s, and the next job as fast as before."""
    wide = kernels.honest(kernels.WIDE)
    before = bench.candidate_ns(wide)
    spin = next(case for case in kernels.CASES if case.name == "spin on all multiprocessors")
    begin = time.monotonic()
    verdict = bench.verdict(replace(spin, module=kernels.WIDE), SCREENING)
    ended = time.monotonic()
    assert kind_of(verdict) == "TIMEOUT", verdict.detail
    assert is_free(10.0), "the GPU did nothing for a fresh process within 10 s"
    free = time.monotonic() - ended
    after = bench.candidate_ns(wide)
    assert abs(after / before - 1) < 0.03, f"{after:.0f} ns instead of {before:.0f}"
    return f"ended after {ended - begin:.1f} s, GPU proven free {free:.1f} s later, next job {after / before - 1:+.2%}"


def check_workspace(bench: Bench) -> str:
    """An answer kept in a workspace is not there in a timed call."""
    assert bench.verdict(kernels.KEPT_IN_WORKSPACE).state == PASS, "it should be right"
    kept = bench.candidate_ns(kernels.KEPT_IN_WORKSPACE)
    assert kept > 100_000, f"{kept:.0f} ns: the answer was found"
    return f"{kept / 1e3:.0f} us, all of the work"


def check_output(bench: Bench) -> str:
    """An answer of an earlier call is not found in the memory of an output."""
    assert bench.verdict(kernels.LEFT_IN_OUTPUT, SCREENING).state == PASS, "it should be right"
    plain, found = bench.candidate_ns(kernels.honest(kernels.WIDE)), bench.candidate_ns(kernels.LEFT_IN_OUTPUT)
    assert found > 0.9 * plain, f"{found:.0f} ns, an honest kernel {plain:.0f}"
    return f"{found / 1e3:.1f} us, an honest kernel {plain / 1e3:.1f} us"


def check_eviction(bench: Bench) -> str:
    """A hint to keep lines in the L2 gains nothing on a cold cache."""
    plain, kept = bench.candidate_ns(kernels.honest(kernels.WIDE)), bench.candidate_ns(kernels.EVICT_LAST)
    assert kept > 0.95 * plain, f"{kept:.0f} ns, without the hint {plain:.0f}"
    return f"{kept / 1e3:.1f} us, without the hint {plain / 1e3:.1f} us"


_TRAPS = {
    "a product with a diagonal matrix": (
        "torch.diag(x) @ self.w", "[torch.rand(4096)]", "self.w = torch.nn.Parameter(torch.rand(4096, 4096))",
        "REFERENCE_WASTEFUL"),
    "a constant result": ("x * 0 + 2", "[torch.rand(64, 64)]", "pass", "OUTPUT_CONSTANT"),
    "a result that is zero": ("torch.relu(-x)", "[torch.rand(64, 64)]", "pass", "OUTPUT_ZERO"),
}  # fmt: skip


def check_trap(bench: Bench, forward: str, inputs: str, init: str, flag: str) -> str:
    """A reference that is no match is flagged."""
    module = replace(tasks.TINY, name=forward, forward=forward, inputs=inputs, init=init)
    session = bench.session(module)
    report = session.run_reference()
    assert flag in report.flags, str(list(report.flags))
    return flag


def check_library(bench: Bench) -> str:
    """cuBLAS against itself is as fast as itself."""
    module = replace(
        tasks.TINY, name="product", forward="x @ self.w", inputs="[torch.rand(4096, 4096)]",
        init="self.w = torch.nn.Parameter(torch.rand(4096, 4096))",
    )  # fmt: skip
    session = bench.session(module)
    program = _plan_zero(module)
    artifact = artifact_pb2.Artifact(
        program_digest=program.digest, format=artifact_pb2.BINARY_FORMAT_NONE, toolchain="torch"
    )
    verdict = judged(session, program, artifact, SCREENING)
    assert verdict.state == PASS, verdict.detail
    timing = measured(session, program, artifact, SCREENING)
    speedup = timing.speedup_eager
    assert not timing.faster
    assert abs(speedup.median - 1) < max(0.01, 3 * timing.noise_floor), f"{speedup.median:.4f}"
    return f"{speedup.median:.4f}x [{speedup.low:.4f}, {speedup.high:.4f}]"


def _plan_zero(module: tasks.Module) -> candidate_pb2.Program:
    from warpsmith import capture, task_module

    with tempfile.TemporaryDirectory() as directory:
        loaded = task_module.load(module.task(), Path(directory))
    made = tasks.plan_zero(capture.capture(loaded.build(), loaded.inputs(0)))
    made.target = task_pb2.TARGET_CUDA
    made.digest = digest.of_program(made)
    return made


def check_costs(bench: Bench) -> str:
    """Screening of a candidate at 4096 x 16384 in a warm session takes at most 150 ms."""
    wide = kernels.honest(kernels.WIDE)
    program, artifact = bench.compiled(wide.module, wide)
    assert isinstance(artifact, artifact_pb2.Artifact)
    session = bench.session(wide.module)
    taken = []
    for _ in range(5):
        begin = time.monotonic()
        assert judged(session, program, artifact, SCREENING).state == PASS
        compared = time.monotonic()
        measured(session, program, artifact, SCREENING)
        taken.append((compared - begin, time.monotonic() - compared))
    compare, timed = (1e3 * statistics.median(each[i] for each in taken) for i in (0, 1))
    sentence = f"screening {compare + timed:.0f} ms: comparison {compare:.0f}, timing {timed:.0f}"
    assert compare + timed <= 150.0, sentence
    return sentence


def check_finalist(bench: Bench) -> str:
    """A finalist at 4096 x 16384 takes at most 20 s beside compiling the baselines, which is done before."""
    wide = kernels.honest(kernels.WIDE)
    program, artifact = bench.compiled(wide.module, wide)
    assert isinstance(artifact, artifact_pb2.Artifact)
    session = bench.session(wide.module)
    measured(session, program, artifact, FINAL)
    begin = time.monotonic()
    assert judged(session, program, artifact, FINAL).state == PASS
    compared = time.monotonic()
    inspections = session.inspect(program, artifact)
    inspected = time.monotonic()
    timing = measured(session, program, artifact, FINAL)
    seconds = time.monotonic() - begin
    sentence = (
        f"finalist {seconds:.1f} s: comparison {compared - begin:.1f} s, compute-sanitizer {inspected - compared:.1f}, "
        f"timing {begin + seconds - inspected:.1f}"
    )
    assert not any(each.finding for each in inspections), str(inspections)
    assert seconds <= 20.0, sentence
    return f"{sentence} ({timing.speedup_fastest.median:.3f}x {timing.fastest_baseline})"


def check_sanitizer(bench: Bench, name: str, tool: str) -> str:
    """compute-sanitizer finds a wrong kernel wrong and a right one right."""
    program, artifact = bench.compiled(hostile_sanitizer.named(name).module, hostile_sanitizer.named(name))
    assert isinstance(artifact, artifact_pb2.Artifact)
    return hostile_sanitizer.check_kernel((program, artifact), tool)


def check_emitters(bench: Bench) -> str:
    """compute-sanitizer finds nothing in what the product writes."""

    def compiled(program: candidate_pb2.Program) -> artifact_pb2.Artifact:
        made = bench.compiler.compile(program).outcome
        assert isinstance(made, artifact_pb2.Artifact), made.diagnostics
        return made

    return hostile_sanitizer.check_emitters(compiled)


# ---- solutions -----------------------------------------------------------------------------------------------


def check_solution(bench: Bench, case: solutions.Solution) -> str:
    """A solution that cheats fails with its kind; one that does not passes."""
    session = bench.solution_session(case.reference)
    own = digest.digest(case.text)
    program = candidate_pb2.Program(target=task_pb2.TARGET_CUDA, digest=own)
    artifact = artifact_pb2.Artifact(
        digest=own, program_digest=own, format=artifact_pb2.BINARY_FORMAT_PYTHON_MODULE, content=case.text.encode()
    )
    verdict = judged(session, program, artifact, SCREENING)
    sentence = f"{kind_of(verdict) if verdict.kind else 'PASS'}: {verdict.detail}"
    if case.timed and verdict.state == PASS:
        answer = session.measure(
            benchmark_service_pb2.MeasureArtifactRequest(
                task=session.task, program=program, artifact=artifact, tier=SCREENING
            )
        )
        verdict = concluded(case.name, verdict, answer).verdict
        sentence = f"PASS: {answer.timing.speedup_eager.median:.3f}x eager"
        if verdict.state != PASS:
            sentence = f"{kind_of(verdict)}: {verdict.detail}"
    assert (kind_of(verdict) in case.kinds) if case.kinds else (verdict.state == PASS), sentence
    return sentence


# ---- all of them ---------------------------------------------------------------------------------------------

Check = Callable[[Bench], str]


def checks() -> Iterator[tuple[str, str, Check]]:
    """(category, name, check) of everything, one module's in a row: warm workers."""
    for name, tool in hostile_sanitizer.PLANTED.items():
        yield "sanitizer", name, partial(check_sanitizer, name=name, tool=tool)
    yield "sanitizer", "every schedule and class of shape", check_emitters
    for module in sorted({kernel.module.name for kernel in kernels.HONEST}):
        for kernel in kernels.HONEST:
            if kernel.module.name == module:
                yield kernel.category, kernel.name, partial(check_honest, kernel=kernel)
        for kernel in kernels.CASES:
            if kernel.module.name == module:
                yield kernel.category, kernel.name, partial(check_kernel, kernel=kernel)
        if module == tasks.SOFTMAX.name:
            yield "earlier calls", "an answer kept in a workspace", check_workspace
    yield "cost", "screening at 4096 x 16384", check_costs
    yield "earlier calls", "an answer found in fresh memory", check_output
    yield "timer", "lines that the L2 is asked to keep", check_eviction
    yield "hang", "freedom after a spin on all multiprocessors", check_spin
    yield "cost", "a finalist at 4096 x 16384", check_finalist
    for case in [*solutions.ON_GPU, *solutions.of_kernelbench(os.environ.get("KERNELBENCH", ""))]:
        category = "solution" if case.kinds else "honest"
        yield category, f"a solution: {case.name}", partial(check_solution, case=case)
    for name, (forward, inputs, init, flag) in _TRAPS.items():
        trap = partial(check_trap, forward=forward, inputs=inputs, init=init, flag=flag)
        yield "reference", name, trap
    yield "honest", "cuBLAS against itself", check_library


def main() -> int:
    """Runs everything; 1 when something was not as expected."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scoreboard", type=Path, help="writes the tally there; with --tally")
    parser.add_argument("--only", default="", help="only checks whose category or name holds one of these, by commas")
    parser.add_argument("--seconds", type=float, default=1e9, help="begins no check after this time")
    parser.add_argument("--tally", type=Path, nargs="+", help="runs nothing: tallies what earlier runs printed")
    options = parser.parse_args()
    if options.tally:
        names = {(category, name) for category, name, _ in checks()}
        return hostile_tally.tally(names, options.tally, options.scoreboard)
    begin, bench, counts = time.monotonic(), Bench(), Counter[str]()
    print(f"on {environment()}", flush=True)
    try:
        for category, name, check in checks():
            if not any(part in f"{category}: {name}" for part in options.only.split(",")):
                continue
            if time.monotonic() - begin > options.seconds:
                print(f"-     {category}: {name}: no time left", flush=True)
                continue
            held, sentence, seconds = outcome(bench, check)
            counts[held] += 1
            print(f"{held:<6} {seconds:5.1f} s  {category}: {name}: {sentence}", flush=True)
    finally:
        bench.close()
        bench.compiler.close()
        bench.machine.close()
    print(f"{counts['BROKEN']} broken; {time.monotonic() - begin:.0f} s")
    return 1 if counts["BROKEN"] else 0


def outcome(bench: Bench, check: Check) -> tuple[str, str, float]:
    """Runs a check: "held", "skip" or "BROKEN", one sentence, and the seconds it took."""
    begin = time.monotonic()
    try:
        sentence = check(bench)
    except Exception as error:  # a broken check is told, and the others go on
        bench.close()
        return "BROKEN", f"{type(error).__name__}: {' '.join(str(error).split())[:400]}", time.monotonic() - begin
    return "skip" if sentence.startswith("skipped:") else "held", sentence, time.monotonic() - begin


def environment() -> str:
    """The GPU and the versions, for the head of a log."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{device}, torch {torch.__version__}, Python {sys.version.split()[0]}"


if __name__ == "__main__":
    sys.exit(main())
