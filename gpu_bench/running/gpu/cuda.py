"""The executor of the `cuda` target: cubins through the driver API, launched on torch's current stream.

The one idea: everything about a launch but the addresses of fresh outputs is packed when the program is bound; a
call patches those addresses and makes one driver call through ctypes, a few microseconds with nothing allocated.
Modules and attributes go through cuda-bindings. It shares torch's primary context. After an error the context is
lost: the owner of the process must end it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gpu_bench.running.elsewhere import Elsewhere
from gpu_bench.running.executor import Call, Kept, Memory, ProgramFault, Sources
from gpu_bench.running.gpu.tensor_maps import PlacedTensorMap
from gpu_bench.running.gpu.workspace_plan import PlannedMemory, WorkspacePlan
from gpu_bench.running.straight_line import LaunchCode, kept_of, rest_of, straighten
from warpsmith.hardware import STATIC_SHARED_BYTES
from warpsmith.v1 import artifact_pb2, candidate_pb2, task_pb2, verdict_pb2

_SCALARS = {"int32": ctypes.c_int32, "int64": ctypes.c_int64, "float32": ctypes.c_float}

PORTABLE_CLUSTER = 8
"""Blocks of a cluster above which a kernel must allow a non-portable size (CUDA C++ Programming Guide, clusters)."""

_CRASHES = frozenset({
    "CUDA_ERROR_ILLEGAL_ADDRESS", "CUDA_ERROR_MISALIGNED_ADDRESS", "CUDA_ERROR_ASSERT", "CUDA_ERROR_LAUNCH_FAILED",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION", "CUDA_ERROR_INVALID_ADDRESS_SPACE", "CUDA_ERROR_INVALID_PC",
    "CUDA_ERROR_HARDWARE_STACK_ERROR", "CUDA_ERROR_TENSOR_MEMORY_LEAK", "CUDA_ERROR_CONTAINED",
})  # fmt: skip
_RESOURCES = frozenset({
    "CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE",
    "CUDA_ERROR_INVALID_CLUSTER_SIZE", "CUDA_ERROR_MAX_CONNECTIONS_REACHED",
})  # fmt: skip


def fault_kind(error_name: str) -> verdict_pb2.FailureKind.ValueType:
    """What a driver error, such as "CUDA_ERROR_ILLEGAL_ADDRESS", says about the program."""
    if error_name in _CRASHES:
        return verdict_pb2.FAILURE_KIND_CRASH
    if error_name in _RESOURCES:
        return verdict_pb2.FAILURE_KIND_RESOURCE
    if error_name == "CUDA_ERROR_LAUNCH_TIMEOUT":
        return verdict_pb2.FAILURE_KIND_TIMEOUT
    return verdict_pb2.FAILURE_KIND_LAUNCH_ERROR


@functools.cache
def _driver() -> Any:
    return importlib.import_module("cuda.bindings.driver")


@functools.cache
def _launch_function() -> Any:
    function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    function.restype = ctypes.c_int
    return function


def _checked(result: tuple[Any, ...], what: str) -> Any:
    """The value of a cuda-bindings call; raises ProgramFault for an error code."""
    code, *values = result
    if int(code) != 0:
        raise _fault(int(code), what)
    return values[0] if values else None


def _fault(code: int, what: str) -> ProgramFault:
    driver = _driver()
    try:
        name = driver.CUresult(code).name
    except ValueError:
        name = f"CUDA error {code}"
    return ProgramFault(fault_kind(name), f"{what}: {name}")


@dataclass
class PackedArguments:
    """Arguments of a launch as cuLaunchKernelEx takes them: an array of pointers to values, kept alive here.

    `pointers[i]` is the address of `values[i]`; a buffer's value is its device address, patched by `place`.
    """

    values: list[Any] = field(default_factory=list)
    pointers: Any = None

    @staticmethod
    def of(arguments: Sequence[candidate_pb2.LaunchArgument]) -> PackedArguments:
        """Packs scalars by value; buffers as null pointers until they are placed."""
        values: list[Any] = []
        for argument in arguments:
            kind = argument.WhichOneof("kind") or ""
            if kind == "tensor_map":
                values.append(PlacedTensorMap(argument.tensor_map))
            else:
                values.append(_SCALARS[kind](getattr(argument, kind)) if kind in _SCALARS else ctypes.c_uint64(0))
        places = (v.address if isinstance(v, PlacedTensorMap) else ctypes.addressof(v) for v in values)
        return PackedArguments(values, (ctypes.c_void_p * max(1, len(values)))(*places))

    def place(self, position: int, address: int) -> None:
        """Sets the device address of the buffer argument, or of the tensor map's buffer, at `position`.

        Raises ProgramFault: the driver refuses the tensor map.
        """
        value = self.values[position]
        if not isinstance(value, PlacedTensorMap):
            value.value = address
        elif code := value.place(address):
            raise _fault(code, f"the tensor map of argument {position}")


class CudaExecutor:
    """Runs programs of the `cuda` target on torch's current device and stream."""

    target: task_pb2.Target.ValueType = task_pb2.TARGET_CUDA

    def load(
        self, program: candidate_pb2.Program, artifact: artifact_pb2.Artifact, device: torch.device
    ) -> CudaProgram:
        """As `Executor.load`.

        Raises ProgramFault: the cubin is not for this GPU, lacks an entry, or asks for more than a block may have.
        """
        torch.empty(0, device=device)  # torch makes its primary context current in this thread
        launches = [step.launch for step in program.steps if step.WhichOneof("kind") == "launch"]
        if not launches:
            return CudaProgram(program, device, {})
        if artifact.format != artifact_pb2.BINARY_FORMAT_CUBIN:
            raise ProgramFault(verdict_pb2.FAILURE_KIND_LAUNCH_ERROR, "the artifact holds no cubin")
        driver = _driver()
        modules = [
            _checked(driver.cuModuleLoadData(content), "the cubin does not load")
            for content in (artifact.content, *artifact.further)
        ]
        functions: dict[str, Any] = {}
        for launch in launches:
            if launch.entry not in functions:
                functions[launch.entry] = _function(modules, launch.entry)
            _allow(functions[launch.entry], launch, f"entry {launch.entry}")
        return CudaProgram(program, device, functions)

    def synchronize(self) -> None:
        """As `Executor.synchronize`: an error of any earlier launch shows here."""
        driver = _driver()
        _checked(driver.cuCtxSynchronize(), "the kernels did not end well")


