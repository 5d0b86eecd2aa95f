"""Excerpts of pages that the code makes: a block that follows `<!-- made: NAME -->` is the excerpt of that name.

All other text of such a page is written by hand. A page's own script says what its excerpts are.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path

import torch

from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.plans.plan import Plan, plan_zero
from warpsmith.contract import words
from warpsmith.graphs.capture import capture
from warpsmith.v1 import analysis_pb2, graph_pb2, task_pb2

_BLOCK = re.compile(r"(<!-- made: (\w+) -->\n```\w*\n).*?(^```$)", re.MULTILINE | re.DOTALL)


def written(text: str, made: Mapping[str, str], kept: frozenset[str] = frozenset()) -> str:
    """A page's text with its excerpts made again; those of `kept` stay as they are where they are not made.

    Raises:
        KeyError: the page wants an excerpt that there is not.
    """

    def block(match: re.Match[str]) -> str:
        head, name, end = match.groups()
        if name in kept and name not in made:
            return match.group()
        return f"{head}{made[name].rstrip()}\n{end}"

    return _BLOCK.sub(block, text)


def rewrite(page: Path, made: str, *, check: bool, command: str) -> int:
    """Writes a page, or says whether it is as the code now makes it; the exit code."""
    if check and made != page.read_text():
        print(f"docs/{page.name} is not as the generator now works: {command}")
        return 1
    if not check:
        page.write_text(made)
    return 0


def beginning(example: Path) -> Plan:
    """Plan zero of a file in KernelBench's format, for a GPU."""
    spec = importlib.util.spec_from_file_location("example", example)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    model = module.Model(*module.get_init_inputs())
    return plan_zero(GraphIndex(capture(model, tuple(module.get_inputs()))), task_pb2.TARGET_CUDA)


def graph_lines(graph: graph_pb2.Graph) -> str:
    """Sources with their shapes, calls, and what is returned."""
    lines = [f"{source.name}: {list(source.spec.shape)}" for source in graph.sources]
    for node in graph.nodes:
        results = ", ".join(result.name for result in node.results if result.name)
        tensors = ", ".join(value.tensor for value in node.args if value.WhichOneof("kind") == "tensor")
        lines.append(f"{results} = {node.target}({tensors})")
    return "\n".join([*lines, f"return {', '.join(graph.outputs)}"])


def group_lines(plan: Plan) -> str:
    """Each group with what computes it."""
    width = max(len(group.name) for group in plan.groups)
    return "\n".join(f"{group.name:{width}}  {group.engine:8}  {group.schedule}".rstrip() for group in plan.groups)


def groups_after(plan: Plan) -> str:
    """The groups in one line, kernels of ours with their schedules."""
    return ", ".join(f"{g.name} ({g.schedule})" if g.engine == "authored" else g.name for g in plan.groups)


def spelled(move: analysis_pb2.Move) -> str:
    """A move as a command line shows it."""
    arguments = "".join(f" {name}={value}" for name, value in sorted(move.arguments.items()))
    return f"{words.move_kind(move.kind)} {move.group} {move.choice}{arguments}".rstrip()
