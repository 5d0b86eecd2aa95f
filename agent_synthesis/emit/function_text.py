"""The parts of a function's text that all schedules share: identifiers, and the comment over it."""

from __future__ import annotations

from agent_synthesis.emit.expression import Function, Names
from agent_synthesis.nests.analysis.words import described
from agent_synthesis.nests.ir import Nest
from agent_synthesis.settings import Settings


def name_everything(function: Function) -> str:
    """Takes identifiers for the entry, axes, buffers and reductions; returns the entry's."""
    nest, names = function.nest, function.names
    entry = names.take(nest.name)
    for axis in nest.parallel + nest.reduced:
        function.axes[axis.name] = names.take(axis.name)
    for buffer in nest.buffers:
        function.buffers[buffer.name] = names.take(buffer.name)
    for reduction in nest.reductions:
        function.reductions[reduction.name] = names.take(reduction.name)
    return entry


def entry_name(nest: Nest) -> str:
    """The entry point's symbol: the nest's name made legal."""
    return Names().take(nest.name)


def header(nest: Nest, schedule: str, settings: Settings) -> list[str]:
    """The comment over a function: the nest in words and how it is scheduled."""
    lines = [f"{entry_name(nest)}: {nest.comment or 'one fused group'}", *described(nest), f"{schedule}: {settings}"]
    return [f"// {line}" for line in lines]
