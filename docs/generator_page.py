"""Writes the excerpts of docs/generator.md again: what the generator makes of one example, stage by stage.

`python docs/generator_page.py` rewrites the page, `--check` only says whether it is as the generator now works.
"""

from __future__ import annotations

import difflib
import inspect
import re
import sys
from pathlib import Path

import made_blocks

from agent_synthesis import generator
from agent_synthesis.emit import function_text
from agent_synthesis.nests.ir import Nest
from agent_synthesis.plans import moves
from agent_synthesis.plans.plan import Plan
from agent_synthesis.rewrite import identities
from warpsmith.v1 import analysis_pb2

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "generator.md"
EXAMPLE = ROOT / "examples" / "gated_layer_norm.py"


def excerpts() -> dict[str, str]:
    """Name of a block → its text."""
    plan = made_blocks.beginning(EXAMPLE)
    made = {"graph": made_blocks.graph_lines(plan.index.graph), "plan_zero": made_blocks.group_lines(plan)}
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
    settings = [
        made_blocks.spelled(legal.move) for legal in moves.legal(fused) if legal.move.kind == analysis_pb2.MOVE_KIND_SET
    ]
    made["settings"] = "\n".join(sorted(settings, key=len)[:8])
    made["operation"] = "\n".join(_lines_with(re.compile(r"\berfc\b")))
    made["composed"] = "\n".join(_lines_with(re.compile(r'_number\("mish"')))
    made["rule"] = inspect.getsource(identities.Involution)
    return made


def files(text: str) -> list[str]:
    """Every file and folder of the repository that the page names."""
    return re.findall(r"`((?:agent_\w+|tests|examples|docs)/[\w./]+)`", text)


def written(text: str) -> str:
    """The page with its excerpts made again."""
    return made_blocks.written(text, excerpts())


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
        lines.append(f"{made_blocks.spelled(move):24}  # {made_blocks.groups_after(plan)}")
    return plan, "\n".join(lines)


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
    is_check = "--check" in sys.argv[1:]
    made = written(PAGE.read_text())
    return made_blocks.rewrite(PAGE, made, check=is_check, command="python docs/generator_page.py")


if __name__ == "__main__":
    sys.exit(main())
