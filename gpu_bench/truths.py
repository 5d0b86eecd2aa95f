"""Which cases of a comparison have a truth, and what the judge knew of the inputs' values when it drew them.

The one idea: the reference itself may refuse values, by an answer or by its process's end, and then no candidate is
judged on them. On a GPU the next truth is made while a candidate runs. It imports no torch: truths are made and stay
in the judge's process.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from gpu_bench.workers import room
from gpu_bench.workers.pair import Pair
from warpsmith.errors import WorkerCrashed, WorkerTimeout
from warpsmith.v1 import benchmark_service_pb2, judging_pb2, task_pb2, verdict_pb2

AHEAD_BYTES = 512 << 20
"""Outputs up to which two truths are held at once."""
_OWN = verdict_pb2.VALUE_FAMILY_TASK
_MOST_TIMEOUTS = 3
"""Families on which a reference may have no end; with more it is the machine that stands still."""
_PATIENCE, _PATIENCE_SECONDS = 200.0, 120.0
"""How long a truth on other values than the task's own may take: times what one on those took, and at least so long."""


class Truths:
    """What is known of the truths of a task's cases. One call at a time."""

    def __init__(self, task: task_pb2.Task, workers: Pair, judge_seconds: float) -> None:
        self._task = task
        self._workers = workers
        self._judge_seconds = judge_seconds
        self._learned: dict[tuple[int, int], judging_pb2.Learned] = {}
        """By family and seed, what the judge knew of the inputs' values when it drew the case; of (0, 0), what now."""
        self._known: dict[int, str | None] = {}
        """Families that had a truth (None), or have none: why, where the reason is the machine's."""
        self._timeouts = 0
        self._task_seconds = 0.0
        """That a truth on the task's own values took."""
        workers.when_prepared(self._begin)

    def of(self, case: benchmark_service_pb2.ComparisonCase) -> str | None:
        """None where a case has a truth; else why it is not judged on, empty where the reference is not defined."""
        if (known := self._known.get(case.family)) is not None:
            return known
        if case.group:
            return None  # its truth is that of what it is given
        request = judging_pb2.TruthRequest(family=case.family, seed=case.seed, once=case.once)
        is_own = case.family == _OWN
        begin, seconds = time.monotonic(), self._judge_seconds
        if not is_own and self._task_seconds:
            seconds = min(seconds, max(_PATIENCE_SECONDS, _PATIENCE * self._task_seconds))
        try:
            judge, other = self._workers.judge(), self._workers.current_bench
            truth = room.call(judge, other, "truth", request, judging_pb2.Truth, seconds)
        except (WorkerCrashed, WorkerTimeout) as end:
            self._workers.drop_judge()
            self._timeouts += isinstance(end, WorkerTimeout)
            if is_own or self._timeouts > _MOST_TIMEOUTS:
                raise
            if isinstance(end, WorkerCrashed) and end.signal_number == signal.SIGKILL:
                raise  # for want of memory
            # An assertion on the device ends the process: the reference refuses these values the hard way. A loop may
            # have no end on some, which a machine that stands still looks like: it is said.
            ended = isinstance(end, WorkerCrashed)
            self._known[case.family] = "" if ended else f"the reference had no end within {seconds:.0f} s"
            return self._known[case.family]
        if is_own:
            self._task_seconds = time.monotonic() - begin
        self._learned[case.family, case.seed] = self._learned[0, 0] = truth.learned
        self._known[case.family] = truth.unjudged if truth.undefined or truth.unjudged else None
        return self._known[case.family]

    def ahead(
        self, cases: Sequence[benchmark_service_pb2.ComparisonCase], prepared: judging_pb2.Preparation
    ) -> Iterator[str | None]:
        """As `of`, of each case. On a GPU the next truth is made while a candidate runs, but for the first of a family:
        where the reference ends the judge's process, the candidate's case would go with it."""
        if self._task.target != task_pb2.TARGET_CUDA or prepared.total_bytes > AHEAD_BYTES:
            yield from map(self.of, cases)
            return
        with ThreadPoolExecutor(1) as judging:
            coming: Future[str | None] | None = None
            for position, case in enumerate(cases):
                unjudged = coming.result() if coming else self.of(case)
                following = [case for case in cases[position + 1 : position + 2] if case.family in self._known]
                coming = judging.submit(self.of, following[0]) if following else None
                yield unjudged

    def learned(self, case: benchmark_service_pb2.ComparisonCase) -> judging_pb2.Learned:
        """What the judge knew of the inputs' values when it drew the case."""
        return self._learned.get((case.family, case.seed), self._learned[0, 0])

    def may_have(self, family: verdict_pb2.ValueFamily.ValueType) -> bool:
        """Whether nothing is known against a truth of a family."""
        return self._known.get(family) is None

    def _begin(self, prepared: judging_pb2.Preparation) -> None:
        """What goes with a judge: the next one is asked again."""
        self._learned = {(0, 0): prepared.learned}
        self._known = {family: why for family, why in self._known.items() if why is not None}
