"""Several warm benches side by side, each with processors of its own.

The one idea: work is handed out in runs of one reference, so that a worker's judge and baselines stay warm; a worker
that dies loses the solution that it was at and no other.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from judging_bench import LIMITS, Bench, Told

from gpu_bench.limits import Limits

RUN = 20
"""Solutions of one reference that a worker takes at once."""


@dataclass(frozen=True)
class Job:
    """A solution to be judged."""

    name: str
    solution: str
    reference: str
    is_wrong: bool = False
    is_honest: bool = False
    """Judged once, or again where nobody could say; otherwise until the judge does not believe it."""


@dataclass(frozen=True)
class Setting:
    """How all are judged."""

    target: str = "cpu"
    final: bool = False
    verified: bool = False
    """Whether all are compared as in a final, though timed as in a screening."""
    timed: bool = True
    """Whether what is right is timed as well."""
    rung: str = ""
    """Of the jail; empty for the machine's strongest."""
    limits: Limits = LIMITS

    def bench(self) -> Bench:
        """A bench of this kind."""
        return Bench(
            self.target,
            final=self.final,
            verified=self.verified,
            timed=self.timed,
            rung=self.rung,
            limits=self.limits,
        )


def judged(jobs: Sequence[Job], setting: Setting, workers: int) -> Iterator[tuple[Job, bool, Told]]:
    """Each job as it is done, whether the judge believed it, and what it told."""
    context = multiprocessing.get_context("spawn")
    todo: Any = context.Queue()
    done: Any = context.Queue()
    runs = _runs(jobs)
    for run in runs:
        todo.put(run)
    workers = max(1, min(workers, len(runs)))
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // workers)
    arguments = [(todo, done, setting, cores[share * n % len(cores) :][:share], os.getpid()) for n in range(workers)]
    processes = [context.Process(target=_work, args=each) for each in arguments]
    for process in processes:
        todo.put(None)
        process.start()
    left = {job.name: job for job in jobs}
    try:
        while left:
            try:
                name, believed, told = done.get(timeout=1.0)
            except queue.Empty:
                if not any(process.is_alive() for process in processes):
                    break
                continue
            yield left.pop(name), believed, Told(**told)
    finally:
        if left:
            todo.cancel_join_thread()  # nobody takes what is still in it, and the process would wait for that to end
        for process in processes:
            process.terminate() if left else process.join()
    for job in left.values():
        yield job, False, Told("BROKEN", "", "the worker that judged it ended", 0.0)


def one(bench: Bench, job: Job) -> tuple[bool, Told]:
    """Judges a job on a bench."""
    if not job.is_honest:
        return bench.believed(job.solution, job.reference, is_wrong=job.is_wrong)
    told = bench.judged(job.solution, job.reference)
    if told.verdict == "INFRA":  # "not decided" is tried again before it is said
        told = bench.judged(job.solution, job.reference)
    return told.verdict == "PASS", told


def _work(todo: Any, done: Any, setting: Setting, cores: Sequence[int], parent: int) -> None:
    os.sched_setaffinity(0, cores)
    os.environ["OMP_NUM_THREADS"] = str(len(cores))
    bench = setting.bench()
    try:
        while (run := todo.get()) is not None:
            for job in run:
                if os.getppid() != parent:  # whoever asked was killed
                    return
                text = job.solution.replace("PROCESSORS", str(len(cores)))
                believed, told = one(bench, replace(job, solution=text))
                done.put((job.name, believed, asdict(told)))
    finally:
        bench.close()


def _runs(jobs: Sequence[Job]) -> list[list[Job]]:
    """The jobs in runs of one reference, references in turn: who stops early has seen all of them."""
    grouped: dict[str, list[Job]] = {}
    for job in jobs:
        grouped.setdefault(job.reference, []).append(job)
    longest = max(map(len, grouped.values()), default=0)
    return [
        group[first : first + RUN] for first in range(0, longest, RUN) for group in grouped.values() if group[first:]
    ]
