"""A captured call as a file in KernelBench's format: the calls as Python, and tensors of the kind that there were.

The one idea: a kernel depends on shapes, types and what the graph computes, hardly ever on a weight's values. So the
file says of what size and sign a tensor's values are, so roughly that training does not change it and equal layers have
equal files, and no weight leaves the process. Masks, tables of indices and what else is regular it holds as they are.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence

import torch

from orchestrator.exports.writing import library_steps
from orchestrator.live.calls import Call, twins
from orchestrator.tasks import intake
from warpsmith.errors import BadInput
from warpsmith.graphs import aten, dtypes
from warpsmith.program_steps import is_in_list, tensor_names
from warpsmith.v1 import candidate_pb2, graph_pb2, task_pb2

_EMBEDDED_BYTES = 1 << 16
"""Most that a tensor may take in the file, compressed; larger ones are drawn."""
_MOST_INTEGER = (1 << 62) - 1
_LOOKED_AT, _FEW = 4096, 16
"""Elements of a float tensor in which no more different values than these are those of a mask."""

_ONE_SIDED = 0.9
"""Share of a parameter's values of one sign from which on all have it."""

_HEAD = '''"""{kind}, written by Warpsmith from a live module: its calls, and tensors of the kind that it holds."""

import base64
import zlib

import torch


def _drawn(shape, strides, dtype, mean, spread, sign):
    values = torch.randn(shape) * spread + mean
    return _laid_out(values.abs() * sign if sign else values, strides, dtype)


def _within(shape, strides, dtype, least, most):
    return _laid_out(torch.rand(shape) * (most - least) + least, strides, dtype)


def _counted(shape, strides, dtype, lowest, highest):
    return _laid_out(torch.randint(lowest, highest + 1, shape), strides, dtype)


def _held(text, shape, strides, dtype):
    content = bytearray(zlib.decompress(base64.b85decode(text)))
    return _laid_out(torch.frombuffer(content, dtype=dtype).view(shape), strides, dtype)


def _laid_out(values, strides, dtype):
    seen = values[tuple(slice(0, None if stride else 1) for stride in strides)]
    return torch.empty_strided(seen.shape, strides, dtype=dtype).copy_(seen).expand(values.shape)


def _put(module, name, tensor, is_parameter, is_written):
    *path, last = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, torch.nn.Module())
        module = module._modules[part]
    if is_parameter:
        module.register_parameter(last, torch.nn.Parameter(tensor, tensor.is_floating_point() and not is_written))
    else:
        module.register_buffer(last, tensor)
'''


def task_of(
    call: Call, module: torch.nn.Module, target: str, precision: str, *, prepared: bool, gradients: bool = False
) -> task_pb2.Task:
    """The task that any orchestrator can be asked to optimise. `target`, `precision`: as the command's options.

    `gradients`: of a training step, with those of all parameters and example arguments that require them.

    Raises:
        BadInput: a tensor is of a kind that no file can make, or nothing requires a gradient.
    """
    kind = re.sub(r"\W", "_", type(module).__name__, flags=re.ASCII) or "Module"
    text = _text(kind, call, module)
    name = f"{kind}_{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    tensors = [leaf for leaf in call.leaves if isinstance(leaf, torch.Tensor)]
    if gradients:
        wanted = _differentiable(call, module)
        if not wanted:
            raise BadInput(f"{kind}: neither a parameter nor an example argument requires a gradient")
        made = intake.written(text, name=name, target=target, precision=precision, prepared=prepared, gradients=wanted)
        return intake.inspect(made)
    specs = {source.name: source.spec for source in call.graph.sources}
    specs |= {result.name: result.spec for node in call.graph.nodes for result in node.results}
    return intake.described(
        intake.written(text, name=name, target=target, precision=precision, prepared=prepared),
        map(dtypes.spec_of, tensors),
        (specs[name] for name in call.graph.outputs),
        ("" for _ in tensors),
    )


def _differentiable(call: Call, module: torch.nn.Module) -> list[str]:
    """Names, as the file has them, of what the call reads and requires a gradient."""
    names, tensors = _names(call.graph), [leaf for leaf in call.leaves if isinstance(leaf, torch.Tensor)]
    found = []
    for source in call.graph.sources:
        if source.origin == graph_pb2.ORIGIN_INPUT and tensors[source.input_index].requires_grad:
            found.append(names[source.name])
        if source.origin == graph_pb2.ORIGIN_PARAMETER and member(module, source.qualified_name).requires_grad:
            found.append(source.qualified_name)
    return found


