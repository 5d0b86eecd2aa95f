"""Feeds the running services spoiled plans, programs and replies: no service may crash or grow without end.

    python -m benchmarks.fuzzing.fuzz [--count 10000] [--seed 1] [--write docs/results/fuzz.md]

Starts the services of the product. A plan is a legal list of moves, spoiled; a program is one that the product wrote,
spoiled as a message or in its text, for the compiler (both targets) or for the benchmark service, which runs it; a
reply comes from `tests/model_server/fuzz_model.py`. Each has to end as the contract says: with an answer, or with the
caller's fault. After the last one the services still answer as they did before the first.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "model_server"))

import fuzz_model  # type: ignore[import-not-found]
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from orchestrator.agents import Agents
from orchestrator.serving.dialing import agents_of
from orchestrator.serving.local import MODULES, LocalServices
from warpsmith import testing
from warpsmith.contract import words
from warpsmith.errors import BadInput, WarpsmithError
from warpsmith.sandbox import jail_init
from warpsmith.settings import Settings
from warpsmith.v1 import (
    analysis_pb2,
    artifact_pb2,
    benchmark_service_pb2,
    candidate_pb2,
    compile_service_pb2,
    hypothesis_pb2,
    synthesis_service_pb2,
    task_pb2,
    verdict_pb2,
)

SERVICES = ("synthesis", "compile", "benchmark")
SHARES = {"plans": 0.45, "programs compiled": 0.13, "programs run": 0.02, "replies": 0.4}
"""Parts of the count: what is run may end its process, which costs seconds."""
DEADLINE_SECONDS = 90.0
GROWTH_MEBIBYTES = 128
"""What a service may grow by after the first tenth of its share, its caches included."""

Ends = Counter[str]
_WHOLE = (-1, 0, 1, 2, 3, 7, 31, 255, 4096, 2**31 - 1, -(2**31), 2**31, 2**40, 2**63 - 1, -(2**63))
_REAL = (0.0, -1.0, 1e-45, 3.4e38, float("inf"), float("nan"))
_TEXT = ("", "x", "\0", "../../etc/passwd", "%s%n", "\u202e", "{" * 999, "9" * 400, "aten.softmax.int", "run0", "// ")


@dataclass
class Spoiler:
    """Spoils messages and texts, the same way for the same seed."""

    random: random.Random

    def message(self, message: Message, changes: int) -> None:
        """Changes fields anywhere in the message."""
        for _ in range(changes):
            places = list(_fields(message))
            if places:
                self._field(*self.random.choice(places))

    def text(self, text: str) -> str:
        """The text with some of its pieces dropped, doubled, exchanged or replaced."""
        pieces = text.split(" ")
        for _ in range(self.random.choice((1, 1, 2, 5, 40))):
            at, other = self.random.randrange(len(pieces)), self.random.randrange(len(pieces))
            pieces[at] = self.random.choice(
                ("", pieces[at] * 2, pieces[other], *_TEXT, str(self.random.choice(_WHOLE)), "\n#include </etc/passwd>")
            )
        return " ".join(pieces)

    def _field(self, owner: Any, named: FieldDescriptor) -> None:
        value = getattr(owner, named.name)
        if hasattr(value, "pop") and not isinstance(value, str | bytes):  # a list or a map
            if hasattr(value, "keys"):
                key = self.random.choice(list(value))
                self._set(lambda new: value.__setitem__(key, new), value[key])
            else:
                self._items(value)
        elif named.type == FieldDescriptor.TYPE_MESSAGE:
            owner.ClearField(named.name)
        elif named.type == FieldDescriptor.TYPE_ENUM:
            setattr(owner, named.name, self.random.randrange(12))
        else:
            self._set(lambda new: setattr(owner, named.name, new), value)

    def _items(self, items: Any) -> None:
        at, other = self.random.randrange(len(items)), self.random.randrange(len(items))
        match self.random.randrange(3):
            case 0:
                del items[at]
            case 1 if len(items) < 512:
                items.append(items[at])
            case _ if isinstance(items[at], Message):
                kept = type(items[at])()
                kept.CopyFrom(items[at])
                items[at].CopyFrom(items[other])
                items[other].CopyFrom(kept)
            case _:
                self._set(lambda new: items.__setitem__(at, new), items[at])

    def _set(self, put: Callable[[Any], object], old: Any) -> None:
        try:
            put(self.scalar(old))
        except (ValueError, TypeError):  # out of the field's range
            put(type(old)())

    def scalar(self, old: Any) -> Any:
        """Another value of the same type."""
        match old:
            case bool():
                return not old
            case int():
                return self.random.choice((*_WHOLE, old + 1, old - 1, 2 * old))
            case float():
                return self.random.choice(_REAL)
            case bytes():
                at = self.random.randrange(len(old) + 1)
                return old[:at] + self.random.randbytes(8) + old[at + 8 :]
            case _:
                return self.random.choice((*_TEXT, self.text(old)))


def _fields(message: Message) -> Iterator[tuple[Any, FieldDescriptor]]:
    """Every field that is set, with the message that it is in; a list of messages is also a place by itself."""
    for named, value in message.ListFields():
        yield message, named
        if named.type != FieldDescriptor.TYPE_MESSAGE or hasattr(value, "keys"):
            continue
        for each in [value] if isinstance(value, Message) else value:
            yield from _fields(each)


@dataclass
class Target:
    """The services, and what they answer to a right question about the softmax example."""

    agents: Agents
    spoiler: Spoiler
    plans: list[list[analysis_pb2.Move]] = field(default_factory=list)
    programs: list[candidate_pb2.Program] = field(default_factory=list)

    def learn(self) -> None:
        """Asks for legal plans and programs of both targets: what is spoiled afterwards."""
        for processor in (task_pb2.TARGET_CPU, task_pb2.TARGET_CUDA):
            task = testing.softmax_task(processor)
            moves: list[analysis_pb2.Move] = []
            for _ in range(4):
                request = synthesis_service_pb2.AnalyzePlanRequest(task=task, moves=moves)
                legal = self.agents.synthesis.AnalyzePlan(request, timeout=DEADLINE_SECONDS).analysis.legal_moves
                self.plans.append(list(moves))
                self.programs.append(self.synthesized(task, moves))
                wanted = [
                    each.move
                    for each in legal
                    if each.move.kind in (analysis_pb2.MOVE_KIND_AUTHOR, analysis_pb2.MOVE_KIND_SET)
                ]
                moves = [*moves, self.spoiler.random.choice(wanted)]

    def synthesized(self, task: task_pb2.Task, moves: list[analysis_pb2.Move]) -> candidate_pb2.Program:
        """The program of a plan."""
        made = hypothesis_pb2.Hypothesis(moves=moves, new_move_count=len(moves), source="fuzz")
        request = synthesis_service_pb2.SynthesizeCandidateRequest(task=task, hypothesis=made)
        return self.agents.synthesis.SynthesizeCandidate(request, timeout=DEADLINE_SECONDS).candidate.program

    def plan(self) -> str:
        """Spoils a plan and asks for its analysis, its program or its repair."""
        draw = self.spoiler.random
        made = hypothesis_pb2.Hypothesis(moves=draw.choice(self.plans), predicted_speedup=1.0, source="fuzz")
        for _ in range(draw.choice((0, 0, 0, 1, 3, 30))):
            made.moves.add().CopyFrom(draw.choice(draw.choice(self.plans[1:4]) or made.moves or [analysis_pb2.Move()]))
        made.new_move_count = len(made.moves)
        self.spoiler.message(made, draw.choice((1, 1, 2, 5)))
        task = testing.softmax_task(draw.choice((task_pb2.TARGET_CPU, task_pb2.TARGET_CUDA)))
        if draw.random() < 0.5:
            asked = synthesis_service_pb2.AnalyzePlanRequest(task=task, moves=made.moves)
            self.agents.synthesis.AnalyzePlan(asked, timeout=DEADLINE_SECONDS)
            return "analysed"
        wanted = synthesis_service_pb2.SynthesizeCandidateRequest(task=task, hypothesis=made)
        self.agents.synthesis.SynthesizeCandidate(wanted, timeout=DEADLINE_SECONDS)
        return "a program"

    def compiled(self) -> str:
        """Spoils a program's text, or the program as a message, and has it compiled."""
        program = self._program(self.programs)
        if self.spoiler.random.random() < 0.7 and program.sources:
            source = self.spoiler.random.choice(program.sources)
            source.text = self.spoiler.text(source.text)
        else:
            self.spoiler.message(program, self.spoiler.random.choice((1, 2, 5)))
        outcome = self._outcome(program)
        if outcome.HasField("artifact"):
            return "a binary"
        return "rejected: " + words.failure_kind(outcome.rejection.kind)

    def ran(self) -> str:
        """Spoils a program for the processor, or its binary, and has it run and compared."""
        draw = self.spoiler.random
        program = self._program([each for each in self.programs if each.target == task_pb2.TARGET_CPU])
        artifact = artifact_pb2.Artifact()
        artifact.CopyFrom(self._outcome(program).artifact)
        if draw.random() < 0.25:
            artifact.content = self.spoiler.scalar(artifact.content)
        else:
            self.spoiler.message(program, draw.choice((1, 1, 2, 4)))
        artifact.program_digest = program.digest
        return self.comparison(program, artifact)

    def comparison(self, program: candidate_pb2.Program, artifact: artifact_pb2.Artifact) -> str:
        """What the benchmark service says of a program."""
        asked = benchmark_service_pb2.CompareOutputsRequest(task=testing.softmax_task(), program=program)
        asked.artifact.CopyFrom(artifact)
        asked.cases.add(family=verdict_pb2.VALUE_FAMILY_TASK, seed=1)
        service: Any = self.agents.benchmarks[0]  # of whose calls a run makes no comparisons
        answer = service.CompareOutputs(asked, timeout=DEADLINE_SECONDS)
        if answer.HasField("fault"):
            return "fault: " + words.failure_kind(answer.fault.kind)
        return "compared"

    def health(self) -> None:
        """Asks right questions again: the answers are those of the beginning."""
        for program in self.programs:
            task = testing.softmax_task(program.target)
            again = self.synthesized(task, self.plans[self.programs.index(program)])
            assert again.digest == program.digest, "the synthesizer answers otherwise than before"
        program = self.programs[1]
        outcome = self._outcome(program)
        assert outcome.HasField("artifact"), outcome.rejection.diagnostics
        assert self.comparison(program, outcome.artifact) == "compared"

    def _program(self, among: list[candidate_pb2.Program]) -> candidate_pb2.Program:
        program = candidate_pb2.Program()
        program.CopyFrom(self.spoiler.random.choice(among))
        return program

    def _outcome(self, program: candidate_pb2.Program) -> compile_service_pb2.CompileCandidateResponse:
        request = compile_service_pb2.CompileCandidateRequest(program=program)
        return self.agents.compilation.CompileCandidate(request, timeout=DEADLINE_SECONDS)


