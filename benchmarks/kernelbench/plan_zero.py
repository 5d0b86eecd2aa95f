"""Shows that plan zero, every call left to the library, runs and is right for any module that exports.

    python -m benchmarks.kernelbench.plan_zero DIRECTORY --levels 1 2 3 --out DIR         verdicts at reduced shapes
    python -m benchmarks.kernelbench.plan_zero DIRECTORY --fused --levels 1 2 --out DIR   likewise, the most fused plan
    python -m benchmarks.kernelbench.plan_zero DIRECTORY --measure --target cuda --out DIR  times against eager
    python -m benchmarks.kernelbench.plan_zero --table RESULTS.jsonl …                    what was found, as Markdown

DIRECTORY is a checkout of KernelBench's tasks, with level1, level2 and level3 in it. Each module goes through intake,
synthesis without moves, compiling and the jailed verification of the services; one line of JSON says how it ended.
A second run goes on where the first stopped. The modules as they were judged lie in DIR/modules.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.metadata import version
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

from orchestrator.agents import Agents
from orchestrator.pipeline import Faulted, Pipeline, Refused
from orchestrator.serving.device_gate import DeviceGate
from orchestrator.serving.dialing import agents_of
from orchestrator.serving.local import MODULES, LocalServices
from orchestrator.tasks import intake
from orchestrator.tasks.reduced_shapes import STEPS, reduce
from warpsmith.contract import words
from warpsmith.errors import BadInput, WarpsmithError
from warpsmith.sandbox.jail import Policy
from warpsmith.sandbox.worker import Worker
from warpsmith.settings import Settings
from warpsmith.v1 import (
    analysis_pb2,
    synthesis_service_pb2,
    task_pb2,
    tensor_pb2,
    timing_pb2,
    trial_pb2,
    verdict_pb2,
)

MEASURED = tuple(range(1, 101, 10))
"""Numbers of the level-2 tasks that are timed: every tenth, so that none is chosen by its result. They hold
products, convolutions in two and three dimensions and transposed ones, with pointwise tails, norms, pools, reductions
and softmax."""
ENOUGH = 1 << 17
"""Elements of all inputs, or of all outputs, up to which a module counts as reduced."""
BAR = 0.95
"""Least ratio of eager's time to plan zero's."""
FINE = ("PASS", "NOT_EXPORTED", "NOT_RUN", "NO_AUTHORED_FORM")
"""Verdicts that say nothing against a plan: a module that does not export, does not run in eager either, or has nothing
that could be a kernel of ours."""
TIERS = {"screening": timing_pb2.TIER_SCREENING, "final": timing_pb2.TIER_FINAL}

MOST_MOVES = 60
"""Moves of the most fused plan at most."""
_UNWANTED = 9

Row = dict[str, Any]
"""One line of results."""


# ---- the services ----------------------------------------------------------------------------------------------


@dataclass
class Bench(AbstractContextManager["Bench"]):
    """The agents, in processes of their own, and a jailed worker that builds modules."""

    runs: Path

    def __enter__(self) -> Bench:
        self._services = LocalServices(self.runs, modules={n: m for n, m in MODULES.items() if n != "orchestrator"})
        self._services.start()
        names = [name for name in MODULES if name != "orchestrator"]
        self.agents: Agents = agents_of(Settings(addresses={name: self._services.address(name) for name in names}))
        self._worker: Worker | None = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._worker is not None:
            self._worker.close()
        self._services.stop()

    def inspect(self, task: task_pb2.Task) -> task_pb2.Task:
        """The task with its shapes. Modules share a worker, which is replaced when one ends it. Raises BadInput."""
        if self._worker is None or not self._worker.alive:
            self._worker = Worker(intake.WORKER_ENTRY, Policy(), env={"OMP_NUM_THREADS": "1"})
        return intake.inspect(task, self._worker)


# ---- one module ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fitted:
    """A module at the shapes at which it is judged."""

    task: task_pb2.Task
    changes: tuple[str, ...]
    elements: int


def fit(inspect: Callable[[task_pb2.Task], task_pb2.Task], path: Path, copy: Path, target: str) -> Fitted:
    """The first reduction with which the module runs and is small, else the smallest that runs; written to `copy`.

    `inspect` runs a task once and gives it with its shapes.

    Raises:
        BadInput: the module runs with none; the reason is that of its own sizes or the last one tried.
    """
    source = path.read_text()
    best: Fitted | None = None
    tried: dict[str, str] = {}
    for step in STEPS:
        reduced = reduce(source, step)
        if reduced.source in tried:
            continue
        copy.write_text(reduced.source)
        try:
            task = inspect(intake.read(intake.Request(str(copy), target=target)))
        except BadInput as error:
            tried[reduced.source] = str(error)
            continue
        tried[reduced.source] = ""
        elements = max(_elements(task.inputs), _elements(task.outputs))
        if best is None or elements < best.elements:
            best = Fitted(task, reduced.changes, elements)
        if elements <= ENOUGH:
            break
    if best is None:
        raise BadInput(next(reversed(tried.values())))
    copy.write_bytes(best.task.sources[0].content)
    return best


def _elements(specs: Iterable[tensor_pb2.TensorSpec]) -> int:
    return sum(prod(spec.shape) for spec in specs)


def walk(
    agents: Agents,
    task: task_pb2.Task,
    tier: timing_pb2.Tier.ValueType,
    *,
    timed: bool = False,
    moves: Sequence[analysis_pb2.Move] = (),
) -> Row:
    """Takes a plan through a run's own pipeline to its verdict, or to its times; the part of a line that says so."""
    trial = trial_pb2.Trial()
    trial.hypothesis.SetInParent()  # plan zero has no moves
    trial.hypothesis.moves.extend(moves)
    trial.hypothesis.new_move_count = len(moves)
    outcome = Pipeline(agents, DeviceGate(agents.benchmarks), task, go_on_to_timing=lambda: timed).walk(trial, tier)
    row: Row = {"verdict": "NOT_EXPORTED"}
    if trial.HasField("candidate"):
        steps = Counter(step.WhichOneof("kind") for step in trial.candidate.program.steps)
        row = {"verdict": "REFUSED", "steps": dict(steps)}
    if trial.HasField("verdict"):
        row |= _verdict_cells(trial.verdict)
    if isinstance(outcome, Refused | Faulted):
        row["detail"] = outcome.reason
    if trial.HasField("timing"):
        row |= _time_cells(trial.timing)
    return row


