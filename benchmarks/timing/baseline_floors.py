"""Asks the floor guard about every baseline that was measured on an H200: it may reject none.

    python -m benchmarks.timing.baseline_floors
    python -m benchmarks.timing.baseline_floors --kernelbench DIR

The first form needs neither GPU nor checkout: least work by task comes from baseline_floors.jsonl, times from the
`*_h200.jsonl` beside it. The second captures every module that this file lacks, by the digest of its source; DIR is the
directory of KernelBench that holds level1/ to level3/. Rows of reduced modules (plan_zero) are left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.kernelbench import level1
from benchmarks.products import products
from benchmarks.search import landscape_file
from benchmarks.timing import hopper_rows
from benchmarks.training import pieces
from gpu_bench.device import Ceilings
from gpu_bench.timing import floor
from gpu_bench.timing.interleaving import SHORT_CALL_NS
from gpu_bench.timing.second_sweeps import Slices
from warpsmith.digest import digest
from warpsmith.v1 import task_pb2, timing_pb2

RESULTS = Path(__file__).parents[2] / "docs" / "results"
WORKS = RESULTS / "baseline_floors.jsonl"
QUANTISED = Path(__file__).parents[1] / "products" / "quantised"
_STEP = "+gradients"
_OURS = frozenset({"candidate", "rewritten", "aa_copy"})
_HALF_PEAK, _SPLIT = 989e12, 3  # as in `gpu_bench.device`: by data sheet, and for fp32 by three products


@dataclass(frozen=True)
class Asked:
    """What the guard says of one arm."""

    task: str
    arm: str
    of_floor: float
    """Its time over the least that physics allows; inf where nothing can be said."""
    flags: Sequence[timing_pb2.Flag.ValueType]


def ceilings() -> Ceilings:
    """The H200 that the landscapes were measured on."""
    device = landscape_file.read([RESULTS / "landscapes_cuda.jsonl"])[0].device
    return Ceilings(
        device,
        fp32_product_rate=max(device.product_flops, device.tensor_flops / _SPLIT),
        convolution_rate=device.tensor_flops,
        physical_product_rate=_HALF_PEAK / _SPLIT,
        physical_convolution_rate=_HALF_PEAK,
        reduced_product_rate=device.tensor_flops,
        physical_reduced_product_rate=_HALF_PEAK,
    )


def rows() -> list[dict[str, Any]]:
    """Every measured task: all results of an H200 but those of reduced modules."""
    files = [file for file in sorted(RESULTS.glob("*h200.jsonl")) if file.name != "plan_zero_h200.jsonl"]
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def works() -> dict[str, floor.Work]:
    """Digest of a module's source → its least work."""
    read = [json.loads(line) for line in WORKS.read_text().splitlines()]
    return {
        row["source"]: floor.Work(**row["work"] | {"slices": tuple(Slices(**each) for each in row["work"]["slices"])})
        for row in read
    }


def asked() -> Iterator[Asked]:
    """What the guard says of every baseline of every row whose least work is known."""
    machine, known = ceilings(), works()
    for row in rows():
        baselines = {name: ns for name, ns in row.get("arms_ns", {}).items() if name not in _OURS}
        if not baselines or key_of(row) not in known:
            continue
        work, warm = known[key_of(row)], min(row["arms_ns"].values()) < SHORT_CALL_NS
        least = floor.physical_floor_ns(work, machine, parameters_warm=warm)
        for name, ns in baselines.items():
            flags = floor.guard(ns, work, machine, parameters_warm=warm)
            yield Asked(row["file"], name, ns / least if least else float("inf"), flags)


def unknown() -> list[str]:
    """Measured tasks whose least work is not known: the second form of the command finds it."""
    known = works()
    return sorted({row["file"] for row in rows() if row.get("arms_ns") and key_of(row) not in known})


