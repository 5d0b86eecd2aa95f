"""Writes the winner as one Python file: `ModelNew`, a subclass of the user's own class, guarded.

The file stands alone (torch, and a compiler or the CUDA driver). `ModelNew` takes the same constructor arguments and
state_dict; a call that is not the one that was verified (another shape, dtype, layout, device, training mode, or
a gradient wanted) runs the original forward. This module writes what both flavours share; it runs nothing.
"""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass
from typing import Protocol

from warpsmith.errors import BadInput, NotFound
from warpsmith.v1 import analysis_pb2, candidate_pb2, graph_pb2, run_pb2, task_pb2, tensor_pb2

MODE_DEPENDENT = re.compile(
    r"\.training|dropout|batch_?norm|instance_?norm|MultiheadAttention|LSTM|GRU|RNN|Transformer",
    re.IGNORECASE,
)
"""Text of a module whose result may depend on train() or eval(): such an export checks the mode it was captured in."""


@dataclass(frozen=True)
class Exported:
    """A file to write: its name, which also names the kernel, and its text."""

    file_name: str
    text: str


class Exporter(Protocol):
    """A way to write the best trial of a run as a Python file."""

    def export(self, run: run_pb2.Run) -> Exported:
        """The file.

        Raises:
            NotFound: the run found nothing faster.
            BadInput: the flavour does not fit the run; says which does.
        """
        ...


def require_winner(run: run_pb2.Run) -> candidate_pb2.Program:
    """The program to export.

    Raises:
        NotFound: the run found nothing faster.
    """
    if run.state != run_pb2.RUN_STATE_FASTER and not run.best.timing.faster:
        raise NotFound(f"run {run.id} found no faster kernel, so there is nothing to export")
    return run.best.candidate.program


def header(run: run_pb2.Run) -> str:
    """The comment at the top: what this is, how fast, how it was checked, and the moves that made it."""
    timing, verdict = run.best.timing, run.best.verdict
    speedup = timing.speedup_fastest
    moves = [_move_text(move) for move in run.best.candidate.moves]
    lines = [
        f"{run.task.name}, made faster by Warpsmith (run {run.id}).",
        "",
        f"{speedup.median:.2f}x over {timing.fastest_baseline}, the fastest baseline "
        f"(95 % interval {speedup.low:.2f} to {speedup.high:.2f}); {timing.speedup_eager.median:.2f}x over eager.",
        f"Measured on {timing.environment.device}, torch {timing.environment.torch}.",
        f"Checked against fp64 truth: error {verdict.worst_rms_ratio:.2f} times PyTorch's own (4 allowed).",
        f"Program {run.best.candidate.program.digest[:12]}, task {run.task.digest[:12]}. Moves:",
        *[f"  {number}. {text}" for number, text in enumerate(moves, start=1)],
    ]
    return "\n".join(f"# {line}".rstrip() for line in lines)


def _move_text(move: analysis_pb2.Move) -> str:
    integers = ", ".join(f"{key}={value}" for key, value in sorted(dict(move.arguments).items()))
    return " ".join(part for part in (move.operation, move.group, move.choice, integers) if part)


# ---- the reference -----------------------------------------------------------------------------------


def reference(task: task_pb2.Task) -> str:
    """Python that defines `_WsReference`, the user's class, from the sources embedded as text.

    Kept apart in a namespace of its own: the file that it came from may be loaded beside it.
    """
    entries = ",\n".join(f"    {source.path!r}: {text_literal(source.content.decode())}" for source in task.sources)
    return f'''_WS_REFERENCE = {{
{entries},
}}


def _ws_reference_class():
    """The original class, from its embedded source."""
    for path, text in _WS_REFERENCE.items():
        name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        if path != {task.entry_path!r}:
            _ws_install(name, path, text)
    namespace = {{"__name__": "warpsmith_reference"}}
    exec(compile(_WS_REFERENCE[{task.entry_path!r}], {task.entry_path!r}, "exec"), namespace)
    return namespace[{task.class_name!r}]


def _ws_install(name, path, text):
    """Makes one more embedded source importable under its own name."""
    spec = importlib.util.spec_from_loader(name, loader=None, is_package=path.endswith("__init__.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    exec(compile(text, path, "exec"), module.__dict__)


_WsReference = _ws_reference_class()
'''


