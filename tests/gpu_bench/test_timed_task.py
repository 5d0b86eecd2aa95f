"""A real small task, timed by the real host clock."""

from __future__ import annotations

import threading
import time
import weakref
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from gpu_bench.judging.loaded import LoadedTask
from gpu_bench.limits import Limits
from gpu_bench.pytorch.baselines import Baselines
from gpu_bench.running import watchdog
from gpu_bench.running.executor import ProgramFault
from gpu_bench.session import Session
from gpu_bench.timing import clocks, inspection, timed_task
from gpu_bench.timing.replay import Before
from gpu_bench.timing.timed_task import TimedTask, free_bytes
from gpu_bench.values.keys import Key
from warpsmith.contract import words
from warpsmith.v1 import benchmark_service_pb2, candidate_pb2, judging_pb2, task_pb2, timing_pb2, verdict_pb2


@pytest.fixture
def _no_compiling(monkeypatch) -> None:
    """torch.compile is replaced by the module itself: compiling takes seconds and has its own test."""
    monkeypatch.setattr(torch, "compile", lambda module, **_options: module)


@pytest.fixture
def timed(small, _no_compiling) -> TimedTask:
    return TimedTask.of(LoadedTask.load(small.task()))


def test_the_reference_is_audited_and_timed(timed):
    report = timed.reference()
    assert [words.arm(arm.kind) for arm in report.arms] == ["eager", "compile"]
    assert words.arm(report.fastest_arm) in ("eager", "compile")
    assert report.arms[0].median_ns > 500
    assert report.arms[0].samples_ns
    assert not report.raised


def test_plan_zero_is_timed_in_a_final_with_its_step(timed, small):
    program = small.library_program()
    artifact = small.compiled(program)
    loaded = timed.loaded.load_program(program, artifact)
    timing = timed.measure(loaded, artifact, timing_pb2.TIER_FINAL, program).timing
    assert [words.arm(arm.kind) for arm in timing.arms] == ["candidate", "eager", "compile", "rewritten", "aa_copy"]
    assert 0.2 < timing.speedup_eager.median < 5
    assert [step.name for step in timing.steps] == ["aten.softmax.int"]
    assert timing.steps[0].median_ns > 0
    assert timing.environment.thread_count == torch.get_num_threads()
    assert timed._work_by(program) == replace(timed.bench.work, slices=())


def test_an_authored_kernel_is_screened_against_eager(timed, small):
    program = small.kernel_program(small.softmax)
    artifact = small.compiled(program)
    loaded = timed.loaded.load_program(program, artifact)
    timing = timed.measure(loaded, artifact, timing_pb2.TIER_SCREENING).timing
    assert [words.arm(arm.kind) for arm in timing.arms] == ["candidate", "eager"]
    assert timing.arms[0].median_ns > 500


@pytest.mark.usefixtures("_no_compiling")
def test_inputs_at_odd_addresses_are_copied_for_a_kernel_that_reads_sixteen_bytes_at_once(small):
    shape = f"{small.rows}, {small.columns}"
    offset_view = f"torch.rand({small.rows * small.columns + 1})[1:].view({shape})"
    timed = TimedTask.of(LoadedTask.load(small.task(small.module.replace(f"torch.rand({shape})", offset_view))))
    (given,) = timed.loaded.user.inputs(0)
    assert given.data_ptr() % 16
    body = f"if (reinterpret_cast<unsigned long>(x) % 16) {{ y[0] = NAN; return; }}\n{small.softmax}"
    program = small.kernel_program(body)
    artifact = small.compiled(program)
    found = timed.measure(timed.loaded.load_program(program, artifact), artifact, timing_pb2.TIER_SCREENING)
    assert found.fault.kind == verdict_pb2.FAILURE_KIND_WRONG_VALUE
    program.buffers[0].alignment_bytes = 16
    found = timed.measure(timed.loaded.load_program(program, artifact), artifact, timing_pb2.TIER_SCREENING)
    assert found.timing.arms[0].median_ns > 0


