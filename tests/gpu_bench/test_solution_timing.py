"""Timing a solution from outside: batches long enough, gains that have to be there on fresh values, idle processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace

import pytest

from gpu_bench import solution_timing
from gpu_bench.clocks import Arm, Reading
from gpu_bench.contest import CallSet, fresh_calls, plain_calls
from gpu_bench.solution_session import SolutionFault
from gpu_bench.solution_timing import Look, OutsideClock, Round, conclude, least_of, look_behind, take_fresh, watch_idle
from warpsmith.v1 import judging_pb2, timing_pb2, verdict_pb2

WAY_SECONDS = 1e-4
"""What asking another process costs."""
_now = [0.0]


@pytest.fixture(autouse=True)
def _simulated_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solution_timing, "time", SimpleNamespace(perf_counter=lambda: _now[0], sleep=None))


def process(
    known_s: Mapping[str, float], fresh_s: Mapping[str, float], sums: Mapping[str, float] | None = None
) -> Callable[[judging_pb2.CallsRequest], judging_pb2.Calls]:
    """Processes whose calls take so many seconds."""

    def call(request: judging_pb2.CallsRequest) -> judging_pb2.Calls:
        surroundings = max(0.0, fresh_s.get("eager", 0.0) - known_s["eager"])
        seconds = ({"surroundings": surroundings, **fresh_s} if request.fresh_seed else known_s)[request.arm]
        _now[0] += WAY_SECONDS + seconds * request.count
        return judging_pb2.Calls(sums=[(sums or {}).get(request.arm, 5.0)] if request.fresh_seed else [])

    return call


def clock_over(call: Callable[[judging_pb2.CallsRequest], judging_pb2.Calls]) -> OutsideClock:
    clock = OutsideClock(call)
    for name in ("candidate", "eager"):
        for _ in range(8):
            clock.take(Arm(name, lambda index: index), [0], Reading.COLD)
    return clock


SLOW, QUICK = 4e-4, 4e-5


def test_a_batch_grows_until_the_way_to_the_process_does_not_matter() -> None:
    clock = clock_over(process({"candidate": QUICK, "eager": SLOW}, {}))
    assert clock.counts["candidate"] * QUICK >= 0.5 * solution_timing.BATCH_SECONDS
    sample = clock.take(Arm("candidate", lambda index: index), [0], Reading.COLD)
    assert sample.ns == pytest.approx(QUICK * 1e9, rel=0.02)


def test_an_honest_gain_is_there_on_fresh_values_too() -> None:
    extra = 1e-4  # drawing values and summing, for both
    known = {"candidate": QUICK, "eager": SLOW}
    fresh = {name: seconds + extra for name, seconds in known.items()}
    assert look_behind(clock_over(process(known, fresh)), rounds=3) == (Look.THERE, [])


def test_an_honest_gain_is_no_smaller_where_eager_hides_what_surrounds_a_call() -> None:
    known, fresh = {"candidate": QUICK, "eager": SLOW}, {"candidate": QUICK + 1e-4, "eager": SLOW + 1e-5}
    hidden = process(known, {**fresh, "surroundings": 1e-4})
    assert look_behind(clock_over(hidden), rounds=3) == (Look.THERE, [])


def test_a_gain_that_fresh_values_take_away_is_gone() -> None:
    clock = clock_over(process({"candidate": QUICK, "eager": SLOW}, {"candidate": 1.1 * SLOW, "eager": SLOW}))
    assert look_behind(clock, rounds=3)[0] is Look.GONE


def test_an_honest_gain_that_a_memo_inflates_counts_with_its_time_on_fresh_values() -> None:
    known, fresh = {"candidate": 5e-6, "eager": 1e-4}, {"candidate": 8e-5, "eager": 1.1e-4}
    look, speedups = look_behind(clock_over(process(known, fresh)), rounds=3)
    assert look is Look.THERE  # more than a quarter of the time saved is saved on fresh values too
    assert speedups == [pytest.approx(100 / 70, rel=0.03)] * 3

    def speedup() -> timing_pb2.Speedup:
        return timing_pb2.Speedup(median=20.0, low=19.0, high=21.0)

    candidate = timing_pb2.Arm(name="candidate", median_ns=5e3, warm_median_ns=4e3, samples_ns=[5e3] * 24)
    eager = timing_pb2.Arm(name="eager", median_ns=1e5)
    timing = timing_pb2.Timing(
        arms=[candidate, eager], speedup_eager=speedup(), speedup_fastest=speedup(), faster=True, noise_floor=0.01,
        floor_percent=50.0,
    )  # fmt: skip
    take_fresh(timing, speedups)
    assert timing.speedup_eager.median == pytest.approx(100 / 70, rel=0.03)
    assert timing.speedup_fastest.low <= timing.speedup_fastest.median <= timing.speedup_fastest.high < 2
    assert timing.floor_percent == pytest.approx(50 * 5 / 70, rel=0.03)
    assert timing.arms[0].median_ns == pytest.approx(70e3, rel=0.03)
    assert (timing.faster, list(timing.flags)) == (True, [solution_timing.TIMED_ON_FRESH_VALUES])


def test_what_is_faster_on_known_values_only_is_not_faster() -> None:
    speedup = timing_pb2.Speedup(median=3.0, low=2.9, high=3.1)
    arms = [timing_pb2.Arm(name="candidate", median_ns=5e3), timing_pb2.Arm(name="eager", median_ns=15e3)]
    timing = timing_pb2.Timing(
        arms=arms, speedup_fastest=speedup, speedup_eager=speedup, faster=True, noise_floor=0.01
    )  # fmt: skip
    take_fresh(timing, [1.0, 1.0, 1.2])
    assert not timing.faster


def test_outputs_that_are_in_no_cache_make_an_honest_solution_no_slower() -> None:
    measured = Round(known=4.7e-6, known_eager=9.3e-5, fresh=3.2e-5, fresh_eager=1.18e-4, surroundings=1.93e-5)
    assert conclude(least_of([[measured]] * 3)) == (Look.THERE, [])


def test_what_load_adds_to_eager_explains_nothing_that_a_memo_adds() -> None:
    quiet = Round(known=6e-5, known_eager=3.2e-3, fresh=1.7e-3, fresh_eager=3.3e-3, surroundings=1e-4)
    loud = replace(quiet, fresh_eager=5.5e-3, surroundings=1.5e-3)
    look, speedups = conclude(least_of([[loud, loud], [quiet], [loud]]))
    assert look is Look.THERE
    assert speedups == [pytest.approx(2.0, rel=0.1)] * 3


def test_one_round_in_which_others_held_the_machine_changes_nothing() -> None:
    number = [0]
    honest = process({"candidate": QUICK, "eager": SLOW}, {"candidate": QUICK + 1e-4, "eager": SLOW + 1e-4})

    def call(request: judging_pb2.CallsRequest) -> judging_pb2.Calls:
        number[0] += 1
        if number[0] % 7 == 0:  # of five requests in a round: another one each time
            _now[0] += 0.05
        return honest(request)

    clock = clock_over(honest)
    clock._call = call
    assert look_behind(clock) == (Look.THERE, [])


@pytest.mark.parametrize(("honest_s", "expected"), [(SLOW, Look.GONE), (SLOW / 2, Look.THERE)])
def test_a_memo_that_stops_at_its_first_fresh_values_is_held_to_the_time_that_was_told(
    honest_s: float, expected: Look
) -> None:
    behaves = process({"candidate": honest_s, "eager": SLOW}, {"candidate": honest_s + 1e-4, "eager": SLOW + 1e-4})
    look, speedups = look_behind(clock_over(behaves), QUICK, rounds=3)
    assert look is expected
    assert speedups == [pytest.approx(SLOW / honest_s, rel=0.03)] * 3


@pytest.mark.parametrize(("calls_long", "expected"), [(6.0, Look.UNCLEAR), (0.5, Look.GONE)])
def test_what_two_processes_differ_by_in_their_surroundings_accuses_nobody(calls_long: float, expected: Look) -> None:
    around = calls_long * SLOW
    measured = Round(SLOW / 1.15, SLOW, SLOW / 1.15 + 1.03 * around + (calls_long < 1) * SLOW, SLOW + around, around)
    assert conclude(least_of([[measured]] * 3))[0] is expected


def test_where_no_gain_is_seen_nobody_is_accused() -> None:
    times = {"candidate": SLOW, "eager": SLOW}
    clock = clock_over(process(times, {"candidate": 1.2 * SLOW, "eager": SLOW}))
    begin = clock.now_s()
    assert look_behind(clock, seconds=5.0) == (Look.UNCLEAR, [])
    assert clock.now_s() - begin > 5.0


def test_timed_calls_that_leave_work_out_give_other_sums() -> None:
    times = {"candidate": QUICK, "eager": SLOW}
    clock = clock_over(process(times, times, {"candidate": 0.0, "eager": 7.0}))
    with pytest.raises(SolutionFault) as found:
        look_behind(clock, rounds=3)
    assert found.value.fault.kind == verdict_pb2.FAILURE_KIND_WRONG_VALUE


@pytest.mark.parametrize(("share", "is_cheat"), [(0.02, False), (0.9, True)])
def test_a_process_that_works_while_nobody_calls_it_is_a_cheat(share: float, is_cheat: bool) -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    if not is_cheat:
        watch_idle(lambda: share * now[0], sleep)
        return
    with pytest.raises(SolutionFault, match="while nobody calls it"):
        watch_idle(lambda: share * now[0], sleep)


def test_a_process_that_clears_up_once_is_not_accused() -> None:
    readings = iter([0.0, 0.03, 0.03, 0.03])
    watch_idle(lambda: next(readings), lambda _: None)


def test_fresh_calls_change_the_values_and_put_them_back() -> None:
    import torch

    leaf = torch.arange(8.0)
    seen: list[list[float]] = []

    def call() -> torch.Tensor:
        seen.append(leaf.tolist())
        return leaf * 2

    sets = [CallSet(call, [leaf])]
    plain_calls(sets, 0, 2)
    sums = fresh_calls(sets, 0, 3, seed=1)
    assert seen[0] == seen[1] == list(range(8))
    assert all(sorted(values) == seen[0] and values != seen[0] for values in seen[2:])
    assert leaf.tolist() == seen[0]
    assert len(sums) == 6
    assert fresh_calls([sets[0].surroundings(torch.ones(3))], 0, 1, seed=1)[0] == 3.0
    assert leaf.tolist() == seen[0]
    assert sums[0] == 56.0
