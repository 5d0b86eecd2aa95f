"""Five agents in one process, for tests: deterministic, instant, and as faulty as a test wants.

The one idea: a fake world is a list of legal moves, each with what it does to the time of a plan that takes 1 ms in
eager; what fails is named by a move's choice, or by a setting's value ("broken" does not compile, "wrong" fails its
verdict, "hang" faults while timed). The real protocols are spoken, so what runs on these runs on the services.
"""
# ruff: noqa: ARG002 (the protocols fix the signatures)

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from orchestrator.agents import Agents
from warpsmith.contract import words
from warpsmith.digest import digest, of_moves, of_program, of_task
from warpsmith.errors import BadInput, IllegalMove, Infrastructure, NotFound
from warpsmith.v1 import (
    analysis_pb2,
    artifact_pb2,
    benchmark_service_pb2,
    candidate_pb2,
    compile_service_pb2,
    correctness_service_pb2,
    hypothesis_pb2,
    reasoning_service_pb2,
    synthesis_service_pb2,
    task_pb2,
    tensor_pb2,
    timing_pb2,
    verdict_pb2,
)

T = TypeVar("T")

EAGER_NS = 1_000_000.0
"""Time of the fake module in eager; `compile` takes 0.8 of it and is the fastest baseline."""


def move(name: str, choice: str = "", group: str = "out") -> analysis_pb2.Move:
    """A move of a fake world: of the kind that the name is, such as "author"; under another, a setting of that name."""
    if kind := words.move_kind_of(name):
        return analysis_pb2.Move(kind=kind, group=group, choice=choice)
    return analysis_pb2.Move(
        kind=analysis_pb2.MOVE_KIND_SET, group=group, choice=f"{name}={choice}" if choice else name
    )


def name_of(each: analysis_pb2.Move) -> str:
    """The name by which `move` makes it."""
    return each.choice.partition("=")[0] if each.kind == analysis_pb2.MOVE_KIND_SET else words.move_kind(each.kind)


def choice_of(each: analysis_pb2.Move) -> str:
    """The choice that `move` was given, of a setting its value."""
    return each.choice.partition("=")[2] if each.kind == analysis_pb2.MOVE_KIND_SET else each.choice


def task(name: str = "fake", target: task_pb2.Target.ValueType = task_pb2.TARGET_CPU) -> task_pb2.Task:
    """A sound task that no agent here looks into."""
    made = task_pb2.Task(
        name=name, entry_path=f"{name}.py", class_name="Model", target=target, precision=task_pb2.PRECISION_FP32
    )
    made.sources.add(path=f"{name}.py", content=b"class Model: ...\n")
    spec = tensor_pb2.TensorSpec(dtype=tensor_pb2.DTYPE_FLOAT32, shape=[4, 4], strides=[4, 1])
    made.inputs.append(spec)
    made.outputs.append(spec)
    made.digest = of_task(made)
    return made


