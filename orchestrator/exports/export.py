"""Writes the winner as one Python file: `ModelNew`, a subclass of the user's own class, guarded.

The file stands alone (torch, and a compiler or the CUDA driver). `ModelNew` takes the same constructor arguments and
state_dict; a call that is not the one that was verified (see `exported.guard`) runs the original forward. This module
writes what both flavours share; it runs nothing.
"""

from __future__ import annotations

import hashlib
import importlib.util
import keyword
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from orchestrator.commands.report import labels_of
from orchestrator.exports.writing import foreign_text, library_steps
from orchestrator.exports.writing.outputs import outputs
from warpsmith import arguments as launch_arguments
from warpsmith import hardware
from warpsmith.contract import structures, words
from warpsmith.errors import BadInput, NotFound
from warpsmith.program_steps import buffers_of, last_uses, made_by, relies_on_layout
from warpsmith.v1 import candidate_pb2, graph_pb2, run_pb2, task_pb2, tensor_pb2

READS_MODE = re.compile(r"""\.training\b|["']training["']|def (train|eval)\(self""")
"""Text of sources that look at train() or eval(). Of classes from elsewhere, the guard asks their code (see there)."""

PREPARED = (
    "What depends on parameters and buffers alone is computed once and kept; after a write to one of them it is "
    "computed again, but not after a write by way of `.data`."
)
"""What the header of a winner on the prepared track says."""
EACH_CALL = "What depends on parameters or constants alone is computed in each call here, and was not while timed."
"""What it says where nothing is kept."""
TF32 = "All library steps, ours and the baselines', were timed with torch.backends.cuda.matmul.allow_tf32 = True."
"""What the header of a winner on the tf32 track says: PyTorch's default is False, and then library steps are slower."""


@dataclass(frozen=True)
class Exported:
    """A file to write: its name, which also names the kernel, and its text."""

    file_name: str
    text: str


@dataclass(frozen=True)
class ExportedFolder:
    """A folder to write: its name, and texts by their paths in it."""

    name: str
    files: Mapping[str, str]


class Exporter(Protocol):
    """A way to write the best trial of a run as a file, or as a folder of files."""

    def export(self, run: run_pb2.Run) -> Exported | ExportedFolder:
        """The file or folder.

        Raises:
            NotFound: the run found nothing faster.
            BadInput: the flavour does not fit the run; says which does.
        """
        ...


RANDOM = re.compile(r"dropout|bernoulli|multinomial|rand|normal_|exponential_|lstm|gru|rnn")
"""Library steps that may draw: run again for a backward, they would draw something else."""


def require_winner(run: run_pb2.Run) -> candidate_pb2.Program:
    """The program to export.

    Raises:
        NotFound: the run found nothing faster.
        BadInput: a name in it is more than a name.
    """
    if run.state != run_pb2.RUN_STATE_FASTER and not run.best.timing.faster:
        raise NotFound(f"run {run.id} found no faster kernel, so there is nothing to export")
    foreign_text.require_names(run.best.candidate.program)
    return run.best.candidate.program


def header(run: run_pb2.Run, needs: str, *remarks: str) -> str:
    """The comment at the top: what this is, what it `needs`, how fast, its labels, how it was checked, its moves."""
    timing, verdict = run.best.timing, run.best.verdict
    speedup = timing.speedup_fastest
    moves = map(words.move, run.best.candidate.moves)
    labels = labels_of(run)
    failed = [
        f"{words.arm(arm.kind)} could not run, so a faster baseline may exist." for arm in timing.arms if arm.failure
    ]
    lines = [
        f"{run.task.name}, made faster by Warpsmith (run {run.id}). Needs {needs}.",
        "",
        f"{speedup.median:.2f}x over {words.arm(timing.fastest_arm)}, the fastest baseline that ran "
        f"(95 % interval {speedup.low:.2f} to {speedup.high:.2f}); {timing.speedup_eager.median:.2f}x over eager.",
        *failed,
        *([f"Labels: {', '.join(labels)}."] if labels else []),
        *remarks,
        *([TF32] if run.task.precision == task_pb2.PRECISION_TF32 else []),
        f"Measured on {timing.environment.device}, torch {timing.environment.torch}.",
        f"Checked against fp64 truth: error {verdict.worst_rms_ratio:.2f} times (4 allowed) "
        f"{words.yardstick(verdict)}.",
        f"Program {run.best.candidate.program.digest[:12]}, task {run.task.digest[:12]}. Moves:",
        *[f"  {number}. {text}" for number, text in enumerate(moves, start=1)],
    ]
    return foreign_text.comment(lines)


