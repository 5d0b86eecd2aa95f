"""The baselines' process in a contest with a solution: the reference, run by PyTorch in every way that is fair to it.

The one idea: it makes the same calls as the solution's process (`contest`), on the same values, and is timed by the
same clock outside both. No solution is ever in it. Served by `warpsmith.worker`; the user's reference runs here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from gpu_bench import device
from gpu_bench.baselines import EAGER
from gpu_bench.clocks import Arm
from gpu_bench.contest import SURROUNDINGS, CallSet, fresh_calls, plain_calls
from gpu_bench.loaded import LoadedTask
from gpu_bench.timed_task import SEED, TimedTask
from warpsmith.v1 import judging_pb2, timing_pb2
from warpsmith.worker import Methods


@dataclass
class Baselines:
    """A loaded task and its arms."""

    timed: TimedTask
    _sets: dict[str, list[CallSet]] = field(default_factory=dict)

    @staticmethod
    def open(request: judging_pb2.PrepareRequest) -> tuple[Baselines, judging_pb2.Contest]:
        """Prepares every baseline and reports the reference by itself. Raises BadInput for a bad reference."""
        loaded = LoadedTask.load(request.task)
        ceilings = device.Ceilings.of(request.ceilings) if request.HasField("ceilings") else None
        timed = TimedTask.of(loaded, ceilings)
        made = Baselines(timed)
        if request.tier == timing_pb2.TIER_FINAL:
            report, offered = timed.reference(), timed.bench.baselines.prepare(request.tier)
        else:
            target = request.task.target
            report = timing_pb2.ReferenceReport(fastest=EAGER, environment=device.environment(target, seed=SEED))
            offered = timed.bench.baselines.prepare(timing_pb2.TIER_SCREENING)
        arms = []
        for prepared in offered:
            arms.append(timing_pb2.Arm(name=prepared.name, failure=prepared.failure))
            if prepared.arm is not None:
                made._sets[prepared.name] = made._sets_of(prepared.arm)
        loaded.restore()
        contest = judging_pb2.Contest(
            report=report,
            arms=arms,
            graph=loaded.capture(loaded.user.inputs(SEED, loaded.device)),
            set_count=timed.bench.set_count,
            ceilings=timed.bench.ceilings.message(),
        )
        return made, contest

    def calls(self, request: judging_pb2.CallsRequest) -> judging_pb2.Calls:
        """As the solution's process makes them."""
        with torch.no_grad():
            if request.arm == SURROUNDINGS and SURROUNDINGS not in self._sets:
                eager = self._sets[EAGER]
                there = eager[0].call()
                self._sets[SURROUNDINGS] = [each.surroundings(there) for each in eager]
            sets = self._sets[request.arm]
            if request.fresh_seed:
                return judging_pb2.Calls(sums=fresh_calls(sets, request.first, request.count, request.fresh_seed))
            plain_calls(sets, request.first, request.count)
        return judging_pb2.Calls()

    def _sets_of(self, arm: Arm) -> list[CallSet]:
        leaves = self.timed.loaded.user.tensor_leaves

        def set_of(index: int) -> CallSet:
            return CallSet(lambda: arm.call(index), leaves(self.timed.bench.baselines.inputs[index]))

        return [set_of(index) for index in range(self.timed.bench.set_count)]


_opened: list[Baselines] = []


def _open(request: judging_pb2.PrepareRequest) -> judging_pb2.Contest:
    made, contest = Baselines.open(request)
    _opened[:] = [made]
    return contest


def _calls(request: judging_pb2.CallsRequest) -> judging_pb2.Calls:
    return _opened[0].calls(request)


METHODS: Methods = {
    "open": (judging_pb2.PrepareRequest, _open),
    "calls": (judging_pb2.CallsRequest, _calls),
}
