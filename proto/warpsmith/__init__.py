"""Warpsmith's contract and the kit to speak it: the one folder that a plugin author needs.

What users call from Python (`warpsmith.optimize`) lies with the orchestrator, and is found there when it is first
asked for: the kit itself needs no service, and no torch.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

_FOR_USERS = "orchestrator.live.optimize"
_NAMES = ("Outcome", "optimize", "optimize_submodules")


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.metadata.version("warpsmith")
    if name in _NAMES:
        return getattr(importlib.import_module(_FOR_USERS), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), "__version__", *_NAMES])
