"""What compute-sanitizer has to say of wrong kernels, of right ones, and of every CUDA schedule: on a GPU.

The one idea: the tools run as they do for finalists, in a jail. A wrong kernel has to be found by its tool, a right
one by none; a machine on which they cannot run says so, and nothing there counts as caught.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hostile_kernels as kernels
import torch

from agent_synthesis.nests import memory_access
from gpu_bench.sanitizing import sanitizer
from warpsmith.sandbox import jail
from warpsmith.v1 import analysis_pb2, artifact_pb2, candidate_pb2, graph_pb2, task_pb2, verdict_pb2

Built = tuple[candidate_pb2.Program, artifact_pb2.Artifact]
Compile = Callable[[candidate_pb2.Program], artifact_pb2.Artifact]

PLANTED = {
    "writes one past the end": "memcheck",
    "a missing barrier": "racecheck",
    "a workspace that nobody wrote": "initcheck",
    "one large copy": "",
    "a sum by barriers": "",
}
"""Kernel → the tool that finds what is wrong with it; empty for a right one."""


def check_kernel(built: Built, tool: str) -> str:
    """The tool finds the kernel wrong; with no tool, none finds anything."""
    found, skipped = inspect([built], (tool,) if tool else tuple(sanitizer.TOOLS))
    assert skipped or bool(found) == bool(tool), found or "nothing found"
    return skipped or found or "nothing found by any tool"


def check_emitters(compile_one: Compile) -> str:
    """No tool finds anything in any CUDA schedule, in every strategy and on every class of shape, or in a product."""
    programs = [*schedules(), *products()]
    with ThreadPoolExecutor(8) as pool:
        built = list(zip(programs, pool.map(compile_one, programs), strict=True))
    found, skipped = inspect(built, tuple(sanitizer.TOOLS))
    assert not found, found
    return skipped or f"nothing found by any tool in {len(built)} programs"


def inspect(built: Sequence[Built], tools: Sequence[str]) -> tuple[str, str]:
    """(what was found, why a tool says nothing); each empty for neither."""
    said: list[verdict_pb2.Inspection] = sanitizer.sanitize_all(built, jail.choose(), tools)
    found = sanitizer.fault(said)
    skipped = [f"skipped: {each.tool}: {each.skipped}" for each in said if each.skipped]
    return found.detail if found else "", skipped[0] if skipped else ""


def named(name: str) -> kernels.Kernel:
    """The kernel of that name."""
    return next(each for each in (*kernels.CASES, *kernels.HONEST) if each.name == name)


def schedules() -> list[candidate_pb2.Program]:
    """The slice of `tests/simt`, where every strategy and every class of shape is, as programs of their own."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "simt"))
    import simulated
    import subjects

    programs = []
    for subject in subjects.a_slice():
        program = simulated.program_of(subject.nest, subject.emission())
        program.outputs.extend(each.name for each in program.buffers if each.role == candidate_pb2.ROLE_OUTPUT)
        in_place = {load.buffer for load in memory_access.loads(subject.nest)}
        for position, buffer in enumerate(program.buffers):
            if buffer.role == candidate_pb2.ROLE_SOURCE or buffer.name in in_place:
                buffer.role = candidate_pb2.ROLE_SOURCE
                buffer.source.origin, buffer.source.input_index = graph_pb2.ORIGIN_INPUT, position
        programs.append(program)
    return programs


def products() -> list[candidate_pb2.Program]:
    """Products on tensor cores: whole tiles and ragged ones, of float32 and of bfloat16."""
    programs = []
    for rows, inputs, outputs, dtype in (
        (256, 512, 384, torch.float32),
        (131, 333, 201, torch.float32),
        (300, 512, 385, torch.bfloat16),
    ):
        module, x = torch.nn.Linear(inputs, outputs).to(dtype), torch.randn(rows, inputs, dtype=dtype)
        programs.append(authored(module, (x,)))
    return programs


def authored(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> candidate_pb2.Program:
    """What the product writes for the last group of a module, in its first schedule."""
    from agent_synthesis import generator
    from agent_synthesis.graphs.graph_index import GraphIndex
    from agent_synthesis.plans import moves
    from agent_synthesis.plans.plan import plan_zero
    from warpsmith.graphs.capture import capture

    plan = plan_zero(GraphIndex(capture(module, inputs)), task_pb2.TARGET_CUDA)
    move = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group=plan.groups[-1].name)
    return generator.generate(moves.apply(plan, move))
