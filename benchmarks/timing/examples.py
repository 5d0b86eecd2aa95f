"""The numbers of every example: what is found for each file of `examples/`, and for a Llama whose layers are swapped.

    python -m benchmarks.timing.examples --out FOLDER [--target cuda] [--only softmax llama …] [--budget 30s]
    python -m benchmarks.timing.examples --table FOLDER
    python -m benchmarks.timing.examples --record FOLDER [--note "what else was true of the machine"]

The first goes on where it stopped, and prints the table. The second only prints. The third writes
`docs/results/examples_cpu.md` and `.jsonl`, or those of the GPU. Files are measured by `warpsmith bench`, one run each.
The Llama is swapped by `warpsmith.optimize_submodules`: its line is the run of the layer that all are like, and
`model_ms` the whole model in eager, under `torch.compile` and with the kernels, by medians of rounds in turn.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import warpsmith
from benchmarks.timing.cpu_examples import COLUMNS, Row, cells, read

ROOT = Path(__file__).parents[2]
WARPSMITH = [sys.executable, "-c", "from orchestrator.commands.cli import main; main()"]
LLAMA = "llama_layers"
ROUNDS = 5
"""In each of which every variant of the Llama is timed for a second, one after the other."""


def files(only: Sequence[str]) -> list[Path]:
    """The examples whose names begin with one of `only`; all where that is empty."""
    found = sorted((ROOT / "examples").glob("*.py"))
    return [each for each in found if not only or each.stem.startswith(tuple(only))]


def bench(options: argparse.Namespace) -> int:
    """Runs `warpsmith bench` over the files; its exit code."""
    directory = options.out / "modules"
    directory.mkdir(parents=True, exist_ok=True)
    for earlier in directory.glob("*.py"):  # of other names in `only`
        earlier.unlink()
    for path in files(options.only):
        (directory / path.name).write_text(path.read_text())
    told = ["--target", options.target, "--budget", options.budget, "--runs", str(options.out / "runs")]
    command = [*WARPSMITH, "bench", str(directory), *told, "--results", str(options.out / "results.jsonl")]
    return subprocess.run(command, check=False).returncode


def llama_example() -> ModuleType:
    """`examples/python/llama_layers.py`."""
    spec = importlib.util.spec_from_file_location(LLAMA, ROOT / "examples" / "python" / f"{LLAMA}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def llama(options: argparse.Namespace) -> Row:
    """The line of the Llama whose four layers are swapped in place."""
    example, runs = llama_example(), str(options.out / "runs")
    model = example.Llama(4).to(options.target).eval()
    tokens = torch.randint(example.VOCABULARY, (2, 128), device=options.target)
    given = {"match": example.LlamaLayer, "budget": options.budget, "runs": runs}
    swapped = warpsmith.optimize_submodules(model, (tokens,), **given)
    command = [*WARPSMITH, "report", swapped.warpsmith["layers.0"].run, "--runs", runs, "--json"]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    arms = {"eager": model, "compile": torch.compile(model), "ours": swapped}
    with torch.no_grad():
        torch.testing.assert_close(swapped(tokens), model(tokens), rtol=1e-3, atol=1e-3)
        rounds = [{name: example.milliseconds(arm, tokens) for name, arm in arms.items()} for _ in range(ROUNDS)]
    medians = {name: statistics.median(each[name] for each in rounds) for name in arms}
    return {**json.loads(told)["tasks"][0], "name": LLAMA, "model_ms": medians}


def found(folder: Path) -> list[Row]:
    """The lines of all that was measured into a folder."""
    return [*read(folder / "results.jsonl"), *read(folder / f"{LLAMA}.jsonl")]


def table(rows: Sequence[Row]) -> str:
    """The results as Markdown: medians in µs of one call, the verdict, and the whole Llama in ms."""
    columns = [*COLUMNS, "verdict"]
    lines = [f"| {' | '.join(columns)} |", f"| {' | '.join('---' for _ in columns)} |"]
    measured = sorted((row for row in rows if row.get("arms_ns")), key=lambda row: row["name"])
    lines += [f"| {' | '.join([*cells(row), row['verdict']])} |" for row in measured]
    lines += [f"| {row['name']} {'| - ' * len(COLUMNS)}| {row['verdict']} |" for row in rows if not row.get("arms_ns")]
    for row in measured:
        if "model_ms" in row:
            told = "The whole Llama takes {eager:.2f} ms in eager, {compile:.2f} ms under `torch.compile`"
            swapped = (
                ", {ours:.2f} ms with its four layers swapped." if row["verdict"] == "PASS" else "; none is swapped."
            )
            lines += ["", (told + swapped).format(**row["model_ms"])]
    return "\n".join(lines)


def record(folder: Path, note: str) -> None:
    """Writes the committed page and its lines."""
    rows = sorted(found(folder), key=lambda row: row["name"])
    options: dict[str, Any] = next(row["options"] for row in rows if row.get("options"))
    is_cuda = options["target"] == "cuda"
    device = torch.cuda.get_device_name() if is_cuda else "CPU"
    slug = re.sub(r"^nvidia_|\W", "", device.lower().replace(" ", "_")) if is_cuda else "cpu"
    place = ROOT / "docs" / "results" / f"examples_{slug}.md"
    place.with_suffix(".jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    where = f"{device}, {machine}" if is_cuda else machine
    given = f"--budget {options['budget']:g}s" + (" --target cuda" if is_cuda else "")
    command = f"python -m benchmarks.timing.examples --out FOLDER {given}"
    place.write_text(
        f"# The examples on {'an ' if is_cuda else 'a '}{device.removeprefix('NVIDIA ')}\n\n"
        "Every file of `examples/`, and the Llama of `examples/python`, whose row is one of its layers. Medians in µs "
        "of one call.\n*compiled* is the faster of the `torch.compile` variants, *fastest* the fastest baseline, "
        f"[labels and verdicts](../measurement.md).\nRaw lines: [{place.stem}.jsonl]({place.stem}.jsonl).\n\n"
        f"{table(rows)}\n\n## Environment and command\n\n"
        f"- {where}, torch {version('torch')}; {options['budget']:g} seconds of search each. {note}\n- `{command}`\n"
    )


def main() -> int:
    """Runs and prints; the exit code is the bench's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--out", type=Path, help="directory for runs and results.jsonl")
    wanted.add_argument("--table", type=Path, metavar="FOLDER", help="only print what was found there")
    wanted.add_argument("--record", type=Path, metavar="FOLDER", help="write what was found there into docs/results")
    parser.add_argument("--target", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--only", nargs="*", default=[], help="names, or beginnings of names, of the examples wanted")
    parser.add_argument("--budget", default="30s", help="search budget of each")
    parser.add_argument("--note", default="", help="with --record: what else was true of the machine")
    options = parser.parse_args()
    if options.record:
        record(options.record, options.note)
        return 0
    if options.table:
        print(table(found(options.table)))
        return 0
    code = bench(options) if files(options.only) else 0
    own = options.out / f"{LLAMA}.jsonl"
    if not own.exists() and (not options.only or LLAMA.startswith(tuple(options.only))):
        own.write_text(json.dumps(llama(options), ensure_ascii=False) + "\n")
    print(table(found(options.out)))
    return code


if __name__ == "__main__":
    sys.exit(main())