def _verdict_cells(verdict: verdict_pb2.Verdict) -> Row:
    return {
        "verdict": words.verdict_state(verdict.state),
        "kind": words.failure_kind(verdict.kind),
        "detail": verdict.detail,
        "comparisons": sum(1 for comparison in verdict.comparisons if comparison.outputs),
        "refused_values": sum(1 for comparison in verdict.comparisons if not comparison.outputs),
        "worst_rms_ratio": round(verdict.worst_rms_ratio, 3),
        "kernelbench_pass": verdict.kernelbench_pass,
        "jail_rung": verdict.jail_rung,
    }


def _time_cells(timing: timing_pb2.Timing) -> Row:
    medians = {arm.kind: arm.median_ns for arm in timing.arms}
    ratio, machine = timing.speedup_eager, timing.environment
    return {
        "eager_ns": medians[timing_pb2.ARM_KIND_EAGER],
        "plan_zero_ns": medians[timing_pb2.ARM_KIND_CANDIDATE],
        "ratio": {"median": ratio.median, "low": ratio.low, "high": ratio.high},
        "noise_floor": timing.noise_floor,
        "flags": [words.flag(flag) for flag in timing.raised],
        "machine": {
            "device": machine.device,
            "driver": machine.driver,
            "torch": machine.torch,
            "python": machine.python,
        },
    }


