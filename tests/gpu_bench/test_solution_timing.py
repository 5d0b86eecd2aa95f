"""Timing a solution from outside: batches long enough, gains that have to be there on fresh values, idle processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace

import pytest

from gpu_bench import solution_timing
from gpu_bench.clocks import Arm, Reading
from gpu_bench.contest import CallSet, fresh_calls, plain_calls
from gpu_bench.solution_session import SolutionFault
from gpu_bench.solution_timing import Look, OutsideClock, look_behind, watch_idle
from warpsmith.v1 import judging_pb2, verdict_pb2

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
        seconds = (fresh_s if request.fresh_seed else known_s)[request.arm]
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
    assert look_behind(clock_over(process(known, fresh)), rounds=3) is Look.THERE


def test_a_gain_that_fresh_values_take_away_is_gone() -> None:
    clock = clock_over(process({"candidate": QUICK, "eager": SLOW}, {"candidate": 1.1 * SLOW, "eager": SLOW}))
    assert look_behind(clock, rounds=3) is Look.GONE


def test_where_no_gain_is_seen_nobody_is_accused() -> None:
    times = {"candidate": SLOW, "eager": SLOW}
    assert look_behind(clock_over(process(times, {"candidate": 1.2 * SLOW, "eager": SLOW})), rounds=3) is Look.UNCLEAR


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
    assert sums[0] == 56.0
