"""What a landscape is on disk: one line of JSON a task with its captured graph, one line a plan with what became of it.

The one idea: a plan is known by the digest of what it does, so a search that reaches it, by any moves, finds its
verdict and its time. The graph is in the file, so that a replay needs neither the module nor torch's capture.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from warpsmith.contract import earlier, words
from warpsmith.v1 import analysis_pb2, graph_pb2, task_pb2, timing_pb2, verdict_pb2

DIGITS = 16
"""Of a digest, in the file."""

Line = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """A plan as it was judged. `speedup` is against eager, timed beside it; 0 where the plan did not pass."""

    plan: str
    program: str
    """Digest of the program: plans with one program are one trial."""
    parent: str
    """Plan that `moves` begin at; empty for plan zero itself."""
    moves: Sequence[analysis_pb2.Move]
    verdict: str
    """PASS, or the kind of failure."""
    speedup: float = 0.0
    candidate_ns: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether it was right, and timed."""
        return self.verdict == "PASS" and self.speedup > 0


@dataclass
class Landscape:
    """A task with the plans that were recorded of it."""

    task: task_pb2.Task
    graph: graph_pb2.Graph
    device: timing_pb2.Device
    plans: dict[str, Plan] = field(default_factory=dict)
    """By digest, in the order in which they were recorded."""
    eager_ns: float = 0.0
    floor_ns: float = 0.0
    made: Mapping[str, str] = field(default_factory=dict)
    """When and by what: date, emitters, torch, toolkit."""

    def path(self, plan: str) -> list[analysis_pb2.Move]:
        """The moves from plan zero to a plan, as it was first reached."""
        moves: list[analysis_pb2.Move] = []
        while plan:
            found = self.plans[plan]
            moves, plan = [*found.moves, *moves], found.parent
        return moves

    @property
    def best(self) -> float:
        """Greatest speedup of any plan that passed; 0 without one."""
        return max((plan.speedup for plan in self.plans.values() if plan.passed), default=0.0)


def read(files: Iterable[Path]) -> list[Landscape]:
    """The landscapes of some files, by name of their task and in order; a line cut short by a crash is passed over."""
    found: dict[str, Landscape] = {}
    for file in files:
        for line in file.read_text().splitlines() if file.exists() else []:
            try:
                item = json.loads(line)
            except ValueError:
                continue
            if "graph" in item:
                found[item["task"]] = _landscape(item)
            elif item.get("task") in found:
                _add(found[item["task"]], item)
    return list(found.values())


def task_line(landscape: Landscape) -> Line:
    """The line that a task's plans follow."""
    return {
        "task": landscape.task.name,
        "graph": _packed(landscape.graph),
        "request": _packed(landscape.task),
        "device": _packed(landscape.device),
        **landscape.made,
    }


def plan_line(task: str, plan: Plan, eager_ns: float, floor_ns: float) -> Line:
    """The line of a plan."""
    line: Line = {"task": task, "plan": plan.plan, "program": plan.program, "parent": plan.parent}
    line["moves"] = [_spelled(move) for move in plan.moves]
    line["verdict"] = plan.verdict
    if plan.passed:
        line |= {"speedup": round(plan.speedup, 4), "ns": round(plan.candidate_ns), "eager_ns": round(eager_ns)}
        line["floor_ns"] = round(floor_ns)
    return line


def append(file: Path, line: Line) -> None:
    """Adds one line."""
    with file.open("a") as output:
        output.write(json.dumps(line, separators=(",", ":")) + "\n")


def digits(digest: str) -> str:
    """A digest as it stands in the file."""
    return digest[:DIGITS]


def verdict_of(plan: Plan) -> verdict_pb2.Verdict:
    """The verdict, as the correctness agent would give it again."""
    if plan.verdict == "PASS":
        return verdict_pb2.Verdict(state=verdict_pb2.VERDICT_STATE_PASS, worst_rms_ratio=1.0, kernelbench_pass=True)
    kind = verdict_pb2.FailureKind.Value(f"FAILURE_KIND_{plan.verdict}")
    return verdict_pb2.Verdict(state=verdict_pb2.VERDICT_STATE_FAIL, kind=kind, detail="recorded")


def _landscape(item: Line) -> Landscape:
    return Landscape(
        task=task_pb2.Task.FromString(_unpacked(item["request"])),
        graph=graph_pb2.Graph.FromString(_unpacked(item["graph"])),
        device=timing_pb2.Device.FromString(_unpacked(item["device"])),
        made={key: item[key] for key in ("date", "emitters", "torch", "machine") if key in item},
    )


def _add(landscape: Landscape, item: Line) -> None:
    plan = Plan(
        plan=item["plan"],
        program=item["program"],
        parent=item["parent"],
        moves=[_move(spelled) for spelled in item["moves"]],
        verdict=item["verdict"],
        speedup=item.get("speedup", 0.0),
        candidate_ns=item.get("ns", 0.0),
    )
    landscape.plans[plan.plan] = plan
    if plan.passed and not plan.parent and not plan.moves:
        landscape.eager_ns, landscape.floor_ns = item["eager_ns"], item["floor_ns"]


def _spelled(move: analysis_pb2.Move) -> list[Any]:
    spelled: list[Any] = [words.move_kind(move.kind), move.group, move.choice]
    return [*spelled, dict(sorted(move.arguments.items()))] if move.arguments else spelled


def _move(spelled: Sequence[Any]) -> analysis_pb2.Move:
    word, group, choice, *arguments = spelled
    move = analysis_pb2.Move(
        kind=words.move_kind_of(word), group=group, choice=choice, arguments=arguments[0] if arguments else None
    )
    return earlier.translated(move)


def _packed(message: Message) -> str:
    return base64.b85encode(zlib.compress(message.SerializeToString(deterministic=True), 9)).decode()


def _unpacked(text: str) -> bytes:
    return zlib.decompress(base64.b85decode(text))
