"""Measures the matrix products of KernelBench's level 2 on a GPU, at full size: a product and what surrounds it.

    python -m benchmarks.kernelbench.level2 --kernelbench KernelBench/KernelBench --out level2 [--only norm 12 …]
    python -m benchmarks.kernelbench.level2 --table docs/results/level2_h200.jsonl

The first runs `warpsmith bench` over the 37 tasks that multiply matrices and convolve nothing, and prints them as a
table in which algebra and kernels stand apart. It goes on where it stopped. The second only prints.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.kernelbench.level1 import Row, geomean, line_of, measure, number_of, parser_of, read, speedup, timed_of

CLASSES: dict[str, tuple[int, ...]] = {
    "pointwise": (9, 12, 29, 40, 53, 59, 63, 68, 70, 76, 81, 86, 95),
    "row reduction": (14, 18, 22, 45, 51, 55, 56, 64, 75, 80, 98),
    "row norm": (28, 30, 37, 62, 88, 94),
    "batch norm": (33, 39, 41, 84, 97),
    "softmax": (66, 99),
}
"""Numbers of the tasks by what follows the product and reaches farthest; 75 normalises too, 84 takes a softmax too."""

SAME_PRODUCT: dict[str, tuple[int, ...]] = {
    "1024 x 8192 x 8192": (
        9, 12, 22, 28, 29, 30, 33, 62, 63, 64, 70, 75, 76, 80, 81, 84, 86, 88, 94, 95, 97, 99),
    "16384 x 4096 x 4096": (39, 40, 41),
    "128 x 32768 x 32768": (55, 56, 59),
    "128 x 16384 x 16384": (66, 68),
    "as many operations as 2048 x 8192 x 8192": (37, 53),
}  # fmt: skip
"""Numbers of tasks that differ in what follows one product."""

BAR, KERNELS_BAR = 3.2, 2.7
"""Least geometric mean against the fastest baseline; least of each task's, without what algebra gave."""
TRIALS, BUDGET = 8, "40s"


def class_of(name: str) -> str:
    """What follows the product; empty for a task that is not of these."""
    return next((kind for kind, numbers in CLASSES.items() if number_of(name) in numbers), "")


def tasks(kernelbench: Path, only: Sequence[str]) -> list[Path]:
    """The files, in KernelBench's order; `only`: classes or numbers."""
    files = sorted((kernelbench / "level2").glob("*.py"), key=lambda file: number_of(file.stem))
    chosen = [file for file in files if class_of(file.stem)]
    return [file for file in chosen if not only or {class_of(file.stem), str(number_of(file.stem))} & set(only)]


def parts(row: Row) -> tuple[float, float]:
    """(algebra, kernels): fastest baseline ÷ the rewritten reference, that ÷ ours; nan where nothing was timed.

    Without a rewrite all is the kernels'. With one whose reference was not timed, they cannot be told apart: nan.
    """
    arms = row.get("arms_ns", {})
    ours, fastest = arms.get("candidate"), arms.get(row.get("fastest_baseline"))
    if not ours or not fastest:
        return math.nan, math.nan
    if not any(label.startswith("algebra:") for label in row["labels"]):
        return 1.0, speedup(row)
    rewritten = arms.get("rewritten", math.nan)
    return fastest / rewritten, rewritten / ours


def _number(value: float, form: str, unit: str = "") -> str:
    return "-" if math.isnan(value) else f"{value:{form}}{unit}"


def table(rows: Sequence[Row]) -> str:
    """All that is to be said of the rows, as Markdown."""
    head = ["task", "class", "verdict", "eager", "compiled", "ours", "against fastest", "fastest", "algebra", "kernels"]
    head += ["floor", "KernelBench's check", "trials", "s", "labels"]
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join('---' for _ in head)} |"]
    for row in rows:
        lines.append(line_of(row, class_of(row["name"]), [_number(part, ".2f", "x") for part in parts(row)]))
    return "\n".join([*lines, "", *by_class(rows), "", *beyond(rows), "", *bars(rows)])


