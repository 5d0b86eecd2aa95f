"""A module's forward as data: torch.export's calls, with composite operations whole and memory made explicit.

The one idea: torch.export says which calls are made; running those calls once more on fake tensors says what
no schema does: which results share memory with what, and with which strides. Nothing is decomposed or
changed into a functional form, and the module keeps the train mode that it came in.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

import torch
from torch._C._functorch import _vmap_decrement_nesting, is_functorch_wrapped_tensor, maybe_current_level
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from warpsmith import digest
from warpsmith.graphs import (
    aten,
    autocast,
    checks,
    dtypes,
    output_trees,
    refusals,
    result_specs,
    schemas,
    training_step,
    value_shapes,
)
from warpsmith.graphs.refusals import CaptureRefused, telling_where
from warpsmith.v1 import graph_pb2

MAX_CONSTANT_BYTES: Final = 1 << 20
"""Largest constant tensor that a graph carries by value; larger ones are named, as buffers of the module."""

# What a number that is a tensor is converted by.
_OF_TENSORS: Final[dict[Any, Callable[..., Any]]] = {
    torch.sym_float: lambda number: number.to(torch.float64),
    torch.sym_int: lambda number: number.to(torch.int64),
    torch.sym_not: torch.logical_not,
}

_VMAP: Final = "torch._functorch.predispatch"
"""Where the calls are that a traced `torch.vmap` begins and ends with."""

# What users write to get a higher-order operation.
_HIGHER: Final = {"cond": "torch.cond on a value", "while_loop": "a while_loop on values"}

_ORIGINS: Final = {
    InputKind.USER_INPUT: graph_pb2.ORIGIN_INPUT,
    InputKind.PARAMETER: graph_pb2.ORIGIN_PARAMETER,
    InputKind.BUFFER: graph_pb2.ORIGIN_STATE,
    InputKind.CONSTANT_TENSOR: graph_pb2.ORIGIN_CONSTANT,
}


def rehearse() -> None:
    """Captures a module of no meaning: the first capture of a process imports for a second."""
    capture(torch.nn.ReLU(), (torch.zeros(2),))


def capture(module: torch.nn.Module, args: Sequence[Any], device_type: str = "cpu") -> graph_pb2.Graph:
    """The graph of `module(*args)` with static shapes; nothing is computed.

    `args` may nest tuples, lists and dicts; its tensors are real or fake (made under one FakeTensorMode), on
    the CPU. Arguments that are no tensors become constants of the graph. `device_type`: where the module is to run,
    "cpu" or "cuda", whose rules hold under `torch.autocast`. Operations outside ATen that the module calls may be
    called in this process from then on (`aten.admit`).

    Raises:
        BadInput: the forward raises, does not export, or uses what a graph cannot carry; the message says
        which.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.export's advice on attributes is not for our users
        members = _member_names(module)
        try:
            with autocast.traced_for(device_type), result_specs.known(device_type):
                step = training_step.step_of(module)
                traced = training_step.traced(module, args, device_type) if step is not None else module
                exported = torch.export.export(traced, tuple(args), strict=False)
        except Exception as error:
            raise refusals.of_export(module, args, error) from error
        if made := _member_names(module) - members:
            raise CaptureRefused(
                f"forward registers {min(made)} in its first call, which torch.export does not follow: register it in "
                "the constructor, or keep it as a plain attribute"
            )
        with result_specs.known(device_type):
            graph = _recorded(exported, device_type)
        if step is not None:
            _divide(graph, step, module)
    graph.digest = digest.of_graph(graph)
    return graph


def _recorded(exported: torch.export.ExportedProgram, device_type: str) -> graph_pb2.Graph:
    """The graph of an exported program; calls that have to know a number beforehand are found by trying."""
    given_numbers = set[torch.fx.Node]()
    while True:
        try:
            return _Recorder(exported, device_type, given_numbers).record()
        except _NumberNeeded as needed:
            if needed.node in given_numbers:
                with telling_where(needed.node):
                    raise CaptureRefused(
                        f"forward takes a number out of a tensor (item, tolist) and gives it to {needed.node.target}, "
                        "which needs to know it beforehand: compute with the tensor, or pass the number as an argument"
                    ) from needed
            given_numbers.add(needed.node)
        finally:
            while maybe_current_level() is not None:  # what was refused inside a vmap
                _vmap_decrement_nesting()


def _divide(graph: graph_pb2.Graph, step: training_step.Step, module: torch.nn.Module) -> None:
    """Says of a training step's graph what is given to the forward and what it gives.

    A parameter that has several names is called by its first, as its gradient is.
    """
    first = {id(parameter): name for name, parameter in module.named_parameters()}
    names = {name: first[id(each)] for name, each in module.named_parameters(remove_duplicate=False)}
    for source in graph.sources:
        source.qualified_name = names.get(source.qualified_name, source.qualified_name)
    count = len(step.inputs) + len(step.parameters)
    graph.forward_outputs = len(graph.outputs) - count
    inputs = [source for source in graph.sources if source.origin == graph_pb2.ORIGIN_INPUT]
    graph.gradients.extend(source.name for source in inputs[len(inputs) - len(step.outputs) :])


