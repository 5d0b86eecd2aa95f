"""Whether networks that nobody here has named are taken: captured, planned as a whole, right, and compiled.

    python -m benchmarks.search.architectures timm --out timm.jsonl [--only NAME ...] [--compile] [--seconds 120]
    python -m benchmarks.search.architectures torchvision --out torchvision.jsonl [--dtype bfloat16]
    python -m benchmarks.search.architectures transformers --out transformers.jsonl

Architectures of a package, without weights (`architecture_packages`). A module's whole plan for an H200 (a layout for
all, kernels beside products) is computed by what its kernels mean and compared with what PyTorch gives in the same
types; `--compile` has NVRTC compile it. A row has besides what the plan leaves to PyTorch, which copies of activations
it makes for layouts, and how much memory its results need beside those of eager. Nothing is timed; needs no GPU. A file
is gone on with: what it has is not done again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import signal
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from agent_compile.compiler import Compiler
from agent_compile.toolchains.nvrtc import Nvrtc
from agent_compile.toolchains.toolchain import Rejected
from agent_synthesis.generator import generate
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.nests.interpreter import run_plan
from agent_synthesis.plans import moves
from agent_synthesis.plans.plan import Plan, plan_zero
from agent_synthesis.rewrite.calls import operation
from benchmarks.search.architecture_packages import MOST_PARAMETERS, PACKAGES, Made
from benchmarks.search.whole_plans import MOVES
from gpu_bench.running.gpu.workspace_plan import WorkspacePlan, span_bytes
from warpsmith.errors import IllegalMove
from warpsmith.graphs import aten
from warpsmith.graphs.capture import capture
from warpsmith.program_steps import lifetimes
from warpsmith.v1 import candidate_pb2, graph_pb2, task_pb2

TOLERANCE = 1e-3
"""Largest error relative to the output (Frobenius): sums in another order, through dozens of layers, stay below."""
_INPUT = graph_pb2.ORIGIN_INPUT
WORSE = 2.0
"""How often the error of PyTorch's own result a result may be off, both from that in float64: norms of a batch of two
leave signs alone."""


class _Late(Exception):
    """The time of a network is over."""


def main() -> None:
    """Sweeps a package and prints the tally."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", choices=sorted(PACKAGES))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--compile", action="store_true", dest="compiles")
    parser.add_argument("--seconds", type=int, default=120, help="of a processor, for one network")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    known = [json.loads(line) for line in asked.out.read_text().splitlines()] if asked.out.exists() else []
    done = {row["name"] for row in known}
    compiler = Compiler([Nvrtc()], None) if asked.compiles else None
    with contextlib.closing(compiler) if compiler else contextlib.nullcontext(), asked.out.open("a") as out:
        for name, make in PACKAGES[asked.package]():
            if name in done or (asked.only and name not in asked.only):
                continue
            row = {"name": name, **_within(asked.seconds, make, getattr(torch, asked.dtype), compiler)}
            known.append(row)
            print(json.dumps(row), file=out, flush=True)
            print(f"{name}: {row.get('failed') or row.get('skipped') or 'right'}", flush=True)
    print(tally(known))


def tally(rows: list[dict[str, Any]]) -> str:
    """How many were right, and what became of the others."""
    found = Counter("failed" if "failed" in row else "skipped" if "skipped" in row else "right" for row in rows)
    lines = [
        f"{len(rows)} architectures: " + ", ".join(f"{found[each]} {each}" for each in ("right", "skipped", "failed"))
    ]
    lines += [f"  {row['name']}: {row['failed']}" for row in rows if "failed" in row]
    return "\n".join(lines)


def _within(seconds: int, make: Callable[[], Made], dtype: torch.dtype, compiler: Compiler | None) -> dict[str, Any]:
    """What became of a network. Skipped is what its own package or `torch.export` does not take, and what is late."""

    def late(*_: object) -> None:
        raise _Late(f"more than {seconds} s of a processor")

    signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    begin = time.process_time()
    row: dict[str, Any] = {}
    try:
        try:
            module, inputs = make()
            if sum(parameter.numel() for parameter in module.parameters()) > MOST_PARAMETERS:
                return {"skipped": "too large"}
            module = module.to(dtype)
            inputs = tuple(each.to(dtype) if each.is_floating_point() else each for each in inputs)
            with torch.no_grad():
                module(*inputs)
        except Exception as error:
            return {"skipped": f"not built: {_said(error)}"}
        row |= {"training": module.training, **checked(module, inputs, compiler)}
    except _Late as error:
        row["skipped"] = str(error)
    except Exception as error:
        row["failed"] = f"{_said(error)} ({traceback.extract_tb(error.__traceback__)[-1].name})"
        with contextlib.suppress(_Late):
            try:
                torch.export.export(module, inputs, strict=False)
            except _Late:
                raise
            except Exception as refused:
                del row["failed"]
                row["skipped"] = f"torch.export: {_said(refused)}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return {**row, "seconds": round(time.process_time() - begin, 1)}