def pasted(modules: Iterable[str], *imports: str) -> str:
    """The code of `carried` modules, without their docstrings and with all imports, and `imports`, at the top.

    They are read and not imported: they need torch, which this process does not. What one imports of another is there.
    """
    found, bodies = {*imports}, []
    for module in modules:
        text = (Path(__file__).parent / "carried" / f"{module}.py").read_text()
        lines = text.split('"""\n', 1)[1].splitlines()
        found |= {line for line in lines if line.startswith(("import ", "from "))}
        bodies.append("\n".join(line for line in lines if line not in found).strip())
    kept = [line for line in found if not line.startswith("from orchestrator.")]
    head = sorted(kept, key=lambda line: (line.startswith("from "), line))
    return "\n".join(head) + "\n\n\n" + "\n\n\n".join(bodies)


# ---- the reference -----------------------------------------------------------------------------------


def reference(task: task_pb2.Task, mark: str = "", first: task_pb2.Task | None = None) -> str:
    """Python that defines `_WsReference`, the user's class, from the sources embedded as text, and `_ws_arguments`;
    `mark` stands after their names. What the sources of `first` hold already is taken from there."""
    known = {source.path: source.content for source in first.sources} if first else {}
    entries = _embedded(source for source in task.sources if known.get(source.path) != source.content)
    package = reference_package(task)
    own = f"{package!r}, _WS_REFERENCE{mark}, {task.entry_path!r}, {task.class_name!r}"
    text = ",\n".join([*(["    **_WS_REFERENCE"] if first else []), *([entries] if entries else [])])
    return f"""_WS_REFERENCE{mark} = {{
{text},
}}

_WsReference{mark}, _ws_arguments{mark} = _ws_original({own})
"""


def reference_package(task: task_pb2.Task) -> str:
    """The name of the package that the sources are modules of; its `__entry__` is the file of the class."""
    return f"warpsmith_reference_{hashlib.sha256(_embedded(task.sources).encode()).hexdigest()[:12]}"


def _embedded(sources: Iterable[task_pb2.SourceFile]) -> str:
    return ",\n".join(f"    {source.path!r}: {foreign_text.literal(text_of(source))}" for source in sources)


def text_of(source: task_pb2.SourceFile) -> str:
    """A source as Python reads it, by its byte order mark or coding comment."""
    try:
        return importlib.util.decode_source(source.content)
    except (SyntaxError, UnicodeDecodeError):  # no import reads it, but its package brought it along
        return source.content.decode(errors="replace")


# ---- the program as straight-line Python -------------------------------------------------------------


_BUILTINS = ("complex", "float", "getattr", "int", "max", "min", "sum")
"""What statements of a program call."""


class Names:
    """Python names for a program's buffers: as in the captured module where that is a name that nothing else has."""

    def __init__(self, program: candidate_pb2.Program) -> None:
        self.buffers = {buffer.name: buffer for buffer in program.buffers}
        self._taken = {
            "torch",
            "leaves",
            "device",
            "index",
            "stream",
            "owner",
            "float",
            "complex",
            "getattr",
            "int",
            "max",
            "min",
        }
        self.of_buffers = {name: self._free(name) for name in self.buffers}

    def __getitem__(self, buffer: str) -> str:
        return self.of_buffers[buffer]

    def _free(self, wanted: str) -> str:
        name = re.sub(r"\W", "_", wanted, flags=re.ASCII)  # Python takes other letters for these: "ｆ" for "f"
        if not name[:1].isalpha() or keyword.iskeyword(name):  # names of ours begin with "_"
            name = f"t_{name}"
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        return name

    def laid_out(self, buffer: candidate_pb2.Buffer) -> str:
        """The statement that brings a library's result into the layout that was planned."""
        name = self.of_buffers[buffer.name]
        return f"{name} = _ws_laid_out({name}, {tuple(buffer.spec.strides)})"

    def placed(self, launch: candidate_pb2.Launch) -> tuple[list[str], list[str], list[str]]:
        """Statements before a launch, its buffers' names in order, and statements after it: a library's result may lie
        anywhere, and in another layout than a kernel relies on."""
        before, names, after = [], [], []
        for argument in launch.arguments:
            seen = launch_arguments.buffer_of(argument)
            if seen is None:
                continue
            buffer = self.buffers[seen]
            name = self.of_buffers[buffer.name]
            if buffer.role == candidate_pb2.ROLE_LIBRARY:
                before.append(self.laid_out(buffer))
            if buffer.role == candidate_pb2.ROLE_LIBRARY and buffer.alignment_bytes > 1:
                copy = self._free(f"{name}_placed")
                before.append(f"{copy} = _ws_aligned({name}, {buffer.alignment_bytes})")
                after.append(f"del {copy}")
                name = copy
            names.append(name)
        return before, names, after


