"""Measures networks on a GPU, at full size: KernelBench's level 3, or the suite of models that people run.

    python -m benchmarks.kernelbench.networks --kernelbench KernelBench/KernelBench --out level3 [--only recurrent 12 …]
    python -m benchmarks.kernelbench.networks --suite models --out models [--only convolution gpt2_block …]
    python -m benchmarks.kernelbench.networks --table level3/results.jsonl

The first two run `warpsmith bench`, few candidates each, and print a table with what was refused and what is slower
than PyTorch named first. They go on where they stopped. The third only prints.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.kernelbench.level1 import Row, geomean, line_of, measure, parser_of, speedup, timed_of
from orchestrator.tasks import model_suite

CLASSES: dict[str, tuple[int, ...]] = {
    "products": (1, 2, 3),
    "recurrent": (33, 34, 35, 36, 37, 38, 39, 40, 41, 42),
    "attention": (28, 31, 43, 44, 46, 47, 50),
    "state space": (48, 49),
}
"""Numbers of level 3's tasks by what they spend their time on; all others convolve."""
CONVOLUTION = "convolution"
BARS = {"recurrent": 2.0, "state space": 1.3, "without convolutions": 1.6, "all": 1.3}
"""Least geometric means against the fastest baseline, a network that nothing is faster for as what its best reaches."""
TASK_BAR = 0.97
"""Least of every network."""
TRIALS, BUDGET = 6, "20s"
_CONVOLUTIONAL = ("resnet", "convnext", "efficientnet", "unet")
"""What names of the suite begin with where they convolve."""


def class_of(name: str) -> str:
    """The class of a network, by the name of its file."""
    number, _, _ = name.partition("_")
    if not number.isdigit():
        return CONVOLUTION if name.startswith(_CONVOLUTIONAL) else "attention"
    return next((kind for kind, numbers in CLASSES.items() if int(number) in numbers), CONVOLUTION)


def read(file: Path) -> list[Row]:
    """The last line of each network: numbers in their order, names in theirs."""
    lines = file.read_text().splitlines() if file.exists() else []
    rows = {row["name"]: row for row in map(json.loads, lines)}

    def place(name: str) -> tuple[int, str]:
        number = name.partition("_")[0]
        return (int(number), "") if number.isdigit() else (0, name)

    return [rows[name] for name in sorted(rows, key=place)]


def table(rows: Sequence[Row]) -> str:
    """All that is to be said of the rows, as Markdown."""
    head = ["network", "class", "verdict", "eager", "compiled", "ours", "against fastest", "fastest", "floor"]
    head += ["KernelBench's check", "trials", "s", "labels"]
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join('---' for _ in head)} |"]
    lines += [line_of(row, class_of(row["name"])) for row in rows]
    return "\n".join([*bars(rows), "", *by_class(rows), "", *lines])


def bars(rows: Sequence[Row]) -> list[str]:
    """What is missing or slower first, then what the networks are held to."""
    timed = timed_of(rows)
    refused = [f"{row['name']} ({row['verdict']}: {row['message'][:120]})" for row in rows if row not in timed]
    slow = [f"{row['name']} {speedup(row):.2f}x" for row in timed if speedup(row) < TASK_BAR]
    lines = [f"- without a time of ours: {'; '.join(refused) or 'none'}"]
    lines.append(f"- under {TASK_BAR}x: {', '.join(slow) or 'none'}")
    for kind, bar in BARS.items():
        own = [speedup(row) for row in timed if _is_of(row["name"], kind)]
        if own:
            lines.append(f"- {kind}: {geomean(own):.2f}x over {len(own)} (bar {bar}x)")
    return lines


def _is_of(name: str, kind: str) -> bool:
    found = class_of(name)
    return kind in (found, "all") or (kind == "without convolutions" and found != CONVOLUTION)


def by_class(rows: Sequence[Row]) -> list[str]:
    """Geometric means against the fastest baseline and against eager."""
    lines = ["| class | networks | timed | faster | against fastest | against eager |", "|" + " --- |" * 6]
    for kind in (*CLASSES, CONVOLUTION, "all"):
        group = [row for row in rows if _is_of(row["name"], kind)]
        timed = timed_of(group)
        if not timed:
            continue
        means = geomean(map(speedup, timed)), geomean(row["speedup_eager"]["median"] for row in timed)
        faster = sum(row["verdict"] == "PASS" for row in group)
        cells = [kind, str(len(group)), str(len(timed)), str(faster), *(f"{mean:.2f}x" for mean in means)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def sources(level3: Path | None, suite: str, out: Path, only: Sequence[str]) -> dict[str, str]:
    """Text by file name of the networks wanted; `only`: classes, numbers, or beginnings of names."""
    place = level3 / "level3" if level3 else model_suite.write(out / "suites" / suite)
    found = {file.name: file.read_text() for file in sorted(place.glob("*.py"))}

    def is_wanted(name: str) -> bool:
        number = name.partition("_")[0]
        return any(each in (class_of(name), number) or (not each.isdigit() and name.startswith(each)) for each in only)

    return {name: text for name, text in found.items() if not only or is_wanted(name)}


def main() -> int:
    """Runs and prints; the exit code is the bench's."""
    parser = parser_of(__doc__)
    parser.add_argument("--suite", default="", choices=["", "models"], help="in place of --kernelbench")
    parser.set_defaults(trials=TRIALS, budget=BUDGET)
    options = parser.parse_args()
    if options.table:
        print(table(read(options.table)))
        return 0
    if bool(options.kernelbench) == bool(options.suite) or not options.out:
        parser.error("--out goes with --kernelbench or --suite, one of the two; --table only prints")
    start = time.monotonic()
    code = measure(sources(options.kernelbench, options.suite, options.out, options.only), options)
    print(table(read(options.out / "results.jsonl")))
    print(f"\n{time.monotonic() - start:.0f} s in this run")
    return code


if __name__ == "__main__":
    sys.exit(main())
