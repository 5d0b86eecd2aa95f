"""The hostile suite on a GPU: `python tests/hostile/hostile_gpu.py` (a Hopper GPU; pytest is not needed).

The one idea: the product's own compiler, sessions and judge, case by case, and after each a right kernel that has to
pass in its usual time in a process that is as good as new, with nothing left behind. Cases that only time shows, the
references that are no match, what the judging costs and what each defence is good for come after. Every line is
printed as it ends.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent))

import hostile_gpu_defences as defences
import hostile_kernels as kernels
import hostile_sanitizer
import hostile_solutions as solutions
import hostile_tally
import hostile_tasks as tasks
import hostile_timed_kernels as timed
from hostile_gpu_bench import (
    FAIL,
    FINAL,
    PASS,
    SCREENING,
    Bench,
    is_free,
    judged,
    kind_of,
    measured,
)
from hostile_traces import own_place

from gpu_bench.machine import Machine
from gpu_bench.solutions.solution_session import SolutionSession
from orchestrator.commands import budgets
from orchestrator.trust.judge import Judgement, concluded
from warpsmith import digest
from warpsmith.contract import words
from warpsmith.sandbox import jail
from warpsmith.v1 import artifact_pb2, benchmark_service_pb2, candidate_pb2, task_pb2, timing_pb2, verdict_pb2

# ---- the checks; each raises AssertionError with its reason, or gives a sentence ----------------------------


def tier_for(kernel: kernels.Kernel) -> timing_pb2.Tier.ValueType:
    """How a kernel is judged."""
    return SCREENING if kernel.timed or kernel.module.name in kernels.SCREENED else FINAL


def check_kernel(bench: Bench, kernel: kernels.Kernel) -> str:
    """A hostile kernel fails with its kind, in time; straight after a right one is as fast as ever, nothing is left."""
    bench.usual(kernel.module)
    with bench.leaving_nothing():
        begin = time.monotonic()
        verdict = bench.verdict(kernel, tier_for(kernel))
        while_timed = kernel.timed and verdict.state == PASS
        if while_timed and (answer := bench.response(kernel)).HasField("fault"):
            verdict = verdict_pb2.Verdict(state=FAIL, kind=answer.fault.kind, detail=answer.fault.detail)
        seconds = time.monotonic() - begin
        assert verdict.state == FAIL, f"{verdict_pb2.VerdictState.Name(verdict.state)}: {verdict.detail}"
        assert kind_of(verdict) in kernel.kinds, f"{kind_of(verdict)}: {verdict.detail}"
        assert while_timed == kernel.timed, f"while judged: {kind_of(verdict)}: {verdict.detail}"
        assert seconds < kernel.seconds, f"{seconds:.1f} s"
        control = bench.assert_usual(kernel.module)
    return f"{kind_of(verdict)} in {seconds:.1f} s; {control}"


def check_honest(bench: Bench, kernel: kernels.Kernel) -> str:
    """A right kernel passes, judged and timed."""
    verdict = bench.verdict(kernel, tier_for(kernel))
    assert verdict.state == PASS, f"{kind_of(verdict)}: {verdict.detail}"
    return f"{verdict.detail}; {bench.timing(kernel).speedup_eager.median:.2f}x eager"


def check_product(bench: Bench) -> str:
    """A product of bulk tensor copies, in clusters of two blocks, passes, judged and timed."""
    module = replace(
        tasks.TINY, name="product in clusters", forward="self.linear(x)", inputs="[torch.rand(2048, 2048).bfloat16()]",
        init="self.linear = torch.nn.Linear(2048, 2048).bfloat16()",
    )  # fmt: skip
    program = hostile_sanitizer.authored(*_loaded(module))
    launch = program.steps[0].launch
    assert launch.cluster.x == 2
    assert launch.arguments[0].HasField("tensor_map")
    artifact = bench.compiler.compile(program).outcome
    assert isinstance(artifact, artifact_pb2.Artifact), artifact.diagnostics
    session = bench.session(module)
    verdict = judged(session, program, artifact, FINAL)
    assert verdict.state == PASS, f"{kind_of(verdict)}: {verdict.detail}"
    timing = measured(session, program, artifact, SCREENING)
    return f"{verdict.detail}; {timing.speedup_eager.median:.2f}x eager"


def check_spin(bench: Bench) -> str:
    """After a kernel that spins on all multiprocessors the GPU is free in 10 s, and the next job as fast as before."""
    bench.usual(kernels.WIDE)
    spin = next(case for case in kernels.CASES if case.name == "spin on all multiprocessors")
    begin = time.monotonic()
    verdict = bench.verdict(replace(spin, module=kernels.WIDE), SCREENING)
    ended = time.monotonic()
    assert kind_of(verdict) == "TIMEOUT", verdict.detail
    assert is_free(10.0), "the GPU did nothing for a fresh process within 10 s"
    free = time.monotonic() - ended
    control = bench.assert_usual(kernels.WIDE)
    return f"ended after {ended - begin:.1f} s, GPU proven free {free:.1f} s later; next job: {control}"


def check_workspace(bench: Bench) -> str:
    """An answer kept in a workspace is not there in a timed call."""
    assert bench.verdict(timed.KEPT_IN_WORKSPACE).state == PASS, "it should be right"
    kept = bench.candidate_ns(timed.KEPT_IN_WORKSPACE)
    assert kept > 100_000, f"{kept:.0f} ns: the answer was found"
    return f"{kept / 1e3:.0f} us, all of the work"


def check_no_gain(bench: Bench, kernel: kernels.Kernel, plain: kernels.Kernel, share: float) -> str:
    """A kernel that is right takes no less than its share of the plain one's time."""
    verdict = bench.verdict(kernel, SCREENING)
    assert verdict.state == PASS, f"it should be right: {kind_of(verdict)}: {verdict.detail}"
    usual, found = bench.candidate_ns(plain), bench.candidate_ns(kernel)
    assert found > share * usual, f"{found:.0f} ns, an honest kernel {usual:.0f}"
    return f"{found / 1e3:.1f} us, an honest kernel {usual / 1e3:.1f} us"


