"""Predicts the time of a whole plan, anchored to what was measured of its parent.

The one idea: only what a move touches is predicted; the rest keeps the time it was measured at, and library calls are
as much slower than the roofline as the reference was. So an error of the model cancels where it can. A kernel that was
measured far above its roofline is held back by something that the roofline does not see; another way of doing the same
is taken to be held back half as much.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from agent_reasoning.evidence import Evidence
from agent_reasoning.plan_model import PlanModel
from agent_reasoning.roofline import Machine, time_ns
from warpsmith.v1 import analysis_pb2, timing_pb2

AUTHORED_SLOWNESS = 1.15
"""Authored kernels over their roofline: the streaming ones reach 85 to 95 % of a copy."""

_MOST_SLOWNESS = 50.0


@dataclass(frozen=True)
class Predictor:
    """Times of one parent plan and of what moves make of it, in nanoseconds."""

    parent: PlanModel
    machine: Machine
    base_ns: Mapping[str, float]
    """Time of each group of the parent: measured where it was, else predicted."""
    library_slowness: float
    """Library calls over their roofline."""
    held_back: float = 1.0
    """The parent's kernels as measured over what was predicted of them; 1 where they were not measured."""

    @property
    def parent_ns(self) -> float:
        """Time of the parent."""
        return sum(self.base_ns.values())

    def plan_ns(self, plan: PlanModel) -> float:
        """Time of a plan that moves made of the parent."""
        total = 0.0
        for name, unit in plan.units.items():
            if self.parent.has(unit):
                total += self.base_ns[name]
            else:
                total += self.unit_ns(plan, name)
        return total

    def unit_ns(self, plan: PlanModel, name: str) -> float:
        """Time of a group that moves made or changed."""
        unit = plan.units[name]
        slowness = self.library_slowness
        if unit.authored:
            known = any(part in self.parent.units and self.parent.units[part].authored for part in unit.parts)
            slowness = AUTHORED_SLOWNESS * (math.sqrt(self.held_back) if known else 1.0)
        return slowness * plan.unit_ns(name, self.machine)

    def speedup(self, plan: PlanModel) -> float:
        """Parent over plan."""
        return self.parent_ns / max(self.plan_ns(plan), 1.0)

    def rewrite_speedup(self, before: analysis_pb2.Cost, after: analysis_pb2.Cost, *, authored: bool = False) -> float:
        """Parent over the parent with library work replaced by other library work, or by kernels of ours."""
        slowness = AUTHORED_SLOWNESS if authored else self.library_slowness
        instead = time_ns(after, self.machine)
        saved = self.library_slowness * time_ns(before, self.machine) - slowness * instead
        # However large the saving looks, the work that stays takes its time.
        return self.parent_ns / max(self.parent_ns - saved, instead, 1.0)


def predictor(
    analysis: analysis_pb2.Analysis, machine: Machine, reference: timing_pb2.ReferenceReport, evidence: Evidence
) -> Predictor:
    """A predictor for the analysed plan."""
    plan = PlanModel.of(analysis)
    predicted = {name: plan.unit_ns(name, machine) for name in plan.units}
    library = {name: time for name, time in predicted.items() if not plan.units[name].authored}
    slowness = evidence.library_slowness(library)
    eager = next(
        (arm.median_ns for arm in reference.arms if arm.kind == timing_pb2.ARM_KIND_EAGER and not arm.failure), 0.0
    )
    # With part of the plan authored, what the library took of it is not known; with all of it, it took all of eager.
    if slowness is None and len(library) in (0, len(predicted)) and eager > 0:
        slowness = eager / max(sum(predicted.values()), 1.0)
    slowness = min(_MOST_SLOWNESS, max(1.0, slowness or 1.0))
    measured = evidence.measured_groups(analysis.moves)
    own = {name for name in predicted if plan.units[name].authored}
    base = {name: time * (AUTHORED_SLOWNESS if name in own else slowness) for name, time in predicted.items()}
    held_back = _held_back(base, own, evidence.candidate_ns(analysis.moves))
    base = {name: measured.get(name) or time * (held_back if name in own else 1.0) for name, time in base.items()}
    return Predictor(plan, machine, base, slowness, held_back)


def _held_back(base: Mapping[str, float], own: set[str], measured_ns: float) -> float:
    """What the kernels of ours took over their prediction, in a plan that was timed as a whole."""
    kernels = sum(base[name] for name in own)
    if measured_ns <= 0 or kernels <= 0:
        return 1.0
    calls = sum(base.values()) - kernels
    return min(_MOST_SLOWNESS, max(0.5, (measured_ns - calls) / kernels))
