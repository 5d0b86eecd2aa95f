"""Times exports as their users would, and compares that with what was told of them.

    python -m benchmarks.timing.exports_apart --out apart [--only softmax conv …] [--budget 20s] [--rounds 5]
    python -m benchmarks.timing.exports_apart --table apart/results.jsonl

Each module is optimised and exported. Then eager, `torch.compile` and the export are timed in turn, in an order that is
drawn anew for each round, every time in a process of its own: a plain script that knows nothing of Warpsmith. Once as
it is (*plain*), where the C library may give memory back and fetch its pages again in any call, of any arm; and once
*kept*, where it is told to keep it, as the bench's process is. Fails, and names them, where an export that was told
faster is slower than eager or `torch.compile` so.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.module_tables import WARPSMITH
from benchmarks.timing import cpu_examples

ARMS = ("eager", "compile", "export")
MEMORY = {"plain": {}, "kept": {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}}
_BLOCK = "torch.randn(8, 64, 56, 56)"
EXAMPLES = {
    "conv_norm_relu": (
        "self.conv = nn.Conv2d(64, 64, 3, padding=1, bias=False); self.norm = nn.BatchNorm2d(64).eval()",
        "torch.relu(self.norm(self.conv(x)))", _BLOCK),
    "conv_block": (
        "self.conv = nn.Conv2d(64, 64, 3, padding=1); self.norm = nn.GroupNorm(8, 64)",
        "F.silu(self.norm(self.conv(x))) + x", _BLOCK),
    "pointwise_conv_gelu": ("self.conv = nn.Conv2d(64, 128, 1)", "F.gelu(self.conv(x)) * 0.5", _BLOCK),
    "conv_channel_softmax": ("self.conv = nn.Conv2d(64, 64, 1)", "torch.softmax(self.conv(x), 1)", _BLOCK),
    "small_softmax": ("pass", "torch.softmax(x, 1)", "torch.randn(64, 512)"),
    **{name: cpu_examples.EXAMPLES[name] for name in (
        "softmax", "gelu_bias_scale", "layer_norm", "group_norm_relu", "sum_of_rows", "causal_softmax", "masked_choice",
        "argmax", "rms_norm_residual", "reverse_cumsum")},
}  # fmt: skip

SCRIPT = """
import importlib.util, random, statistics, sys, time
import torch


