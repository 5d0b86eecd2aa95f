"""Bundles: nests that need nothing of each other, as the work of one kernel.

The one idea: a `Bundle` stands among nests where a kernel's work is asked for, with the buffers of all its members. It
has no loops of its own: the members' do not go together, or they would be one nest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agent_synthesis.nests.ir import Axis, BufferRef, Nest
from agent_synthesis.settings import Settings


@dataclass(frozen=True)
class Member:
    """A nest, and how it would be run alone."""

    nest: Nest
    schedule: str
    """By name."""
    settings: Settings
    form: int = 0
    """Equal for members of a bundle that differ in names alone, settings included."""


@dataclass(frozen=True)
class Bundle(Nest):
    """Members with the points of all of them as the only axis."""

    members: tuple[Member, ...] = ()


def bundle(name: str, members: Sequence[Member]) -> Bundle:
    """The bundle of some members, none of which reads or writes what another writes."""
    buffers: dict[str, BufferRef] = {}
    for member in members:
        for buffer in member.nest.buffers:
            buffers.setdefault(buffer.name, buffer)
    points = sum(member.nest.row_count * member.nest.column_count for member in members)
    comment = f"{len(members)} nests that need nothing of each other"
    return Bundle(name, (Axis("point", points),), (), (), (), tuple(buffers.values()), comment, members=tuple(members))
