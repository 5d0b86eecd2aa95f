"""ATen calls as data: which are allowed, how arguments are written, how a captured graph is computed.

The one idea: a call named by the contract is resolved once to torch's own overload and then called directly,
so a library step costs what eager costs. `interpret` with `widen` computes the truth: the same graph in
float64. It captures nothing and times nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch._ops import OpOverload

from warpsmith.errors import BadInput
from warpsmith.graphs import dtypes
from warpsmith.graphs.library.attention import STAND_INS
from warpsmith.graphs.library.scaled_products import scaled_product
from warpsmith.program_steps import BLOCK, tensor_names
from warpsmith.v1 import graph_pb2, tensor_pb2

Lookup = Callable[[str], torch.Tensor]
"""From a tensor's name to the tensor."""

Read = Callable[[graph_pb2.Node, str, torch.Tensor], torch.Tensor]
"""From a node, the name of a tensor that it reads and that tensor, to what it is given."""


def as_it_is(_node: graph_pb2.Node, _name: str, tensor: torch.Tensor) -> torch.Tensor:
    """What a node reads, unchanged."""
    return tensor


# Reads files, swaps or frees a tensor's memory, or depends on values in a way that no static graph can carry.
_REFUSED: Final = frozenset({
    "from_file", "set_", "set_data", "resize_", "resize_as_", "resize_output", "record_stream", "item",
    "_local_scalar_dense", "save", "_pin_memory", "pin_memory", "_resize_output_", "is_pinned", "data",
})  # fmt: skip

HIDDEN_WRITES: Final = {
    "batch_norm": ("training", ("running_mean", "running_var")),
    "native_batch_norm": ("training", ("running_mean", "running_var")),
    "instance_norm": ("use_input_stats", ("running_mean", "running_var")),
}
"""Arguments that the schema does not mark as written, by operation: name of the flag, names of what is written."""

# Bit patterns are reread as another type: widening the value would change them.
_BITWISE: Final = frozenset({"aten.view.dtype"})

# Random operations whose result is the input times a mask: the mask is drawn as eager draws it, then widened.
_MASKING: Final = frozenset({
    "aten.dropout.default", "aten.dropout_.default", "aten.feature_dropout.default",
    "aten.feature_dropout_.default",
})  # fmt: skip

# What is not written may hold the answer of an earlier call.
_UNWRITTEN: Final = ("empty", "new_empty", "_empty")

# The result is the argument itself.
IDENTITIES: Final = frozenset({"detach", "detach_", "lift_fresh", "alias", "requires_grad_"})

# Uninitialised memory becomes zeros: any content is a right answer, and this one repeats.
INITIALISED: Final = {
    "aten.empty.memory_format": "aten.zeros.default",
    "aten.empty_like.default": "aten.zeros_like.default",
    "aten.new_empty.default": "aten.new_zeros.default",
}

_SHORT: Final = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
_WIDENED: Final = {**dict.fromkeys(_SHORT, torch.float64), torch.complex64: torch.complex128}


_admitted: set[str] = set()


def admit(overload: OpOverload) -> None:
    """Lets this process call an operation outside ATen: for those that its own module calls, by its own capture."""
    _admitted.add(target_of(overload))


def is_outside(target: str) -> bool:
    """Whether an operation is none of PyTorch's own: a library step wherever it stands, about which nothing is known
    but its schema."""
    return not target.startswith("aten.")


def operation(target: str) -> str:
    """The name of an operation without its overload, such as "softmax"; "mine.softmax" for one outside ATen."""
    namespace, name, *_ = target.split(".")
    return name if namespace == "aten" else f"{namespace}.{name}"


def resolve(target: str) -> OpOverload:
    """The overload of a target such as "aten.softmax.int".

    Raises:
        BadInput: it is not an allowed ATen operation, nor one that was admitted to this process.
    """
    if target not in _admitted:
        return _of_aten(target)
    namespace, name, overload = target.split(".")
    # Looked up anew: a file that is loaded again defines its operations again, and the earlier ones are gone.
    found = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    assert isinstance(found, OpOverload)
    return found


@functools.cache
def _of_aten(target: str) -> OpOverload:
    namespace, _, rest = target.partition(".")
    name, _, overload = rest.partition(".")
    is_name = namespace == "aten" and name.isidentifier() and overload.isidentifier()
    if not is_name or name in _REFUSED or name.startswith(_UNWRITTEN):
        raise BadInput(f"operation {target} is not on the list of allowed operations")
    try:
        found = getattr(getattr(torch.ops.aten, name), overload)
    except AttributeError:
        raise BadInput(f"torch {torch.__version__} has no operation {target}") from None
    assert isinstance(found, OpOverload)
    return found


