"""Calls of a solution and of baselines on values that they have not seen: how each is made, timed and looked at.

The one idea: a call is a visit. All processes are stopped; the judge places values; one process is let go, and stopped
at its answer; then the bench decides whether the judge looks at its results, element by element. So a process cannot
know which of its calls are timed, cannot work while the clock stands, and cannot slow others down. Visits that are
judged and visits that are timed are one function. It believes no process, and keeps none: `solution_session` does.
"""

from __future__ import annotations

import math
import random
import secrets
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from google.protobuf.message import Message

from gpu_bench.limits import Limits
from gpu_bench.solutions.called_solution import CalledSolution, SolutionFault
from gpu_bench.solutions.callee import ANEW, CALL, DELIVER, EARLIER, MEMBERS
from gpu_bench.solutions.caller import Answer, Called
from gpu_bench.timing.arms import AA_COPY, EAGER
from gpu_bench.values import seeds
from warpsmith.sandbox.worker import Worker
from warpsmith.v1 import judging_pb2, task_pb2, verdict_pb2

Reply = TypeVar("Reply", bound=Message)

_TASK, _FRESH = verdict_pb2.VALUE_FAMILY_TASK, verdict_pb2.VALUE_FAMILY_FRESH
VARIED = frozenset({
    verdict_pb2.VALUE_FAMILY_NORMAL, verdict_pb2.VALUE_FAMILY_UNIFORM, verdict_pb2.VALUE_FAMILY_MIXED,
    verdict_pb2.VALUE_FAMILY_CONSTANT_ROWS, verdict_pb2.VALUE_FAMILY_RARE,
})  # fmt: skip
"""Families of ordinary values, on which parameters are others than the constructor's."""
LOOK_SHARE = 0.5
"""Of the timed calls, drawn one by one, whose results are looked at in full."""
ALL_LOOKED_AT = 8
"""Of the first timed calls every one is."""
JUDGED_ONE_IN = 6
"""Timed calls of which one, drawn one by one, has a judged call ahead of it."""
BUSY = 4.0
"""How many times its shortest time a probe of the GPU takes while other work runs there."""
LATE_SECONDS = 1e-3
"""That the device may still be at work for a solution whose call has ended: as long as others may have to wait."""
BUSY_PROBES = 5
"""In a row, that have to find it busy."""


@dataclass(frozen=True)
class Visit:
    """A call of the solution, and what it left."""

    answer: Answer
    taken: judging_pb2.Taken
    beside: Answer
    """Of what is asked around it: to take state, and to put the results where they are looked at."""


class PlacedValues:
    """The values that lie between a judge and those who are called: which, and whether the solution has taken them."""

    def __init__(self, judge: Worker, judge_seconds: float) -> None:
        self.judge = judge
        self._judge_seconds = judge_seconds
        self._members: tuple[verdict_pb2.ValueFamily.ValueType, int, bool] | None = None
        """Family and seed of the parameters that lie in the shared memory, and whether they are those of timed calls;
        (TASK, 0, False) for the constructor's."""
        self._members_seed = secrets.randbits(63)
        """Of the parameters of timed calls."""
        self.are_taken = False
        """Whether the solution has taken the parameters."""
        self._probe_ns = 0.0
        """The least that a probe of the GPU took."""

    @property
    def are_new(self) -> bool:
        """Whether the parameters are others than the constructor's, and the solution has not taken them."""
        return not self.are_taken and self._members != (_TASK, 0, False)

    @property
    def are_as_timed(self) -> bool:
        """Whether the parameters are those of timed calls: with them go values of any family."""
        return self._members is not None and self._members[2]

    def place_members(self, family: verdict_pb2.ValueFamily.ValueType = _TASK, seed: int = 0) -> None:
        """Parameters and state of a case into the shared memory."""
        self._place_members((_TASK, 0) if family in {_TASK, _FRESH} else (family, seed))

    def place_timed_members(self, family: verdict_pb2.ValueFamily.ValueType) -> None:
        """Others than the constructor's, which go with FRESH values until others are placed: after training no weight
        is all zeros or all ones."""
        self._place_members((family, self._members_seed), is_timed=True)

    def _place_members(self, wanted: tuple[verdict_pb2.ValueFamily.ValueType, int], *, is_timed: bool = False) -> None:
        if (*wanted, is_timed) != self._members:
            request = judging_pb2.PlaceMembersRequest(family=wanted[0], seed=wanted[1], timed=is_timed)
            self.ask("place_members", request, judging_pb2.Done)
            self._members, self.are_taken = (*wanted, is_timed), False

    def place(
        self,
        family: verdict_pb2.ValueFamily.ValueType,
        seed: int,
        sweep_bytes: int = 0,
        *,
        same_beside: bool = False,
        if_judged: bool = False,
    ) -> bool:
        """Inputs of a case into the shared memory; False where they were to be placed only if judged, and cannot be.

        Raises SolutionFault where the solution keeps the GPU at work meanwhile.
        """
        request = judging_pb2.PlaceInputsRequest(
            family=family, seed=seed, sweep_bytes=sweep_bytes, same_beside=same_beside, if_judged=if_judged
        )
        for _ in range(BUSY_PROBES):
            placed = self.ask("place_inputs", request, judging_pb2.PlacedInputs)
            if placed.unjudged:
                return False
            self._probe_ns = min(self._probe_ns or placed.probe_ns, placed.probe_ns)
            if placed.probe_ns <= BUSY * self._probe_ns:
                return True
        raise SolutionFault(verdict_pb2.FAILURE_KIND_CHEAT, "it keeps the GPU at work between its calls")

    def ask(self, method: str, request: Message, response: type[Reply]) -> Reply:
        """Asks the judge's process. Raises what `Worker.call` raises."""
        return self.judge.call(method, request, response, deadline_s=self._judge_seconds)