def test_a_timed_output_that_is_wrong_is_a_fault(timed, small):
    program = small.kernel_program("    for (long i = 0; i < ROWS * COLUMNS; ++i) y[i] = 0.5f;")
    artifact = small.compiled(program)
    loaded = timed.loaded.load_program(program, artifact)
    response = timed.measure(loaded, artifact, timing_pb2.TIER_SCREENING)
    assert response.fault.kind == verdict_pb2.FAILURE_KIND_WRONG_VALUE


class Short:
    """A loaded program whose calls meet want of memory so many times."""

    def __init__(self, loaded, times: int) -> None:
        self.program, self.device, self._loaded, self._left = loaded.program, loaded.device, loaded, times
        self.elsewhere = loaded.elsewhere

    def bind(self, *args, **kwargs):
        """As `LoadedProgram.bind`."""
        call = self._loaded.bind(*args, **kwargs)

        def short():
            if self._left:
                self._left -= 1
                raise torch.OutOfMemoryError("tried to allocate 16.00 GiB")
            return call()

        return short


@pytest.mark.parametrize("times", [1, 99])
def test_a_program_that_runs_short_of_memory_is_timed_again_and_only_then_to_blame(timed, small, times):
    program = small.kernel_program(small.softmax)
    artifact = small.compiled(program)
    loaded = Short(timed.loaded.load_program(program, artifact), times)
    with pytest.raises(torch.OutOfMemoryError):
        timed.measure(loaded, artifact, timing_pb2.TIER_SCREENING)
    again = timed.measure(loaded, artifact, timing_pb2.TIER_SCREENING)
    kind = verdict_pb2.FAILURE_KIND_RESOURCE if times > 1 else verdict_pb2.FAILURE_KIND_UNSPECIFIED
    assert (again.fault.kind, again.HasField("timing")) == (kind, times == 1)


@pytest.mark.usefixtures("short_finals")
def test_a_program_gets_the_memory_of_graphs_before_it_is_to_blame(timed, small, monkeypatch):
    program = small.kernel_program(small.softmax)
    artifact = small.compiled(program)
    loaded = Short(timed.loaded.load_program(program, artifact), 2)
    given_up = []
    monkeypatch.setattr(Baselines, "give_up_graphs", lambda _: given_up.append(True) or True)
    with pytest.raises(torch.OutOfMemoryError):
        timed.measure(loaded, artifact, timing_pb2.TIER_FINAL)
    assert timed.measure(loaded, artifact, timing_pb2.TIER_FINAL).HasField("timing")
    assert given_up == [True]


@pytest.mark.parametrize(
    ("error", "tier"),
    [
        (torch.OutOfMemoryError("tried to allocate 16.00 GiB"), timing_pb2.TIER_SCREENING),
        (ProgramFault(verdict_pb2.FAILURE_KIND_RESOURCE, "300000 bytes of shared memory"), timing_pb2.TIER_FINAL),
    ],
)
def test_no_baseline_is_given_up_in_a_screening_or_for_another_want(timed, small, monkeypatch, error, tier):
    program = small.library_program()
    artifact = small.compiled(program)
    loaded = timed.loaded.load_program(program, artifact)
    timed._shortages.is_first(program.digest, tier)  # others gave back already

    def fail(*_args: object) -> None:
        raise error

    monkeypatch.setattr(timed, "_timing", fail)
    monkeypatch.setattr(Baselines, "give_up_graphs", lambda _: pytest.fail("a baseline was given up"))
    assert timed.measure(loaded, artifact, tier).fault.kind == verdict_pb2.FAILURE_KIND_RESOURCE


@pytest.mark.usefixtures("short_finals")
def test_no_program_is_to_blame_for_a_baseline_that_runs_short_of_memory(timed, small, monkeypatch):
    def refuse(*_args, **_options):
        raise torch.OutOfMemoryError("tried to allocate 16.00 GiB")

    monkeypatch.setattr(torch, "compile", refuse)
    program = small.library_program()
    artifact = small.compiled(program)
    loaded = timed.loaded.load_program(program, artifact)
    with pytest.raises(torch.OutOfMemoryError, match="no memory to prepare compile"):
        timed.measure(loaded, artifact, timing_pb2.TIER_FINAL)
    monkeypatch.setattr(torch, "compile", lambda module, **_options: module)
    timing = timed.measure(loaded, artifact, timing_pb2.TIER_FINAL).timing
    assert "compile" in [words.arm(arm.kind) for arm in timing.arms if not arm.failure]


