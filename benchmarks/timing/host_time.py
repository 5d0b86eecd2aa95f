"""What a call of an export costs its host beside a call of the module that it came from.

    python -m benchmarks.timing.host_time [--only pointwise norm …] [--flavours module package …] [--out host.jsonl]
    python -m benchmarks.timing.host_time --target cuda
    python -m benchmarks.timing.host_time --shapes 10
    python -m benchmarks.timing.host_time --grad

Tiny modules, on whose tensors a kernel takes next to nothing, each as the program that a search begins with and as it
is exported. Batches of calls of the module and of its export take turns, in an order that is drawn anew for each round;
told are the medians over all rounds, and of the differences within a round also a 95 % interval. On a processor the
time is that of the one thread, whatever else runs on the machine. On a GPU batches are timed without waiting for it,
and it is waited for between them. A run takes half a minute, and nothing is judged. Flavours are all that the target
has, and `live`, the module of `warpsmith.optimize`; what an exporter refuses is said with its reason. Of `cu`, whose
caller owns all memory, a call is that of the launcher by ctypes. `--shapes 10`: exports hold kernels for ten shapes, of
which the call has the first, and then the tenth. `--grad`: a call is a forward and the gradients of all inputs and
parameters, by the kernels of the whole plan.

    module     eager µs   export µs   over eager µs [95 %]      bar
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import importlib.util
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from agent_reasoning.roofline_reasoner import RooflineReasoner
from agent_synthesis.synthesizer import BuiltInSynthesizer
from benchmarks.timing import cpu_examples
from orchestrator.exports import export_files, export_training
from orchestrator.exports.export import Exported, ExportedFolder
from orchestrator.live import calls, grafted, written
from orchestrator.tasks import intake, intake_worker
from warpsmith import plugins
from warpsmith.errors import BadInput
from warpsmith.graphs import dtypes
from warpsmith.v1 import (
    analysis_pb2,
    candidate_pb2,
    hypothesis_pb2,
    reasoning_service_pb2,
    run_pb2,
    task_pb2,
    timing_pb2,
)

LIVE = "live"
FLAVOURS = {"cpu": ["module", "package", "hub", LIVE], "cuda": ["module", "package", "hub", "kernelbench", "cu", LIVE]}
"""What is exported for each target, as `warpsmith export --flavour` has it; and `live`, the module of
`warpsmith.optimize`."""
BAR_US = 10.0
"""Most that a call of an export may take beyond eager's."""
_PARTS = ", ".join(["nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()"] * 4)
EXAMPLES = {
    # name: constructor, forward, inputs (x, y, …)
    "pointwise": ("self.bias = nn.Parameter(torch.randn(8))", "F.gelu(x + self.bias) * 0.5", "torch.randn(4, 8)"),
    "one_call": ("pass", "torch.relu(x)", "torch.randn(4, 8)"),
    "norm": ("self.norm = nn.LayerNorm(8)", "self.norm(x + y)", "torch.randn(4, 8), torch.randn(4, 8)"),
    "channels": ("self.conv = nn.Conv2d(4, 4, 1); self.norm = nn.GroupNorm(2, 4)",
                 "torch.relu(self.norm(self.conv(x)))", "torch.randn(1, 4, 4, 4)"),
    "convolution": ("self.conv = nn.Conv2d(4, 8, 3, padding=1)", "torch.relu(self.conv(x))", "torch.randn(1, 4, 4, 4)"),
    "many_parts": (f"self.parts = nn.Sequential({_PARTS})", "self.parts(x)", "torch.randn(4, 8)"),
}  # fmt: skip


@dataclass(frozen=True)
class HostTime:
    """Of one module as one flavour, in µs a call."""

    module: str
    flavour: str
    row: str
    """Of a table of several shapes, the row that answers, such as 10/10; empty where the export has one shape."""
    eager_us: float
    export_us: float
    over_us: float
    low_us: float
    high_us: float
    target: str
    torch: str
    is_step: bool = False
    """Whether a call is a forward and its backward."""