def check_left(bench: Bench) -> str:
    """With the session of the cases before closed there is nothing that was not there before it."""
    bench.assert_idle()
    return "nothing"


def check_end(bench: Bench) -> str:
    """With all sessions closed there is nothing that was not there before the first, and all memory is free again."""
    bench.assert_ended()
    return "nothing"


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
    raised = [words.flag(each) for each in report.raised]
    assert flag in raised, str(raised)
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
    from warpsmith.graphs import capture

    made = tasks.plan_zero(capture.capture(*_loaded(module)))
    made.target = task_pb2.TARGET_CUDA
    made.digest = digest.of_program(made)
    return made


def _loaded(module: tasks.Module) -> tuple[Any, Any]:
    """The module, which is ours, in this process, and its inputs."""
    from warpsmith.graphs import task_module

    with tempfile.TemporaryDirectory() as directory:
        loaded = task_module.load(module.task(), Path(directory))
    return loaded.build(), loaded.inputs(0)


def check_costs(bench: Bench) -> str:
    """Screening of a candidate at 4096 x 16384 in a warm session takes at most 150 ms."""
    wide = kernels.honest(kernels.WIDE)
    program, artifact = bench.compiled(wide)
    assert isinstance(artifact, artifact_pb2.Artifact)
    session = bench.session(wide.module)
    taken = []
    for _ in range(45):
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
    program, artifact = bench.compiled(wide)
    assert isinstance(artifact, artifact_pb2.Artifact)
    session = bench.session(wide.module)
    measured(session, program, artifact, FINAL)
    begin = time.monotonic()
    session.expect_final()  # as the service does
    with session.inspecting(program, artifact) as inspecting:
        assert judged(session, program, artifact, FINAL).state == PASS
        compared = time.monotonic()
        inspections = inspecting.answer()
    session.settle()
    inspected = time.monotonic()
    timing = measured(session, program, artifact, FINAL)
    seconds = time.monotonic() - begin
    sentence = (
        f"finalist {seconds:.1f} s: comparison {compared - begin:.1f} s, compute-sanitizer {inspected - compared:.1f}, "
        f"timing {begin + seconds - inspected:.1f}"
    )
    assert not any(each.finding for each in inspections), str(inspections)
    assert seconds <= 20.0, sentence
    return f"{sentence} ({timing.speedup_fastest.median:.3f}x {words.arm(timing.fastest_arm)})"


