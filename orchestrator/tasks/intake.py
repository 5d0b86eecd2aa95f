"""Makes a `Task` of what the user named: a file in KernelBench's format, or `module:Class` with input specs.

The one idea: all that can be said without running the user's code is said first, as one `BadInput` with file and
line; then a jailed worker builds the module, runs it once and fills in the shapes. Nothing of the user's is imported
in this process. A task carries sources, never paths.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from orchestrator.tasks.module_entry import find_module, sources_of, write_entry
from warpsmith import printable
from warpsmith.contract import structures
from warpsmith.digest import of_task
from warpsmith.errors import BadInput, WorkerCrashed, WorkerRaised, WorkerTimeout
from warpsmith.sandbox import private_files, python_text
from warpsmith.sandbox.jail import Policy
from warpsmith.sandbox.worker import Worker
from warpsmith.v1 import task_pb2, tensor_pb2

ChoiceT = TypeVar("ChoiceT")

SOURCE_BYTES = 8 << 20
"""Most that the sources of a task may hold together."""
INSPECT_SECONDS = 120.0
"""Longest that building the module and one forward may take."""
WORKER_ENTRY = "orchestrator.tasks.intake_worker:METHODS"

UNKNOWN = "object()"
"""Stands for an argument that no literal makes; it equals no argument of a call."""

TARGETS = {
    "auto": task_pb2.TARGET_UNSPECIFIED,
    "cpu": task_pb2.TARGET_CPU,
    "cuda": task_pb2.TARGET_CUDA,
}
PRECISIONS = {
    "auto": task_pb2.PRECISION_UNSPECIFIED,
    "fp32": task_pb2.PRECISION_FP32,
    "tf32": task_pb2.PRECISION_TF32,
    "fp16": task_pb2.PRECISION_FP16,
    "bf16": task_pb2.PRECISION_BF16,
}


@dataclass(frozen=True)
class Request:
    """What the user asked for."""

    subject: str
    """Path of a `.py` file, or `package.module:Class`."""
    inputs: Sequence[str] = ()
    """Input specs such as `float32[16,16384]`; only with `module:Class`."""
    init: Sequence[str] = ()
    """Constructor arguments as Python literals, `8` or `eps=1e-5`; only with `module:Class`."""
    target: str = "auto"
    """A key of `TARGETS`."""
    precision: str = "auto"
    """A key of `PRECISIONS`; `auto` goes by the floating-point inputs."""
    class_name: str = "Model"
    """Class in a `.py` file."""
    prepared: bool = False
    """Whether what depends on parameters alone may be kept from call to call."""
    gradients: Sequence[str] | None = None
    """For a training step, patterns of the inputs and parameters whose gradients are wanted, empty for all.

    None: the forward alone."""
    needs_inputs: bool = True
    """Whether a `.py` file has to define get_inputs."""


def gradients(option: str) -> Sequence[str] | None:
    """What `Request` has of a training step as the option --grad says it; "" for the forward alone."""
    if not option:
        return None
    names = [name.strip() for name in option.split(",")]
    if not all(names):
        raise BadInput(f"--grad {option}: names no input or parameter between commas; write all, or x,norm.*")
    return () if names == ["all"] else names


def read(request: Request) -> task_pb2.Task:
    """The task without shapes and digest: the user's code has been parsed, not run.

    Raises:
        BadInput: names the file or argument, the line where there is one, and the cause.
    """
    _require_utf8("--class", request.class_name)
    if request.prepared and request.gradients is not None:
        raise BadInput("--prepared keeps what depends on parameters, and --grad is for training, which changes them")
    task = task_pb2.Task(
        target=choice("--target", request.target, TARGETS),
        precision=choice("--precision", request.precision, PRECISIONS),
        class_name=request.class_name,
        prepared=request.prepared,
        training_step=None if request.gradients is None else task_pb2.TrainingStep(wanted=request.gradients),
    )
    if ":" in request.subject and not request.subject.endswith(".py"):
        _read_class(task, request)
    else:
        if request.inputs or request.init:
            raise BadInput(
                f"{request.subject}: --input and --init go with module:Class; a file says get_inputs() itself"
            )
        _read_file(task, Path(request.subject), needs_inputs=request.needs_inputs)
    size = sum(len(source.content) for source in task.sources)
    if size > SOURCE_BYTES:
        raise BadInput(f"{request.subject}: the sources hold {size} bytes; at most {SOURCE_BYTES} can be sent")
    return task


def inspect(task: task_pb2.Task, worker: Worker | None = None) -> task_pb2.Task:
    """The task with input and output specs, precision and digest: built and run once in a jail.

    `worker`: one of `WORKER_ENTRY` for many tasks of one owner; without it, each gets a process of its own.

    Raises:
        BadInput: the module does not import, build or run, or get_inputs gives no tensor.
        Infrastructure: no jail can be built here.
    """
    if worker is None:
        with Worker(WORKER_ENTRY, Policy(), env={"OMP_NUM_THREADS": "2"}) as own:
            return inspect(task, own)
    try:
        seen = worker.call("inspect", task, task_pb2.Task, deadline_s=INSPECT_SECONDS)
    except BadInput as error:
        raise BadInput(_about(task, str(error))) from None
    except WorkerRaised as error:
        raise BadInput(f"{task.entry_path}: {error}") from error
    except WorkerTimeout as error:
        raise BadInput(f"{task.entry_path}: one forward did not end within {INSPECT_SECONDS:.0f} s") from error
    except WorkerCrashed as error:
        tail = error.stderr_tail.strip().splitlines()[-1:]
        said = printable.quotation(tail[0]) if tail else "no message"
        raise BadInput(f"{task.entry_path}: the module ended the process: {said}") from error
    # The worker ran the user's code: only specs and literals are taken from it.
    literals = [text if _is_literal(text) else UNKNOWN for text in seen.input_literals]
    known = task_pb2.Task()
    known.CopyFrom(task)
    if task.HasField("training_step"):
        known.training_step.CopyFrom(seen.training_step)
        known.training_step.wanted[:] = task.training_step.wanted
    return described(known, seen.inputs, seen.outputs, literals)


def written(
    text: str, *, name: str, target: str, precision: str, prepared: bool, gradients: Sequence[str] | None = None
) -> task_pb2.Task:
    """The task of a file that we have written, as `read` gives it; raises BadInput as that does."""
    content, path = text.encode(), "module.py"
    if len(content) > SOURCE_BYTES:
        raise BadInput(f"{name}: written to a file it takes {len(content)} bytes; at most {SOURCE_BYTES} can be sent")
    return task_pb2.Task(
        name=name,
        sources=[task_pb2.SourceFile(path=path, content=content)],
        entry_path=path,
        class_name="Model",
        target=choice("target", target, TARGETS),
        precision=choice("precision", precision, PRECISIONS),
        prepared=prepared,
        training_step=None if gradients is None else task_pb2.TrainingStep(wanted=gradients),
    )


def described(
    task: task_pb2.Task,
    inputs: Iterable[tensor_pb2.TensorSpec],
    outputs: Iterable[tensor_pb2.TensorSpec],
    literals: Iterable[str],
) -> task_pb2.Task:
    """The task with its specs, its precision and its digest."""
    made = task_pb2.Task()
    made.CopyFrom(task)
    made.inputs.extend(inputs)
    made.outputs.extend(outputs)
    made.input_literals.extend(literals)
    if not made.precision:
        made.precision = _precision_of(made.inputs)
    made.digest = of_task(made)
    return made


def _about(task: task_pb2.Task, said: str) -> str:
    """What a worker said of a module that may have said it itself: it begins with one of its files, or is quoted."""
    files = "|".join(re.escape(source.path) for source in task.sources)
    return said if re.match(rf"(?:{files})(?::\d+)?: ", said) else f"{task.entry_path}: {printable.quotation(said)}"


def _is_literal(text: str) -> bool:
    """Whether an exported file may hold the text: a number, a string, a type, or what stands for anything else."""
    return not text or structures.is_input_literal(text)


def accept(task: task_pb2.Task) -> None:
    """Checks a task that came over the wire.

    Raises:
        BadInput: it lacks sources, shapes or a sound digest, or is too large.
    """
    require_names(task)
    if task.entry_path not in {source.path for source in task.sources}:
        raise BadInput(f"{task.name or 'task'}: the entry file {task.entry_path!r} is not among the sources")
    if sum(len(source.content) for source in task.sources) > SOURCE_BYTES:
        raise BadInput(f"{task.name}: the sources exceed {SOURCE_BYTES} bytes")
    if not task.inputs or not task.outputs:
        raise BadInput(f"{task.name}: the task names no tensor inputs or outputs; make it with intake")
    if strange := next((text for text in task.input_literals if not _is_literal(text)), ""):
        raise BadInput(f"{task.name}: the input {strange[:40]!r} is no literal")
    step = task.training_step
    gradients, outputs = len(step.gradients), len(task.outputs) - len(step.inputs) - len(step.parameters)
    places = [*((place, len(task.inputs) - gradients) for place in step.inputs), *((o, outputs) for o in step.outputs)]
    if len(step.outputs) != gradients or not all(0 <= place < count for place, count in places):
        raise BadInput(f"{task.name}: the training step names inputs or outputs that the task has not")
    if task.HasField("training_step") and not gradients:
        raise BadInput(f"{task.name}: the training step is given no gradient; make the task with intake")
    if task.digest != of_task(task):
        raise BadInput(f"{task.name}: the task's digest is not that of its sources")


def require_names(task: task_pb2.Task) -> None:
    """Refuses names that are paths, and paths that leave the module's folder, wherever the task comes from.

    Raises:
        BadInput: names the first.
    """
    private_files.require_name("the task's name", task.name)
    for path in (task.entry_path, *(source.path for source in task.sources)):
        private_files.relative_path("source path", path)


def _read_file(task: task_pb2.Task, path: Path, *, needs_inputs: bool) -> None:
    if os.path.isdir(path):
        raise BadInput(f"{path}: is a directory; name a file, or use `warpsmith bench {path}` for all files in it")
    root = path.parent
    tree = _parse(path, _content(root, path.name))
    bound = _bound_names(tree)
    if "*" not in bound:
        if task.class_name not in bound:
            hint = "name another with --class" if task.class_name == "Model" else "check --class"
            hint = hint if needs_inputs else "that is what a solution is called"
            raise BadInput(f"{path}: defines no class {task.class_name}; {hint}")
        if needs_inputs and "get_inputs" not in bound:
            raise BadInput(f"{path}: defines no get_inputs(), which returns the tensors of one forward")
    task.name = path.stem
    task.entry_path = path.name
    for name, content in _with_siblings(root, path.name).items():
        task.sources.add(path=name, content=content)


def _read_class(task: task_pb2.Task, request: Request) -> None:
    module, _, class_name = request.subject.partition(":")
    if not class_name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise BadInput(f"{request.subject!r}: write package.module:Class, or the path of a .py file")
    if not request.inputs:
        raise BadInput(f"{request.subject}: name the inputs, such as --input 'float32[16,16384]'")
    for option, texts in (("--input", request.inputs), ("--init", request.init)):
        for text in texts:
            _require_utf8(option, text)
    try:
        found = find_module(module)
    except OSError as error:
        raise BadInput(f"{request.subject}: cannot be looked for: {error.strerror}") from error
    if found.entry:
        bound = _bound_names(_parse(found.file, _content(found.root, found.entry)))
        if class_name not in bound and "*" not in bound:
            raise BadInput(f"{found.file}: defines no class {class_name}")
    entry = write_entry(module, class_name, request.inputs, request.init)
    task.name = class_name
    task.class_name = "Model"
    task.entry_path = "warpsmith_entry.py"
    task.sources.add(path=task.entry_path, content=entry.encode())
    total = 0
    for name in found.sources:
        content = _content(found.root, name)
        total += len(content)
        if total > SOURCE_BYTES:
            raise BadInput(
                f"{request.subject}: the package at {found.file} holds more than {SOURCE_BYTES} bytes of sources; "
                "copy what the class needs into one file"
            )
        task.sources.add(path=name, content=content)


def _with_siblings(root: Path, entry: str) -> dict[str, bytes]:
    """The entry file and, as far as imports at any level name them, the files beside it, by relative path."""
    found: dict[str, bytes] = {}
    waiting = [entry]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found[name] = _content(root, name)
        for imported in _imported_modules(_parse(root / name, found[name], is_named=name == entry)):
            place = root / imported
            if os.path.lexists(place.with_suffix(".py")) and not place.with_suffix(".py").is_dir():
                waiting.append(f"{imported}.py")
            elif os.path.isfile(place / "__init__.py"):
                waiting += sources_of(root, imported)
    return found


def _imported_modules(tree: ast.Module) -> set[str]:
    """Top-level names of the modules that a file imports."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                names |= {alias.name.split(".")[0] for alias in aliases}
            case ast.ImportFrom(module=str(module), level=0):
                names.add(module.split(".")[0])
    return names