def a_step(source: Path, target: str, grad: str = "all", moves: Sequence[analysis_pb2.Move] = ()) -> run_pb2.Run:
    """A run that a plan of a module's training step has won, by default the whole one: nothing is compiled or judged
    here."""
    request = intake.Request(str(source), target=target, gradients=intake.gradients(grad))
    seen = intake_worker.inspect(intake.read(request))
    return _step_won(intake.described(seen, [], [], []), moves)


def a_run(source: Path, target: str) -> run_pb2.Run:
    """A run that was won by the first kernels that a search begins with: nothing is compiled or judged here."""
    task = intake.read(intake.Request(str(source), target=target))
    for value in _loaded(source).get_inputs():
        task.inputs.append(dtypes.spec_of(value))
        task.input_literals.append("")
    return _won(task)


def _step_won(task: task_pb2.Task, moves: Sequence[analysis_pb2.Move] = ()) -> run_pb2.Run:
    whole = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group="*")
    return _run_of(task, BuiltInSynthesizer().synthesize(task, hypothesis_pb2.Hypothesis(moves=moves or [whole])))


def _won(task: task_pb2.Task) -> run_pb2.Run:
    synthesizer = BuiltInSynthesizer()
    request = reasoning_service_pb2.ProposeHypothesesRequest(task=task, analysis=synthesizer.analyze(task, []))
    made = (synthesizer.synthesize(task, each) for each in RooflineReasoner().propose(request).hypotheses)
    return _run_of(task, next(each for each in made if each.program.sources))


def _run_of(task: task_pb2.Task, candidate: candidate_pb2.Candidate) -> run_pb2.Run:
    run = run_pb2.Run(id="host-time", state=run_pb2.RUN_STATE_FASTER, task=task)
    run.best.candidate.CopyFrom(candidate)
    run.best.timing.faster, run.best.timing.tier = True, timing_pb2.TIER_FINAL
    return run


def batches(
    arms: Sequence[Callable[[], Any]], rounds: int, count: int, wait: Callable[[], Any], clock: Callable[[], int]
) -> list[list[float]]:
    """µs a call of each arm in each round, whose arms are in an order that is drawn anew. `count`: calls of a batch."""
    taken: list[list[float]] = [[] for _ in arms]
    for _ in range(rounds):
        for place in random.sample(range(len(arms)), len(arms)):
            arm, repeated = arms[place], range(count)
            begin = clock()
            for _ in repeated:
                arm()
            taken[place].append((clock() - begin) / count / 1e3)
            wait()
    return taken


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Of the median with 95 %: the values whose ranks a fair coin's binomial gives (by its normal approximation)."""
    ranked, half = sorted(values), 0.98 * len(values) ** 0.5
    middle = (len(ranked) - 1) / 2
    return ranked[max(0, int(middle - half))], ranked[min(len(ranked) - 1, int(middle + half + 1))]


def measured(name: str, source: Path, flavour: str, place: int, options: argparse.Namespace) -> HostTime:
    """The time of one module's export beside the module's own, whose shape has a `place` among several, from 0."""
    if flavour == LIVE and options.shapes > 1:
        raise BadInput("a live module has its kernels one after the other, and no table")
    made_by = a_step if options.grad else a_run
    runs = [made_by(each, options.target) for each in _shapes(source, options.shapes)]
    for number, run in enumerate(runs):
        run.id = f"host-time-{number}"
    runs.insert(place, runs.pop(0))
    torch.manual_seed(0)
    user = _loaded(source)
    with torch.device(options.target):
        original = user.Model(*user.get_init_inputs())
    given = [value.to(options.target) for value in user.get_inputs()]
    # One thread does all of a call on a processor: its own time leaves out what else the machine does meanwhile.
    is_cuda = options.target == "cuda"
    wait, clock = (torch.cuda.synchronize, time.perf_counter_ns) if is_cuda else (lambda: None, time.thread_time_ns)
    folder = source.parent / f"{flavour}_{place}"
    model: Any
    if flavour == LIVE:
        model = swapped(original, given, options)
    else:
        exported = export_training.export_all(plugins.load("exporter", flavour), flavour, runs)
        if isinstance(exported, Exported) and flavour == "cu":
            model = launcher(exported, folder, original.state_dict(), given)
        else:
            model = answering(imported(exported, folder), place, original, given, options.target)
    arms = [_step(each, given) if options.grad else functools.partial(each, *given) for each in (original, model)]
    with torch.set_grad_enabled(options.grad):
        torch.testing.assert_close(*(arm() for arm in arms), rtol=1e-4, atol=1e-4)
        batches(arms, 3, options.calls, wait, clock)
        eager, ours = batches(arms, options.rounds, options.calls, wait, clock)
    over = [mine - theirs for mine, theirs in zip(ours, eager, strict=True)]
    eager_us, ours_us, over_us = (statistics.median(values) for values in (eager, ours, over))
    row = f"{place + 1}/{len(runs)}" if len(runs) > 1 else ""
    within = interval(over)
    return HostTime(
        name, flavour, row, eager_us, ours_us, over_us, *within, options.target, torch.__version__, options.grad
    )


