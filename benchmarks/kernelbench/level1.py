"""Measures the memory-bound classes of KernelBench's level 1 on a GPU, at full size.

    python -m benchmarks.kernelbench.level1 --kernelbench KernelBench/KernelBench --out level1 [--only softmax 47 …]
    python -m benchmarks.kernelbench.level1 --kernelbench … --out changed --changed-shapes
    python -m benchmarks.kernelbench.level1 --table docs/results/level1_h200.jsonl

The first runs `warpsmith bench` over the tasks of these classes, sixteen candidates each, and prints them as a table
with means by class and the tasks that are farthest from the floor. The second does so with normal inputs and other,
odd shapes: there the verdicts count, not the times. Both go on where they stopped. The third only prints.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.module_tables import WARPSMITH

CLASSES: dict[str, tuple[int, ...]] = {
    "pointwise": (5, 12, 19, 20, 21, 22, 25, 26, 27, 28, 29, 30, 31, 32, 88),
    "reduction": (47, 48, 49, 53),
    "norm": (33, 34, 35, 36, 37, 38, 39, 40),
    "softmax": (23, 24),
    "loss": (94, 95, 96, 98, 99, 100),
    "pooling": (41, 42, 43, 44, 45, 46),
    "scan": (89, 90, 91, 92, 93),
    "arg-reduction": (51, 52),
}
"""Numbers of the tasks by class: 48 of 100. 12 is called a product and multiplies by broadcasting. The others are
products, attention (97) among them, and convolutions."""

TOGETHER = ("pointwise", "reduction", "norm", "softmax", "loss")
BARS = {TOGETHER: 1.15, ("pooling", "scan"): 1.5}
"""Least geometric mean of classes together against the fastest baseline."""
TASK_BAR, FLOOR_BAR, MINUTES_BAR = 0.97, 90.0, 8.0
"""Least of every task; median percentage of the floor; minutes for all tasks."""
MANY = 10
"""Tasks of a stretch of time that is told."""
TRIALS, BUDGET = 16, "30s"

Row = dict[str, Any]
"""One line of `warpsmith bench`."""


def number_of(name: str) -> int:
    """The number of a task by the name of its file."""
    return int(name.split("_", 1)[0])


def class_of(name: str) -> str:
    """The class of a task; empty for one that is in none."""
    return next((kind for kind, numbers in CLASSES.items() if number_of(name) in numbers), "")


def tasks(kernelbench: Path, only: Sequence[str]) -> list[Path]:
    """The files of the classes, in KernelBench's order; `only`: classes or numbers."""
    files = sorted((kernelbench / "level1").glob("*.py"), key=lambda file: number_of(file.stem))
    chosen = [file for file in files if class_of(file.stem)]
    return [file for file in chosen if not only or {class_of(file.stem), str(number_of(file.stem))} & set(only)]


# ---- other shapes ------------------------------------------------------------------------------------------------

_CONSTANT = re.compile(r"^(\w+) *= *([\d][\d *]*)(?=\s*(?:#.*)?$)", re.MULTILINE)
_DRAW = re.compile(r"torch\.rand\(")
_SIZES = re.compile(
    r"batch|dim\d*$|^dim|features|channels|height|width|depth|length|classes|^[MN]$|sequence", re.IGNORECASE
)
_KEPT = frozenset({"dim", "reduce_dim", "num_groups"})
"""Constants that name a dimension or divide one."""


def changed(source: str) -> str:
    """The task with normal inputs, and sizes that are small and odd where it names them as constants.

    A probability, a scale or a target is made from what is drawn, so a task whose loss needs them keeps uniform draws.
    """

    def shrunk(match: re.Match[str]) -> str:
        name, value = match[1], math.prod(int(part) for part in match[2].split("*") if part.strip())
        if (name in _KEPT and value < 16) or not _SIZES.search(name) or value < 8:
            return match[0]
        size = other_size(value)
        return f"{name} = {(size // group | 1) * group if name == 'features' else size}"

    groups = re.search(r"^num_groups *= *(\d+)", source, re.MULTILINE)
    group = int(groups[1]) if groups else 1
    text = _CONSTANT.sub(shrunk, source)
    text = re.sub(r"(input_shape\s*=\s*)\((\d[\d *]*),\)", lambda m: f"{m[1]}({other_size(eval_product(m[2]))},)", text)
    needs_uniform = "softmax(dim=-1)" in text
    return text if needs_uniform else _DRAW.sub("torch.randn(", text)


def eval_product(text: str) -> int:
    """The value of `8192 * 2`."""
    return math.prod(int(part) for part in text.split("*") if part.strip())


def other_size(size: int) -> int:
    """An odd size in the place of one: its power of three quarters, at most a few thousand."""
    return max(3, min(int(size**0.75) | 1, 4099))


# ---- the table ---------------------------------------------------------------------------------------------------