def sweep_one(bench: Bench, path: Path, copy: Path, tier: str) -> Row:
    """The line of one module at reduced shapes."""
    row: Row = {"tier": tier}
    try:
        fitted = fit(bench.inspect, path, copy, "cpu")
    except WarpsmithError as error:
        return row | {"verdict": "NOT_RUN" if isinstance(error, BadInput) else "INFRA", "detail": str(error)}
    row |= {"changes": list(fitted.changes), "elements": fitted.elements}
    return row | walk(bench.agents, fitted.task, TIERS[tier])


def fuse_one(bench: Bench, path: Path, copy: Path, tier: str) -> Row:
    """The line of one module at reduced shapes, with all that can be in kernels of ours, fused as far as it goes."""
    row: Row = {"tier": tier, "plan": "fused"}
    try:
        fitted = fit(bench.inspect, path, copy, "cpu")
        moves, left = most_fused(bench.agents, fitted.task)
    except WarpsmithError as error:
        return row | {"verdict": "NOT_RUN" if isinstance(error, BadInput) else "INFRA", "detail": str(error)}
    row |= {"changes": list(fitted.changes), "elements": fitted.elements, "left": left}
    row["moves"] = [f"{words.move_kind(move.kind)} {move.group} {move.choice}".strip() for move in moves]
    if not any(move.kind != analysis_pb2.MOVE_KIND_REWRITE for move in moves):
        return row | {"verdict": "NO_AUTHORED_FORM", "detail": "; ".join(f"{op}: {why}" for op, why in left.items())}
    return row | walk(bench.agents, fitted.task, TIERS[tier], moves=moves)


def most_fused(agents: Agents, task: task_pb2.Task) -> tuple[list[analysis_pb2.Move], dict[str, str]]:
    """Moves that rewrite, author and fuse for as long as any is legal, and why each call that is left is left."""
    moves: list[analysis_pb2.Move] = []

    def analyzed(extra: Sequence[analysis_pb2.Move] = ()) -> analysis_pb2.Analysis:
        request = synthesis_service_pb2.AnalyzePlanRequest(task=task, moves=[*moves, *extra])
        return agents.synthesis.AnalyzePlan(request, timeout=300.0).analysis

    while len(moves) < MOST_MOVES:
        analysis = analyzed()
        authored = {group.name for group in analysis.groups if group.computed_by == analysis_pb2.ENGINE_AUTHORED}
        legal = [item.move for item in analysis.legal_moves]
        wanted = [each for each in legal if each.kind != analysis_pb2.MOVE_KIND_AUTHOR or each.group not in authored]
        move = min(wanted, key=_eagerness, default=None)
        if move is None or _eagerness(move) == _UNWANTED:
            break
        moves.append(move)
    left: dict[str, str] = {}
    for group in analyzed().groups:
        if group.computed_by == analysis_pb2.ENGINE_AUTHORED or group.operations[-1] in left:
            continue
        try:
            analyzed([analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group=group.name)])
            left[group.operations[-1]] = f"not reached in {MOST_MOVES} moves"
        except BadInput as refused:
            reason = str(refused).partition("): ")[2]  # after the move, which says nothing here
            left[group.operations[-1]] = reason.rpartition("cannot be one kernel: ")[2]
    return moves, left


def _eagerness(move: analysis_pb2.Move) -> int:
    """What is done first: algebra, then whole chains, then single kernels, then pairs; settings and ways back never."""
    order = {
        analysis_pb2.MOVE_KIND_REWRITE: 0,
        analysis_pb2.MOVE_KIND_AUTHOR: 2,
        analysis_pb2.MOVE_KIND_FUSE: 1 if move.choice == "*" else 3,
    }
    return order.get(move.kind, _UNWANTED)


def measure_one(bench: Bench, path: Path, target: str) -> Row:
    """The line of one module at its own size: verdict, then times of eager and of plan zero side by side."""
    row: Row = {"tier": "screening", "target": target}
    try:
        task = bench.inspect(intake.read(intake.Request(str(path), target=target)))
    except WarpsmithError as error:
        return row | {"verdict": "NOT_RUN" if isinstance(error, BadInput) else "INFRA", "detail": str(error)}
    return row | walk(bench.agents, task, timing_pb2.TIER_SCREENING, timed=True)


