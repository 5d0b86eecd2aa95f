"""Where a plan's time goes, step by step, beside the kernels of `torch.compile`.

    python -m benchmarks.timing.step_times MODULE.py … [--grad all] [--plans 2] [--apart] [--settings 6] [--out FILE]

MODULE.py is in KernelBench's format. Plans are what a search begins with, launched step by step: a step finds in the
caches what the one before has left there. A table for each plan, and one of all kernels of a compiled call, slowest
first; it is for finding out why a network is slower than PyTorch, and nothing is judged.
"""

from __future__ import annotations

import argparse
import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from agent_compile.compiler import Compiler
from agent_compile.toolchains.gxx import Gxx
from agent_compile.toolchains.nvrtc import Nvrtc
from agent_reasoning.roofline_reasoner import RooflineReasoner
from agent_synthesis import generator
from agent_synthesis.plans import bundles, moves
from agent_synthesis.plans.plan import Plan
from agent_synthesis.synthesizer import BuiltInSynthesizer
from gpu_bench import device
from gpu_bench.judging.loaded import LoadedTask
from gpu_bench.running.executor import TorchMemory
from gpu_bench.timing.clocks import CudaClock, HostClock
from gpu_bench.timing.interleaving import measure_steps
from gpu_bench.timing.measurement import StepInfo, step_infos
from orchestrator.tasks import intake
from warpsmith.contract import words
from warpsmith.errors import IllegalMove, WarpsmithError
from warpsmith.graphs import training_step
from warpsmith.v1 import analysis_pb2, artifact_pb2, candidate_pb2, reasoning_service_pb2, task_pb2

CALLS = 9
"""Of a compiled module, of which the profiler gives the mean."""


def plans(task: task_pb2.Task, count: int) -> Iterator[tuple[str, Plan]]:
    """What a search begins with, as moves and plan; launches as graphs are left out, which no clock sees into."""
    synthesizer = BuiltInSynthesizer()
    request = reasoning_service_pb2.ProposeHypothesesRequest(task=task, analysis=synthesizer.analyze(task, []))
    seen: set[str] = set()
    for hypothesis in RooflineReasoner().propose(request).hypotheses:
        chosen = [move for move in hypothesis.moves if move.kind != analysis_pb2.MOVE_KIND_LAUNCH]
        try:
            plan = synthesizer.plan(task, chosen)
            digest = generator.generate(plan).digest
        except IllegalMove:
            continue
        if digest not in seen and len(seen) < count:
            seen.add(digest)
            yield words.moves(chosen) or "plan zero", plan


def apart(said: str, plan: Plan) -> Iterator[tuple[str, Plan]]:
    """The plan with kernels launched by themselves that it launches together, if any."""
    move = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_LAUNCH, group=bundles.EVERY_GROUP, choice=bundles.APART)
    with contextlib.suppress(IllegalMove):
        yield f"{said}, {words.move(move)}", moves.apply(plan, move)


def compiled(program: candidate_pb2.Program) -> artifact_pb2.Artifact:
    """What a program compiles to. Raises WarpsmithError where it does not."""
    artifact = Compiler([Nvrtc(), Gxx()], None).compile(program).outcome
    if not isinstance(artifact, artifact_pb2.Artifact):
        raise WarpsmithError(f"it does not compile: {artifact.diagnostics}")
    return artifact


class Steps:
    """The steps of a module's plans on its inputs, timed one by one with cold caches."""

    def __init__(self, loaded: LoadedTask, cache_bytes: int) -> None:
        self._loaded = loaded
        is_cuda = loaded.device.type == "cuda"
        self._clock = CudaClock(cache_bytes) if is_cuda else HostClock(cache_bytes)
        self._workspaces = TorchMemory(loaded.device) if is_cuda else None
        self._sources = loaded.sources(loaded.user.inputs(0, loaded.device))

    def times(self, program: candidate_pb2.Program, artifact: artifact_pb2.Artifact) -> list[tuple[StepInfo, float]]:
        """Each step with its ns, in order."""
        ready = self._loaded.load_program(program, artifact)
        kept = ready.keep(self._sources)
        bound = ready.bind(self._sources, None, self._clock.stamp, self._workspaces, kept)
        return list(zip(step_infos(program), measure_steps(bound, self._clock), strict=True))

    def table(self, plan: Plan, copied: float) -> list[str]:
        """A row for each step, slowest first: µs, MB of the buffers that it touches, share of what a copy reaches."""
        program = generator.generate(plan)
        found = self.times(program, compiled(program))
        total = sum(ns for _, ns in found)
        lines = [f"{total / 1e3:.1f} µs in {len(found)} steps", ""]
        lines += ["| step | by | µs | MB | of a copy |", "|---" * 5 + "|"]
        for info, ns in sorted(found, key=lambda each: -each[1]):
            share = info.byte_count / ns * 1e9 / copied if ns and copied else 0.0
            by = "library" if info.engine == analysis_pb2.ENGINE_LIBRARY else "ours"
            lines.append(
                f"| {info.name} ({info.group}) | {by} | {ns / 1e3:.1f} | {info.byte_count / 1e6:.1f} | {share:.0%} |"
            )
        return lines

    def settings_table(self, plan: Plan, most: int) -> list[str]:
        """For each kernel of ours the fastest of the settings one change away, so many at most; what fails is left out.

        They are compiled side by side before the first is timed.
        """
        lines = ["| kernel | µs | settings that are fastest, and their µs |", "|---" * 3 + "|"]
        program = generator.generate(plan)
        plain = _by_group(self.times(program, compiled(program)))
        for group, changes in _settings(plan).items():
            programs = {name: generator.generate(changed) for name, changed in changes.items()}
            with ThreadPoolExecutor() as pool:
                made = list(pool.map(_compiled_if_it_can, programs.values()))
            timed = sorted(
                (_by_group(self.times(programs[name], artifact))[group], name)
                for name, artifact in zip(programs, made, strict=True)
                if artifact is not None
            )
            best = "; ".join(f"{name} {ns / 1e3:.1f}" for ns, name in timed[:most])
            lines.append(f"| {group} | {plain[group] / 1e3:.1f} | {best} |")
        return lines


