"""Measures the archive: a run of 100,000 trials as it is listed, shown, reported and taken up, and commits a second.

    python -m benchmarks.services.archive_numbers [--trials 100000] [--commits 2000] [--only large|commits]

A trial is of the size of a real one (a softmax on a processor: 50 kB, nearly all of it headers that all share). Pages
are asked for over gRPC, of `python -m orchestrator` with agents that answer at once, in a process of its own; commands
are processes of their own too. Commits are durable before they are answered: SQLite, and PostgreSQL where its programs
are there. Prints a table with the bar of each.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import sqlalchemy as sa

from orchestrator import testing
from orchestrator.archive import FILE_NAME, Archive
from orchestrator.archiving.testing import PostgreSql
from orchestrator.commands import client
from orchestrator.pipeline import without_bulk
from orchestrator.serving import ownership
from orchestrator.serving.dialing import orchestrator_at
from warpsmith import local_sockets
from warpsmith.errors import BadInput
from warpsmith.sandbox import trees
from warpsmith.service import wait_until_healthy
from warpsmith.v1 import optimization_service_pb2 as messages
from warpsmith.v1 import run_pb2, timing_pb2, trial_pb2, verdict_pb2

HEADER_BYTES = {"rows": 7147, "loops": 6778, "math": 24341, "types": 3165, "results": 4484, "threads": 5676}
KERNEL_WORDS = 150
RUN_COUNT = 200
"""Other runs, so that there are pages of runs."""
WRITERS = 8
MEBIBYTE = 1 << 20
SERVING = """
from orchestrator import servicer, testing
servicer.agents_of = lambda *_: testing.World().agents()
import orchestrator.__main__
"""
COMMAND = """
import sys
from orchestrator.commands import cli
sys.argv = ["warpsmith", *sys.argv[1:]]
try:
    cli.main()
finally:
    print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")), file=sys.stderr)