def checked(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], compiler: Compiler | None) -> dict[str, Any]:
    """Captures and plans a network, and says how far its plan's results are from PyTorch's."""
    begin = time.process_time()
    graph = capture(module, inputs)
    zero = plan = plan_zero(GraphIndex(graph), task_pb2.TARGET_CUDA)
    for move in MOVES:
        with contextlib.suppress(IllegalMove):
            plan = moves.apply(plan, move)
    row: dict[str, Any] = {
        "operations": len(graph.nodes),
        "kernels": sum(group.engine == "authored" for group in plan.groups),
        "plan_seconds": round(time.process_time() - begin, 1),
        "left": _left(plan),
        "conversions": _conversions(zero, plan),
        "memory": _memory(zero, plan),
    }
    sources = _sources(graph, module, inputs)
    torch.manual_seed(0)
    results = aten.interpret(graph, {name: tensor.clone() for name, tensor in sources.items()})
    expected = [results[name] for name in graph.outputs]
    torch.manual_seed(0)
    given = run_plan(plan, {name: tensor.clone() for name, tensor in sources.items()})
    row["error"] = max(map(_far, given, expected))
    if row["error"] > TOLERANCE and not any(node.random for node in graph.nodes):
        truth = _truth(module, inputs)
        row["error"], row["pytorchs_error"] = (max(map(_far, each, truth)) for each in (given, expected))
    if not row["error"] <= max(TOLERANCE, WORSE * row.get("pytorchs_error", 0)):
        row["failed"] = f"wrong by {row['error']:.2g}"
    elif compiler is not None:
        outcome = compiler.compile(generate(plan)).outcome
        if isinstance(outcome, Rejected):
            row["failed"] = f"does not compile: {outcome.diagnostics[:300]}"
    return row


def _truth(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """What the module gives in float64."""
    with torch.no_grad():
        results = module.double()(*(each.double() if each.is_floating_point() else each for each in inputs))
    return [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]


def _left(plan: Plan) -> dict[str, int]:
    """How many calls of each operation are left to PyTorch."""
    calls = (plan.index.nodes[group.nodes[0]] for group in plan.groups if group.engine == "library")
    return dict(Counter(map(operation, calls)))


def _conversions(zero: Plan, plan: Plan) -> int:
    """Copies of what is computed that the layout of a plan has brought in, alone or in kernels."""
    own = plan.index
    new = [name for name, node in own.nodes.items() if name not in zero.index.nodes and operation(node) == "clone"]
    return sum(any(own.root[read] not in own.sources for read in own.reads(name)) for name in new)


def _memory(zero: Plan, plan: Plan) -> float:
    """Bytes that the results of a plan need, its own in one block, beside the most that eager holds at once. Weights
    that are laid out anew are not counted."""
    program, known = generate(plan), {name for name, each in plan.index.sources.items() if each.origin != _INPUT}
    for node in plan.index.graph.nodes:
        if known.issuperset(plan.index.reads(node.name)):
            known.update(plan.index.results(node.name))
    for buffer in program.buffers:
        if buffer.name in known:
            buffer.role = candidate_pb2.ROLE_SOURCE
    own = WorkspacePlan.of(program).byte_count + _held(plan, program)
    return round(own / max(1, _held(zero, generate(zero))), 2)


def _held(plan: Plan, program: candidate_pb2.Program) -> int:
    """The most bytes of library calls' results that live at once; views live in what they look at."""
    root, role = plan.index.root, candidate_pb2.ROLE_LIBRARY
    inside = {name: [memory] for name, memory in root.items() if name != memory}
    held = [0] * len(program.steps)
    lives = lifetimes(program, role, inside=inside)
    for buffer in program.buffers:
        if buffer.name in lives and buffer.name not in inside:
            first, last = lives[buffer.name]
            held[first : last + 1] = [each + span_bytes(buffer.spec) for each in held[first : last + 1]]
    return max(held, default=0)


def _sources(
    graph: graph_pb2.Graph, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]
) -> dict[str, torch.Tensor]:
    members = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    found = {}
    for source in graph.sources:
        if source.origin == graph_pb2.ORIGIN_INPUT:
            found[source.name] = inputs[source.input_index]
        elif source.origin == graph_pb2.ORIGIN_CONSTANT:
            found[source.name] = aten.constant(source, torch.device("cpu"))
        else:
            found[source.name] = members[source.qualified_name].detach()
    return found


def _far(given: torch.Tensor, expected: torch.Tensor) -> float:
    if not expected.is_floating_point():
        return float((given != expected).any())
    off = (given.double() - expected.double()).norm()
    return float(off / expected.double().norm().clamp(min=1e-30)) if float(off) else 0.0


def _said(error: BaseException) -> str:
    """Without the folders of this machine."""
    text = re.sub(r"/[^\s'\"]+/", "", " ".join(str(error).split()))
    return f"{type(error).__name__}: {text[:200]}"


if __name__ == "__main__":
    main()
