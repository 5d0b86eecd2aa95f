"""Where a plan's time goes, step by step, beside the kernels of `torch.compile`.

    python -m benchmarks.timing.step_times MODULE.py … [--plans 2] [--target cuda] [--out FILE]

MODULE.py is in KernelBench's format. Plans are what a search begins with, launched step by step: a step finds in the
caches what the one before has left there. A table for each plan, and one of all kernels of a compiled call, slowest
first; it is for finding out why a network is slower than PyTorch, and nothing is judged.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from agent_compile.compiler import Compiler
from agent_compile.toolchains.gxx import Gxx
from agent_compile.toolchains.nvrtc import Nvrtc
from agent_reasoning.roofline_reasoner import RooflineReasoner
from agent_synthesis import generator
from agent_synthesis.synthesizer import BuiltInSynthesizer
from gpu_bench import device
from gpu_bench.judging.loaded import LoadedTask
from gpu_bench.running.executor import TorchMemory
from gpu_bench.timing.clocks import CudaClock, HostClock
from gpu_bench.timing.interleaving import measure_steps
from gpu_bench.timing.measurement import step_infos
from orchestrator.tasks import intake
from warpsmith.contract import words
from warpsmith.errors import IllegalMove, WarpsmithError
from warpsmith.v1 import analysis_pb2, artifact_pb2, candidate_pb2, reasoning_service_pb2, task_pb2

CALLS = 9
"""Of a compiled module, of which the profiler gives the mean."""


def plans(task: task_pb2.Task, count: int) -> Iterator[tuple[str, candidate_pb2.Program]]:
    """What a search begins with, as moves and program; launches as graphs are left out, which no clock sees into."""
    synthesizer = BuiltInSynthesizer()
    request = reasoning_service_pb2.ProposeHypothesesRequest(task=task, analysis=synthesizer.analyze(task, []))
    seen: set[str] = set()
    for hypothesis in RooflineReasoner().propose(request).hypotheses:
        moves = [move for move in hypothesis.moves if move.kind != analysis_pb2.MOVE_KIND_LAUNCH]
        try:
            program = generator.generate(synthesizer.plan(task, moves))
        except IllegalMove:
            continue
        if program.digest not in seen and len(seen) < count:
            seen.add(program.digest)
            yield words.moves(moves) or "plan zero", program


def steps_table(loaded: LoadedTask, program: candidate_pb2.Program, ceilings: device.Ceilings) -> list[str]:
    """A row for each step, slowest first: µs, MB of the buffers that it touches, share of what a copy reaches."""
    artifact = Compiler([Nvrtc(), Gxx()], None).compile(program).outcome
    if not isinstance(artifact, artifact_pb2.Artifact):
        raise WarpsmithError(f"it does not compile: {artifact.diagnostics}")
    cache_bytes, is_cuda = ceilings.device.cache_bytes, loaded.device.type == "cuda"
    clock = CudaClock(cache_bytes) if is_cuda else HostClock(cache_bytes)
    args = loaded.user.inputs(0, loaded.device)
    workspaces = TorchMemory(loaded.device) if is_cuda else None
    ready, sources = loaded.load_program(program, artifact), loaded.sources(args)
    kept = ready.keep(sources)
    bound = ready.bind(sources, None, clock.stamp, workspaces, kept)
    found = list(zip(step_infos(program), measure_steps(bound, clock), strict=True))
    total, copied = sum(ns for _, ns in found), ceilings.device.copy_bytes_per_second
    lines = [f"{total / 1e3:.1f} µs in {len(found)} steps", "", "| step | by | µs | MB | of a copy |", "|---" * 5 + "|"]
    for info, ns in sorted(found, key=lambda each: -each[1]):
        share = info.byte_count / ns * 1e9 / copied if ns and copied else 0.0
        by = "library" if info.engine == analysis_pb2.ENGINE_LIBRARY else "ours"
        lines.append(
            f"| {info.name} ({info.group}) | {by} | {ns / 1e3:.1f} | {info.byte_count / 1e6:.1f} | {share:.0%} |"
        )
    return lines


def compiled_table(loaded: LoadedTask) -> list[str]:
    """A row for each kernel of a compiled call, slowest first: µs a call, launches a call."""
    args = loaded.user.inputs(0, loaded.device)
    compiled = torch.compile(loaded.module, dynamic=False)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.no_grad():
        for _ in range(3):
            compiled(*args)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(CALLS):
                compiled(*args)
            torch.cuda.synchronize()
    found = sorted(profile.key_averages(), key=lambda each: -each.self_device_time_total)
    total = sum(each.self_device_time_total for each in found) / CALLS
    lines = [f"{total:.1f} µs", "", "| kernel | µs | launches |", "|---" * 3 + "|"]
    return lines + [
        f"| {each.key[:120]} | {each.self_device_time_total / CALLS:.1f} | {each.count / CALLS:.0f} |" for each in found
    ]


def report(file: Path, target: str, count: int) -> Iterator[str]:
    """All that is told of a module, as Markdown. Raises BadInput."""
    task = intake.read(intake.Request(str(file), target=target))
    ceilings = device.describe(task.target)
    yield f"## {file.stem}"
    for name, program in plans(task, count):
        loaded = LoadedTask.load(task)
        yield "\n".join(["", f"### {name}", "", *steps_table(loaded, program, ceilings)])
    if task.target == task_pb2.TARGET_CUDA:
        yield "\n".join(["", "### torch.compile", "", *compiled_table(LoadedTask.load(task))])


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the tables, or writes them as they come."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", type=Path, nargs="+")
    parser.add_argument("--plans", type=int, default=2, help="so many of what a search begins with")
    parser.add_argument("--target", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--out", type=Path, help="a file that the tables are added to")
    options = parser.parse_args(arguments)
    for module in options.modules:
        for text in report(module, options.target, options.plans):
            print(text, flush=True)
            if options.out:
                with options.out.open("a") as file:
                    file.write(text + "\n")


if __name__ == "__main__":
    main()
