"""Attention of a training step as two calls: its result with each row's statistics, and its derivatives.

The one idea: PyTorch has such pairs of calls under a name for each device; a graph has one pair, that of processors,
whose arguments are the plainest, and a GPU's own are what a program calls in their stead. Where PyTorch has neither, as
in float64 on a GPU, the same is computed as products and a softmax, some rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from warpsmith.graphs.library import attention_products
from warpsmith.v1 import candidate_pb2, graph_pb2, tensor_pb2

FORWARD: Final = "aten._scaled_dot_product_flash_attention_for_cpu.default"
"""(queries, keys, values, dropout, whether it is causal; mask, scale) → the result, and of each row the logarithm of
the sum of its scores' exponentials, in floats."""
BACKWARD: Final = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
"""(gradient, queries, keys, values, both results, dropout, whether it is causal; mask, scale) → three gradients."""
_OF_CPU: Final = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD_OF_CPU: Final = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_FLASH: Final = "aten._scaled_dot_product_flash_attention"
_EFFICIENT: Final = "aten._scaled_dot_product_efficient_attention"
_MOST_DEPTH: Final = 256
"""Elements of a row, of PyTorch's calls on a GPU."""
_STATISTICS_ROWS: Final = 32
"""Of these multiples are rows for which its masked call keeps statistics."""


# ---- what a graph says ---------------------------------------------------------------------------------


class Whole(TorchFunctionMode):
    """Within, attention is traced as the two calls where they exist, and as products and a softmax elsewhere.

    On a processor it is where PyTorch's own choice falls on them: not with dropout, nor with a mask that needs a
    gradient. On a GPU, of 16 bits, it is where `library_call` has one.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._is_gpu = device_type == "cuda"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not scaled_dot_product_attention:
            return func(*args, **kwargs)
        if not self._is_gpu:
            return func(*args, **kwargs)
        made = _on_gpu(*args, **kwargs)
        if made is not None:
            return made
        with sdpa_kernel(SDPBackend.MATH):
            return func(*args, **kwargs)


def _on_gpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor | None:
    """Attention as the call for which a GPU has one; None where it has none."""
    heads, key_heads = query.shape[1:2], key.shape[1:2]
    if dropout_p or not gpu_takes(query, key, value) or not (heads == key_heads or enable_gqa):
        return None
    if attn_mask is not None:
        if heads != key_heads or is_causal or attn_mask.requires_grad:
            return None
        rows, keys = query.shape[-2], key.shape[-2]
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.where(attn_mask, 0.0, -math.inf).to(query.dtype)
        if not gpu_takes_mask(attn_mask, query.dtype, rows, keys):
            return None
        attn_mask = attn_mask.expand(*query.shape[:2], rows, keys)
    made: torch.Tensor = _OF_CPU(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return made


def gpu_takes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether PyTorch has both calls on a GPU for operands like these: of 16 bits, [batch, heads, rows, depth]."""
    given = (query, key, value)
    if any(each.dim() != 4 or 0 in each.shape or each.stride(-1) != 1 for each in given):
        return False
    (batch, heads, _, depth), (_, key_heads, keys, _) = query.shape, key.shape
    is_alike = key.shape == value.shape == (batch, key_heads, keys, depth) and len({each.dtype for each in given}) == 1
    return is_alike and query.dtype.itemsize == 2 and not (depth % 8 or depth > _MOST_DEPTH or heads % key_heads)


def gpu_takes_mask(mask: torch.Tensor, dtype: torch.dtype, rows: int, keys: int) -> bool:
    """Whether a mask may be added to as many scores there."""
    is_whole = not (rows % _STATISTICS_ROWS or keys % 8)
    return is_whole and mask.dtype == dtype and mask.stride(-1) == 1 and mask.stride(-2) % 8 == 0


# ---- what a program calls ------------------------------------------------------------------------------

_NO, _YES = (tensor_pb2.Value(boolean=each) for each in (False, True))
_ZERO, _NOTHING = tensor_pb2.Value(real=0.0), tensor_pb2.Value(none=True)
_ALL_BUT_THE_MASK = tensor_pb2.Value(list=tensor_pb2.ValueList(values=[_YES, _YES, _YES, _NO]))


