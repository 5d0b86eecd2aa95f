"""A convolution with what reduces its result: two nests as the work of one kernel.

The one idea: what a convolution makes at a point is a sum already, so no loops of one nest reduce those sums once more.
A `Tailed` stands among nests where a kernel's work is asked for, with the buffers of both but for the convolution's
result, which need not be anywhere. It has no loops of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent_synthesis.nests.ir import Axis, BufferRef, Nest


@dataclass(frozen=True)
class Tailed(Nest):
    """Both nests, with the points of the convolution's result as the only axis."""

    members: tuple[Nest, ...] = ()

    @property
    def convolution(self) -> Nest:
        """What stores the result, and nothing else."""
        return self.members[0]

    @property
    def tail(self) -> Nest:
        """What reads it, alone of all."""
        return self.members[1]

    @property
    def result(self) -> BufferRef:
        """The convolution's result."""
        return self.convolution.buffer(self.convolution.stores[0].buffer)


def tailed(convolution: Nest, tail: Nest, comment: str) -> Tailed:
    """Both as one kernel's work, under the tail's name."""
    result = convolution.stores[0].buffer
    buffers = {each.name: each for each in (*convolution.buffers, *tail.buffers) if each.name != result}
    point = Axis("point", convolution.row_count)
    return Tailed(
        tail.name, (point,), (), (), (), tuple(buffers.values()), comment, convolution.allows_tf32,
        members=(convolution, tail),
    )  # fmt: skip
