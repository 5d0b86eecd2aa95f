"""Judges all solutions of a run of KernelBench, and sets what was found beside what the run claims.

The one idea: each solution is judged as `judge` judges one, and its line is kept as those of a bench are, so that the
same command goes on where it stopped. What cannot be judged here is told apart from what is wrong.
"""

from __future__ import annotations

import ast
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from orchestrator.agents import Benchmark, Correctness
from orchestrator.commands import directory_bench
from orchestrator.interchange import layout
from orchestrator.interchange.claims import Claim
from orchestrator.interchange.layout import Solution, TaskKey
from orchestrator.tasks import intake
from orchestrator.trust import judge
from warpsmith import digest, printable
from warpsmith.errors import BadInput, Infrastructure, JailUnavailable, ServiceGone
from warpsmith.sandbox import python_text
from warpsmith.v1 import task_pb2

Line = dict[str, Any]
"""What is kept of a judged solution, as `--json` has it."""
NEEDS_GPU = "NEEDS_GPU"
"""Verdict on what only a GPU can run, where there is none."""
NO_SOLUTION = "NO_SOLUTION"
"""Kind of failure of a file that cannot be parsed or defines no ModelNew."""
_GPU_PACKAGES = frozenset({"triton", "cutlass", "tilelang", "cupy", "pycuda"})
_GPU_NAMES = frozenset({"cuda", "cuda_sources"})


class Outcome(StrEnum):
    """What became of a solution; columns of the table."""

    FASTER = "faster"
    NOT_FASTER = "not faster"
    UNDECIDED = "undecided"
    WRONG = "wrong"
    NOT_JUDGED = "not judged"


@dataclass(frozen=True)
class SolutionSet:
    """The solutions of a folder that are to be judged, each against its task."""

    folder: Path
    tasks: Mapping[TaskKey, Path]
    solutions: Sequence[Solution]

    def entries(self) -> list[directory_bench.Entry]:
        """One for each solution; its digest counts the task's text too."""
        return [self._entry(solution) for solution in self.solutions]

    def _entry(self, solution: Solution) -> directory_bench.Entry:
        name, place = solution.file_name, self.folder / solution.file_name
        if solution.task not in self.tasks:
            problem = f"{place}: the checkout has no task {solution.number} in level {solution.level}"
            return directory_bench.Entry(name, place, "", problem)
        texts, problem = [], ""
        for path in (place, self.tasks[solution.task]):
            try:
                texts.append(layout.content(path))
            except BadInput as error:
                problem = str(error)
        return directory_bench.Entry(name, place, digest.digest("judged", *texts), problem)

    def needs_gpu(self) -> set[str]:
        """Names of the files that only a GPU can run, or whose task only a GPU can."""
        of_tasks = {
            key: needs_gpu(self.tasks[key]) for key in {each.task for each in self.solutions} if key in self.tasks
        }
        return {
            each.file_name
            for each in self.solutions
            if each.task in of_tasks and (of_tasks[each.task] or needs_gpu(self.folder / each.file_name))
        }


