"""Interleaving, grouping, drift, failing arms; and the stopwatch's own test on a simulated machine."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from gpu_bench.timing import clocks, timing_selftest
from gpu_bench.timing.clocks import Arm, HostClock, Reading
from gpu_bench.timing.interleaving import Plan, buffer_set_count, failure_text, measure, measure_steps, plan_for
from gpu_bench.timing.statistics import FEW_BLOCKS, LEAST_BLOCKS
from gpu_bench.timing.timing_selftest import Noise, SimulatedClock
from warpsmith.v1 import task_pb2, timing_pb2

QUIET = Noise(jitter=0.0, drift=0.0, spike_chance=0.0, step_chance=0.0)
PLAN = Plan(budget_s=0.02, ceiling_s=1.0, least_blocks=4, most_blocks=20, set_count=3, warmup_s=0.0, drift_limit=0.1)


def simulated(true_ns: dict[str, float], plan: Plan = PLAN, noise: Noise = QUIET, **required: bool):
    calls: list[tuple[str, int]] = []

    def arm(name: str) -> Arm:
        return Arm(name, lambda index: calls.append((name, index)), required.get(name, False))

    samples = measure([arm(name) for name in true_ns], SimulatedClock(true_ns, noise, 1), plan)
    return samples, calls


def test_every_block_is_an_order_and_its_reverse():
    _, calls = simulated({"a": 1e5, "b": 1e5, "c": 1e5})
    names = [name for name, _ in calls][3:]
    blocks = [names[start : start + 6] for start in range(0, len(names) - 5, 6)]
    assert all(block[:3] == block[:2:-1] for block in blocks)
    assert len({tuple(block) for block in blocks}) > 1


def test_medians_are_the_true_times():
    samples, _ = simulated({"a": 1e5, "b": 2e5})
    assert samples.arms["a"].median_ns == pytest.approx(1e5)
    assert samples.arms["b"].median_ns == pytest.approx(2e5)
    assert samples.discarded_count == 0
    assert len(samples.arms["a"].samples_ns) == 2 * samples.block_count


def test_what_repeats_exactly_needs_no_more_blocks_than_the_least():
    plan = replace(PLAN, enough_within=0.002)
    assert simulated({"a": 1e5, "b": 2e5}, plan)[0].block_count == plan.least_blocks
    noisy, _ = simulated({"a": 1e5, "b": 2e5}, plan, replace(QUIET, jitter=0.2))
    assert noisy.block_count > plan.least_blocks


def test_short_calls_are_grouped_over_distinct_buffers_for_all_arms():
    samples, calls = simulated({"a": 1e4, "b": 1e5}, replace(PLAN, set_count=16))
    assert samples.group_length == 10
    assert {index for _, index in calls[-10:]} == {index % 16 for index in range(calls[-10][1], calls[-10][1] + 10)}
    assert len({index for _, index in calls[-10:]}) == 10


def test_a_group_is_never_longer_than_the_buffer_sets():
    samples, _ = simulated({"a": 1e3})
    assert samples.group_length == 3


def test_calls_rotate_over_the_buffer_sets():
    _, calls = simulated({"a": 1e5})
    assert {index for _, index in calls} == {0, 1, 2}


def test_the_time_budget_ends_the_blocks():
    few, _ = simulated({"a": 1e6}, replace(PLAN, budget_s=0.001))
    assert few.block_count == 4
    many, _ = simulated({"a": 1e5}, replace(PLAN, budget_s=10.0))
    assert many.block_count == 20


def test_a_very_slow_task_gets_a_single_block_and_is_never_called_faster():
    plan = replace(plan_for(timing_pb2.TIER_SCREENING, task_pb2.TARGET_CPU, 1), warmup_s=0.0)
    samples, _ = simulated({"candidate": 4e9, "eager": 2e10}, plan)
    assert samples.block_count == 1
    assert not timing_selftest.judged(samples, timing_pb2.TIER_SCREENING, 0).faster


def test_an_optional_arm_that_fails_is_recorded_and_the_rest_goes_on():
    def fail(_index: int) -> None:
        raise RuntimeError("no such luck\nsecond line")

    clock = SimulatedClock({"good": 1e5, "bad": 1e5}, QUIET, 0)
    samples = measure([Arm("good", lambda i: i), Arm("bad", fail)], clock, PLAN)
    assert samples.arms["bad"].failure == "RuntimeError: no such luck"
    assert math.isnan(samples.arms["bad"].median_ns)
    assert samples.arms["good"].median_ns == pytest.approx(1e5)


def test_what_a_required_arm_raises_passes_through():
    def fail(_index: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        measure([Arm("candidate", fail, required=True)], SimulatedClock({"candidate": 1.0}, QUIET, 0), PLAN)


def test_slow_baselines_leave_early_but_a_fast_candidate_drives_nobody_out():
    long = replace(PLAN, budget_s=1.0)
    samples, _ = simulated({"candidate": 1e4, "eager": 1e5, "slow": 1e6}, long, candidate=True)
    counts = {name: len(arm.samples_ns) for name, arm in samples.arms.items()}
    assert counts == {"candidate": 40, "eager": 40, "slow": 8}


def test_a_fast_rewrite_drives_no_baseline_out_but_leaves_where_it_is_slow():
    long = replace(PLAN, budget_s=1.0, followers=frozenset({"rewritten"}))
    samples, _ = simulated({"eager": 1e5, "compile": 9e4, "rewritten": 2e4}, long)
    assert {len(arm.samples_ns) for arm in samples.arms.values()} == {40}
    samples, _ = simulated({"eager": 1e5, "rewritten": 9e5}, long)
    assert {name: len(arm.samples_ns) for name, arm in samples.arms.items()} == {"eager": 40, "rewritten": 8}


def test_blocks_in_which_the_machine_changed_are_discarded():
    class Stepping(SimulatedClock):
        count = 0

        def sentinel_ns(self) -> float:
            self.count += 1
            return 2e5 if 7 <= self.count <= 10 else 1e5

    arms = [Arm("a", lambda i: i)]
    samples = measure(arms, Stepping({"a": 1e5}, QUIET, 0), replace(PLAN, budget_s=1.0))
    assert samples.discarded_count == 2
    assert not samples.unsteady
    assert np.isnan(samples.arms["a"].blocks[3]).all()


def test_a_restless_machine_keeps_the_steadier_half_and_says_so():
    class Restless(SimulatedClock):
        def sentinel_ns(self) -> float:
            return 1e5 * (1.0 + self._random.random())

    samples = measure([Arm("a", lambda i: i)], Restless({"a": 1e5}, QUIET, 0), PLAN)
    assert samples.unsteady
    assert samples.block_count >= samples.discarded_count


def test_extra_readings_are_taken_apart():
    samples, _ = simulated({"a": 1e5}, replace(PLAN, extra_readings=(Reading.WARM, Reading.CALL)))
    assert samples.arms["a"].warm_ns == pytest.approx(8e4)
    assert samples.arms["a"].call_ns == pytest.approx(1.2e5)


def test_extra_readings_of_a_slow_task_end_at_the_ceiling_after_one_round():
    samples, calls = simulated({"a": 4e9, "b": 4e9}, replace(PLAN, extra_readings=(Reading.WARM,)))
    assert len(calls) == 2 * (1 + 2 + 1)  # warming up, a block, a round
    assert samples.arms["b"].warm_ns == pytest.approx(3.2e9)


def test_timed_outputs_are_handed_to_the_inspector():
    seen = []
    clock = SimulatedClock({"a": 1e5}, QUIET, 0)
    measure([Arm("a", lambda i: i + 40)], clock, PLAN, lambda name, index, out: seen.append((name, index, out)))
    assert seen
    assert all(name == "a" and output == index + 40 for name, index, output in seen)


def test_names_must_differ():
    twice = [Arm("a", lambda i: i), Arm("a", lambda i: i)]
    with pytest.raises(ValueError, match="names of their own"):
        measure(twice, SimulatedClock({"a": 1.0}, QUIET, 0), PLAN)
    with pytest.raises(ValueError, match="at least one block"):
        replace(PLAN, least_blocks=0)


def test_buffer_sets_cover_four_caches_within_memory():
    assert buffer_set_count(1 << 20, 32 << 20, 1 << 40) == 64
    assert buffer_set_count(16 << 20, 32 << 20, 1 << 40) == 8
    assert buffer_set_count(1 << 30, 32 << 20, 1 << 40) == 2
    assert buffer_set_count(1 << 30, 32 << 20, 1 << 29) == 1


def test_failures_are_one_short_line():
    assert failure_text(ValueError("x" * 999)).startswith("ValueError: xxx")
    assert len(failure_text(ValueError("x" * 999))) == 300
    assert failure_text(KeyError()) == "KeyError: "


def test_an_interrupted_reading_is_taken_again(monkeypatch):
    switches = iter([0, 1, 1, 1])
    monkeypatch.setattr(clocks, "_forced_switches", lambda _: next(switches))
    calls = []
    HostClock(1 << 20).take(Arm("a", calls.append), [5], Reading.COLD)
    assert calls == [5, 5]


def test_the_host_clock_times_calls_and_steps():
    clock = HostClock(1 << 20)
    arm = Arm("a", lambda _index: sum(range(2000)))
    cold = clock.take(arm, [0, 1], Reading.COLD)
    assert cold.outputs == [sum(range(2000))] * 2
    assert 1e3 < cold.ns < 1e8
    assert clock.take(arm, [0], Reading.WARM).ns > 1e3
    assert clock.sentinel_ns() > 0

    def steps() -> None:
        for _ in range(3):
            sum(range(2000))
            clock.stamp()

    assert len(measure_steps(steps, clock, repeats=3)) == 3


@pytest.mark.parametrize("tier", [timing_pb2.TIER_FINAL, timing_pb2.TIER_SCREENING])
def test_equals_are_called_faster_at_most_once_in_a_hundred(tier):
    assert timing_selftest.count_faster(1.0, tier) <= 1


def test_a_three_percent_slowdown_is_found_in_at_least_95_of_100():
    assert timing_selftest.count_faster(1.03, timing_pb2.TIER_FINAL) >= 95


def test_the_selftest_command_reports_and_succeeds(capsys):
    assert timing_selftest.main(["--runs", "3"]) == 0
    assert "simulated 3 % difference found, final: 3 of 3" in capsys.readouterr().out


def test_a_stall_of_the_host_lengthens_the_spin_once_and_accuses_nobody():
    lead = clocks.HostLead()
    assert not lead.was_enough("eager", 80e6, was_ahead=False)
    assert lead.spin_ns("eager") == clocks.SPIN_LIMIT_NS
    for _ in range(40):
        assert lead.was_enough("eager", 100e3, was_ahead=True)
    assert lead.spin_ns("eager") == 200e3
    assert not lead.host_bound


def test_an_arm_that_is_late_behind_the_longest_spin_is_host_bound_and_read_all_the_same():
    lead = clocks.HostLead()
    for _ in range(clocks.HOST_BOUND_AFTER):
        assert not lead.was_enough("eager", 80e6, was_ahead=False)
        assert not lead.host_bound
    assert not lead.was_enough("eager", 80e6, was_ahead=False)
    assert lead.host_bound == {"eager"}
    assert lead.was_enough("eager", 80e6, was_ahead=False)
    assert lead.spin_ns("eager") == clocks.SPIN_START_NS
    lead.forget(["eager"])
    assert not lead.host_bound, "the next arm of that name is another"


def test_without_cuda_bindings_no_persisting_lines_are_said_to_be_reset(monkeypatch):
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(clocks.importlib, "import_module", missing)
    assert clocks.persisting_reset() is None


def test_screening_on_a_gpu_visits_an_arm_six_times_at_least() -> None:
    plan = plan_for(timing_pb2.TIER_SCREENING, task_pb2.TARGET_CUDA, set_count=2)
    assert plan.least_blocks == LEAST_BLOCKS == 3  # below that nothing would ever be called faster
    final = plan_for(timing_pb2.TIER_FINAL, task_pb2.TARGET_CUDA, set_count=2)
    assert final.least_blocks >= FEW_BLOCKS
