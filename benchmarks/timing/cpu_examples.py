"""Measures 24 memory-bound modules on the CPU target, against the faster of eager and torch.compile.

    python -m benchmarks.timing.cpu_examples --out FOLDER [--only softmax gelu …] [--budget 30s]
    python -m benchmarks.timing.cpu_examples --table FOLDER
    python -m benchmarks.timing.cpu_examples --record FOLDER

The first writes one module each, runs `warpsmith bench` over them and prints the table with the bars that it is held
to; it goes on where it stopped. The second only prints. The third writes `docs/results/cpu_examples.md` and `.jsonl`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence

from benchmarks.module_tables import COLUMNS, ROOT, Row, bench, cells, markdown, parsed, read, write_page

MODULE = """import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        {constructor}

    def forward(self, {arguments}):
        return {forward}


def get_inputs():
    return [{inputs}]


def get_init_inputs():
    return []
"""
_MATRIX = "torch.randn(2048, 2048)"
_IMAGES = "torch.randn(16, 64, 64, 64)"

EXAMPLES: dict[str, tuple[str, str, str]] = {
    # name: constructor, forward, inputs (x, y, …)
    "gelu_bias_scale": (
        "self.bias = nn.Parameter(torch.randn(2048))", "F.gelu(x + self.bias) * 0.5", _MATRIX),
    "swish_residual": ("pass", "x * torch.sigmoid(x) + y", f"{_MATRIX}, {_MATRIX}"),
    "mish_clamp_divide": ("pass", "torch.clamp(F.mish(x), -1.0, 1.0) / 3.0", _MATRIX),
    "masked_choice": ("pass", "torch.where(y > 0, torch.tanh(x), x.masked_fill(x < 0, 0.0))", f"{_MATRIX}, {_MATRIX}"),
    "concatenated_gates": ("pass", "F.glu(torch.cat([x, y], 1))", f"{_MATRIX}, {_MATRIX}"),
    "sum_of_rows": ("pass", "(x * x).sum(1)", _MATRIX),
    "mean_of_columns": ("pass", "x.mean(0)", _MATRIX),
    "maximum_of_middle": ("pass", "x.amax(1)", "torch.randn(64, 256, 256)"),
    "argmax": ("pass", "x.argmax(1)", _MATRIX),
    "frobenius": ("pass", "x / torch.norm(x)", _MATRIX),
    "logsumexp": ("pass", "torch.logsumexp(x, 1)", _MATRIX),
    "softmax": ("pass", "torch.softmax(x, 1)", _MATRIX),
    "causal_softmax": ("pass", "torch.softmax((x * 0.125).masked_fill(y, float('-inf')), -1)",
                       "torch.randn(16, 512, 512), torch.ones(512, 512, dtype=torch.bool).triu(1)"),
    "layer_norm": ("self.norm = nn.LayerNorm(2048)", "self.norm(x)", _MATRIX),
    "rms_norm_residual": ("self.norm = nn.RMSNorm(2048)", "self.norm(x + y)", f"{_MATRIX}, {_MATRIX}"),
    "group_norm_relu": ("self.norm = nn.GroupNorm(8, 64)", "torch.relu(self.norm(x))", _IMAGES),
    "batch_norm_training": ("self.norm = nn.BatchNorm2d(64)", "torch.relu(self.norm(x))", _IMAGES),
    "cross_entropy": ("pass", "F.cross_entropy(x, y)", f"{_MATRIX}, torch.randint(0, 2048, (2048,))"),
    "huber": ("pass", "F.huber_loss(x, y)", f"{_MATRIX}, {_MATRIX}"),
    "divergence": ("pass", "F.kl_div(torch.log(x), y, reduction='batchmean')",
                   "torch.rand(2048, 2048).softmax(1), torch.rand(2048, 2048).softmax(1)"),
    "triplet_margin": ("pass", "F.triplet_margin_loss(x, y, z)", f"{_MATRIX}, {_MATRIX}, {_MATRIX}"),
    "cosine_similarity": ("pass", "F.cosine_similarity(x, y)", f"{_MATRIX}, {_MATRIX}"),
    "reverse_cumsum": ("pass", "x.flip(1).cumsum(1).flip(1)", _MATRIX),
    "max_pool": ("self.pool = nn.MaxPool2d(3, 2, 1)", "self.pool(torch.relu(x))", _IMAGES),
}  # fmt: skip
"""Pointwise, reductions, softmax, norms, losses, scans and pools: 4 million elements, 16 MiB, an input."""

GEOMEAN_BAR, LEAST_BAR = 1.3, 0.95
"""Least geometric mean of the speedups, and least speedup of any module, against the fastest baseline."""


def modules(examples: Mapping[str, tuple[str, str, str]] = EXAMPLES) -> dict[str, str]:
    """Name → source, in the order of the table."""
    made = {}
    for name, (constructor, forward, inputs) in examples.items():
        arguments = ", ".join(letter for letter in "xyz" if f"{letter}" in _names_in(forward))
        made[name] = MODULE.format(constructor=constructor, forward=forward, inputs=inputs, arguments=arguments)
    return made


def _names_in(expression: str) -> set[str]:
    return set(compile(expression, "<forward>", "eval").co_names)


def shortfall(row: Row) -> str:
    """What a module misses; "" for nothing."""
    if not row.get("speedup_fastest"):
        return f"{row['verdict']}: {row['message'][:160]}"
    found = row["speedup_fastest"]["median"]
    return f"{found:.2f}x < {LEAST_BAR:g}x" if found < LEAST_BAR else ""


def table(rows: Sequence[Row]) -> str:
    """The results as Markdown: medians in µs, then the geometric mean over all that were measured."""
    order = list(EXAMPLES)
    rows = sorted(rows, key=lambda each: order.index(each["name"]))
    lines = markdown([*COLUMNS, "bar"], ([*cells(row), shortfall(row) or "met"] for row in rows))
    speedups = [row["speedup_fastest"]["median"] for row in rows if row.get("speedup_fastest")]
    if speedups:
        mean = math.exp(sum(map(math.log, speedups)) / len(speedups))
        measured = f"{len(speedups)} of {len(EXAMPLES)} modules"
        lines += ["", f"Geometric mean {mean:.2f}x (bar {GEOMEAN_BAR:g}x) over {measured}; least {min(speedups):.2f}x."]
    return "\n".join(lines)


def main() -> int:
    """Runs and prints; the exit code is the bench's."""
    options = parsed(__doc__, targets=["cpu"])
    if options.record:
        rows, place = read(options.record / "results.jsonl"), ROOT / "docs" / "results" / "cpu_examples.md"
        command = "python -m benchmarks.timing.cpu_examples --out FOLDER"
        write_page(place, rows, "# 24 modules on the CPU target\n\n", table(rows), command, options.note)
        return 0
    code = 0 if options.table else bench(modules(), options)
    print(table(read((options.table or options.out) / "results.jsonl")))
    return code


if __name__ == "__main__":
    sys.exit(main())