def test_workspaces_of_a_program_are_gone_when_it_was_timed(timed, small, monkeypatch):
    made = []
    empty = timed_task.KernelMemory.empty

    def noted(self, name, spec):
        tensor = empty(self, name, spec)
        made.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(timed_task.KernelMemory, "empty", noted)
    program = small.kernel_program(small.softmax)
    artifact = small.compiled(program)
    timed.measure(timed.loaded.load_program(program, artifact), artifact, timing_pb2.TIER_SCREENING)
    assert made
    assert not any(each() is not None for each in made)


def test_a_rewritten_reference_that_may_not_run_or_does_not_load_is_no_fault_of_the_candidate(timed, small):
    program = small.library_program()
    stray, unknown = small.library_program(), small.library_program(target="aten.no_such.default")
    stray.buffers[0].source.input_index = 7
    assert timed._rewritten(stray) is None
    assert timed._rewritten(unknown) is None
    assert timed._work_by(unknown) is None
    artifact = small.compiled(program)
    loaded = timed.loaded.load_program(program, artifact)
    answer = timed.measure(loaded, artifact, timing_pb2.TIER_SCREENING, stray)
    assert [words.arm(arm.kind) for arm in answer.timing.arms] == ["candidate", "eager"]


def test_a_rewritten_reference_that_runs_short_of_memory_is_tried_again_and_then_done_without(
    timed, small, monkeypatch
):
    def refuse(*_):
        raise torch.OutOfMemoryError("tried to allocate 16.00 GiB")

    monkeypatch.setattr(timed.loaded.executor, "load", refuse)
    with pytest.raises(torch.OutOfMemoryError):
        timed._rewritten(small.library_program())
    assert timed._rewritten(small.library_program()) is None


def test_a_step_that_raises_is_a_fault_of_the_program():
    def fail() -> None:
        raise RuntimeError("expected a matrix\nmore")

    with pytest.raises(timed_task.ProgramFault, match="expected a matrix") as caught:
        timed_task._guarded([fail])(0)
    assert caught.value.kind == verdict_pb2.FAILURE_KIND_LAUNCH_ERROR


@pytest.mark.parametrize("is_lost", [True, False])
def test_an_error_while_the_device_is_waited_for_is_the_programs_where_the_device_is_lost(
    timed, small, monkeypatch, is_lost
):
    def fail(*_):
        raise RuntimeError("CUDA error: unspecified launch failure")

    def synchronize():
        if is_lost:
            raise ProgramFault(verdict_pb2.FAILURE_KIND_CRASH, "the kernels did not end well")

    program = small.library_program()
    artifact = small.compiled(program)
    loaded = timed.loaded.load_program(program, artifact)
    timed._eager_seconds()
    monkeypatch.setattr(timed.bench.clock, "take", fail)
    monkeypatch.setattr(timed.loaded.executor, "synchronize", synchronize)
    if is_lost:
        answer = timed.measure(loaded, artifact, timing_pb2.TIER_SCREENING)
        assert answer.fault.kind == verdict_pb2.FAILURE_KIND_CRASH
    else:
        with pytest.raises(RuntimeError, match="unspecified launch failure"):
            timed.measure(loaded, artifact, timing_pb2.TIER_SCREENING)


@pytest.mark.parametrize("value", [0.0, 0.009, 0.011, 5.0, float("nan"), float("inf")])
@pytest.mark.parametrize("reference", [1.0, float("nan"), float("inf")])
def test_one_element_that_is_off_is_seen_whichever_way_agreement_is_found(value: float, reference: float) -> None:
    wanted = torch.ones(100_000)
    wanted[7] = reference
    got = wanted.clone()
    got[99_999] += value
    assert inspection.agree(got, wanted, 1e-2) == torch.allclose(got, wanted, rtol=1e-2, atol=1e-2, equal_nan=True)
    wanted.zero_()
    assert inspection.agree(wanted.clone(), wanted, 1e-2)
    assert not inspection.agree(wanted + 1e-30, wanted, 1e-2)