def members(program: candidate_pb2.Program) -> list[str]:
    """Qualified names of the parameters and state that a program reads, each once."""
    origins = (graph_pb2.ORIGIN_PARAMETER, graph_pb2.ORIGIN_STATE)
    found = [buffer.source.qualified_name for buffer in program.buffers if buffer.source.origin in origins]
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Part:
    """Some steps of a program, which are one function: all, those that are prepared, or the others."""

    program: candidate_pb2.Program
    positions: Sequence[int]
    prepared: bool = False

    @property
    def kept(self) -> list[str]:
        """Buffers that prepared steps make and others read: given to those, as the last of the leaves."""
        steps = self.program.steps
        is_split = len(self.positions) < len(steps)
        made = {name for step in steps if is_split and step.prepared for name in made_by(step)}
        read = {name for step in steps if not step.prepared for name in buffers_of(step)}
        return [buffer.name for buffer in self.program.buffers if buffer.name in made & read]

    @property
    def own(self) -> list[candidate_pb2.Buffer]:
        """Buffers that it has to have, less those that are given to it: of all steps all, of some what they name."""
        if len(self.positions) == len(self.program.steps):
            return list(self.program.buffers)
        named = {name for position in self.positions for name in buffers_of(self.program.steps[position])}
        named = named if self.prepared else {*named, *self.program.outputs} - {*self.kept}
        return [buffer for buffer in self.program.buffers if buffer.name in named]


def bindings(part: Part, names: Names, input_count: int, owner: str) -> list[str]:
    """Statements that bind every source and what is kept from call to call; calls of one `owner` share memory that
    stays zero."""
    program, members_read = part.program, members(part.program)
    places = {name: place for place, name in enumerate(members_read, start=input_count)}
    lines = []
    if not part.prepared:
        first = input_count + len(members_read)
        lines = [f"{names[name]} = leaves[{place}]" for place, name in enumerate(part.kept, start=first)]
    for buffer in part.own:
        spec, name = buffer.spec, names[buffer.name]
        match buffer.role:
            case candidate_pb2.ROLE_SOURCE if buffer.source.origin == graph_pb2.ORIGIN_INPUT:
                lines.append(f"{name} = leaves[{buffer.source.input_index}]")
            case candidate_pb2.ROLE_SOURCE if buffer.source.origin == graph_pb2.ORIGIN_CONSTANT:
                kind = f"{library_steps.dtype(spec.dtype)}, {tuple(spec.shape)}"
                lines.append(f"{name} = _ws_constant({buffer.source.content.hex()!r}, {kind}, device)")
            case candidate_pb2.ROLE_SOURCE:
                lines.append(f"{name} = leaves[{places[buffer.source.qualified_name]}]")
            case candidate_pb2.ROLE_WORKSPACE if buffer.zero_between_calls:
                kind = f"{tuple(spec.shape)}, {library_steps.dtype(spec.dtype)}"
                lines.append(f"{name} = _ws_zeros({buffer.name!r}, {kind}, device, {owner})")
            case candidate_pb2.ROLE_WORKSPACE if program.target == task_pb2.TARGET_CPU and not part.prepared:
                # Kept, as it was while the program was timed: the system would have to fetch its pages in each call.
                kind = f"{tuple(spec.shape)}, {tuple(spec.strides)}, {library_steps.dtype(spec.dtype)}"
                lines.append(f"{name} = _ws_workspace({buffer.name!r}, {kind}, stream)")
    return lines


_LARGE = 1 << 16
"""Elements from which memory may be a megabyte, which is kept for the next result (`carried/cpu_runtime.py`)."""