def library_call(
    node: graph_pb2.Node, spec: Callable[[str], tensor_pb2.TensorSpec], *, is_gpu: bool
) -> tuple[candidate_pb2.LibraryCall, int]:
    """A node as a program calls it, without results, and how many it gives beyond the node's own.

    Of the two calls, on a GPU: PyTorch's flash attention, or its memory-efficient one under a mask. What a dropout was
    drawn by is not read without one: statistics stand in its place. `spec`: of a tensor.
    """
    if not is_gpu or node.target not in STAND_INS:
        return candidate_pb2.LibraryCall(target=node.target, args=node.args, kwargs=node.kwargs), 0
    named = {each.name: each.value for each in node.kwargs}
    mask, is_masked = named.get("attn_mask", _NOTHING), mask_of(node) is not None
    causal = tensor_pb2.Value(boolean=is_causal(node))
    if node.target == FORWARD:
        operands = node.args[:3]
        if is_masked:
            target, args, unread = _EFFICIENT, [*operands, mask, _YES, _ZERO, causal], 2
        else:
            target, args, unread = _FLASH, [*operands, _ZERO, causal, _NO], 7
    else:
        given, drawn_by = node.args[:6], [node.args[5]] * 2
        if is_masked:
            args = [*given[:4], mask, *given[4:], *drawn_by, _ZERO, _ALL_BUT_THE_MASK, causal]
            target, unread = f"{_EFFICIENT}_backward", 1
        else:
            lengths = [tensor_pb2.Value(integer=spec(each.tensor).shape[-2]) for each in given[1:3]]
            args = [*given, _NOTHING, _NOTHING, *lengths, _ZERO, causal, *drawn_by]
            target, unread = f"{_FLASH}_backward", 0
    scale = [tensor_pb2.NamedValue(name="scale", value=named["scale"])] if "scale" in named else []
    return candidate_pb2.LibraryCall(target=f"{target}.default", args=args, kwargs=scale), unread


PRODUCTS: Final = {FORWARD: 2, BACKWARD: 5}
"""Target of one of the two calls → its products; scores are made again for derivatives."""


def is_causal(node: graph_pb2.Node) -> bool:
    """Of one of the two calls, whether row m sees keys 0 to m alone."""
    place = 4 if node.target == FORWARD else 7
    return len(node.args) > place and node.args[place].boolean


def mask_of(node: graph_pb2.Node) -> str | None:
    """Of one of the two calls, the tensor that is added to scores."""
    return next((each.value.tensor or None for each in node.kwargs if each.name == "attn_mask"), None)


def pair_count(node: graph_pb2.Node, spec: Callable[[str], tensor_pb2.TensorSpec]) -> int:
    """Of one of the two calls, pairs of a query and a key that see each other, whatever a mask hides."""
    first = 0 if node.target == FORWARD else 1
    query, key = (spec(each.tensor).shape for each in node.args[first : first + 2])
    rows, keys = query[-2], key[-2]
    whole = min(rows, keys)
    seen = whole * (whole + 1) // 2 + (rows - whole) * keys if is_causal(node) else rows * keys
    return math.prod(query[:-2]) * seen


def least_flops(node: graph_pb2.Node, spec: Callable[[str], tensor_pb2.TensorSpec]) -> int:
    """Of one of the two calls, what its products take where scores are kept for derivatives; 0 under a mask, which may
    hide all."""
    products = 2 if node.target == FORWARD else 4
    pairs = 0 if mask_of(node) else pair_count(node, spec)
    return 2 * products * pairs * spec(node.args[0].tensor).shape[-1]


# ---- what else computes it -----------------------------------------------------------------------------


def _anywhere(of_cpu: Callable[..., Any], of_others: Callable[..., Any]) -> Callable[..., Any]:
    def called(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return (of_others if first.device.type == "cuda" else of_cpu)(first, *args, **kwargs)

    return called


STAND_INS: Final[dict[str, Callable[..., Any]]] = {
    FORWARD: _anywhere(_OF_CPU, attention_products.forward),
    BACKWARD: _anywhere(_BACKWARD_OF_CPU, attention_products.backward),
}
"""Target of one of the two calls → the same on any device, in any type."""
