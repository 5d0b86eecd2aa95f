"""Tells the author of an exporter whether it fits its role; `python -m warpsmith.testing exporter NAME` asks it.

The one idea: it writes the winner of a made-up run of one kernel, for a processor and for a GPU; one of both is enough.
Files of Python have to be that; nothing is run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from orchestrator.exports.export import Exported, ExportedFolder, Exporter
from warpsmith import digest
from warpsmith.errors import BadInput, NotFound
from warpsmith.sandbox import private_files, python_text
from warpsmith.testing import asking, softmax_task
from warpsmith.v1 import analysis_pb2, candidate_pb2, graph_pb2, run_pb2, task_pb2, timing_pb2

_KERNELS = {
    task_pb2.TARGET_CPU: ("kernel.cpp", 'extern "C" void softmax(void* const* arguments) {}\n'),
    task_pb2.TARGET_CUDA: ("kernel.cu", 'extern "C" __global__ void softmax(const float* x, float* y) {}\n'),
}
_GIVES = (Exported, ExportedFolder)


def check_exporter(make: Callable[[], Exporter]) -> list[str]:
    """Findings about the exporter that `make` gives; empty when it fits."""
    return asking.findings(_findings(make))


def _findings(make: Callable[[], Exporter]) -> Iterator[str]:
    exporter = asking.made(make)
    refused = []
    for target in _KERNELS:
        run = _run(target)
        try:
            exported: Exported | ExportedFolder = asking.method(exporter, "export", run, gives=_GIVES)
        except BadInput as error:
            refused.append(str(error))
            continue
        yield from _of_files(exported)
        if asking.method(exporter, "export", run, gives=_GIVES) != exported:
            yield "equal runs give different files"
    if len(refused) == len(_KERNELS):
        yield f"it refuses every run: {refused[0]}"

    def nothing_faster() -> Exported | ExportedFolder:
        run = _run(task_pb2.TARGET_CPU)
        run.state, run.best.timing.faster = run_pb2.RUN_STATE_NO_FASTER, False
        return asking.method(exporter, "export", run, gives=_GIVES)

    yield from asking.refuses(nothing_faster, NotFound, "a run that found nothing faster")


def _of_files(exported: Exported | ExportedFolder) -> Iterator[str]:
    match exported:
        case Exported(file_name=str(name), text=str(text)):
            yield from _of_file(name, text)
            if name.endswith(".py") and not name.removesuffix(".py").isidentifier():
                yield f"the file's name is {name!r}, which nothing can import"
        case ExportedFolder(name=str(), files=dict(files)) if files:
            for path, text in files.items():
                yield from _of_file(path, text)
        case _:
            yield "what it gives has no name, no text or no files"


def _of_file(path: str, text: str) -> Iterator[str]:
    try:
        private_files.relative_path("a file of an export", path)
    except BadInput as error:
        yield str(error)
    if not isinstance(text, str) or not text.strip():
        yield f"{path} has no text"
    elif path.endswith(".py"):
        try:
            python_text.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            yield f"{path} is not Python: {error}"


def _run(target: task_pb2.Target.ValueType) -> run_pb2.Run:
    """A run whose winner computes the softmax by one launch."""
    run = run_pb2.Run(id="20260101-000000-abcdef", task=softmax_task(target), state=run_pb2.RUN_STATE_FASTER)
    spec = run.task.inputs[0]
    program = run.best.candidate.program
    program.target, program.outputs[:] = target, ["y"]
    name, text = _KERNELS[target]
    program.sources.add(name=name, text=text)
    source = graph_pb2.Source(name="x", origin=graph_pb2.ORIGIN_INPUT, spec=spec)
    program.buffers.add(name="x", role=candidate_pb2.ROLE_SOURCE, spec=spec, source=source)
    program.buffers.add(name="y", role=candidate_pb2.ROLE_OUTPUT, spec=spec)
    launch = program.steps.add(group="softmax").launch
    launch.entry, launch.writes[:] = "softmax", ["y"]
    launch.grid.x = launch.grid.y = launch.grid.z = 1
    launch.block.x, launch.block.y, launch.block.z = 32, 1, 1
    for buffer in ("x", "y"):
        launch.arguments.add(buffer=buffer)
    program.output_tree = '[1, {"type": null, "context": null, "children_spec": []}]'
    program.digest = digest.of_program(program)
    run.best.candidate.moves.add(kind=analysis_pb2.MOVE_KIND_AUTHOR, group="softmax")
    timing = run.best.timing
    timing.faster, timing.fastest_arm = True, timing_pb2.ARM_KIND_EAGER
    timing.speedup_fastest.median = timing.speedup_eager.median = 2.0
    return run