def _allocation(buffer: candidate_pb2.Buffer, name: str, target: task_pb2.Target.ValueType) -> str:
    spec = buffer.spec
    layout = f"{tuple(spec.shape)}, {tuple(spec.strides)}"
    if target == task_pb2.TARGET_CPU:
        reach = sum((extent - 1) * stride for extent, stride in zip(spec.shape, spec.strides, strict=True))
        made = "_ws_result" if reach >= _LARGE else "_ws_small"
        return f"{name} = {made}({layout}, {library_steps.dtype(spec.dtype)})"
    return f"{name} = _ws_empty({layout}, {library_steps.dtype(spec.dtype)})"


def body_of(part: Part, names: Names, steps: Sequence[Sequence[str]]) -> list[str]:
    """The statements of its steps. Memory is allocated where it is first written and dropped after its last use, as
    eager's comes and goes and as it was while the program was timed."""
    program = part.program
    roles, made = [candidate_pb2.ROLE_LIBRARY], [candidate_pb2.ROLE_OUTPUT]
    if program.target == task_pb2.TARGET_CUDA or part.prepared:
        roles.append(candidate_pb2.ROLE_WORKSPACE)
        made.append(candidate_pb2.ROLE_WORKSPACE)
    zero = {buffer.name for buffer in program.buffers if buffer.zero_between_calls}
    unmade = {buffer.name: buffer for buffer in part.own if buffer.role in made and buffer.name not in zero}
    lines: list[str] = []
    dying = {at: [name for name in gone if name not in zero] for at, gone in last_uses(program, *roles).items()}
    for position in part.positions:
        needed = dict.fromkeys(name for name in buffers_of(program.steps[position]) if name in unmade)
        lines += [_allocation(unmade.pop(name), names[name], program.target) for name in needed]
        lines += steps[position]
        if gone := dying.get(position):
            lines.append(f"del {', '.join(names[name] for name in gone)}")
    return lines


def library_call(step: candidate_pb2.Step, names: Names) -> list[str]:
    """The statements of one library step."""
    lines = []
    if relies_on_layout(step):
        read = [names.buffers[name] for name in buffers_of(step) if name not in step.library.results]
        lines = [names.laid_out(buffer) for buffer in read if buffer.role == candidate_pb2.ROLE_LIBRARY]
    return [*lines, *library_steps.call(step.library, names.of_buffers)]


def fill(step: candidate_pb2.Memset, names: Names) -> str:
    """The statement of one fill."""
    return f"{names[step.buffer]}.view(torch.uint8).fill_({step.byte})"


def guard(run: run_pb2.Run, mark: str = "") -> str:
    """Python that makes `_ws_guard`, with `mark` after its name, which knows a call that was verified."""
    task, program = run.task, run.best.candidate.program
    specs = {buffer.source.qualified_name: buffer.spec for buffer in program.buffers}
    tensors = iter(task.inputs)
    if strange := next((text for text in task.input_literals if text and not structures.is_input_literal(text)), ""):
        raise BadInput(f"the input {strange[:40]!r} is no literal")
    leaves = [f"({text},)" if text else kind(next(tensors)) for text in task.input_literals]
    leaves += map(kind, tensors)
    leaf_rows = "".join(f"        {leaf},\n" for leaf in leaves)
    member_rows = "".join(f"        {name!r}: {kind(specs[name])},\n" for name in members(program))
    reads_mode = any(READS_MODE.search(text_of(source)) for source in task.sources)
    cooperative = any(step.launch.cooperative for step in program.steps)
    return f'''_ws_guard{mark} = _WsGuard(
    _WsReference,
    _ws_arguments,
    device="{"cuda" if task.target == task_pb2.TARGET_CUDA else "cpu"}",
    leaves=(
{leaf_rows}    ),
    members={{
{member_rows}    }},
    by_mode={reads_mode},
    capability={hardware.of_architecture(hardware.architecture(program)).capability},
    units={run.device.unit_count if cooperative else 0},
)'''


def kind(spec: tensor_pb2.TensorSpec) -> str:
    """A tensor's (shape, strides, dtype) as Python."""
    return f"({tuple(spec.shape)}, {tuple(spec.strides)}, {library_steps.dtype(spec.dtype)})"


