"""Measures what the README claims on a Hopper GPU: softmax and layer norm at ten shapes, linear layers in fp32.

    python -m benchmarks.timing.hopper_rows --out h200 [--only softmax_4096x16384 …] [--budget 15s]
    python -m benchmarks.timing.hopper_rows --table results.jsonl

writes one module a shape, runs `warpsmith bench` over them, and prints the results as a table with the bars that they
are held to. Needs a GPU; goes on where it stopped. The second form only prints.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.module_tables import WARPSMITH

SHAPES = (
    (1, 1048576), (4, 262144), (16, 16384), (16, 262144), (32, 65536),
    (128, 131072), (4096, 1024), (4096, 16384), (4096, 393216), (1048576, 64),
)  # fmt: skip
"""Rows and columns."""

PRODUCTS = ((1024, 8192, 8192), (4096, 4096, 4096))
"""M, K and N of the linear layer whose outputs are summed."""

LINEARS = ((1024, 8192, 8192), (4096, 4096, 4096), (8192, 8192, 8192))
"""M, K and N of linear layers by themselves; the first also with a GELU after it."""

ROWS_MODULE = """import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        {constructor}

    def forward(self, x):
        return {forward}


def get_inputs():
    return [torch.randn({rows}, {columns})]


def get_init_inputs():
    return []
"""

PRODUCT_MODULE = """import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear({k}, {n})

    def forward(self, x):
        return {forward}


def get_inputs():
    return [torch.randn({m}, {k})]


def get_init_inputs():
    return []
"""


def modules() -> dict[str, str]:
    """Name → source, in the order of the table."""
    made = {}
    for rows, columns in SHAPES:
        softmax = {"constructor": "self.dim = -1", "forward": "torch.softmax(x, dim=self.dim)"}
        norm = {"constructor": f"self.norm = torch.nn.LayerNorm({columns})", "forward": "self.norm(x)"}
        for name, parts in (("softmax", softmax), ("layer_norm", norm)):
            made[f"{name}_{rows}x{columns}"] = ROWS_MODULE.format(rows=rows, columns=columns, **parts)
    layers = [("fused_linear_row_sum", "self.linear(x).sum(dim=1)", shape) for shape in PRODUCTS]
    layers += [("linear", "self.linear(x)", shape) for shape in LINEARS]
    layers.append(("linear_gelu", "torch.nn.functional.gelu(self.linear(x))", LINEARS[0]))
    for name, forward, (m, k, n) in layers:
        made[f"{name}_{m}x{k}x{n}"] = PRODUCT_MODULE.format(forward=forward, m=m, k=k, n=n)
    return made


Row = dict[str, Any]
"""One line of `warpsmith bench`."""

EAGER_BARS = {
    "softmax_1x1048576": 4.0, "softmax_4x262144": 4.0, "softmax_16x262144": 4.0, "softmax_16x16384": 2.0,
    "softmax_32x65536": 3.0, "layer_norm_1x1048576": 5.0, "layer_norm_4x262144": 5.0, "layer_norm_16x16384": 5.0,
    "layer_norm_16x262144": 5.0, "layer_norm_32x65536": 5.0, "fused_linear_row_sum_1024x8192x8192": 20.0,
    "fused_linear_row_sum_4096x4096x4096": 20.0,
}  # fmt: skip
"""Least speedup over eager."""
FLOOR_BARS = {"4096x16384": 80.0, "4096x393216": 80.0}
"""Least percentage of the floor, which is the copy ceiling for these modules."""
FASTEST_BARS = {"linear_1024x8192x8192": 3.2, "linear_4096x4096x4096": 3.5, "linear_8192x8192x8192": 3.5}
FASTEST_BAR, ALGEBRA_BAR = 0.97, 1.2
"""Least speedup over the fastest baseline where no other is named, and of kernels over the same algebra in PyTorch."""


def shortfalls(row: Row) -> list[str]:
    """The bars that a module misses, as "eager 1.9x < 2x"."""
    if not row.get("speedup_fastest"):
        return [row["message"][:160]]
    name, arms = row["name"], row["arms_ns"]
    checks = [
        ("eager", row["speedup_eager"]["median"], EAGER_BARS.get(name, 0.0), "x"),
        ("fastest", row["speedup_fastest"]["median"], FASTEST_BARS.get(name, FASTEST_BAR), "x"),
        ("floor", row["floor_percent"], FLOOR_BARS.get(name.rpartition("_")[2], 0.0), " %"),
    ]
    if "rewritten" in arms:
        checks.append(("the same algebra", arms["rewritten"] / arms["candidate"], ALGEBRA_BAR, "x"))
    return [f"{what} {found:.3g}{unit} < {bar:g}{unit}" for what, found, bar, unit in checks if found < bar]


def table(rows: Sequence[Row]) -> str:
    """The results as Markdown: medians in µs, verified and timed candidates a second, and what falls short."""
    columns = ["module", "eager", "compiled", "ours", "against fastest", "fastest", "against eager", "floor"]
    columns += ["trials/s", "labels", "bars"]
    lines = [f"| {' | '.join(columns)} |", f"| {' | '.join('---' for _ in columns)} |"]
    for row in sorted(rows, key=lambda each: list(modules()).index(each["name"])):
        missed = "; ".join(shortfalls(row)) or "met"
        if not row.get("speedup_fastest"):
            lines.append(f"| {row['name']} {'| - ' * (len(columns) - 3)}| {row['verdict']} | {missed} |")
            continue
        arms, fastest = row["arms_ns"], row["speedup_fastest"]
        compiled = min((ns for name, ns in arms.items() if name.startswith("compile")), default=float("nan"))
        cells = [
            row["name"],
            *(f"{ns / 1e3:.1f}" for ns in (arms["eager"], compiled, arms["candidate"])),
            f"{fastest['median']:.2f}x [{fastest['low']:.2f}, {fastest['high']:.2f}]",
            row["fastest_baseline"],
            f"{row['speedup_eager']['median']:.2f}x",
            f"{row['floor_percent']:.0f} %",
            f"{row['trials']['passed'] / row['phase_seconds'][1]:.1f}",
            ", ".join([*([row["gain"].split(";")[0]] if "rewritten" in arms else []), *row["labels"]]) or "-",
            missed,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def read(file: Path) -> list[Row]:
    """The last line of each module."""
    lines = file.read_text().splitlines() if file.exists() else []
    return list({row["name"]: row for row in map(json.loads, lines)}.values())


def main() -> int:
    """Runs and prints; the exit code is the bench's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--out", type=Path, help="directory for the modules and results.jsonl")
    wanted.add_argument("--table", type=Path, metavar="RESULTS", help="only print what these results say")
    parser.add_argument("--only", nargs="*", default=[], help="names, or beginnings of names, of the modules wanted")
    parser.add_argument("--budget", default="15s", help="search budget of each module")
    options = parser.parse_args()
    if options.table:
        print(table(read(options.table)))
        return 0
    directory = options.out / "modules"
    directory.mkdir(parents=True, exist_ok=True)
    for name, source in modules().items():
        if not options.only or any(name.startswith(wanted) for wanted in options.only):
            (directory / f"{name}.py").write_text(source)
    results = options.out / "results.jsonl"
    settings = ["--budget", options.budget, "--results", str(results)]
    code = subprocess.run([*WARPSMITH, "bench", str(directory), *settings], check=False).returncode
    print(table(read(results)))
    return code


if __name__ == "__main__":
    sys.exit(main())
