"""The product's judge, kept warm for many solutions of one reference: what `warpsmith judge` asks, asked here directly.

The one idea: judge and baselines of a reference stay, and each solution has a process of its own, as in the product.
What is told is looked at again before it is called believed: a busy machine may speed anything up once.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from agent_correctness.judge import Judge
from gpu_bench.limits import Limits
from gpu_bench.solutions.solution_session import SolutionSession
from orchestrator.trust import judge
from warpsmith import digest
from warpsmith.errors import WarpsmithError
from warpsmith.sandbox import jail
from warpsmith.v1 import (
    artifact_pb2,
    benchmark_service_pb2,
    candidate_pb2,
    correctness_service_pb2,
    task_pb2,
    timing_pb2,
    verdict_pb2,
)

LIMITS = Limits(hang_seconds=10.0, open_seconds=60.0)
"""Of attacks; the honest get the product's, for on a busy machine building an extension takes longer."""
TARGETS = {"cpu": task_pb2.TARGET_CPU, "cuda": task_pb2.TARGET_CUDA}
MOST_TOLD, NOISES, MOST_NOISE = 1.10, 3.0, 0.2
"""A speedup over eager above 1.10, and above one by three times the noise, is no noise; nor is any above 1.6, for an
attack may make the noise."""
LOOKS = 3
"""Judgements in processes of their own that all have to believe a solution before it is called believed."""
PASS = "PASS"


@dataclass(frozen=True)
class Told:
    """What the judge said of a solution."""

    verdict: str
    """PASS, FAIL, INFRA (nobody can say), or BROKEN: the judge itself failed."""
    kind: str
    detail: str
    seconds: float
    speedup: float = 0.0
    """Over eager, as told; 0 where it was not timed."""
    noise: float = 0.0
    is_faster: bool = False
    labels: tuple[str, ...] = ()

    @property
    def is_right(self) -> bool:
        """Whether it was called right, however fast."""
        return self.verdict == PASS

    @property
    def is_gain(self) -> bool:
        """Whether it was called faster, by more than noise explains."""
        return self.is_faster and self.speedup > max(MOST_TOLD, 1.0 + NOISES * min(self.noise, MOST_NOISE))


class Bench:
    """One warm session at a time: that of the reference asked for last."""

    def __init__(
        self,
        target: str = "cpu",
        *,
        final: bool = False,
        verified: bool = False,
        timed: bool = True,
        rung: str = "",
        limits: Limits = LIMITS,
    ) -> None:
        """`verified`: whether what is timed as in a screening is compared on all families of values, as in a final."""
        self._target = TARGETS[target]
        self._tier = timing_pb2.TIER_FINAL if final else timing_pb2.TIER_SCREENING
        self._compared = timing_pb2.TIER_FINAL if verified else self._tier
        self._is_timed, self._limits = timed, limits
        self._rung = jail.Rung(rung) if rung else None
        self._session: SolutionSession | None = None
        self._reference = ""

    def judged(self, solution: str, reference: str) -> Told:
        """What is told of a solution's text, whose process ends with it."""
        begin = time.monotonic()
        try:
            session = self._session_of(reference)
            found = self._judgement(session, solution)
        except (WarpsmithError, OSError) as error:
            self.close()  # whatever it was, the next solution finds a fresh judge
            return Told("BROKEN", type(error).__name__, str(error)[:300], time.monotonic() - begin)
        session._workers.drop_bench()
        timing, verdict = found.timing, found.verdict
        return Told(
            judge.state_of(verdict),
            judge.kind_of(verdict),
            verdict.detail[:300],
            round(time.monotonic() - begin, 2),
            round(timing.speedup_eager.median, 3) if timing else 0.0,
            round(timing.noise_floor, 3) if timing else 0.0,
            bool(timing and timing.faster),
            found.labels,
        )

    def believed(self, solution: str, reference: str, *, is_wrong: bool = False) -> tuple[bool, Told]:
        """Whether the judge believes a solution that does eager's work and more, or (`is_wrong`) calls it right."""
        for _ in range(LOOKS):
            told = self.judged(solution, reference)
            if not (told.is_right if is_wrong else told.is_gain):
                return False, told
        return True, told

    def close(self) -> None:
        """Ends all processes."""
        if self._session is not None:
            self._session.close()
            self._session, self._reference = None, ""

    def _session_of(self, reference: str) -> SolutionSession:
        if self._session is None or self._reference != reference:
            self.close()
            task = task_pb2.Task(
                name="reference", entry_path="model.py", class_name="Model", target=self._target,
                precision=task_pb2.PRECISION_FP32,
                sources=[task_pb2.SourceFile(path="model.py", content=reference.encode())],
            )  # fmt: skip
            task.digest = digest.of_task(task)
            self._session, self._reference = SolutionSession(task, rung=self._rung, limits=self._limits), reference
        return self._session

    def _judgement(self, session: SolutionSession, solution: str) -> judge.Judgement:
        own = digest.digest(solution, os.urandom(8).hex())  # the same text again gets a process of its own
        program = candidate_pb2.Program(target=self._target, digest=own)
        artifact = artifact_pb2.Artifact(
            digest=own,
            program_digest=own,
            format=artifact_pb2.BINARY_FORMAT_PYTHON_MODULE,
            content=solution.encode(),
        )
        asked = correctness_service_pb2.VerifyArtifactRequest(
            task=session.task, program=program, artifact=artifact, tier=self._compared
        )
        verdict = Judge(_Comparer(session)).verify(asked)
        if verdict.state != verdict_pb2.VERDICT_STATE_PASS or not self._is_timed:
            return judge.Judgement("solution", verdict)
        timed = benchmark_service_pb2.MeasureArtifactRequest(
            task=session.task, program=program, artifact=artifact, tier=self._tier
        )
        return judge.concluded("solution", verdict, session.measure(timed))


@dataclass(frozen=True)
class _Comparer:
    session: SolutionSession

    def compare(
        self, asked: benchmark_service_pb2.CompareOutputsRequest
    ) -> benchmark_service_pb2.CompareOutputsResponse:
        return self.session.compare(asked.program, asked.artifact, asked.cases)
