"""Several runs of one module, each for other inputs, as one export: which runs fit together, and the table of inputs.

The one idea: modules are one where their sources are, but for `get_inputs` and what it alone reads. What the kernels
share, the original, its settings and its members, is written once; each has a guard of its own.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import PurePosixPath
from typing import Protocol, runtime_checkable

from orchestrator.exports import export
from orchestrator.exports.export import Exported, ExportedFolder, Exporter
from orchestrator.exports.writing import foreign_text, library_steps
from warpsmith import hardware
from warpsmith.contract import words
from warpsmith.errors import BadInput
from warpsmith.sandbox import python_text
from warpsmith.v1 import candidate_pb2, graph_pb2, run_pb2, task_pb2, tensor_pb2


@runtime_checkable
class SeveralExporter(Protocol):
    """An exporter that writes the winners of several runs of one module as one export."""

    def export_several(self, runs: Sequence[run_pb2.Run]) -> Exported | ExportedFolder:
        """As `Exporter.export`; runs that do not fit together are a BadInput."""
        ...


def export_all(exporter: Exporter, flavour: str, runs: Sequence[run_pb2.Run]) -> Exported | ExportedFolder:
    """One run by `export`, several by `export_several` where the exporter has that.

    Raises:
        NotFound: a run found nothing faster.
        BadInput: the flavour does not fit, or the runs do not fit together.
    """
    if len(runs) == 1:
        return exporter.export(runs[0])
    if not isinstance(exporter, SeveralExporter):
        raise BadInput(
            f"--flavour {flavour} writes one shape, and {len(runs)} runs are named: name one, "
            "or write --flavour module, package or hub"
        )
    return exporter.export_several(runs)


# ---- which runs fit together -------------------------------------------------------------------------


def alike(runs: Sequence[run_pb2.Run]) -> list[run_pb2.Run]:
    """Copies of runs of one module whose programs read the same members in the same order.

    Raises:
        NotFound: a run found nothing faster.
        BadInput: names two runs and how they differ, or that they do not.
    """
    for run in runs:
        export.require_winner(run)
    if twice := [run.id for place, run in enumerate(runs) if run.id in {other.id for other in runs[:place]}]:
        raise BadInput(f"run {twice[0]} is named twice")
    first = runs[0]
    for place, run in enumerate(runs[1:], start=1):
        if difference := _difference(first, run):
            raise BadInput(
                f"runs {first.id} and {run.id} are of {difference}; one export holds runs of one module that differ "
                "in their inputs alone: export each by itself"
            )
        for other in runs[:place]:
            _require_other_inputs(other, run)
    return _with_equal_members(runs)


def _difference(first: run_pb2.Run, other: run_pb2.Run) -> str:
    """What forbids one export, in a few words; empty where nothing does."""
    one, two = first.task, other.task
    programs = first.best.candidate.program, other.best.candidate.program
    if one.target != two.target:
        names = [task_pb2.Target.Name(task.target).removeprefix("TARGET_").lower() for task in (one, two)]
        return f"different targets ({names[0]} and {names[1]})"
    if (made := [hardware.architecture(program) for program in programs])[0] != made[1]:
        return f"different targets ({made[0]} and {made[1]})"
    if one.prepared != two.prepared:
        return "different tracks (prepared and plain)"
    if (task_pb2.PRECISION_TF32 in (one.precision, two.precision)) and one.precision != two.precision:
        return "different tracks (tf32 and another)"
    if one.class_name != two.class_name:
        return f"different classes ({one.class_name[:80]!r} and {two.class_name[:80]!r})"
    if _sources(one) != _sources(two):
        both = {"get_inputs", "get_init_inputs"}
        if _sources(one, both) == _sources(two, both):
            return "different constructor arguments (get_init_inputs)"
        return "different sources, in more than get_inputs and constants that it alone reads"
    return ""


_DYNAMIC = re.compile(r"\b(?:globals|locals|vars|eval|exec|__dict__|sys|importlib|inspect)\b")
"""Words of sources that may read a constant without its name."""


def _sources(task: task_pb2.Task, apart: Collection[str] = ("get_inputs",)) -> tuple[object, ...]:
    """What has to be equal of sources: other files as they are, of the entry the code without the functions `apart`
    and the constants that nothing else names."""
    others = {each.path: each.content for each in task.sources if each.path != task.entry_path}
    folder = PurePosixPath(task.entry_path).parent
    entry = next(export.text_of(each) for each in task.sources if each.path == task.entry_path)
    try:
        tree = python_text.parse(entry)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return folder, others, entry
    beside = "\n".join(content.decode(errors="replace") for content in others.values())
    statements = tree.body
    texts = [ast.unparse(each) for each in statements]
    is_plain = not _DYNAMIC.search("\n".join([*texts, beside]))
    place = 0
    while place < len(statements):
        names = _functions(statements[place], apart) or (_constants(statements[place]) if is_plain else [])
        rest = "\n".join([*texts[:place], *texts[place + 1 :], beside])
        if names and not any(re.search(rf"\b{re.escape(name)}\b", rest) for name in names):
            del statements[place], texts[place]
            place = 0  # what it alone has read may go too
        else:
            place += 1
    return folder, others, *texts


def _functions(statement: ast.stmt, names: Collection[str]) -> list[str]:
    return [statement.name] if isinstance(statement, ast.FunctionDef) and statement.name in names else []


def _constants(statement: ast.stmt) -> list[str]:
    """Names that a statement binds, where it does no more than that."""
    if not isinstance(statement, ast.Assign) or not all(map(_is_plain, ast.walk(statement.value))):
        return []
    targets = [part for each in statement.targets for part in (each.elts if isinstance(each, ast.Tuple) else [each])]
    names = [each.id for each in targets if isinstance(each, ast.Name)]
    return names if len(names) == len(targets) else []


def _is_plain(node: ast.AST) -> bool:
    """Whether a part of an expression is a number, text or name, arithmetic, or a type of torch's."""
    if isinstance(node, ast.Attribute):
        return isinstance(node.value, ast.Name) and node.value.id == "torch"
    parts = ast.Constant | ast.Name | ast.BinOp | ast.UnaryOp | ast.Tuple | ast.List
    return isinstance(node, parts | ast.operator | ast.unaryop | ast.expr_context)