"""
"""Says at its end the most memory that it had resident."""


def trial_of(number: int) -> trial_pb2.Trial:
    """A trial like a real one."""
    moves = [testing.move(f"setting_{place}", f"value_{(number >> place) % 7}") for place in range(6)]
    trial = trial_pb2.Trial(number=number, parent=number // 2, generation=number.bit_length(), seconds=0.5)
    trial.hypothesis.moves.extend(moves)
    trial.hypothesis.rationale = f"softmax_{number} and mul in one kernel: 402 MB less traffic, " * 3
    trial.candidate.moves.extend(moves)
    program = trial.candidate.program
    program.digest = f"{number:064x}"
    program.sources.add(name="kernel.cpp", text=f"author:{number} " * KERNEL_WORDS)  # as the fake agents read it
    for name, size in HEADER_BYTES.items():
        program.sources.add(name=f"ws_{name}.hpp", text=f"// {name}\n" + "x" * size)
    trial.verdict.state = verdict_pb2.VERDICT_STATE_PASS if number % 3 else verdict_pb2.VERDICT_STATE_FAIL
    if number % 3:
        trial.timing.speedup_fastest.median = 0.5 + (number % 1000) / 1000
        for kind in (timing_pb2.ARM_KIND_CANDIDATE, timing_pb2.ARM_KIND_EAGER):
            trial.timing.arms.add(kind=kind, median_ns=1e6)
    return trial


def event_of(number: int, trial: trial_pb2.Trial) -> run_pb2.RunEvent:
    """The event that tells of it."""
    return run_pb2.RunEvent(number=number, at=1.0, trial=without_bulk(trial))


def fill(directory: Path, trial_count: int, state: run_pb2.RunState.ValueType) -> None:
    """An archive with a run of so many trials, and others that have ended; one transaction for many trials."""
    archive = Archive.in_directory(directory)
    budget = run_pb2.Budget(wall_seconds=60, trial_count=trial_count)
    for number in range(RUN_COUNT):
        small = run_pb2.Run(id=f"small-{number}", task=testing.task(), created_at=1.0 + number, best=trial_of(number))
        small.state = run_pb2.RUN_STATE_FASTER
        archive.put_run(small)
    archive.owner = f"{ownership.STAYS}-{'0' * 24}"  # it is dead
    large = run_pb2.Run(id="large", task=testing.task("large"), created_at=1e6, state=state, budget=budget)
    large.phase_seconds.extend([1.0, 1.0])
    large.trial_count = trial_count
    archive.put_run(large, run_pb2.RunEvent(number=1, run=large))
    engine = archive._engine
    with closing(archive), engine.connect() as connection:
        archive.add_trial("large", trial_of(1), event_of(2, trial_of(1)))
        first = connection.execute(sa.text("SELECT texts FROM trials")).scalar_one()
        connection.rollback()
        add = "INSERT INTO {} VALUES ({})".format
        for begin in range(2, trial_count + 1, 5000):
            trials, events = [], []
            for number in range(begin, min(begin + 5000, trial_count + 1)):
                trial = trial_of(number)
                event = event_of(number + 1, trial)
                for source in trial.candidate.program.sources[1:]:
                    source.ClearField("text")
                speedup = trial.timing.speedup_fastest.median
                row = ("large", number, trial.candidate.program.digest, trial.verdict.state, speedup)
                trials.append((*row, trial.SerializeToString(), first))
                events.append(("large", number + 1, event.SerializeToString()))
            connection.exec_driver_sql(add("trials", "?,?,?,?,?,?,?"), trials)
            connection.exec_driver_sql(add("events", "?,?,?"), events)
            connection.commit()


@contextmanager
def serving(directory: Path) -> Iterator[tuple[client.Optimization, float]]:
    """An orchestrator of that archive, and the seconds from the start of its process to its first answer."""
    folder = local_sockets.make_folder()
    environment = {
        "WARPSMITH_RUNS": str(directory),
        "WARPSMITH_SOCKET": str(folder / "orchestrator"),
        "WARPSMITH_BENCHMARK_ADDRESS": "127.0.0.1:1",
        "WARPSMITH_PARENT_PID": str(os.getpid()),
    }
    begin = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", SERVING], env={**os.environ, **environment})
    try:
        address = local_sockets.address_of(folder / "orchestrator")
        if not wait_until_healthy(address, 120):
            raise SystemExit("the orchestrator does not serve")
        orchestrator = orchestrator_at(address)
        client.latest(orchestrator, 1)
        yield orchestrator, time.perf_counter() - begin
    finally:
        process.kill()
        process.wait()
        trees.remove(str(folder))


def pages(orchestrator: client.Optimization, trial_count: int) -> Iterator[tuple[str, str, str]]:
    """Every page of trials, without and with programs, and of runs."""
    for with_sources in (False, True):
        after, took, sizes = 0, [], []
        while after < trial_count:
            request = messages.ListTrialsRequest(
                run_id="large", after=after, limit=client.PAGE_TRIALS, with_sources=with_sources
            )
            begin = time.perf_counter()
            page = orchestrator.ListTrials(request, timeout=30.0)
            took.append(time.perf_counter() - begin)
            sizes.append(page.ByteSize())
            after = page.trials[-1].number
        yield _page(f"ListTrials{', with programs' * with_sources}", took, sizes)
    before, took, sizes = 0.0, [], []
    while True:
        begin = time.perf_counter()
        found = orchestrator.ListRuns(messages.ListRunsRequest(limit=50, before=before), timeout=30.0)
        took.append(time.perf_counter() - begin)
        sizes.append(found.ByteSize())
        if not found.runs:
            break
        before = found.runs[-1].created_at
    yield _page("ListRuns", took, sizes)


def _page(name: str, took: list[float], sizes: list[int]) -> tuple[str, str, str]:
    largest = f"{max(sizes) / MEBIBYTE:.2f} MiB"
    return f"longest and largest of {len(took)} pages, {name}", f"{1000 * max(took):.0f} ms, {largest}", "100 ms, 1 MiB"


def command(directory: Path, *words: str) -> tuple[float, float]:
    """Seconds and mebibytes of a command."""
    begin = time.perf_counter()
    ran = subprocess.run(
        [sys.executable, "-c", COMMAND, *words, "--runs", str(directory)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    )
    return time.perf_counter() - begin, int(ran.stderr.split()[-2]) / 1024


def large(directory: Path, trial_count: int) -> Iterator[tuple[str, str, str]]:
    """What a run of so many trials costs who looks at it, and who takes it up."""
    ended, left = directory / "ended", directory / "left"
    fill(ended, trial_count, run_pb2.RUN_STATE_NO_FASTER)
    yield f"archive of {trial_count} trials", f"{(ended / FILE_NAME).stat().st_size / MEBIBYTE:.0f} MiB", ""
    with serving(ended) as (orchestrator, seconds):
        yield "restart, the run has ended", f"{seconds:.1f} s", "3 s"
        yield from pages(orchestrator, trial_count)
    bars = {"show large": "200 MiB", f"show large --trial {trial_count // 2}": "200 MiB", "report large": ""}
    for words, bar in bars.items():
        seconds, mebibytes = command(ended, *words.split())
        yield f"`warpsmith {words}`", f"{mebibytes:.0f} MiB, {seconds:.1f} s", bar
    seconds, mebibytes = command(ended, "report", "large", "--html", str(directory / "page.html"))
    yield "`warpsmith report large --html FILE`", f"{mebibytes:.0f} MiB, {seconds:.1f} s", ""
    fill(left, trial_count, run_pb2.RUN_STATE_SEARCHING)
    with serving(left) as (orchestrator, seconds):
        yield "restart, the run was left and is taken up", f"{seconds:.1f} s", "3 s"
        begin = time.perf_counter()
        run = client.follow(orchestrator, "large", lambda _: None, after=trial_count + 1)
        told = f"{seconds + time.perf_counter() - begin:.1f} s"
        yield f"until its finalists are judged ({run_pb2.RunState.Name(run.state)}, {run.trial_count} trials)", told, ""


def commits(archive: Archive, count: int, name: str, bar: str) -> Iterator[tuple[str, str, str]]:
    """Trials with their events a second, by one run and by several at once."""
    for writers in (1, WRITERS):
        made = [[trial_of(number) for number in range(1, count // writers + 1)] for _ in range(writers)]

        def write(run_id: str, trials: list[trial_pb2.Trial]) -> None:
            for trial in trials:
                archive.add_trial(run_id, trial, event_of(trial.number, trial))

        run_ids = [f"{writers}-{place}" for place in range(writers)]
        for run_id in run_ids:
            archive.put_run(run_pb2.Run(id=run_id, task=testing.task()))
        threads = [threading.Thread(target=write, args=each) for each in zip(run_ids, made, strict=True)]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rate = writers * (count // writers) / (time.perf_counter() - begin)
        yield f"commits a second, {name}, {writers} run{'s' * (writers > 1)} at once", f"{rate:.0f}", bar
    archive.close()


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100_000, help="trials of the large run")
    parser.add_argument("--commits", type=int, default=4000, help="trials of each measurement of commits")
    parser.add_argument("--only", choices=["large", "commits"], help="one part")
    chosen = parser.parse_args()
    print(
        f"{os.cpu_count()} processors, Python {platform.python_version()}\n\n| what | measured | bar |\n|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        if chosen.only != "commits":
            _tell(large(directory, chosen.trials))
        if chosen.only != "large":
            _tell(commits(Archive.in_directory(directory / "commits"), chosen.commits, "SQLite", "1000"))
            try:
                server = PostgreSql()
            except BadInput as error:
                raise SystemExit(str(error)) from error
            with closing(server):
                _tell(commits(Archive(server.url("commits")), chosen.commits, "PostgreSQL", "500"))


def _tell(rows: Iterator[tuple[str, str, str]]) -> None:
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
