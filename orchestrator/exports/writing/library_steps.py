"""Library steps as Python statements, such as `y = torch.ops.aten.relu.default(x)`; a block's calls one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from orchestrator.exports.writing import foreign_text
from warpsmith import program_steps
from warpsmith.errors import BadInput
from warpsmith.v1 import candidate_pb2, graph_pb2, tensor_pb2


def call(step: candidate_pb2.LibraryCall, names: Mapping[str, str]) -> list[str]:
    """The statements of one library step; `names`: each buffer's.

    Raises:
        BadInput: an argument is none that Python can be given.
    """
    if step.target == program_steps.BLOCK:
        return list(_block(step, names))
    if step.target == program_steps.LOOP:
        return list(_loop(step, names))
    results = [names[name] if name else "_" for name in step.results]
    return [_statement(step.target, _arguments(step, names), results, in_list=step.result_in_list)]


def _statement(target: str, arguments: Sequence[str], results: Sequence[str], *, in_list: bool) -> str:
    text = f"{foreign_text.operation(target)}({', '.join(arguments)})"
    return f"{', '.join(results)}{',' if in_list else ''} = {text}" if results else text


def _arguments(step: candidate_pb2.LibraryCall | graph_pb2.Node, names: Mapping[str, str]) -> list[str]:
    named = [f"{item.name}={_value(item.value, names)}" for item in step.kwargs]
    return [*(_value(value, names) for value in step.args), *named]


def _block(step: candidate_pb2.LibraryCall, names: Mapping[str, str]) -> Iterator[str]:
    """The calls that a block stands for, and what they alone need let go at its end."""
    graph = program_steps.body(step.args[0].text)
    given = program_steps.tensor_names(step.args)
    known = {source.name: names[name] for source, name in zip(graph.sources, given, strict=True)}
    own = {name: f"_ws_{at}" for at, name in enumerate(program_steps.names_made(graph))}
    known |= own
    yield from _calls(graph, known)
    for name, result in zip(step.results, graph.outputs, strict=True):
        if name:
            yield f"{names[name]} = {known[result]}"
    if own:
        yield f"del {', '.join(own.values())}"


def _calls(graph: graph_pb2.Graph, known: Mapping[str, str]) -> Iterator[str]:
    for node in graph.nodes:
        results = [known[result.name] if result.name else "_" for result in node.results]
        arguments = _arguments(node, known)
        if node.target in program_steps.NUMBERS:
            yield f"{results[0]} = {program_steps.NUMBERS[node.target].format(*arguments)}"
            continue
        yield _statement(node.target, arguments, results, in_list=program_steps.is_in_list(node))


def _loop(step: candidate_pb2.LibraryCall, names: Mapping[str, str]) -> Iterator[str]:
    """The steps of a loop as one in Python."""
    graph = program_steps.body(step.args[0].text)
    sequences, states, others = ([names[value.tensor] for value in argument.list.values] for argument in step.args[1:])
    now = [f"_ws_state_{at}" for at in range(len(states))]
    elements = [f"_ws_element_{at}" for at in range(len(sequences))]
    sources = zip(graph.sources, [*elements, *now, *others], strict=True)
    known = {source.name: name for source, name in sources}
    own = {name: f"_ws_{at}" for at, name in enumerate(program_steps.names_made(graph))}
    known |= own
    yield f"{', '.join(now)}, = {', '.join(states)},"
    yield f"_ws_made = [[] for _ in range({len(states)})]"
    yield f"for {', '.join(elements)}, in zip({', '.join(f'{name}.unbind()' for name in sequences)}):"
    for line in _calls(graph, known):
        yield f"    {line}"
    yield f"    {', '.join(now)}, = {', '.join(known[name] for name in graph.outputs)},"
    yield f"    for _ws_all, _ws_state in zip(_ws_made, ({', '.join(now)},)): _ws_all.append(_ws_state)"
    for at, name in enumerate(step.results):
        if name:
            yield f"{names[name]} = torch.stack(_ws_made[{at}])"
    yield f"del {', '.join([*own.values(), *now, *elements, '_ws_made', '_ws_all', '_ws_state'])}"


_DTYPES = {
    tensor_pb2.DTYPE_FLOAT64: "torch.float64",
    tensor_pb2.DTYPE_FLOAT32: "torch.float32",
    tensor_pb2.DTYPE_FLOAT16: "torch.float16",
    tensor_pb2.DTYPE_BFLOAT16: "torch.bfloat16",
    tensor_pb2.DTYPE_INT64: "torch.int64",
    tensor_pb2.DTYPE_INT32: "torch.int32",
    tensor_pb2.DTYPE_INT16: "torch.int16",
    tensor_pb2.DTYPE_INT8: "torch.int8",
    tensor_pb2.DTYPE_COMPLEX64: "torch.complex64",
    tensor_pb2.DTYPE_COMPLEX128: "torch.complex128",
    tensor_pb2.DTYPE_FLOAT8_E4M3FN: "torch.float8_e4m3fn",
    tensor_pb2.DTYPE_FLOAT8_E5M2: "torch.float8_e5m2",
    tensor_pb2.DTYPE_UINT16: "torch.uint16",
    tensor_pb2.DTYPE_UINT32: "torch.uint32",
    tensor_pb2.DTYPE_UINT64: "torch.uint64",
    tensor_pb2.DTYPE_UINT8: "torch.uint8",
    tensor_pb2.DTYPE_BOOL: "torch.bool",
}


def dtype(value: tensor_pb2.Dtype.ValueType) -> str:
    """A dtype as Python writes it."""
    if value not in _DTYPES:
        raise BadInput(f"the program has an element type {value}, which is none")
    return _DTYPES[value]


def _value(value: tensor_pb2.Value, names: Mapping[str, str]) -> str:
    match value.WhichOneof("kind"):
        case "tensor":
            return names[value.tensor]
        case "list":
            return f"[{', '.join(_value(item, names) for item in value.list.values)}]"
        case "real":
            return _real(value.real)
        case "complex":
            return f"complex({_real(value.complex.real)}, {_real(value.complex.imaginary)})"
        case "dtype":
            return dtype(value.dtype)
        case "none":
            return "None"
        case "device":
            return "device"
        case "torch_constant":
            return value.torch_constant
        case kind if kind is not None:
            return repr(getattr(value, kind))
        case _:
            raise BadInput("a library step has an argument without a value")


def _real(value: float) -> str:
    number = repr(value)
    return number if number not in ("inf", "-inf", "nan") else f'float("{number}")'
