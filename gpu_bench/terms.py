"""Σ|terms| of small outputs: how much an ordinary sum of this length and size may be off.

The one idea: with few elements eager's error may be zero by luck, so the yardstick gets a floor of 4u·Σ|terms|, and
the terms of any function are, to first order, x_i·∂f/∂x_i, which float64 autograd gives for any graph. An estimate
for the comparison; it judges nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from gpu_bench.comparison import SMALL_OUTPUT, unit_roundoff
from warpsmith import aten
from warpsmith.v1 import graph_pb2

_PROBES = 8
"""Elements of the output that are differentiated; the rest are taken to be like them."""


def terms_floor(
    graph: graph_pb2.Graph, sources: Mapping[str, torch.Tensor], position: int, truth: torch.Tensor
) -> float:
    """4u·Σ|terms| of output `position` (rms over probed elements); 0 for outputs that are not small, not float, or
    that autograd cannot follow. `sources` by the graph's names, as the module has them."""
    small = truth.is_floating_point() and 0 < truth.numel() < SMALL_OUTPUT
    if not small or any(node.random or node.mutates for node in graph.nodes):
        return 0.0
    try:
        magnitudes = _magnitudes(graph, sources, graph.outputs[position])
    except (RuntimeError, NotImplementedError):
        return 0.0
    finite = [value for value in magnitudes if math.isfinite(value)]
    if not finite:
        return 0.0
    mean_square = sum(value * value for value in finite) / len(finite)
    narrow = next((t.dtype for t in sources.values() if t.is_floating_point()), torch.float32)
    return 4.0 * unit_roundoff(narrow) * float(mean_square**0.5)


def _magnitudes(graph: graph_pb2.Graph, sources: Mapping[str, torch.Tensor], output: str) -> list[float]:
    """Largest over the sources of Σ_i |x_i·∂f/∂x_i|, for probed elements f of the output."""
    leaves: dict[str, torch.Tensor] = {}
    values: dict[str, torch.Tensor] = {}
    device = next(iter(sources.values())).device
    for source in graph.sources:
        tensor = sources.get(source.name)
        if tensor is None:
            tensor = aten.constant(source, device)
        if tensor.is_floating_point():
            leaves[source.name] = tensor = tensor.detach().double().requires_grad_()
        values[source.name] = tensor
    with torch.enable_grad():
        for node in graph.nodes:
            results = aten.call(node.target, node.args, node.kwargs, values.__getitem__, device)
            for result, tensor in zip(node.results, results, strict=False):
                if result.name and tensor is not None:
                    values[result.name] = tensor
    flat = values[output].reshape(-1)
    if not flat.requires_grad:
        return []
    step = max(1, flat.numel() // _PROBES)
    magnitudes = []
    for index in range(0, flat.numel(), step):
        gradients = torch.autograd.grad(flat[index], list(leaves.values()), retain_graph=True, allow_unused=True)
        sums = [
            float((leaf.detach() * gradient).abs().sum())
            for leaf, gradient in zip(leaves.values(), gradients, strict=True)
            if gradient is not None
        ]
        magnitudes.append(max(sums, default=0.0))
    return magnitudes
