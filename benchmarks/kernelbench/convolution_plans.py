"""Shows, without a GPU, which kernel takes each convolution of a folder's modules, and what its neighbours become.

    python -m benchmarks.kernelbench.convolution_plans KernelBench/KernelBench/level1 … [--only 50 76] [--out FILE]

Modules are in KernelBench's format, captured at their own size, of inputs that are fake tensors. The plan is the
whole one that a search begins with. A row for each call that convolves: what takes it, or why nothing does; the calls
that are in its kernel; and those that read its result from a kernel of their own. Nothing is compiled or run.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.lowering.groups import Refusal
from agent_synthesis.nests.analysis import convolution
from agent_synthesis.nests.ir import Nest
from agent_synthesis.plans import whole
from agent_synthesis.plans.partition import Group
from agent_synthesis.plans.plan import Plan, plan_zero
from agent_synthesis.rewrite.calls import arguments, operation, shape
from benchmarks.module_tables import markdown
from warpsmith.errors import WarpsmithError
from warpsmith.graphs.capture import capture
from warpsmith.v1 import task_pb2, tensor_pb2

COLUMNS = ("module", "convolution", "schedule, or why none", "in its kernel", "read its result apart")
LIBRARY = "library"
USUAL = {"stride": 1, "padding": 0, "output_padding": 0, "dilation": 1, "groups": 1}


def index_of(file: Path) -> GraphIndex:
    """The graph of a module in KernelBench's format, at its own size. Raises whatever its code raises."""
    spec = importlib.util.spec_from_file_location(f"module_{file.stem}", file)
    assert spec is not None, file
    assert spec.loader is not None, file
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    built = module.Model(*module.get_init_inputs())  # of real weights: some modules look at them
    with FakeTensorMode():
        args = module.get_inputs()
    return GraphIndex(capture(built, args, "cuda"))


def whole_plan(index: GraphIndex) -> Plan:
    """What is in kernels of ours as far as it goes; plan zero where nothing is."""
    plan = plan_zero(index, task_pb2.TARGET_CUDA)
    try:
        return whole.authored(plan, "")
    except WarpsmithError:
        return plan


def why_none(plan: Plan, group: Group) -> str:
    """Why the library keeps a convolution, in a few words."""
    nest = plan.nest(group)
    if isinstance(nest, Refusal):
        return nest.reason
    return _why_not(nest)


def _why_not(nest: Nest) -> str:
    if convolution.convolution(nest) is None:
        return "its windows do not slide along axes of their own"
    return "no schedule takes it"


def rows(plan: Plan, name: str) -> Iterator[tuple[str, ...]]:
    """Of each convolution of a plan what `COLUMNS` ask for."""
    for group in plan.groups:
        convolving = [node for node in group.nodes if operation(plan.index.nodes[node]).startswith("conv")]
        for node in convolving:
            others = [operation(plan.index.nodes[each]) for each in plan.all_nodes(group) if each not in convolving]
            read = {reader for made in plan.outputs(group) for reader in plan.partition.readers[made]} - {""}
            apart = [operation(plan.index.nodes[each]) for each in sorted(read)]
            taken = group.schedule or f"{LIBRARY}: {why_none(plan, group)}"
            yield name, shapes(plan, node), taken, words(others), words(apart)


def words(operations: Sequence[str]) -> str:
    """Operations by name, those of several calls with their number."""
    return ", ".join(f"{name} x{n}" if n > 1 else name for name, n in Counter(operations).items()) or "-"


def shapes(plan: Plan, name: str) -> str:
    """A convolution's shapes, its type unless it is that of floats, and options that are not the usual ones."""
    node = plan.index.nodes[name]
    given = arguments(node)
    said = [" * ".join("x".join(map(str, shape(plan.index, given[each]))) for each in ("input", "weight"))]
    for option, usual in USUAL.items():
        value = given.get(option, usual)
        values = list(value) if isinstance(value, list | tuple) else [value]
        if any(each != usual for each in values):
            said.append(f"{option} {'x'.join(str(each) for each in dict.fromkeys(values))}")
    dtype = plan.index.spec(node.results[0].name).dtype
    if dtype != tensor_pb2.DTYPE_FLOAT32:
        said.append(tensor_pb2.Dtype.Name(dtype).removeprefix("DTYPE_").lower())
    return f"{operation(node)} {', '.join(said)}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table, or writes it as well, and of each folder how many convolutions each schedule takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--only", nargs="*", default=[], help="numbers that files begin with")
    parser.add_argument("--out", type=Path, help="file to write the table to")
    options = parser.parse_args(arguments)
    sys.setrecursionlimit(10_000)
    print("\n".join(markdown(COLUMNS, [])), flush=True)
    found: list[tuple[str, ...]] = []
    for folder in options.folders:
        counts = Counter[str]()
        for file in sorted(folder.glob("*.py"), key=_number):
            if options.only and str(_number(file)) not in options.only:
                continue
            told = rows_of(file)
            counts.update(row[2].partition(":")[0] for row in told)
            found += told
            print("".join(f"{line}\n" for line in markdown(COLUMNS, told)[2:]), end="", flush=True)
        print(f"\n{folder.name}: {', '.join(f'{count} {name}' for name, count in counts.most_common())}\n", flush=True)
    if options.out is not None:
        options.out.write_text("\n".join([*markdown(COLUMNS, found), ""]))


def _number(file: Path) -> int:
    return int(file.stem.split("_")[0])


def rows_of(file: Path) -> list[tuple[str, ...]]:
    """The rows of a module; none where nothing convolves."""
    name = f"{file.parent.name.removeprefix('level')}/{file.stem}"
    if "conv" not in file.read_text().lower():
        return []
    try:
        index = index_of(file)
    except Exception as error:  # whatever a module's own code raises
        return [(name, "-", f"not captured: {type(error).__name__}", "-", "-")]
    return list(rows(whole_plan(index), name))


if __name__ == "__main__":
    main()
