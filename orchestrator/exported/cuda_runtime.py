"""Builds and launches CUDA kernels: NVRTC at the first call (well under a second), then the driver's own launch."""

import ctypes

import torch
from cuda.bindings import driver as _ws_driver
from cuda.bindings import nvrtc as _ws_nvrtc


class _WsKernels:
    """The compiled kernels of an export. `sources` maps file names to texts; the first is compiled."""

    def __init__(self, sources):
        self._sources = sources
        self._module = None
        self._functions = {}

    def launch(self, entry, grid, block, cluster, shared_bytes, cooperative, overlapping, arguments):
        """Launches one kernel on PyTorch's current stream. Tensors are given by their addresses."""
        function = self._functions.get(entry) or self._load(entry, cluster, shared_bytes)
        config = _ws_driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block
        config.sharedMemBytes = shared_bytes
        config.hStream = torch.cuda.current_stream().cuda_stream
        attributes = []
        if cluster != (1, 1, 1):
            value = _ws_driver.CUlaunchAttributeValue()
            value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = cluster
            attributes.append((_ws_driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, value))
        if cooperative:
            value = _ws_driver.CUlaunchAttributeValue()
            value.cooperative = 1
            attributes.append((_ws_driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE, value))
        if overlapping:
            value = _ws_driver.CUlaunchAttributeValue()
            value.programmaticStreamSerializationAllowed = 1
            name = _ws_driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attributes.append((name, value))
        config.attrs = [_ws_attribute(name, value) for name, value in attributes]
        config.numAttrs = len(attributes)
        values = tuple(a.data_ptr() if isinstance(a, torch.Tensor) else a.value for a in arguments)
        kinds = tuple(ctypes.c_void_p if isinstance(a, torch.Tensor) else type(a) for a in arguments)
        _ws_check(_ws_driver.cuLaunchKernelEx(config, function, (values, kinds), 0))

    def _load(self, entry, cluster, shared_bytes):
        if self._module is None:
            torch.cuda.current_stream().synchronize()  # makes PyTorch's context current on this thread
            self._module = _ws_check(_ws_driver.cuModuleLoadData(self._compile()))
        function = _ws_check(_ws_driver.cuModuleGetFunction(self._module, entry.encode()))
        if shared_bytes:
            name = _ws_driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _ws_check(_ws_driver.cuFuncSetAttribute(function, name, shared_bytes))
        if cluster[0] * cluster[1] * cluster[2] > 8:
            name = _ws_driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            _ws_check(_ws_driver.cuFuncSetAttribute(function, name, 1))
        self._functions[entry] = function
        return function

    def _compile(self):
        names = list(self._sources)
        texts = [self._sources[name].encode() for name in names]
        headers, included = texts[1:], [name.encode() for name in names[1:]]
        made = _ws_nvrtc.nvrtcCreateProgram(texts[0], names[0].encode(), len(headers), headers, included)
        program = _ws_check(made)
        options = [b"--gpu-architecture=sm_90a", b"--std=c++20"]
        error = _ws_nvrtc.nvrtcCompileProgram(program, len(options), options)[0]
        if int(error):
            log = b" " * _ws_check(_ws_nvrtc.nvrtcGetProgramLogSize(program))
            _ws_check(_ws_nvrtc.nvrtcGetProgramLog(program, log))
            raise RuntimeError(f"NVRTC refused the kernel:\n{log.decode()}")
        cubin = b" " * _ws_check(_ws_nvrtc.nvrtcGetCUBINSize(program))
        _ws_check(_ws_nvrtc.nvrtcGetCUBIN(program, cubin))
        return cubin


def _ws_attribute(name, value):
    attribute = _ws_driver.CUlaunchAttribute()
    attribute.id = name
    attribute.value = value
    return attribute


def _ws_check(result):
    """The value of a driver or NVRTC call, or an exception that names the error."""
    error, *values = result
    if int(error):
        raise RuntimeError(f"CUDA: {error.name}")
    return values[0] if values else None
