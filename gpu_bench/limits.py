"""How long a program may take. Decides nothing: a session looks here."""

from __future__ import annotations

from dataclasses import dataclass

from warpsmith.v1 import task_pb2

HANG_SECONDS = {task_pb2.TARGET_CPU: 10.0, task_pb2.TARGET_CUDA: 5.0}
"""Least time that a program gets before it counts as hanging: a GPU is free again some four seconds later."""


@dataclass(frozen=True)
class Limits:
    """How long things may take. Generous: only a hang reaches them."""

    hang_seconds: float = 0.0
    """Least time that a program gets for one case before it counts as hanging; 0 for the target's."""
    eager_factor: float = 20.0
    """Times slower than eager that a program may be, if that is more."""
    phase_share: float = 0.25
    """Share of its time limit that a program may take for a case on average, once there are a dozen."""
    prepare_seconds: float = 300.0
    """Loading torch and the module, capturing it, and a first truth."""
    judge_seconds: float = 300.0
    """One truth or comparison."""
    measure_seconds: float = 900.0
    """One measurement with all its baselines."""
    open_seconds: float = 240.0
    """Importing a solution and its first call, in which it may compile."""

    def patience(self, target: task_pb2.Target.ValueType, eager_seconds: float) -> float:
        """What a program may take for what eager takes so long for."""
        return max(self.hang_seconds or HANG_SECONDS[target], self.eager_factor * eager_seconds)
