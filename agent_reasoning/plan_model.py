"""A plan as the reasoner sees it: groups with costs, and what moves would do to them, without asking synthesis.

The one idea: the cost of a chain of moves can be estimated from the costs of its groups, because fusing removes the
traffic between two groups and a launch. Whether a chain is legal only synthesis knows; this may be wrong there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from agent_reasoning.roofline import Machine, time_ns
from warpsmith.v1 import analysis_pb2

# Operations that combine elements of a row (or more); everything else that can be authored is elementwise.
_REDUCING = ("softmax", "norm", "sum", "mean", "amax", "amin", "max.dim", "min.dim", "logsumexp", "prod", "var", "std",
             "argmax", "argmin", "cumsum", "cumprod", "pool", "loss", "any", "all", "cosine_similarity")  # fmt: skip


_SUMMED = ("read_bytes", "write_bytes", "extra_bytes", "operation_count", "product_flop_count", "tensor_flop_count",
           "launch_count")  # fmt: skip


def reduces(operations: Sequence[str]) -> bool:
    """Whether an operation of a group combines elements of a row."""
    names = [name.split(".", 1)[-1] for name in operations]
    return any(word in name for name in names for word in _REDUCING)


@dataclass(frozen=True)
class Unit:
    """One group: `producers` are groups of the plan only, `parts` the groups that were fused into it."""

    name: str
    authored: bool
    reducing: bool
    producers: tuple[str, ...]
    cost: analysis_pb2.Cost
    parts: tuple[str, ...]
    operations: tuple[str, ...]
    multiplied: tuple[str, ...] = ()
    """Producers whose results are factors of a matrix product in it."""

    @property
    def multiplies(self) -> bool:
        """Whether matrix products are made in it."""
        return self.cost.product_flop_count + self.cost.tensor_flop_count > 0


@dataclass(frozen=True)
class PlanModel:
    """Groups in execution order, by name."""

    units: Mapping[str, Unit]

    @staticmethod
    def of(analysis: analysis_pb2.Analysis) -> PlanModel:
        """The plan that an analysis describes."""
        names = {group.name for group in analysis.groups}
        units = {}
        for group in analysis.groups:
            producers = tuple(name for name in dict.fromkeys(group.producers) if name in names)
            unit = Unit(
                name=group.name,
                authored=group.computed_by == analysis_pb2.ENGINE_AUTHORED,
                reducing=reduces(group.operations),
                producers=producers,
                cost=group.cost,
                parts=(group.name,),
                operations=tuple(group.operations),
            )
            alone = unit.multiplies and len(group.operations) == 1
            units[group.name] = replace(unit, multiplied=producers) if alone else unit
        return PlanModel(units)

    def has(self, unit: Unit) -> bool:
        """Whether a group is the same here."""
        own = self.units.get(unit.name)
        return own is unit or own == unit

    def apart_from(self, other: PlanModel) -> list[analysis_pb2.Cost]:
        """Costs of the groups that are not the same in another plan."""
        return [unit.cost for unit in self.units.values() if not other.has(unit)]

    @functools.cached_property
    def cost(self) -> analysis_pb2.Cost:
        """Of all groups."""
        return summed([unit.cost for unit in self.units.values()])

    def consumers(self, name: str) -> tuple[str, ...]:
        """Groups that read the result of one, in any order."""
        return tuple(self._consumers.get(name, ()))

    @functools.cached_property
    def _consumers(self) -> Mapping[str, Sequence[str]]:
        found: dict[str, list[str]] = {}
        for unit in self.units.values():
            for producer in unit.producers:
                found.setdefault(producer, []).append(unit.name)
        return found

    def authored(self, name: str, after: analysis_pb2.Cost | None = None) -> PlanModel:
        """With a group as one authored kernel; `after` is its cost where the analysis told it."""
        unit = self.units[name]
        cost = after or _one_kernel(unit.cost)
        return self._with(replace(unit, authored=True, cost=cost))

    def fused(self, consumer: str, producer: str) -> PlanModel:
        """With the producer computed inside the consumer.

        Where others read it too, the kernel stores its result as well; where one of those comes before the consumer,
        that would tie a knot, so the producer stays and its work is done twice.
        """
        into, part = self.units[consumer], self.units[producer]
        others = [name for name in self.consumers(producer) if name != consumer]
        knot = any(self._before(other, consumer) for other in others)
        shared = min(part.cost.write_bytes, into.cost.read_bytes)
        # A reduction or a product decides how the kernel is spread over the machine, else what is stored does.
        deciding = [unit.cost for unit in (into, part) if unit.reducing or unit.multiplies] or [into.cost]
        parallel = [cost.parallel_count for cost in deciding if cost.parallel_count > 0]
        cost = analysis_pb2.Cost(
            read_bytes=into.cost.read_bytes - shared + part.cost.read_bytes,
            write_bytes=into.cost.write_bytes + (part.cost.write_bytes if others and not knot else 0),
            operation_count=into.cost.operation_count + part.cost.operation_count,
            product_flop_count=into.cost.product_flop_count + part.cost.product_flop_count,
            tensor_flop_count=into.cost.tensor_flop_count + part.cost.tensor_flop_count,
            launch_count=max(1, into.cost.launch_count),
            parallel_count=min(parallel, default=0),
            extra_bytes=max(into.cost.extra_bytes, part.cost.extra_bytes),
        )
        whole = Unit(
            name=consumer,
            authored=True,
            reducing=into.reducing or part.reducing,
            producers=tuple(dict.fromkeys(n for n in (*into.producers, *part.producers) if n != producer)),
            cost=cost,
            parts=(*part.parts, *into.parts),
            operations=(*part.operations, *into.operations),
            multiplied=into.multiplied or part.multiplied,
        )
        units, reading = {**self.units, consumer: whole}, {**self._consumers}
        for name in {*into.producers, *part.producers}:
            left = [each for each in reading[name] if each != consumer and (knot or each != producer)]
            reading[name] = [*left, consumer] if name in whole.producers else left
        if not knot:
            del units[producer]
            for name in others:
                renamed = tuple(consumer if n == producer else n for n in units[name].producers)
                units[name] = replace(units[name], producers=tuple(dict.fromkeys(renamed)))
            reading[consumer] = list(dict.fromkeys([*reading.get(consumer, ()), *others]))
        return PlanModel(units)._knowing(reading)

    def _before(self, name: str, other: str) -> bool:
        """Whether `other` needs the result of `name`, directly or through others."""
        ahead, seen = [other], {other}  # each group once: a chain of residual blocks has 2^n ways back
        while ahead:
            new = [producer for producer in self.units[ahead.pop()].producers if producer not in seen]
            if name in new:
                return True
            seen.update(new)
            ahead += new
        return False

    def changed(self, name: str, cost: analysis_pb2.Cost, *, authored: bool) -> PlanModel:
        """With a group's engine and cost replaced."""
        return self._with(replace(self.units[name], cost=cost, authored=authored))

    def _with(self, unit: Unit) -> PlanModel:
        made = PlanModel({**self.units, unit.name: unit})
        return made._knowing(self._consumers) if unit.producers == self.units[unit.name].producers else made

    def _knowing(self, consumers: Mapping[str, Sequence[str]]) -> PlanModel:
        self.__dict__["_consumers"] = consumers  # as `cached_property` keeps it
        return self

    def unit_ns(self, name: str, machine: Machine) -> float:
        """Predicted time of one group; what it reads from another group comes from the cache where it fits."""
        unit = self.units[name]
        cached = 0
        for producer in unit.producers:
            size = self.units[producer].cost.write_bytes
            # Half the cache, because its own output and other inputs pass through it too.
            cached += size if size <= machine.cache_bytes / 2 else 0
        if self.consumers(name) and unit.cost.write_bytes <= machine.cache_bytes / 2:
            cached += unit.cost.write_bytes
        return time_ns(unit.cost, machine, cached_bytes=cached)


def summed(costs: Iterable[analysis_pb2.Cost], less: Iterable[analysis_pb2.Cost] = ()) -> analysis_pb2.Cost:
    """Work of costs together, without that of others which are among them."""
    added, taken = tuple(costs), tuple(less)

    def total(field: str) -> int:
        return sum(int(getattr(cost, field)) for cost in added) - sum(int(getattr(cost, field)) for cost in taken)

    return analysis_pb2.Cost(**{field: total(field) for field in _SUMMED})


def _one_kernel(cost: analysis_pb2.Cost) -> analysis_pb2.Cost:
    changed = analysis_pb2.Cost()
    changed.CopyFrom(cost)
    changed.launch_count = 1
    return changed