def loaded(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


arm, module, export, seconds = *sys.argv[1:4], float(sys.argv[4])
user = loaded("user", module)
torch.manual_seed(0)
model = user.Model(*user.get_init_inputs())
if arm == "export":
    state = model.state_dict()
    model = loaded("export", export).ModelNew(*user.get_init_inputs())
    model.load_state_dict(state)
elif arm == "compile":
    model = torch.compile(model)
with torch.no_grad():
    sets = [user.get_inputs() for _ in range(4)]
    for inputs in sets + sets:
        model(*inputs)
    taken, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(taken) < 20:
        inputs = sets[len(taken) % 4]
        begin = time.perf_counter_ns()
        made = model(*inputs)
        taken.append(time.perf_counter_ns() - begin)
assert not any(name.split(".")[0] in ("warpsmith", "gpu_bench", "orchestrator") for name in sys.modules)
print(statistics.median(taken))
"""

Row = dict[str, Any]


def once(arm: str, memory: str, module: Path, export: Path, seconds: float) -> float:
    """The median of an arm's calls in ns, in a process of its own."""
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "OMP_NUM_THREADS") if name in os.environ}
    environment |= MEMORY[memory]
    command = [sys.executable, "-I", "-c", SCRIPT, arm, str(module), str(export), str(seconds)]
    ran = subprocess.run(command, env=environment, cwd=module.parent, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SystemExit(f"{module.name}: {arm} failed:\n{ran.stderr[-2000:]}")
    return float(ran.stdout)


def apart(module: Path, export: Path, options: argparse.Namespace, draw: random.Random) -> Mapping[str, list[float]]:
    """ "plain eager" and its like → the median in ns in each round."""
    kinds = [(memory, arm) for memory in MEMORY for arm in ARMS]
    taken: dict[str, list[float]] = {f"{memory} {arm}": [] for memory, arm in kinds}
    for _ in range(options.rounds):
        for memory, arm in draw.sample(kinds, len(kinds)):
            taken[f"{memory} {arm}"].append(once(arm, memory, module, export, options.seconds))
    return taken


def row_of(module: Path, options: argparse.Namespace, draw: random.Random) -> Row:
    """What is told of a module, and what its export takes apart."""
    runs = str(options.out / "runs")
    command = [*WARPSMITH, "optimize", str(module), "--target", "cpu", "--budget", options.budget, "--runs", runs]
    ran = subprocess.run([*command, "--fresh", "--json"], stdout=subprocess.PIPE, text=True, check=False)
    (told,) = json.loads(ran.stdout)["tasks"]
    row = {"name": module.stem, "verdict": told["verdict"], "arms_ns": told.get("arms_ns", {})}
    row |= {
        name: told.get(name) for name in ("speedup_fastest", "speedup_eager", "fastest_baseline", "labels", "call_ns")
    }
    export = options.out / f"{module.stem}_export.py"
    export.unlink(missing_ok=True)
    subprocess.run([*WARPSMITH, "export", "last", "--runs", runs, "-o", str(export)], check=False)
    if export.exists():
        row["apart_ns"] = apart(module, export, options, draw)
    return row


def table(rows: Sequence[Row]) -> str:
    """Markdown: µs of each arm, and how many times longer than ours the others take: as told, plain and kept."""
    columns = ["module", *(f"{kind}: eager, compile, ours" for kind in ("told", *MEMORY)),
               *(f"{arm} / ours: told, plain, kept" for arm in ARMS[:2])]  # fmt: skip
    lines = [f"| {' | '.join(columns)} |", f"| {' | '.join('---' for _ in columns)} |"]
    for row in rows:
        if "apart_ns" not in row:
            lines.append(f"| {row['name']} | {row['verdict']} {'| ' * (len(columns) - 2)}|")
            continue
        times = {"told": [row["arms_ns"].get(name, math.nan) for name in ("eager", "compile", "candidate")]}
        for memory in MEMORY:
            times[memory] = [statistics.median(row["apart_ns"][f"{memory} {arm}"]) for arm in ARMS]
        cells = [", ".join(f"{ns / 1e3:.0f}" for ns in times[kind]) for kind in ("told", *MEMORY)]
        for place in range(2):
            cells.append(", ".join(f"{times[kind][place] / times[kind][2]:.2f}x" for kind in ("told", *MEMORY)))
        lines.append(f"| {' | '.join([row['name'], *cells])} |")
    return "\n".join(lines)


def told_wrongly(rows: Sequence[Row]) -> list[str]:
    """Modules whose export was told faster and is slower than another arm, with kept memory."""
    wrong = []
    for row in rows:
        if "apart_ns" in row:
            eager, compiled, ours = (statistics.median(row["apart_ns"][f"kept {arm}"]) for arm in ARMS)
            wrong += [row["name"]] if ours > min(eager, compiled) else []
    return wrong


def ended(rows: Sequence[Row]) -> int:
    """Prints the table, and what was told wrongly; 1 where something was."""
    print(table(rows))
    if wrong := told_wrongly(rows):
        print(f"told faster, and slower in a process of its own: {', '.join(wrong)}", file=sys.stderr)
    return int(bool(wrong))


def main() -> int:
    """Measures and prints; 1 where something was told wrongly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--out", type=Path, help="directory for modules, runs, exports and results.jsonl")
    wanted.add_argument("--table", type=Path, metavar="RESULTS", help="only print what these results say")
    parser.add_argument("--only", nargs="*", default=[], help="names, or beginnings of names, of the modules wanted")
    parser.add_argument("--budget", default="20s", help="search budget of each module")
    parser.add_argument("--rounds", type=int, default=5, help="processes of each arm")
    parser.add_argument("--seconds", type=float, default=2.0, help="that each of them makes calls")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the order of arms")
    options = parser.parse_args()
    if options.table:
        return ended([json.loads(line) for line in options.table.read_text().splitlines()])
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    draw, rows = random.Random(options.seed), []
    for name, source in cpu_examples.modules(EXAMPLES).items():
        if options.only and not any(name.startswith(wanted) for wanted in options.only):
            continue
        module = options.out / f"{name}.py"
        module.write_text(source)
        rows.append(row_of(module, options, draw))
        with (options.out / "results.jsonl").open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
        print(table(rows[-1:]), flush=True)
    return ended(rows)


if __name__ == "__main__":
    sys.exit(main())