def is_allowed(target: str) -> bool:
    """Whether a library step may call the target."""
    try:
        resolve(target)
    except BadInput:
        return False
    return True


def target_of(overload: OpOverload) -> str:
    """The contract's name of an overload; the inverse of `resolve`."""
    return str(overload)


def encode(value: object, name_of: Callable[[Any], str | None]) -> tensor_pb2.Value:
    """An argument as contract data; `name_of` gives the name of a tensor, or None for anything else.

    Raises:
        BadInput: the argument has no form in the contract.
    """
    name = name_of(value)
    if name is not None:
        return tensor_pb2.Value(tensor=name)
    match value:
        case None:
            return tensor_pb2.Value(none=True)
        case bool():
            return tensor_pb2.Value(boolean=value)
        case int():
            return tensor_pb2.Value(integer=value)
        case float():
            return tensor_pb2.Value(real=value)
        case complex():
            return tensor_pb2.Value(complex=tensor_pb2.ComplexNumber(real=value.real, imaginary=value.imag))
        case str():
            return tensor_pb2.Value(text=value)
        case torch.dtype():
            return tensor_pb2.Value(dtype=dtypes.from_torch(value))
        case torch.device():
            return tensor_pb2.Value(device=value.type)
        case torch.memory_format() | torch.layout():
            return tensor_pb2.Value(torch_constant=str(value))
        case list() | tuple():
            values = [encode(element, name_of) for element in value]
            return tensor_pb2.Value(list=tensor_pb2.ValueList(values=values))
    raise BadInput(f"an operation takes a {type(value).__name__}, which a graph cannot carry")


def decode(value: tensor_pb2.Value, lookup: Lookup, device: torch.device | None = None) -> Any:
    """The argument itself; `device`, when given, stands in for every device that the data names."""
    match value.WhichOneof("kind"):
        case "tensor":
            return lookup(value.tensor)
        case "integer":
            return value.integer
        case "real":
            return value.real
        case "complex":
            return complex(value.complex.real, value.complex.imaginary)
        case "boolean":
            return value.boolean
        case "text":
            return value.text
        case "dtype":
            return dtypes.to_torch(value.dtype)
        case "device":
            return device if device is not None else torch.device(value.device)
        case "torch_constant":
            return _torch_constant(value.torch_constant)
        case "list":
            return [decode(element, lookup, device) for element in value.list.values]
    return None


def _torch_constant(text: str) -> Any:
    constant = getattr(torch, text.removeprefix("torch."), None)
    if not isinstance(constant, torch.memory_format | torch.layout):
        raise BadInput(f"{text} is not a memory format or layout")
    return constant


def arguments_of(node: graph_pb2.Node) -> list[tensor_pb2.Value]:
    """Positional, then keyword argument values."""
    return [*node.args, *(named.value for named in node.kwargs)]


# ---- calls -----------------------------------------------------------------------------------------------


class PreparedCall:
    """A call with everything but its tensors decoded, for steps that run many times.

    Call it with a lookup; it returns the results in order, None for one that the operation does not give.
    """

    def __init__(
        self,
        target: str,
        args: Sequence[tensor_pb2.Value],
        kwargs: Sequence[tensor_pb2.NamedValue],
        device: torch.device | None = None,
    ) -> None:
        self._overload = STAND_INS.get(target) or resolve(target)
        self._args = [_template(value, device) for value in args]
        self._kwargs = {named.name: _template(named.value, device) for named in kwargs}

    def __call__(self, lookup: Lookup) -> list[torch.Tensor | None]:
        args = [_filled(part, lookup) for part in self._args]
        kwargs = {name: _filled(part, lookup) for name, part in self._kwargs.items()}
        return flatten_results(self._overload(*args, **kwargs))


@dataclass(frozen=True)
class _Hole:
    """Where a tensor goes."""

    name: str


def _template(value: tensor_pb2.Value, device: torch.device | None) -> Any:
    if value.WhichOneof("kind") == "tensor":
        return _Hole(value.tensor)
    if value.WhichOneof("kind") == "list":
        return [_template(element, device) for element in value.list.values]
    return decode(value, _no_tensor, device)


def _no_tensor(name: str) -> torch.Tensor:
    raise AssertionError(f"tensor {name} inside a constant")


def _filled(part: Any, lookup: Lookup) -> Any:
    if type(part) is _Hole:
        return lookup(part.name)
    if type(part) is list:
        return [_filled(element, lookup) for element in part]
    return part


