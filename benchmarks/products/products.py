"""Measures the matrix products and the attention of KernelBench's level 1, and 16-bit ones, on a GPU, at full size.

    python -m benchmarks.products.products --kernelbench KernelBench/KernelBench --out products [--only structured 6 …]
    python -m benchmarks.products.products --sixteen-bit --out sixteen
    python -m benchmarks.products.products --tf32 --out tf32
    python -m benchmarks.products.products --table docs/results/products_h200.jsonl

The first runs `warpsmith bench` over the 17 tasks that multiply matrices (12 plain, 4 structured, one by a vector) and
over attention, in fp32, and prints them as a table; the second does so over products of bf16 and fp16 at 8192, and
attention, on their own track; the third over products of floats where TF32 is allowed, which the baselines have too.
All go on where they stopped. The fourth only prints.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.kernelbench.level1 import (
    Row,
    geomean,
    kernelbench_check,
    line_of,
    measure,
    number_of,
    parser_of,
    read,
    speedup,
    timed_of,
)

CLASSES: dict[str, tuple[int, ...]] = {
    "plain": (1, 2, 3, 6, 7, 8, 9, 10, 11, 16, 17, 18),
    "structured": (12, 13, 14, 15),
    "vector": (4,),
    "attention": (97,),
}
"""Numbers of the tasks; 12 scales rows, 14 and 15 keep a triangle, 13 says nothing in its graph of its symmetry."""

MODULE = """import torch


class Model(torch.nn.Module):
    def forward(self, a, b):
        return {forward}


def get_inputs():
    return [torch.randn(8192, 8192, dtype=torch.{dtype}), torch.randn(8192, 8192, dtype=torch.{dtype})]


def get_init_inputs():
    return []
"""
FORWARDS = {
    "nn": "a @ b",
    "nt": "a @ b.T",
    "tn": "a.T @ b",
    "tt": "a.T @ b.T",
    "gelu": "torch.nn.functional.gelu(a @ b.T)",
}
"""What the 16-bit modules do: layouts, and a fused end."""
SIXTEEN_BIT = {
    f"{number}_{dtype}_{name}_8192": MODULE.format(forward=forward, dtype=dtype)
    for number, (dtype, (name, forward)) in enumerate(
        (pair for dtype in ("bfloat16", "float16") for pair in ((dtype, item) for item in FORWARDS.items())), 101
    )
}
"""Name → source; numbers so that they sort."""
SIXTEEN_BIT["111_bfloat16_attention_16384"] = """import torch


class Model(torch.nn.Module):
    def forward(self, q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def get_inputs():
    return [torch.randn(1, 16, 16384, 128, dtype=torch.bfloat16) for _ in range(3)]


def get_init_inputs():
    return []
"""
TF32 = {
    f"{number}_float32_{name}_8192": MODULE.format(forward=FORWARDS[name], dtype="float32")
    for number, name in enumerate(("nt", "gelu", "nn"), 121)
}
"""Of the track on which TF32 is allowed, where there is no bar."""

MEAN_BAR, TASK_BAR, SIXTEEN_BAR, GELU_BAR, ATTENTION_BAR = 2.7, 0.97, 0.95, 1.05, 0.75
"""Least geometric mean of the level-1 products and of each; of a 16-bit product, of one with a GELU, of attention."""
FLOATS_BAR = 2.0
"""Least speedup of level 1's attention, which is of floats, over eager."""
PRODUCT_COUNT = sum(len(numbers) for kind, numbers in CLASSES.items() if kind != "attention")
TRIALS, BUDGET = 8, "30s"


def class_of(name: str) -> str:
    """The class of a task; the type of a product that is none of KernelBench's."""
    if number_of(name) > 100:
        return name.split("_")[1]
    return next((kind for kind, numbers in CLASSES.items() if number_of(name) in numbers), "")


def tasks(kernelbench: Path, only: Sequence[str]) -> dict[str, str]:
    """Sources by file name, in KernelBench's order; `only`: classes or numbers."""
    files = sorted((kernelbench / "level1").glob("*.py"), key=lambda file: number_of(file.stem))
    return {file.name: file.read_text() for file in files if class_of(file.stem) and _is_wanted(file.stem, only)}


def _is_wanted(name: str, only: Sequence[str]) -> bool:
    return not only or bool({class_of(name), str(number_of(name))} & set(only))


def table(rows: Sequence[Row]) -> str:
    """All that is to be said of the rows, as Markdown."""
    head = ["task", "class", "verdict", "eager", "compiled", "ours", "against fastest", "fastest", "floor"]
    head += ["KernelBench's check", "trials", "s", "labels"]
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join('---' for _ in head)} |"]
    lines += [line_of(row, class_of(row["name"])) for row in rows]
    return "\n".join([*lines, "", *bars(rows)])


