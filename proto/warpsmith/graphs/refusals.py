"""Why a module is not captured, in words that say whether its forward failed or only its export."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.utils import _pytree as pytree

from warpsmith.errors import BadInput

_UNKNOWN_TYPE: Final = re.compile(r"Found <class '([\w.]+)'> in (input|output)")


class CaptureRefused(BadInput):
    """The module does not capture. `__cause__` is the exception of the user's forward or of torch.export."""


def of_export(module: torch.nn.Module, args: Sequence[Any], error: Exception) -> CaptureRefused:
    """What to say of an export that failed; real tensors let us try whether the forward itself does."""
    if not any(isinstance(leaf, torch._subclasses.FakeTensor) for leaf in pytree.tree_leaves(tuple(args))):
        try:
            with torch.no_grad():
                module(*args)
        except Exception as raised:
            refused = CaptureRefused(f"forward raised {first_line(raised)}")
            refused.__cause__ = raised
            return refused
    if unknown := _UNKNOWN_TYPE.search(str(error)):
        kind, place = unknown.groups()
        return CaptureRefused(
            f"forward has a {kind} among its {place}s, which torch.export does not look into: use tensors (a model of "
            "transformers returns them with use_cache=False), or register the class as a pytree in the module's file"
        )
    return CaptureRefused(f"the module does not export (torch.export): {first_line(error)}")


def first_line(error: BaseException) -> str:
    """The kind of an exception and the first line of what it says."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__