def call(
    target: str,
    args: Sequence[tensor_pb2.Value],
    kwargs: Sequence[tensor_pb2.NamedValue],
    lookup: Lookup,
    device: torch.device | None = None,
) -> list[torch.Tensor | None]:
    """Makes one call and returns its results in order, None for one that the operation does not give."""
    return PreparedCall(target, args, kwargs, device)(lookup)


def flatten_results(value: Any) -> list[torch.Tensor | None]:
    """What an overload returned, as a flat list."""
    if value is None:
        return []
    if isinstance(value, torch.Tensor):
        return [value]
    flat: list[torch.Tensor | None] = []
    for element in value:
        if isinstance(element, list | tuple):
            flat += flatten_results(element)
        else:
            flat.append(element if isinstance(element, torch.Tensor) else None)
    return flat


# ---- whole graphs ----------------------------------------------------------------------------------------


def interpret(
    graph: graph_pb2.Graph,
    sources: Mapping[str, torch.Tensor],
    widen: bool = False,
    look: Callable[[graph_pb2.Node, Mapping[str, torch.Tensor]], object] = lambda *_: None,
    read: Read = as_it_is,
) -> dict[str, torch.Tensor]:
    """Computes the graph; returns its outputs and every source that it writes, by name.

    `sources` holds every input, parameter and state by the name in the graph; constants are made from the
    graph. The tensors' device is where everything runs. Without `widen`, in-place operations write to
    `sources`, as eager would. With it every floating-point source and type argument becomes float64 and
    `sources` are left alone: the truth. Random operations draw from the default generator as eager does:
    seed it first. `look` is called ahead of each node, with the tensors by name that are there. `read` gives what a
    node reads in the place of a tensor, where all is widened.

    Raises:
        BadInput: a source is missing, or an operation is not allowed.
    """
    device = next((tensor.device for tensor in sources.values()), torch.device("cpu"))
    values: dict[str, torch.Tensor] = {}
    spec_types: dict[str, torch.dtype] = {}
    for source in graph.sources:
        tensor = constant(source, device) if source.origin == graph_pb2.ORIGIN_CONSTANT else None
        if tensor is None:
            if source.name not in sources:
                raise BadInput(f"source {source.name} of the graph has no tensor")
            tensor = sources[source.name]
        spec_types[source.name] = dtypes.to_torch(source.spec.dtype)  # random operations draw as in that type
        values[source.name] = widened_copy(tensor) if widen else tensor
    written = written_sources(graph)
    kept = {*graph.outputs, *written}
    last_use = _last_uses(graph)
    with torch.no_grad():
        for position, node in enumerate(graph.nodes):
            look(node, values)
            if widen:
                results = _call_widened(node, values, spec_types, device, read)
            else:
                results = call(node.target, node.args, node.kwargs, values.__getitem__, device)
            for result, tensor in zip(node.results, results, strict=False):
                if result.name and tensor is not None:
                    values[result.name] = tensor
                    spec_types[result.name] = dtypes.to_torch(result.spec.dtype)
            for name in last_use.get(position, ()):
                if name not in kept:
                    values.pop(name, None)
    return {name: values[name] for name in dict.fromkeys([*graph.outputs, *written])}


def constant(source: graph_pb2.Source, device: torch.device) -> torch.Tensor:
    """The tensor of a constant source, on a device, with the spec's strides."""
    spec = source.spec
    dtype = dtypes.to_torch(spec.dtype)
    flat = torch.frombuffer(bytearray(source.content), dtype=dtype) if source.content else torch.empty(0, dtype=dtype)
    shaped = flat.reshape(list(spec.shape))
    result = torch.empty_strided(list(spec.shape), list(spec.strides), dtype=dtype, device=device)
    return result.copy_(shaped)


def roots(graph: graph_pb2.Graph) -> dict[str, str]:
    """For every tensor of the graph, the one that owns its memory (itself when it is no view)."""
    owner = {source.name: source.name for source in graph.sources}
    for node in graph.nodes:
        for result in node.results:
            if result.name:
                owner[result.name] = owner[result.alias_of] if result.alias_of else result.name
    return owner


def written_sources(graph: graph_pb2.Graph) -> list[str]:
    """Sources that the graph writes in place, in order of declaration."""
    owner = roots(graph)
    written = {owner[name] for node in graph.nodes for name in node.mutates}
    return [source.name for source in graph.sources if source.name in written]


def _last_uses(graph: graph_pb2.Graph) -> dict[int, list[str]]:
    last: dict[str, int] = {}
    for position, node in enumerate(graph.nodes):
        for name in [*tensor_names(arguments_of(node)), *(r.name for r in node.results if r.name)]:
            last[name] = position
    by_position: dict[int, list[str]] = {}
    for name, position in last.items():
        by_position.setdefault(position, []).append(name)
    return by_position


