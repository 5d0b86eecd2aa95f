"""What a program may ask for: checked before anything of it is loaded.

The one idea: a program is data from a stranger, so every name, size and extent in it is looked at once, here, and the
executors may then rely on it. It does not judge results and knows no device beyond the limits of its target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from warpsmith import arguments
from warpsmith.contract import structures
from warpsmith.errors import BadInput
from warpsmith.hardware import CARDS, TENSOR_MAP_BOX, TENSOR_MAP_DIMENSIONS
from warpsmith.program_steps import BLOCK, NUMBERS, calls_in, kept_steps
from warpsmith.v1 import artifact_pb2, candidate_pb2, graph_pb2, task_pb2, tensor_pb2

MOST_STEPS = 4096
MOST_BUFFERS = 16384
MOST_ARGUMENTS = 256
LARGEST_BUFFER = 1 << 40
"""Bytes."""
LARGEST_CONSTANT = 1 << 20
"""Bytes; as the contract says."""
LARGEST_ALIGNMENT = 4096
"""Bytes."""

# CUDA C++ Programming Guide, technical specifications of compute capabilities 8.0 to 12.0.
GRID_LIMITS = (2**31 - 1, 65535, 65535)
BLOCK_LIMITS = (1024, 1024, 64)
BLOCK_THREADS = 1024
CLUSTER_BLOCKS = 16
SHARED_BYTES = max(card.shared_bytes for card in CARDS.values())

# CUDA driver API, cuTensorMapEncodeTiled.
TENSOR_MAP_EXTENT = 2**32
TENSOR_MAP_STRIDE = 2**40
TENSOR_MAP_TYPES = frozenset({
    tensor_pb2.DTYPE_FLOAT64, tensor_pb2.DTYPE_FLOAT32, tensor_pb2.DTYPE_FLOAT16, tensor_pb2.DTYPE_BFLOAT16,
    tensor_pb2.DTYPE_INT64, tensor_pb2.DTYPE_INT32, tensor_pb2.DTYPE_UINT8,
})  # fmt: skip

_SIZES = {
    tensor_pb2.DTYPE_FLOAT64: 8, tensor_pb2.DTYPE_FLOAT32: 4, tensor_pb2.DTYPE_FLOAT16: 2,
    tensor_pb2.DTYPE_BFLOAT16: 2, tensor_pb2.DTYPE_INT64: 8, tensor_pb2.DTYPE_INT32: 4, tensor_pb2.DTYPE_INT16: 2,
    tensor_pb2.DTYPE_INT8: 1, tensor_pb2.DTYPE_UINT8: 1, tensor_pb2.DTYPE_BOOL: 1,
    tensor_pb2.DTYPE_COMPLEX64: 8, tensor_pb2.DTYPE_COMPLEX128: 16, tensor_pb2.DTYPE_FLOAT8_E4M3FN: 1,
    tensor_pb2.DTYPE_FLOAT8_E5M2: 1, tensor_pb2.DTYPE_UINT16: 2, tensor_pb2.DTYPE_UINT32: 4,
    tensor_pb2.DTYPE_UINT64: 8,
}  # fmt: skip


def objections(
    program: candidate_pb2.Program,
    artifact: artifact_pb2.Artifact,
    is_allowed: Callable[[str], bool],
    input_count: int | None = None,
) -> list[str]:
    """Why the program is not run, as sentences; empty when it may be.

    `is_allowed` says whether a library step may call an operation; `input_count` bounds the positions of inputs.
    """
    found = list(_of_whole(program, artifact))
    if not found:
        found = [reason for buffer in program.buffers for reason in _of_buffer(buffer, input_count)]
    return found or list(_of_steps(program, is_allowed))


def objections_to_kept(
    program: candidate_pb2.Program, is_function: Callable[[str], bool], *, prepared: bool
) -> list[str]:
    """Why what a program marks as made once is not; empty where it is. `prepared`: as its task is.

    Without that track only PyTorch's own calls on constants are, so no code of the program's runs that is not timed.
    `is_function` says whether an operation writes nothing and draws nothing.
    """
    marked = {number for number, step in enumerate(program.steps) if step.prepared}

    def may_be_kept(step: candidate_pb2.Step) -> bool:
        return step.prepared and (is_function(step.library.target) if step.HasField("library") else prepared)

    if stray := marked - kept_steps(program, may_be_kept, prepared=prepared):
        what = "an input" if prepared else "an input, a parameter or state, or is a kernel"
        return [
            f"step {min(stray)} is prepared and reads {what}, or is no function of what it reads, or another step "
            "writes what it reads or makes"
        ]
    if marked != {*range(len(marked))}:  # a judged call would run it between others, and a timed one before them
        return ["a prepared step stands behind one that is not"]
    return []


def _of_whole(program: candidate_pb2.Program, artifact: artifact_pb2.Artifact) -> Iterator[str]:
    names = [buffer.name for buffer in program.buffers]
    if program.target not in (task_pb2.TARGET_CPU, task_pb2.TARGET_CUDA):
        yield "the program names no target"
    if len(program.steps) > MOST_STEPS or len(names) > MOST_BUFFERS:
        yield f"the program has {len(program.steps)} steps and {len(names)} buffers, more than it may"
    if len(set(names)) != len(names):
        yield "two buffers have the same name"
    if artifact.program_digest and artifact.program_digest != program.digest:
        yield "the artifact was compiled from another program"
    if program.cuda_graph and program.target != task_pb2.TARGET_CUDA:
        yield "only a program for a GPU is launched as a CUDA graph"
    sources = {buffer.name for buffer in program.buffers if buffer.role == candidate_pb2.ROLE_SOURCE}
    if program.cuda_graph and (sources & {*program.outputs} or len({*program.outputs}) < len(program.outputs)):
        yield "an output of a CUDA graph is an input, or another output: its results are copies"
    if not program.outputs:
        yield "the program has no output"
    for name in program.outputs:
        if name not in names:
            yield f"output {name!r} is no buffer of the program"
    try:
        structures.require(program.output_tree, program.output_leaves, len(program.outputs))
    except BadInput as error:
        yield str(error)


def _of_buffer(buffer: candidate_pb2.Buffer, input_count: int | None) -> Iterator[str]:
    spec, name = buffer.spec, f"buffer {buffer.name!r}"
    if not buffer.name:
        yield "a buffer has no name"
    if buffer.role == candidate_pb2.ROLE_UNSPECIFIED or buffer.role not in candidate_pb2.Role.values():
        yield f"{name} has no role"
    if spec.dtype not in _SIZES:
        yield f"{name} has no element type"
    elif len(spec.shape) != len(spec.strides):
        yield f"{name} has {len(spec.shape)} extents but {len(spec.strides)} strides"
    elif any(extent < 0 for extent in spec.shape) or any(stride < 0 for stride in spec.strides):
        yield f"{name} has a negative extent or stride"
    elif span_bytes(spec) > LARGEST_BUFFER:
        yield f"{name} is larger than {LARGEST_BUFFER} bytes"
    elif buffer.role in (candidate_pb2.ROLE_OUTPUT, candidate_pb2.ROLE_WORKSPACE) and _overlaps_itself(spec):
        yield f"elements of {name} overlap in memory"
    alignment = buffer.alignment_bytes
    if alignment < 0 or alignment > LARGEST_ALIGNMENT or alignment & (alignment - 1):
        yield f"{name} asks for an alignment of {alignment} bytes"
    if buffer.role == candidate_pb2.ROLE_SOURCE:
        yield from _of_source(buffer, input_count)


def _of_source(buffer: candidate_pb2.Buffer, input_count: int | None) -> Iterator[str]:
    source, name = buffer.source, f"buffer {buffer.name!r}"
    match source.origin:
        case graph_pb2.ORIGIN_INPUT:
            if source.input_index < 0 or (input_count is not None and source.input_index >= input_count):
                yield f"{name} is input {source.input_index}, which the module does not have"
        case graph_pb2.ORIGIN_PARAMETER | graph_pb2.ORIGIN_STATE:
            if not source.qualified_name:
                yield f"{name} does not say which parameter or state it is"
        case graph_pb2.ORIGIN_CONSTANT:
            count = 1
            for extent in buffer.spec.shape:
                count *= extent
            expected = count * _SIZES.get(buffer.spec.dtype, 0)
            if len(source.content) != expected or expected > LARGEST_CONSTANT:
                yield f"{name} is a constant of {len(source.content)} bytes instead of {expected}"
            if source.spec != buffer.spec:
                yield f"{name} has another type or layout than its constant"
        case _:
            yield f"{name} does not say where it comes from"


def _of_steps(program: candidate_pb2.Program, is_allowed: Callable[[str], bool]) -> Iterator[str]:
    roles = {buffer.name: buffer.role for buffer in program.buffers}
    ready = {name for name, role in roles.items() if role != candidate_pb2.ROLE_LIBRARY}
    written = set(ready) - {name for name, role in roles.items() if role == candidate_pb2.ROLE_OUTPUT}
    for number, step in enumerate(program.steps):
        where = f"step {number}"
        match step.WhichOneof("kind"):
            case "launch":
                yield from _of_launch(program, step.launch, where, ready)
                written |= {*step.launch.writes}
            case "library":
                yield from _of_call(step.library, where, roles, ready, is_allowed)
                ready |= {*step.library.results}
                written |= {*step.library.results}
            case "memset":
                if roles.get(step.memset.buffer) not in (candidate_pb2.ROLE_WORKSPACE, candidate_pb2.ROLE_OUTPUT):
                    yield f"{where} fills {step.memset.buffer!r}, which is no workspace or output"
                if not 0 <= step.memset.byte <= 255:
                    yield f"{where} fills with {step.memset.byte}, which is no byte"
                written.add(step.memset.buffer)
            case _:
                yield f"{where} does nothing"
    for name in program.outputs:
        if name not in written:
            yield f"output {name!r} is never written"
        if roles.get(name) == candidate_pb2.ROLE_WORKSPACE:
            yield f"output {name!r} is a workspace, which is allocated once and not in every call"


def _of_launch(
    program: candidate_pb2.Program, launch: candidate_pb2.Launch, where: str, ready: Iterable[str]
) -> Iterator[str]:
    ready = set(ready)
    if not program.sources:
        yield f"{where} launches {launch.entry!r}, but the program has no source"
    if not launch.entry.isidentifier() or not launch.entry.isascii():
        yield f"{where} launches {launch.entry!r}, which is no name of a function"
    if len(launch.arguments) > MOST_ARGUMENTS:
        yield f"{where} passes {len(launch.arguments)} arguments"
    named = set()
    for argument in launch.arguments:
        kind = argument.WhichOneof("kind")
        if kind is None:
            yield f"{where} passes an argument that is not set"
        name = arguments.buffer_of(argument)
        if name is not None:
            named.add(name)
            if name not in ready:
                yield f"{where} reads buffer {name!r}, which is missing or not yet computed"
            elif kind == "tensor_map":
                yield from _of_tensor_map(program, argument.tensor_map, where)
    for name in launch.writes:
        if name not in named:
            yield f"{where} writes {name!r}, which is not among its arguments"
    if program.target == task_pb2.TARGET_CUDA:
        yield from _of_extents(launch, where)


def _of_tensor_map(program: candidate_pb2.Program, seen: candidate_pb2.TensorMap, where: str) -> Iterator[str]:
    """A map must be one that the driver encodes, and must end inside of its buffer."""
    spec = next(buffer.spec for buffer in program.buffers if buffer.name == seen.buffer)
    what, rank, size = f"{where}: the tensor map of {seen.buffer!r}", len(seen.extents), _SIZES.get(seen.dtype, 0)
    if program.target != task_pb2.TARGET_CUDA:
        yield f"{what} is for the cuda target only"
    elif not 1 <= rank <= TENSOR_MAP_DIMENSIONS or len(seen.box) != rank or len(seen.byte_strides) != rank - 1:
        yield f"{what} has {rank} extents, {len(seen.byte_strides)} strides and a box of {len(seen.box)}"
    elif seen.dtype not in TENSOR_MAP_TYPES or size != _SIZES[spec.dtype]:
        yield f"{what} has another element type than its buffer, or one that bulk copies do not know"
    elif seen.rounds_to_tf32 and seen.dtype != tensor_pb2.DTYPE_FLOAT32:
        yield f"{what} rounds to TF32 what are no floats"
    elif any(not 1 <= extent <= TENSOR_MAP_EXTENT for extent in seen.extents):
        yield f"{what} has extents {list(seen.extents)}"
    elif any(not 0 < stride < TENSOR_MAP_STRIDE or stride % 16 for stride in seen.byte_strides):
        yield f"{what} has strides of {list(seen.byte_strides)} bytes, which must be positive multiples of 16"
    elif any(not 1 <= extent <= TENSOR_MAP_BOX for extent in seen.box) or seen.box[0] * size % 16:
        yield f"{what} has a box of {list(seen.box)}"
    elif seen.swizzle_bytes not in (0, 32, 64, 128) or 0 < seen.swizzle_bytes < seen.box[0] * size:
        yield f"{what} has a pattern of {seen.swizzle_bytes} bytes for rows of {seen.box[0] * size}"
    else:
        reach = sum((e - 1) * s for e, s in zip(seen.extents, [size, *seen.byte_strides], strict=True)) + size
        if reach > span_bytes(spec):
            yield f"{what} reaches {reach} bytes far in a buffer of {span_bytes(spec)}"


def _of_extents(launch: candidate_pb2.Launch, where: str) -> Iterator[str]:
    grid, block = _triple(launch.grid), _triple(launch.block)
    cluster = tuple(max(1, extent) for extent in _triple(launch.cluster))
    if any(not 1 <= extent <= limit for extent, limit in zip(grid, GRID_LIMITS, strict=True)):
        yield f"{where} has a grid of {grid}; the limits are {GRID_LIMITS}"
    threads = block[0] * block[1] * block[2]
    if any(not 1 <= extent <= limit for extent, limit in zip(block, BLOCK_LIMITS, strict=True)):
        yield f"{where} has a block of {block}; the limits are {BLOCK_LIMITS}"
    elif threads > BLOCK_THREADS:
        yield f"{where} has {threads} threads in a block; the limit is {BLOCK_THREADS}"
    if min(_triple(launch.cluster)) < 0 or cluster[0] * cluster[1] * cluster[2] > CLUSTER_BLOCKS:
        yield f"{where} has a cluster of {cluster}; the limit is {CLUSTER_BLOCKS} blocks"
    elif any(extent % size for extent, size in zip(grid, cluster, strict=True)):
        yield f"{where} has a grid of {grid}, which is no multiple of its cluster {cluster}"
    if not 0 <= launch.shared_bytes <= SHARED_BYTES:
        yield f"{where} asks for {launch.shared_bytes} bytes of shared memory; the limit is {SHARED_BYTES}"


def _of_call(
    call: candidate_pb2.LibraryCall,
    where: str,
    roles: dict[str, candidate_pb2.Role.ValueType],
    ready: set[str],
    is_allowed: Callable[[str], bool],
) -> Iterator[str]:
    for name in _tensors([*call.args, *(item.value for item in call.kwargs)]):
        if name not in ready:
            yield f"{where} reads buffer {name!r}, which is missing or not yet computed"
    try:
        for inner in calls_in(call):
            is_number = call.target == BLOCK and inner.target in NUMBERS
            if not (is_number or is_allowed(inner.target)):
                yield f"{where} calls {inner.target}, which is not on the list of allowed operations"
            for item in inner.kwargs:
                if not item.name.isidentifier() or not item.name.isascii():
                    yield f"{where} passes {item.name[:40]!r}, which is no name of an argument"
            for constant in structures.torch_constants([*inner.args, *(item.value for item in inner.kwargs)]):
                if constant not in structures.TORCH_CONSTANTS:
                    yield f"{where} passes {constant[:40]!r}, which is no memory format or layout"
    except BadInput as error:
        yield f"{where}: {error}"
    for name in filter(None, call.results):
        if roles.get(name) != candidate_pb2.ROLE_LIBRARY:
            yield f"{where} returns {name!r}, which is no library buffer"


def _tensors(values: Iterable[tensor_pb2.Value]) -> Iterator[str]:
    for value in values:
        if value.WhichOneof("kind") == "tensor":
            yield value.tensor
        elif value.WhichOneof("kind") == "list":
            yield from _tensors(value.list.values)


def _triple(extent: candidate_pb2.Extent3) -> tuple[int, int, int]:
    return extent.x, extent.y, extent.z


def span_bytes(spec: tensor_pb2.TensorSpec) -> int:
    """Bytes from a tensor's first element to its last, both included; 0 when it is empty."""
    if 0 in spec.shape:
        return 0
    pairs = zip(spec.shape, spec.strides, strict=True)
    return (1 + sum((extent - 1) * stride for extent, stride in pairs)) * _SIZES[spec.dtype]


def _overlaps_itself(spec: tensor_pb2.TensorSpec) -> bool:
    """Whether two indices may name one element: strides in falling order must each step over all smaller ones."""
    reach = 1
    for stride, extent in sorted(zip(spec.strides, spec.shape, strict=True)):
        if extent <= 1:
            continue
        if stride < reach:
            return True
        reach += (extent - 1) * stride
    return False