def text_literal(text: str) -> str:
    """A Python literal of a text that reads as the text does, wherever it can."""
    if "\\" in text or "'''" in text or text.endswith("'"):
        return repr(text) if "\n" not in text else f"({_lines_literal(text)})"
    return f"'''{text}'''"


def _lines_literal(text: str) -> str:
    return "\n        ".join(["", *[repr(line) for line in text.splitlines(keepends=True)], ""])


# ---- the program as straight-line Python -------------------------------------------------------------


class Names:
    """Python names for a program's buffers: as in the captured module where that is a legal name."""

    def __init__(self, program: candidate_pb2.Program) -> None:
        self._names: dict[str, str] = {}
        taken = {"torch", "module", "leaves", "self"}
        for buffer in program.buffers:
            name = re.sub(r"\W", "_", buffer.name)
            if not name or name[0].isdigit() or keyword.iskeyword(name):
                name = f"t_{name}"
            while name in taken:
                name += "_"
            taken.add(name)
            self._names[buffer.name] = name

    def __getitem__(self, buffer: str) -> str:
        return self._names[buffer]


def bindings(program: candidate_pb2.Program, names: Names) -> list[str]:
    """Statements that bind every source and allocate every output and workspace."""
    lines = []
    for buffer in program.buffers:
        match buffer.role:
            case candidate_pb2.ROLE_SOURCE:
                lines.append(f"{names[buffer.name]} = {_source(buffer.source)}")
            case candidate_pb2.ROLE_OUTPUT | candidate_pb2.ROLE_WORKSPACE:
                spec = buffer.spec
                shape, strides = tuple(spec.shape), tuple(spec.strides)
                place = f"dtype={dtype(spec.dtype)}, device=device"
                lines.append(f"{names[buffer.name]} = torch.empty_strided({shape}, {strides}, {place})")
    return lines


def _source(source: graph_pb2.Source) -> str:
    match source.origin:
        case graph_pb2.ORIGIN_INPUT:
            return f"leaves[{source.input_index}]"
        case graph_pb2.ORIGIN_PARAMETER | graph_pb2.ORIGIN_STATE:
            return f"_ws_member(module, {source.qualified_name!r})"
        case graph_pb2.ORIGIN_CONSTANT:
            shape = tuple(source.spec.shape)
            return f"_ws_constant({source.content.hex()!r}, {dtype(source.spec.dtype)}, {shape}, device)"
        case _:
            raise BadInput(f"buffer {source.name} of the program has no origin")


def library_call(call: candidate_pb2.LibraryCall, names: Names) -> str:
    """The statement of one library step."""
    arguments = [_value(value, names) for value in call.args]
    arguments += [f"{item.name}={_value(item.value, names)}" for item in call.kwargs]
    text = f"torch.ops.{call.target}({', '.join(arguments)})"
    results = [names[name] if name else "_" for name in call.results]
    if not results:
        return text
    return f"{', '.join(results)} = {text}"


def outputs(program: candidate_pb2.Program, names: Names) -> str:
    """The expression that the forward returns."""
    if len(program.outputs) == 1 and '"builtins.' not in program.output_tree:
        return names[program.outputs[0]]
    tree = f"torch.utils._pytree.treespec_loads({program.output_tree!r})"
    return f"torch.utils._pytree.tree_unflatten([{', '.join(names[name] for name in program.outputs)}], {tree})"