def report(found: Sequence[Asked]) -> str:
    """How many were asked about, rejected and suspected, and which come nearest to what physics allows."""
    rejected = [each for each in found if floor.FLOOR_REJECT in each.flags]
    suspected = sum(floor.FLOOR_SUSPECT in each.flags for each in found)
    tasks = len({each.task for each in found})
    return "\n".join([
        f"{len(found)} baselines of {tasks} tasks: {len(rejected)} rejected. {suspected} are faster than the ceilings "
        "that were measured once, which such a time has measured again.",
        "",
        *(f"- rejected: {each.task}: {each.arm} at {each.of_floor:.3f} of its floor" for each in rejected),
        *(f"- not asked about: {name}: its least work is not known" for name in unknown()),
        *(
            f"- nearest to what physics allows: {each.task}: {each.arm} takes {each.of_floor:.3f} of it"
            for each in sorted(found, key=lambda each: each.of_floor)[:5]
        ),
    ])  # fmt: skip


def capture_all(kernelbench: Path) -> list[str]:
    """One line for each module of the rows whose source is found; those that are known stay."""
    levels = ("level1", "level2", "level3")
    sources = [file.read_text() for level in levels for file in sorted((kernelbench / level).glob("*.py"))]
    sources += [level1.changed(source) for source in sources]
    sources += [*products.SIXTEEN_BIT.values(), *products.TF32.values(), *hopper_rows.modules().values()]
    sources += [file.read_text() for folder in (pieces.MODULES, QUANTISED) for file in sorted(folder.glob("*.py"))]
    by_digest = {digest(source.encode()): source for source in sources}
    wanted = {key_of(row): (row["file"], "tf32" in row["labels"]) for row in rows() if row.get("arms_ns")}
    known = {json.loads(line)["source"]: line for line in WORKS.read_text().splitlines()}
    lines = []
    for number, (key, (name, is_tf32)) in enumerate(sorted(wanted.items(), key=lambda item: item[1])):
        if key in known:
            lines.append(known[key])
            continue
        source = by_digest.get(key.removesuffix(_STEP))
        print(f"{number + 1}/{len(wanted)} {name}{'' if source else ': its source is not here'}", flush=True)
        if source:
            precision = task_pb2.PRECISION_TF32 if is_tf32 else task_pb2.PRECISION_FP32
            work = dataclasses.asdict(work_of(source, precision, is_step=key.endswith(_STEP)))
            lines.append(json.dumps({"file": name, "source": key, "work": work}))
    return lines


def key_of(row: Mapping[str, Any]) -> str:
    """What was measured: a source, or its training step with all gradients."""
    return str(row["source"]) + (_STEP if row.get("options", {}).get("gradients") is not None else "")


def work_of(source: str, precision: task_pb2.Precision.ValueType, *, is_step: bool = False) -> floor.Work:
    """Least work of a module, or of its training step, captured without drawing its inputs."""
    if is_step:
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / "step.py"
            file.write_text(source)
            return floor.work_of(pieces.step_of(file).index.graph, precision)
    from torch._subclasses.fake_tensor import FakeTensorMode

    from warpsmith.graphs import capture, task_module

    task = task_pb2.Task(entry_path="model.py", class_name="Model")
    task.sources.add(path="model.py", content=source.encode())
    with tempfile.TemporaryDirectory() as directory:
        user = task_module.load(task, Path(directory))
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = user.inputs(0, "cpu")
    return floor.work_of(capture.capture(user.build(device="cpu"), inputs), precision)


def main() -> int:
    """Prints the report; 1 where a baseline is rejected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--kernelbench", type=Path, help="captures modules that are not known yet; holds level1/ to level3/"
    )
    options = parser.parse_args()
    if options.kernelbench:
        WORKS.write_text("\n".join(capture_all(options.kernelbench)) + "\n")
    found = list(asked())
    print(report(found))
    return 1 if any(floor.FLOOR_REJECT in each.flags for each in found) else 0


if __name__ == "__main__":
    sys.exit(main())
