"""Σ|terms| of small outputs: how much an ordinary sum of this length and size may be off.

The one idea: with few elements eager's error may be zero by luck, so the yardstick gets a floor of 4u·Σ|terms|.
Rounding a tensor t of the computation, given or intermediate, to relative u changes the result f by at most, to
first order, u·Σ|t_i·∂f/∂t_i| (Higham, Accuracy and Stability of Numerical Algorithms, §3). The terms are those of the
tensor where that is largest; float64 autograd gives them for any graph. Intermediate tensors count because terms may
cancel after them: the mean of a normalised tensor is zero and depends on no input, but it is a sum of ones and minus
ones. An estimate for the comparison; it judges nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from gpu_bench.judging.comparison import SMALL_OUTPUT, unit_roundoff
from gpu_bench.workers.shortage import is_want_of_memory
from warpsmith.graphs import aten
from warpsmith.v1 import graph_pb2

_BATCH_NORM = "aten.batch_norm.default"
_PROBES = 8
"""Elements of the output that are differentiated; the rest are taken to be like them."""


def terms_floor(graph: graph_pb2.Graph, sources: Mapping[str, torch.Tensor], output: str, truth: torch.Tensor) -> float:
    """4u·Σ|terms| of an output, or of a source that the graph writes (rms over probed elements); 0 for what is not
    small, not float, or what autograd cannot follow. `sources` by the graph's names; they are left alone, and so are
    generators: of a random graph the terms are those of some draw.

    Raises want of memory: a floor of 0 would call an honest sum imprecise.
    """
    if not is_small(truth):
        return 0.0
    with _generators_left_alone(truth.device):
        return floor_of(lambda: _followed(graph, sources, output), sources)


def statistics_floors(graph: graph_pb2.Graph, sources: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """4u·Σ|terms| of each statistic that batch norms alone update (rms over channels), by name: the terms are those of
    what the norm reads, or what the statistic was, whichever are larger. Tensors before that may have larger ones,
    which `terms_floor` finds. `sources` and generators are left alone.

    One pass for all: a network of 104 norms has 208 of them, and to follow each by autograd took minutes of an H200.
    Raises want of memory.
    """
    found: dict[str, float] = {}
    mutated = [(name, node.target == _BATCH_NORM) for node in graph.nodes for name in node.mutates]
    others = {name for name, is_of_norm in mutated if not is_of_norm}
    specs = {source.name: source.spec for source in graph.sources}
    named = {name for name, is_of_norm in mutated if is_of_norm and name in specs} - others
    small = {name for name in named if math.prod(specs[name].shape) < SMALL_OUTPUT}
    unit = 4.0 * unit_roundoff(_narrow(sources))

    def look(node: graph_pb2.Node, values: Mapping[str, torch.Tensor]) -> None:
        if node.target != _BATCH_NORM or not small.intersection(node.mutates):
            return
        channels, momentum = values[node.args[0].tensor].transpose(0, 1).flatten(1), node.args[6].real
        mean, count = channels.abs().mean(1), max(channels.shape[1] - 1, 1)
        apart = (channels - channels.mean(1, keepdim=True)).mul_(channels).abs_()
        for place, size in ((3, mean), (4, 2.0 * apart.sum(1) / count)):
            if (name := node.args[place].tensor) not in small:
                continue
            largest = torch.maximum(momentum * size, (1 - momentum) * values[name].abs())
            finite = largest[largest.isfinite()]
            rms = float(finite.square().mean().sqrt()) if finite.numel() else 0.0
            found[name] = max(unit * rms, found.get(name, 0.0))

    if small:
        with _generators_left_alone(next(iter(sources.values())).device):
            aten.interpret(graph, sources, widen=True, look=look)
    return found


def _generators_left_alone(device: torch.device) -> AbstractContextManager[None]:
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def _narrow(sources: Mapping[str, torch.Tensor]) -> torch.dtype:
    return next((t.dtype for t in sources.values() if t.is_floating_point()), torch.float32)


def is_small(truth: torch.Tensor) -> bool:
    """Whether an output is one whose error may be small by luck."""
    return truth.is_floating_point() and 0 < truth.numel() < SMALL_OUTPUT


def floor_of(
    follow: Callable[[], tuple[torch.Tensor | None, Sequence[torch.Tensor]]], sources: Mapping[str, torch.Tensor]
) -> float:
    """4u·Σ|terms|, u of the first float one of `sources`. `follow` computes an output in float64 for autograd, and the
    tensors that a candidate may round on the way to it; no output where autograd cannot follow.

    Raises want of memory.
    """
    try:
        magnitudes = _magnitudes(*follow())
    except RuntimeError as error:
        if is_want_of_memory(error):
            raise
        return 0.0
    finite = [value for value in magnitudes if math.isfinite(value)]
    if not finite:
        return 0.0
    mean_square = sum(value * value for value in finite) / len(finite)
    return 4.0 * unit_roundoff(_narrow(sources)) * float(mean_square**0.5)


def _called(node: graph_pb2.Node, values: dict[str, torch.Tensor], device: torch.device) -> list[torch.Tensor | None]:
    """The results of a call. What a batch norm writes to its statistics, past autograd, is written to be followed."""
    if node.target != _BATCH_NORM or not node.mutates:
        return aten.call(node.target, node.args, node.kwargs, values.__getitem__, device)
    x, momentum = values[node.args[0].tensor], node.args[6].real
    channels = x.transpose(0, 1).flatten(1)
    before = [values[name] for name in node.mutates]
    values |= {name: tensor.detach().clone() for name, tensor in zip(node.mutates, before, strict=True)}
    results = aten.call(node.target, node.args, node.kwargs, values.__getitem__, device)
    for name, old, new in zip(node.mutates, before, (channels.mean(1), channels.var(1)), strict=True):
        values[name] = (1 - momentum) * old + momentum * new
    return results


def _followed(
    graph: graph_pb2.Graph, sources: Mapping[str, torch.Tensor], output: str
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """The output of the graph in float64, and its float sources and intermediate tensors."""
    rounded: list[torch.Tensor] = []
    values: dict[str, torch.Tensor] = {}
    device = next(iter(sources.values())).device
    for source in graph.sources:
        tensor = sources.get(source.name)
        if tensor is None:
            tensor = aten.constant(source, device)
        if tensor.is_floating_point():
            tensor = tensor.detach().double().requires_grad_()
            rounded.append(tensor)
        values[source.name] = tensor.clone()  # which the graph may write
    with torch.enable_grad():
        for node in graph.nodes:
            results = _called(node, values, device)
            for result, tensor in zip(node.results, results, strict=False):
                if result.name and tensor is not None:
                    values[result.name] = tensor
                    if tensor.requires_grad and not result.alias_of and result.name != output:
                        rounded.append(tensor)
    return values.get(output), rounded


def _magnitudes(output: torch.Tensor | None, rounded: Sequence[torch.Tensor]) -> list[float]:
    """Largest over the rounded tensors t of Σ_i |t_i·∂f/∂t_i|, for probed elements f of the output."""
    if output is None or not output.requires_grad:
        return []
    flat = output.reshape(-1)
    step = max(1, flat.numel() // _PROBES)
    magnitudes = []
    for index in range(0, flat.numel(), step):
        gradients = torch.autograd.grad(flat[index], rounded, retain_graph=True, allow_unused=True)
        sums = [
            float((tensor.detach() * gradient).abs().sum())
            for tensor, gradient in zip(rounded, gradients, strict=True)
            if gradient is not None
        ]
        magnitudes.append(max(sums, default=0.0))
    return magnitudes
