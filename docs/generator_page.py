"""Writes the excerpts of docs/generator.md again: what the generator makes of one example, stage by stage.

`python docs/generator_page.py` rewrites the page, `--check` only says whether it is as the generator now works. A block
of the page that follows `<!-- made: NAME -->` is the excerpt of that name; all other text is written by hand.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType

from agent_synthesis import generator
from agent_synthesis.emit import function_text
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.nests.ir import Nest
from agent_synthesis.plans import moves
from agent_synthesis.plans.plan import Plan, plan_zero
from agent_synthesis.rewrite import identities
from warpsmith.contract import words
from warpsmith.graphs.capture import capture
from warpsmith.v1 import analysis_pb2, graph_pb2, task_pb2

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "generator.md"
EXAMPLE = ROOT / "examples" / "gated_layer_norm.py"
_BLOCK = re.compile(r"(<!-- made: (\w+) -->\n```\w*\n).*?(^```$)", re.MULTILINE | re.DOTALL)


def excerpts() -> dict[str, str]:
    """Name of a block → its text."""
    module = _load()
    model = module.Model(*module.get_init_inputs())
    plan = plan_zero(GraphIndex(capture(model, tuple(module.get_inputs()))), task_pb2.TARGET_CUDA)
    made = {"graph": _graph(plan.index.graph), "plan_zero": _groups(plan)}
    fused, walked = _fuse(plan)
    made["moves"] = walked
    group = next(group for group in fused.groups if group.engine == "authored")
    nest = fused.nest(group)
    assert isinstance(nest, Nest)
    made["nest"] = "\n".join(
        line.removeprefix("// ") for line in function_text.header(nest, group.schedule, group.settings)[1:-1]
    )
    source = _kernel(fused)
    made["source"] = source
    move = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_SET, group=group.name, choice="preload=no")
    made["set"] = _difference(source, _kernel(moves.apply(fused, move)))
    settings = [_spelled(legal.move) for legal in moves.legal(fused) if legal.move.kind == analysis_pb2.MOVE_KIND_SET]
    made["settings"] = "\n".join(sorted(settings, key=len)[:8])
    made["operation"] = "\n".join(_lines_with(re.compile(r"\berfc\b")))
    made["composed"] = "\n".join(_lines_with(re.compile(r'_number\("mish"')))
    made["rule"] = inspect.getsource(identities.Involution)
    return made


def files(text: str) -> list[str]:
    """Every file and folder of the repository that the page names."""
    return re.findall(r"`((?:agent_\w+|tests|examples|docs)/[\w./]+)`", text)


def written(text: str) -> str:
    """The page with its excerpts made again.

    Raises:
        KeyError: the page wants an excerpt that there is not.
    """
    made = excerpts()
    return _BLOCK.sub(lambda match: f"{match.group(1)}{made[match.group(2)].rstrip()}\n{match.group(3)}", text)


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _graph(graph: graph_pb2.Graph) -> str:
    lines = [f"{source.name}: {list(source.spec.shape)}" for source in graph.sources]
    for node in graph.nodes:
        results = ", ".join(result.name for result in node.results if result.name)
        tensors = ", ".join(value.tensor for value in node.args if value.WhichOneof("kind") == "tensor")
        lines.append(f"{results} = {node.target}({tensors})")
    return "\n".join([*lines, f"return {', '.join(graph.outputs)}"])


def _groups(plan: Plan) -> str:
    width = max(len(group.name) for group in plan.groups)
    return "\n".join(f"{group.name:{width}}  {group.engine:8}  {group.schedule}".rstrip() for group in plan.groups)


def _fuse(plan: Plan) -> tuple[Plan, str]:
    """Moves until one group is left, each with the groups after it."""
    lines: list[str] = []
    while len(plan.groups) > 1:
        names = [group.name for group in plan.groups]
        move = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group=names[-1])
        if plan.groups[-1].engine == "authored":
            nearest = max(plan.producers(plan.groups[-1]), key=names.index)
            move = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_FUSE, group=names[-1], choice=nearest)
        plan = moves.apply(plan, move)
        groups = [f"{g.name} ({g.schedule})" if g.engine == "authored" else g.name for g in plan.groups]
        lines.append(f"{_spelled(move):24}  # {', '.join(groups)}")
    return plan, "\n".join(lines)


def _spelled(move: analysis_pb2.Move) -> str:
    arguments = "".join(f" {name}={value}" for name, value in sorted(move.arguments.items()))
    return f"{words.move_kind(move.kind)} {move.group} {move.choice}{arguments}".rstrip()


def _kernel(plan: Plan) -> str:
    """The program's own text, without the list of moves and the includes."""
    text = generator.generate(plan).sources[0].text
    return text[text.index("\n// ", text.index("#include")) + 1 :]


def _difference(old: str, new: str) -> str:
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=0)
    return "\n".join(line for line in list(lines)[2:] if not line.startswith("@@"))


def _lines_with(wanted: re.Pattern[str]) -> list[str]:
    """Lines of the generator's own sources, with their files, shortened to what stands about the words."""
    found = []
    package = ROOT / "agent_synthesis"
    for path in sorted(path for path in package.rglob("*") if path.suffix in (".py", ".hpp", ".cuh")):
        if path.name.startswith("random_"):
            continue
        for line in path.read_text().splitlines():
            if match := wanted.search(line):
                cut = (
                    line.strip() if len(line) < 90 else f"... {line[max(0, match.start() - 20) : match.end() + 40]} ..."
                )
                found.append(f"{path.relative_to(ROOT)}: {cut}")
    return found


def main() -> int:
    """Rewrites the page, or checks it; the exit code."""
    text = PAGE.read_text()
    made = written(text)
    if "--check" in sys.argv[1:]:
        if made != text:
            print("docs/generator.md is not as the generator now works: python docs/generator_page.py")
        return int(made != text)
    PAGE.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
