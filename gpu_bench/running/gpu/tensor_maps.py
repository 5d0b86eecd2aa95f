"""Tensor maps as the driver encodes them: what a kernel's bulk copies (TMA) know of a buffer.

The one idea: a map is a launch argument of 128 bytes whose address is known late, so it is kept here and encoded when
its buffer is placed. Whether it stays inside of its buffer is `policy`'s business.
"""

from __future__ import annotations

import ctypes
import importlib
from typing import Any

from warpsmith import arguments
from warpsmith.v1 import candidate_pb2

MAP_BYTES = 128
ALIGNMENT_BYTES = 64
"""Of the map itself (CUDA driver API, cuTensorMapEncodeTiled)."""

_SWIZZLES = {0: "NONE", 32: "32B", 64: "64B", 128: "128B"}


class PlacedTensorMap:
    """The bytes of one map, at `address`; encoded by `place`."""

    def __init__(self, described: candidate_pb2.TensorMap) -> None:
        driver = importlib.import_module("cuda.bindings.driver")
        self._driver: Any = driver
        self._memory = ctypes.create_string_buffer(MAP_BYTES + ALIGNMENT_BYTES)
        self.address = -(-ctypes.addressof(self._memory) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self._placed_at = 0
        self._before = (
            getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{arguments.copied_type(described)}"),
            len(described.extents),
        )
        self._after = (
            [driver.cuuint64_t(extent) for extent in described.extents],
            [driver.cuuint64_t(stride) for stride in described.byte_strides],
            [driver.cuuint32_t(extent) for extent in described.box],
            [driver.cuuint32_t(1)] * len(described.box),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{_SWIZZLES[described.swizzle_bytes]}"),
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )

    def place(self, address: int) -> int:
        """Encodes the map for a buffer at a device address; the driver's error code, 0 when all is well."""
        if address == self._placed_at:
            return 0
        code, made = self._driver.cuTensorMapEncodeTiled(*self._before, address, *self._after)
        if int(code) == 0:
            ctypes.memmove(self.address, int(made.getPtr()), MAP_BYTES)
            self._placed_at = address
        return int(code)
