"""What all CUDA schedules are: ways to run nests on a card that they are handed.

The one idea: a schedule asks its `hardware` for every size and limit, and says what it needs of what not every card
has; on a card without it, it is not offered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from warpsmith.hardware import Feature, Hardware
from warpsmith.v1 import task_pb2

DEPENDENT_LAUNCH = "whether a kernel may start while the previous one ends"
"""What the setting of that name means; cards that cannot only have no."""


@dataclass(frozen=True)
class CudaSchedule:
    """A schedule for one card; two of a class for equal cards are equal."""

    hardware: Hardware
    target: ClassVar[task_pb2.Target.ValueType] = task_pb2.TARGET_CUDA
    needs: ClassVar[frozenset[Feature]] = frozenset()
    """What the card must have."""

    @property
    def pdl(self) -> tuple[bool, ...]:
        """What `overlap` may be: whether a kernel may start while the previous one ends. The first is the default."""
        return (True, False) if self.hardware.has(Feature.DEPENDENT_LAUNCH) else (False,)
