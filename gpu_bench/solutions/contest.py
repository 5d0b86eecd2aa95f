"""Calls of a solution and of baselines on values that nobody has seen before: how each is made, timed and looked at.

The one idea: a call is a visit. Everybody stands still; the judge places values; one process is let go, and stopped at
its answer; then it is decided whether its results are looked at, element by element, by the judge. So a process cannot
know which of its calls are timed, cannot work while the clock stands, and cannot slow others down. Visits that are
judged and visits that are timed are one function. It believes no process, and keeps none: `solution_session` does.
"""

from __future__ import annotations

import math
import secrets
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from google.protobuf.message import Message

from gpu_bench import faults
from gpu_bench.limits import Limits
from gpu_bench.solutions import left_memory, structure_text
from gpu_bench.solutions.callee import ANEW, CALL, DELIVER, EARLIER, MEMBERS
from gpu_bench.solutions.caller import Answer, Called, CallFailed
from gpu_bench.values import seeds
from warpsmith.errors import BadInput, WorkerCrashed, WorkerRaised, WorkerTimeout
from warpsmith.sandbox.worker import Worker
from warpsmith.v1 import judging_pb2, task_pb2, verdict_pb2

Reply = TypeVar("Reply", bound=Message)

_TASK, _FRESH = verdict_pb2.VALUE_FAMILY_TASK, verdict_pb2.VALUE_FAMILY_FRESH
VARIED = frozenset({
    verdict_pb2.VALUE_FAMILY_NORMAL, verdict_pb2.VALUE_FAMILY_UNIFORM, verdict_pb2.VALUE_FAMILY_MIXED,
    verdict_pb2.VALUE_FAMILY_CONSTANT_ROWS,
})  # fmt: skip
"""Families on which parameters vary (`inputs.PLAIN`, which needs torch)."""
EAGER, AA_COPY = "eager", "aa_copy"  # as in `baselines`, which needs torch
LOOK_SHARE = 0.5
"""Of the timed calls, drawn one by one, whose results are looked at in full."""
ALL_LOOKED_AT = 8
"""Of the first timed calls every one is."""
BUSY = 4.0
"""Times longer than at best that a probe of the GPU takes where somebody is at work there."""
LATE_SECONDS = 1e-3
"""That the device may still be at work for a solution whose call has ended: as long as others may have to wait."""
BUSY_PROBES = 5
"""In a row, that have to find it busy."""


class SolutionFault(Exception):
    """The solution failed while it was called; `fault` says how."""

    def __init__(self, kind: verdict_pb2.FailureKind.ValueType, detail: str) -> None:
        super().__init__(detail)
        self.fault = faults.fault(kind, detail)


@dataclass(frozen=True)
class Visit:
    """A call of the solution, and what it left."""

    answer: Answer
    taken: judging_pb2.Taken
    delivered: Answer
    """Of putting the results where they are looked at."""


