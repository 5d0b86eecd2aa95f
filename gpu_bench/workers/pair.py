"""The judge's and the candidate's process of a task, and all that they share.

The one idea: each is started when it is first asked for, and again once it is gone; what goes with a process goes where
it is started or dropped, and nowhere else. It asks them about the task and knows no program; what they are called for
is the session's.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from gpu_bench.machine import BENCH, Machine
from gpu_bench.pytorch.compiler_cache import CompilerCache
from gpu_bench.workers import room, shared_file
from gpu_bench.workers.outbox import Passage
from gpu_bench.workers.parcels import Parcels
from gpu_bench.workers.reserve import Lot, started
from gpu_bench.workers.spare import Spare
from warpsmith.errors import BadInput, WorkerFault
from warpsmith.sandbox import jail
from warpsmith.sandbox.worker import Worker
from warpsmith.v1 import judging_pb2, task_pb2

_COMPILING = 2.0
"""How many times longer than other preparing the process of the next final may take: it compiles in several ways."""


class Pair:
    """A task's two processes. It holds no lock: the session does.

    `with_outbox`: whether large outputs of a GPU may stay there on their way to the judge (`parcels`).
    """

    def __init__(
        self,
        task: task_pb2.Task,
        judge_entry: str,
        *,
        prepare_seconds: float,
        rung: jail.Rung | None = None,
        machine: Machine | None = None,
        lot: Lot | None = None,
        with_outbox: bool = True,
    ) -> None:
        self._task, self._state_seed = task, secrets.randbits(31)
        self._judge_entry = judge_entry
        self._prepare_seconds = prepare_seconds
        self._rung = rung
        self._machine = machine
        self._lot = lot
        self._with_outbox = with_outbox
        self._judge: Worker | None = None
        self._bench: Worker | None = None
        self._prepared: judging_pb2.Preparation | None = None
        self._tell_prepared: Callable[[judging_pb2.Preparation], None] = lambda _: None
        self.descriptor = lot.descriptor if lot else shared_file.made()
        """Of the file that both share (`shared_file`)."""
        self.passage = lot.passage if lot else Passage()
        self._parcels = Parcels(self.passage, prepare_seconds)
        self._cache: CompilerCache | None = lot.cache if lot else None
        self._spare: Spare | None = None
        self._saw_candidate = False
        self._saw_damage = False

    @property
    def current_judge(self) -> Worker | None:
        """The judge's process as it is: None where there is none, perhaps one that has ended."""
        return self._judge

    @property
    def current_bench(self) -> Worker | None:
        """The candidate's process, likewise."""
        return self._bench

    @property
    def jail_rung(self) -> str:
        """How the processes are confined; empty before the first is made."""
        worker = self._bench or self._judge
        return worker.rung.value if worker else ""

    def when_prepared(self, tell: Callable[[judging_pb2.Preparation], None]) -> None:
        """Has `tell` called whenever a new judge has prepared the task."""
        self._tell_prepared = tell

    def hurry(self) -> None:
        """Ends both, in the middle of a call too."""
        with ThreadPoolExecutor(2) as closing:  # giving gigabytes back takes a process half a second
            for worker in (self._judge, self._bench):
                if worker is not None:
                    closing.submit(worker.close)

    def close(self) -> None:
        """Gives back what both shared; they were dropped."""
        if self._spare is not None:
            self._spare.close()
            self._spare = None
        self._parcels.give_up()
        if self._lot is not None:
            self._lot.close()
        else:
            self.passage.close()
        if self._lot is None and self.descriptor >= 0:
            os.close(self.descriptor)
        self._lot, self.descriptor = None, -1
        if self._cache is not None:
            self._cache.close()

    # ---- the judge -----------------------------------------------------------------------------------------

    def preparation(self) -> judging_pb2.Preparation:
        """What the judge says of the task. Raises BadInput for what is no reference."""
        self.judge()
        assert self._prepared is not None
        return self._prepared

    def judge(self) -> Worker:
        """The judge's process, with the task prepared. Raises BadInput for what is no reference."""
        if self._judge is None or not self._judge.alive:
            self.drop_judge()
            self._judge = self._spawn(self._judge_entry)
            request = judging_pb2.PrepareJudgeRequest(task=self._task, state_seed=self._state_seed)
            with on_failure(self.drop_judge):
                self._prepared = self._judge.call("prepare", request, judging_pb2.Preparation, self._prepare_seconds)
            self._tell_prepared(self._prepared)
            shared_file.grow(self.descriptor, self._prepared.total_bytes)
            self.begin_outbox(self._prepared)
            if self._parcels.is_there:
                self.share_outbox()
        return self._judge

    def drop_judge(self) -> None:
        """Ends the judge's process, if there is one."""
        if self._judge is not None:
            self._forget(self._judge)
            self._judge = None

    # ---- the candidate's -----------------------------------------------------------------------------------

    def bench(self) -> Worker:
        """The candidate's process, with the task open."""
        if self._bench is None or not self._bench.alive:
            self.drop_bench()
            self._bench = self._spawn(BENCH)
            with on_failure(self.drop_bench):
                self.open_bench(self._bench)
            self._saw_damage = False
        return self._bench

    def exposed_bench(self) -> Worker:
        """As `bench`, for a program: what this process compiles is never kept."""
        worker, self._saw_candidate = self.bench(), True
        return worker

    def take_for_bench(self, worker: Worker) -> None:
        """From here on the candidate's process is this one, made elsewhere."""
        self._bench, self._saw_damage = worker, False

    def drop_bench(self) -> None:
        """Ends the candidate's process, if there is one."""
        if self._bench is not None:
            self._forget(self._bench)
            self._bench = None

    def note_damage(self) -> None:
        """The program wrote where it may not."""
        self._saw_damage = True

    def drop_damaged(self) -> None:
        """Ends the candidate's process after damage: who writes where it may not may have written anywhere."""
        if self._saw_damage:
            self.drop_bench()

    def open_bench(self, worker: Worker) -> None:
        """Opens the task in a process, with what is known of the machine."""
        ceilings = self._machine.known_ceilings(self._task.target) if self._machine is not None else None
        request = judging_pb2.OpenBenchRequest(task=self._task, ceilings=ceilings)
        worker.call("open", request, judging_pb2.Done, deadline_s=self._prepare_seconds)

    # ---- both ----------------------------------------------------------------------------------------------

    def open(self) -> Worker:
        """The candidate's process, ready to time the module; nothing is under way any more when this ends.

        Raises BadInput for what is no reference.
        """
        with ThreadPoolExecutor(2) as beside:
            judge = beside.submit(self.preparation)
            compiled = None
            if self._cache is None and self._machine is not None:
                compiled = beside.submit(self._machine.compiled, self._task.target)
            try:
                worker = self.bench()
                worker.call("warm_up", judging_pb2.WarmUpRequest(), judging_pb2.Done, self._prepare_seconds)
                if compiled is not None and self._cache is not None:
                    self._cache.begin_with(compiled.result())
            finally:
                judge.result()  # refuses a module that is no reference
            return worker

    def keep_compiled(self) -> None:
        """Keeps what the candidate's process has compiled, where it has seen no program."""
        if self._cache is not None and not self._saw_candidate:
            self._cache.keep()

    def give_back(self) -> None:
        """Has both give back memory of the GPU."""
        room.give_back(self._judge, self._bench)

    def begin_outbox(self, prepared: judging_pb2.Preparation) -> None:
        """Begins to make memory of the GPU for large outputs."""
        if self._with_outbox and self._task.target == task_pb2.TARGET_CUDA:
            self._parcels.begin(prepared.total_bytes)

    def share_outbox(self) -> None:
        """Lets both put outputs there."""
        self._parcels.share(lambda: (self.judge(), self.bench()))

    def hold(self, size: int) -> None:
        """Has both share at least so many bytes: of the GPU where they are many and it has them, else of the file."""
        size = max(size, self.preparation().total_bytes)
        if self._with_outbox and self._task.target == task_pb2.TARGET_CUDA and self._parcels.hold(size):
            self.share_outbox()
        if not self._parcels.is_there:
            shared_file.grow(self.descriptor, size)

    def let_go(self, prepared: judging_pb2.Preparation) -> None:
        """Has both share no more than outputs take. Who cannot move back is ended."""
        try:
            self._parcels.give_up()
        except WorkerFault:
            self.drop_bench()
            self.drop_judge()
        self.begin_outbox(prepared)

    # ---- the next final's ----------------------------------------------------------------------------------

    @property
    def has_spare(self) -> bool:
        """Whether the process of the next final measurement was begun, or waits in the lot."""
        return self._spare is not None or self._lot is not None

    def begin_spare(self) -> None:
        """Begins to make the process of the next final measurement."""
        seconds = _COMPILING * self._prepare_seconds
        self._spare = Spare(self._start_spare, self.open_bench, self._cache, self._task.target, seconds)

    def settle(self) -> None:
        """Returns when what `begin_spare` began is done."""
        if self._spare is not None:
            self._spare.worker()

    def use_spare(self) -> None:
        """Has it for the candidate's process, with its cache, where it was begun; the old one was dropped."""
        spare, self._spare = self._spare, None
        if spare is None or (worker := spare.taken()) is None:
            return
        self._bench, self._saw_damage = worker, False
        if self._cache is not None:
            self._cache.close()
        self._cache, self._saw_candidate = spare.cache, False

    def _start_spare(self, cache: CompilerCache) -> Worker:
        return started(BENCH, self._task.target, self._rung, self.descriptor, cache, self.passage)

    # ---- processes -----------------------------------------------------------------------------------------

    def _spawn(self, entry: str) -> Worker:
        if entry == BENCH:
            self._cache = self._cache or CompilerCache(headers=self._machine.headers if self._machine else None)
            self._cache.renew()
            self._saw_candidate = False
        waiting = self._lot.take(entry) if self._lot is not None else None
        return waiting or started(entry, self._task.target, self._rung, self.descriptor, self._cache, self.passage)

    def _forget(self, worker: Worker) -> None:
        worker.close()
        self._parcels.forget(worker)


@contextlib.contextmanager
def on_failure(drop: Callable[[], None]) -> Iterator[None]:
    """Calls `drop` where the block ends by a worker's fault or by bad input."""
    try:
        yield
    except (WorkerFault, BadInput):
        drop()
        raise
