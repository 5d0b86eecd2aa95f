"""Writes the tables of docs/limits.md again: where PyTorch is at the floor already, and where we are slower.

`python docs/limits_page.py` rewrites the page from docs/results/*.jsonl, `--check` only says whether it is as they are.
The one idea: a baseline's share of the floor is ours divided by our speedup over it, so nothing is measured for it.
What stands between `<!-- made: tables -->` and `<!-- end -->` is made; all other text is written by hand.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
PAGE = DOCS / "limits.md"
AT_FLOOR_PERCENT = 90.0
"""A baseline that is this near to the floor leaves 1.11x at most to be won."""
HEAD = "| module | fastest baseline | µs | its share of the floor | ours against it |\n|---|---|---|---|---|"
COUNTS = "| results | modules | PyTorch at the floor | ours slower, or none |\n|---|---|---|---|"
_TABLES = re.compile(r"(?<=<!-- made: tables -->\n).*?(?=<!-- end -->)", re.DOTALL)
_FLOOR = re.compile(r"takes ([\d.]+) us and the floor of this machine is ([\d.]+) us")
"""Of a run that was not searched, its message alone has the floor (`at_floor` in orchestrator/prepare.py)."""


@dataclass(frozen=True)
class Row:
    """One module, as it was measured."""

    name: str
    arm: str
    """The fastest baseline."""
    baseline_ns: float
    floor_percent: float | None
    """The least time that the hardware allows, as a share of the fastest baseline's; None where it is not known."""
    speedup: dict[str, float] | None
    """Ours against that baseline: median, low, high; None where no time of ours was measured."""

    @property
    def at_floor(self) -> bool:
        """Whether the baseline leaves hardly anything to be won."""
        return self.floor_percent is not None and self.floor_percent >= AT_FLOOR_PERCENT

    @property
    def is_slower(self) -> bool:
        """Whether ours is behind, or has no time although the module was searched."""
        return not self.at_floor if self.speedup is None else self.speedup["median"] < 1

    @property
    def text(self) -> str:
        """Its line in a table."""
        ours = "not searched" if self.at_floor else "no time of ours"
        if self.speedup is not None:
            ours = "{median:.2f}x [{low:.2f}, {high:.2f}]".format(**self.speedup)
        share = "" if self.floor_percent is None else f"{self.floor_percent:.0f} %"
        return f"| {self.name} | {self.arm} | {self.baseline_ns / 1e3:.1f} | {share} | {ours} |"


def read(line: dict[str, Any]) -> Row:
    """One line of results."""
    arm, speedup, percent = line["fastest_baseline"], line["speedup_fastest"], line["floor_percent"]
    if percent is not None and speedup is not None:
        percent = percent / speedup["median"]
    elif told := _FLOOR.search(line["message"]):
        percent = 100 * float(told.group(2)) / float(told.group(1))
    return Row(line["name"], arm, line["arms_ns"][arm], percent, speedup)


def tables() -> str:
    """How many such rows each file of results has, and then the rows."""
    counts, sections = ["", COUNTS], []
    for path in sorted((DOCS / "results").glob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if "arms_ns" not in lines[0]:
            continue
        rows = [read(line) for line in lines]
        at_floor, slower = sum(row.at_floor for row in rows), sum(row.is_slower for row in rows)
        page = path.with_suffix(".md") if path.with_suffix(".md").is_file() else path
        counts.append(f"| [{path.stem}](results/{page.name}) | {len(rows)} | {at_floor} | {slower} |")
        if told := [row for row in rows if row.at_floor or row.is_slower]:
            told.sort(key=lambda row: row.floor_percent or 0, reverse=True)
            sections.append("\n".join(["", f"### {path.stem}", "", HEAD, *(row.text for row in told)]))
    return "\n".join([*counts, *sections, "", ""])


def written(text: str) -> str:
    """The page with its tables made again."""
    return _TABLES.sub(lambda _: tables(), text)


def main() -> int:
    """Rewrites the page, or checks it; the exit code."""
    text = PAGE.read_text(encoding="utf-8")
    made = written(text)
    if "--check" in sys.argv[1:]:
        if made != text:
            print("docs/limits.md is not as docs/results are now: python docs/limits_page.py")
        return int(made != text)
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