# ---- results ---------------------------------------------------------------------------------------------------


def read_rows(files: Iterable[Path]) -> list[Row]:
    """The last line of each module in some result files, in the order of the tasks' numbers."""
    rows: dict[tuple[str, bool], Row] = {}
    for file in files:
        for line in file.read_text().splitlines() if file.exists() else ():
            row = json.loads(line)
            rows[row["name"], "target" in row] = row
    return sorted(rows.values(), key=lambda row: task_number(row["name"]))


def task_number(name: str) -> tuple[int, int]:
    """Level and number of "level2/11_Gemm_ReLU"."""
    level, _, stem = name.partition("/")
    return int(level.removeprefix("level")), int(stem.split("_")[0])


def table(rows: Sequence[Row]) -> str:
    """Markdown: counts by level, what did not pass, and times where there are some."""
    swept = [row for row in rows if "target" not in row]
    timed = [row for row in rows if "target" in row]
    return "\n".join([*(_sweep_lines(swept) if swept else ()), *(_time_lines(timed) if timed else ())])


def _sweep_lines(rows: Sequence[Row]) -> list[str]:
    header = ["level", "modules", "exported", "ran", "PASS", "KernelBench's own check", "values"]
    lines = [_cells(header), _cells(["---"] * len(header))]
    for level in sorted({task_number(row["name"])[0] for row in rows}):
        of_level = [row for row in rows if task_number(row["name"])[0] == level]
        counts = [
            len(of_level),
            sum(exported(row) for row in of_level),
            sum(row.get("comparisons", 0) > 0 for row in of_level),
            sum(row["verdict"] == "PASS" for row in of_level),
            sum(row.get("kernelbench_pass", False) for row in of_level),
        ]
        tiers = Counter(row["tier"] for row in of_level)
        lines.append(_cells([level, *counts, ", ".join(f"{tier} ({count})" for tier, count in tiers.items())]))
    if any("left" in row for row in rows):
        lines += ["", *_fused_lines([row for row in rows if "left" in row])]
    missed = [row for row in rows if row["verdict"] != "PASS"]
    lines += ["", f"Not PASS: {len(missed)} of {len(rows)}.", ""]
    for row in missed:
        reason = " ".join(filter(None, (row["verdict"], row.get("kind"))))
        lines.append(f"- `{row['name']}`: {reason}: {row.get('detail', '')}")
    return [*lines, ""]


def _fused_lines(rows: Sequence[Row]) -> list[str]:
    """What stayed in the library, by operation."""
    kernels = [row.get("steps", {}).get("launch", 0) for row in rows]
    whole = sum(1 for row in rows if row["verdict"] == "PASS" and not row["left"])
    left = Counter((operation, reason) for row in rows for operation, reason in row["left"].items())
    lines = [f"PASS with every computing call in a kernel of ours: {whole} of {len(rows)}; {sum(kernels)} kernels."]
    lines += ["", _cells(["left to the library", "modules", "why it is no kernel"]), _cells(["---"] * 3)]
    return lines + [_cells([f"`{op}`", count, reason]) for (op, reason), count in left.most_common()]


def _time_lines(rows: Sequence[Row]) -> list[str]:
    header = ["task", "verdict", "eager µs", "plan zero µs", "eager ÷ plan zero", "noise", "flags"]
    lines = [_cells(header), _cells(["---"] * len(header))]
    for row in rows:
        cells: list[object] = [row["name"], row["verdict"]]
        if "ratio" in row:
            ratio = row["ratio"]
            cells += [f"{row['eager_ns'] / 1e3:.1f}", f"{row['plan_zero_ns'] / 1e3:.1f}"]
            cells += [f"{ratio['median']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"]
            cells += [f"{row['noise_floor']:.3f}", ", ".join(row["flags"]) or "-"]
        else:
            cells += ["-", "-", "-", "-", row.get("detail", "")]
        lines.append(_cells(cells))
    met = sum("ratio" in row and row["ratio"]["median"] >= BAR for row in rows)
    machines = {
        ", ".join(f"{key} {value}" for key, value in row["machine"].items()) for row in rows if "machine" in row
    }
    return [*lines, "", f"At {BAR} times eager's speed or more: {met} of {len(rows)}. {'; '.join(sorted(machines))}"]