def bars(rows: Sequence[Row]) -> list[str]:
    """What the tasks are held to, and whether they reach it."""
    lines = []
    level1 = [row for row in rows if number_of(row["name"]) <= 100 and class_of(row["name"]) != "attention"]
    if level1:
        timed = timed_of(level1)
        failed = [row["name"] for row in level1 if row["verdict"] != "PASS"]
        checked = [row["name"] for row in timed if kernelbench_check(row) != "passes"]
        slow = [f"{row['name']} {speedup(row):.2f}x" for row in timed if not speedup(row) >= TASK_BAR]
        lines += [
            f"- measured: {len(level1)} of {PRODUCT_COUNT} products; not PASS: {', '.join(failed) or 'none'}",
            f"- failing KernelBench's own check: {', '.join(checked) or 'none'}",
            f"- geometric mean against the fastest baseline: {geomean(map(speedup, timed)):.2f}x (bar {MEAN_BAR}x)",
            f"- under {TASK_BAR}x: {', '.join(slow) or 'none'}",
        ]
    for row in rows:
        if class_of(row["name"]) == "attention":
            gain = row["speedup_eager"]["median"] if row.get("speedup_eager") else math.nan
            lines.append(f"- {row['name']}: {row['verdict']}, {gain:.2f}x over eager (bar {FLOATS_BAR}x)")
        if row["name"] in SIXTEEN_BIT and row.get("speedup_fastest"):
            bar = GELU_BAR if "gelu" in row["name"] else ATTENTION_BAR if "attention" in row["name"] else SIXTEEN_BAR
            lines.append(f"- {row['name']}: {speedup(row):.3f}x against {row['fastest_baseline']} (bar {bar}x)")
    return lines


def main() -> int:
    """Runs and prints; the exit code is the bench's."""
    parser = parser_of(__doc__)
    parser.add_argument("--sixteen-bit", action="store_true", help="products of bf16 and fp16 instead of the tasks")
    parser.add_argument("--tf32", action="store_true", help="products of floats that may be rounded to TF32, likewise")
    parser.set_defaults(trials=TRIALS, budget=BUDGET)
    options = parser.parse_args()
    if options.table:
        print(table(read(options.table)))
        return 0
    if not options.out or not (options.kernelbench or options.sixteen_bit or options.tf32):
        parser.error("--out goes with --kernelbench, --sixteen-bit or --tf32; --table only prints")
    if options.sixteen_bit or options.tf32:
        modules = SIXTEEN_BIT if options.sixteen_bit else TF32
        sources = {f"{name}.py": text for name, text in modules.items() if _is_wanted(name, options.only)}
    else:
        sources = tasks(options.kernelbench, options.only)
    start = time.monotonic()
    code = measure(sources, options, precision="tf32" if options.tf32 else "auto")
    print(table(read(options.out / "results.jsonl")))
    print(f"\n{time.monotonic() - start:.0f} s in this run")
    return code


if __name__ == "__main__":
    sys.exit(main())
