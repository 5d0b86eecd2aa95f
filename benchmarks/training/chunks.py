"""Prints what a training step whose last product is made in chunks of its rows holds, moves and multiplies on a GPU.

    python -m benchmarks.training.chunks [FILE]
    python -m benchmarks.training.chunks [FILE] --time

Needs no GPU and no memory: the step of FILE, by default `modules/linear_cross_entropy.py`, is traced on tensors without
data, plans are made and their bytes are counted. Held is the most that results of calls take at once, beside what is
given and what is given back. With `--time` steps are run where the tensors are put, `--target cuda` or `cpu`: as the
module has them, compiled, and as exports of plans with kernels beside products; times are medians, and peaks are the
device's own, of a step beyond what is there before. Nothing is judged.
"""

from __future__ import annotations

import argparse
import importlib.util
import runpy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from agent_synthesis.graphs import chunks
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.plans import chunking, cost, moves
from agent_synthesis.plans.plan import Plan, plan_zero
from benchmarks.timing import host_time
from orchestrator.exports import export_training
from warpsmith.graphs import dtypes, training_step
from warpsmith.graphs.capture import capture
from warpsmith.v1 import analysis_pb2, task_pb2

FILE = Path(__file__).parent / "modules" / "linear_cross_entropy.py"
WHOLE = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group="*", choice="beside_products")
_WARM, _TIMED = 3, 20
HEAD = "| plan | calls and kernels | held, MB | moved, GB | multiplied, TFLOP |"


def step_of(path: Path) -> Plan:
    """Plan zero of a file's training step on a GPU, with all gradients that it has."""
    named = runpy.run_path(str(path))
    with FakeTensorMode(allow_non_fake_inputs=True):
        module, inputs = named["Model"](*named.get("get_init_inputs", list)()), tuple(named["get_inputs"]())
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


def in_chunks(product: str, count: int) -> analysis_pb2.Move:
    """The move that makes a product in so many."""
    kind = analysis_pb2.MOVE_KIND_REWRITE
    return analysis_pb2.Move(kind=kind, group=product, choice=chunking.CHOICE, arguments={chunking.CHOICE: count})


def table(plan: Plan, product: str) -> Iterator[str]:
    """The table's lines."""
    yield f"{HEAD}\n|{'---|' * 5}\n{row('as it is', plan)}"
    for count in chunking.COUNTS:
        made = moves.apply(plan, in_chunks(product, count))
        yield row(f"{count} chunks", made)
        yield row(f"{count} chunks, kernels beside products", moves.apply(made, WHOLE))


def arms(path: Path, product: str, target: str) -> Iterator[tuple[str, torch.nn.Module]]:
    """The module, compiled, and exports: of the plan as it is, then in chunks."""
    named = runpy.run_path(str(path))
    module = named["Model"](*named.get("get_init_inputs", list)()).to(target)
    yield "eager", module
    yield "compiled", torch.compile(module)  # type: ignore[misc]
    for count in (0, *chunking.COUNTS):
        made = [*([in_chunks(product, count)] if count else []), WHOLE]
        text = export_training.text(host_time.a_step(path, target, moves=made)).text
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / f"chunks_{count}.py"
            file.write_text(text)
            spec = importlib.util.spec_from_file_location(file.stem, file)
            assert spec is not None
            assert spec.loader is not None
            exported = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(exported)
        ours = exported.ModelNew(*named.get("get_init_inputs", list)()).to(target)
        ours.load_state_dict(module.state_dict())
        yield f"{count} chunks" if count else "as it is", ours


def timed(module: torch.nn.Module, inputs: Sequence[Any], target: str) -> tuple[float, float]:
    """Median milliseconds of a step, and the device's peak in MB beyond what was there."""

    def step() -> None:
        for parameter in module.parameters():
            parameter.grad = None
        module(*inputs).backward()

    wait: Callable[[], None] = torch.cuda.synchronize if target == "cuda" else lambda: None
    taken, peak = list[float](), 0.0
    for number in range(_WARM + _TIMED):
        wait()
        if number == _WARM and target == "cuda":
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        step()
        wait()
        taken.append(1e3 * (time.perf_counter() - begin))
        if number == _WARM and target == "cuda":
            peak = (torch.cuda.max_memory_allocated() - before) / 1e6
    return statistics.median(taken[_WARM:]), peak


def main(arguments: Sequence[str]) -> int:
    """Prints the table; 1 where no product is made in chunks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("file", nargs="?", type=Path, default=FILE, help="a module; by default the last layer's")
    parser.add_argument("--time", action="store_true", help="run the steps")
    parser.add_argument("--target", choices=("cuda", "cpu"), default="cuda", help="where")
    options = parser.parse_args(arguments)
    plan = step_of(options.file)
    product = next((group.name for group in plan.groups if chunks.rows_of(plan.index, group.name)), None)
    if product is None:
        print("no product of the step is used up row by row", file=sys.stderr)
        return 1
    if not options.time:
        for line in table(plan, product):
            print(line, flush=True)
        return 0
    given = runpy.run_path(str(options.file))["get_inputs"]()
    inputs = [each.to(options.target).requires_grad_(each.is_floating_point()) for each in given]
    print("| step | ms | peak, MB |\n|---|---|---|")
    for name, module in arms(options.file, product, options.target):
        print("| {} | {:,.2f} | {:,.0f} |".format(name, *timed(module, inputs, options.target)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