def check_sanitizer(bench: Bench, name: str, tool: str) -> str:
    """compute-sanitizer finds a wrong kernel wrong and a right one right."""
    program, artifact = bench.compiled(hostile_sanitizer.named(name))
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
    """A solution that cheats fails with its kind, one that does not passes; after it an honest job is as ever."""
    session = bench.solution_session(case.reference)
    with bench.leaving_no_traces(session, case):
        sentence = _expected(case, conclusion(session, case))
        control = bench.assert_usual(kernels.WIDE)
    return f"{sentence}; {control}"


def conclusion(session: SolutionSession, case: solutions.Solution) -> Judgement:
    """What the product says of a solution."""
    own = digest.digest(case.text)
    program = candidate_pb2.Program(target=task_pb2.TARGET_CUDA, digest=own)
    artifact = artifact_pb2.Artifact(
        digest=own, program_digest=own, format=artifact_pb2.BINARY_FORMAT_PYTHON_MODULE, content=case.text.encode()
    )
    verdict = judged(session, program, artifact, SCREENING)
    if not case.timed or verdict.state != PASS:
        return Judgement(case.name, verdict)
    request = benchmark_service_pb2.MeasureArtifactRequest(
        task=session.task, program=program, artifact=artifact, tier=SCREENING
    )
    return concluded(case.name, verdict, session.measure(request))


def _expected(case: solutions.Solution, found: Judgement) -> str:
    verdict = found.verdict
    sentence = f"{kind_of(verdict) if verdict.kind else 'PASS'}: {verdict.detail}"
    if found.timing is not None and verdict.state == PASS:
        sentence = f"PASS: {found.timing.speedup_eager.median:.3f}x eager"
        if case.most:
            assert not found.timing.faster or found.timing.speedup_eager.low <= case.most, sentence
            return sentence
    assert (kind_of(verdict) in case.kinds) if case.kinds else (verdict.state == PASS), sentence
    return sentence


class Ahead:
    """Solutions that compile for most of a minute each, judged beside each other; none of them is timed."""

    def __init__(self, cases: Sequence[solutions.Solution]) -> None:
        self._cases = cases
        self._coming: dict[str, Future[Judgement]] = {}

    def check(self, bench: Bench, case: solutions.Solution) -> str:
        """As `check_solution`; the first has all of them begun, and looked at what is left when all have ended."""
        if not self._coming:
            bench.usual(kernels.WIDE)
            bench.close()
            before = bench.traces.now()
            with ThreadPoolExecutor(len(self._cases)) as pool:
                self._coming = {each.name: pool.submit(self._judge, bench.machine, each) for each in self._cases}
            bench.traces.assert_same(before)
        return f"{_expected(case, self._coming[case.name].result())}; {bench.assert_usual(kernels.WIDE)}"

    @staticmethod
    def _judge(machine: Machine, case: solutions.Solution) -> Judgement:
        session = SolutionSession(solutions.reference_task(case.reference, task_pb2.TARGET_CUDA), machine=machine)
        try:
            return conclusion(session, case)
        finally:
            session.close()


# ---- all of them ---------------------------------------------------------------------------------------------

Check = Callable[[Bench], str]
_IN_A_ROW = 6
"""Checks that no part divides."""


def checks() -> Iterator[tuple[str, str, Check]]:
    """(category, name, check) of everything, one module's in a row: warm workers."""
    for name, tool in hostile_sanitizer.PLANTED.items():
        yield "sanitizer", name, partial(check_sanitizer, name=name, tool=tool)
    yield "sanitizer", "every schedule and class of shape", check_emitters
    for module in sorted({kernel.module.name for kernel in kernels.HONEST} - {kernels.WIDE.name}):
        yield from _of_module(module)
        yield "left behind", f"after {module}", check_left
    yield from _of_module(kernels.WIDE.name)
    wide = kernels.honest(kernels.WIDE)
    for kernel, plain, share in (
        (timed.LEFT_IN_OUTPUT, wide, 0.9), (timed.EVICT_LAST, wide, 0.95), (timed.MOVED, wide, 0.95),
    ):  # fmt: skip
        yield kernel.category, kernel.name, partial(check_no_gain, kernel=kernel, plain=plain, share=share)
    yield "hang", "freedom after a spin on all multiprocessors", check_spin
    yield "honest", "a product of bulk tensor copies in clusters", check_product
    for case in solutions.ON_GPU:
        yield _category(case), f"a solution: {case.name}", partial(check_solution, case=case)
    theirs = solutions.of_kernelbench(os.environ.get("KERNELBENCH", ""))
    ahead = Ahead(theirs)
    for case in theirs:
        yield _category(case), f"a solution: {case.name}", partial(ahead.check, case=case)
    yield "left behind", "after all solutions", check_left
    for name, (forward, inputs, init, flag) in _TRAPS.items():
        trap = partial(check_trap, forward=forward, inputs=inputs, init=init, flag=flag)
        yield "reference", name, trap
    yield "honest", "cuBLAS against itself", check_library
    yield "left behind", "after the references", check_left
    yield "cost", "screening at 4096 x 16384", check_costs
    yield "cost", "a finalist at 4096 x 16384", check_finalist
    yield "left behind", "after all sessions", check_end
    for name, defence in defences.CHECKS.items():
        yield "defence", name, defence


