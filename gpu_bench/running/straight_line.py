"""A program's call as straight-line Python, and what its kept steps have made.

The one idea: a program is data, so its timed call is compiled once into straight-line Python over local variables
(`a3 = f0(a1, -1)`; `k2[1] = a4.data_ptr(); launch2()`), with every argument that does not change already packed. Per
call nothing is looked up, so plan zero costs what eager costs. It loads no binaries (`host`, `cuda`), judges nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch._ops import OpOverload

from gpu_bench.running import bindings
from gpu_bench.running.arena import arena
from gpu_bench.running.elsewhere import Queue
from gpu_bench.running.executor import Call, Kept, Memory, ProgramFault, Sources, TorchMemory
from gpu_bench.running.host_scalars import host_scalars
from gpu_bench.values.keys import Key
from warpsmith import arguments as launch_arguments
from warpsmith import digest
from warpsmith.graphs import aten, dtypes
from warpsmith.program_steps import (
    BLOCK,
    NUMBERS,
    body,
    buffers_of,
    last_uses,
    names_made,
    relies_on_layout,
    tensor_names,
)
from warpsmith.v1 import candidate_pb2, graph_pb2, tensor_pb2, verdict_pb2


@dataclass(frozen=True)
class LaunchCode:
    """One launch, packed: `run()` launches; `place(i, address)` changes argument `i`, a pointer."""

    run: Callable[[], None]
    place: Callable[[int, int], None]


@dataclass(frozen=True)
class Part:
    """Some steps of a program."""

    positions: Sequence[int]
    given: Mapping[str, torch.Tensor]
    """What other steps have made, by buffer."""
    returned: Sequence[str]
    """Buffers that the call returns."""


PackLaunch = Callable[[candidate_pb2.Launch], LaunchCode]
"""An executor's part of `straighten`: packs the arguments of one launch."""


def source_tensors(program: candidate_pb2.Program, sources: Sources, device: torch.device) -> dict[str, torch.Tensor]:
    """Buffer name → tensor for every ROLE_SOURCE buffer; constants are made from the program."""
    held, host, on_host = sources.by_key(), torch.device("cpu"), host_scalars(program)
    found: dict[str, torch.Tensor] = {}
    for buffer in program.buffers:
        if buffer.role != candidate_pb2.ROLE_SOURCE:
            continue
        if buffer.source.origin == graph_pb2.ORIGIN_CONSTANT:
            found[buffer.name] = aten.constant(buffer.source, host if buffer.name in on_host else device)
            continue
        key = Key.of_source(buffer.source)
        if key is None or key not in held:
            raise ProgramFault(
                verdict_pb2.FAILURE_KIND_POLICY_REJECT, f"buffer {buffer.name} is {key or ''}, which the module lacks"
            )
        tensor, spec = held[key], buffer.spec
        matches = (
            tensor.dtype == dtypes.to_torch(spec.dtype)
            and list(tensor.shape) == list(spec.shape)
            and _same_layout(tensor, spec)
        )
        if not matches:
            raise ProgramFault(
                verdict_pb2.FAILURE_KIND_WRONG_SHAPE,
                f"buffer {buffer.name} expects {_spec_text(spec)}, but {key} is {_spec_text(dtypes.spec_of(tensor))}",
            )
        found[buffer.name] = tensor
    return found


def _same_layout(tensor: torch.Tensor, spec: tensor_pb2.TensorSpec) -> bool:
    # The stride of an extent of one is never used, and torch itself is not consistent about it.
    pairs = zip(tensor.shape, tensor.stride(), spec.strides, strict=True)
    return all(extent <= 1 or own == wanted for extent, own, wanted in pairs)


def _spec_text(spec: tensor_pb2.TensorSpec) -> str:
    name = str(dtypes.to_torch(spec.dtype)).removeprefix("torch.")
    return f"{name}{list(spec.shape)} with strides {list(spec.strides)}"