def _function(modules: Sequence[Any], entry: str) -> Any:
    """The kernel of that name, in whichever of the modules it is. Raises ProgramFault where it is in none."""
    driver = _driver()
    for module in modules[:-1]:
        code, *found = driver.cuModuleGetFunction(module, entry.encode())
        if int(code) == 0:
            return found[0]
    return _checked(driver.cuModuleGetFunction(modules[-1], entry.encode()), f"entry {entry} is not in the cubin")


def _allow(function: Any, launch: candidate_pb2.Launch, what: str) -> None:
    """Opts the function in to what the launch needs beyond the defaults; attributes only ever grow."""
    driver = _driver()
    attribute = driver.CUfunction_attribute
    maximum = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    if launch.shared_bytes > 0:
        static = _checked(driver.cuFuncGetAttribute(attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function), what)
        allowed = _checked(driver.cuFuncGetAttribute(maximum, function), what)
        if launch.shared_bytes > allowed or static + launch.shared_bytes > STATIC_SHARED_BYTES:
            wanted = max(int(launch.shared_bytes), int(allowed))
            result = driver.cuFuncSetAttribute(function, maximum, wanted)
            if int(result[0]) != 0:
                raise ProgramFault(
                    verdict_pb2.FAILURE_KIND_RESOURCE,
                    f"{what} asks for {launch.shared_bytes} bytes of dynamic shared memory beside {static} static "
                    "ones, more than a block may have",
                )
    if cluster_size(launch) > PORTABLE_CLUSTER:
        allowed_sizes = attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
        _checked(driver.cuFuncSetAttribute(function, allowed_sizes, 1), what)


def cluster_size(launch: candidate_pb2.Launch) -> int:
    """Blocks of a cluster; 1 for none."""
    cluster = launch.cluster
    return max(1, cluster.x) * max(1, cluster.y) * max(1, cluster.z)


def attributes_of(launch: candidate_pb2.Launch) -> list[tuple[str, tuple[int, ...]]]:
    """Launch attributes in order: (name without its CU_LAUNCH_ATTRIBUTE_ prefix, value)."""
    attributes: list[tuple[str, tuple[int, ...]]] = []
    if cluster_size(launch) > 1:
        cluster = launch.cluster
        attributes.append(("CLUSTER_DIMENSION", (max(1, cluster.x), max(1, cluster.y), max(1, cluster.z))))
    if launch.cooperative:
        attributes.append(("COOPERATIVE", (1,)))
    if launch.programmatic_dependent:
        attributes.append(("PROGRAMMATIC_STREAM_SERIALIZATION", (1,)))
    return attributes


