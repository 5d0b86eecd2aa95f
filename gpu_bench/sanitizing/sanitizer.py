"""compute-sanitizer over a program's kernels: out-of-bounds accesses, races, unwritten memory, wrong barriers.

The one idea: the kernels run once, in a jail and a process of their own, on plausible values and without the module,
under each of the four tools at once; what a tool finds is a fault of the program. The processes load torch while a
search goes on, and the kernels while they are compared; they run them once that found nothing. Where the toolkit is
not installed, or the jail cannot hold it (the sanitizer starts the program as a child, which needs a jail whose
processes may meet), that is said and nothing else changes. It imports no torch.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from gpu_bench.policy import span_bytes
from warpsmith.sandbox import jail, private_files
from warpsmith.sandbox.jail import Policy, Rung
from warpsmith.v1 import (
    artifact_pb2,
    benchmark_service_pb2,
    candidate_pb2,
    task_pb2,
    tensor_pb2,
    verdict_pb2,
)

TOOLS: Final = {
    "memcheck": verdict_pb2.FAILURE_KIND_WRONG_OUT_OF_BOUNDS,
    "racecheck": verdict_pb2.FAILURE_KIND_WRONG_RACE,
    "initcheck": verdict_pb2.FAILURE_KIND_WRONG_UNINITIALIZED,
    "synccheck": verdict_pb2.FAILURE_KIND_WRONG_RACE,
}
"""Tool → the kind of failure that it finds."""
DEADLINE_SECONDS = 10.0
"""Of a process, loading included."""
LEAST_SECONDS = 6.0
"""What the kernels get of that at least, however long the process waited for its turn."""
LOAD, GO, STOP = "load", "go", "stop"
"""Files in the programs' directory: load them, run the kernels, or end without."""
RACECHECK_BYTES = 1 << 30
"""Most bytes of all buffers for racecheck: on an H200 it never ended within the deadline with more."""
_PREFIX: Final = "compute-sanitizer "
_FOUND, _RAN = 77, "the kernels ran"
_SHORT = re.compile("out.of.memory|device not supported", re.IGNORECASE)
"""What a tool says that found no memory on the GPU: with too little for its context no device is known to it."""
_OF_ITS_OWN = re.compile(r"(?:Error: )?(?:Device not supported|Out of memory|Internal (?:Sanitizer )?Error|Unable to )")
"""How a line begins in which a tool speaks of itself. Findings hold names, which a kernel may choose."""
_AND_SO = "Target application returned an error"
"""What follows either."""
_LINE = re.compile(r"=+ +(.+)")
_TALK = ("COMPUTE-SANITIZER", "ERROR SUMMARY", "RACECHECK SUMMARY", "Saved host backtrace", "LEAK SUMMARY")


def installed() -> Path | None:
    """The sanitizer of the CUDA toolkit; None where there is none."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    found = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=f"{home}/bin")
    return Path(found) if found else None


def sanitize(
    program: candidate_pb2.Program, artifact: artifact_pb2.Artifact, rung: Rung, tools: Sequence[str] = tuple(TOOLS)
) -> list[verdict_pb2.Inspection]:
    """What each tool says of the program's kernels; nothing for a program without kernels for a GPU."""
    with begin(program, artifact, rung, tools) as inspecting:
        return inspecting.answer()


def begin(
    program: candidate_pb2.Program, artifact: artifact_pb2.Artifact, rung: Rung, tools: Sequence[str] = tuple(TOOLS)
) -> Inspecting:
    """The tools, loading; as `sanitize` otherwise."""
    if artifact.format != artifact_pb2.BINARY_FORMAT_CUBIN:
        return Inspecting([], rung, ())
    quick, said = _quick(tools, [buffer.spec for buffer in program.buffers])
    return Inspecting([(program, artifact)], rung, quick, said)


def _quick(
    tools: Sequence[str], specs: Sequence[tensor_pb2.TensorSpec]
) -> tuple[list[str], list[verdict_pb2.Inspection]]:
    """The tools that come to an end with tensors of this size, and what is said of the others."""
    size = sum(map(span_bytes, specs))
    slow = [tool for tool in tools if tool == "racecheck" and size > RACECHECK_BYTES]
    reason = f"buffers of {size / 2**30:.1f} GiB take it longer than {DEADLINE_SECONDS:.0f} s"
    return [tool for tool in tools if tool not in slow], [_said(tool, skipped=reason) for tool in slow]


