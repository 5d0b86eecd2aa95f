"""The element types of the IR in the contract's terms and in torch's, and back: one table for all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from agent_synthesis.nests.ir import Type
from warpsmith.graphs import dtypes
from warpsmith.v1 import tensor_pb2

CONTRACT: Final[Mapping[Type, tensor_pb2.Dtype.ValueType]] = {
    Type.F64: tensor_pb2.DTYPE_FLOAT64, Type.F32: tensor_pb2.DTYPE_FLOAT32, Type.F16: tensor_pb2.DTYPE_FLOAT16,
    Type.BF16: tensor_pb2.DTYPE_BFLOAT16, Type.I64: tensor_pb2.DTYPE_INT64, Type.I32: tensor_pb2.DTYPE_INT32,
    Type.I16: tensor_pb2.DTYPE_INT16, Type.I8: tensor_pb2.DTYPE_INT8, Type.U8: tensor_pb2.DTYPE_UINT8,
    Type.BOOL: tensor_pb2.DTYPE_BOOL, Type.E4M3: tensor_pb2.DTYPE_FLOAT8_E4M3FN,
    Type.E5M2: tensor_pb2.DTYPE_FLOAT8_E5M2,
}  # fmt: skip
"""Every type of the IR as the contract's."""
TORCH: Final[Mapping[Type, torch.dtype]] = {type_: dtypes.to_torch(dtype) for type_, dtype in CONTRACT.items()}
"""Every type of the IR as torch's."""
OF_TORCH: Final[Mapping[torch.dtype, Type]] = {dtype: type_ for type_, dtype in TORCH.items()}
"""The inverse of `TORCH`."""
PART_OF_COMPLEX: Final[Mapping[torch.dtype, Type]] = {torch.complex64: Type.F32, torch.complex128: Type.F64}
"""Type of the real and of the imaginary part, which lie next to each other in memory."""
