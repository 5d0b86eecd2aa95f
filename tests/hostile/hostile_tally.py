"""Tallies what runs of the hostile suite on a GPU printed: one line for each check, `held` or `BROKEN`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence, Set
from pathlib import Path

_TOLD = ("cost", "defence", "earlier calls", "hang", "honest", "reference", "sanitizer", "solution", "timer")
"""Categories whose sentences say more than that it was as expected."""


def tally(names: Set[tuple[str, str]], logs: Sequence[Path], scoreboard: Path | None) -> int:
    """The scoreboard of what one or several runs printed; of a check that ran twice, the later counts."""
    found: dict[tuple[str, str], tuple[str, str]] = {}
    device = ""
    for line in (line for log in logs for line in log.read_text().splitlines()):
        device = line.removeprefix("on ") if line.startswith("on ") else device
        for category, name in names:
            if match := re.fullmatch(rf"(held|skip|BROKEN) +[\d.]+ s  {re.escape(f'{category}: {name}')}: (.+)", line):
                found[category, name] = (match.group(1), match.group(2))
    counts: dict[str, Counter[str]] = {}
    for category, name in sorted(names):
        counts.setdefault(category, Counter())[found.get((category, name), ("not run", ""))[0]] += 1
    rows = [f"| {category} | {count['held']} | {count.total()} |" for category, count in sorted(counts.items())]
    total = sum(counts.values(), Counter[str]())
    defences = counts.get("defence", Counter[str]())
    told = [
        f"- {category}: {name}: {'' if how == 'held' else how + ': '}{sentence}"
        for (category, name), (how, sentence) in sorted(found.items())
        if how != "held" or category in _TOLD
    ]
    missing = [f"- not run: {category}: {name}" for category, name in sorted(names - found.keys())]
    text = "\n".join([
        "# The hostile suite on a GPU", "",
        f"{device}. Honest programs count where they were accepted.", "",
        "| cases | as expected | of |", "| --- | ---: | ---: |", *rows,
        f"| **all** | **{total['held']}** | **{total.total()}** |", "",
        f"{defences['held']} of {defences.total() - defences['not run']} defences let something hostile through where "
        "they are taken away.",
        "", *told, *missing, "",
        "From `KERNELBENCH=DIR python tests/hostile/hostile_gpu.py | tee LOG`, `... --tally LOG --scoreboard FILE`.",
        "",
    ])  # fmt: skip
    print(text)
    if scoreboard:
        scoreboard.write_text(text)
    return 0 if total["held"] == total.total() else 1