def read(file: Path) -> list[Row]:
    """The last line of each task, in KernelBench's order."""
    lines = file.read_text().splitlines() if file.exists() else []
    rows = {row["name"]: row for row in map(json.loads, lines)}
    return sorted(rows.values(), key=lambda row: number_of(row["name"]))


def speedup(row: Row) -> float:
    """Against the fastest baseline; nan where nothing of ours was timed."""
    found = row.get("speedup_fastest")
    return float(found["median"]) if found else math.nan


def timed_of(rows: Iterable[Row]) -> list[Row]:
    """Rows that count: with a time of ours that no floor rejects."""
    return [row for row in rows if row.get("speedup_fastest") and "FLOOR_REJECT" not in row["labels"]]


def geomean(values: Iterable[float]) -> float:
    """Geometric mean; nan of nothing."""
    logs = [math.log(value) for value in values if value > 0]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def kernelbench_check(row: Row) -> str:
    """What KernelBench's own tolerance says of our output beside eager's."""
    if not row.get("speedup_fastest"):
        return "-"
    return "fails" if "kernelbench_check_fails" in row["labels"] else "passes"


def line_of(row: Row, kind: str, more: Sequence[str] = ()) -> str:
    """A row of the table: medians in µs; `more` cells come behind the fastest baseline."""
    arms = row.get("arms_ns", {})
    compiled = min((ns for arm, ns in arms.items() if arm.startswith("compile")), default=math.nan)
    found = row.get("speedup_fastest")
    interval = f"{found['median']:.2f}x [{found['low']:.2f}, {found['high']:.2f}]" if found else "-"
    labels = [label for label in row["labels"] if label != "kernelbench_check_fails"]
    cells = [
        row["name"],
        kind,
        row["verdict"],
        *(_micro(ns) for ns in (arms.get("eager", math.nan), compiled, arms.get("candidate", math.nan))),
        interval,
        row.get("fastest_baseline") or "-",
        *more,
        f"{row['floor_percent']:.0f} %" if row.get("floor_percent") else "-",
        kernelbench_check(row),
        str(row.get("trials", {}).get("total", "-")),
        f"{row['seconds']:.0f}",
        ", ".join(labels) or "-",
    ]
    return f"| {' | '.join(cells)} |"


def _micro(ns: float) -> str:
    return "-" if math.isnan(ns) else f"{ns / 1e3:.1f}"


def table(rows: Sequence[Row]) -> str:
    """All that is to be said of the rows, as Markdown."""
    head = ["task", "class", "verdict", "eager", "compiled", "ours", "against fastest", "fastest", "floor"]
    head += ["KernelBench's check", "trials", "s", "labels"]
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join('---' for _ in head)} |"]
    lines += [line_of(row, class_of(row["name"])) for row in rows]
    return "\n".join([*lines, "", *by_class(rows), "", *bars(rows), *stretches(rows), "", *farthest(rows)])


def by_class(rows: Sequence[Row]) -> list[str]:
    """Geometric means against the fastest baseline and against eager, medians of the share of the floor."""
    lines = ["| class | tasks | timed | against fastest | against eager | floor, median |", "|" + " --- |" * 6]
    groups = {kind: [row for row in rows if class_of(row["name"]) == kind] for kind in CLASSES}
    groups["the first five"] = [row for row in rows if class_of(row["name"]) in TOGETHER]
    groups["all"] = list(rows)
    for kind, group in groups.items():
        timed = timed_of(group)
        if not group:
            continue
        floors = sorted(row["floor_percent"] for row in timed)
        middle = f"{floors[len(floors) // 2]:.0f} %" if floors else "-"
        eager = geomean(row["speedup_eager"]["median"] for row in timed)
        means = [f"{mean:.2f}x" if timed else "-" for mean in (geomean(map(speedup, timed)), eager)]
        lines.append(f"| {kind} | {len(group)} | {len(timed)} | {' | '.join(means)} | {middle} |")
    return lines


def bars(rows: Sequence[Row]) -> list[str]:
    """What the tasks are held to, and whether they reach it."""
    timed = timed_of(rows)
    lines = []
    for kinds, bar in BARS.items():
        own = [speedup(row) for row in timed if class_of(row["name"]) in kinds]
        count = sum(class_of(row["name"]) in kinds for row in rows if row["verdict"] == "AT_FLOOR")
        found = geomean([*own, *[1.0] * count])
        others = f"; {geomean(own):.2f}x without those" if own and count else ""
        lines.append(
            f"- {', '.join(kinds)} together: {'not measured' if math.isnan(found) else f'{found:.2f}x'} (bar {bar}x), "
            f"{count} at the floor before a search as 1.00x{others}"
        )
    slow = [f"{row['name']} {speedup(row):.2f}x" for row in timed if speedup(row) < TASK_BAR]
    lines.append(f"- under {TASK_BAR}x: {', '.join(slow) or 'none'}")
    floors = sorted(row["floor_percent"] for row in timed)
    if floors:
        lines.append(f"- median share of the floor: {floors[len(floors) // 2]:.0f} % (bar {FLOOR_BAR:.0f} %)")
    wrong = [f"{row['name']} ({row['verdict']})" for row in rows if row["verdict"] in ("BAD_INPUT", "FAILED")]
    wrong += [f"{row['name']} (nothing right)" for row in rows if row["verdict"] == "NO_FASTER" and row not in timed]
    lines.append(f"- without a right kernel: {', '.join(wrong) or 'none'}")
    return lines