def _require_other_inputs(one: run_pb2.Run, other: run_pb2.Run) -> None:
    if inputs(one) != inputs(other):
        return
    gains = [run.best.timing.speedup_fastest.median for run in (one, other)]
    better = one if gains[0] >= gains[1] else other
    raise BadInput(
        f"runs {one.id} and {other.id} have the same inputs, {inputs(one)}: name one of them; {better.id} is the "
        f"faster ({max(gains):.2f}x, the other {min(gains):.2f}x)"
    )


def _with_equal_members(runs: Sequence[run_pb2.Run]) -> list[run_pb2.Run]:
    """What a program does not read and another does is a source of both, so that one look at a module serves all."""
    origins = (graph_pb2.ORIGIN_PARAMETER, graph_pb2.ORIGIN_STATE)
    known: dict[str, tuple[run_pb2.Run, candidate_pb2.Buffer]] = {}
    for run in runs:
        for buffer in run.best.candidate.program.buffers:
            if buffer.source.origin in origins:
                before, seen = known.setdefault(buffer.source.qualified_name, (run, buffer))
                if seen.spec != buffer.spec:
                    raise BadInput(
                        f"runs {before.id} and {run.id} are of modules whose {buffer.source.qualified_name[:80]!r} "
                        "differs in shape, strides or type: export each by itself"
                    )
    order = {member: place for place, member in enumerate(known)}
    made = []
    for run in runs:
        copy = run_pb2.Run()
        copy.CopyFrom(run)
        buffers = list(copy.best.candidate.program.buffers)
        read = {buffer.source.qualified_name for buffer in buffers}
        taken = {buffer.name for buffer in buffers}
        for member in [member for member in known if member not in read]:
            unread = candidate_pb2.Buffer.FromString(known[member][1].SerializeToString())
            while unread.name in taken:
                unread.name += "_"
            taken.add(unread.name)
            buffers.append(unread)
        buffers.sort(key=lambda buffer: order.get(buffer.source.qualified_name, -1))
        texts = [buffer.SerializeToString() for buffer in buffers]
        del copy.best.candidate.program.buffers[:]
        copy.best.candidate.program.buffers.extend(map(candidate_pb2.Buffer.FromString, texts))
        made.append(copy)
    return made


# ---- the table ---------------------------------------------------------------------------------------


def inputs(run: run_pb2.Run) -> str:
    """The inputs of a run as people read them, as `--input` has them: `float32[4,8], 2.0`."""
    tensors = iter(run.task.inputs)
    literals = run.task.input_literals or [""] * len(run.task.inputs)
    return ", ".join(text or _tensor(next(tensors)) for text in literals)


def _tensor(spec: tensor_pb2.TensorSpec) -> str:
    kind = f"{library_steps.dtype(spec.dtype).removeprefix('torch.')}[{','.join(map(str, spec.shape))}]"
    step, plain = 1, list[int]()
    for extent in reversed(spec.shape):
        plain.insert(0, step)
        step *= max(extent, 1)
    return kind if list(spec.strides) == plain else f"{kind} strides ({','.join(map(str, spec.strides))})"


def marks(runs: Sequence[run_pb2.Run]) -> Iterator[tuple[str, run_pb2.Run]]:
    """Each run with what stands after its names."""
    return ((f"_{number}", run) for number, run in enumerate(runs, start=1))


def table(runs: Sequence[run_pb2.Run], answer: str = "_ws_forward{mark}") -> str:
    """Python that makes `_ws_shapes`. `answer`: the expression of what answers a row's calls."""
    shown = [repr(inputs(run)) for run in runs]
    width = max(map(len, shown)) + 1
    rows = [
        f"    ({text + ',':{width}} _ws_guard{mark}, {answer.format(mark=mark)}),"
        for text, (mark, _) in zip(shown, marks(runs), strict=True)
    ]
    lines = "\n".join(rows)
    return f"""# Which inputs are answered by which kernel; the original forward answers any other call.
_ws_shapes = _WsShapes([
{lines}
])"""


def header(runs: Sequence[run_pb2.Run], needs: str) -> str:
    """The comment at the top of a file; each run's own stands over its kernel."""
    lines = [
        f"{runs[0].task.name}, made faster by Warpsmith for {len(runs)} kinds of inputs. Needs {needs}.",
        "",
        "The table `_ws_shapes` near the end says which kernel answers which inputs; any other call runs the original:",
        *[f"  {inputs(run)}: {_gain(run)} (run {run.id})" for run in runs],
    ]
    return foreign_text.comment(lines)


def heading(run: run_pb2.Run) -> str:
    """The first lines of the comment over one of several kernels."""
    return foreign_text.comment([f"---- {inputs(run)} ----", ""])


def _gain(run: run_pb2.Run) -> str:
    return f"{run.best.timing.speedup_fastest.median:.2f}x over {words.arm(run.best.timing.fastest_arm)}"