@dataclass
class Judging:
    """The judge of a set, with a task made once for all its samples."""

    correctness: Correctness
    benchmark: Benchmark
    set: SolutionSet
    target: task_pb2.Target.ValueType
    """Where they are judged; set."""
    precision: str
    """A key of `intake.PRECISIONS`."""
    _tasks: dict[Path, task_pb2.Task | str] = field(default_factory=dict)
    """Of each reference the task, or why it is none."""
    _ended_by: Infrastructure | None = None
    """What no further solution can be judged without."""

    @property
    def target_word(self) -> str:
        """A key of `intake.TARGETS`."""
        return next(word for word, target in intake.TARGETS.items() if target == self.target)

    def line(self, path: Path, _: float) -> Line:
        """What is kept of the solution in a file.

        Raises:
            BadInput: its reference cannot be used.
        """
        solution = next(each for each in self.set.solutions if each.file_name == path.name)
        try:
            task = self._task(self.set.tasks[solution.task])
            try:
                judge.read(path, task.target)
            except BadInput as error:
                return {"verdict": "FAIL", "kind": NO_SOLUTION, "detail": str(error), "labels": []}
            return judge.as_json(judge.judge(self.correctness, self.benchmark, task, path))
        except Infrastructure as error:
            if isinstance(error, ServiceGone | JailUnavailable):
                self._ended_by = error
            return {"verdict": "FAILED", "message": str(error), "labels": []}

    def check(self) -> None:
        """Raises Infrastructure where a service is gone, or no jail can be built here."""
        if self._ended_by is not None:
            raise self._ended_by

    def _task(self, reference: Path) -> task_pb2.Task:
        if reference not in self._tasks:
            request = intake.Request(str(reference), target=self.target_word, precision=self.precision)
            try:
                self._tasks[reference] = intake.inspect(intake.read(request))
            except BadInput as error:
                self._tasks[reference] = f"the reference cannot be used: {error}"
        match self._tasks[reference]:
            case str(problem):
                raise BadInput(problem)
            case task:
                return task


