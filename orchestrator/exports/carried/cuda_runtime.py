"""Builds and launches CUDA kernels: NVRTC at the first call (well under a second), then the driver's own launch."""

import ctypes

import torch
from cuda.bindings import driver as _ws_driver

from orchestrator.exports.carried.cuda_compile import _ws_check, _ws_compiled


class _WsKernels:
    """The compiled kernels of an export. `sources` maps file names to texts; the first is compiled, for that GPU
    architecture, where its `code` is not given."""

    def __init__(self, sources, architecture, code=b""):
        self._sources = sources
        self._architecture = architecture
        self._code = code
        self._modules = {}

    def function(self, device, entry):
        """A kernel on a device, which is the current one."""
        if device not in self._modules:
            torch.cuda.current_stream().synchronize()  # makes PyTorch's context current on this thread
            self._code = self._code or _ws_compiled(self._sources, self._architecture)
            self._modules[device] = _ws_check(_ws_driver.cuModuleLoadData(self._code))
        return _ws_check(_ws_driver.cuModuleGetFunction(self._modules[device], entry.encode()))


def _ws_cubin(path):
    """Machine code that was built before, or nothing: then it is built at the first call."""
    return path.read_bytes() if path.exists() else b""


class _WsTensorMap:
    """How bulk copies see a tensor: 128 bytes at a multiple of 64, encoded again when the tensor has moved."""

    def __init__(self, dtype, extents, byte_strides, box, swizzle_bytes):
        self._memory = ctypes.create_string_buffer(192)
        self._place = -(-ctypes.addressof(self._memory) // 64) * 64
        self._address = 0
        swizzle = f"CU_TENSOR_MAP_SWIZZLE_{swizzle_bytes}B" if swizzle_bytes else "CU_TENSOR_MAP_SWIZZLE_NONE"
        self._before = getattr(_ws_driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{dtype}"), len(extents)
        self._after = (
            [_ws_driver.cuuint64_t(extent) for extent in extents],
            [_ws_driver.cuuint64_t(stride) for stride in byte_strides],
            [_ws_driver.cuuint32_t(extent) for extent in box],
            [_ws_driver.cuuint32_t(1)] * len(box),
            _ws_driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(_ws_driver.CUtensorMapSwizzle, swizzle),
            _ws_driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            _ws_driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )

    def at(self, address):
        """Where the map of a tensor at that address lies."""
        if address != self._address:
            made = _ws_check(_ws_driver.cuTensorMapEncodeTiled(*self._before, address, *self._after))
            ctypes.memmove(self._place, int(made.getPtr()), 128)
            self._address = address
        return self._place


class _WsLaunch:
    """One launch of one kernel, with everything packed but the arguments, since a call should cost little.

    `maps`: position of an argument to the tensor map that is passed in place of its tensor's address.
    """

    def __init__(
        self, kernels, entry, grid, block, cluster, shared_bytes, cooperative, overlapping, argument_count, maps=None
    ):
        self._maps = maps or {}
        self._kernels, self._entry, self._grid, self._block, self._cluster = kernels, entry, grid, block, cluster
        self._shared_bytes, self._cooperative, self._overlapping = shared_bytes, cooperative, overlapping
        self._values = ctypes.c_uint64 * argument_count
        self._pointers = ctypes.c_void_p * argument_count
        self._idle = []  # memory for arguments, and pointers to each: a launch takes a pair, or makes one
        self._ready = {}

    def __call__(self, device, stream, *arguments):
        """Launches on a stream of the current device. Tensors are given by their addresses, numbers by their bits."""
        place = self._ready.get((device, stream))
        if place is None:
            place = self._ready[device, stream] = self._prepare(device, stream)
        launch, config, function, _ = place
        try:
            pair = self._idle.pop()
        except IndexError:  # none, or another thread took it
            pair = self._pair()
        values, pointers = pair
        values[:] = arguments
        for position, tensor_map in self._maps.items():
            pointers[position] = tensor_map.at(values[position])
        error = launch(config, function, pointers, None)  # it has copied them when it returns
        self._idle.append(pair)
        if error:
            _ws_check((_ws_driver.CUresult(error),))

    def _pair(self):
        values = self._values()
        start = ctypes.addressof(values)
        return values, self._pointers(*range(start, start + ctypes.sizeof(values), 8))

    def _prepare(self, device, stream):
        function = self._kernels.function(device, self._entry)
        if self._shared_bytes:
            name = _ws_driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _ws_check(_ws_driver.cuFuncSetAttribute(function, name, self._shared_bytes))
        if self._cluster[0] * self._cluster[1] * self._cluster[2] > 8:
            name = _ws_driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            _ws_check(_ws_driver.cuFuncSetAttribute(function, name, 1))
        config = _ws_driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = self._grid
        config.blockDimX, config.blockDimY, config.blockDimZ = self._block
        config.sharedMemBytes = self._shared_bytes
        config.hStream = stream
        config.attrs = self._attributes()
        config.numAttrs = len(config.attrs)
        launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
        launch.argtypes = [ctypes.c_void_p] * 4
        return launch, int(config.getPtr()), int(function), config

    def _attributes(self):
        known = _ws_driver.CUlaunchAttributeID
        found = []
        if self._cluster != (1, 1, 1):
            value = _ws_driver.CUlaunchAttributeValue()
            value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = self._cluster
            found.append((known.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, value))
        if self._cooperative:
            value = _ws_driver.CUlaunchAttributeValue()
            value.cooperative = 1
            found.append((known.CU_LAUNCH_ATTRIBUTE_COOPERATIVE, value))
        if self._overlapping:
            value = _ws_driver.CUlaunchAttributeValue()
            value.programmaticStreamSerializationAllowed = 1
            found.append((known.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, value))
        made = []
        for name, value in found:
            attribute = _ws_driver.CUlaunchAttribute()
            attribute.id, attribute.value = name, value
            made.append(attribute)
        return made
