"""From samples to the record: headline, noise, flags, steps; and the audit of a reference."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import replace

import pytest
import torch
from torch import nn

from gpu_bench import device, metrics
from gpu_bench.pytorch import reference
from gpu_bench.pytorch.baselines import Baselines, Prepared
from gpu_bench.timing import floor, headline, measurement
from gpu_bench.timing.floor import Work
from gpu_bench.timing.measurement import Bench, Candidate, StepInfo, compose_timing, measure_candidate, step_infos
from gpu_bench.timing.timing_selftest import NOTHING, Noise, SimulatedClock
from warpsmith.contract import words
from warpsmith.v1 import analysis_pb2, candidate_pb2, task_pb2, tensor_pb2, timing_pb2, verdict_pb2

NS = {"candidate": 1e5, "eager": 3e5, "compile": 2e5, "rewritten": 1.2e5, "aa_copy": 2e5}


@pytest.fixture
def bench(monkeypatch) -> Bench:
    """A softmax on a simulated clock, with torch.compile replaced by the module itself."""
    monkeypatch.setattr(torch, "compile", lambda module, **_options: module)
    inputs = [(torch.rand(4, 8),), (torch.rand(4, 8),)]
    baselines = Baselines(nn.Softmax(dim=1), inputs, task_pb2.TARGET_CPU)
    described = timing_pb2.Device(
        target=task_pb2.TARGET_CPU,
        read_bytes_per_second=1e10,
        write_bytes_per_second=1e10,
        physical_bytes_per_second=1.5e10,
        cache_bytes=1000,
    )
    ceilings = device.Ceilings(described, 1e12, 1e12, 0.0, 0.0)
    work = Work(400_000, 0, 400_000, 0, 0, 0, 0)
    return Bench(task_pb2.TARGET_CPU, baselines, work, SimulatedClock(NS, Noise(), 5), ceilings, 42, "none")


def names(timing) -> list[str]:
    return [words.arm(arm.kind) for arm in timing.arms]


def test_a_final_has_every_arm_and_the_headline_is_against_the_fastest(bench):
    timing = measure_candidate(bench, Candidate(lambda index: index), timing_pb2.TIER_FINAL)
    assert names(timing) == ["candidate", "eager", "compile", "aa_copy"]
    assert timing.fastest_arm == timing_pb2.ARM_KIND_COMPILE
    assert timing.speedup_fastest.median == pytest.approx(2.0, rel=0.02)
    assert timing.speedup_eager.median == pytest.approx(3.0, rel=0.02)
    assert timing.faster
    assert 0 < timing.noise_floor < 0.02
    assert timing.floor_ns == pytest.approx(8e4)
    assert timing.floor_percent == pytest.approx(80, rel=0.02)
    assert timing.environment.seed == 42
    assert timing.arms[0].warm_median_ns == pytest.approx(8e4, rel=0.05)
    assert not timing.raised


def test_a_rewritten_reference_is_timed_but_never_the_fastest_baseline(bench):
    candidate = Candidate(lambda index: index, rewritten=lambda index: index)
    timing = measure_candidate(bench, candidate, timing_pb2.TIER_FINAL)
    assert "rewritten" in names(timing)
    assert timing.fastest_arm == timing_pb2.ARM_KIND_COMPILE


def test_the_floor_is_that_of_the_candidates_algebra_where_it_has_one(bench):
    by_products = replace(bench.work, product_flops=9 * 10**7)  # 90 us at the rate of products, bytes take 80
    bench.work = replace(bench.work, product_flops=10**9)
    candidate = Candidate(lambda index: index, rewritten=lambda index: index, work=by_products)
    timing = measure_candidate(bench, candidate, timing_pb2.TIER_FINAL)
    assert timing.floor_ns == pytest.approx(9e4)
    assert not timing.raised


def test_screening_times_against_eager_until_the_reference_was_measured(bench):
    candidate = Candidate(lambda index: index)
    assert names(measure_candidate(bench, candidate, timing_pb2.TIER_SCREENING)) == ["candidate", "eager"]
    report = reference.measure_reference(bench)
    assert (report.fastest_arm, list(report.raised)) == (timing_pb2.ARM_KIND_COMPILE, [])
    timing = measure_candidate(bench, candidate, timing_pb2.TIER_SCREENING)
    assert names(timing) == ["candidate", "eager", "compile"]
    assert timing.faster


def kept(eager_ns: float) -> timing_pb2.ReferenceReport:
    """What an earlier run found: compile takes two fifths of eager."""
    known = timing_pb2.ReferenceReport(fastest_arm=timing_pb2.ARM_KIND_COMPILE, floor_ns=7e4)
    known.arms.add(kind=timing_pb2.ARM_KIND_EAGER, median_ns=eager_ns, samples_ns=[eager_ns])
    known.arms.add(kind=timing_pb2.ARM_KIND_COMPILE, median_ns=0.4 * eager_ns, samples_ns=[0.4 * eager_ns])
    return known


def test_baselines_of_an_earlier_run_stand_for_those_of_this_one_by_what_eager_takes_now(bench):
    eager_ns = reference.measure_reference(bench).arms[0].median_ns
    bench.baselines._prepared.clear()
    bench.baselines.medians_ns.clear()
    report = reference.measure_reference(bench, kept(1.05 * eager_ns))
    assert report.is_kept
    assert [words.arm(arm.kind) for arm in report.arms] == ["eager", "compile"]
    assert report.arms[1].median_ns == pytest.approx(0.4 * report.arms[0].median_ns)
    assert report.arms[1].samples_ns == [pytest.approx(report.arms[1].median_ns, rel=0.02)]
    assert report.floor_ns == pytest.approx(8e4), "the floor is this machine's"
    assert not bench.baselines._prepared, "nothing was compiled"


def test_a_screening_is_held_against_a_baseline_that_an_earlier_run_timed(bench):
    eager_ns = reference.measure_reference(bench).arms[0].median_ns
    bench.baselines._prepared.clear()
    bench.baselines.medians_ns.clear()
    reference.measure_reference(bench, kept(eager_ns))
    timing = measure_candidate(bench, Candidate(lambda index: index), timing_pb2.TIER_SCREENING)
    assert names(timing) == ["candidate", "eager", "compile"]
    assert timing.fastest_arm == timing_pb2.ARM_KIND_COMPILE
    assert timing.speedup_eager.median == pytest.approx(3.0, rel=0.02)
    assert timing.speedup_fastest.median == pytest.approx(0.4 * timing.speedup_eager.median)
    assert timing.speedup_fastest.low == pytest.approx(0.4 * timing.speedup_eager.low)
    assert not timing.arms[2].samples_ns
    final = measure_candidate(bench, Candidate(lambda index: index), timing_pb2.TIER_FINAL)
    assert final.speedup_fastest.median == pytest.approx(2.0, rel=0.02), "a final times every arm"


@pytest.mark.parametrize("off", [0.5, 0.88, 1.15])
def test_where_eager_takes_another_time_than_then_all_are_timed_again(bench, off):
    eager_ns = reference.measure_reference(bench).arms[0].median_ns
    report = reference.measure_reference(bench, kept(off * eager_ns))
    assert not report.is_kept
    assert report.arms[1].median_ns == pytest.approx(report.arms[0].median_ns * 2 / 3, rel=0.02)


def test_what_is_known_holds_for_the_same_graph_and_the_same_baselines_if_all_of_them_ran(bench):
    eager_ns = reference.measure_reference(bench).arms[0].median_ns
    whole, changed, failed, more, alone = (kept(eager_ns) for _ in range(5))
    changed.graph_digest = "another"
    failed.arms[1].failure, failed.arms[1].median_ns = "took longer than 180 s", 0.0
    more.arms.add(kind=timing_pb2.ARM_KIND_CUDNN_BENCHMARK, median_ns=eager_ns)
    del alone.arms[0]
    for known in (changed, failed, more, alone):
        assert not reference.measure_reference(bench, known).is_kept
    assert reference.measure_reference(bench, whole).is_kept


def test_a_time_near_the_floor_is_taken_anew(bench):
    """Of 80 us, where a search ends."""
    eager_ns = reference.measure_reference(bench).arms[0].median_ns
    known = kept(eager_ns)
    known.arms[1].median_ns = 0.99e5
    assert not reference.measure_reference(bench, known).is_kept
    known.arms[1].median_ns = 1.05e5
    assert reference.measure_reference(bench, known).is_kept


def test_what_the_candidate_raises_passes_through_and_state_is_restored(bench):
    def fail(_index: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        measure_candidate(bench, Candidate(fail), timing_pb2.TIER_SCREENING)


def test_steps_are_timed_in_a_final(bench):
    def stepwise() -> None:
        bench.clock.stamp()
        bench.clock.stamp()

    steps = [
        StepInfo("a", analysis_pb2.ENGINE_AUTHORED, "k", 1000),
        StepInfo("b", analysis_pb2.ENGINE_LIBRARY, "aten.sum.default", 0),
    ]
    candidate = Candidate(lambda index: index, stepwise=stepwise, steps=steps)
    timing = measure_candidate(bench, candidate, timing_pb2.TIER_FINAL)
    assert [(s.group, s.median_ns) for s in timing.steps] == [("a", 1000.0), ("b", 1000.0)]
    assert timing.steps[0].bytes_per_second == pytest.approx(1e9)


def test_each_call_of_a_stepwise_program_is_watched_by_itself(bench):
    watched, seen = [0], []

    @contextlib.contextmanager
    def watch():
        watched[0] += 1
        yield

    def stepwise() -> None:
        seen.append(watched[0])
        bench.clock.stamp()

    candidate = Candidate(
        lambda index: index,
        watch=watch,
        stepwise=stepwise,
        steps=[StepInfo("a", analysis_pb2.ENGINE_AUTHORED, "k", 1000)],
    )
    measure_candidate(bench, candidate, timing_pb2.TIER_FINAL)
    assert len(set(seen)) == len(seen) > 1


def test_a_rewrite_that_is_five_times_as_fast_leaves_every_baseline_its_blocks(bench):
    bench.clock = SimulatedClock({**NS, "rewritten": 3e4}, Noise(), 5)
    candidate = Candidate(lambda index: index, rewritten=lambda index: index)
    timing = measure_candidate(bench, candidate, timing_pb2.TIER_FINAL)
    assert len({len(arm.samples_ns) for arm in timing.arms}) == 1


def test_a_baseline_that_failed_leaves_the_fastest_unproven(bench, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", refuse)
    timing = measure_candidate(bench, Candidate(lambda index: index), timing_pb2.TIER_FINAL)
    assert measurement.FASTEST_UNPROVEN in timing.raised
    assert timing.arms[-1].failure == "RuntimeError: no compiler"
    assert timing.fastest_arm == timing_pb2.ARM_KIND_EAGER


def test_a_floor_that_was_measured_under_load_is_measured_again(bench, monkeypatch):
    bench.work = Work(4_000_000, 0, 0, 0, 0, 0, 0)
    faster = timing_pb2.Device(read_bytes_per_second=1e12, physical_bytes_per_second=1e12)
    monkeypatch.setattr(device, "_describe_cpu", lambda: device.Ceilings(faster, 1e12, 1e12, 0.0, 0.0))
    timing = measure_candidate(bench, Candidate(lambda index: index), timing_pb2.TIER_SCREENING)
    assert not timing.raised
    assert timing.faster


@pytest.mark.parametrize(
    ("rate_again", "floor_ns"),
    [(1e12, 4e3), (1e10, 0.0), (1.95e10, 0.0)],  # the last is beaten by 3 %
)
def test_a_floor_that_pytorch_beats_is_measured_again_and_else_is_none(bench, monkeypatch, rate_again, floor_ns):
    bench.work = Work(4_000_000, 0, 0, 0, 0, 0, 0)
    again = timing_pb2.Device(read_bytes_per_second=rate_again)
    monkeypatch.setattr(device, "_describe_cpu", lambda: device.Ceilings(again, 1e12, 1e12, 0.0, 0.0))
    assert reference.measure_reference(bench).floor_ns == pytest.approx(floor_ns)


@pytest.mark.parametrize(("cache_bytes", "floor_ns"), [(399_999, 8e4), (400_000, 0.0)])
def test_a_task_that_may_lie_in_the_cache_of_a_processor_has_no_floor(bench, cache_bytes, floor_ns):
    bench.ceilings.device.cache_bytes = cache_bytes
    assert reference.measure_reference(bench).floor_ns == pytest.approx(floor_ns)


def test_a_time_below_the_physical_floor_is_flagged_and_not_faster(bench, monkeypatch):
    monkeypatch.setattr(device, "_describe_cpu", lambda: bench.ceilings)
    bench.work = Work(4_000_000, 0, 0, 0, 0, 0, 0)
    timing = measure_candidate(bench, Candidate(lambda index: index), timing_pb2.TIER_SCREENING)
    assert timing_pb2.FLAG_FLOOR_REJECT in timing.raised
    assert not timing.faster
    metrics.record_timing(timing)


def suspected(bench, monkeypatch, **candidate) -> tuple[timing_pb2.Timing, list[int]]:
    """The timing of a candidate between the achievable and the physical floor, and the buffer sets looked at."""
    monkeypatch.setattr(device, "_describe_cpu", lambda: bench.ceilings)
    bench.work = Work(1_200_000, 0, 0, 0, 0, 0, 0)
    looked = []

    def inspect(name: str, index: int, _outputs: object) -> None:
        if name == "candidate":
            looked.append(index)

    made = Candidate(lambda index: index, **candidate)
    return measure_candidate(bench, made, timing_pb2.TIER_SCREENING, inspect), looked


def test_a_time_below_the_measured_floor_is_not_faster_unless_an_audit_clears_it(bench, monkeypatch):
    timing, _ = suspected(bench, monkeypatch)
    assert floor.FLOOR_SUSPECT in timing.raised
    assert not timing.faster


def test_an_audit_looks_at_every_buffer_set_with_new_values_and_clears_a_time_that_holds(bench, monkeypatch):
    looked_before_renewal = []
    timing, looked = suspected(bench, monkeypatch, renew=lambda sets: not looked_before_renewal.append(list(sets)))
    assert looked_before_renewal == [[0, 1]]
    assert looked[-2:] == [0, 1]
    assert measurement.FLOOR_AUDITED in timing.raised
    assert floor.FLOOR_SUSPECT not in timing.raised
    assert timing.faster


def test_a_time_that_an_audit_does_not_find_again_stays_suspect(bench, monkeypatch):
    def slower(_sets) -> bool:
        bench.clock._true_ns = {**NS, "candidate": 1.3e5}
        return True

    timing, _ = suspected(bench, monkeypatch, renew=slower)
    assert floor.FLOOR_SUSPECT in timing.raised
    assert not timing.faster


@pytest.mark.parametrize(("remembers", "looks"), [(False, 1), (True, measurement.FRESH_LOOKS)])
def test_a_final_is_not_faster_by_answers_that_it_kept(bench, monkeypatch, remembers, looks):
    known, renewals, take = set(), [], bench.clock.take

    def slow_at_first(arm, sets, reading):
        if arm.before is not None:
            arm.before(sets)
        sample = take(arm, sets, reading)
        if arm.name != "candidate" or not remembers or known.issuperset(sets):
            return sample
        known.update(sets)
        return dataclasses.replace(sample, ns=4e5)

    def renew(_sets) -> bool:
        renewals.append(len(known))
        known.clear()
        return True

    monkeypatch.setattr(bench.clock, "take", slow_at_first)
    timing = measure_candidate(bench, Candidate(lambda index: index, renew=renew), timing_pb2.TIER_FINAL)
    assert len(renewals) == looks * measurement.FRESH_READINGS
    assert timing.faster is not remembers
    assert (headline.SLOWER_ON_FRESH_VALUES in timing.raised) is remembers


def test_a_final_is_believed_where_no_values_can_be_drawn(bench, monkeypatch):
    take = bench.clock.take

    def slow_where_renewed(arm, sets, reading):
        sample = take(arm, sets, reading)
        if arm.before is None:
            return sample
        arm.before(sets)
        return dataclasses.replace(sample, ns=4e5)

    monkeypatch.setattr(bench.clock, "take", slow_where_renewed)
    timing = measure_candidate(bench, Candidate(lambda index: index, renew=lambda _: False), timing_pb2.TIER_FINAL)
    assert timing.faster


def test_composing_without_any_baseline_claims_nothing(bench):
    timing = measure_candidate(bench, Candidate(lambda index: index), timing_pb2.TIER_SCREENING)
    assert timing.faster
    samples = measurement.measure(
        [measurement.Arm("candidate", lambda index: index, required=True)],
        bench.clock,
        measurement.plan_for(timing_pb2.TIER_SCREENING, task_pb2.TARGET_CPU, 1),
    )
    alone = compose_timing(
        samples,
        [Prepared("eager", None, "broken")],
        tier=timing_pb2.TIER_FINAL,
        work=NOTHING,
        ceilings=bench.ceilings,
    )
    assert not alone.faster
    assert alone.fastest_arm == timing_pb2.ARM_KIND_UNSPECIFIED
    assert set(alone.raised) >= {measurement.FASTEST_UNPROVEN, measurement.FEW}


def test_steps_of_a_program_are_described():
    spec = tensor_pb2.TensorSpec(dtype=tensor_pb2.DTYPE_FLOAT32, shape=[8], strides=[1])
    program = candidate_pb2.Program(
        buffers=[candidate_pb2.Buffer(name=name, spec=spec) for name in "xyz"],
        steps=[
            candidate_pb2.Step(
                group="y",
                launch=candidate_pb2.Launch(
                    entry="k",
                    arguments=[candidate_pb2.LaunchArgument(buffer=name) for name in ("x", "y", "y")],
                ),
            ),
            candidate_pb2.Step(
                group="z",
                library=candidate_pb2.LibraryCall(
                    target="aten.relu.default", args=[tensor_pb2.Value(tensor="y")], results=["z"]
                ),
            ),
        ],
    )
    assert step_infos(program) == [
        StepInfo("y", analysis_pb2.ENGINE_AUTHORED, "k", 64),
        StepInfo("z", analysis_pb2.ENGINE_LIBRARY, "aten.relu.default", 64),
    ]


def test_time_at_which_several_calls_hold_the_device_is_divided_among_them():
    def held(call):
        return metrics.HELD_SECONDS.labels(call)._value.get()

    now = 100.0
    holding = metrics.Holding(clock=lambda: now)
    before = {call: held(call) for call in ("compare", "measure", "reference")}
    now += 50.0  # held by no call
    with holding.by("measure"):
        now += 4.0
        with holding.by("compare"), holding.by("compare"):
            now += 3.0
    now += 50.0
    with contextlib.suppress(RuntimeError), holding.by("reference"):
        now += 7.0
        raise RuntimeError("the call faulted")
    counted = {call: held(call) - seconds for call, seconds in before.items()}
    assert counted == pytest.approx({"compare": 2.0, "measure": 5.0, "reference": 7.0})


def test_a_scrape_sees_the_time_of_a_call_that_still_holds_the_device():
    def scraped():
        (family,) = metrics.HELD_SECONDS.collect()
        return next(each.value for each in family.samples if each.labels == {"call": "open"} and "total" in each.name)

    now = 100.0
    holding = metrics.Holding(clock=lambda: now)
    before = scraped()
    with holding.by("open"):
        now += 60.0
        assert scraped() == pytest.approx(before + 60.0)
        now += 5.0
    assert scraped() == pytest.approx(before + 65.0)


def test_metrics_count_timings_faults_and_the_machine():
    timing = timing_pb2.Timing(tier=timing_pb2.TIER_FINAL, noise_floor=0.004, device_seconds=2.0, faster=True)
    timing.environment.clock_mhz.extend([1900, 1980])
    timing.environment.throttle_reasons.append("software_power_cap")
    counter = metrics.MEASUREMENTS.labels("final", "faster")
    before = counter._value.get()
    metrics.record_timing(timing)
    assert counter._value.get() == before + 1
    assert metrics.CLOCK._value.get() == 1.98e9
    assert metrics.THROTTLED.labels("software_power_cap")._value.get() == 1.0
    metrics.record_fault(timing_pb2.TIER_SCREENING, verdict_pb2.FAILURE_KIND_CRASH)
    assert metrics.FAULTS.labels("crash")._value.get() >= 1
    metrics.record_reference(timing_pb2.ReferenceReport())
    assert metrics.THROTTLED.labels("software_power_cap")._value.get() == 0.0