def ended(attempt: Callable[[], str]) -> str:
    """How one attempt ended; raises where that is no end that the contract knows."""
    try:
        return attempt()
    except BadInput as error:
        return type(error).__name__
    except WarpsmithError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error


def resident_mebibytes(process: int) -> int:
    """Resident memory of a service by itself, without its jailed workers, which have limits of their own."""
    line = next(line for line in Path(f"/proc/{process}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) >> 10


@dataclass
class Row:
    """What became of a share."""

    what: str
    ends: Ends
    service: str
    early: int
    late: int
    """Resident MiB of the service after a tenth of the share, and at its end."""
    seconds: float


def processes() -> Mapping[str, int]:
    """Number of each service's process, by the package that it runs."""
    found = {}
    for number in jail_init.descendants(os.getpid()):
        words = Path(f"/proc/{number}/cmdline").read_bytes().split(b"\0")
        for name in SERVICES:
            if words[1:4] == [b"-P", b"-m", MODULES[name].encode()]:
                found[name] = number
    return found


def fuzz(count: int, seed: int) -> list[Row]:
    """Runs all shares. Raises SystemExit for an end that must not be, AssertionError for a service that is not well."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as directory:
        os.environ["WARPSMITH_CACHE_DIR"] = directory
        modules = {name: MODULES[name] for name in SERVICES}
        with LocalServices(Path(directory), modules=modules) as services:
            spoiler = Spoiler(random.Random(seed))
            addresses = {name: services.address(name) for name in SERVICES}
            absent = dict.fromkeys(("reasoning", "correctness"), "127.0.0.1:1")  # never called
            target = Target(agents_of(Settings(addresses={**addresses, **absent})), spoiler)
            target.learn()
            target.health()
            kinds = (
                ("plans", "synthesis", target.plan),
                ("programs compiled", "compile", target.compiled),
                ("programs run", "benchmark", target.ran),
            )
            for what, service, attempt in kinds:
                number, share = processes()[service], max(1, round(count * SHARES[what]))
                begin, ends, early = time.monotonic(), Ends(), 0
                for position in range(share):
                    ends[ended(attempt)] += 1
                    if sys.stderr.isatty() and position % 100 == 99:
                        print(f"{what}: {position + 1} of {share}", file=sys.stderr)
                    if position == share // 10:
                        early = resident_mebibytes(number)
                services.check()
                seconds = time.monotonic() - begin
                rows.append(Row(what, ends, service, early, resident_mebibytes(number), seconds))
            target.health()
    own, share = os.getpid(), max(10, round(count * SHARES["replies"]))
    begin = time.monotonic()
    ends = fuzz_model.fuzz(share // 10, seed)
    early = resident_mebibytes(own)
    ends += fuzz_model.fuzz(share - share // 10, seed + 1)
    rows.append(Row("replies", ends, "reasoning", early, resident_mebibytes(own), time.monotonic() - begin))
    for row in rows:
        assert row.late - row.early <= GROWTH_MEBIBYTES, f"{row.service} grew from {row.early} to {row.late} MiB"
    return rows


def table(rows: list[Row], seed: int) -> str:
    """The numbers in Markdown."""
    total = sum(row.ends.total() for row in rows)
    lines = [
        "# Spoiled plans, programs and replies", "",
        f"{total} in all, seed {seed}. Every one ended in a way that the contract knows; no service ended, and right",
        "questions are answered as before. Memory is that of the service itself, after a tenth and at the end.", "",
        "| what | count | service | MiB early | MiB late | seconds | how they ended |",
        "| --- | ---: | --- | ---: | ---: | ---: | --- |",
    ]  # fmt: skip
    for row in rows:
        ends = ", ".join(f"{name} {number}" for name, number in row.ends.most_common())
        cells = (row.what, row.ends.total(), row.service, row.early, row.late, f"{row.seconds:.0f}", ends)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    made = "Made by `python -m benchmarks.fuzzing.fuzz --write FILE`; `make test-hostile` runs a slice."
    return "\n".join([*lines, "", made, ""])


def main() -> int:
    """Prints and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", type=Path, help="a Markdown table")
    options = parser.parse_args()
    made = table(fuzz(options.count, options.seed), options.seed)
    print(made)
    if options.write:
        options.write.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