def configure(launch: candidate_pb2.Launch) -> Any:
    """The driver's launch configuration, without a stream."""
    driver = _driver()
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = _extents(launch.grid)
    config.blockDimX, config.blockDimY, config.blockDimZ = _extents(launch.block)
    config.sharedMemBytes = int(launch.shared_bytes)
    attributes = []
    for name, value in attributes_of(launch):
        attribute = driver.CUlaunchAttribute()
        attribute.id = getattr(driver.CUlaunchAttributeID, f"CU_LAUNCH_ATTRIBUTE_{name}")
        if name == "CLUSTER_DIMENSION":
            attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = value
        elif name == "COOPERATIVE":
            attribute.value.cooperative = value[0]
        else:
            attribute.value.programmaticStreamSerializationAllowed = value[0]
        attributes.append(attribute)
    config.attrs = attributes
    config.numAttrs = len(attributes)
    return config


def _extents(extent: candidate_pb2.Extent3) -> tuple[int, int, int]:
    return max(1, extent.x), max(1, extent.y), max(1, extent.z)


def after_others(program: candidate_pb2.Program) -> candidate_pb2.Program:
    """The program, its first launch told to wait for what precedes a call, which is not the program's own; so is the
    first that is not prepared.

    Calls of a group would run beside each other, each in the time of the one before.
    """
    launches = [number for number, step in enumerate(program.steps) if step.HasField("launch")]
    first = [*launches[:1], *[number for number in launches if not program.steps[number].prepared][:1]]
    if not any(program.steps[number].launch.programmatic_dependent for number in first):
        return program
    waiting = candidate_pb2.Program()
    waiting.CopyFrom(program)
    for number in first:
        waiting.steps[number].launch.programmatic_dependent = False
    return waiting


class CudaProgram:
    """A loaded program of the `cuda` target."""

    def __init__(self, program: candidate_pb2.Program, device: torch.device, functions: dict[str, Any]) -> None:
        self.program = after_others(program)
        self.device = device
        self._functions = functions

    elsewhere: Elsewhere | None = None

    @functools.cached_property
    def _workspace_plan(self) -> WorkspacePlan:
        return WorkspacePlan.of(self.program)

    def bind(
        self,
        sources: Sources,
        memory: Memory | None = None,
        after_step: Callable[[], object] | None = None,
        workspaces: Memory | None = None,
        kept: Kept | None = None,
    ) -> Call:
        """As `LoadedProgram.bind`; with `workspaces` those that are not needed at once share memory. Where a tool looks
        at a program's memory, each has its own."""
        if workspaces is not None:
            workspaces = PlannedMemory(self._workspace_plan, workspaces)
        part = rest_of(self.program, kept)
        return straighten(self.program, sources, memory, self.device, self._pack, after_step, workspaces, part=part)

    def keep(
        self, sources: Sources, memory: Memory | None = None, after_step: Callable[[], object] | None = None
    ) -> Kept:
        """As `LoadedProgram.keep`."""
        return kept_of(self.program, sources, self.device, self._pack, None, memory, after_step)

    def _pack(self, launch: candidate_pb2.Launch) -> LaunchCode:
        driver, launch_kernel = _driver(), _launch_function()
        packed = PackedArguments.of(launch.arguments)
        config = configure(launch)
        function = int(self._functions[launch.entry])
        address, pointers = int(config.getPtr()), packed.pointers
        stream_of = torch._C._cuda_getCurrentRawStream
        index = self.device.index if self.device.index is not None else torch.cuda.current_device()
        entry = launch.entry
        configured_for = 0

        # `packed` and `config` own what the addresses point at: as defaults they live as long as the function.
        def run(_alive: object = (packed, config, self)) -> None:
            nonlocal configured_for
            stream = stream_of(index)
            if stream != configured_for:
                config.hStream = driver.CUstream(stream)
                configured_for = stream
            code = launch_kernel(address, function, pointers, None)
            if code:
                raise _fault(code, f"launch of {entry}")

        return LaunchCode(run, packed.place)
