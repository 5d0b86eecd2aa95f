"""The harness tests itself: with one defence switched off, a hostile case that the suite catches gets through.

The one idea: a defence that can be taken away without anything changing defends nothing. Which case needs which
defence is data; the other tests show that all of them are caught with everything switched on.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import hostile_tasks as tasks
import pytest
import torch
from hostile_programs import IF_TIMED, PROGRAMS, Hostile
from hostile_sources import PLANS, SOURCES
from raw_system import RAW

from agent_compile import elf
from agent_compile.compiler import Compiler
from agent_correctness.checks import memory
from agent_correctness.checks.check import Case, Check
from agent_correctness.checks.memory import MemoryCheck
from agent_correctness.checks.overfit import OverfitCheck
from agent_correctness.checks.precision import PrecisionCheck
from agent_correctness.checks.values import ValueCheck
from agent_correctness.judge import Judge
from gpu_bench.judging import guard, judge_worker
from gpu_bench.judging.loaded import LoadedTask
from gpu_bench.policy import objections
from gpu_bench.running import arena, bench_worker, runner
from gpu_bench.timing import headline, inspection, measurement, timed_memory, timed_task, timing_selftest
from gpu_bench.values import members
from gpu_bench.workers.sharing import SharedMemory
from warpsmith.sandbox import kernel_calls
from warpsmith.v1 import (
    artifact_pb2,
    benchmark_service_pb2,
    candidate_pb2,
    correctness_service_pb2,
    judging_pb2,
    task_pb2,
    timing_pb2,
    verdict_pb2,
)

pytestmark = pytest.mark.hostile

Off = Callable[[pytest.MonkeyPatch], object]


@pytest.fixture(autouse=True)
def _own_temporary_directory(traces: Any) -> None:
    del traces


def named(name: str) -> Hostile:
    return next(case for case in PROGRAMS if case.name == name)


def request_of(case: Hostile, bench: Any) -> correctness_service_pb2.VerifyArtifactRequest:
    program = tasks.program(
        case.module, [bench.filled(case.body)], ahead=bench.filled(case.ahead), headers=tasks.HEADERS + case.headers
    )
    artifact = bench.bare(program)
    if case.edit is not None:
        case.edit(program)
        program.digest = artifact.program_digest = "edited"
    return correctness_service_pb2.VerifyArtifactRequest(
        task=case.module.task(), program=program, artifact=artifact, tier=timing_pb2.TIER_SCREENING
    )


# ---- what surrounds a guarded run: judge and candidate in this process, where a test can reach them -----------


@dataclass
class InThisProcess:
    """As the two workers of a session, without their jail: only for kernels that crash nothing."""

    task: task_pb2.Task
    descriptor: int

    def compare(
        self, request: benchmark_service_pb2.CompareOutputsRequest
    ) -> benchmark_service_pb2.CompareOutputsResponse:
        shared = SharedMemory(self.descriptor)
        judge = judge_worker.Judge(LoadedTask.load(self.task), shared)
        os.ftruncate(self.descriptor, judge.total_bytes)
        bench = bench_worker.Bench(LoadedTask.load(self.task))
        bench.load(judging_pb2.LoadRequest(program=request.program, artifact=request.artifact))
        answer = benchmark_service_pb2.CompareOutputsResponse()
        for case in request.cases:
            judge.answers.of(case.family, case.seed)  # as a session does: it learns what the reference refuses
            asked = judging_pb2.ExecuteRequest(
                family=case.family, seed=case.seed, regions=judge.regions, learned=judge.cases.report.learned
            )
            answer.comparisons.append(judge.judge(bench.execute(asked, shared)))
        return answer


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = os.memfd_create("outputs", os.MFD_CLOEXEC)
    yield made
    os.close(made)


GUARDS: list[tuple[str, str, Off]] = [
    ("canaries", "writes one past the end", lambda patch: patch.setattr(guard.GuardedMemory, "broken", lambda _: [])),
    ("a run with other canaries", "reads one past the end into a sum",
     lambda patch: patch.setattr(guard.Seeds, "drawn", lambda: guard.Seeds(2, 3, 4, 4))),
    ("a run with other poison", "reads a workspace that nobody wrote",
     lambda patch: patch.setattr(guard.Seeds, "drawn", lambda: guard.Seeds(2, 2, 4, 5))),
    ("a look at memory that has to be left zero", "keeps a flag in memory that has to be left zero",
     lambda patch: patch.setattr(guard.GuardedMemory, "dirty", lambda _: [])),
    ("equal results of equal runs", "every other call is wrong",
     lambda patch: patch.setattr(bench_worker, "_different", lambda *_: [])),
    ("a look at the inputs", "changes one input by one bit",
     lambda patch: patch.setattr(memory, "_LOOKS", [look for look in memory._LOOKS if look is not memory._mutated])),
    ("parameters that move", "ignores a weight that is one at first",
     lambda patch: (patch.setattr(members, "vary", lambda *_, **__: None),
                    patch.setattr(LoadedTask, "move_parameters", lambda *_: None))),
]  # fmt: skip


@pytest.mark.parametrize(("name", "off"), [guarded[1:] for guarded in GUARDS], ids=[guarded[0] for guarded in GUARDS])
@pytest.mark.parametrize("is_on", [True, False], ids=["on", "off"])
def test_a_guarded_run_needs_each_of_its_guards(
    name: str, off: Off, is_on: bool, bench: Any, descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_of(named(name), bench)
    if not is_on:
        off(monkeypatch)
    verdict = Judge(InThisProcess(request.task, descriptor)).verify(request)
    assert (verdict.state == verdict_pb2.VERDICT_STATE_PASS) is not is_on, verdict.detail


def _clean_memory(patch: pytest.MonkeyPatch) -> None:
    zeros = torch.zeros(guard._TILE)
    patch.setattr(guard, "_poison_tile", lambda dtype, _seed, device: zeros.to(device, dtype))
    patch.setattr(guard.GuardedMemory, "still_poisoned", lambda *_: None)


@pytest.mark.parametrize("is_on", [True, False], ids=["on", "off"])
def test_what_was_not_written_needs_the_poison_to_show(
    is_on: bool, bench: Any, descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lazy = Hostile("", "", (), "for (long i = 0; i < SIZE; ++i) if (!(x[i] <= 0)) y[i] = x[i];", tasks.TINY)
    request = request_of(lazy, bench)
    if not is_on:
        _clean_memory(monkeypatch)
    verdict = Judge(InThisProcess(request.task, descriptor)).verify(request)
    assert (verdict.state == verdict_pb2.VERDICT_STATE_PASS) is not is_on, verdict.detail


# ---- the checks ------------------------------------------------------------------------------------------------

CHECKS: list[tuple[str, Sequence[Check]]] = [
    ("writes one past the end", (OverfitCheck(), ValueCheck(), PrecisionCheck())),
    ("relies on positive values", (MemoryCheck(), PrecisionCheck())),
    ("TF32 factors in an fp32 product", (MemoryCheck(), OverfitCheck(), ValueCheck())),
]


@pytest.mark.parametrize(("name", "left"), CHECKS, ids=["memory", "values", "precision"])
def test_a_verdict_needs_each_of_its_checks(name: str, left: Sequence[Check], bench: Any) -> None:
    request = request_of(named(name), bench)
    bench.session(named(name).module)
    assert Judge(bench).verify(request).state == verdict_pb2.VERDICT_STATE_FAIL
    assert Judge(bench, left).verify(request).state == verdict_pb2.VERDICT_STATE_PASS


class SameSeed(ValueCheck):
    """Values that everybody knows: the task's own, and always the same."""

    def cases(self, task: task_pb2.Task, tier: timing_pb2.Tier.ValueType, draw: random.Random) -> Sequence[Case]:
        del task, tier, draw
        return [(verdict_pb2.VALUE_FAMILY_TASK, 42)]