def forward(
    run: run_pb2.Run,
    names: Names,
    steps: Sequence[Sequence[str]],
    *,
    in_graph: bool = True,
    keeps: bool = True,
    mark: str = "",
) -> str:
    """Python that defines `_ws_forward(leaves)` from the statements of each of its steps.

    `leaves` are the inputs and then the members. `in_graph`: a program that is launched as a CUDA graph is so here.
    `keeps`: what prepared steps make is kept, else they run in each call. `mark` stands after names of functions.
    """
    program, input_count = run.best.candidate.program, len(run.task.inputs)
    in_graph = in_graph and program.cuda_graph
    prepared = [position for position, step in enumerate(program.steps) if keeps and step.prepared]
    part = Part(program, [position for position in range(len(program.steps)) if position not in prepared])
    stream = ["stream = _ws_thread()"]
    if program.target == task_pb2.TARGET_CUDA:
        stream = ["index = leaves[0].get_device()", "stream = _ws_stream(index)"]
    functions, given = [], []
    if prepared:
        first = Part(program, prepared, prepared=True)
        made = "".join(f"{names[name]}, " for name in first.kept)
        lines = [*bindings(first, names, input_count, "stream"), *body_of(first, names, steps), f"return ({made})"]
        explained = '"""What depends on parameters and buffers alone."""'
        functions.append(
            _function(f"_ws_prepare{mark}(leaves)", [explained, "device = leaves[0].device", *stream, *lines])
        )
        own = {buffer.source.qualified_name for buffer in first.own}
        places = [place for place, name in enumerate(members(program), start=input_count) if name in own]
        functions.append(f"_ws_kept{mark} = _WsKept(_ws_prepare{mark}, {places})")
        given = [f"leaves = [*leaves, *_ws_kept{mark}(leaves)]"]
    lines = [*bindings(part, names, input_count, owner="owner" if in_graph else "stream"), *body_of(part, names, steps)]
    needs_device = any(re.search(r"\bdevice\b", line) for line in lines)
    is_alone = program.target == task_pb2.TARGET_CPU and not any(re.search(r"\bstream\b", line) for line in lines)
    body = [
        '"""The verified program, step by step."""',
        *([] if in_graph else given),
        *(["device = leaves[0].device"] if needs_device else []),
        *([] if is_alone else stream),
        *(["owner = stream if owner is None else owner"] if in_graph else []),
        *lines,
    ]
    returned = f"return {outputs(program, names)}"
    if not in_graph:
        return "\n\n\n".join([*functions, _function(f"_ws_forward{mark}(leaves)", [*body, returned])])
    tensors = "".join(f"{names[name]}, " for name in program.outputs)
    called = [*given, "device = leaves[0].device", f"{tensors}= _ws_graphs{mark}(leaves)", returned]
    return "\n\n\n".join([
        *functions,
        _function(f"_ws_run{mark}(leaves, owner)", [*body, f"return ({tensors})"]),
        f"_ws_graphs{mark} = _WsGraphs(_ws_run{mark}, _ws_stream)",
        _function(f"_ws_forward{mark}(leaves)", called),
    ])  # fmt: skip


def _function(head: str, body: Iterable[str]) -> str:
    return "\n".join([f"def {head}:", *(f"    {line}" for line in body)])


ANSWER = """
        if tensors is None or _ws_wants_gradient(self, tensors):
            _ws_tell_once(self, tensors)
            return super().forward(*args, **kwargs)
        return _ws_forward(tensors)
"""
"""What the forward does with the tensors of a verified call, or None for any other call."""


SEVERAL = """
        if tensors is None or _ws_wants_gradient(self, tensors):
            _ws_tell_once(self, tensors, known=_ws_shapes.known)
            return super().forward(*args, **kwargs)
        return kernel(tensors)
"""
"""The same where `kernel` is what the table of several gave."""


def model(answer: str = ANSWER, guard: str = "_ws_guard", found: str = "tensors") -> str:
    """Python that defines the class that a user imports. `found`: what the guard's `read` is bound to."""
    return f'''class ModelNew(_WsReference):
    """The module with the kernel above. Same constructor, same state_dict."""

    _ws_settings = None

    @functools.wraps(_WsReference.__init__)
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._ws_settings = {guard}.settings(self, args, kwargs)

    def forward(self, *args, **kwargs):
        {found} = {guard}.read(self, args, kwargs)
        {answer.strip()}'''
