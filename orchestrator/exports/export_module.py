"""The flavour `module`: kernels are built when first called, by NVRTC on a GPU and by g++ on a CPU."""

from __future__ import annotations

import collections
import struct
import textwrap
from collections.abc import Mapping, Sequence

from orchestrator.exports import export, export_shapes
from orchestrator.exports.export import Exported, Names
from orchestrator.exports.writing import foreign_text
from warpsmith import hardware
from warpsmith.arguments import copied_type
from warpsmith.processor_flags import FLAGS, LINKED
from warpsmith.sandbox import kernel_calls
from warpsmith.v1 import candidate_pb2, run_pb2, task_pb2

_FORMATS = {"int32": "<i", "int64": "<q", "float32": "<f"}


class ModuleExporter:
    """A file that a plain `import` turns into a faster class."""

    def export(self, run: run_pb2.Run) -> Exported:
        """The file; see `export.Exporter`."""
        program = export.require_winner(run)
        parts = [header(run), *body(run, Names(program), texts(run)), export.model()]
        return Exported(f"{run.task.name}_warpsmith.py", "\n\n\n".join(parts) + "\n")

    def export_several(self, runs: Sequence[run_pb2.Run]) -> Exported:
        """The file with a kernel for the inputs of each; see `export_shapes.SeveralExporter`."""
        several = export_shapes.alike(runs)
        shared = shared_texts(several)
        parts = [export_shapes.header(several, needs(runs[0])), *head(several, ["shapes"])]
        parts += [shared_part(shared)] if shared else []
        for mark, run in export_shapes.marks(several):
            own = kernel(run, Names(run.best.candidate.program), texts(run, shared), mark=mark)
            parts += [f"{export_shapes.heading(run)}\n{header(run)}", *own]
        parts += [export_shapes.table(several), export.model(export.SEVERAL, "_ws_shapes", "kernel, tensors")]
        return Exported(f"{runs[0].task.name}_warpsmith.py", "\n\n\n".join(parts) + "\n")


def header(run: run_pb2.Run) -> str:
    """The comment at the top of what needs no other build than that at the first call."""
    return export.header(run, needs(run), *([export.PREPARED] if run.task.prepared else []))


def needs(run: run_pb2.Run) -> str:
    """What a file needs to run."""
    program = run.best.candidate.program
    if program.target == task_pb2.TARGET_CUDA:
        return "torch and cuda-bindings"
    return "torch and g++" if program.sources else "torch"


def body(
    run: run_pb2.Run,
    names: Names,
    sources: str,
    *,
    code: str = "",
    carried: Sequence[str] = (),
    imports: Sequence[str] = (),
) -> list[str]:
    """Parts of a file from its imports to `_ws_forward`. `sources`: the expression of the kernels' texts, and `code` of
    their machine code, where there is some; `carried` and `imports`: what else is pasted."""
    return [*head([run], carried, imports), *kernel(run, names, sources, code=code)]


def head(runs: Sequence[run_pb2.Run], carried: Sequence[str] = (), imports: Sequence[str] = ()) -> list[str]:
    """Parts of a file that kernels of one module share: imports, host code, the original."""
    programs = [run.best.candidate.program for run in runs]
    on_gpu = programs[0].target == task_pb2.TARGET_CUDA
    keeps = any(step.prepared for program in programs for step in program.steps)
    in_graph = any(program.cuda_graph for program in programs)
    runtime = ["cuda_compile", "cuda_runtime"] if on_gpu else ["library_check", "cpu_runtime"]
    runtime += [*(["cuda_graphs"] if in_graph else []), *(["kept"] if keeps else [])]
    return [
        export.pasted([*runtime, "guard", "reference", *carried], *imports),
        export.reference(runs[0].task).strip(),
        *([] if on_gpu else ["\n".join(_calls())]),
    ]


def kernel(run: run_pb2.Run, names: Names, sources: str, *, code: str = "", mark: str = "") -> list[str]:
    """Parts of a file that are one kernel's, from its sources to `_ws_forward`; `mark` stands after their names."""
    made, function = unguarded(run, names, sources, code=code, mark=mark)
    return [made, export.guard(run, mark), function]