def stretches(rows: Sequence[Row]) -> list[str]:
    """Stretches of time in which some task was under way: how many seconds each took for how many tasks.

    A run's name says when it began; it took `seconds`, and before that waited for another to be done with the device.
    """
    timed = [row for row in rows if row.get("run")]
    begun = {row["name"]: datetime.strptime(row["run"][:15], "%Y%m%d-%H%M%S").timestamp() for row in timed}
    found: list[tuple[float, float, int]] = []
    for row in sorted(timed, key=lambda row: begun[row["name"]]):
        start = begun[row["name"]]
        end = start + row["seconds"] + row.get("stage_seconds", {}).get("wait", 0.0)
        if found and start <= found[-1][1]:
            first, last, count = found.pop()
            found.append((first, max(last, end), count + 1))
        else:
            found.append((start, end, 1))
    long = [(f"{datetime.fromtimestamp(a):%Y-%m-%d %H:%M}", b - a, count) for a, b, count in found if count >= MANY]
    return [f"- under way from {begin} on: {count} tasks in {seconds:.0f} s" for begin, seconds, count in long]


def farthest(rows: Sequence[Row], count: int = 10) -> list[str]:
    """The tasks with the lowest share of the floor, and what their record says of the reason."""
    timed = sorted((row for row in rows if row.get("floor_percent")), key=lambda row: row["floor_percent"])
    lines = ["Farthest from the floor:", ""]
    for row in timed[:count]:
        lines.append(f"- {row['name']}: {row['floor_percent']:.0f} %, {speedup(row):.2f}x; {row['gain'] or 'no gain'}")
    return lines


# ---- running -----------------------------------------------------------------------------------------------------


def parser_of(description: str) -> argparse.ArgumentParser:
    """The options that every level has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernelbench", type=Path, help="the directory that holds level1/ and level2/")
    parser.add_argument("--out", type=Path, help="directory for the modules and results.jsonl")
    parser.add_argument("--table", type=Path, metavar="RESULTS", help="only print what these results say")
    parser.add_argument("--only", nargs="*", default=[], help="classes or numbers of the tasks wanted")
    parser.add_argument("--trials", type=int, default=TRIALS)
    parser.add_argument("--budget", default=BUDGET, help="longest search of a task")
    parser.add_argument("--time-limit", default="", help="stop beginning tasks after this")
    parser.add_argument("--prepare-ahead", type=int, default=-1)
    parser.add_argument("--gpus", type=int, default=1, help="GPUs to use at once; 0 for all")
    return parser


def measure(modules: Mapping[str, str], options: argparse.Namespace, *, precision: str = "auto") -> int:
    """Runs `warpsmith bench` over sources by file name, into results.jsonl; its exit code."""
    directory = options.out / "modules"
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.glob("*.py"):
        old.unlink()
    for name, source in modules.items():
        (directory / name).write_text(source)
    settings = ["--budget", options.budget, "--trials", str(options.trials), "--precision", precision]
    settings += ["--results", str(options.out / "results.jsonl"), "--prepare-ahead", str(options.prepare_ahead)]
    settings += ["--gpus", str(options.gpus)]
    settings += ["--time-limit", options.time_limit] if options.time_limit else []
    return subprocess.run([*WARPSMITH, "bench", str(directory), *settings], check=False).returncode


def main() -> int:
    """Runs and prints; the exit code is the bench's."""
    parser = parser_of(__doc__)
    parser.add_argument("--changed-shapes", action="store_true", help="normal inputs and other, odd shapes")
    options = parser.parse_args()
    if options.table:
        print(table(read(options.table)))
        return 0
    if not options.kernelbench or not options.out:
        parser.error("--kernelbench and --out go together; --table only prints")
    sources = {file.name: file.read_text() for file in tasks(options.kernelbench, options.only)}
    if options.changed_shapes:
        sources = {name: changed(source) for name, source in sources.items()}
    start = time.monotonic()
    code = measure(sources, options)
    seconds = time.monotonic() - start
    print(table(read(options.out / "results.jsonl")))
    print(f"\n{seconds:.0f} s in this run (bar for all tasks: {MINUTES_BAR * 60:.0f} s)")
    return code


if __name__ == "__main__":
    sys.exit(main())
