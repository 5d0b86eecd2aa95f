"""Convolutions with their biases apart: a call without one, and an addition.

The one idea: on a GPU PyTorch's convolutions of cuDNN add the bias in a kernel of its own, which reads and writes the
whole result. As a call of the graph the addition is computed in the kernel that follows. The value stays to the bit.
"""

from __future__ import annotations

from typing import Any

from agent_synthesis.graphs.graph_index import GraphIndex, byte_count
from agent_synthesis.rewrite.calls import Draft, Named, Replacement, arguments, operation, shape
from warpsmith.v1 import graph_pb2

_SPATIAL = {
    "conv1d": 1, "conv2d": 2, "conv3d": 3, "conv_transpose1d": 1, "conv_transpose2d": 2, "conv_transpose3d": 3,
}  # fmt: skip
EFFECT = "adds the bias of the convolution in a kernel of our own, which what follows can join"


def apart(index: GraphIndex, node: str) -> Replacement | None:
    """The convolution without its bias, and the addition; None for any other call.

    Not channel by channel: for that PyTorch has a kernel of its own, which adds the bias as it goes.
    """
    call = index.nodes[node]
    given = _biased(index, call)
    if given is None or not index.is_pure(node):
        return None
    draft, spec = Draft(index), index.spec(node)
    product = draft.call(draft.free(f"{node}_unbiased"), call.target, *{**given, "bias": None}.values())
    draft.nodes[-1].results[0].spec.CopyFrom(spec)  # it may be laid out otherwise than a call without data says
    (channels,) = shape(index, given["bias"])
    bias = draft.view(
        draft.free(f"{node}_bias"), "aten.view.default", given["bias"], [channels, *[1] * _SPATIAL[operation(call)]]
    )
    draft.call(node, "aten.add.Tensor", product, bias)
    draft.nodes[-1].results[0].spec.CopyFrom(spec)
    return Replacement((node,), tuple(draft.nodes))


def added_bytes(index: GraphIndex, node: str) -> int:
    """Bytes that PyTorch moves to add the bias of a call: a read and a write of its result; 0 where it adds none."""
    return 2 * byte_count(index.spec(node)) if _biased(index, index.nodes[node]) is not None else 0


def _biased(index: GraphIndex, call: graph_pb2.Node) -> dict[str, Any] | None:
    """Arguments of a convolution whose bias is added after it."""
    if operation(call) not in _SPATIAL or not call.results[0].name:
        return None
    given = arguments(call)
    bias, weight, groups = given["bias"], given["weight"], given["groups"]
    if not isinstance(bias, Named) or not _is_dense_row(index, bias) or 0 in index.spec(call.name).shape:
        return None
    is_by_channel = groups > 1 and shape(index, weight)[1] == 1
    return None if is_by_channel else given


def _is_dense_row(index: GraphIndex, tensor: Named) -> bool:
    return list(index.spec(tensor.name).strides) == [1]
