"""Which other indices of a largest or smallest element are right: those of values that rounding cannot tell apart.

The one idea: a sum in another order may make the other of two elements the larger, and neither eager's index nor
float64's is then the only right one. A third index is right where in float64 its element is no farther from the
extreme one than eager is from float64 in that row. Of equal elements only PyTorch's choice is right.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from warpsmith.v1 import graph_pb2, verdict_pb2

_RESULT = {"aten.argmax.default": 0, "aten.argmin.default": 0, "aten.max.dim": 1, "aten.min.dim": 1}
"""Operation → which of its results is the index."""

Compute = Callable[[str, bool], torch.Tensor]
"""A tensor of the graph by name, in float64 or as eager computes it."""


def excuse(
    error: verdict_pb2.OutputError,
    graph: graph_pb2.Graph,
    output: str,
    candidate: torch.Tensor,
    eager: torch.Tensor,
    truth: torch.Tensor,
    compute: Compute,
) -> None:
    """Takes back from the error of an output of integers what is as right as eager's; all are on one device."""
    wrong = (candidate != eager) & (candidate != truth)
    if truth.dtype == torch.int64:
        wrong &= ~excused(graph, output, candidate, truth, compute)
    error.unequal_count = int(wrong.sum())
    if error.unequal_count:
        error.worst_index = int(wrong.reshape(-1).to(torch.uint8).argmax())
        error.worst_value = float(candidate.reshape(-1)[error.worst_index])
        error.worst_truth = float(eager.reshape(-1)[error.worst_index])


def excused(
    graph: graph_pb2.Graph, output: str, candidate: torch.Tensor, truth: torch.Tensor, compute: Compute
) -> torch.Tensor:
    """Where a candidate's index, though another than the truth's, is as good: a bool tensor of the output's shape.

    `candidate` and `truth` are int64 and on the device on which `compute` computes.
    """
    nowhere = torch.zeros(truth.shape, dtype=torch.bool, device=truth.device)
    node = next((node for node in graph.nodes for result in node.results if result.name == output), None)
    position = _RESULT.get(node.target) if node is not None else None
    if node is None or position is None or node.results[position].name != output:
        return nowhere
    wide, own = compute(node.args[0].tensor, True), compute(node.args[0].tensor, False)
    if not own.is_floating_point():
        return nowhere
    has_dim = len(node.args) > 1 and node.args[1].WhichOneof("kind") == "integer"
    dim = node.args[1].integer if has_dim else 0
    if not has_dim:
        wide, own = wide.reshape(-1), own.reshape(-1)
    is_kept = candidate.dim() == wide.dim()
    chosen, extreme = (each.reshape(-1) if not has_dim else each for each in (candidate, truth))
    if has_dim and not is_kept:
        chosen, extreme = chosen.unsqueeze(dim), extreme.unsqueeze(dim)
    is_index = (chosen >= 0) & (chosen < wide.shape[dim])
    apart = (wide.gather(dim, chosen.where(is_index, 0)) - wide.gather(dim, extreme)).abs()
    error = (own.double() - wide).abs().amax(dim, keepdim=True)
    return (is_index & (apart > 0) & (apart <= error)).reshape(truth.shape)
