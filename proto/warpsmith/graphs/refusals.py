"""Why a module is not captured, and where: in words that say whether its forward failed or only its export."""

from __future__ import annotations

import importlib
import logging
import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest import mock

import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _pytree as pytree

from warpsmith.errors import BadInput

_UNKNOWN_TYPE: Final = re.compile(r"Found <class '([^']+)'> in (input|output)")
_FRAME: Final = re.compile(r'^ *File "(.+)", line (\d+), in ', re.MULTILINE)

_REPORTS: Final = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")
"""Loggers that tell at length of what fails while a forward is tried on fake tensors."""

Frame = tuple[str, int]
"""A file and a line."""


class CaptureRefused(BadInput):
    """The module does not capture. `__cause__` is the exception of the user's forward or of torch.export."""

    frames: Sequence[Frame] = ()
    """Of the call that is refused, innermost last, where torch.export tells them."""

    @property
    def places(self) -> Sequence[Frame]:
        """Where the forward does what is refused, innermost last; not all of it is the user's."""
        return self.frames or frames_of(self.__cause__)


def frames_of(error: BaseException | None) -> list[Frame]:
    """Where an exception was raised, innermost last."""
    raised = traceback.extract_tb(error.__traceback__) if error is not None else []
    return [(frame.filename, frame.lineno or 0) for frame in raised]


@contextmanager
def alone_told() -> Iterator[None]:
    """Around an attempt: what fails is told by the exception alone, and not by PyTorch on stderr too."""
    with ExitStack() as stack:
        for name in _REPORTS:
            stack.enter_context(mock.patch.object(logging.getLogger(name), "disabled", True))
        exporting = importlib.import_module("torch.export._trace")  # prints the graph that it has so far
        stack.enter_context(mock.patch.object(exporting, "print", return_value=None, create=True))
        yield


@contextmanager
def telling_where(node: torch.fx.Node) -> Iterator[None]:
    """Has a refusal inside the block say where the call of an exported graph stands in the user's forward."""
    try:
        yield
    except BadInput as error:
        refused = error if isinstance(error, CaptureRefused) else CaptureRefused(str(error))
        known = [node, *node.all_input_nodes][:: -1 if node.op == "output" else 1]  # an output is no call
        told = next(filter(None, (each.meta.get("stack_trace", "") for each in known)), "")
        refused.frames = refused.frames or [(file, int(line)) for file, line in _FRAME.findall(told)]
        raise refused from error.__cause__


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
            "transformers returns them with use_cache=False), or register the class in the module's file "
            "(torch.export.register_dataclass, or as a pytree)"
        )
    if isinstance(error, GuardOnDataDependentSymNode):
        return CaptureRefused(
            "the module does not export (torch.export): forward needs the value of a tensor to go on (if, while, "
            "assert, range, int, float or a size): choose with torch.where, keep it a tensor, or pass it as an argument"
        )
    return CaptureRefused(f"the module does not export (torch.export): {first_line(error)}")


def first_line(error: BaseException) -> str:
    """The kind of an exception and the first line of what it says."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__