class _Remembering:
    """Memory that knows what it gave."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.given: dict[str, torch.Tensor] = {}

    def empty(self, name: str, spec: tensor_pb2.TensorSpec) -> torch.Tensor:
        """As `Memory.empty`."""
        return self.given.setdefault(name, self._memory.empty(name, spec))

    def zeros(self, name: str, spec: tensor_pb2.TensorSpec) -> torch.Tensor:
        """As `Memory.zeros`."""
        return self.given.setdefault(name, self._memory.zeros(name, spec))

    def adopt(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """As `Memory.adopt`."""
        return self._memory.adopt(name, tensor)


def kept_of(
    program: candidate_pb2.Program,
    sources: Sources,
    device: torch.device,
    pack: PackLaunch,
    queue: Queue | None = None,
    memory: Memory | None = None,
    after_step: Callable[[], object] | None = None,
) -> Kept:
    """Runs the prepared steps; what others read of theirs stays where it is."""
    prepared = [number for number, step in enumerate(program.steps) if step.prepared]
    wanted = {name for step in program.steps if not step.prepared for name in buffers_of(step)}
    results = [name for number in prepared for name in program.steps[number].library.results if name in wanted]
    workspaces = _Remembering(memory or TorchMemory(device))
    part = Part(prepared, {}, results)
    call = straighten(program, sources, memory, device, pack, after_step, workspaces, queue, part=part)
    is_foreign = memory is None and device.type == "cpu"  # where kernels cannot see it
    made = [arena().copy_of(tensor) if is_foreign else tensor for tensor in call()]

    def renew() -> None:
        for old, new in zip(made, call(), strict=True):
            if old.data_ptr() != new.data_ptr():  # not another look at a parameter
                row(old).copy_(row(new))

    return Kept({**workspaces.given, **dict(zip(results, made, strict=True))}, renew)


def row(tensor: torch.Tensor) -> torch.Tensor:
    """The memory from a tensor's first element to its last, gaps included; elements that share it are there once."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((extent - 1) * stride for extent, stride in pairs) if tensor.numel() else 0
    return tensor.detach().as_strided((span,), (1,))


def rest_of(program: candidate_pb2.Program, kept: Kept | None) -> Part | None:
    """The steps that are not prepared, where what those make is kept."""
    if kept is None:
        return None
    positions = [number for number, step in enumerate(program.steps) if not step.prepared]
    return Part(positions, kept.tensors, program.outputs)