def _of_module(module: str) -> Iterator[tuple[str, str, Check]]:
    for kernel in kernels.HONEST:
        if kernel.module.name == module:
            yield kernel.category, kernel.name, partial(check_honest, kernel=kernel)
    for kernel in kernels.CASES:
        if kernel.module.name == module:
            yield kernel.category, kernel.name, partial(check_kernel, kernel=kernel)
    if module == tasks.SOFTMAX.name:
        yield "earlier calls", "an answer kept in a workspace", check_workspace
        late = partial(check_no_gain, kernel=timed.OVERLAPPING, plain=timed.WAITING, share=0.9)
        yield timed.OVERLAPPING.category, timed.OVERLAPPING.name, late


def _category(case: solutions.Solution) -> str:
    return "solution" if case.kinds else "honest"


def main() -> int:
    """Runs everything; 1 when something was not as expected."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scoreboard", type=Path, help="writes the tally there; with --tally")
    parser.add_argument("--only", default="", help="only checks whose category or name holds one of these, by commas")
    parser.add_argument("--part", default="1/1", help="1/4: the first of four parts, each for a GPU of its own")
    parser.add_argument("--seconds", type=float, default=1e9, help="begins no check after this time")
    parser.add_argument("--rung", help="on this rung of the jail: unshare, landlock; else the machine's strongest")
    parser.add_argument("--tally", type=Path, nargs="+", help="runs nothing: tallies what earlier runs printed")
    options = parser.parse_args()
    if options.tally:
        names = {(category, name) for category, name, _ in checks()}
        return hostile_tally.tally(names, options.tally, options.scoreboard)
    rung = jail.Rung(options.rung) if options.rung else jail.choose()
    if rung not in jail.probe():
        parser.error(f"{rung.value} does not work here")
    with mock.patch.object(jail, "probe", return_value=(rung,)), own_place() as traces:
        return run(Bench(traces), options.only.split(","), options.seconds, budgets.shard(options.part))


def run(bench: Bench, only: Sequence[str], within_s: float, part: tuple[int, int] = (0, 1)) -> int:
    """Runs the checks whose category or name holds one of `only`, printing each; 1 when one is broken. `part`: as
    `dealt`."""
    begin, counts = time.monotonic(), Counter[str]()
    print(f"on {environment()}", flush=True)
    wanted = [each for each in checks() if any(some in f"{each[0]}: {each[1]}" for some in only)]
    try:
        for category, name, check in dealt(wanted, *part):
            if time.monotonic() - begin > within_s:
                print(f"-     {category}: {name}: no time left", flush=True)
                continue
            held, sentence, seconds = outcome(bench, check)
            counts[held] += 1
            print(f"{held:<6} {seconds:5.1f} s  {category}: {name}: {sentence}", flush=True)
    finally:
        bench.end()
    print(f"{counts['BROKEN']} broken; {time.monotonic() - begin:.0f} s")
    return 1 if counts["BROKEN"] else 0


def dealt(found: Sequence[tuple[str, str, Check]], number: int, count: int) -> list[tuple[str, str, Check]]:
    """A part of the checks, by its number from 0 on: each is a few in a row, for those of one module follow one another
    and share its warm workers."""
    rows = [found[at : at + _IN_A_ROW] for at in range(0, len(found), _IN_A_ROW)]
    return [each for row in rows[number::count] for each in row]


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
    """The GPU, the versions and the rung of the jail, for the head of a log."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{device}, torch {torch.__version__}, Python {sys.version.split()[0]}, jail: {jail.choose().value}"


if __name__ == "__main__":
    sys.exit(main())
