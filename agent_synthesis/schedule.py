"""What a schedule is: a way to run a `Nest` on a target, with the parameters that moves may change.

Emitter families are schedules, not operators. The built-ins live in `emit/`, one file a schedule and target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from agent_synthesis.nests.ir import Nest
from warpsmith.v1 import candidate_pb2, task_pb2


@dataclass(frozen=True)
class Parameters:
    """How a schedule is set: `choices` such as {"reduce": "cluster"}, `integers` such as {"threads": 256}."""

    choices: Mapping[str, str] = field(default_factory=dict)
    integers: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Footprint:
    """What a schedule costs beyond the nest's own bytes.

    `extra_bytes`: second sweeps that leave the chip, and workspaces, in bytes.
    `parallel_count`: blocks (CUDA) or threads (CPU) that can be busy at once.
    """

    extra_bytes: int
    parallel_count: int
    launch_count: int
    tensor_flop_count: int = 0
    """Floating-point operations that tensor cores make on 16-bit operands in place of the nest's matrix products."""


@dataclass(frozen=True)
class Emission:
    """Device source of one nest: function definitions, without the includes that every program has.

    `headers`: names of files in `include/` that the text needs.
    `launches`: in order; buffers are named as in the nest, workspaces as in `workspaces`.
    """

    text: str
    headers: tuple[str, ...]
    launches: tuple[candidate_pb2.Launch, ...]
    workspaces: tuple[candidate_pb2.Buffer, ...] = ()


class Schedule(Protocol):
    """A way to run nests on one target."""

    @property
    def name(self) -> str:
        """What moves call it."""
        ...

    @property
    def target(self) -> task_pb2.Target.ValueType:
        """What it writes for."""
        ...

    def accepts(self, nest: Nest) -> bool:
        """Whether it can run this nest."""
        ...

    def defaults(self, nest: Nest) -> Parameters:
        """The parameters to begin with: a heuristic's best guess, always legal."""
        ...

    def alternatives(self, nest: Nest, current: Parameters) -> Sequence[Parameters]:
        """Other legal parameters, one change away from the current ones."""
        ...

    def footprint(self, nest: Nest, parameters: Parameters) -> Footprint:
        """What it would cost, for the roofline."""
        ...

    def emit(self, nest: Nest, parameters: Parameters) -> Emission:
        """The source and launches.

        Raises:
            IllegalMove: the parameters cannot run this nest (too many registers, too much shared memory).
        """
        ...