class _Writer:
    """Collects the text of the call and the objects that it names."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.objects: dict[str, Any] = {}
        self.variables: dict[str, str] = {}

    def keep(self, prefix: str, value: object) -> str:
        name = f"{prefix}{len(self.objects)}"
        self.objects[name] = value
        return name

    def variable(self, buffer: str) -> str:
        return self.variables.setdefault(buffer, f"t{len(self.variables)}")


def straighten(
    program: candidate_pb2.Program,
    sources: Sources,
    memory: Memory | None,
    device: torch.device,
    pack: PackLaunch,
    after_step: Callable[[], object] | None = None,
    workspaces: Memory | None = None,
    queue: Queue | None = None,
    outputs: Memory | None = None,
    part: Part | None = None,
) -> Call:
    """Compiles the program, bound to `sources`, into one straight-line Python function.

    Every name in its text is made here from a counter; the program's own strings never become code. `outputs`: where
    outputs are allocated here, once, in place of in each call. `part`: the steps that it runs, by default all.
    """
    writer = _Writer()
    part = part or Part(range(len(program.steps)), {}, program.outputs)
    tensors = {**source_tensors(program, sources, device), **part.given}
    tensors |= _kept_tensors(program, part, workspaces or memory or TorchMemory(device), outputs)
    specs = {buffer.name: buffer for buffer in program.buffers}
    fixed = frozenset(tensors)
    for name, tensor in tensors.items():
        writer.objects[writer.variable(name)] = tensor
    unmade = {buffer.name for buffer in program.buffers if buffer.role == candidate_pb2.ROLE_OUTPUT} - fixed
    dying = last_uses(program)
    stamp = writer.keep("h", after_step) if after_step is not None else ""
    launches = [position for position in part.positions if program.steps[position].HasField("launch")]
    laid = frozenset(name for step in program.steps if relies_on_layout(step) for name in buffers_of(step))
    flush = f"{writer.keep('q', queue.flush)}()" if queue is not None and launches else ""
    is_queued = True  # perhaps by the call before, in a batch
    for position in part.positions:
        step = program.steps[position]
        # An output is allocated when it is first written and a result is dropped after its last use, as eager's
        # memory comes and goes: otherwise the call would find its memory colder than eager does.
        for name in sorted(unmade & set(buffers_of(step))):
            _write_allocation(writer, specs[name], memory, device)
            unmade.discard(name)
        if flush and is_queued and step.WhichOneof("kind") != "launch":
            writer.lines.append(flush)
        is_queued = step.WhichOneof("kind") == "launch"
        match step.WhichOneof("kind"):
            case "launch":
                _write_launch(writer, step.launch, fixed, tensors, pack, specs)
            case "library":
                _write_library(writer, step.library, memory, device, specs)
                _write_layouts(writer, step.library, laid, specs)
            case "memset":
                fill = writer.keep("f", _fill(specs[step.memset.buffer].spec, step.memset.byte))
                writer.lines.append(f"{fill}({writer.variable(step.memset.buffer)})")
        if stamp:
            writer.lines += [*filter(None, [flush]), f"{stamp}()"]
        writer.lines += [f"{writer.variable(name)} = None" for name in dying.get(position, ())]
    if queue is not None and launches:
        writer.lines.append(f"{writer.keep('q', queue.settle)}()")
    return _compiled(writer, part.returned)


def _compiled(writer: _Writer, outputs: Iterable[str]) -> Call:
    returned = "".join(f"{writer.variable(name)}, " for name in outputs)
    body = "\n    ".join([*writer.lines, f"return ({returned})"])
    # Defaults make every object a local variable of the function: the fastest look-up that Python has.
    defaults = ", ".join(f"{name}={name}" for name in writer.objects)
    scope: dict[str, Any] = dict(writer.objects)
    exec(_code(f"def call({defaults}):\n    {body}"), scope)
    # Taken out: a function in its own globals is a cycle, which would keep the tensors until a garbage collection.
    call: Call = scope.pop("call")
    return call


@functools.lru_cache(maxsize=32)
def _code(text: str) -> CodeType:
    """A program is bound several times in each case, to other objects by the same names."""
    return compile(text, "<program>", "exec")


def _kept_tensors(
    program: candidate_pb2.Program, part: Part, memory: Memory, outputs: Memory | None
) -> dict[str, torch.Tensor]:
    """Workspaces, and outputs where one memory is kept for them, by name: of all steps all, of some what they name."""
    made = {}
    named = {name for position in part.positions for name in buffers_of(program.steps[position])}
    is_whole = len(part.positions) == len(program.steps)
    for buffer in program.buffers:
        if buffer.name in part.given or not (is_whole or buffer.name in named):
            continue
        if buffer.role == candidate_pb2.ROLE_WORKSPACE:
            make = memory.zeros if buffer.zero_between_calls else memory.empty
            made[buffer.name] = make(buffer.name, buffer.spec)
        elif buffer.role == candidate_pb2.ROLE_OUTPUT and outputs is not None:
            made[buffer.name] = outputs.empty(buffer.name, buffer.spec)
    return made


def _write_allocation(
    writer: _Writer, buffer: candidate_pb2.Buffer, memory: Memory | None, device: torch.device
) -> None:
    variable = writer.variable(buffer.name)
    if memory is not None:
        make = writer.keep("m", memory.empty)
        writer.lines.append(f"{variable} = {make}({writer.keep('n', buffer.name)}, {writer.keep('s', buffer.spec)})")
        return
    if device.type == "cpu":
        make = writer.keep("m", arena().empty)
        writer.lines.append(f"{variable} = {make}({writer.keep('s', buffer.spec)})")
        return
    make = writer.keep("m", torch.empty_strided)
    dtype, place = writer.keep("d", dtypes.to_torch(buffer.spec.dtype)), writer.keep("d", device)
    shape, strides = list(map(int, buffer.spec.shape)), list(map(int, buffer.spec.strides))
    writer.lines.append(f"{variable} = {make}({shape}, {strides}, dtype={dtype}, device={place})")


def _write_launch(
    writer: _Writer,
    launch: candidate_pb2.Launch,
    fixed: frozenset[str],
    tensors: Mapping[str, torch.Tensor],
    pack: PackLaunch,
    buffers: Mapping[str, candidate_pb2.Buffer],
) -> None:
    code = pack(launch)
    place = ""
    for position, argument in enumerate(launch.arguments):
        name = launch_arguments.buffer_of(argument)
        if name is None:
            continue
        alignment = max(1, buffers[name].alignment_bytes)
        in_place = name in fixed and tensors[name].data_ptr() % alignment == 0
        if in_place:
            code.place(position, tensors[name].data_ptr())
            continue
        place = place or writer.keep("p", code.place)
        tensor = writer.variable(name)
        if alignment > 1 and buffers[name].role in (candidate_pb2.ROLE_SOURCE, candidate_pb2.ROLE_LIBRARY):
            if name in launch.writes:
                raise ProgramFault(
                    verdict_pb2.FAILURE_KIND_POLICY_REJECT,
                    f"{launch.entry} writes {name}, which the module may keep anywhere, and needs it at a multiple of "
                    f"{alignment} bytes",
                )
            # The copy is a variable of the call, so that it lives until the kernel has read it.
            copy, align = f"a{len(writer.lines)}", writer.keep("f", aligned_copy)
            writer.lines.append(f"{copy} = {align}({tensor}) if {tensor}.data_ptr() % {alignment} else {tensor}")
            tensor = copy
        writer.lines.append(f"{place}({position}, {tensor}.data_ptr())")
    writer.lines.append(f"{writer.keep('k', code.run)}()")


def aligned_copy(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in memory of its own, which begins where torch's allocator says; strides kept, overlaps included."""
    span = dtypes.element_span(dtypes.spec_of(tensor))
    return tensor.as_strided((span,), (1,)).clone().as_strided(tensor.shape, tensor.stride())


