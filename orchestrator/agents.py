"""The five services that a run calls, as one small object, and how long each call may take.

The one idea: a run sees each agent as a Protocol with the RPCs it needs, so that a gRPC stub and an in-process
fake (`orchestrator.testing`) are the same thing to it. An agent that is away, or gives no answer in time, is asked
again for a while: it may be replaced, stopped or cut off. This knows no order of calls: that is `pipeline`.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from warpsmith.errors import (
    BadInput,
    Infrastructure,
    MethodMissing,
    ModelFault,
    RunLost,
    ServiceDied,
    ServiceGone,
    ServiceLate,
    WarpsmithError,
)
from warpsmith.models.model_turn import ASIDE_SECONDS, TURN_SECONDS
from warpsmith.v1 import (
    benchmark_service_pb2 as bench,
)
from warpsmith.v1 import (
    compile_service_pb2 as comp,
)
from warpsmith.v1 import (
    correctness_service_pb2 as corr,
)
from warpsmith.v1 import (
    lease_pb2,
    trial_pb2,
)
from warpsmith.v1 import (
    reasoning_service_pb2 as reas,
)
from warpsmith.v1 import (
    synthesis_service_pb2 as synth,
)

ANALYZE_SECONDS = 300.0
"""Longest capture and description of a plan: the first one exports the module."""
PROPOSE_SECONDS = 30.0 + TURN_SECONDS
"""Longest wait for hypotheses: a language model may be asked."""
SYNTHESIZE_SECONDS = 150.0
"""Longest capture and generation of a program."""
WRITE_SECONDS = SYNTHESIZE_SECONDS + TURN_SECONDS
"""Longest wait for a kernel that a language model writes or mends."""
COMPILE_SECONDS = 180.0 + ASIDE_SECONDS
"""Longest compilation; a language model may explain a message."""
COMPARE_SECONDS = 600.0
"""Longest comparison of outputs, which the correctness agent waits for."""
VERIFY_SECONDS = COMPARE_SECONDS + 30.0 + ASIDE_SECONDS
"""Longest verification; a language model may propose inputs."""
MEASURE_SECONDS = 900.0
"""Longest measurement; torch.compile's autotuning is inside the final one."""
DESCRIBE_SECONDS = 300.0
AWAY_SECONDS = 120.0
"""How long an agent may be gone or silent: as long as its replacement, or a minute in which it is stopped, takes."""

MOST_ENDS = 3
"""Processes that may end over one program, or over a module that is prepared, before it is set aside."""

log = logging.getLogger("warpsmith.orchestrator")

AnswerT = TypeVar("AnswerT")


def asked(
    call: Callable[[], AnswerT],
    *,
    go_on: Callable[[], bool] = lambda: True,
    pause_seconds: float = 0.5,
    away_seconds: float = AWAY_SECONDS,
    failed: Callable[[WarpsmithError], None] = lambda _: None,
) -> AnswerT:
    """What a call gives. One that fails for reasons of a machine is made twice; one whose service is away or silent for
    `away_seconds`, and twice at least. `go_on` is asked before each further one, `failed` hears of each that failed.

    Raises:
        WarpsmithError: what the last call raised.
    """
    until, count, failed_count = time.monotonic() + away_seconds, 0, 0
    while True:
        try:
            return call()
        except WarpsmithError as error:
            failed(error)
            is_sure = not isinstance(error, Infrastructure) or isinstance(error, ModelFault | MethodMissing | RunLost)
            is_away = isinstance(error, ServiceGone | ServiceLate)
            count, failed_count = count + 1, failed_count + (not is_away)
            if is_sure or failed_count > 1 or (is_away and count > 1 and time.monotonic() >= until):
                raise
            log.warning("%s: asked again", error)
            time.sleep(pause_seconds)
            if not go_on():
                raise


MakeLease = Callable[[], lease_pb2.Lease]


class SetAsideError(Exception):
    """A program over which too many processes ended is tried no more."""


def noting_ends(
    trial: trial_pb2.Trial, work: str, heard: Callable[[WarpsmithError], None]
) -> Callable[[WarpsmithError], None]:
    """For `asked`: hears of failed calls for a trial's program, and keeps each end of the service itself.

    What else was under way there is blamed too; it is no verdict on it, and three such coincidences are rare. Raises
    SetAsideError at the last of `MOST_ENDS`.
    """

    def failed(error: WarpsmithError) -> None:
        heard(error)
        if isinstance(error, ServiceDied):
            trial.ends.add(worker="benchmark", work=work, how=str(error), at=time.time())
            if len(trial.ends) >= MOST_ENDS:
                raise SetAsideError(f"set aside: the benchmark service ended {MOST_ENDS} times over it")

    return failed