def needs_gpu(path: Path) -> bool:
    """Whether a text says that it runs on a GPU: by a package, an argument, a call of `.cuda` or a kernel in a string.

    What does not say so fails by itself where there is none.
    """
    try:
        tree = python_text.parse(layout.content(path))
    except (BadInput, SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(map(_names_a_gpu, ast.walk(tree)))


def _names_a_gpu(node: ast.AST) -> bool:
    match node:
        case ast.Import(names=aliases):
            return not _GPU_PACKAGES.isdisjoint(alias.name.split(".")[0] for alias in aliases)
        case ast.ImportFrom(module=str(module)):
            return module.split(".")[0] in _GPU_PACKAGES
        case ast.Call(func=ast.Attribute(attr=name)) | ast.keyword(arg=str(name)):
            return name in _GPU_NAMES
        case ast.Constant(value=str(text)):
            return "__global__" in text or text == "cuda" or text.startswith("cuda:")
    return False


def not_run(file_name: str) -> Line:
    """The line, never kept, of a solution that needs a GPU."""
    return {"file": file_name, "verdict": NEEDS_GPU, "message": "needs a GPU", "labels": []}


def results(set_: SolutionSet, lines: Iterable[Line], claims: Mapping[Solution, Claim]) -> list[Line]:
    """The lines in the order of the solutions, with numbers, outcome and claim; who had no turn yet is left out."""
    by_file = {line["file"]: line for line in lines}
    found = []
    for solution in set_.solutions:
        if (line := by_file.get(solution.file_name)) is not None:
            claim, reference = claims.get(solution), set_.tasks.get(solution.task)
            found.append({
                "level": solution.level,
                "problem": solution.number,
                "sample": solution.sample,
                "reference": reference.name if reference else "",
                "outcome": outcome(line).value,
                "claimed_right": claim.is_right if claim else None,
                "claimed_speedup": claim.speedup if claim else None,
                "kind": "",
                "detail": "",
                "labels": [],
                **line,
            })  # fmt: skip
    return found


def outcome(line: Line) -> Outcome:
    """What became of a solution, by its line."""
    match line["verdict"]:
        case "FAIL":
            return Outcome.WRONG
        case "PASS" if line.get("faster"):
            return Outcome.FASTER
        case "PASS" if judge.UNDECIDED in line.get("labels", ()):
            return Outcome.UNDECIDED
        case "PASS":
            return Outcome.NOT_FASTER
    return Outcome.NOT_JUDGED


def text(result: Line) -> str:
    """A line for people: what was found, what was claimed, and why."""
    speedup = result.get("speedup_fastest")
    shown = f"{speedup['median']:.2f}x" if speedup else "-"
    why = result.get("message") or f"{result['kind']}: {result['detail']}".removeprefix(": ")
    note = " ".join(result["labels"]) if result["verdict"] == "PASS" else why
    return f"{result['outcome']:<11}{shown:>8}  {result['file']}  claimed: {_claimed(result)}  {printable.line(note)}"


def _claimed(result: Line) -> str:
    is_right = result["claimed_right"]
    return "nothing" if is_right is None else Claim(is_right, result["claimed_speedup"]).text


CLAIMS: Mapping[str, Callable[[Line], bool]] = {
    "right, faster": lambda result: bool(result["claimed_right"]) and (result["claimed_speedup"] or 0.0) > 1.0,
    "right, not faster": lambda result: (
        bool(result["claimed_right"]) and 0.0 < (result["claimed_speedup"] or 0.0) <= 1.0
    ),
    "right": lambda result: bool(result["claimed_right"]) and result["claimed_speedup"] is None,
    "wrong": lambda result: result["claimed_right"] is False,
    "nothing": lambda result: result["claimed_right"] is None,
}
"""What can be claimed of a solution; rows of the table."""


def counts(found: Sequence[Line]) -> dict[str, dict[str, int]]:
    """By claim, how many solutions had which outcome; claims that nobody made are left out."""
    of_claims = {claim: Counter(each["outcome"] for each in found if made(each)) for claim, made in CLAIMS.items()}
    return {claim: {each.value: of[each.value] for each in Outcome} for claim, of in of_claims.items() if of}


def table(found: Sequence[Line]) -> list[str]:
    """The counts, and what was wrong by kind."""
    rows = [f"{'claimed':<19}{'all':>6}" + "".join(f"{each.value:>12}" for each in Outcome)]
    for claim, of in counts(found).items():
        rows.append(f"{claim:<19}{sum(of.values()):>6}" + "".join(f"{count:>12}" for count in of.values()))
    kinds = Counter(result["kind"] for result in found if result["outcome"] == Outcome.WRONG.value)
    if kinds:
        rows.append(f"wrong: {', '.join(f'{count} {kind}' for kind, count in kinds.most_common())}")
    return rows


def summary(found: Sequence[Line], chosen_count: int) -> list[str]:
    """How many claims hold, and the speedups that were claimed of the right solutions beside those that were found.

    `chosen_count`: solutions that were to be judged, with those that had no turn yet.
    """
    judged = [result for result in found if result["outcome"] != Outcome.NOT_JUDGED.value]
    rows = [f"{len(judged)} of {chosen_count} solutions judged"]
    if claimed := [result for result in judged if result["claimed_right"]]:
        right = [result for result in claimed if result["outcome"] != Outcome.WRONG.value]
        rows.append(f"{len(right)} of {len(claimed)} that were claimed to be right are right")
        faster = [result for result in claimed if (result["claimed_speedup"] or 0.0) > 1.0]
        if faster:
            of = Counter(result["outcome"] for result in faster)
            unsure = f"; {of[Outcome.UNDECIDED.value]} undecided" if of[Outcome.UNDECIDED.value] else ""
            rows.append(
                f"{of[Outcome.FASTER.value]} of {len(faster)} that were claimed to be faster are, than the fastest "
                f"baseline{unsure}"
            )
        if both := [result for result in right if result["claimed_speedup"]]:
            means = [
                _geomean(result["claimed_speedup"] for result in both),
                *(_geomean(result[key]["median"] for result in both) for key in ("speedup_eager", "speedup_fastest")),
            ]
            rows.append(
                "geometric mean of {} right ones: claimed {:.2f}x; found {:.2f}x against eager, {:.2f}x against the "
                "fastest baseline".format(len(both), *means)
            )
    return rows


def _geomean(values: Iterable[float]) -> float:
    logs = [math.log(max(value, 1e-9)) for value in values]
    return math.exp(sum(logs) / len(logs))


def exit_code(found: Sequence[Line]) -> int:
    """3 where one could not be judged here, 2 where one is bad input, 1 where none is right, else 0."""
    verdicts = {result["verdict"] for result in found}
    if not verdicts.isdisjoint(("FAILED", NEEDS_GPU)):
        return 3
    if "BAD_INPUT" in verdicts:
        return 2
    return 0 if "PASS" in verdicts else 1