def _text(kind: str, call: Call, module: torch.nn.Module) -> str:
    graph = call.graph
    names = _names(graph)
    used = {name for node in graph.nodes for name in tensor_names(aten.arguments_of(node))} | {*graph.outputs}
    written = {name for node in graph.nodes for name in node.mutates}
    inputs = {source.input_index: source.name for source in graph.sources if source.origin == graph_pb2.ORIGIN_INPUT}
    given = [names[inputs[number]] for number in sorted(inputs)]
    made, read = list[str](), list[str]()
    for source in graph.sources:
        is_parameter, is_written = source.origin == graph_pb2.ORIGIN_PARAMETER, source.name in written
        if source.name not in used or source.origin == graph_pb2.ORIGIN_INPUT:
            continue
        if source.origin == graph_pb2.ORIGIN_CONSTANT:
            constant = aten.constant(source, torch.device("cpu"))
            made.append(f"self.{names[source.name]} = {_embedded(constant, most_bytes=None)}")
            read.append(f"{names[source.name]} = self.{names[source.name]}.to(device)")
            continue
        value = _value(member(module, source.qualified_name), source.origin, is_written=is_written)
        made.append(f"_put(self, {source.qualified_name!r}, {value}, {is_parameter}, {is_written})")
        getter = "parameter" if is_parameter else "buffer"
        read.append(f"{names[source.name]} = self.get_{getter}({source.qualified_name!r})")
    steps = [line for node in graph.nodes for line in _statements(node, names)]
    tensors = (names[name] for name in graph.outputs)
    returned = "".join(f"{leaf or next(tensors)}, " for leaf in graph.output_leaves or [""] * len(graph.outputs))
    tensors_given = [leaf for leaf in call.leaves if isinstance(leaf, torch.Tensor)]
    first = twins(tensors_given)
    drawn = [
        f"x{place} = {_value(leaf, graph_pb2.ORIGIN_INPUT)}"
        for place, leaf in enumerate(tensors_given)
        if first[place] == place
    ]
    body = [f"device = {given[0]}.device", *read, *steps, f"return ({returned})"]
    return "\n".join([
        _HEAD.format(kind=kind),
        "",
        "class Model(torch.nn.Module):",
        "    def __init__(self):",
        *_indented(["super().__init__()", *made], 8),
        "",
        f"    def forward({', '.join(['self', *given])}):",
        *_indented(body, 8),
        "",
        "",
        "def get_inputs():",
        *_indented([*drawn, f"return [{', '.join(f'x{place}' for place in first)}]"], 4),
        "",
        "",
        "def get_init_inputs():",
        "    return []",
        "",
    ])  # fmt: skip


def member(module: torch.nn.Module, name: str) -> torch.Tensor:
    """A parameter, a buffer, or a tensor that is a plain attribute."""
    owner, _, last = name.rpartition(".")
    found: torch.Tensor = getattr(module.get_submodule(owner), last)
    return found


def _indented(lines: Sequence[str], spaces: int) -> list[str]:
    return [" " * spaces + line for line in lines]


def _names(graph: graph_pb2.Graph) -> dict[str, str]:
    """A Python name of its own for each tensor."""
    every = [source.name for source in graph.sources]
    every += [result.name for node in graph.nodes for result in node.results if result.name]
    return {name: f"t{number}_{re.sub(r'[^0-9A-Za-z_]', '_', name)}" for number, name in enumerate(every)}


def _statements(node: graph_pb2.Node, names: Mapping[str, str]) -> Iterator[str]:
    step = candidate_pb2.LibraryCall(target=node.target, args=node.args, kwargs=node.kwargs)
    step.results.extend(result.name for result in node.results)
    step.result_in_list = is_in_list(node)
    yield from library_steps.call(step, names)


# ---- tensors -------------------------------------------------------------------------------------------------


