"""From an artifact to a verdict: one comparison for all checks, then the checks in order; the first finding wins.

The one idea: seeds are drawn here, at judging time, from the system's randomness, so that no candidate can have been
made for them. A fault of the program is a verdict; a fault of a service is INFRA and says nothing of the program.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from agent_correctness.adversary import Adversary
from agent_correctness.checks.check import Case, Check, Comparer, Finding
from agent_correctness.checks.limits import Ratios, ratios_of, worst_of
from agent_correctness.checks.memory import MemoryCheck
from agent_correctness.checks.overfit import OverfitCheck
from agent_correctness.checks.pooling import missing, pools
from agent_correctness.checks.precision import PrecisionCheck
from agent_correctness.checks.values import FINAL_SEEDS, ValueCheck
from agent_correctness.closer_look import look_closer, said, seeds_said
from warpsmith.contract import words
from warpsmith.errors import BadInput, Infrastructure, LeaseLost, ServiceGone
from warpsmith.v1 import benchmark_service_pb2, correctness_service_pb2, task_pb2, timing_pb2, verdict_pb2

FIRST = ("memory", "overfit", "values", "precision")
"""Built-in checks in the order in which they are asked; others follow."""


def built_in() -> tuple[Check, ...]:
    """The checks that come with the agent, in order."""
    return MemoryCheck(), OverfitCheck(), ValueCheck(), PrecisionCheck()


class Judge:
    """Verifies artifacts with a benchmark service."""

    def __init__(
        self,
        comparer: Comparer,
        checks: Sequence[Check] | None = None,
        randomness: Callable[[], random.Random] = random.SystemRandom,
        adversary: Adversary | None = None,
    ) -> None:
        self._comparer = comparer
        self._checks = tuple(checks) if checks is not None else built_in()
        self._randomness = randomness
        self._adversary = adversary

    def verify(self, request: correctness_service_pb2.VerifyArtifactRequest) -> verdict_pb2.Verdict:
        """The verdict on an artifact.

        Raises:
            BadInput: the artifact is not the program's, or the module does not work as a reference.
        """
        begin = time.monotonic()
        program, artifact = request.program, request.artifact
        if artifact.program_digest != program.digest:
            raise BadInput("the artifact was compiled from another program than the one to be verified")
        cases = self._cases(request.task, request.tier)
        if self._adversary is not None:
            cases += self._adversary.cases(request, self._randomness())
        asked = benchmark_service_pb2.CompareOutputsRequest(
            task=request.task,
            program=program,
            artifact=artifact,
            cases=[benchmark_service_pb2.ComparisonCase(family=family, seed=seed) for family, seed in cases],
            inspect=request.tier == timing_pb2.TIER_FINAL,
            lease=request.lease,
        )
        try:
            answer = self._comparer.compare(asked)
            verdict = self._decide(answer, cases)
            if asked.inspect and (_passed(verdict) or _may_be_bad_luck(verdict)):
                cases += look_closer(self._comparer, asked, answer, self._randomness())
                verdict = self._decide(answer, cases)
                if _passed(verdict):
                    verdict.detail += seeds_said(answer.comparisons)
        except (ServiceGone, LeaseLost):
            raise  # the caller may try again when it is back, or has nothing more to ask
        except Infrastructure as error:
            verdict = verdict_pb2.Verdict(state=verdict_pb2.VERDICT_STATE_INFRA, detail=str(error))
        verdict.seconds = time.monotonic() - begin
        return verdict

    def _cases(self, task: task_pb2.Task, tier: timing_pb2.Tier.ValueType) -> list[Case]:
        """The cases of all checks; one for each family and seed, and no more of a family than one check wants."""
        draw = self._randomness()
        wanted: dict[int, list[Case]] = {}
        for check in self._checks:
            own: dict[int, list[Case]] = {}
            for case in check.cases(task, tier, draw):
                own.setdefault(case[0], []).append(case)
            for family, cases in own.items():
                wanted[family] = max(wanted.get(family, []), cases, key=len)
        # The task's own values first: the plainest fault is found there, and soonest.
        return [case for family in sorted(wanted) for case in wanted[family]]

    def _decide(
        self, answer: benchmark_service_pb2.CompareOutputsResponse, cases: Sequence[Case]
    ) -> verdict_pb2.Verdict:
        comparisons = list(answer.comparisons)
        verdict = verdict_pb2.Verdict(
            comparisons=comparisons,
            jail_rung=answer.jail_rung,
            inspections=answer.inspections,
            waited_seconds=answer.waited_seconds,
        )
        verdict.by_tf32 = any(error.by_tf32 for each in comparisons for error in each.outputs)
        found = pools(comparisons)
        ratios: list[Ratios] = [(pool.rms_ratio, pool.max_ratio, 0.0, 0.0) for pool in found if pool.decides]
        ratios += [ratios_of(error) for pool in found if not pool.decides for error in pool.errors]
        verdict.worst_rms_ratio = max((each[0] for each in ratios), default=0.0)
        finding = self._finding(answer, cases)
        if finding is not None:
            verdict.state = verdict_pb2.VERDICT_STATE_FAIL
            verdict.kind, verdict.detail = finding.kind, finding.detail
            verdict.ends.extend(answer.fault.ends)
            return verdict
        of_task = [c for c in comparisons if c.family == verdict_pb2.VALUE_FAMILY_TASK and c.outputs and not c.group]
        if len(comparisons) != len(cases) or not of_task:
            verdict.state = verdict_pb2.VERDICT_STATE_INFRA
            verdict.detail = f"{len(comparisons)} comparisons came back for {len(cases)} cases"
            return verdict
        verdict.state = verdict_pb2.VERDICT_STATE_PASS
        # KernelBench looks at outputs, drawn as the task draws them, and at nothing else.
        verdict.kernelbench_pass = all(e.kernelbench_close for c in of_task[:FINAL_SEEDS] for e in c.outputs)
        verdict.inspections.extend(said(comparisons))
        made = sum(bool(comparison.outputs) for comparison in comparisons)
        worst = max(map(worst_of, ratios))
        verdict.detail = f"{made} comparisons; the worst error is {worst:.2g} times {words.yardstick(verdict)}"
        return verdict

    def _finding(self, answer: benchmark_service_pb2.CompareOutputsResponse, cases: Sequence[Case]) -> Finding | None:
        """What the checks find in the comparisons that were made; else the fault that ended them."""
        for check in self._checks:
            judgement = check.judge(answer.comparisons)
            if isinstance(judgement, Finding):
                return judgement
        if not answer.HasField("fault"):
            return None
        number = len(answer.comparisons)
        values = ""
        if number < len(cases):
            family, seed = cases[number]
            name = words.value_family(family)
            values = f" (family {name}, seed {seed})"
        return Finding(answer.fault.kind, f"{answer.fault.detail}{values}")


def _passed(verdict: verdict_pb2.Verdict) -> bool:
    return verdict.state == verdict_pb2.VERDICT_STATE_PASS


def _may_be_bad_luck(verdict: verdict_pb2.Verdict) -> bool:
    """Whether a small output failed by its precision before its pool was complete."""
    return verdict.kind == verdict_pb2.FAILURE_KIND_WRONG_PRECISION and bool(missing(verdict.comparisons))
