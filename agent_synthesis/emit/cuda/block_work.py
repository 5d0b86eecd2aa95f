"""What a block of a kernel does for one nest: a struct over its buffers, and the skeleton's function that runs it.

The one idea: a kernel of one nest calls that function with its own pointers; a kernel of several calls the function of
the nest that a block is for. This file writes both calls; it knows no skeleton.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agent_synthesis.emit.cuda import generated_struct
from agent_synthesis.emit.cuda.kernel_text import KernelText


@dataclass(frozen=True)
class BlockWork:
    """A nest's struct, and how blocks run it."""

    name: str
    """Of the struct."""
    struct: Sequence[str]
    """Its text."""
    text: KernelText
    """What it was written with."""
    skeleton: str
    """Function of a header that gets the struct, its shared memory and the number of the block."""
    blocks: int
    threads: int
    """Of a block."""
    headers: tuple[str, ...]
    held_registers: int
    """Of a thread, for what it has loaded."""
    dependent: bool
    """Whether a kernel may start while the previous one ends."""
    shared: Mapping[str, str] = field(default_factory=dict)
    """Name → type of what lies in shared memory, in which `%` is the struct."""

    def kernel(self, min_blocks: int = 1) -> list[str]:
        """The struct, and a kernel of this nest alone, of which so many blocks share an SM."""
        own = generated_struct.kernel(self.name, self.text, self.skeleton, self.threads, min_blocks, shared=self.shared)
        return [*self.struct, *own]