def sanitize_all(
    programs: Sequence[tuple[candidate_pb2.Program, artifact_pb2.Artifact]], rung: Rung, tools: Sequence[str]
) -> list[verdict_pb2.Inspection]:
    """What each tool says of the kernels of all these programs, run one after another in one process."""
    with Inspecting(programs, rung, tools) as inspecting:
        return inspecting.answer()


class Inspecting:
    """Tools that look at programs: they load from the beginning, and run the kernels when `answer` asks.

    A context manager; what was not asked for at its end has made no buffers. `said`: what is known of other tools,
    given back with the answer. Without `programs` they wait for some.
    """

    def __init__(
        self,
        programs: Sequence[tuple[candidate_pb2.Program, artifact_pb2.Artifact]] | None,
        rung: Rung,
        tools: Sequence[str],
        said: Sequence[verdict_pb2.Inspection] = (),
    ) -> None:
        self._said = list(said)
        self._running: list[Future[verdict_pb2.Inspection]] = []
        self._least_end_s = float("inf")
        self._tools = list(tools)
        sanitizer = installed()
        if tools and (sanitizer is None or rung is Rung.LANDLOCK):
            reason = "on the landlock rung only one process may use CUDA" if sanitizer else "it is not installed"
            self._said = [*(_said(tool, skipped=reason) for tool in tools), *self._said]
        if sanitizer is None or rung is Rung.LANDLOCK or not tools:
            return
        self._place = tempfile.TemporaryDirectory(
            prefix="warpsmith-sanitizer-", dir=private_files.temporary_directory()
        )
        place = Path(self._place.name)
        if programs is not None:
            self._give(programs)
        self._pool = ThreadPoolExecutor(len(tools), thread_name_prefix="sanitizer")
        self._run: Callable[[str], verdict_pb2.Inspection] = lambda tool: _run(
            sanitizer, tool, place, rung, lambda: self._least_end_s
        )
        self._running = [self._pool.submit(self._run, tool) for tool in tools]

    def take(self, program: candidate_pb2.Program, artifact: artifact_pb2.Artifact) -> bool:
        """Gives waiting tools a program; False where they are not the ones that it needs, or no longer there."""
        quick, said = _quick(tuple(TOOLS), [buffer.spec for buffer in program.buffers])
        if artifact.format != artifact_pb2.BINARY_FORMAT_CUBIN or quick != self._tools:
            return False
        if not self._running or any(each.done() for each in self._running):
            return False
        self._said = said
        self._give([(program, artifact)])
        return True

    def _give(self, programs: Sequence[tuple[candidate_pb2.Program, artifact_pb2.Artifact]]) -> None:
        place = Path(self._place.name)
        for number, (program, artifact) in enumerate(programs):
            (place / f"{number}.program").write_bytes(program.SerializeToString())
            (place / f"{number}.artifact").write_bytes(artifact.SerializeToString())
        self._given_s = time.monotonic()
        (place / LOAD).touch()

    def answer(self) -> list[verdict_pb2.Inspection]:
        """What each tool says, once the kernels have run under all of them."""
        self._tell(GO, LEAST_SECONDS)
        if self._running:
            self._least_end_s = max(self._least_end_s, self._given_s + DEADLINE_SECONDS)
        said = [each.result() for each in self._running]
        # The context of one that loads at the height of a comparison may find no memory: there is some by now.
        short = [at for at, each in enumerate(said) if _SHORT.search(each.skipped)]
        self._least_end_s = time.monotonic() + DEADLINE_SECONDS + LEAST_SECONDS
        for at, again in [(at, self._pool.submit(self._run, self._tools[at])) for at in short]:
            said[at] = again.result()
        return [*said, *self._said]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._running:
            self._tell(STOP, 0.0)
            self._pool.shutdown()
            self._place.cleanup()
            self._running = []

    def _tell(self, what: str, least_seconds: float) -> None:
        if self._running:
            Path(self._place.name, what).touch()
            self._least_end_s = time.monotonic() + least_seconds


