"""Element types and layouts of torch tensors as contract nouns, and back.

One table, both ways. It does not move values: tensors never cross a service boundary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from warpsmith.errors import BadInput
from warpsmith.v1 import tensor_pb2

_TO_TORCH: Final[Mapping[tensor_pb2.Dtype.ValueType, torch.dtype]] = {
    tensor_pb2.DTYPE_FLOAT64: torch.float64,
    tensor_pb2.DTYPE_FLOAT32: torch.float32,
    tensor_pb2.DTYPE_FLOAT16: torch.float16,
    tensor_pb2.DTYPE_BFLOAT16: torch.bfloat16,
    tensor_pb2.DTYPE_INT64: torch.int64,
    tensor_pb2.DTYPE_INT32: torch.int32,
    tensor_pb2.DTYPE_INT16: torch.int16,
    tensor_pb2.DTYPE_INT8: torch.int8,
    tensor_pb2.DTYPE_UINT8: torch.uint8,
    tensor_pb2.DTYPE_BOOL: torch.bool,
    tensor_pb2.DTYPE_COMPLEX64: torch.complex64,
    tensor_pb2.DTYPE_COMPLEX128: torch.complex128,
    tensor_pb2.DTYPE_FLOAT8_E4M3FN: torch.float8_e4m3fn,
    tensor_pb2.DTYPE_FLOAT8_E5M2: torch.float8_e5m2,
    tensor_pb2.DTYPE_UINT16: torch.uint16,
    tensor_pb2.DTYPE_UINT32: torch.uint32,
    tensor_pb2.DTYPE_UINT64: torch.uint64,
}
_FROM_TORCH: Final[Mapping[torch.dtype, tensor_pb2.Dtype.ValueType]] = {t: d for d, t in _TO_TORCH.items()}

_STORED: Final = frozenset({torch.uint16, torch.uint32, torch.uint64})
"""Types of parameters, buffers and results in between alone."""
FLOATS_OF_8_BITS: Final = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
"""Types that hold values, and that PyTorch computes little with but products."""


def to_torch(dtype: tensor_pb2.Dtype.ValueType) -> torch.dtype:
    """The torch type of a contract type.

    Raises:
        BadInput: the type is not set.
    """
    try:
        return _TO_TORCH[dtype]
    except KeyError:
        raise BadInput(f"element type {dtype} is not one of the contract's") from None


def from_torch(dtype: torch.dtype) -> tensor_pb2.Dtype.ValueType:
    """The contract type of a torch type.

    Raises:
        BadInput: the type has no place in the contract (quantized, other 8-bit floats, 32-bit complex).
    """
    try:
        return _FROM_TORCH[dtype]
    except KeyError:
        raise BadInput(f"tensors of type {dtype} are not supported; use one of {_names()}") from None


def require_comparable(dtype: torch.dtype, what: str) -> None:
    """Refuses types that hold values but that PyTorch does not compute with, as what goes in or comes out.

    Raises:
        BadInput: says what to do.
    """
    if dtype in _STORED:
        raise BadInput(f"{what} of the forward is of {dtype}, which cannot be drawn or compared: convert it inside")


def computable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy in float32 of one of 8-bit floats, which nothing computes with."""
    return tensor.float() if tensor.dtype in FLOATS_OF_8_BITS else tensor


def is_supported(dtype: torch.dtype) -> bool:
    """Whether the contract has the type."""
    return dtype in _FROM_TORCH


def spec_of(tensor: torch.Tensor) -> tensor_pb2.TensorSpec:
    """Type, shape and strides (in elements) of a tensor, fake tensors included.

    Raises:
        BadInput: the type is not supported, the tensor is not strided, or an extent is not static.
    """
    if tensor.layout is not torch.strided:
        raise BadInput(f"tensors of layout {tensor.layout} are not supported; use dense tensors")
    extents = (*tensor.shape, *tensor.stride())
    if not all(isinstance(extent, int) for extent in extents):
        raise BadInput("a tensor's shape depends on values; all shapes must be static")
    return tensor_pb2.TensorSpec(
        dtype=from_torch(tensor.dtype), shape=list(tensor.shape), strides=list(tensor.stride())
    )


def element_span(spec: tensor_pb2.TensorSpec) -> int:
    """Elements of memory from the tensor's lowest to its highest address, both included; 0 when it is
    empty."""
    if 0 in spec.shape:
        return 0
    return 1 + sum((extent - 1) * abs(stride) for extent, stride in zip(spec.shape, spec.strides, strict=True))


def _names() -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in _FROM_TORCH)
