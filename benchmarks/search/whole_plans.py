"""What becomes of a network by whole plans: groups, library calls, kernels, and the memory of their results.

    python -m benchmarks.search.whole_plans MODULE.py

MODULE.py is in KernelBench's format. Layout, kernels beside matrix products and launch as a CUDA graph are made one
after the other, as far as they are legal, for an H200. Nothing is computed or timed; needs no GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections import Counter
from pathlib import Path
from types import ModuleType

from agent_synthesis.generator import generate
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.plans import alike, moves
from agent_synthesis.plans.plan import Plan, plan_zero
from gpu_bench.running.gpu.workspace_plan import WorkspacePlan, span_bytes
from warpsmith.contract import words
from warpsmith.errors import IllegalMove
from warpsmith.graphs.capture import capture
from warpsmith.v1 import analysis_pb2, candidate_pb2, task_pb2

MOVES = [
    analysis_pb2.Move(kind=kind, group="*", choice=choice)
    for kind, choice in (
        (analysis_pb2.MOVE_KIND_LAYOUT, "channels_last"),
        (analysis_pb2.MOVE_KIND_AUTHOR, "beside_products"),
        (analysis_pb2.MOVE_KIND_LAUNCH, "cuda_graph"),
    )
]


def main() -> None:
    """Prints a row for each plan, and what the kernels of the last compute."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module", type=Path)
    user = _loaded(parser.parse_args().module)
    module = user.Model(*user.get_init_inputs())
    plan = plan_zero(GraphIndex(capture(module, tuple(user.get_inputs()))), task_pb2.TARGET_CUDA)
    calls = Counter(node.target.split(".")[1] for node in plan.index.graph.nodes)
    print("calls: " + ", ".join(f"{count} {name}" for name, count in calls.most_common()))
    print("\n| plan | groups | library calls | kernels | which differ | results, MiB | in one block, MiB |")
    print("|---|---|---|---|---|---|---|")
    print(_row("plan zero", plan))
    for move in MOVES:
        try:
            plan = moves.apply(plan, move)
        except IllegalMove as error:
            print(f"| {words.move(move)} | refused: {error} | | | | | |")
        else:
            print(_row(words.move(move), plan))
    kernels = Counter(
        "+".join(plan.index.nodes[node].target.split(".")[1] for node in plan.all_nodes(group))
        for group in plan.groups
        if group.engine == "authored"
    )
    print("\nkernels: " + ", ".join(f"{count} {name}" for name, count in kernels.most_common()))


def _row(name: str, plan: Plan) -> str:
    program, classes = generate(plan), alike.classes(plan)
    kinds = Counter(step.WhichOneof("kind") for step in program.steps)
    forms = {classes[group.name][0] for group in plan.groups if group.engine == "authored"}
    workspaces = [buffer for buffer in program.buffers if buffer.role == candidate_pb2.ROLE_WORKSPACE]
    apart = sum(span_bytes(buffer.spec) for buffer in workspaces) >> 20
    cells = (len(plan.groups), kinds["library"], kinds["launch"], len(forms), apart)
    return f"| {name} | {' | '.join(map(str, cells))} | {WorkspacePlan.of(program).byte_count >> 20} |"


def _loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("module_of_the_user", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


if __name__ == "__main__":
    main()