def _write_library(
    writer: _Writer,
    call: candidate_pb2.LibraryCall,
    memory: Memory | None,
    device: torch.device,
    buffers: Mapping[str, candidate_pb2.Buffer],
) -> None:
    names = [writer.variable(name) if name else "" for name in call.results]
    if call.target == BLOCK:
        _write_block(writer, call, names, device)
    else:
        overload = aten.resolve(call.target)
        invoke = writer.keep("f", _binding(overload, call, device, buffers))
        _write_call(writer, overload, invoke, _arguments_text(writer, overload, call, writer.variable, device), names)
    if memory is not None:
        adopt = writer.keep("m", memory.adopt)
        for name, variable in zip(call.results, names, strict=True):
            if name:
                writer.lines.append(f"{variable} = {adopt}({writer.keep('n', name)}, {variable})")


def _write_block(writer: _Writer, call: candidate_pb2.LibraryCall, names: Sequence[str], device: torch.device) -> None:
    """The calls that a block stands for, one by one, as an exported file has them."""
    graph = body(call.args[0].text)
    given = map(writer.variable, tensor_names(call.args))
    known = dict(zip((source.name for source in graph.sources), given, strict=True))
    own = {name: f"b{number}" for number, name in enumerate(names_made(graph))}
    known |= own
    for node in graph.nodes:
        results = [known[result.name] if result.name else "" for result in node.results]
        if node.target in NUMBERS:
            arguments = [_argument_text(writer, value, known.__getitem__, device) for value in node.args]
            writer.lines.append(f"{results[0]} = {NUMBERS[node.target].format(*arguments)}")
            continue
        overload = aten.resolve(node.target)
        arguments = _arguments_text(writer, overload, node, known.__getitem__, device)
        _write_call(writer, overload, writer.keep("f", overload), arguments, results)
    writer.lines += [f"{name} = {known[out]}" for name, out in zip(names, graph.outputs, strict=True) if name]
    writer.lines += [f"{name} = None" for name in own.values()]