def test_agreement_forgives_rounding_and_nothing_else():
    wanted = torch.randn(1000)
    assert inspection.agree(wanted * 1.001, wanted, 1e-2)
    assert not inspection.agree(wanted * 1.2, wanted, 1e-2)
    half = wanted.bfloat16()
    assert inspection.agree((wanted * 1.02).bfloat16(), half, 0.125)
    assert not inspection.agree((wanted * 1.5).bfloat16(), half, 0.125)
    assert not inspection.agree(wanted.double(), wanted, 1e-2)
    indices = torch.arange(1000)
    assert inspection.agree(indices, indices.clone(), 1e-2)
    assert not inspection.agree(indices + 1, indices, 1e-2)


def test_of_few_elements_no_root_mean_square_is_asked_for_and_of_many_what_is_finite_decides():
    wanted = torch.randn(1000)
    shifted = wanted + 0.3
    assert not inspection.agree(shifted, wanted, 1e-2, 0.4, 0.1)
    assert inspection.agree(shifted, wanted, 1e-2, 0.4, 0.4)
    assert inspection.agree(shifted[:8], wanted[:8], 1e-2, 0.4, 0.1)
    assert not inspection.agree(wanted[:8] + 1.0, wanted[:8], 1e-2, 0.4, 0.1)
    for values in (shifted, wanted):
        values[100:] = -torch.inf
    assert not inspection.agree(shifted, wanted, 1e-2, 0.4, 0.1)


@pytest.mark.parametrize("coarse", [0.0, 0.06])
def test_two_right_results_may_differ_by_a_few_of_eagers_own_errors_where_tf32_makes_them_coarse(coarse):
    errors = [
        judging_pb2.CoarseError(kind=key.kind, position=key.position, name=key.name, rms=coarse)
        for key in (Key.output(0), Key.state("norm.running_mean"))
    ]
    loaded = SimpleNamespace(learned=judging_pb2.Learned(coarse_errors=errors))
    step = candidate_pb2.Step(library=candidate_pb2.LibraryCall(target="aten.relu.default"))
    subject = SimpleNamespace(program=SimpleNamespace(program=candidate_pb2.Program(steps=[step])))
    made = inspection.Inspection(loaded, None, True, [], subject)
    wanted = torch.randn(1000)
    within = torch.randn(1000).clamp(-2, 2)
    for share, hold in ((0.12, made._hold_against_eager), (0.1, partial(made._hold_against_judged, is_exact=True))):
        other = wanted + share * within
        if coarse:
            hold([other, wanted], [wanted, wanted])
        else:
            with pytest.raises(ProgramFault):
                hold([other, wanted], [wanted, wanted])
        for results in ([wanted, other], [torch.zeros(1000), wanted], [wanted, torch.zeros(1000)]):
            with pytest.raises(ProgramFault):
                hold(results, [wanted, wanted])
    state = [Key.state("norm.running_mean"), Key.state("norm.running_var")]
    left = wanted + 0.12 * within
    with nullcontext() if coarse else pytest.raises(ProgramFault, match=r"state norm\.running_mean of"):
        made._hold_against_eager([wanted, left, wanted], [wanted, wanted, wanted], state)
    with pytest.raises(ProgramFault, match=r"state norm\.running_var of" if coarse else "running_mean"):
        made._hold_against_eager([wanted, left, left], [wanted, wanted, wanted], state)
    if coarse:
        left = wanted + 1.2 * within
        made._hold_against_eager([wanted, left, wanted], [wanted, wanted, wanted], state, call_count=10)
        with pytest.raises(ProgramFault, match="output 0"):
            made._hold_against_eager([left, wanted, wanted], [wanted, wanted, wanted], state, call_count=10)