def unguarded(
    run: run_pb2.Run, names: Names, sources: str, *, code: str = "", mark: str = "", of: str = ""
) -> tuple[str, str]:
    """The same without a guard: what builds and launches the kernels, and `_ws_forward`. `of`: what stands after the
    names of the kernels that are launched, where several programs launch the same."""
    program, own = run.best.candidate.program, of or mark
    on_gpu = program.target == task_pb2.TARGET_CUDA
    launches, packs, steps = list[str](), dict[str, str](), list[list[str]]()
    for number, step in enumerate(program.steps):
        match step.WhichOneof("kind"):
            case "launch" if on_gpu:
                before, buffers, after = names.placed(step.launch)
                launches.append(f"_ws_launch{mark}_{number} = {_cuda_launch(step.launch, own)}")
                launch = f"_ws_launch{mark}_{number}({', '.join(_arguments(step.launch, buffers))})"
                steps.append([*before, launch, *after])
            case "launch":
                before, buffers, after = names.placed(step.launch)
                addresses = ", ".join(f"{name}.data_ptr()" for name in buffers)
                packed = f"_ws_packed_{len(buffers)}"
                packs[packed] = f'{packed} = struct.Struct("{len(buffers)}P").pack'
                steps.append([*before, f"_ws_kernels{own}[{step.launch.entry!r}]({packed}({addresses}))", *after])
            case "library":
                steps.append(export.library_call(step, names))
            case "memset":
                steps.append([export.fill(step.memset, names)])
    flags = [repr(hardware.architecture(program))] if on_gpu else [repr(list(FLAGS)), repr(list(LINKED)), "_ws_require"]
    built = [f"_WS_SOURCES{mark}", *flags, *([code] if code else [])]
    made = [f"_WS_SOURCES{mark} = {sources}", f"_ws_kernels{mark} = _WsKernels({', '.join(built)})"] * (own == mark)
    made += [*launches, *(packs[name] for name in sorted(packs))]
    return "\n".join(made), export.forward(run, names, steps, mark=mark)


def texts(run: run_pb2.Run, shared: Mapping[str, str] | None = None) -> str:
    """The expression of the kernels' texts; those in `shared`, by file name, stand in `_WS_SHARED`."""
    known, rows = shared or {}, []
    for source in run.best.candidate.program.sources:
        is_shared = known.get(source.name) == source.text
        text = f"_WS_SHARED[{source.name!r}]" if is_shared else foreign_text.literal(source.text)
        rows.append(f"    {source.name!r}: {text},\n")
    return f"{{\n{''.join(rows)}}}"


def shared_texts(runs: Sequence[run_pb2.Run]) -> dict[str, str]:
    """Headers that several programs have, which are written once, by file name."""
    found = collections.Counter((s.name, s.text) for run in runs for s in run.best.candidate.program.sources)
    return {name: text for (name, text), count in found.items() if count > 1}


def shared_part(shared: Mapping[str, str]) -> str:
    """Python that defines `_WS_SHARED`."""
    literals = "".join(f"    {name!r}: {foreign_text.literal(text)},\n" for name, text in shared.items())
    return f"_WS_SHARED = {{\n{literals}}}"


def _calls() -> list[str]:
    """What a kernel for a processor may call, as the check of its library reads it."""
    names = sorted({*kernel_calls.FUNCTIONS, *kernel_calls.ENDS, *kernel_calls.ABSENT})
    wrapped = textwrap.fill(" ".join(names), 116, break_long_words=False, break_on_hyphens=False)
    return [
        f'_WS_CALLS = frozenset("""\n{wrapped}\n""".split())',
        "_ws_require = functools.partial(",
        f"    _ws_require_kernel, calls=_WS_CALLS, ending={kernel_calls.ENDING_PREFIXES!r}",
        ")",
    ]


def _cuda_launch(launch: candidate_pb2.Launch, mark: str) -> str:
    shapes = ", ".join(str(extents(extent)) for extent in (launch.grid, launch.block, launch.cluster))
    settings = f"{launch.shared_bytes}, {launch.cooperative}, {launch.programmatic_dependent}, {len(launch.arguments)}"
    maps = {
        number: _tensor_map(argument.tensor_map)
        for number, argument in enumerate(launch.arguments)
        if argument.HasField("tensor_map")
    }
    if maps:
        settings += f", {{{', '.join(f'{number}: {made}' for number, made in maps.items())}}}"
    return f"_WsLaunch(_ws_kernels{mark}, {launch.entry!r}, {shapes}, {settings})"


def _tensor_map(seen: candidate_pb2.TensorMap) -> str:
    numbers = f"{list(seen.extents)}, {list(seen.byte_strides)}, {list(seen.box)}"
    return f"_WsTensorMap({copied_type(seen)!r}, {numbers}, {seen.swizzle_bytes})"


def _arguments(launch: candidate_pb2.Launch, buffers: list[str]) -> list[str]:
    """What a CUDA launch is called with: where, and each argument as the number in its 64 bits."""
    addresses = iter(f"{name}.data_ptr()" for name in buffers)
    found = ["index", "stream"]
    for argument in launch.arguments:
        kind = argument.WhichOneof("kind") or "buffer"
        if kind in ("buffer", "tensor_map"):
            found.append(next(addresses))
        else:
            packed = struct.pack(_FORMATS[kind], getattr(argument, kind))
            found.append(str(int.from_bytes(packed, "little")))
    return found


def extents(extent: candidate_pb2.Extent3) -> tuple[int, int, int]:
    """Three extents, each at least 1."""
    return max(extent.x, 1), max(extent.y, 1), max(extent.z, 1)