def test_an_answer_for_one_seed_needs_values_that_nobody_knows(bench: Any) -> None:
    request = request_of(named("for seed 42 only"), bench)
    bench.session(named("for seed 42 only").module)
    assert Judge(bench, [SameSeed()]).verify(request).state == verdict_pb2.VERDICT_STATE_PASS
    assert Judge(bench, [ValueCheck()]).verify(request).state == verdict_pb2.VERDICT_STATE_FAIL


# ---- timing ----------------------------------------------------------------------------------------------------

_KEPT = f"""
    std::uint32_t key;
    std::memcpy(&key, w + SIZE, 4);
    if (key == 0xC0FFEEu) {{ std::memcpy(y, w, SIZE * sizeof(float)); return; }}
    for (volatile int i = 0; i < 5000000; ++i) {{}}
    {tasks.SOFTMAX.honest}
    key = 0xC0FFEEu;
    std::memcpy(w, y, SIZE * sizeof(float));
    std::memcpy(w + SIZE, &key, 4);
"""
"""Slow by a millisecond or more, unless the workspace still holds the last answer. A turn of the loop takes from one
cycle, on processors that forward stores at once, to six."""
_SLOW_NS = 500_000
"""Between what it takes with the answer, tenths of that on a busy machine, and without."""


@pytest.mark.parametrize("is_on", [True, False], ids=["on", "off"])
def test_a_kernel_that_keeps_its_answer_needs_workspaces_emptied_before_timed_calls(
    is_on: bool, bench: Any, descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tasks.program(tasks.SOFTMAX, [_KEPT], workspaces={"w": tasks.Tensor((16 * 33 + 1,))})
    artifact = bench.compiler.compile(program).outcome
    task = tasks.SOFTMAX.task()
    request = correctness_service_pb2.VerifyArtifactRequest(task=task, program=program, artifact=artifact)
    assert Judge(InThisProcess(task, descriptor)).verify(request).state == verdict_pb2.VERDICT_STATE_PASS
    if not is_on:
        monkeypatch.setattr(timed_memory.KernelMemory, "forget", lambda _: None)
    monkeypatch.setattr(timed_task, "buffer_set_count", lambda *_: 2)  # as for large tensors
    timed = timed_task.TimedTask.of(LoadedTask.load(task))
    loaded = timed.loaded.load_program(program, artifact)
    timing = timed.measure(loaded, artifact, timing_pb2.TIER_SCREENING).timing
    candidate = next(arm for arm in timing.arms if arm.kind == timing_pb2.ARM_KIND_CANDIDATE)
    assert (min(candidate.samples_ns) > _SLOW_NS) is is_on, candidate  # load only ever adds


_STACKED = f"""
    volatile float kept[1 << 17];  // on the stack: what a call leaves far down there the next one finds
    bool is_there = kept[SIZE] == x[0] && kept[SIZE + 1] == x[SIZE - 1];
    if (is_there) {{ for (long i = 0; i < SIZE; ++i) y[i] = kept[i]; return; }}
    for (volatile int i = 0; i < 5000000; ++i) {{}}
    {tasks.SOFTMAX.honest}
    for (long i = 0; i < SIZE; ++i) kept[i] = y[i];
    kept[SIZE] = x[0]; kept[SIZE + 1] = x[SIZE - 1];
"""
"""Slow by a millisecond, unless its stack holds the answer on these values."""


_OWN = f"""
    static float kept[SIZE], key[2];
    if (key[0] == x[0] && key[1] == x[SIZE - 1]) {{ std::memcpy(y, kept, sizeof kept); return; }}
    for (volatile int i = 0; i < 5000000; ++i) {{}}
    {tasks.SOFTMAX.honest}
    std::memcpy(kept, y, sizeof kept);
    key[0] = x[0]; key[1] = x[SIZE - 1];
"""
"""The same, where the compile policy let memory through that lives from call to call."""
_THREADS = f"""
    static float* kept = nullptr;
    if (kept == nullptr) kept = reinterpret_cast<float*>(raw(SYS_mmap, 0, 4 * (SIZE + 2), 3, 0x22, -1));
    if (kept[SIZE] == x[0] && kept[SIZE + 1] == x[SIZE - 1]) {{ std::memcpy(y, kept, 4 * SIZE); return; }}
    for (volatile int i = 0; i < 5000000; ++i) {{}}
    {tasks.SOFTMAX.honest}
    std::memcpy(kept, y, 4 * SIZE);
    kept[SIZE] = x[0]; kept[SIZE + 1] = x[SIZE - 1];
"""
"""The same, in pages that it asks the system for."""


@pytest.mark.parametrize("body", [_STACKED, _OWN, _THREADS], ids=["stack", "own memory", "pages"])
@pytest.mark.parametrize("is_on", [True, False], ids=["on", "off"])
def test_a_kernel_that_keeps_its_answer_needs_values_that_it_has_never_seen(
    is_on: bool, body: str, bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_on:
        monkeypatch.setattr(timed_memory.TimedInputs, "renew", lambda *_, **__: True)
    monkeypatch.setattr(timed_task, "buffer_set_count", lambda *_: 1)  # as for large tensors
    request = request_of(Hostile("", "", (), body, headers=RAW), bench)
    timed = timed_task.TimedTask.of(LoadedTask.load(request.task))
    monkeypatch.setattr(timed.bench.baselines, "_final_names", lambda: ["eager"])  # compiling takes half a minute
    loaded = timed.loaded.load_program(request.program, request.artifact)
    timing = timed.measure(loaded, request.artifact, timing_pb2.TIER_FINAL).timing
    candidate = next(arm for arm in timing.arms if arm.kind == timing_pb2.ARM_KIND_CANDIDATE)
    assert (min(candidate.samples_ns) > 300_000) is is_on, candidate


_FOUND = f"""
    const float *from = x + 8 * COLUMNS, *found = y + 8 * COLUMNS;
    bool is_there = true;
    float m = -INFINITY;
    double s = 0;
    for (long j = 0; j < COLUMNS; ++j) m = from[j] > m ? from[j] : m;
    for (long j = 0; j < COLUMNS; ++j) s += std::exp(from[j] - m);
    for (long j = 0; j < COLUMNS; ++j) is_there &= std::fabs(found[j] - std::exp(from[j] - m) / s) < 1e-6f;
    for (volatile int i = 0; !is_there && i < 5000000; ++i) {{}}
    {tasks.SOFTMAX.honest}
"""
"""Slow by a millisecond, unless the ninth row of an answer lies where its output goes."""


@pytest.mark.parametrize("is_on", [True, False], ids=["on", "off"])
def test_a_kernel_that_computes_only_over_other_values_needs_outputs_emptied_before_timed_calls(
    is_on: bool, bench: Any, descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timed_task, "buffer_set_count", lambda *_: 1)

    def off() -> None:
        if not is_on:
            monkeypatch.setattr(timed_memory.KernelMemory, "forget", lambda _: None)

    timing = timed_after_passing(_FOUND, bench, descriptor, off).timing
    candidate = next(arm for arm in timing.arms if arm.kind == timing_pb2.ARM_KIND_CANDIDATE)
    assert (min(candidate.samples_ns) > 300_000) is is_on, candidate


@pytest.mark.parametrize("is_on", [True, False], ids=["on", "off"])
def test_a_kernel_that_stops_working_once_it_is_timed_needs_the_look_at_timed_outputs(
    is_on: bool, bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lazy = Hostile("", "", (), f"static int calls = 0; if (++calls > 3) return;\n{tasks.SOFTMAX.honest}")
    request = request_of(lazy, bench)
    if not is_on:
        monkeypatch.setattr(inspection.Inspection, "look", lambda *_: None)
    timed = timed_task.TimedTask.of(LoadedTask.load(request.task))
    loaded = timed.loaded.load_program(request.program, request.artifact)
    answer = timed.measure(loaded, request.artifact, timing_pb2.TIER_SCREENING)
    assert answer.HasField("fault") is is_on, answer


@pytest.mark.parametrize("is_on", [True, False], ids=["on", "off"])
def test_a_kernel_that_works_only_in_the_last_call_of_a_group_needs_a_look_at_any_of_them(
    is_on: bool, bench: Any, descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def off() -> None:
        monkeypatch.setattr(guard, "same_numbers", lambda *_: True)  # would see it too, by luck
        if not is_on:
            monkeypatch.setattr(random.SystemRandom, "sample", lambda _, places, __: places[-1:])

    answer = timed_after_passing(f"{IF_TIMED} return;\n{tasks.SOFTMAX.honest}", bench, descriptor, off)
    assert answer.HasField("fault") is is_on, answer


def timed_after_passing(
    body: str, bench: Any, descriptor: int, ahead: Callable[[], object] = lambda: None
) -> benchmark_service_pb2.MeasureArtifactResponse:
    """What comes of timing a kernel that passes when it is judged; `ahead` is called in between."""
    program = tasks.program(tasks.SOFTMAX, [body])
    artifact = bench.compiler.compile(program).outcome
    task = tasks.SOFTMAX.task()
    request = correctness_service_pb2.VerifyArtifactRequest(task=task, program=program, artifact=artifact)
    assert Judge(InThisProcess(task, descriptor)).verify(request).state == verdict_pb2.VERDICT_STATE_PASS
    timed = timed_task.TimedTask.of(LoadedTask.load(task))
    ahead()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measurement, "HANDSHAKES", 1000)  # groups, whatever else keeps this machine busy
        return timed.measure(timed.loaded.load_program(program, artifact), artifact, timing_pb2.TIER_SCREENING)


@pytest.mark.parametrize("is_on", [True, False], ids=["on", "off"])
def test_a_kernel_that_is_less_exact_once_it_is_timed_needs_the_bits_of_judged_calls(
    is_on: bool, bench: Any, descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_on:
        monkeypatch.setattr(guard, "same_numbers", lambda *_: True)
    rounded = f"{tasks.SOFTMAX.honest}\n{IF_TIMED} for (long i = 0; i < SIZE; ++i) y[i] *= 1.001f;"
    answer = timed_after_passing(rounded, bench, descriptor)
    assert answer.HasField("fault") is is_on, answer
    assert not is_on or answer.fault.kind == verdict_pb2.FAILURE_KIND_CHEAT


@pytest.mark.parametrize("is_on", [True, False], ids=["on", "off"])
def test_a_kernel_that_updates_statistics_only_while_it_is_judged_needs_timed_calls_made_again(
    is_on: bool, bench: Any, descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_on:
        monkeypatch.setattr(inspection.Inspection, "look", lambda *_: None)
    task, honest = tasks.TRAINED.task(), tasks.TRAINED.honest
    idle = honest.replace("// ahead", f"{IF_TIMED} return;")
    for body, is_accepted in ((honest, True), (idle, not is_on)):
        made = tasks.program(tasks.TRAINED, [body])
        artifact = bench.compiler.compile(made).outcome
        request = correctness_service_pb2.VerifyArtifactRequest(task=task, program=made, artifact=artifact)
        assert Judge(InThisProcess(task, descriptor)).verify(request).state == verdict_pb2.VERDICT_STATE_PASS
        timed = timed_task.TimedTask.of(LoadedTask.load(task))
        answer = timed.measure(timed.loaded.load_program(made, artifact), artifact, timing_pb2.TIER_SCREENING)
        assert answer.HasField("fault") is not is_accepted, answer


@pytest.mark.parametrize("left", [2, 1, 0])
def test_a_kernel_that_overwrites_its_input_once_it_is_timed_needs_pages_to_read_only_or_the_look_at_inputs(
    left: int, bench: Any, descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if left < 2:
        show = runner.Runner.show
        monkeypatch.setattr(timed_memory, "given", arena.arena)
        monkeypatch.setattr(runner.Runner, "show", lambda self, address, **_: show(self, address))
    if left < 1:
        monkeypatch.setattr(timed_memory.InputSample, "is_unchanged", lambda _: True)
    zeroing = f"{IF_TIMED} for (long i = 0; i < SIZE; ++i) const_cast<float*>(x)[i] = 0;\n{tasks.SOFTMAX.honest}"
    answer = timed_after_passing(zeroing, bench, descriptor)
    kinds = [0, verdict_pb2.FAILURE_KIND_WRONG_INPUT_MUTATED, verdict_pb2.FAILURE_KIND_CRASH]
    assert answer.fault.kind == kinds[left], answer


def test_equals_need_the_noise_floor_not_to_be_called_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    assert timing_selftest.count_faster(1.0, timing_pb2.TIER_SCREENING) <= 1
    monkeypatch.setattr(measurement, "faster", lambda speedup, _noise: speedup.median > 1)
    monkeypatch.setattr(headline, "threshold", lambda _noise: 0.0)
    assert timing_selftest.count_faster(1.0, timing_pb2.TIER_SCREENING) > 10


@pytest.mark.parametrize("is_on", [True, False], ids=["on", "off"])
def test_a_time_that_physics_forbids_needs_the_floor_guard(is_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing_selftest, "NOTHING", replace(timing_selftest.NOTHING, input_bytes=1 << 40))
    device = timing_pb2.Device(target=task_pb2.TARGET_CUDA, physical_bytes_per_second=4e12, read_bytes_per_second=4e12)
    monkeypatch.setattr(timing_selftest, "_CEILINGS", replace(timing_selftest._CEILINGS, device=device))
    if not is_on:
        monkeypatch.setattr(measurement.floor, "guard", lambda *_, **__: [])
    assert timing_selftest.simulated(1.5, timing_pb2.TIER_FINAL, 1).faster is not is_on


_NEARLY = Hostile(
    "", "", (), f"const auto begin = now(); while (now() - begin < 0.45) {{}}\n{tasks.SOFTMAX.honest}",
    ahead="static double now() { timespec t; raw(SYS_clock_gettime, 1, at(&t)); return t.tv_sec + 1e-9 * t.tv_nsec; }",
    headers=RAW + "#include <ctime>\n",
)  # fmt: skip
"""Three calls of a case take 1.35 s of the 3 that it may take, eight cases more than three times that."""


def test_cases_that_each_end_just_in_time_need_the_budget_of_all_together(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = request_of(_NEARLY, bench)
    session = bench.session(_NEARLY.module)
    cases = [benchmark_service_pb2.ComparisonCase(family=verdict_pb2.VALUE_FAMILY_TASK, seed=n) for n in range(8)]
    for share, is_over in ((0.25, True), (100.0, False)):
        bench.control(_NEARLY.module)  # the process is there
        with monkeypatch.context() as patch:
            patch.setattr(
                session, "_limits", replace(session._limits, hang_seconds=3.0, eager_factor=0.0, phase_share=share)
            )
            answer = session.compare(request.program, request.artifact, cases)
        assert answer.HasField("fault") is is_over, answer.fault
    assert len(answer.comparisons) == len(cases)


# ---- the compile policy ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "off"),
    [
        ("memo by pointer", lambda patch: patch.setattr(elf, "_kept_bytes", lambda _: 0)),
        ("takes the baselines' threads away", lambda patch: patch.setattr(kernel_calls, "may_call", lambda _: True)),
        ("starts a shell", lambda patch: patch.setattr(kernel_calls, "may_call", lambda _: True)),
        ("a constructor in the shared object", lambda patch: patch.setattr(elf, "_STARTUP_TAGS", {})),
    ],
)  # fmt: skip
def test_a_binary_needs_each_rule_of_the_policy(
    name: str, off: Off, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = candidate_pb2.Program(target=task_pb2.TARGET_CPU)
    program.sources.add(name="kernel.cpp", text=next(case.text for case in SOURCES if case.name == name))
    program.steps.add(group="y", launch=candidate_pb2.Launch(entry="run0"))
    off(monkeypatch)
    assert isinstance(compiler.compile(program).outcome, artifact_pb2.Artifact)


def test_a_library_step_needs_the_list() -> None:
    program = tasks.program(tasks.SOFTMAX, [tasks.SOFTMAX.honest])
    next(plan for plan in PLANS if plan.name == "a library step off the list").spoil(program)
    artifact = artifact_pb2.Artifact()
    assert not any("list" in found for found in objections(program, artifact, lambda _: True, input_count=1))