def _value(tensor: torch.Tensor, origin: graph_pb2.Origin.ValueType, *, is_written: bool = False) -> str:
    """The expression that makes a tensor of this kind."""
    tensor = tensor.detach()
    if tensor.is_complex():
        return (
            f"torch.view_as_complex({_value(torch.view_as_real(tensor.resolve_conj()), origin, is_written=is_written)})"
        )
    is_input = origin == graph_pb2.ORIGIN_INPUT
    if not tensor.is_floating_point():
        is_count = is_written and tensor.dim() == 0
        return f"torch.zeros((), dtype={tensor.dtype})" if is_count else _whole(tensor, is_input=is_input)
    if not tensor.numel():
        return _embedded(tensor)
    values = tensor.float()
    least, most = float(values.min()), float(values.max())
    is_scale = origin == graph_pb2.ORIGIN_STATE and tensor.dim() == 0 and not is_written
    is_mask = not (math.isfinite(least) and math.isfinite(most)) or (least < most and _are_few(values))
    if is_scale or (is_mask and origin != graph_pb2.ORIGIN_PARAMETER):
        return _embedded(tensor)
    if is_input and least >= -1.0 and most <= 1.0:  # as probabilities and cosines have to be
        return f"_within({_layout(tensor)}, {0.0 if least >= 0 else -1.0}, 1.0)"
    mean, spread, sign = _size(values, origin)
    return f"_drawn({_layout(tensor)}, {mean!r}, {spread!r}, {sign})"


def _size(values: torch.Tensor, origin: graph_pb2.Origin.ValueType) -> tuple[float, float, int]:
    """Mean, spread and sign to draw with: of inputs roughly what they are, of all else what a network begins with."""
    allowed = 0.0 if origin != graph_pb2.ORIGIN_PARAMETER else 1 - _ONE_SIDED
    below, above = float((values < 0).float().mean()), float((values > 0).float().mean())
    sign = 1 if below <= allowed < above else -1 if above <= allowed < below else 0
    if origin == graph_pb2.ORIGIN_INPUT:
        usual = float(values.square().mean().sqrt())
        return 0.0, 16.0 ** round(math.log(usual, 16)) if usual else 1.0, sign
    if values.dim() > 1:
        return 0.0, math.prod(values.shape[1:]) ** -0.5, sign
    return (1.0 if sign else 0.0), 0.1, sign


def _are_few(values: torch.Tensor) -> bool:
    """Whether there are few different ones, as far as the first of them say."""
    return values.numel() > _FEW and len(values.reshape(-1)[:_LOOKED_AT].unique()) <= _FEW  # type: ignore[no-untyped-call]


def _whole(tensor: torch.Tensor, *, is_input: bool) -> str:
    """Of integers and booleans: as they are where they are the module's, in order, or few of them negative, as what
    says "none" is; else drawn within their range."""
    wide = tensor if tensor.dtype == torch.bool else tensor.to(torch.int64)
    is_ordered = tensor.dim() > 0 and tensor.shape[-1] > 1 and not bool((wide[..., 1:] < wide[..., :-1]).any())
    if (
        not is_input
        or is_ordered
        or not tensor.numel()
        or tensor.dtype == torch.bool
        or int(wide.min()) < 0 <= int(wide.max())
    ):
        return _embedded(tensor)
    return _in_range(tensor)


def _in_range(tensor: torch.Tensor) -> str:
    wide = tensor.to(torch.int64)
    lowest, highest = int(wide.min()), min(int(wide.max()), _MOST_INTEGER)
    if lowest <= highest // 16:  # as of indices: roughly, so that other examples make the same file
        lowest, highest = 0, (1 << (highest + 1).bit_length() - 1) - 1
    return f"_counted({_layout(tensor)}, {lowest}, {highest})"


def _embedded(tensor: torch.Tensor, *, most_bytes: int | None = _EMBEDDED_BYTES) -> str:
    content = tensor.detach().cpu().contiguous()
    if not content.numel():
        return f"torch.empty_strided({tuple(tensor.shape)}, {tuple(tensor.stride())}, dtype={tensor.dtype})"
    packed = zlib.compress(content.reshape(-1).view(torch.uint8).numpy().tobytes(), 9)
    if most_bytes is None or len(packed) <= most_bytes:
        return f"_held({base64.b85encode(packed).decode()!r}, {_layout(tensor)})"
    return f"_drawn({_layout(tensor)}, 0.0, 1.0, 0)" if tensor.is_floating_point() else _in_range(tensor)


def _layout(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)}, {tuple(tensor.stride())}, {tensor.dtype}"
