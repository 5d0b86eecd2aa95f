"""`torch.compile(module, backend="warpsmith")`: known kernels for graphs that Dynamo finds, Inductor for all others.

The one idea: a graph of Dynamo's is a module like any other, so what `optimize` does for one is done for it: its
parameters are among its inputs, and what is found is kept as a task of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch._dynamo import lookup_backend

from orchestrator.live import optimize
from warpsmith.errors import BadInput

OPTIONS = ("budget", "precision", "server", "runs", "progress")
"""What `options` of `torch.compile` may hold: as of `warpsmith.optimize`. Without a budget nothing is searched for."""

_log = logging.getLogger(__name__)


def backend(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """What runs instead of a graph: a kernel that is known for it, or found within `options["budget"]`, or Inductor's.

    Graphs whose results are differentiated, or whose shapes vary, are Inductor's.

    Raises:
        BadInput: an option is none of `OPTIONS`.
    """
    given = dict(options or {})
    if unknown := sorted({*given} - {*OPTIONS}):
        raise BadInput(f"options of the warpsmith backend are {', '.join(OPTIONS)}; not {unknown[0]}")
    tensors = [each for each in inputs if isinstance(each, torch.Tensor)]
    wants_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    if wants_gradient or len(tensors) < len(inputs) or not tensors:
        return _by_inductor(graph, inputs)
    try:
        found = optimize.optimize(graph, inputs, **{"budget": "", **given})
    except BadInput as refused:
        _log.info("left to Inductor: %s", refused)
        return _by_inductor(graph, inputs)
    return found if type(found) is not type(graph) else _by_inductor(graph, inputs)


def _by_inductor(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    return cast("Callable[..., Any]", lookup_backend("inductor")(graph, list(inputs)))