@dataclass
class OtherFamilies:
    """Families of judged cases, other than the task's own, in an order drawn: each comes before any comes again."""

    judged: set[verdict_pb2.ValueFamily.ValueType] = field(default_factory=set)
    _coming: list[verdict_pb2.ValueFamily.ValueType] = field(default_factory=list)

    def add(self, family: verdict_pb2.ValueFamily.ValueType) -> None:
        """A case of it was judged."""
        if family not in {_TASK, _FRESH}:
            self.judged.add(family)

    def drawn(self) -> verdict_pb2.ValueFamily.ValueType:
        """The next one; some were judged."""
        if not self._coming:
            self._coming = random.SystemRandom().sample(sorted(self.judged), len(self.judged))
        return self._coming.pop()


@dataclass
class Contest:
    """A judge's process, a solution's, and the values that lie between them."""

    target: task_pb2.Target.ValueType
    limits: Limits
    values: PlacedValues
    introduction: judging_pb2.Introduction
    eager_seconds: float
    """Of one call of the reference."""
    regions: Sequence[judging_pb2.Region] = ()
    """Of results, in the memory that all share."""
    shared: memoryview | None = None
    """That memory, where results are read from stopped processes: on a processor. None: they deliver by themselves."""
    eager_beside_seconds: list[float] = field(default_factory=list)
    """Of what eager is asked around each timed call."""
    _solution: CalledSolution | None = None
    _packs: bool = False
    """Whether it follows other parameters only where they are there before its first call."""
    _has_kept: bool = False
    """Whether the judge keeps the results of its last call."""
    _seed: int = 0
    """Of the values of timed calls that lie there."""
    _called: set[str] = field(default_factory=set)
    """Who was called on them."""
    _timed_count: int = 0
    _others: OtherFamilies = field(default_factory=OtherFamilies)
    _left_seconds: float = math.inf
    """The least between an answer and the end of a piece of work that was begun then."""

    @property
    def judge(self) -> Worker:
        """The judge's process."""
        return self.values.judge

    @property
    def solution(self) -> Called | None:
        """The process of the solution that is called, if any."""
        return self._solution.process if self._solution is not None else None

    # ---- visits --------------------------------------------------------------------------------------------

    def admit(self, solution: Called) -> None:
        """From here on it is this solution that is called. It has taken the members that lie there."""
        result = self.introduction.signature.result
        self._solution = CalledSolution(solution, self.regions, self.shared, result)
        self._packs = self._has_kept = False
        self._timed_count = 0
        self.values.are_taken = True
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
        assert self._solution is not None
        solution, values, asked = self._solution, self.values, list[Answer]()
        seconds = max(self.limits.patience(self.target, 6 * self.eager_seconds), 1.0)
        if not values.are_taken and self._packs:
            solution.word(ANEW, seconds)
            seconds = self.limits.open_seconds
        elif not values.are_taken or self.introduction.signature.has_state:
            asked.append(solution.word(MEMBERS, seconds))
        values.are_taken = True
        values.place(family, seed, sweep_bytes, same_beside=same_beside)
        answer = self._timed(lambda at_once: solution.word(CALL, seconds, self._generator_seed(seed), at_once))
        taken = self.values.ask("take", judging_pb2.TakeRequest(), judging_pb2.Taken)
        unread = solution.read_results(answer.carried)
        with _Stopped(self.judge):
            asked.append(solution.word(DELIVER, seconds))
        solution.look_at_structure(asked[-1].carried, taken.result)
        if unread:
            raise SolutionFault(verdict_pb2.FAILURE_KIND_CHEAT, f"{unread} lies nowhere in its process")
        return Visit(answer, taken, _together(asked))

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

    def _keep(self, *, is_next: bool) -> None:
        """Has the judge keep the delivered results, and looks whether those that it kept before are still the same.

        `is_next`: whether they are of the call right before, on other values.
        """
        self.values.ask("keep", judging_pb2.KeepRequest(), judging_pb2.Done)
        if is_next and self._has_kept:
            assert self._solution is not None
            self._solution.word(EARLIER, self.limits.judge_seconds)
            if self._solution.read_earlier():
                raise SolutionFault(verdict_pb2.FAILURE_KIND_CHEAT, "the result of an earlier call is gone")
            if changed := self._different(judging_pb2.KEPT_BEFORE):
                raise SolutionFault(
                    verdict_pb2.FAILURE_KIND_WRONG_VALUE,
                    f"{changed[0]} of an earlier call was changed by a later one: both are the same memory",
                )
        self._has_kept = True

    def _different(self, kept: judging_pb2.Kept.ValueType = judging_pb2.KEPT_LAST) -> list[str]:
        """Delivered outputs that differ from those that the judge kept last, or before those."""
        asked = judging_pb2.CompareWithKeptRequest(kept=kept)
        return list(self.values.ask("compare_with_kept", asked, judging_pb2.ComparedWithKept).different)

    # ---- judged --------------------------------------------------------------------------------------------

    def judged(self, family: verdict_pb2.ValueFamily.ValueType, seed: int) -> verdict_pb2.Comparison:
        """What the solution makes of a case, compared with the truth. Raises SolutionFault."""
        self.values.place_members(family, seed)
        may_pack = self.values.are_new and not self._packs
        comparison = self._judged(family, seed)
        if may_pack and any(map(_is_far, comparison.outputs)):
            # It may pack its weights at its first call: then they have to be there before.
            self._packs, self.values.are_taken, self._has_kept = True, False, False
            comparison = self._judged(family, seed)
        self._others.add(family)
        assert self._solution is not None
        # On a GPU, PyTorch's compilers may come and go.
        if self.target == task_pb2.TARGET_CPU and self._solution.has_others:
            raise SolutionFault(verdict_pb2.FAILURE_KIND_CHEAT, "the solution started a process that lives on")
        return comparison

    def _judged(self, family: verdict_pb2.ValueFamily.ValueType, seed: int) -> verdict_pb2.Comparison:
        """The case twice, with other bytes beside its inputs, and what the judge says of the second."""
        observed = judging_pb2.Observation(family=family, seed=seed)
        first = self.visit(family, seed)
        self._keep(is_next=True)
        second = self.visit(family, seed)
        if min(first.answer.left_seconds, second.answer.left_seconds) > LATE_SECONDS:
            raise SolutionFault(
                verdict_pb2.FAILURE_KIND_WRONG_NONDETERMINISTIC,
                "the device is still at work for it when its call has ended: the call does not wait for its results",
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
        return self.values.ask("judge", judging_pb2.JudgeRequest(observed=observed), judging_pb2.Judgement).comparison

    def _depends_on_bytes_beside(self, family: verdict_pb2.ValueFamily.ValueType, seed: int) -> bool:
        """Whether calls with the bytes of the one that was kept give the same, and one with others does not."""
        for same_beside in (True, True, False):
            self.visit(family, seed, same_beside=same_beside)
            if bool(self._different()) == same_beside:
                return False
        return True

    # ---- timed ---------------------------------------------------------------------------------------------

    def time_solution(self, name: str, sweep_bytes: int) -> Answer:
        """A call on fresh values. The results of most, chosen in secret, are compared with eager's; before some calls,
        one is made on values of another family, which is judged.

        Raises SolutionFault.
        """
        may_judge = self._timed_count and self._others.judged and self.values.are_as_timed
        if may_judge and not secrets.randbelow(JUDGED_ONE_IN):
            self._judge_between(sweep_bytes)
        may_pack = self.values.are_new and not self._packs
        self._timed_count += 1
        is_early = self._timed_count <= ALL_LOOKED_AT
        if self._called:
            self._seed = secrets.randbits(63)
        self._called = {name}
        visit = self._visit_untouched(_FRESH, self._seed, sweep_bytes)
        if is_early or secrets.randbelow(1000) < 1000 * LOOK_SHARE:
            if wrong := self.values.ask("look", judging_pb2.LookRequest(), judging_pb2.Look).wrong:
                if may_pack:  # its weights, at its first call
                    self._packs, self.values.are_taken, self._has_kept = True, False, False
                    return self.time_solution(name, sweep_bytes)
                raise SolutionFault(verdict_pb2.FAILURE_KIND_WRONG_VALUE, wrong)
            self._keep(is_next=True)
        else:
            self._has_kept = False
        return with_work_put_off(visit.answer, visit.beside, self.eager_beside_seconds, self._slack)

    def _judge_between(self, sweep_bytes: int) -> None:
        """A call as judged ones are, with the parameters of timed calls: who counts calls, or knows those parameters,
        cannot tell that unusual values are over."""
        family, seed = self._others.drawn(), secrets.randbits(63)
        self._seed, self._called, self._has_kept = secrets.randbits(63), set(), False  # others lie there from here on
        if self.values.place(family, seed, if_judged=True):
            self._visit_untouched(family, seed, sweep_bytes)
            request = judging_pb2.LookRequest(by_truth=True)
            if wrong := self.values.ask("look", request, judging_pb2.Look).wrong:
                raise SolutionFault(verdict_pb2.FAILURE_KIND_WRONG_VALUE, wrong)

    def _visit_untouched(self, family: verdict_pb2.ValueFamily.ValueType, seed: int, sweep_bytes: int) -> Visit:
        """A visit while others are timed, that changed neither an input nor memory beside it."""
        visit = self.visit(family, seed, sweep_bytes=sweep_bytes)
        for names, what in ((visit.taken.broken, "memory just outside "), (visit.taken.mutated, "")):
            if names:
                raise SolutionFault(
                    verdict_pb2.FAILURE_KIND_WRONG_INPUT_MUTATED, f"{what}{names[0]} was changed by a timed call"
                )
        return visit

    @property
    def _slack(self) -> float:
        """How many times what eager mostly takes beside its calls is not counted. Where results are read from outside,
        none can be put off, but memory could be made ready; there are short calls, which that would make unsteady."""
        return 1.0 if self.shared is None else 2.0

    def time_arm(self, name: str, arm: Called, number: int, sweep_bytes: int) -> Answer:
        """A call of a baseline, on values that it has not seen."""
        seconds = self.limits.measure_seconds
        arm.begin_calls()  # again, where another arm has failed
        asked = [arm.ask(MEMBERS, deadline_s=seconds)] if self.introduction.signature.has_state else []
        if name in self._called:
            self._seed, self._called = secrets.randbits(63), set()
        self._called.add(name)
        self.values.place(_FRESH, self._seed, sweep_bytes)
        drawn = self._generator_seed(self._seed)
        answer = self._timed(lambda at_once: arm.ask(CALL, number, drawn, deadline_s=seconds, at_once=at_once))
        if name not in (EAGER, AA_COPY):
            return answer
        # In the way that a solution's are: what was put there is not read.
        self.values.ask("take", judging_pb2.TakeRequest(), judging_pb2.Taken)
        with _Stopped(self.judge):
            asked.append(arm.ask(DELIVER, deadline_s=seconds))
        beside = _together(asked)
        self.eager_beside_seconds.append(beside.seconds)
        return with_work_put_off(answer, beside, self.eager_beside_seconds, self._slack)


class _Stopped:
    """Stands still inside."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def __enter__(self) -> None:
        self._worker.pause()

    def __exit__(self, *_: object) -> None:
        self._worker.resume()


def with_work_put_off(answer: Answer, beside: Answer, eager_seconds: Sequence[float], slack: float = 1.0) -> Answer:
    """A call that takes longer by what is asked around it takes beyond `slack` times what it mostly takes eager."""
    if not eager_seconds:
        return answer
    late_seconds = max(0.0, beside.seconds - slack * statistics.median(eager_seconds))
    return replace(
        answer,
        seconds=answer.seconds + late_seconds,
        waited_seconds=answer.waited_seconds + min(beside.waited_seconds, late_seconds),
    )


def _together(answers: Sequence[Answer]) -> Answer:
    """What several answers took, and what the last one carries."""
    waited_seconds = sum(each.waited_seconds for each in answers)
    return replace(answers[-1], seconds=sum(each.seconds for each in answers), waited_seconds=waited_seconds)


def _is_far(error: verdict_pb2.OutputError) -> bool:
    """Whether an output is beyond what any solution with the right parameters gives."""
    return bool(error.non_finite_mismatch_count or error.unequal_count) or error.rms_ratio > 4.0
