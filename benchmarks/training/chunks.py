"""Prints what a training step whose last product is made in chunks of its rows holds, moves and multiplies on a GPU.

    python -m benchmarks.training.chunks [FILE]

Needs no GPU and no memory: the step of FILE, by default `modules/linear_cross_entropy.py`, is traced on tensors without
data, plans are made and their bytes are counted. Held is the most that results of calls take at once, beside what is
given and what is given back.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from agent_synthesis.graphs import chunks
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.plans import chunking, cost, moves
from agent_synthesis.plans.plan import Plan, plan_zero
from warpsmith.graphs import dtypes, training_step
from warpsmith.graphs.capture import capture
from warpsmith.v1 import analysis_pb2, task_pb2

FILE = Path(__file__).parent / "modules" / "linear_cross_entropy.py"
HEAD = "| plan | calls and kernels | held, MB | moved, GB | multiplied, TFLOP |"


def step_of(path: Path) -> Plan:
    """Plan zero of a file's training step on a GPU, with all gradients that it has."""
    named = runpy.run_path(str(path))
    with FakeTensorMode(allow_non_fake_inputs=True):
        module, inputs = named["Model"](), tuple(named["get_inputs"]())
        step = training_step.described(task_pb2.TrainingStep(), module, inputs)
        module.__class__ = training_step.stepping(type(module), training_step.Step.of(step))
        given = (torch.empty(list(each.shape), dtype=dtypes.to_torch(each.dtype)) for each in step.gradients)
        graph = capture(module, (*inputs, *given), "cuda")
    return plan_zero(GraphIndex(graph), task_pb2.TARGET_CUDA)


def row(name: str, plan: Plan) -> str:
    """A line of the table."""
    total = cost.total(cost.of_group(plan, group) for group in plan.groups)
    moved = total.read_bytes + total.write_bytes + total.extra_bytes
    multiplied = total.product_flop_count + total.tensor_flop_count
    cells = f"{chunking.held_bytes(plan) / 1e6:,.0f} | {moved / 1e9:,.1f} | {multiplied / 1e12:,.1f}"
    return f"| {name} | {len(plan.groups)} | {cells} |"


def main(arguments: Sequence[str]) -> int:
    """Prints the table; 1 where no product is made in chunks."""
    plan = step_of(Path(arguments[0]) if arguments else FILE)
    product = next((group.name for group in plan.groups if chunks.rows_of(plan.index, group.name)), None)
    if product is None:
        print("no product of the step is used up row by row", file=sys.stderr)
        return 1
    print(f"{HEAD}\n|{'---|' * 5}\n{row('as it is', plan)}")
    for count in chunking.COUNTS:
        move = analysis_pb2.Move(
            kind=analysis_pb2.MOVE_KIND_REWRITE, group=product, choice=chunking.CHOICE, arguments={"chunks": count}
        )
        made = moves.apply(plan, move)
        whole = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group="*", choice="beside_products")
        print(row(f"{count} chunks", made))
        print(row(f"{count} chunks, kernels beside products", moves.apply(made, whole)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
