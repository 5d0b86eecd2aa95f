"""Predicts the time of a whole plan, anchored to what was measured of its parent.

The one idea: only what a move touches is predicted; the rest keeps the time it was measured at, and library calls are
as much slower than the roofline as the reference was. So an error of the model cancels where it can.
"""

from __future__ import annotations

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

    @property
    def parent_ns(self) -> float:
        """Time of the parent."""
        return sum(self.base_ns.values())

    def plan_ns(self, plan: PlanModel) -> float:
        """Time of a plan that moves made of the parent."""
        total = 0.0
        for name, unit in plan.units.items():
            if self.parent.units.get(name) == unit:
                total += self.base_ns[name]
            else:
                slowness = AUTHORED_SLOWNESS if unit.authored else self.library_slowness
                total += slowness * plan.unit_ns(name, self.machine)
        return total

    def speedup(self, plan: PlanModel) -> float:
        """Parent over plan."""
        return self.parent_ns / max(self.plan_ns(plan), 1.0)

    def rewrite_speedup(self, before: analysis_pb2.Cost, after: analysis_pb2.Cost) -> float:
        """Parent over the parent with library work replaced by other library work."""
        saved = time_ns(before, self.machine) - time_ns(after, self.machine)
        # However large the saving looks, the work that stays takes its time.
        rest = max(self.parent_ns - self.library_slowness * saved, time_ns(after, self.machine), 1.0)
        return self.parent_ns / rest


def predictor(
    analysis: analysis_pb2.Analysis, machine: Machine, reference: timing_pb2.ReferenceReport, evidence: Evidence
) -> Predictor:
    """A predictor for the analysed plan."""
    plan = PlanModel.of(analysis)
    predicted = {name: plan.unit_ns(name, machine) for name in plan.units}
    library = {name: time for name, time in predicted.items() if not plan.units[name].authored}
    slowness = evidence.library_slowness(library)
    eager = next((arm.median_ns for arm in reference.arms if arm.name == "eager" and not arm.failure), 0.0)
    # With part of the plan authored, what the library took of it is not known; with all of it, it took all of eager.
    if slowness is None and len(library) in (0, len(predicted)) and eager > 0:
        slowness = eager / max(sum(predicted.values()), 1.0)
    slowness = min(_MOST_SLOWNESS, max(1.0, slowness or 1.0))
    measured = evidence.measured_groups(analysis.moves)
    base = {
        name: measured.get(name) or time * (AUTHORED_SLOWNESS if plan.units[name].authored else slowness)
        for name, time in predicted.items()
    }
    return Predictor(plan, machine, base, slowness)
