"""Counts kernels that are faster and are refused all the same, while the machine is busy.

    python -m benchmarks.timing.honest_kernels --out honest [--count 50] [--load 4] [--budget 10s]
    python -m benchmarks.timing.honest_kernels --table honest/results.jsonl

The modules of `cpu_examples` are optimised, and those of 1.2x to 2x kept with their records. Then processes that spin
keep every processor busy, and the records are judged again, one after the other and over again, until so many were: by
`warpsmith verify`, which makes finals as a search does. Refused is what is not called right and faster.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.module_tables import WARPSMITH
from benchmarks.timing import cpu_examples

LEAST, MOST = 1.2, 2.0
"""Speedups over the fastest baseline of kernels that are judged again."""
MOST_REFUSED = 1
_SPIN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(1 << 16))"

Row = dict[str, Any]


def records(options: argparse.Namespace) -> list[Path]:
    """Optimises what has no record yet; those of kernels that are judged again."""
    found, runs = [], str(options.out / "runs")
    for name, source in cpu_examples.modules().items():
        module, record = options.out / f"{name}.py", options.out / f"{name}.record.json"
        if not record.exists():
            module.write_text(source)
            command = [
                "optimize",
                str(module),
                "--target",
                "cpu",
                "--budget",
                options.budget,
                "--runs",
                runs,
                "--fresh",
            ]
            subprocess.run([*WARPSMITH, *command], stdout=subprocess.DEVNULL, check=False)
            shown = [*WARPSMITH, "show", "last", "--runs", runs, "--record"]
            record.write_text(subprocess.run(shown, stdout=subprocess.PIPE, text=True, check=False).stdout)
        if LEAST <= _speedup(record) <= MOST:
            found.append(record)
    return found


def _speedup(record: Path) -> float:
    """Of a record over the fastest baseline; 0 where nothing was faster."""
    text = record.read_text()
    timing = json.loads(text)["run"]["best"]["timing"] if text else {}
    return float(timing["speedup_fastest"]["median"]) if timing.get("faster") else 0.0


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that spin."""
    spinning = [subprocess.Popen([sys.executable, "-S", "-c", _SPIN]) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def judged(record: Path, options: argparse.Namespace) -> Row:
    """What `warpsmith verify` says of a record now."""
    command = [*WARPSMITH, "verify", str(record), "--json", "--runs", str(options.out / "runs")]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    about = {"name": record.name.removesuffix(".record.json"), "load": options.load, "recorded": _speedup(record)}
    if not ran.stdout:
        failed = {"verdict": f"exit code {ran.returncode}", "faster": False, "labels": [], "speedup_fastest": None}
        return {**about, **failed}
    (told,) = json.loads(ran.stdout)["tasks"]
    return {**about, **told["now"]}


def is_let_in(row: Row) -> bool:
    """Whether a kernel was called right and faster."""
    return bool(row["verdict"] == "PASS" and row["faster"])


def table(rows: Sequence[Row]) -> str:
    """Markdown: of each module how often it was judged and let in, and what was said of those refused."""
    refused = [row for row in rows if not is_let_in(row)]
    loads = sorted({row["load"] for row in rows})
    lines = [
        f"{len(rows)} judged beside {', '.join(map(str, loads))} processes that spin, {len(refused)} refused "
        f"(bar {MOST_REFUSED} of 50).",
        "",
        "| module | recorded | judged | let in | least and most |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    counts = Counter(row["name"] for row in rows)
    for name, count in counts.items():
        own = [row for row in rows if row["name"] == name]
        speedups = [row["speedup_fastest"]["median"] for row in own if row["speedup_fastest"]]
        reach = f"{min(speedups):.2f}x to {max(speedups):.2f}x" if speedups else "-"
        lines.append(f"| {name} | {own[0]['recorded']:.2f}x | {count} | {sum(map(is_let_in, own))} | {reach} |")
    for row in refused:
        told = row["speedup_fastest"] or {"median": 0.0, "low": 0.0, "high": 0.0}
        interval = f"{told['median']:.2f}x [{told['low']:.2f}, {told['high']:.2f}]"
        lines.append(f"\nRefused: {row['name']}: {row['verdict']}, {interval} {' '.join(row['labels'])}")
    return "\n".join(lines)


def main() -> int:
    """Measures and prints; 1 where more are refused than may be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--out", type=Path, help="directory for modules, runs, records and results.jsonl")
    wanted.add_argument("--table", type=Path, metavar="RESULTS", help="only print what these results say")
    parser.add_argument("--count", type=int, default=50, help="judgements")
    parser.add_argument("--load", type=int, default=4, help="processes that spin meanwhile")
    parser.add_argument("--budget", default="10s", help="search budget of each module")
    options = parser.parse_args()
    if options.table:
        print(table([json.loads(line) for line in options.table.read_text().splitlines()]))
        return 0
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    chosen, rows = records(options), []
    print(f"{len(chosen)} kernels of {LEAST}x to {MOST}x", flush=True)
    with busy(options.load):
        for record in itertools.islice(itertools.cycle(chosen), options.count if chosen else 0):
            rows.append(judged(record, options))
            with (options.out / "results.jsonl").open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            print(f"{len(rows)}: {rows[-1]['name']} {'let in' if is_let_in(rows[-1]) else 'REFUSED'}", flush=True)
    print(table(rows))
    return sum(not is_let_in(row) for row in rows) > MOST_REFUSED or not chosen


if __name__ == "__main__":
    sys.exit(main())
