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
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import warpsmith
from benchmarks.module_tables import (
    COLUMNS,
    ROOT,
    WARPSMITH,
    Row,
    bench,
    cells,
    is_wanted,
    markdown,
    parsed,
    read,
    write_page,
)

LLAMA = "llama_layers"
ROUNDS = 5
"""In each of which every variant of the Llama is timed for a second, one after the other."""


def sources() -> dict[str, str]:
    """The files of `examples/`, name → text."""
    return {path.stem: path.read_text() for path in sorted((ROOT / "examples").glob("*.py"))}


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
    rows = sorted(rows, key=lambda row: row["name"])
    lines = markdown([*COLUMNS, "verdict"], ([*cells(row), row["verdict"]] for row in rows))
    for row in rows:
        if "model_ms" in row:
            told = "The whole Llama takes {eager:.2f} ms in eager, {compile:.2f} ms under `torch.compile`"
            swapped = ", {ours:.2f} ms with its four layers swapped."
            told += swapped if row["verdict"] == "PASS" else "; none is swapped."
            lines += ["", told.format(**row["model_ms"])]
    return "\n".join(lines)


def record(folder: Path, note: str) -> None:
    """Writes the committed page and its lines."""
    rows = sorted(found(folder), key=lambda row: row["name"])
    options: dict[str, Any] = next(row["options"] for row in rows if row.get("options"))
    is_cuda = options["target"] == "cuda"
    device = torch.cuda.get_device_name().removeprefix("NVIDIA ") if is_cuda else "CPU"
    place = ROOT / "docs" / "results" / f"examples_{re.sub(r'[^a-z0-9]', '', device.lower())}.md"
    given = f"--budget {options['budget']:g}s" + (" --target cuda" if is_cuda else "")
    head = (
        f"# The examples on {'an' if is_cuda else 'a'} {device}\n\nEvery file of `examples/`, and the Llama of "
        "`examples/python`, whose row is one of its layers."
    )
    note = f"{options['budget']:g} seconds of search each. {note}".rstrip()
    write_page(place, rows, head, table(rows), f"python -m benchmarks.timing.examples --out FOLDER {given}", note)


def main() -> int:
    """Runs and prints; the exit code is the bench's."""
    options = parsed(__doc__)
    if options.record:
        record(options.record, options.note)
        return 0
    code = 0
    if options.out:
        code = bench(sources(), options)
        own = options.out / f"{LLAMA}.jsonl"
        if not own.exists() and is_wanted(LLAMA, options):
            own.write_text(json.dumps(llama(options), ensure_ascii=False) + "\n")
    print(table(found(options.table or options.out)))
    return code


if __name__ == "__main__":
    sys.exit(main())