def swapped(original: torch.nn.Module, given: Sequence[torch.Tensor], options: argparse.Namespace) -> torch.nn.Module:
    """The module as `warpsmith.optimize` gives it back. Its kernel has to answer the call."""
    inputs = [value.requires_grad_(options.grad) for value in given]
    call = calls.captured(original, inputs, {}, options.target)
    task = written.task_of(call, original, options.target, "auto", prepared=False, gradients=options.grad)
    run = _step_won(task) if options.grad else _won(task)
    exported = export_training.export_all(plugins.load("exporter", "module"), "module", [run])
    assert isinstance(exported, Exported)
    made = grafted.grafted(original, call, exported.text)
    with torch.set_grad_enabled(options.grad):
        made(*inputs)
    if not grafted.answered_by(made):
        raise SystemExit(f"{type(original).__name__}: its own call is not answered by the kernel")
    return made


def answering(made: Any, place: int, original: torch.nn.Module, given: Sequence[torch.Tensor], target: str) -> Any:
    """The module of an export with the original's weights. Its kernel has to answer the call."""
    with torch.device(target):
        model = made.ModelNew()
    model.load_state_dict(original.state_dict())
    guard = made._ws_shapes.rows[place][1] if hasattr(made, "_ws_shapes") else made._ws_guard
    if guard.read(model, given, {}) is None:
        raise SystemExit(f"{made.__name__}: its own call is not answered by the kernel")
    return model