@dataclass
class World:
    """What is legal, how fast it is and what fails; all five agents at once."""

    gains: Mapping[str, float] = field(default_factory=lambda: {"author": 2.0, "vector": 1.2, "tile": 0.9})
    """Name of a move → speedup that it gives, once each."""
    choices: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Name of a move → choices that are legal; one empty choice where nothing is said."""
    floor_ns: float = 100_000.0
    repairs: bool = True
    """Whether a broken choice can be repaired (it becomes an empty one)."""
    seconds: float = 0.0
    """What each call takes."""
    faults: Counter[str] = field(default_factory=Counter)
    """Method → how many of its next calls fail for reasons of the machine."""
    reference_flags: Sequence[timing_pb2.Flag.ValueType] = ()
    """What the audit of the reference finds."""
    bad_module: str = ""
    """Message with which the module cannot be captured; empty for a good one."""
    calls: Counter[str] = field(default_factory=Counter)
    disturbed: list[str] = field(default_factory=list)
    """Methods that ran while something was timed."""
    known_references: list[timing_pb2.ReferenceReport] = field(default_factory=list)
    """What earlier runs are said to have found."""
    _timing: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def agents(self, devices: int = 1) -> Agents:
        """The agents, with so many benchmark services."""
        return Agents(self, self, self, self, [self] * devices)

    def _called(self, method: str, *, timed: bool = False) -> None:
        with self._lock:
            self.calls[method] += 1
            if self._timing:
                self.disturbed.append(method)
            if self.faults[method] > 0:
                self.faults[method] -= 1
                raise Infrastructure(f"{method} is out of order")
            self._timing += timed
        time.sleep(self.seconds)
        with self._lock:
            self._timing -= timed

    def _legal(self, moves: Sequence[analysis_pb2.Move]) -> list[analysis_pb2.Move]:
        done = set(map(name_of, moves))
        return [
            move(name, choice) for name in self.gains if name not in done for choice in self.choices.get(name, ("",))
        ]

    def _check(self, moves: Sequence[analysis_pb2.Move]) -> None:
        names = list(map(name_of, moves))
        for place, name in enumerate(names):
            if name not in self.gains or name in names[:place]:
                raise IllegalMove(f"{name} does not apply")

    def _analysis(self, moves: Sequence[analysis_pb2.Move]) -> analysis_pb2.Analysis:
        legal = [analysis_pb2.LegalMove(move=each, effect=f"does {name_of(each)}") for each in self._legal(moves)]
        for item in legal:
            if item.move.kind == analysis_pb2.MOVE_KIND_REWRITE:  # it spares products
                item.before.product_flop_count = 10**9
        engine = analysis_pb2.ENGINE_AUTHORED if moves else analysis_pb2.ENGINE_LIBRARY
        group = analysis_pb2.Group(name="out", computed_by=engine, operations=["aten.softmax"])
        return analysis_pb2.Analysis(
            plan_digest=of_moves(moves),
            moves=moves,
            groups=[group],
            legal_moves=legal,
            features=sorted(set(map(name_of, moves)) & {"author", "rewrite"}),
        )

    # ---- synthesis -----------------------------------------------------------------------------------

    def AnalyzePlan(
        self, request: synthesis_service_pb2.AnalyzePlanRequest, /, timeout: float | None = None
    ) -> synthesis_service_pb2.AnalyzePlanResponse:
        """Legal moves of a plan."""
        if self.bad_module:
            raise BadInput(self.bad_module)
        self._called("AnalyzePlan")
        self._check(request.moves)
        return synthesis_service_pb2.AnalyzePlanResponse(analysis=self._analysis(request.moves))

    def _candidate(self, moves: Sequence[analysis_pb2.Move]) -> candidate_pb2.Candidate:
        # Order does not matter to the program, so two orders are duplicates.
        text = " ".join(sorted(f"{name_of(each)}:{choice_of(each)}" for each in moves))
        program = candidate_pb2.Program(target=task_pb2.TARGET_CPU)
        program.sources.add(name="kernel.cpp", text=text)
        program.digest = of_program(program)
        analysis = self._analysis(moves)
        del analysis.legal_moves[:]
        return candidate_pb2.Candidate(
            digest=of_moves(moves),
            moves=moves,
            program=program,
            analysis=analysis,
            rewrites=[each.choice for each in moves if each.kind == analysis_pb2.MOVE_KIND_REWRITE],
        )

    def SynthesizeCandidate(
        self, request: synthesis_service_pb2.SynthesizeCandidateRequest, /, timeout: float | None = None
    ) -> synthesis_service_pb2.SynthesizeCandidateResponse:
        """A program whose source is its list of moves."""
        self._called("SynthesizeCandidate")
        self._check(request.hypothesis.moves)
        return synthesis_service_pb2.SynthesizeCandidateResponse(candidate=self._candidate(request.hypothesis.moves))

    def RepairCandidate(
        self, request: synthesis_service_pb2.RepairCandidateRequest, /, timeout: float | None = None
    ) -> synthesis_service_pb2.RepairCandidateResponse:
        """The same moves with broken choices made empty."""
        self._called("RepairCandidate")
        failed = request.failed.candidate.moves
        moves = [move(name_of(each)) if choice_of(each) == "broken" else each for each in failed]
        if not self.repairs or moves == list(failed):
            raise NotFound("no remedy is known")
        hypothesis = hypothesis_pb2.Hypothesis(moves=moves, new_move_count=1, rationale="repaired", source="repair")
        return synthesis_service_pb2.RepairCandidateResponse(hypothesis=hypothesis, candidate=self._candidate(moves))

    # ---- reasoning -----------------------------------------------------------------------------------

    def ProposeHypotheses(
        self, request: reasoning_service_pb2.ProposeHypothesesRequest, /, timeout: float | None = None
    ) -> reasoning_service_pb2.ProposeHypothesesResponse:
        """Legal moves, the largest gain first."""
        self._called("ProposeHypotheses")
        ranked = sorted(request.analysis.legal_moves, key=lambda legal: -self.gains[name_of(legal.move)])
        hypotheses = [
            hypothesis_pb2.Hypothesis(
                moves=[*request.analysis.moves, legal.move],
                new_move_count=1,
                predicted_speedup=self.gains[name_of(legal.move)],
                rationale=legal.effect,
                source="fake",
            )
            for legal in ranked
        ]
        return reasoning_service_pb2.ProposeHypothesesResponse(hypotheses=hypotheses[: request.limit])

    # ---- compile and correctness ---------------------------------------------------------------------

    def CompileCandidate(
        self, request: compile_service_pb2.CompileCandidateRequest, /, timeout: float | None = None
    ) -> compile_service_pb2.CompileCandidateResponse:
        """A binary, unless a choice is "broken"."""
        self._called("CompileCandidate")
        if _has(request.program, "broken"):
            rejection = compile_service_pb2.CompileRejection(
                kind=verdict_pb2.FAILURE_KIND_COMPILE_ERROR, diagnostics="kernel.cpp:1: error: broken"
            )
            return compile_service_pb2.CompileCandidateResponse(rejection=rejection)
        artifact = artifact_pb2.Artifact(
            digest=digest("artifact", request.program.digest),
            program_digest=request.program.digest,
            format=artifact_pb2.BINARY_FORMAT_SHARED_OBJECT,
            content=b"\x7fELF",
        )
        return compile_service_pb2.CompileCandidateResponse(artifact=artifact)

    def VerifyArtifact(
        self, request: correctness_service_pb2.VerifyArtifactRequest, /, timeout: float | None = None
    ) -> correctness_service_pb2.VerifyArtifactResponse:
        """PASS, unless a choice is "wrong"."""
        self._called("VerifyArtifact")
        verdict = verdict_pb2.Verdict(state=verdict_pb2.VERDICT_STATE_PASS, worst_rms_ratio=1.0, kernelbench_pass=True)
        # "flattering" passes screening only: what finalists are judged again for.
        late = _has(request.program, "flattering") and request.tier == timing_pb2.TIER_FINAL
        if late or _has(request.program, "wrong"):
            verdict = verdict_pb2.Verdict(
                state=verdict_pb2.VERDICT_STATE_FAIL, kind=verdict_pb2.FAILURE_KIND_WRONG_VALUE, detail="far off"
            )
        return correctness_service_pb2.VerifyArtifactResponse(verdict=verdict)

    # ---- benchmark -----------------------------------------------------------------------------------

    def DescribeDevice(
        self, request: benchmark_service_pb2.DescribeDeviceRequest, /, timeout: float | None = None
    ) -> benchmark_service_pb2.DescribeDeviceResponse:
        """A CPU, whatever is asked for."""
        self._called("DescribeDevice", timed=True)
        device = timing_pb2.Device(target=request.target or task_pb2.TARGET_CPU, name="fake processor")
        return benchmark_service_pb2.DescribeDeviceResponse(device=device)

    def OpenTask(
        self, request: benchmark_service_pb2.OpenTaskRequest, /, timeout: float | None = None
    ) -> benchmark_service_pb2.OpenTaskResponse:
        """At once."""
        self._called("OpenTask")
        return benchmark_service_pb2.OpenTaskResponse()

    def RunReference(
        self, request: benchmark_service_pb2.RunReferenceRequest, /, timeout: float | None = None
    ) -> benchmark_service_pb2.RunReferenceResponse:
        """eager and compile."""
        self._called("RunReference", timed=True)
        if request.HasField("known"):
            self.known_references.append(request.known)
        report = timing_pb2.ReferenceReport(
            arms=_baselines(),
            fastest_arm=timing_pb2.ARM_KIND_COMPILE,
            floor_ns=self.floor_ns,
            raised=self.reference_flags,
        )
        return benchmark_service_pb2.RunReferenceResponse(report=report)

    def MeasureArtifact(
        self, request: benchmark_service_pb2.MeasureArtifactRequest, /, timeout: float | None = None
    ) -> benchmark_service_pb2.MeasureArtifactResponse:
        """The time that the gains of the program's moves give; where a choice is "hang" a fault, where it is
        "impossible" a time below the floor.
        """
        self._called("MeasureArtifact", timed=True)
        if _has(request.program, "hang"):
            fault = benchmark_service_pb2.ExecutionFault(kind=verdict_pb2.FAILURE_KIND_TIMEOUT, detail="hangs")
            return benchmark_service_pb2.MeasureArtifactResponse(fault=fault)
        candidate_ns = self._time(request.program)
        arms = [
            *_baselines(),
            timing_pb2.Arm(kind=timing_pb2.ARM_KIND_CANDIDATE, median_ns=candidate_ns, samples_ns=[candidate_ns] * 3),
        ]
        if request.HasField("rewritten_reference"):
            arms.append(
                timing_pb2.Arm(kind=timing_pb2.ARM_KIND_REWRITTEN, median_ns=self._time(request.rewritten_reference))
            )
        timing = timing_pb2.Timing(
            tier=request.tier,
            arms=arms,
            fastest_arm=timing_pb2.ARM_KIND_COMPILE,
            speedup_fastest=_speedup(0.8 * EAGER_NS / candidate_ns),
            speedup_eager=_speedup(EAGER_NS / candidate_ns),
            noise_floor=0.01,
            floor_ns=self.floor_ns,
            floor_percent=100 * self.floor_ns / candidate_ns,
            faster=0.8 * EAGER_NS / candidate_ns > 1.03,
            device_seconds=0.1,
            steps=[
                timing_pb2.StepTime(
                    group="out", computed_by=analysis_pb2.ENGINE_AUTHORED, name="out_kernel", median_ns=candidate_ns
                )
            ],
            raised=[timing_pb2.FLAG_FLOOR_REJECT] if _has(request.program, "impossible") else [],
        )
        return benchmark_service_pb2.MeasureArtifactResponse(timing=timing)

    def _time(self, program: candidate_pb2.Program) -> float:
        time_ns = EAGER_NS
        for word in program.sources[0].text.split():
            time_ns /= self.gains[word.partition(":")[0]]
        return time_ns


def heard(events: AsyncIterator[T]) -> Iterator[T]:
    """What a watcher hears, without a server and its event loop."""

    async def following() -> T | None:
        return await anext(events, None)

    with asyncio.Runner() as runner:
        while (event := runner.run(following())) is not None:
            yield event


def _has(program: candidate_pb2.Program, choice: str) -> bool:
    return f":{choice}" in program.sources[0].text


def _baselines() -> Iterable[timing_pb2.Arm]:
    return [
        timing_pb2.Arm(kind=timing_pb2.ARM_KIND_EAGER, median_ns=EAGER_NS),
        timing_pb2.Arm(kind=timing_pb2.ARM_KIND_COMPILE, median_ns=0.8 * EAGER_NS),
    ]


def _speedup(median: float) -> timing_pb2.Speedup:
    return timing_pb2.Speedup(median=median, low=0.99 * median, high=1.01 * median)