@dataclass
class Contest:
    """A judge's process, a solution's, and the values that lie between them."""

    target: task_pb2.Target.ValueType
    limits: Limits
    judge: Worker
    introduction: judging_pb2.Introduction
    eager_seconds: float
    """Of one call of the reference."""
    regions: Sequence[judging_pb2.Region] = ()
    """Of results, in the memory that all share."""
    shared: memoryview | None = None
    """That memory, where results are read from stopped processes: on a processor. None: they deliver by themselves."""
    solution: Called | None = None
    eager_deliver_seconds: list[float] = field(default_factory=list)
    """Of putting eager's results where they are looked at, after each timed call."""
    _left: tuple[bytes, bytes] = (b"", b"")
    """Where the results of the last two calls lie, as the solution's process said at once."""
    _company: frozenset[int] = frozenset()
    """Processes of the solution's jail as it was opened."""
    _members: tuple[verdict_pb2.ValueFamily.ValueType, int] | None = None
    """Family and seed of the parameters that lie in the shared memory; (TASK, 0) for the constructor's."""
    _members_seed: int = field(default_factory=lambda: secrets.randbits(63))
    """Of the parameters of timed calls."""
    _has_members: bool = False
    """Whether the solution has taken them."""
    _packs: bool = False
    """Whether it follows other parameters only where they are there before its first call."""
    _has_kept: bool = False
    """Whether the judge keeps the results of its last call."""
    _seed: int = 0
    """Of the values of timed calls that lie there."""
    _called: set[str] = field(default_factory=set)
    """Who was called on them."""
    _timed_count: int = 0
    _probe_ns: float = 0.0
    """The least that a probe of the GPU took."""
    _left_seconds: float = math.inf
    """The least between an answer and the end of a piece of work that was begun then."""

    # ---- values --------------------------------------------------------------------------------------------

    def place_members(self, family: verdict_pb2.ValueFamily.ValueType = _TASK, seed: int = 0) -> None:
        """Parameters and state of a case into the shared memory."""
        self._place_members((family, seed) if family in VARIED else (_TASK, 0))

    def place_timed_members(self) -> None:
        """Others than the constructor's, which go with FRESH values until others are placed: a weight of zeros or ones
        is one that nobody has after training."""
        self._place_members((_FRESH, self._members_seed))

    def _place_members(self, wanted: tuple[verdict_pb2.ValueFamily.ValueType, int]) -> None:
        if wanted != self._members:
            request = judging_pb2.PlaceRequest(family=wanted[0], seed=wanted[1], members=True)
            self.ask_judge("place", request, judging_pb2.Placed)
            self._members, self._has_members = wanted, False

    def place(
        self, family: verdict_pb2.ValueFamily.ValueType, seed: int, sweep_bytes: int = 0, *, same_beside: bool = False
    ) -> None:
        """Inputs of a case into the shared memory.

        Raises SolutionFault where the solution keeps the GPU at work meanwhile.
        """
        request = judging_pb2.PlaceRequest(family=family, seed=seed, sweep_bytes=sweep_bytes, same_beside=same_beside)
        for _ in range(BUSY_PROBES):
            probe_ns = self.ask_judge("place", request, judging_pb2.Placed).probe_ns
            self._probe_ns = min(self._probe_ns or probe_ns, probe_ns)
            if probe_ns <= BUSY * self._probe_ns:
                return
        raise SolutionFault(verdict_pb2.FAILURE_KIND_CHEAT, "it keeps the GPU at work while nobody calls it")

    def ask_judge(self, method: str, request: Message, response: type[Reply]) -> Reply:
        """Asks the judge's process. Raises what `Worker.call` raises."""
        return self.judge.call(method, request, response, deadline_s=self.limits.judge_seconds)

    # ---- visits --------------------------------------------------------------------------------------------

    def admit(self, solution: Called) -> None:
        """From here on it is this solution that is called. It has taken the members that lie there."""
        self.solution, self._company = solution, solution.processes
        self._packs = self._has_kept = False
        self._has_members = True
        solution.begin_calls()

    def visit(
        self,
        family: verdict_pb2.ValueFamily.ValueType,
        seed: int,
        *,
        sweep_bytes: int = 0,
        same_beside: bool = False,
    ) -> Visit:
        """A call of the solution on values placed for it; then its results are delivered.

        Raises SolutionFault.
        """
        assert self.solution is not None
        seconds = max(self.limits.patience(self.target, 6 * self.eager_seconds), 1.0)
        if not self._has_members and self._packs:
            self._word(ANEW, seconds)
            seconds = self.limits.open_seconds
        elif not self._has_members or self.introduction.signature.has_state:
            self._word(MEMBERS, seconds)
        self._has_members = True
        self.place(family, seed, sweep_bytes, same_beside=same_beside)
        answer = self._timed(lambda at_once: self._word(CALL, seconds, self._generator_seed(seed), at_once))
        taken = self.ask_judge("take", judging_pb2.TakeRequest(), judging_pb2.Taken)
        unread = self._read_results(answer.carried)
        with _Stopped(self.judge):
            delivered = self._word(DELIVER, seconds)
        self._look_at_structure(delivered.carried)
        if unread:
            raise SolutionFault(verdict_pb2.FAILURE_KIND_CHEAT, f"{unread} lies nowhere in its process")
        return Visit(answer, taken, delivered)

    def _timed(self, ask: Callable[[Callable[[], object]], Answer]) -> Answer:
        """A call, as long as it keeps a processor or the device at work.

        On a GPU the clock ends with a piece of work of the judge's, begun at the answer: before what a process has left
        to the device nothing of others runs, whatever it says.
        """
        if self.target != task_pb2.TARGET_CUDA:
            with _Stopped(self.judge):
                return ask(lambda: None)
        answer = ask(lambda: self.judge.begin("probe", judging_pb2.ProbeRequest()))
        probed = self.judge.finish("probe", judging_pb2.Probed, self.limits.judge_seconds)
        left_seconds = max(0.0, probed.ended - answer.ended)
        self._left_seconds = min(self._left_seconds, left_seconds)
        return replace(answer, seconds=answer.seconds + left_seconds, left_seconds=left_seconds - self._left_seconds)

    def _generator_seed(self, seed: int) -> int:
        return seeds.of_generators(seed) if self.introduction.signature.is_random else 0

    def _word(
        self, verb: int, patience: float, number: int = 0, at_once: Callable[[], object] = lambda: None
    ) -> Answer:
        """Asks the solution's process. Raises SolutionFault for whatever it does instead of answering."""
        assert self.solution is not None
        try:
            return self.solution.ask(verb, number=number, deadline_s=patience, at_once=at_once)
        except CallFailed as failed:
            kind = failed.calls.fault or verdict_pb2.FAILURE_KIND_CRASH
            raise SolutionFault(kind, failed.calls.detail) from None
        except WorkerTimeout:
            raise SolutionFault(verdict_pb2.FAILURE_KIND_TIMEOUT, f"no end within {patience:.3g} s") from None
        except WorkerCrashed as crash:
            fault = faults.crash(crash)
            raise SolutionFault(fault.kind, fault.detail) from None
        except (WorkerRaised, BadInput) as error:
            raise SolutionFault(verdict_pb2.FAILURE_KIND_CRASH, str(error)[:300]) from None

    def _read_results(self, told: bytes) -> str:
        """Copies what a call left, from its stopped process to where the judge looks; names what is not there."""
        if self.shared is None:
            return ""
        self._left = (self._left[1], told)
        return self._copied(told)

    def _copied(self, told: bytes, *, only: str = "") -> str:
        assert self.solution is not None
        assert self.shared is not None
        memory = self.solution.memory
        try:
            places = left_memory.unpacked(told, self.regions)
        except ValueError:
            raise SolutionFault(
                verdict_pb2.FAILURE_KIND_CHEAT, "its process does not say where its results lie"
            ) from None
        unread = ""
        for region, place in zip(self.regions, places, strict=True):
            size = left_memory.item_bytes(region.spec) * math.prod(region.spec.shape)
            # What becomes of inputs, the judge sees by itself.
            if size and region.name.startswith(only) and not region.name.startswith("input "):
                to = self.shared[region.offset_bytes : region.offset_bytes + size]
                if memory is None or not memory.read(place, region.spec, to):
                    unread = unread or region.name
        return unread

    def _look_at_structure(self, text: bytes) -> None:
        try:
            described = structure_text.read(text)
        except ValueError:
            raise SolutionFault(verdict_pb2.FAILURE_KIND_CHEAT, "its process does not say what it returned") from None
        wanted = structure_text.read(self.introduction.signature.result)
        if wrong := structure_text.difference(described, wanted):
            raise SolutionFault(verdict_pb2.FAILURE_KIND_WRONG_SHAPE, wrong[:300])

    def _keep(self, *, is_next: bool) -> None:
        """Has the judge keep the delivered results, and looks whether those that it kept before are still the same.

        `is_next`: whether they are of the call right before, on other values.
        """
        self.ask_judge("look", judging_pb2.LookRequest(keep=True), judging_pb2.Look)
        if is_next and self._has_kept:
            self._word(EARLIER, self.limits.judge_seconds)
            if self.shared is not None and self._copied(self._left[0], only="output "):
                raise SolutionFault(verdict_pb2.FAILURE_KIND_CHEAT, "the result of an earlier call is gone")
            if changed := self._different(earlier=True):
                raise SolutionFault(
                    verdict_pb2.FAILURE_KIND_WRONG_VALUE,
                    f"{changed[0]} of an earlier call was changed by a later one: both are the same memory",
                )
        self._has_kept = True

    def _different(self, *, earlier: bool = False) -> list[str]:
        """Delivered outputs that differ from those that the judge kept last, or before those."""
        asked = judging_pb2.LookRequest(kept=not earlier, earlier=earlier)
        return list(self.ask_judge("look", asked, judging_pb2.Look).different)

    # ---- judged --------------------------------------------------------------------------------------------

    def judged(self, family: verdict_pb2.ValueFamily.ValueType, seed: int) -> verdict_pb2.Comparison:
        """What the solution makes of a case, compared with the truth. Raises SolutionFault."""
        self.place_members(family, seed)
        may_pack = not self._has_members and not self._packs and self._members != (_TASK, 0)
        comparison = self._judged(family, seed)
        if may_pack and any(map(_is_far, comparison.outputs)):
            # It may pack its weights at its first call: then they have to be there before.
            self._packs, self._has_members, self._has_kept = True, False, False
            comparison = self._judged(family, seed)
        assert self.solution is not None
        # On a GPU, PyTorch's compilers may come and go.
        if self.target == task_pb2.TARGET_CPU and self.solution.processes - self._company:
            raise SolutionFault(verdict_pb2.FAILURE_KIND_CHEAT, "the solution started a process that lives on")
        return comparison

    def _judged(self, family: verdict_pb2.ValueFamily.ValueType, seed: int) -> verdict_pb2.Comparison:
        """The case twice, with other bytes beside its inputs, and what the judge says of the second."""
        observed = verdict_pb2.Comparison(family=family, seed=seed)
        first = self.visit(family, seed)
        self._keep(is_next=True)
        second = self.visit(family, seed)
        if min(first.answer.left_seconds, second.answer.left_seconds) > LATE_SECONDS:
            raise SolutionFault(
                verdict_pb2.FAILURE_KIND_WRONG_NONDETERMINISTIC,
                "the device is still at work for it when its call has ended: nobody waits for what it returns",
            )
        different = self._different()
        self._keep(is_next=False)
        if different:
            is_stray = self._depends_on_bytes_beside(family, seed)
            self._keep(is_next=False)
            (observed.stray_read_outputs if is_stray else observed.unrepeatable_outputs).extend(different)
        for visit in (first, second):
            observed.mutated_sources.extend(
                name for name in visit.taken.mutated if name not in observed.mutated_sources
            )
            observed.broken_canaries.extend(name for name in visit.taken.broken if name not in observed.broken_canaries)
        return self.ask_judge("judge", judging_pb2.JudgeRequest(observed=observed), judging_pb2.Judgement).comparison

    def _depends_on_bytes_beside(self, family: verdict_pb2.ValueFamily.ValueType, seed: int) -> bool:
        """Whether calls with the bytes of the one that was kept give the same, and one with others does not."""
        for same_beside in (True, True, False):
            self.visit(family, seed, same_beside=same_beside)
            if bool(self._different()) == same_beside:
                return False
        return True

    # ---- timed ---------------------------------------------------------------------------------------------

    def time_solution(self, name: str, sweep_bytes: int) -> Answer:
        """A call on fresh values. Of most, nobody can say which, the results are compared with eager's.

        Raises SolutionFault.
        """
        may_pack = not self._has_members and not self._packs and self._members != (_TASK, 0)
        self._timed_count += 1
        is_early = self._timed_count <= ALL_LOOKED_AT
        if self._called:
            self._seed = secrets.randbits(63)
        self._called = {name}
        visit = self.visit(_FRESH, self._seed, sweep_bytes=sweep_bytes)
        for names, what in ((visit.taken.broken, "memory just outside "), (visit.taken.mutated, "")):
            if names:
                raise SolutionFault(
                    verdict_pb2.FAILURE_KIND_WRONG_INPUT_MUTATED, f"{what}{names[0]} was changed by a timed call"
                )
        if is_early or secrets.randbelow(1000) < 1000 * LOOK_SHARE:
            if wrong := self.ask_judge("look", judging_pb2.LookRequest(), judging_pb2.Look).wrong:
                if may_pack:  # its weights, at its first call
                    self._packs, self._has_members, self._has_kept = True, False, False
                    return self.time_solution(name, sweep_bytes)
                raise SolutionFault(verdict_pb2.FAILURE_KIND_WRONG_VALUE, wrong)
            self._keep(is_next=True)
        else:
            self._has_kept = False
        if self.shared is not None:  # nothing could be put off
            return visit.answer
        return with_work_put_off(visit.answer, visit.delivered, self.eager_deliver_seconds)

    def time_arm(self, name: str, arm: Called, number: int, sweep_bytes: int) -> Answer:
        """A call of a baseline, on values that it has not seen."""
        seconds = self.limits.measure_seconds
        arm.begin_calls()  # again, where another arm has failed
        if self.introduction.signature.has_state:
            arm.ask(MEMBERS, deadline_s=seconds)
        if name in self._called:
            self._seed, self._called = secrets.randbits(63), set()
        self._called.add(name)
        self.place(_FRESH, self._seed, sweep_bytes)
        drawn = self._generator_seed(self._seed)
        answer = self._timed(lambda at_once: arm.ask(CALL, number, drawn, deadline_s=seconds, at_once=at_once))
        if name not in (EAGER, AA_COPY):
            return answer
        # In the way that a solution's are: what was put there is not read.
        self.ask_judge("take", judging_pb2.TakeRequest(), judging_pb2.Taken)
        with _Stopped(self.judge):
            delivered = arm.ask(DELIVER, deadline_s=seconds)
        if self.shared is not None:
            return answer
        self.eager_deliver_seconds.append(delivered.seconds)
        return with_work_put_off(answer, delivered, self.eager_deliver_seconds)


class _Stopped:
    """Stands still inside."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def __enter__(self) -> None:
        self._worker.pause()

    def __exit__(self, *_: object) -> None:
        self._worker.resume()


def with_work_put_off(answer: Answer, delivered: Answer, eager_seconds: Sequence[float]) -> Answer:
    """A call that takes longer by what delivering its results does beyond what it mostly does for eager's."""
    if not eager_seconds:
        return answer
    late_seconds = max(0.0, delivered.seconds - statistics.median(eager_seconds))
    return replace(
        answer,
        seconds=answer.seconds + late_seconds,
        waited_seconds=answer.waited_seconds + min(delivered.waited_seconds, late_seconds),
    )


def _is_far(error: verdict_pb2.OutputError) -> bool:
    """Whether an output is beyond what any solution with the right parameters gives."""
    return bool(error.non_finite_mismatch_count or error.unequal_count) or error.rms_ratio > 4.0
