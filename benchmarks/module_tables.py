"""What commands have in common that bench a set of modules and write a page of `docs/results` about them.

The one idea: a folder holds the modules, the runs and `results.jsonl`, one line of `warpsmith bench` each; a command
that is called again goes on there, and its table and its page are made of these lines alone.

    python -m benchmarks.module_tables RESULTS.jsonl

prints the table of any such lines.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
WARPSMITH = [sys.executable, "-c", "from orchestrator.commands.cli import main; main()"]
"""The command, also where it is not installed."""

Row = dict[str, Any]
"""One line of `warpsmith bench`."""

COLUMNS = ["module", "eager", "compiled", "ours", "against fastest", "fastest", "against eager", "labels"]


def parsed(description: str | None, targets: Sequence[str] = ("cpu", "cuda")) -> argparse.Namespace:
    """The options of such a command: one of `out`, `table` and `record` is a folder, the others None."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    wanted = parser.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--out", type=Path, help="folder for modules, runs and results.jsonl")
    wanted.add_argument("--table", type=Path, metavar="FOLDER", help="only print what was found there")
    wanted.add_argument("--record", type=Path, metavar="FOLDER", help="write what was found there into docs/results")
    parser.add_argument("--target", default="cpu", choices=targets)
    parser.add_argument("--only", nargs="*", default=[], help="names, or beginnings of names, of the modules wanted")
    parser.add_argument("--budget", default="30s", help="search budget of each module")
    parser.add_argument("--note", default="", help="with --record: what else was true of the machine")
    return parser.parse_args()


def is_wanted(name: str, options: argparse.Namespace) -> bool:
    """Whether `--only` has this name, or the beginning of it, or nothing."""
    return not options.only or name.startswith(tuple(options.only))


def bench(sources: Mapping[str, str], options: argparse.Namespace) -> int:
    """Runs `warpsmith bench` over those of the modules, name → source, that are wanted; its exit code."""
    directory = options.out / "modules"
    directory.mkdir(parents=True, exist_ok=True)
    for earlier in directory.glob("*.py"):  # of other names in `--only`
        earlier.unlink()
    for name, source in sources.items():
        if is_wanted(name, options):
            (directory / f"{name}.py").write_text(source)
    if not any(directory.iterdir()):
        return 0
    told = ["--target", options.target, "--budget", options.budget, "--runs", str(options.out / "runs")]
    command = [*WARPSMITH, "bench", str(directory), *told, "--results", str(options.out / "results.jsonl")]
    return subprocess.run(command, check=False).returncode


def read(file: Path) -> list[Row]:
    """The last line of each module that has ended."""
    lines = map(json.loads, file.read_text().splitlines() if file.exists() else [])
    return list({row["name"]: row for row in lines if row["verdict"] != "UNDER_WAY"}.values())


def cells(row: Row) -> list[str]:
    """What a table says of a module under `COLUMNS`: medians in µs and speedups; "-" for what was not measured."""
    arms = row.get("arms_ns") or {}
    compiled = min((ns for name, ns in arms.items() if name.startswith("compile")), default=None)
    against, eager = row.get("speedup_fastest"), row.get("speedup_eager")
    return [
        row["name"],
        *(f"{ns / 1e3:.0f}" if ns else "-" for ns in (arms.get("eager"), compiled, arms.get("candidate"))),
        "{median:.2f}x [{low:.2f}, {high:.2f}]".format(**against) if against else "-",
        row.get("fastest_baseline") or "-",
        f"{eager['median']:.2f}x" if eager else "-",
        ", ".join(row.get("labels") or []) or "-",
    ]


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table's lines."""
    return [f"| {' | '.join(each)} |" for each in (columns, ["---"] * len(columns), *rows)]


def write_page(place: Path, rows: Sequence[Row], head: str, table: str, command: str, note: str) -> None:
    """Writes a page and, beside it, the lines that it is made of.

    `head` is its title and what this set is; `command` what was called, and `note` what else was true of the machine.
    """
    place.with_suffix(".jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {version('torch')}"
    place.write_text(
        f"{head} Medians in µs of one call.\n*compiled* is the faster of the `torch.compile` variants, *fastest* the "
        "fastest baseline, [labels and verdicts](../measurement.md).\n"
        f"Raw lines: [{place.stem}.jsonl]({place.stem}.jsonl).\n\n"
        f"{table}\n\n## Environment and command\n\n- {machine}. {note}\n- `{command}`\n"
    )


if __name__ == "__main__":
    print("\n".join(markdown(COLUMNS, map(cells, read(Path(sys.argv[1]))))))