def _arguments_text(
    writer: _Writer,
    overload: OpOverload,
    call: candidate_pb2.LibraryCall | graph_pb2.Node,
    variable: Callable[[str], str],
    device: torch.device,
) -> list[str]:
    arguments = [_argument_text(writer, value, variable, device) for value in call.args]
    known = {argument.name for argument in overload._schema.arguments}
    for item in call.kwargs:
        if item.name not in known:  # it is about to become code
            raise ProgramFault(
                verdict_pb2.FAILURE_KIND_POLICY_REJECT, f"{call.target} has no argument called {item.name!r}"
            )
        arguments.append(f"**{{{item.name!r}: {_argument_text(writer, item.value, variable, device)}}}")
    return arguments


def _write_call(
    writer: _Writer, overload: OpOverload, invoke: str, arguments: Sequence[str], names: Sequence[str]
) -> None:
    """A call, and its results under `names`, of which an empty one drops a result."""
    invoked = f"{invoke}({', '.join(arguments)})"
    if not any(names):
        writer.lines.append(invoked)
    elif len(overload._schema.returns) == 1 and str(overload._schema.returns[0].type) == "Tensor":
        writer.lines.append(f"{names[0]} = {invoked}")
    else:
        flatten = writer.keep("f", aten.flatten_results)
        # By position, not by unpacking, which Python allows up to 255 targets.
        writer.lines.append(f"results = {flatten}({invoked})")
        writer.lines += [f"{name} = results[{at}]" for at, name in enumerate(names) if name]
        writer.lines.append("results = None")


def _write_layouts(
    writer: _Writer,
    call: candidate_pb2.LibraryCall,
    laid: frozenset[str],
    buffers: Mapping[str, candidate_pb2.Buffer],
) -> None:
    """Results in the layout that later steps rely on (`relies_on_layout`)."""
    for name in filter(laid.__contains__, call.results):
        variable, copied = writer.variable(name), writer.keep("f", in_layout)
        strides = writer.keep("s", tuple(map(int, buffers[name].spec.strides)))
        writer.lines.append(f"if {variable}.stride() != {strides}: {variable} = {copied}({variable}, {strides})")


def in_layout(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """The tensor with these strides, copied where its own differ in a dimension of more than one element."""
    pairs = zip(tensor.shape, tensor.stride(), strides, strict=True)
    if tensor.numel() == 0 or all(extent == 1 or own == wanted for extent, own, wanted in pairs):
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _binding(
    overload: OpOverload,
    call: candidate_pb2.LibraryCall,
    device: torch.device,
    buffers: Mapping[str, candidate_pb2.Buffer],
) -> Callable[..., Any]:
    """The cheapest function that makes the call; of an operation of others itself, which may be defined again."""
    if aten.is_outside(call.target):
        return overload
    key = [call.SerializeToString(deterministic=True)]
    meta: dict[str, torch.Tensor] = {}
    for name in tensor_names([*call.args, *(item.value for item in call.kwargs)]):
        spec = buffers[name].spec
        key += [name.encode(), spec.SerializeToString(deterministic=True)]
        if name not in meta:
            meta[name] = torch.empty_strided(
                list(spec.shape), list(spec.strides), dtype=dtypes.to_torch(spec.dtype), device="meta"
            )
    args = [aten.decode(value, meta.__getitem__, torch.device("meta")) for value in call.args]
    kwargs = {item.name: aten.decode(item.value, meta.__getitem__, torch.device("meta")) for item in call.kwargs}
    return bindings.fastest(overload, args, kwargs, digest.digest(device.type, *key))


def _argument_text(
    writer: _Writer, value: tensor_pb2.Value, variable: Callable[[str], str], device: torch.device
) -> str:
    kind = value.WhichOneof("kind")
    if kind == "tensor":
        return variable(value.tensor)
    if kind == "list":
        return f"[{', '.join(_argument_text(writer, element, variable, device) for element in value.list.values)}]"
    return writer.keep("c", aten.decode(value, _no_tensor, device))


def _no_tensor(name: str) -> torch.Tensor:
    raise AssertionError(f"tensor {name} inside a constant")


def _fill(spec: tensor_pb2.TensorSpec, byte: int) -> Callable[[torch.Tensor], object]:
    """Fills the whole span of a dense tensor with one byte."""
    span = dtypes.element_span(spec)

    def fill(tensor: torch.Tensor) -> object:
        return tensor.as_strided((span,), (1,)).view(torch.uint8).fill_(byte)

    return fill