class _NumberNeeded(Exception):
    """A call is given a number out of a tensor, and cannot be given a tensor instead."""

    def __init__(self, node: torch.fx.Node) -> None:
        super().__init__(str(node))
        self.node = node


def _member_names(module: torch.nn.Module) -> set[str]:
    return {name for name, _ in (*module.named_parameters(), *module.named_buffers())}


class _Recorder:
    """Walks an exported program once, running every call on fake tensors and writing down what it saw."""

    def __init__(
        self, exported: torch.export.ExportedProgram, device_type: str, given_numbers: Collection[torch.fx.Node]
    ) -> None:
        """`given_numbers`: calls that need numbers out of tensors as numbers."""
        self._exported = exported
        self._given_numbers = given_numbers
        self._device_type = device_type
        self._region: autocast.Region | None = None
        self._graph = graph_pb2.Graph()
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._names: dict[int, str] = {}  # id of a fake tensor → its name
        self._alive: list[Any] = []  # keeps ids from being used again
        self._owners: dict[int, str] = {}  # storage → the latest tensor name on it
        self._used: set[str] = set()
        self._numbers: set[int] = set()
        """Ids of tensors that stand for numbers which the forward takes out of tensors."""
        # Read before the fake mode begins, which would make their values unreachable.
        self._contents = {
            declared.target: _content(declared.target, exported.constants[declared.target])
            for declared in exported.graph_signature.input_specs
            if declared.kind is InputKind.CONSTANT_TENSOR and declared.target is not None
        }

    def record(self) -> graph_pb2.Graph:
        environment: dict[torch.fx.Node, Any] = {}
        with self._mode, torch.no_grad():
            self._declare_sources(environment)
            outputs = self._run(self._exported.graph_module, environment)
        self._finish(outputs)
        _drop_needless_copies(self._graph)
        return self._graph

    def _declare_sources(self, environment: dict[torch.fx.Node, Any]) -> None:
        placeholders = [node for node in self._exported.graph.nodes if node.op == "placeholder"]
        input_index = 0
        for node, declared in zip(placeholders, self._exported.graph_signature.input_specs, strict=True):
            value = node.meta.get("val")
            if not isinstance(value, torch.Tensor):
                if declared.kind not in _ORIGINS:
                    raise CaptureRefused(f"the module holds a {declared.kind.name.lower()}, which is not supported")
                environment[node] = getattr(declared.arg, "value", value)
                continue
            source = graph_pb2.Source(name=self._unique(node.name), origin=_ORIGINS[declared.kind])
            if source.origin == graph_pb2.ORIGIN_INPUT:
                source.input_index = input_index
                input_index += 1
            elif source.origin == graph_pb2.ORIGIN_CONSTANT:
                source.content = self._contents[declared.target]
            else:
                source.qualified_name = declared.target
            fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
            source.spec.CopyFrom(dtypes.spec_of(fake))
            if source.origin == graph_pb2.ORIGIN_INPUT:
                dtypes.require_comparable(value.dtype, "an input")
            self._graph.sources.append(source)
            self._know(fake, source.name)
            environment[node] = fake

    def _run(self, module: torch.fx.GraphModule, environment: dict[torch.fx.Node, Any]) -> Any:
        """Runs the calls of a (sub)module; returns what its output node holds."""
        for node in value_shapes.in_order(module.graph, self._given_numbers):
            if isinstance(node, value_shapes.Block):
                self._record_block(node, environment)
                continue
            match node.op:
                case "get_attr":
                    environment[node] = operator.attrgetter(str(node.target))(module)
                case "call_function" if checks.is_check(node) or checks.is_only_checked(node):
                    continue
                case "call_function":
                    args, kwargs = pytree.tree_map_only(
                        torch.fx.Node, environment.__getitem__, (tuple(node.args), dict(node.kwargs))
                    )
                    with telling_where(node):
                        environment[node] = self._made(node, args, kwargs)
                case "output":
                    return pytree.tree_map_only(torch.fx.Node, environment.__getitem__, node.args[0])
        raise AssertionError("a graph without an output")

    def _made(self, node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
        try:
            return self._call(node, args, kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            raise CaptureRefused(f"forward calls {error.func}, of whose result the shape depends on values") from error

    def _call(self, node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
        target = node.target
        if not isinstance(target, OpOverload):
            return self._call_other(node, args, kwargs)
        name = target._schema.name.removeprefix("aten::")
        if any(map(is_functorch_wrapped_tensor, _tensors((args, kwargs)))):
            return self._batched(target, args, kwargs)
        if target.namespace != "aten":
            aten.admit(target)
        elif name in aten.IDENTITIES and args:
            return args[0]
        elif name == "item":  # the number stays a tensor of no dimensions; it is as it was whatever is written later
            copy = self._record(node.name, torch.ops.aten.clone.default, args, {})
            self._numbers.add(id(copy))
            return copy
        if self._has_number((args, kwargs)):
            return self._with_numbers(node, target.overloadpacket, args, kwargs)
        if each := schemas.of_each(target, args, kwargs):
            with _Batches(self._record):
                return [packet(*given, **named) for packet, given, named in each]
        if self._region is not None:
            args, kwargs = self._region.applied(target, args, kwargs, self._cast)
        return self._record(node.name, target, schemas.with_cudnn(target, args), kwargs)

    def _cast(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        name = f"{self._name_of(tensor)}_{str(dtype).removeprefix('torch.')}"
        cast: torch.Tensor = self._record(name, torch.ops.aten.to.dtype, (tensor, dtype), {})
        return cast

    def _call_other(self, node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
        """Plain Python of the graph: picking results, arithmetic on sizes, and blocks under set_grad_enabled or
        autocast."""
        name = getattr(node.target, "__name__", str(node.target))
        if name == "wrap_with_set_grad_enabled":
            _, body, *operands = args
            return self._run_block(body, operands, self._region)
        if name == "wrap_with_autocast":
            kind, dtype, is_enabled, _, body, *operands = args
            region = autocast.region_of(kind, dtype, is_enabled, self._region, self._device_type)
            return self._run_block(body, operands, region)
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            raise CaptureRefused(f"forward uses {_HIGHER.get(name, name)}, which is not supported")
        function: Callable[..., Any] = node.target  # type: ignore[assignment]
        if function.__module__ == _VMAP:
            return self._batched(function, args, kwargs)
        if self._has_number((args, kwargs)):
            result = self._with_numbers(node, _OF_TENSORS.get(function, function), args, kwargs)
            self._numbers.add(id(result))
            return result
        return function(*args, **kwargs)

    def _has_number(self, values: Any) -> bool:
        return any(id(leaf) in self._numbers for leaf in _tensors(values))

    def _with_numbers(self, node: torch.fx.Node, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Makes a call that is given numbers out of tensors, as calls on tensors: those are recorded."""
        try:
            return self._batched(function, args, kwargs)
        except (TypeError, RuntimeError) as error:
            raise _NumberNeeded(node) from error

    def _batched(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Makes a call under vmap, which turns it into calls on whole batches: those are recorded."""
        with _Batches(self._record):
            return function(*args, **kwargs)

    def _run_block(self, body: torch.fx.GraphModule, operands: Sequence[Any], region: autocast.Region | None) -> Any:
        inner = [n for n in body.graph.nodes if n.op == "placeholder"]
        outer, self._region = self._region, region
        try:
            return self._run(body, dict(zip(inner, operands, strict=True)))
        finally:
            self._region = outer

    def _record_block(self, block: value_shapes.Block, environment: dict[torch.fx.Node, Any]) -> None:
        """Writes the calls of a block down as one."""
        if self._region is not None:
            raise CaptureRefused("forward has shapes that depend on values under torch.autocast: leave one of them out")
        written = value_shapes.written(block, environment, self._name_of)
        node, made = written.as_call(self._unique)
        fakes = {self._names[id(tensor)]: tensor for tensor in self._alive} | made
        for result, tensor in zip(node.results, made.values(), strict=True):
            self._know(tensor, result.name)
        self._graph.nodes.append(node)
        for inner, names in written.results.items():
            environment[inner] = pytree.tree_map(fakes.__getitem__, names)

    def _record(self, name: str, overload: OpOverload, args: Any, kwargs: Any) -> Any:
        target = aten.target_of(overload)
        target = aten.INITIALISED.get(target, target)
        if not aten.is_allowed(target):
            raise CaptureRefused(f"forward calls {target}, which is not an allowed operation")
        node = graph_pb2.Node(name=self._unique(name), target=target, random=schemas.is_random(overload, args, kwargs))
        node.args.extend(aten.encode(value, self._name_of) for value in args)
        for keyword, value in kwargs.items():
            named = node.kwargs.add(name=keyword)
            named.value.CopyFrom(aten.encode(value, self._name_of))
        node.mutates.extend(self._names[id(leaf)] for leaf in _tensors(schemas.written(overload, args, kwargs)))
        call: Callable[..., Any] = result_specs.SHAPES.get(overload, overload)
        try:
            returned = call(*args, **kwargs)
        except DataDependentOutputException:  # istft looks at its window; what export uses does not
            with enable_python_dispatcher():
                returned = call(*args, **kwargs)
        flat = aten.flatten_results(returned)
        given = {_storage(t): self._names[id(t)] for t in reversed(_tensors((args, kwargs)))}
        single = isinstance(returned, torch.Tensor)
        for position, tensor in enumerate(flat):
            result = node.results.add()
            if tensor is None:
                continue
            result.name = node.name if single else self._unique(f"{node.name}_{position}")
            result.spec.CopyFrom(dtypes.spec_of(tensor))
            storage = _storage(tensor)
            result.alias_of = given.get(storage, self._owners.get(storage, ""))
        for tensor, result in zip(flat, node.results, strict=True):
            if tensor is not None:
                self._know(tensor, result.name)
        self._graph.nodes.append(node)
        return returned

    def _finish(self, outputs: Any) -> None:
        # The graph's output holds buffer write-backs of functional exports first; ours has user outputs only.
        flat = pytree.tree_leaves(outputs)
        for value in flat:
            if not isinstance(value, torch.Tensor):
                self._graph.output_leaves.append(output_trees.literal(value))
                continue
            name = self._name_of(value)
            assert name is not None
            dtypes.require_comparable(value.dtype, "an output")
            self._graph.outputs.append(name)
            self._graph.output_leaves.append("")
        if not self._graph.outputs:
            kind = type(flat[0] if flat else outputs).__name__
            raise CaptureRefused(f"forward returns no tensor: it returns a {kind}")
        if not any(self._graph.output_leaves):
            del self._graph.output_leaves[:]
        spec = self._exported.call_spec.out_spec
        assert spec is not None
        self._graph.output_tree = output_trees.text(spec)

    def _know(self, tensor: torch.Tensor, name: str) -> None:
        self._names[id(tensor)] = name
        self._alive.append(tensor)
        self._owners[_storage(tensor)] = name

    def _name_of(self, value: Any) -> str | None:
        return self._names.get(id(value)) if isinstance(value, torch.Tensor) else None

    def _unique(self, wanted: str) -> str:
        name, count = wanted, 1
        while name in self._used:
            count += 1
            name = f"{wanted}_{count}"
        self._used.add(name)
        return name


class _Batches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands on each call that is made of one: under vmap, on tensors of whole batches; of a list, on each tensor."""

    def __init__(self, record: Callable[[str, OpOverload, Any, Any], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._record = record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_read = func is torch.ops.aten._local_scalar_dense.default  # of a fake tensor, which raises
        if func.namespace != "aten" or is_read or func.overloadpacket.__name__ in checks.CHECKS:
            return func(*args, **(kwargs or {}))
        return self._record(func.overloadpacket.__name__, func, args, kwargs or {})


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _content(name: str, tensor: Any) -> bytes:
    if not isinstance(tensor, torch.Tensor):
        raise CaptureRefused(f"the module holds the constant object {name}, which is not supported")
    if is_functorch_wrapped_tensor(tensor):
        raise CaptureRefused(
            "forward uses a transform of torch.func that torch.export does not follow: use torch.autograd instead"
        )
    byte_count = tensor.numel() * tensor.element_size()
    if byte_count > MAX_CONSTANT_BYTES:
        raise CaptureRefused(
            f"forward makes the constant tensor {name} of {byte_count} bytes, over the limit of "
            f"{MAX_CONSTANT_BYTES}: keep it as an attribute of the module, or register it as a buffer"
        )
    contiguous = tensor.detach().cpu().contiguous().reshape(-1)
    return bytes(contiguous.view(torch.uint8).numpy().tobytes()) if byte_count else b""


def _drop_needless_copies(graph: graph_pb2.Graph) -> None:
    """Constants written in the forward are copied before use; where nothing writes the copy, it is the
    constant."""
    owner = aten.roots(graph)
    written = {owner[name] for node in graph.nodes for name in node.mutates} | set(graph.outputs)
    replaced: dict[str, str] = {}
    for node in graph.nodes:
        if node.target == "aten.lift_fresh_copy.default" and not written & {node.name, node.args[0].tensor}:
            replaced[node.name] = node.args[0].tensor
    if not replaced:
        return
    kept = [node for node in graph.nodes if node.name not in replaced]
    for node in kept:
        for value in aten.arguments_of(node):
            _rename(value, replaced)
        for result in node.results:
            result.alias_of = replaced.get(result.alias_of, result.alias_of)
    del graph.nodes[:]
    graph.nodes.extend(kept)


def _rename(value: Any, replaced: dict[str, str]) -> None:
    if value.WhichOneof("kind") == "tensor":
        value.tensor = replaced.get(value.tensor, value.tensor)
    elif value.WhichOneof("kind") == "list":
        for element in value.list.values:
            _rename(element, replaced)