def test_free_memory_is_read(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   2048 kB\n")
    assert free_bytes(task_pb2.TARGET_CPU, tmp_path / "meminfo") == 2 << 20
    assert free_bytes(task_pb2.TARGET_CPU, tmp_path / "absent") == 4 << 30


@pytest.mark.usefixtures("_no_compiling")
def test_what_a_judged_case_made_of_parameters_is_no_change_by_the_program(small):
    constructor = (
        "    def __init__(self):\n        super().__init__()\n        self.scale = torch.nn.Parameter(torch.ones(1))\n"
    )
    source = small.module.replace("    def forward", f"{constructor}    def forward").replace(
        "dim=-1)", "dim=-1) * self.scale"
    )
    loaded = LoadedTask.load(small.task(source))
    with torch.no_grad():
        loaded.module.scale.fill_(3.0)
    timed = TimedTask.of(loaded)
    loaded.restore()
    timed.inputs.look([0])
    timed.bench.baselines.inputs[0][0].zero_()
    with pytest.raises(ProgramFault, match="an input or a parameter was changed"):
        timed.inputs.look([0])


def test_a_call_that_does_not_come_back_while_it_is_timed_is_a_timeout(small):
    program = small.kernel_program("    for (volatile int i = 0;; ++i) {}")
    made = Session(small.task(), limits=Limits(hang_seconds=3.0))
    try:
        request = benchmark_service_pb2.MeasureArtifactRequest(
            task=small.task(), program=program, artifact=small.compiled(program), tier=timing_pb2.TIER_SCREENING
        )
        begin = time.monotonic()
        answer = made.measure(request)
        assert (answer.fault.kind, time.monotonic() - begin < 60) == (verdict_pb2.FAILURE_KIND_TIMEOUT, True)
        assert "while it was timed" in answer.fault.detail
    finally:
        made.close()


def test_a_watchdog_ends_what_takes_longer_than_expected_and_nothing_else():
    ended = threading.Event()
    with watchdog.Watchdog(2.0, ended.set) as dog:
        with dog.expecting():
            time.sleep(0.1)
        assert not ended.wait(2.7), "nothing is expected now"
        with dog.expecting():
            assert ended.wait(30)


@pytest.mark.parametrize("reading", clocks.Reading)
def test_what_is_done_ahead_of_a_reading_is_not_taken_for_a_call_without_an_end(reading):
    told, inside = [], []

    @contextmanager
    def watch():
        inside.append(True)
        yield
        inside.pop()

    def note(name, _):  # ahead of a reading new values may be drawn for all buffer sets
        told.append((name, bool(inside)))

    arm = clocks.Arm("candidate", partial(note, "call"), before=partial(note, "before"), watch=watch)
    clocks.HostClock(1 << 20).take(arm, [0, 1], reading)
    assert set(told) == {("call", True), ("before", False)}


def test_buffer_sets_get_new_values_where_they_lie_unless_a_program_has_written_to_them(timed):
    (first,), *_ = timed.bench.baselines.inputs
    before, address = first.clone(), first.data_ptr()
    (other,) = timed.bench.baselines.inputs[1]
    kept = other.clone()
    assert timed.inputs.renew([0])
    assert not torch.equal(first, before)
    assert torch.equal(other, kept)
    assert first.data_ptr() == address
    timed.inputs.look([0, 1])
    first.zero_()
    with pytest.raises(ProgramFault, match="an input or a parameter was changed"):
        timed.inputs.renew([0])


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("gives", ["its state", "a copy", "the state of another call"])
def test_an_output_that_is_state_shows_what_all_calls_of_a_reading_left(monkeypatch, place, gives):
    state, sets = torch.zeros(()), [4, 7, 5]

    def call(index):
        state.add_(index)
        return [state, torch.ones(3) * state]

    def program(index):
        shown, made = call(index)
        return [shown if gives == "its state" else shown.clone(), made]

    loaded = SimpleNamespace(
        output_leaves=list, keep_places=lambda: None, learned=judging_pb2.Learned(), device=torch.device("cpu")
    )
    baselines = SimpleNamespace(eager=lambda: SimpleNamespace(call=call))
    subject = SimpleNamespace(program=SimpleNamespace(program=candidate_pb2.Program()))
    made = inspection.Inspection(loaded, baselines, False, [], subject)
    monkeypatch.setattr(made, "_as_judged", lambda index: [state + index, torch.ones(3) * (state + index)])
    before = Before.of(sets, [{Key.state("n"): state}], [Key.state("n")])
    outputs = [program(index) for index in sets]
    if gives == "the state of another call":
        outputs[place][0] = torch.tensor(99.0)
    with pytest.raises(ProgramFault) if gives == "the state of another call" else nullcontext():
        made._make_again(before, sets[place], outputs[place])
    assert state == 16