def _settings(plan: Plan) -> dict[str, dict[str, Plan]]:
    """By group, and by what is set, the plans one setting away."""
    found: dict[str, dict[str, Plan]] = {}
    for legal in moves.legal(plan):
        if legal.move.kind == analysis_pb2.MOVE_KIND_SET:
            name = words.move(legal.move).removeprefix(f"set {legal.move.group} ")
            found.setdefault(legal.move.group, {})[name] = moves.apply(plan, legal.move)
    return found


def _compiled_if_it_can(program: candidate_pb2.Program) -> artifact_pb2.Artifact | None:
    try:
        return compiled(program)
    except WarpsmithError:
        return None


def _by_group(found: Iterable[tuple[StepInfo, float]]) -> Counter[str]:
    """ns of each group's steps together."""
    sums: Counter[str] = Counter()
    for info, ns in found:
        sums[info.group] += int(ns)
    return sums


def compiled_table(loaded: LoadedTask) -> list[str]:
    """A row for each kernel of a compiled call, slowest first: µs a call, launches a call."""
    args = loaded.user.inputs(0, loaded.device)
    call = training_step.compiled(loaded.module, lambda module: torch.compile(module, dynamic=False))
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.no_grad():
        for _ in range(3):
            call(*args)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(CALLS):
                call(*args)
            torch.cuda.synchronize()
    found = sorted(profile.key_averages(), key=lambda each: -each.self_device_time_total)
    total = sum(each.self_device_time_total for each in found) / CALLS
    lines = [f"{total:.1f} µs", "", "| kernel | µs | launches |", "|---" * 3 + "|"]
    return lines + [
        f"| {each.key[:120]} | {each.self_device_time_total / CALLS:.1f} | {each.count / CALLS:.0f} |" for each in found
    ]


def report(task: task_pb2.Task, name: str, count: int, most: int, *, is_apart: bool = False) -> Iterator[str]:
    """All that is told of a module, as Markdown."""
    ceilings = device.describe(task.target)
    yield f"## {name}"
    steps = Steps(LoadedTask.load(task), ceilings.device.cache_bytes)
    told = plans(task, count)
    if is_apart:
        told = (each for said, plan in told for each in ((said, plan), *apart(said, plan)))
    for said, plan in told:
        yield "\n".join(["", f"### {said}", "", *steps.table(plan, ceilings.device.copy_bytes_per_second)])
        if most:
            yield "\n".join(["", *steps.settings_table(plan, most)])
    if task.target == task_pb2.TARGET_CUDA:
        yield "\n".join(["", "### torch.compile", "", *compiled_table(LoadedTask.load(task))])


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the tables, or writes them as they come."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", type=Path, nargs="+")
    parser.add_argument("--grad", default="", help="a training step: all, or patterns of inputs and parameters")
    parser.add_argument("--plans", type=int, default=2, help="so many of what a search begins with")
    parser.add_argument("--apart", action="store_true", help="and each with no kernels launched together")
    parser.add_argument("--settings", type=int, default=0, help="and so many settings of each kernel, the fastest")
    parser.add_argument("--target", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--out", type=Path, help="a file that the tables are added to")
    options = parser.parse_args(arguments)
    for module in options.modules:
        request = intake.Request(str(module), target=options.target, gradients=intake.gradients(options.grad))
        task = intake.inspect(intake.read(request))
        for text in report(task, module.stem, options.plans, options.settings, is_apart=options.apart):
            print(text, flush=True)
            if options.out:
                with options.out.open("a") as file:
                    file.write(text + "\n")


if __name__ == "__main__":
    main()