def by_class(rows: Sequence[Row]) -> list[str]:
    """Geometric means by class: all, and what is left of it without algebra."""
    lines = ["| after the product | tasks | PASS | against fastest | kernels | against eager |", "|" + " --- |" * 6]
    groups = {kind: [row for row in rows if class_of(row["name"]) == kind] for kind in CLASSES}
    for kind, group in (*groups.items(), ("all", list(rows))):
        if not group:
            continue
        timed = timed_of(group)
        means = geomean(map(speedup, timed)), geomean(parts(row)[1] for row in timed)
        eager = geomean(row["speedup_eager"]["median"] for row in timed)
        passed = sum(row["verdict"] == "PASS" for row in group)
        cells = [kind, str(len(group)), str(passed), *(_number(mean, ".2f", "x") for mean in (*means, eager))]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def beyond(rows: Sequence[Row]) -> list[str]:
    """What other classes take beyond the fastest pointwise task with the same product: the most that epilogues save."""
    lines = ["| product | after it | tasks | beyond the fastest pointwise task, median | most |", "|" + " --- |" * 5]
    ours = {number_of(row["name"]): row["arms_ns"]["candidate"] for row in timed_of(rows) if parts(row)[0] == 1.0}
    for product, numbers in SAME_PRODUCT.items():
        least = min((ours[each] for each in numbers if each in CLASSES["pointwise"] and each in ours), default=math.nan)
        for kind, own in CLASSES.items():
            taken = {each: ours[each] - least for each in numbers if each in own and each in ours}
            if not taken or kind == "pointwise" or math.isnan(least):
                continue
            share = statistics.median(ns / ours[each] for each, ns in taken.items())
            most = max(taken, key=lambda each: taken[each])
            cells = [f"{statistics.median(taken.values()) / 1e3:.0f} µs ({share:.0%})"]
            cells += [f"{taken[most] / 1e3:.0f} µs ({taken[most] / ours[most]:.0%}), {most}"]
            lines.append(f"| {product} | {kind} | {len(taken)} | {' | '.join(cells)} |")
    return lines


def bars(rows: Sequence[Row]) -> list[str]:
    """What the tasks are held to, and whether they reach it."""
    timed = timed_of(rows)
    count = sum(map(len, CLASSES.values()))
    missed = [f"{row['name']} ({row['verdict']})" for row in rows if row["verdict"] != "PASS"]
    plain = [row for row in timed if parts(row)[0] == 1.0]
    slow = [f"{row['name']} {parts(row)[1]:.2f}x" for row in timed if not parts(row)[1] >= KERNELS_BAR]
    return [
        f"- measured: {len(rows)} of {count}; not PASS: {', '.join(missed) or 'none'}",
        f"- geometric mean against the fastest baseline: {geomean(map(speedup, timed)):.2f}x (bar {BAR}x)",
        f"- the same over the {len(plain)} tasks without algebra: {geomean(map(speedup, plain)):.2f}x",
        f"- kernels alone under {KERNELS_BAR}x: {', '.join(slow) or 'none'}",
    ]


def main() -> int:
    """Runs and prints; the exit code is the bench's."""
    parser = parser_of(__doc__)
    parser.set_defaults(trials=TRIALS, budget=BUDGET)
    options = parser.parse_args()
    if options.table:
        print(table(read(options.table)))
        return 0
    if not options.kernelbench or not options.out:
        parser.error("--kernelbench and --out go together; --table only prints")
    start = time.monotonic()
    code = measure({file.name: file.read_text() for file in tasks(options.kernelbench, options.only)}, options)
    print(table(read(options.out / "results.jsonl")))
    print(f"\n{time.monotonic() - start:.0f} s in this run")
    return code


if __name__ == "__main__":
    sys.exit(main())