def exported(row: Mapping[str, Any]) -> bool:
    """Whether the module became a plan: it counts against the bar."""
    return "steps" in row


def _cells(cells: Iterable[object]) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |"


# ---- the command -----------------------------------------------------------------------------------------------


def modules(directory: Path, levels: Sequence[int], wanted: Sequence[str]) -> list[tuple[str, Path]]:
    """Name and path of every task of some levels in the order of their numbers; `wanted`: numbers, or beginnings of
    names such as "level2/11_"; empty for all."""
    found = [(f"level{n}/{path.stem}", path) for n in levels for path in (directory / f"level{n}").glob("*_*.py")]
    if not found:
        raise BadInput(f"{directory}: no level{levels[0]}/1_*.py; name a checkout of KernelBench's tasks")
    found.sort(key=lambda each: task_number(each[0]))
    return [(name, path) for name, path in found if not wanted or any(name.startswith(each) for each in wanted)]


def main() -> int:
    """Runs and prints; the exit code says whether all that exported passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, nargs="?", help="checkout of KernelBench's tasks")
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, default=Path("plan_zero"), help="directory of results, modules and logs")
    parser.add_argument("--only", nargs="*", default=[], help="names, or beginnings of names, such as level2/11_")
    parser.add_argument("--tier", choices=TIERS, default="screening", help="how many value families a verdict takes")
    parser.add_argument("--fused", action="store_true", help="judge the most fused authored plan instead of plan zero")
    parser.add_argument("--measure", action="store_true", help="time level-2 tasks at full size: --only, or every 10th")
    parser.add_argument("--target", choices=("cpu", "cuda"), default="cpu", help="what is timed")
    parser.add_argument("--table", type=Path, nargs="+", help="print result files as Markdown and do nothing else")
    options = parser.parse_args()
    if options.table:
        print(table(read_rows(options.table)))
        return 0
    if options.directory is None:
        parser.error("name a checkout of KernelBench's tasks")
    return run(options)


def run(options: argparse.Namespace) -> int:
    """Sweeps or measures what has no line yet, then prints the table."""
    (options.out / "modules").mkdir(parents=True, exist_ok=True)
    results = options.out / (
        "measured.jsonl" if options.measure else "fused.jsonl" if options.fused else "results.jsonl"
    )
    known = {row["name"] for row in read_rows([results])}
    wanted = options.only or [f"level2/{number}_" for number in MEASURED] if options.measure else options.only
    chosen = modules(options.directory, [2] if options.measure else options.levels, wanted)
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {version('torch')}"
    print(f"{len(chosen)} modules, {len(known)} lines in {results} already; {machine}", flush=True)
    with Bench(options.out / "runs") as bench:
        for place, (name, path) in enumerate(chosen, 1):
            if name in known:
                continue
            start = time.monotonic()
            copy = options.out / "modules" / f"{name.replace('/', '_')}.py"
            row: Row = {"name": name}
            if options.measure:
                row |= measure_one(bench, path, options.target)
            elif options.fused:
                row |= fuse_one(bench, path, copy, options.tier)
            else:
                row |= sweep_one(bench, path, copy, options.tier)
            row |= {"seconds": round(time.monotonic() - start, 1)}
            with results.open("a") as output:
                output.write(json.dumps(row, ensure_ascii=False) + "\n")
            told = row.get("detail", "") if "ratio" not in row else f"{row['ratio']['median']:.3f}"
            print(f"[{place}/{len(chosen)}] {name}: {row['verdict']} ({row['seconds']} s) {told}", flush=True)
    rows = [row for row in read_rows([results]) if row["name"] in {name for name, _ in chosen}]
    print(table(rows))
    return 0 if all(row["verdict"] in FINE for row in rows) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BadInput as error:
        print(error, file=sys.stderr)
        sys.exit(2)
