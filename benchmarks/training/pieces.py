"""Prints what whole plans of training steps move on a GPU, and what they keep between forward and backward.

    python -m benchmarks.training.pieces [FILE ...]
    python -m benchmarks.training.pieces --table RESULTS.jsonl

Needs no GPU: plans are made, and nothing is run. FILES define Model and get_inputs; by default those of
`benchmarks/training/modules`, which `warpsmith bench benchmarks/training/modules --grad all` times. The floor is what
is read and written at the least: the forward's inputs once by each half, gradients, outputs. The second prints what
such a bench has measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from agent_synthesis.graphs.capture_worker import capture_task
from agent_synthesis.graphs.graph_index import GraphIndex, byte_count
from agent_synthesis.plans import cost, moves, saving
from agent_synthesis.plans.plan import Plan, plan_zero
from benchmarks.kernelbench import level1, networks
from orchestrator.tasks import intake
from warpsmith.errors import IllegalMove
from warpsmith.v1 import analysis_pb2, graph_pb2, task_pb2

MODULES = Path(__file__).parent / "modules"
HEAD = "| step | calls | kernels | plan zero, MB | whole plan, MB | floor, MB | kept, MB: plan zero | whole plan |"


def step_of(path: Path) -> Plan:
    """Plan zero of a file's training step, with all of its gradients, on a GPU."""
    request = intake.Request(str(path), target="cuda", gradients=())
    task = intake.inspect(intake.read(request))
    return plan_zero(GraphIndex(capture_task(task)), task_pb2.TARGET_CUDA)


def authored(plan: Plan) -> Plan:
    """The whole plan."""
    return moves.apply(plan, analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group="*"))


def moved(plan: Plan) -> int:
    """Bytes that a plan's groups read and write."""
    costs = [cost.of_group(plan, group) for group in plan.groups]
    return sum(each.read_bytes + each.write_bytes for each in costs)


def floor(index: GraphIndex) -> int:
    """Bytes that a step reads and writes at the least, its backward reading the forward's inputs once more."""
    graph = index.graph
    sources = [source for source in graph.sources if source.origin != graph_pb2.ORIGIN_CONSTANT]
    inputs = [source for source in sources if source.origin == graph_pb2.ORIGIN_INPUT]
    again = sum(byte_count(source.spec) for source in inputs if source.name not in graph.gradients)
    outputs = sum(byte_count(index.spec(name)) for name in dict.fromkeys(graph.outputs))
    return sum(byte_count(source.spec) for source in sources) + again + outputs


def row(path: Path) -> str:
    """A line of the table."""
    plan = step_of(path)
    whole = authored(plan)
    kernels = sum(group.engine == "authored" for group in whole.groups)
    numbers = [moved(plan), moved(whole), floor(plan.index), *(saving.saved_bytes(p.index) for p in (plan, whole))]
    cells = " | ".join(f"{number / 1e6:,.1f}" for number in numbers)
    return f"| {path.stem} | {len(plan.groups)} | {kernels} | {cells} |"


def measured(results: Path) -> str:
    """What a bench has measured, medians in µs, as Markdown: the mean and what is slower first."""
    rows = networks.read(results)
    timed = level1.timed_of(rows)
    slow = [f"{row['name']} {level1.speedup(row):.2f}x" for row in timed if level1.speedup(row) < 1]
    head = ["step", "kind", "verdict", "eager", "compiled", "ours", "against fastest", "fastest", "floor"]
    head += ["KernelBench's check", "trials", "s", "labels"]
    mean = level1.geomean(map(level1.speedup, timed))
    lines = [
        f"- geometric mean of {len(timed)} against the fastest: {mean:.2f}x",
        f"- slower: {', '.join(slow) or 'none'}",
    ]
    lines += ["", f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    return "\n".join([*lines, *(level1.line_of(row, "training step") for row in rows)])


def main(arguments: Sequence[str]) -> int:
    """Prints the table; 1 where a step has no whole plan."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("files", nargs="*", type=Path, help="modules; by default those beside this file")
    parser.add_argument("--table", type=Path, metavar="RESULTS", help="only print what these results say")
    options = parser.parse_args(arguments)
    if options.table:
        print(measured(options.table))
        return 0
    files = options.files or sorted(MODULES.glob("*.py"))
    failed = False
    print(f"{HEAD}\n|{'---|' * HEAD.count('|')}"[: -len("---|")])
    for path in files:
        try:
            print(row(path), flush=True)
        except IllegalMove as error:
            failed = True
            print(f"{path.stem}: {error}", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