def _call_widened(
    node: graph_pb2.Node,
    values: Mapping[str, torch.Tensor],
    spec_types: Mapping[str, torch.dtype],
    device: torch.device,
    read: Read,
) -> list[torch.Tensor | None]:
    overload = resolve(node.target)
    narrow = node.target in _BITWISE or node.random or (is_outside(node.target) and node.target != BLOCK)
    narrowed: dict[str, torch.Tensor] = {}

    def lookup(name: str) -> torch.Tensor:
        if not narrow:
            return read(node, name, values[name])
        if name not in narrowed:
            narrowed[name] = values[name].to(spec_types[name])
        return narrowed[name]

    if node.target in _MASKING and node.random:
        return [_masked(node, overload, values, spec_types)]
    args = [decode(value, lookup, device) for value in node.args]
    kwargs = {named.name: decode(named.value, lookup, device) for named in node.kwargs}
    if not narrow:
        args = [widened_type(argument) for argument in args]
        kwargs = {name: widened_type(argument) for name, argument in kwargs.items()}
        kwargs |= {"widen": True} if node.target == BLOCK else {}
    called = scaled_product if operation(node.target) == "_scaled_mm" else STAND_INS.get(node.target, overload)
    results = flatten_results(called(*args, **kwargs))
    if narrow:
        for name in node.mutates:  # the narrowed copy was written; carry it back
            values[name].copy_(narrowed[name])
        written = {id(narrowed[name]): values[name] for name in node.mutates}
        results = [written.get(id(result), result) for result in results]
    owned: list[torch.Tensor | None] = []
    for each, result in zip(results, node.results, strict=False):
        tensor = widened_result(each)
        if tensor is not None and not result.alias_of:
            tensor = _laid_out(tensor.clone() if _shares(tensor, node, values) else tensor, result.spec)
        owned.append(tensor)
    return owned


def _laid_out(tensor: torch.Tensor, spec: tensor_pb2.TensorSpec) -> torch.Tensor:
    """A result with its dimensions in memory as the graph has them: views of it are taken for that layout.

    An operation may lay out what it gives in float64 otherwise, as attention does on a GPU.
    """
    strides = tuple(spec.strides)
    if tensor.layout is not torch.strided or tensor.dim() != len(strides) or 0 in strides:
        return tensor
    if all(own == wanted or n < 2 for own, wanted, n in zip(tensor.stride(), strides, tensor.shape, strict=True)):
        return tensor
    if list(tensor.shape) == list(spec.shape):
        return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    order = sorted(range(tensor.dim()), key=lambda dimension: -strides[dimension])  # some rows of it
    back = [order.index(dimension) for dimension in range(tensor.dim())]
    return tensor.permute(order).contiguous().permute(back)


def _shares(tensor: torch.Tensor, node: graph_pb2.Node, values: Mapping[str, torch.Tensor]) -> bool:
    """Whether a result that has its own memory in the graph is a view here, because a cast became a no-op."""
    storage = tensor.untyped_storage().data_ptr()
    return any(values[name].untyped_storage().data_ptr() == storage for name in tensor_names(arguments_of(node)))


def _masked(
    node: graph_pb2.Node,
    overload: OpOverload,
    values: Mapping[str, torch.Tensor],
    spec_types: Mapping[str, torch.dtype],
) -> torch.Tensor:
    name = node.args[0].tensor
    value = values[name]
    probability = float(decode(node.args[1], values.__getitem__))
    ones = torch.ones_like(value, dtype=spec_types[name])
    kept = overload(ones, probability, True) != 0
    masked = torch.where(kept, value / (1.0 - probability) if probability < 1.0 else value * 0.0, value * 0.0)
    return values[name].copy_(masked) if node.mutates else masked


def widened(dtype: torch.dtype) -> torch.dtype:
    """What the truth computes in, in the place of a type."""
    return _WIDENED.get(dtype, dtype)


def widened_result(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A result in the type that the truth computes in."""
    return tensor.to(widened(tensor.dtype)) if tensor is not None else None


def widened_copy(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in a memory of its own and in its layout, floats in float64."""
    copy = torch.empty_strided(
        tensor.shape,
        tensor.stride(),
        dtype=widened(tensor.dtype),
        device=tensor.device,
    )
    if 0 in tensor.stride():  # an expanded tensor cannot be written element by element
        return tensor.to(copy.dtype)
    return copy.copy_(tensor)


def widened_type(argument: Any) -> Any:
    """An argument of a call, with a type that the truth computes in where it is a type."""
    return widened(argument) if isinstance(argument, torch.dtype) else argument