class Ahead:
    """The tools of a task's next finalist, loading before there is one: four seconds of a processor, and no GPU."""

    def __init__(self, task: task_pb2.Task, rung: Rung | None) -> None:
        self._task, self._rung = task, rung
        self._waiting: Inspecting | None = None
        self._lock = threading.Lock()

    def load(self) -> None:
        """Begins, where nothing waits yet; they wait as long as it takes."""
        with self._lock:
            if self._waiting is None and self._task.target == task_pb2.TARGET_CUDA:
                quick, _ = _quick(tuple(TOOLS), (*self._task.inputs, *self._task.outputs))
                self._waiting = Inspecting(None, self._rung or jail.choose(), quick)

    def begin(self, program: candidate_pb2.Program, artifact: artifact_pb2.Artifact) -> Inspecting:
        """The tools with a program: those that wait, or others where these do not do."""
        waiting = self._taken()
        if waiting is not None and waiting.take(program, artifact):
            return waiting
        if waiting is not None:
            waiting.__exit__(None, None, None)
        return begin(program, artifact, self._rung or jail.choose())

    def close(self) -> None:
        """Ends what waits."""
        if (waiting := self._taken()) is not None:
            waiting.__exit__(None, None, None)

    def _taken(self) -> Inspecting | None:
        with self._lock:
            waiting, self._waiting = self._waiting, None
            return waiting


def fault(inspections: Sequence[verdict_pb2.Inspection]) -> benchmark_service_pb2.ExecutionFault | None:
    """The first finding as a fault of the program."""
    for each in inspections:
        if each.finding:
            kind = TOOLS[each.tool.removeprefix(_PREFIX)]
            return benchmark_service_pb2.ExecutionFault(kind=kind, detail=f"{each.tool}: {each.finding}")
    return None


def _said(tool: str, *, finding: str = "", skipped: str = "") -> verdict_pb2.Inspection:
    return verdict_pb2.Inspection(tool=_PREFIX + tool, finding=finding, skipped=skipped)


def _run(
    sanitizer: Path, tool: str, directory: Path, rung: Rung, least_end_s: Callable[[], float]
) -> verdict_pb2.Inspection:
    # bin/compute-sanitizer is a script that calls the program in a folder beside bin.
    real = sanitizer.resolve()
    roots = [real.parent, *(parent / "compute-sanitizer" for parent in list(real.parents)[:2])]
    places = [Path(root).resolve() for root in sys.path if root]
    packages = [place / name for place in places for name in ("gpu_bench", "warpsmith")]
    policy = Policy(
        readable=tuple(path for path in (directory, *roots, *packages) if path.is_dir()),
        listable=tuple(place for place in places if place.is_dir()),
        gpu=True,
        peers=True,
        memory_bytes=None,  # its shadow memory is larger than any bound that would mean something
    )
    command = [str(sanitizer), "--tool", tool, "--error-exitcode", str(_FOUND), "--print-limit", "3"]
    if tool == "memcheck":
        command += ["--report-api-errors", "no"]  # looking for what a driver does not have is no fault
    environment = {
        "PYTHONPATH": os.pathsep.join([*map(str, places), *jail.package_paths()]),
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        **{name: os.environ[name] for name in ("CUDA_VISIBLE_DEVICES",) if name in os.environ},
    }
    ran = jail.run(
        [*command, sys.executable, "-s", "-P", "-m", "gpu_bench.sanitizing.sanitized_run", str(directory)],
        policy,
        rung,
        deadline_s=DEADLINE_SECONDS,
        least_end_s=least_end_s,
        env=environment,
    )
    said = (ran.stdout + ran.stderr).decode(errors="replace")
    lines = [match.group(1).strip() for match in map(_LINE.match, said.splitlines()) if match]
    findings = [line for line in lines if not line.startswith(_TALK)]
    complaints = [line for line in findings if _OF_ITS_OWN.match(line)]
    has_ended = _RAN in said and ran.exit.code != _FOUND
    if complaints and not has_ended and {*findings} <= {*complaints, _AND_SO}:
        return _said(tool, skipped=f"it does not run here: {complaints[0][:200]}")
    if ran.exit.code == _FOUND and findings:
        return _said(tool, finding="; ".join(findings[:3])[:300])
    if ran.timed_out:
        return _said(tool, skipped=f"no end within {DEADLINE_SECONDS:.0f} s")
    if _RAN not in said:
        return _said(tool, skipped=f"it does not run here: {_why(said)}")
    return _said(tool)


def _why(said: str) -> str:
    """The line that names an error, which PyTorch follows with advice; else the end of what was said."""
    named = re.findall(r"^\w[\w.]*(?:Error|Exception|Fault): .+", said, re.MULTILINE)
    return str(named[-1] if named else " ".join(said.split()))[-200:]
