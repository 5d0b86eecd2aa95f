"""Measures what the README claims on a Hopper GPU: softmax and layer norm at ten shapes, and the fused linear row sum.

    python docs/results/hopper_rows.py --out h200 [--only softmax_4096x16384 …] [--budget 15s]

writes one module a shape, runs `warpsmith bench` over them, and prints the results. Needs a GPU; goes on where it
stopped.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

SHAPES = (
    (1, 1048576), (4, 262144), (16, 16384), (16, 262144), (32, 65536),
    (128, 131072), (4096, 1024), (4096, 16384), (4096, 393216), (1048576, 64),
)  # fmt: skip
"""Rows and columns."""

PRODUCTS = ((1024, 8192, 8192), (4096, 4096, 4096))
"""M, K and N of the linear layer whose outputs are summed."""

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
        return self.linear(x).sum(dim=1)


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
    for m, k, n in PRODUCTS:
        made[f"fused_linear_row_sum_{m}x{k}x{n}"] = PRODUCT_MODULE.format(m=m, k=k, n=n)
    return made


def main() -> int:
    """Runs and prints; the exit code is the bench's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory for the modules and results.jsonl")
    parser.add_argument("--only", nargs="*", default=[], help="names, or beginnings of names, of the modules wanted")
    parser.add_argument("--budget", default="15s", help="search budget of each module")
    options = parser.parse_args()
    directory = options.out / "modules"
    directory.mkdir(parents=True, exist_ok=True)
    for name, source in modules().items():
        if not options.only or any(name.startswith(wanted) for wanted in options.only):
            (directory / f"{name}.py").write_text(source)
    results = options.out / "results.jsonl"
    warpsmith = [sys.executable, "-c", "from orchestrator.cli import main; main()"]
    settings = ["--budget", options.budget, "--results", str(results)]
    code = subprocess.run([*warpsmith, "bench", str(directory), *settings], check=False).returncode
    for line in results.read_text().splitlines() if results.exists() else []:
        print(json.dumps(json.loads(line)))
    return code


if __name__ == "__main__":
    sys.exit(main())
