"""What was judged, a JSON line each in a file that only grows; and the table by kind that is made of it.

The one idea: the file is the state. A run that was cut off goes on where it ended, and a table is never stored.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Line = dict[str, Any]

OUTCOMES = ("caught", "no gain", "undecided", "broken", "believed")
"""FAIL; PASS without a speedup; nobody can say; the judge itself failed; a bug."""


def read(file: Path) -> list[Line]:
    """All lines; a last one that was cut off is none."""
    if not file.exists():
        return []
    lines = []
    for text in file.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


def append(file: Path, line: Line) -> None:
    """Writes a line at once."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as out:
        out.write(json.dumps(line) + "\n")


def outcome(line: Line) -> str:
    """One of OUTCOMES."""
    if line["believed"]:
        return "believed"
    return {"FAIL": "caught", "PASS": "no gain", "INFRA": "undecided"}.get(line["verdict"], "broken")


def table(lines: Iterable[Line], axes: Iterable[str]) -> str:
    """Markdown: outcomes by kind of each axis, then what caught them, then each that was believed."""
    lines = list(lines)
    columns = " | ".join(OUTCOMES)
    rows = [f"| by | kind | judged | {columns} |", "| --- | --- |" + " ---: |" * (len(OUTCOMES) + 1)]
    for axis in axes:
        counts: dict[str, Counter[str]] = {}
        for line in lines:
            counts.setdefault(line[axis][0], Counter())[outcome(line)] += 1
        rows += [_row(axis, kind, found) for kind, found in sorted(counts.items())]
    rows.append(_row("**all**", "", Counter(map(outcome, lines))))
    caught = Counter(line["kind"] for line in lines if outcome(line) == "caught")
    seconds = sum(line["seconds"] for line in lines) / max(len(lines), 1)
    rows += ["", "Caught as: " + ", ".join(f"{kind} {count}" for kind, count in caught.most_common()) + "."]
    rows += [f"{seconds:.1f} s of a worker for each attack.", ""]
    rows += [said(line) for line in lines if outcome(line) in ("believed", "broken")]
    return "\n".join(rows)


def said(line: Line) -> str:
    """One attack in a line."""
    parts = "; ".join(f"{axis} {line[axis][1]}" for axis in ("knows", "gives", "hides", "slows") if line.get(axis))
    speedup = f" {line['speedup']:.2f}x" if line["speedup"] else ""
    return (
        f"- {outcome(line)}: {line['name']} on {line['module'][0]}: {parts}: {line['verdict']}{speedup} "
        f"{line['kind']} {line['detail']}"
    ).rstrip()


def _row(axis: str, kind: str, found: Counter[str]) -> str:
    cells = " | ".join(str(found[outcome]) for outcome in OUTCOMES)
    return f"| {axis} | {kind} | {found.total()} | {cells} |"