class Leases:
    """Of one run's work for devices, from any thread. `epoch`: how often the run has changed hands."""

    def __init__(self, owner: str, run_id: str, epoch: int) -> None:
        self._owner, self._run_id, self._epoch, self._numbers = owner, run_id, epoch, itertools.count(1)

    def __call__(self) -> lease_pb2.Lease:
        """The next one: of two for one program the later one counts."""
        return lease_pb2.Lease(owner=self._owner, run_id=self._run_id, epoch=self._epoch, number=next(self._numbers))


def surviving(call: Callable[[], AnswerT], what: str) -> AnswerT:
    """What a call gives; once more where its service ended in the midst of it, which need not be what it was asked for.

    Raises:
        BadInput: it ended `MOST_ENDS` times; says that `what` is set aside.
    """
    for count in range(1, MOST_ENDS + 1):
        try:
            return call()
        except ServiceDied as error:
            log.warning("%s: asked again", error)
            if count == MOST_ENDS:
                why = f"{what} is set aside: the benchmark service ended {MOST_ENDS} times over it: {error}"
                raise BadInput(why) from error
    raise AssertionError("the last call answers or raises")


class Reasoning(Protocol):
    """Says what to try next."""

    def ProposeHypotheses(
        self, request: reas.ProposeHypothesesRequest, /, timeout: float | None = None
    ) -> reas.ProposeHypothesesResponse:
        """Ranks hypotheses on one parent plan."""
        ...


class Synthesis(Protocol):
    """Turns moves into programs."""

    def AnalyzePlan(
        self, request: synth.AnalyzePlanRequest, /, timeout: float | None = None
    ) -> synth.AnalyzePlanResponse:
        """Describes the plan that moves give."""
        ...

    def SynthesizeCandidate(
        self, request: synth.SynthesizeCandidateRequest, /, timeout: float | None = None
    ) -> synth.SynthesizeCandidateResponse:
        """Makes the candidate that a hypothesis names."""
        ...

    def RepairCandidate(
        self, request: synth.RepairCandidateRequest, /, timeout: float | None = None
    ) -> synth.RepairCandidateResponse:
        """Makes another candidate from a failed one's diagnostic."""
        ...


class Compilation(Protocol):
    """Turns device sources into binaries."""

    def CompileCandidate(
        self, request: comp.CompileCandidateRequest, /, timeout: float | None = None
    ) -> comp.CompileCandidateResponse:
        """Compiles, or says why not."""
        ...


class Correctness(Protocol):
    """Judges artifacts."""

    def VerifyArtifact(
        self, request: corr.VerifyArtifactRequest, /, timeout: float | None = None
    ) -> corr.VerifyArtifactResponse:
        """Runs every check of a tier."""
        ...


class Benchmark(Protocol):
    """Holds one device; times the reference and candidates on it."""

    def DescribeDevice(
        self, request: bench.DescribeDeviceRequest, /, timeout: float | None = None
    ) -> bench.DescribeDeviceResponse:
        """Measures what the device can do."""
        ...

    def OpenTask(self, request: bench.OpenTaskRequest, /, timeout: float | None = None) -> bench.OpenTaskResponse:
        """Starts a task's processes; times nothing."""
        ...

    def RunReference(
        self, request: bench.RunReferenceRequest, /, timeout: float | None = None
    ) -> bench.RunReferenceResponse:
        """Times the reference by itself."""
        ...

    def MeasureArtifact(
        self, request: bench.MeasureArtifactRequest, /, timeout: float | None = None
    ) -> bench.MeasureArtifactResponse:
        """Times a program against its baselines."""
        ...


@dataclass(frozen=True)
class Agents:
    """The services of a run. `benchmarks`: one for each device, at least one."""

    reasoning: Reasoning
    synthesis: Synthesis
    compilation: Compilation
    correctness: Correctness
    benchmarks: Sequence[Benchmark]
    lease: MakeLease = lease_pb2.Lease
    """Gives each piece of work for a device its own; with `Leases` they are those of one run."""
