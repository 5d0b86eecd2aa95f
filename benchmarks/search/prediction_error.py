"""How far the roofline reasoner's predictions are from what was measured, by kind of move, from archived runs.

    python -m benchmarks.search.prediction_error runs [OTHER_RUNS …]

A prediction is the time of the parent plan over that of the plan with the move. Its error is the factor between
predicted and measured gain, in percent: 25 % is 1.25 times too much or too little. "Before" is the roofline alone;
"after" is what was told, corrected by the trials of the same run that had ended when this one began.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from agent_reasoning.evidence import PLAN_ZERO, Evidence, candidate_ns, kind
from agent_reasoning.roofline_reasoner import EVIDENCE, SOURCE
from orchestrator.archive import Archive
from warpsmith.v1 import run_pb2


@dataclass(frozen=True)
class Prediction:
    """One timed trial: natural logarithms of predicted over measured gain."""

    task: str
    kinds: tuple[str, ...]
    """Kinds of its new moves, sorted, each once."""
    before: float
    """As the roofline alone predicts."""
    after: float
    """As the reasoner told."""
    gain: float
    """Measured: parent over plan."""

    @property
    def name(self) -> str:
        """The row of the table that it belongs to: the move's kind, settings without values, or several at once."""
        if len(self.kinds) > 1:
            return f"chain: {' + '.join(dict.fromkeys(kind.split()[0] for kind in self.kinds))}"
        kind, _, what = self.kinds[0].partition(" ")
        settings = ", ".join(dict.fromkeys(each.partition("=")[0] for each in what.replace(",", " ").split()))
        return f"set {settings}" if kind == "set" else self.kinds[0]


def predictions(events: Sequence[run_pb2.RunEvent]) -> list[Prediction]:
    """The predictions of one run whose trial and parent were both timed."""
    ended = [(event.at, event.trial) for event in events if event.WhichOneof("kind") == "trial"]
    task = next((event.run.task.name for event in events if event.WhichOneof("kind") == "run"), "")
    by_number = {trial.number: trial for _, trial in ended}
    bare = [trial for _, trial in ended if not trial.hypothesis.moves]
    by_number |= {PLAN_ZERO: bare[0]} if bare else {}
    found = []
    for at, trial in ended:
        hypothesis, now = trial.hypothesis, candidate_ns(trial.timing)
        parent = by_number.get(trial.parent)
        earlier = candidate_ns(parent.timing) if parent is not None and parent is not trial else 0.0
        if hypothesis.source not in (SOURCE, EVIDENCE) or not now or not earlier or hypothesis.predicted_speedup <= 0:
            continue
        new = hypothesis.moves[len(hypothesis.moves) - hypothesis.new_move_count :]
        known = [other for end, other in ended if end <= at - trial.seconds]
        told, gain = math.log(hypothesis.predicted_speedup), math.log(earlier / now)
        alone = told - math.log(Evidence(known).correction(new))
        kinds = tuple(sorted({kind(move) for move in new}))
        found.append(Prediction(task, kinds, alone - gain, told - gain, math.exp(gain)))
    return found


def read(directories: Sequence[Path]) -> list[Prediction]:
    """The predictions of every run that is kept in directories of runs."""
    found: list[Prediction] = []
    for directory in directories:
        archive = Archive.reading(directory)
        try:
            for run in archive.runs(limit=1 << 20):
                found += predictions(archive.events(run.id))
        finally:
            archive.close()
    return found


def percent(logarithms: Iterable[float]) -> float:
    """Median of the factors, as the percentage above one."""
    return 100.0 * math.expm1(statistics.median(abs(value) for value in logarithms))


def table(found: Sequence[Prediction]) -> str:
    """The errors as Markdown, the kinds with most trials first."""
    groups: dict[str, list[Prediction]] = defaultdict(list)
    for prediction in found:
        groups[prediction.name].append(prediction)
    order = sorted(groups, key=lambda name: (-len(groups[name]), name))
    lines = ["| move | trials | tasks | median gain | median error before | median error after | too much |"]
    lines.append("|" + " --- |" * 7)
    lines += [line(name, groups[name]) for name in order]
    if found:
        lines.append(line("**all**", found))
        chosen = [each for each in found if not each.name.startswith("set ")]
        if chosen:
            lines.append(line("**all but settings**", chosen))
    return "\n".join(lines)


def line(name: str, group: Sequence[Prediction]) -> str:
    """One row; "too much" is the share of predictions that were higher than what came."""
    before, after = percent(each.before for each in group), percent(each.after for each in group)
    tasks, gain = len({each.task for each in group}), statistics.median(each.gain for each in group)
    high = 100 * sum(each.after > 0 for each in group) / len(group)
    return f"| {name} | {len(group)} | {tasks} | {gain:.2f}x | {before:.0f} % | {after:.0f} % | {high:.0f} % |"


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="directories of runs")
    print(table(read(parser.parse_args().runs)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
