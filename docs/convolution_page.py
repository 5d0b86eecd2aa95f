"""Writes the excerpts of docs/convolution.md again: one convolution, from capture to the instructions of a GPU.

`python docs/convolution_page.py` rewrites the page, `--check` only says whether it is as the generator now works.
`--nvdisasm PATH` makes the instructions again as well, with CUDA's disassembler; without it they stay as they are.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import made_blocks

from agent_compile.compiler import Compiler
from agent_compile.toolchains.nvrtc import Nvrtc
from agent_synthesis import generator
from agent_synthesis.emit import function_text
from agent_synthesis.nests.ir import Nest
from agent_synthesis.plans import moves
from agent_synthesis.plans.plan import Plan
from warpsmith.errors import WarpsmithError
from warpsmith.v1 import analysis_pb2, artifact_pb2

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "convolution.md"
EXAMPLE = ROOT / "examples" / "convolution_block.py"
BY_DISASSEMBLER = frozenset({"loop", "instructions"})
"""Excerpts that need one."""
_TOLD = ("HGMMA", "UTMALDG", "SYNCS", "WARPGROUP", "STG", "LDG")
"""Instructions that are counted: products, copies of the copy engine, barriers and waits, stores and loads."""


def excerpts(nvdisasm: str = "") -> dict[str, str]:
    """Name of a block → its text."""
    plan = made_blocks.beginning(EXAMPLE)
    made = {"graph": made_blocks.graph_lines(plan.index.graph)}
    whole, made["moves"] = _whole(plan)
    group = next(group for group in whole.groups if group.schedule.startswith("cuda_convolution"))
    nest = whole.nest(group)
    assert isinstance(nest, Nest)
    made["nest"] = "\n".join(
        line.removeprefix("// ") for line in function_text.header(nest, group.schedule, group.settings)
    )
    settings = [each.move for each in moves.legal(whole) if each.move.kind == analysis_pb2.MOVE_KIND_SET]
    made["settings"] = "\n".join(made_blocks.spelled(move) for move in settings if move.group == group.name)
    program = generator.generate(whole)
    text = program.sources[0].text
    made["tiles"] = _between(text, f"using ws_{group.name}_tiles", ";\n")
    made["window"] = _between(text, f"struct ws_{group.name}_window ", "\n};\n")
    made["end"] = _between(text, f"struct ws_{group.name}_end ", "\n};\n")
    if nvdisasm:
        outcome = Compiler([Nvrtc()], None).compile(program).outcome
        if not isinstance(outcome, artifact_pb2.Artifact):
            raise WarpsmithError(f"it does not compile: {outcome.diagnostics}")
        made |= _instructions(outcome, f"ws_{group.name}_product", nvdisasm)
    return made


def _whole(plan: Plan) -> tuple[Plan, str]:
    """The convolution as a kernel of ours, and the whole plan; the groups after each move."""
    lines = [f"{'':24}  # {made_blocks.groups_after(plan)}"]
    for name, choice in ((plan.groups[0].name, "cuda_convolution_product"), ("*", "")):
        move = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group=name, choice=choice)
        made = moves.apply(plan, move)
        lines.append(f"{made_blocks.spelled(move):24}  # {made_blocks.groups_after(made)}")
    return made, "\n".join(lines)


def _between(text: str, begin: str, end: str) -> str:
    start = text.index(begin)
    return text[start : text.index(end, start) + len(end)]


def _instructions(artifact: artifact_pb2.Artifact, entry: str, nvdisasm: str) -> dict[str, str]:
    """The loop that multiplies, and how many instructions of a kind the whole kernel has."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(artifact.content)
        file.flush()
        said = subprocess.run([nvdisasm, "-c", file.name], capture_output=True, text=True, check=True).stdout
    kernel = re.split(r"^//-+ \.text\.", said, flags=re.MULTILINE)
    lines = next(part for part in kernel if part.startswith(entry)).splitlines()
    lines = [re.sub(r"^\s*/\*\w+\*/\s{0,19}", "", line).rstrip(" ;") for line in lines]
    counted = Counter(word for line in lines for word in _TOLD if re.match(rf"(@!?U?P\d )?{word}\b", line.strip()))
    resources = next(each for each in artifact.resources if each.entry == entry)
    counts = ", ".join(f"{counted[word]} {word}" for word in _TOLD)
    kept = f"{resources.register_count} registers a thread, {resources.spill_bytes} bytes spilled"
    return {"loop": "\n".join(_loop(lines)), "instructions": f"{kept}\n{counts}"}


def _loop(lines: list[str]) -> list[str]:
    """From the label to which the first branch behind the first product goes back."""
    first = next(number for number, line in enumerate(lines) if "HGMMA" in line)
    labels = {line.rstrip(":"): number for number, line in enumerate(lines[:first]) if re.match(r"\.L_\w+:$", line)}
    for number in range(first, len(lines)):
        to = re.search(r"BRA `\((\.L_\w+)\)", lines[number])
        if to and to.group(1) in labels:
            return lines[labels[to.group(1)] : number + 1]
    raise WarpsmithError("no loop has a product")


def main() -> int:
    """Rewrites the page, or checks it; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--nvdisasm", default="", help="path of CUDA's disassembler")
    given = parser.parse_args()
    made = made_blocks.written(PAGE.read_text(), excerpts(given.nvdisasm), BY_DISASSEMBLER)
    return made_blocks.rewrite(PAGE, made, check=given.check, command="python docs/convolution_page.py")


if __name__ == "__main__":
    sys.exit(main())