def guard(task: task_pb2.Task) -> str:
    """Python that defines `_ws_fits(module, leaves)`: whether a call is the one that was verified."""
    expected = [(tuple(spec.shape), tuple(spec.strides), dtype(spec.dtype)) for spec in task.inputs]
    rows = "".join(f"    ({shape}, {strides}, {kind}),\n" for shape, strides, kind in expected)
    literals = [text for text in task.input_literals if text]
    mode_dependent = any(MODE_DEPENDENT.search(source.content.decode()) for source in task.sources)
    mode = "module.training" if mode_dependent else "True"
    device = "cuda" if task.target == task_pb2.TARGET_CUDA else "cpu"
    return f'''_WS_INPUTS = (
{rows})
_WS_LITERALS = ({"".join(f"{text}, " for text in literals)})


def _ws_fits(module, tensors, literals):
    """Whether a call is the one that was verified: otherwise the original forward answers."""
    return (
        len(tensors) == len(_WS_INPUTS)
        and literals == _WS_LITERALS
        and {mode}
        and all(
            tuple(tensor.shape) == shape
            and tensor.stride() == strides
            and tensor.dtype is dtype
            and tensor.device.type == "{device}"
            for tensor, (shape, strides, dtype) in zip(tensors, _WS_INPUTS, strict=True)
        )
        and _ws_members_fit(module)
        and not (torch.is_grad_enabled() and _ws_wants_gradient(module, tensors))
    )


def _ws_wants_gradient(module, tensors):
    return any(tensor.requires_grad for tensor in (*tensors, *module.parameters()))


def _ws_members_fit(module):
    """Whether the parameters that the program reads are where and what they were when it was verified."""
    return all(
        member.device.type == "{device}" and member.dtype is dtype and member.is_contiguous()
        for member, dtype in ((_ws_member(module, name), dtype) for name, dtype in _WS_MEMBERS.items())
    )


def _ws_member(module, name):
    """A parameter or buffer by its qualified name."""
    for part in name.split("."):
        module = getattr(module, part)
    return module


def _ws_constant(content, dtype, shape, device):
    """A constant of the forward, from its bytes."""
    return torch.frombuffer(bytearray.fromhex(content), dtype=dtype).reshape(shape).to(device)
'''


def members(program: candidate_pb2.Program) -> str:
    """Python that defines `_WS_MEMBERS`: the dtype of each parameter and state that the program reads."""
    rows = [
        f"    {buffer.source.qualified_name!r}: {dtype(buffer.spec.dtype)},\n"
        for buffer in program.buffers
        if buffer.source.origin in (graph_pb2.ORIGIN_PARAMETER, graph_pb2.ORIGIN_STATE)
    ]
    return f"_WS_MEMBERS = {{\n{''.join(rows)}}}\n"


MODEL = '''class ModelNew(_WsReference):
    """The module with the kernel above. Same constructor, same state_dict."""

    def forward(self, *args, **kwargs):
        flat = torch.utils._pytree.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
        literals = tuple(leaf for leaf in flat if not isinstance(leaf, torch.Tensor))
        if not _ws_fits(self, tensors, literals):
            return super().forward(*args, **kwargs)
        return _ws_forward(self, tensors)
'''
"""The class that a user imports."""

_DTYPES = {
    tensor_pb2.DTYPE_FLOAT64: "torch.float64",
    tensor_pb2.DTYPE_FLOAT32: "torch.float32",
    tensor_pb2.DTYPE_FLOAT16: "torch.float16",
    tensor_pb2.DTYPE_BFLOAT16: "torch.bfloat16",
    tensor_pb2.DTYPE_INT64: "torch.int64",
    tensor_pb2.DTYPE_INT32: "torch.int32",
    tensor_pb2.DTYPE_INT16: "torch.int16",
    tensor_pb2.DTYPE_INT8: "torch.int8",
    tensor_pb2.DTYPE_UINT8: "torch.uint8",
    tensor_pb2.DTYPE_BOOL: "torch.bool",
}


def dtype(value: tensor_pb2.Dtype.ValueType) -> str:
    """A dtype as Python writes it."""
    return _DTYPES[value]


def _value(value: tensor_pb2.Value, names: Names) -> str:
    match value.WhichOneof("kind"):
        case "tensor":
            return names[value.tensor]
        case "list":
            return f"[{', '.join(_value(item, names) for item in value.list.values)}]"
        case "real":
            number = repr(value.real)
            return number if number not in ("inf", "-inf", "nan") else f'float("{number}")'
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