def _bound_names(tree: ast.Module) -> set[str]:
    """Names that a module's statements bind, at any depth outside functions and classes; `*` for a star import."""
    names: set[str] = set()
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
                continue
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names |= {(alias.asname or alias.name).split(".")[0] for alias in aliases}
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
        waiting += ast.iter_child_nodes(node)
    return names


def _parse(path: Path, content: bytes, *, is_named: bool = True) -> ast.Module:
    """The syntax tree of a file. The compiler's message may hold words of it: said only of a file that was named."""
    try:
        return python_text.parse(content)
    except SyntaxError as error:
        why = f": {error.msg}" if is_named else ""
        where = f":{error.lineno}" if error.lineno else ""  # none of a file that is no text
        raise BadInput(f"{path}{where}: syntax error{why}") from None
    except (ValueError, RecursionError, MemoryError):
        raise BadInput(f"{path}: not Python source") from None


def _content(root: Path, name: str) -> bytes:
    _require_utf8("file", name)
    try:
        return private_files.read_beneath(root, name, most_bytes=SOURCE_BYTES)
    except FileNotFoundError:
        raise BadInput(f"{root / name}: no such file") from None
    except OSError as error:
        raise BadInput(f"{root / name}: cannot be read: {error.strerror}") from error


def _require_utf8(what: str, text: str) -> None:
    """Refuses a text that no task can hold. Python keeps bytes of a file name that are not UTF-8 as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadInput(f"{what} {text!r}: is not UTF-8; name it otherwise") from None


def choice(option: str, value: str, choices: Mapping[str, ChoiceT]) -> ChoiceT:
    """What a word stands for, of `TARGETS` or `PRECISIONS`; raises BadInput for another."""
    if value not in choices:
        raise BadInput(f"{option} {value}: choose one of {', '.join(choices)}")
    return choices[value]


def _precision_of(inputs: Sequence[tensor_pb2.TensorSpec]) -> task_pb2.Precision.ValueType:
    floating = {
        tensor_pb2.DTYPE_FLOAT16: task_pb2.PRECISION_FP16,
        tensor_pb2.DTYPE_BFLOAT16: task_pb2.PRECISION_BF16,
        tensor_pb2.DTYPE_FLOAT32: task_pb2.PRECISION_FP32,
        tensor_pb2.DTYPE_FLOAT64: task_pb2.PRECISION_FP32,
    }
    tracks = {floating[spec.dtype] for spec in inputs if spec.dtype in floating}
    # A mixture is judged by the strictest of its types.
    return tracks.pop() if len(tracks) == 1 else task_pb2.PRECISION_FP32