def launcher(
    exported: Exported, folder: Path, state: Mapping[str, torch.Tensor], given: Sequence[torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """A CUDA file's launcher with memory for one call: what it is given is read from the file's own comment."""
    folder.mkdir()
    (folder / exported.file_name).write_text(exported.text)
    (command,) = re.findall(r"^// Compile: (nvcc .*) -c \S+$", exported.text, re.MULTILINE)
    shared = ["-shared", "-Xcompiler", "-fPIC", "-o", "launcher.so", exported.file_name]
    subprocess.run([*command.split(), *shared], cwd=folder, check=True)
    function = getattr(ctypes.CDLL(str(folder / "launcher.so")), Path(exported.file_name).stem)
    inputs, tensors = iter(given), []
    line = r"^//   t\d+_\w+: (read|written), \w+ \[(.*?)\] by \[(.*?)\](?:, (.+))?$"
    for what, shape, strides, member in re.findall(line, exported.text, re.MULTILINE):
        if what == "written":
            extents, steps = ([int(each) for each in part.split(",") if each.strip()] for part in (shape, strides))
            tensors.append(torch.empty_strided(extents, steps, device="cuda"))
        else:
            tensors.append(state[member] if member else next(inputs))
    (size,) = re.findall(r"^//   workspace: (\d+) bytes", exported.text, re.MULTILINE)
    workspace = torch.zeros(int(size) + 1, dtype=torch.uint8, device="cuda")
    pointers = [ctypes.c_void_p(each.data_ptr()) for each in (*tensors, workspace)]
    call = functools.partial(function, *pointers, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))

    def launch(*_: torch.Tensor) -> torch.Tensor:
        if error := call():
            raise SystemExit(f"{exported.file_name}: error {error} of CUDA")
        return tensors[-1]

    return launch


def _step(module: torch.nn.Module, given: Sequence[torch.Tensor]) -> Callable[[], Any]:
    """A call of a module and of its backward: gives the gradients."""
    inputs = [value.clone().requires_grad_() for value in given]
    wanted, made = [*inputs, *module.parameters()], module(*inputs)
    gradient = torch.linspace(-1.0, 1.0, made.numel(), device=made.device).reshape(made.shape)
    return lambda: torch.autograd.grad(module(*inputs), wanted, gradient)


def _shapes(source: Path, count: int) -> Iterator[Path]:
    """Files of a module with inputs of so many shapes; the first is its own."""
    yield source
    head, function, rest = source.read_text().partition("def get_inputs")
    for more in range(1, count):
        path = source.parent / f"shape_{more}" / source.name
        path.parent.mkdir(exist_ok=True)
        wider = functools.partial(_more, more=more)
        path.write_text(head + function + re.sub(r"(?<=randn\()\d+", wider, rest))
        yield path


def _more(extent: re.Match[str], more: int) -> str:
    return str(int(extent[0]) + more)


def imported(exported: Exported | ExportedFolder, folder: Path) -> Any:
    """An export as a module of this process: a file, or the file of a package that has the kernel."""
    folder.mkdir()
    match exported:
        case Exported(name, text):
            (folder / name).write_text(text)
            return _loaded(folder / name)
        case ExportedFolder(name, files):
            export_files.write_folder(folder / name, files)
            if builds := sorted((folder / name).glob("build/*")):  # hub: as its loader does
                package = json.loads((builds[0] / "metadata.json").read_text())["id"]
                _loaded(builds[0] / "__init__.py", package)
                return importlib.import_module(f"{package}.kernel")
            sys.path.insert(0, str(folder / name))
            for known in (name, f"{name}.kernel"):  # one of the same module with its shapes in another order
                sys.modules.pop(known, None)
            return importlib.import_module(f"{name}.kernel")


def _loaded(path: Path, name: str = "") -> Any:
    spec = importlib.util.spec_from_file_location(name or path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if name:  # of a package, whose modules look for it
        sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def line(found: HostTime) -> str:
    """A row of the table."""
    said = "met" if found.over_us <= BAR_US else f"missed ({BAR_US:g})"
    spread = f"{found.over_us:6.2f} [{found.low_us:.2f}, {found.high_us:.2f}]"
    arm = f"{found.module:12}{' '.join([found.flavour, found.row]):16}"
    return f"{arm}{found.eager_us:10.2f}{found.export_us:12.2f}   {spread:25}{said}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; 1 where an export is beyond the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(EXAMPLES), choices=list(EXAMPLES), help="modules wanted")
    parser.add_argument("--flavours", nargs="*", help="exporters, as `warpsmith export` has them; all of the target")
    parser.add_argument("--target", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--shapes", type=int, default=1, help="that an export has kernels for")
    parser.add_argument("--grad", action="store_true", help="training steps")
    parser.add_argument("--rounds", type=int, default=200, help="batches of each arm")
    parser.add_argument("--calls", type=int, default=100, help="of a batch")
    parser.add_argument("--out", type=Path, help="a file that each result is added to, one line of JSON each")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # a team of threads for 32 numbers would be what is timed
    print(
        f"{'module':12}{'flavour':16}{'eager µs':>10}{'export µs':>12}   {'over eager µs [95 %]':25}bar {BAR_US:g} µs"
    )
    missed = False
    with tempfile.TemporaryDirectory() as directory:
        for name, flavour, source in _sources(Path(directory), options):
            for place in sorted({0, options.shapes - 1}):
                try:
                    found = measured(name, source, flavour, place, options)
                except BadInput as error:
                    print(f"{name:12}{flavour:16}refused: {error}", flush=True)
                    break
                missed |= found.over_us > BAR_US
                print(line(found), flush=True)
                if options.out:
                    with contextlib.closing(options.out.open("a")) as file:
                        file.write(json.dumps(asdict(found)) + "\n")
    return int(missed)


def _sources(directory: Path, options: argparse.Namespace) -> Iterator[tuple[str, str, Path]]:
    for name, text in cpu_examples.modules(EXAMPLES).items():
        if name in options.only:
            folder = directory / name
            folder.mkdir()
            (folder / f"{name}.py").write_text(text)
            for flavour in options.flavours or FLAVOURS[options.target]:
                yield name, flavour, folder / f"{name}.py"


if __name__ == "__main__":
    sys.exit(main())
