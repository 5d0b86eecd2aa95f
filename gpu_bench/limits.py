"""How long a program may take. Decides nothing: a session looks here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """How long things may take. Generous: only a hang reaches them."""

    hang_seconds: float = 10.0
    """Least time that a program gets for one case before it counts as hanging."""
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
