"""Optimises every module of a directory, one line of JSON each, so that it can stop anywhere and go on later.

The one idea: the results file is the state. A module with a line of the same source and the same options is not run
again, unless it failed, was stopped or had less time than was asked for. A line says which run has begun, so that what
was stopped or killed goes on inside a module. Lines of other options stay beside it. Modules are dealt to shards by
their place in the sorted list. A few are under way at once, so that one is made ready while another has the device.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from orchestrator.commands import report
from orchestrator.serving.device_gate import most_ahead
from orchestrator.tasks import model_suite
from warpsmith.contract import words
from warpsmith.digest import digest
from warpsmith.errors import BadInput, Infrastructure
from warpsmith.sandbox import private_files
from warpsmith.v1 import run_pb2

Optimise = Callable[[Path, float], run_pb2.Run | dict[str, Any]]
"""(file, most seconds of search) → the run in its end, or what a line is to hold."""
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})
BUDGET = "budget"
"""The option that says how many seconds of search each module is to have."""
CHECK_SECONDS = 2.0
UNDER_WAY = "UNDER_WAY"
"""The verdict of a line that says which run has begun for a module: the last one, where nothing came of it yet."""
UNDONE = frozenset({"CANCELLED", "FAILED", UNDER_WAY})
"""Verdicts and states of modules that are run again."""
IN_EVERY_LINE = ("file", "source", "verdict")
SHAPE: Mapping[str, type] = MappingProxyType({
    **dict.fromkeys((*IN_EVERY_LINE, "state", "message"), str),
    **dict.fromkeys(("options", "trials"), dict),
    "labels": list,
})  # fmt: skip
"""What is read of a line of results, but for the speedup."""
REMEDY = "name another file with --results"


@dataclass(frozen=True)
class Entry:
    """A module of the directory. `name`: its path below the directory; `problem`: why it cannot be read, or empty."""

    name: str
    path: Path
    digest: str
    problem: str = ""


@dataclass(frozen=True)
class RunLog:
    """Which runs have begun for modules, in a results file."""

    file: Path
    modules: Sequence[Entry]
    options: Mapping[str, Any]

    def left(self, path: Path) -> str:
        """The run that was begun last for a module, under the same options, and has no result; empty for none.

        Raises:
            BadInput: as `read_results`.
        """
        entry = self._entry(path)
        lines = [line for line in read_results(self.file) if line["file"] == entry.name]
        own = [line for line in lines if line["source"] == entry.digest and line.get("options") == self.options]
        return str(own[-1].get("run", "")) if own and own[-1]["verdict"] in UNDONE - {"FAILED"} else ""

    def begun(self, path: Path, run_id: str, most_seconds: float) -> None:
        """Keeps which run has begun for a module. Raises Infrastructure where that cannot be written."""
        entry, options = self._entry(path), dict(self.options)
        if most_seconds < options.get(BUDGET, float("inf")):
            options[BUDGET] = most_seconds
        line = {"file": entry.name, "source": entry.digest, "verdict": UNDER_WAY, "options": options, "run": run_id}
        _append(self.file, line)

    def _entry(self, path: Path) -> Entry:
        return next(entry for entry in self.modules if entry.path == path)


def place(directory: Path | None, suite: str, runs: Path) -> Path:
    """Where the modules are: the directory, or where those of a suite are written, below the runs.

    Raises:
        BadInput: both are given, or neither, or there is no such suite, or it needs a package that is not installed.
    """
    if (directory is None) == (not suite):
        raise BadInput("bench takes a DIRECTORY of modules, or --suite models, one of the two")
    if directory is not None:
        return directory
    if suite != "models":
        raise BadInput(f"--suite {suite}: there is no such suite; there is: models")
    return model_suite.write(runs / "suites" / suite)


def entries(directory: Path, shard: tuple[int, int] = (0, 1)) -> list[Entry]:
    """The modules of a shard, sorted by name: every `.py` file that defines get_inputs, or that cannot be read.

    Raises:
        BadInput: no such directory, or no module in it.
    """
    if not os.path.isdir(directory):
        raise BadInput(f"{directory}: no such directory")
    found: list[Entry] = []
    for path in sorted(directory.rglob("*.py")):
        name, content, problem = path.relative_to(directory).as_posix(), b"", ""
        try:
            content = private_files.read_beneath(directory, name)
        except IsADirectoryError:
            continue
        except BadInput as error:
            problem = str(error)
        except OSError as error:
            problem = f"{path}: cannot be read: {error.strerror}"
        if problem or b"def get_inputs" in content:
            found.append(Entry(name, path, digest(content), problem))
    if not found:
        raise BadInput(f"{directory}: no file here defines get_inputs()")
    return found[shard[0] :: shard[1]]


def options(
    limits: run_pb2.Budget,
    target: str,
    precision: str,
    prepared: bool,
    gradients: Sequence[str] | None,
    search: str,
    agents: Sequence[str],
) -> dict[str, Any]:
    """What a line says that it was made under; another word here, and a module is run again."""
    return {
        "target": target,
        "precision": precision,
        BUDGET: limits.wall_seconds,
        "trials": limits.trial_count,
        "device_time": limits.device_seconds,
        "tokens": limits.model_tokens,
        "search": search,
        "plugins": list(agents),
        "prepared": prepared,
        "gradients": None if gradients is None else list(gradients),
    }


def read_results(file: Path) -> list[dict[str, Any]]:
    """The lines of a results file, none where there is no file; a line cut short by a crash is passed over.

    Raises:
        BadInput: the file cannot be read, another user could change it, or a line is none of ours.
    """
    try:
        lines = private_files.read(private_files.own_file(file, remedy=REMEDY)).decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise BadInput(f"{file}: results cannot be read ({error.strerror}); name a file with --results") from error
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            result = json.loads(line)
        except ValueError:
            if not line or line.startswith("{"):
                continue
            result = None
        except RecursionError:
            result = None
        if fault := _fault(result):
            raise BadInput(f"{file}:{number}: no line of results: {fault}; {REMEDY}")
        found.append(result)
    return found


def _fault(result: Any) -> str:
    """What a line has, or lacks, that no line of ours does; empty for one of ours."""
    if not isinstance(result, dict):
        return "it is no JSON object"
    went_wrong = result.get("verdict") in ("BAD_INPUT", "FAILED")
    for name in (*IN_EVERY_LINE, *(["message"] if went_wrong else [])):
        if name not in result:
            return f"`{name}` is missing"
    for name, kind in SHAPE.items():
        if not isinstance(result.get(name, kind()), kind):
            return f"`{name}` is no {kind.__name__}"
    if not all(isinstance(label, str) for label in result.get("labels", ())):
        return "`labels` holds what is no str"
    speedup = result.get("speedup_fastest")
    if speedup is None and result["verdict"] != "PASS":
        return ""
    median = speedup.get("median") if isinstance(speedup, dict) else None
    is_speedup = isinstance(median, int | float) and 0 <= median <= sys.float_info.max
    return "" if is_speedup else "`speedup_fastest` has no number as its median"


def ahead(wanted: int, target: str, device_count: int = 1) -> int:
    """How many modules are under way beside one: on each further device one, and those that are made ready.

    `wanted`: so many are made ready on each. -1 lets the machine decide: none for a processor, whose timings that would
    disturb.
    """
    has_device = target != "cpu" and Path("/dev/nvidiactl").exists()
    if wanted < 0:
        wanted = most_ahead((os.cpu_count() or 1) // device_count) if has_device else 0
    return device_count * (1 + wanted) - 1


def bench(
    modules: Sequence[Entry],
    results_file: Path,
    optimise: Optimise,
    *,
    options: Mapping[str, Any] = NO_OPTIONS,
    ahead: int = 0,
    seconds_left: Callable[[], float] = lambda: float("inf"),
    note: Callable[[str], None] = lambda _: None,
    stop: Callable[[], None] = lambda: None,
    check: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Runs what has no result yet, while there is time, and returns the results of all modules that have one.

    `options`: what was asked for, as JSON has it; lines hold it. `ahead`: modules beside the one whose turn it is.
    `check` raises when a service has ended. Ctrl-C begins no more and calls `stop`, which should end those under way; a
    second one passes through. Modules that no line names go first, so that others cannot keep them from their turn.

    Raises:
        BadInput: as `read_results`.
        Infrastructure: a service is gone; what was found is in the file.
    """
    results, waiting = _known_and_waiting(modules, read_results(results_file), options)
    budget = options.get(BUDGET, float("inf"))
    running: dict[Future[dict[str, Any]], Entry] = {}
    stopped = False
    pool = ThreadPoolExecutor(1 + ahead, thread_name_prefix="module")
    try:
        while waiting or running:
            while waiting and len(running) <= ahead:
                left = seconds_left()
                if left <= 0:
                    note(f"time is up: {len(waiting)} modules left; the same command goes on from here")
                    waiting.clear()
                    break
                entry = waiting.popleft()
                note(f"[{modules.index(entry) + 1}/{len(modules)}] {entry.name}")
                made_under = {**options, BUDGET: left} if left < budget else dict(options)
                running[pool.submit(_result, optimise, entry, min(left, budget), made_under)] = entry
            try:
                ended, _ = wait(running, timeout=CHECK_SECONDS, return_when=FIRST_COMPLETED)
            except KeyboardInterrupt:
                if stopped:
                    raise
                stopped = True
                waiting.clear()
                stop()
                continue
            for future in ended:
                line, entry = future.result(), running.pop(future)
                results[entry.name] = line
                _append(results_file, line)
            check()
    finally:
        if running:
            stop()
        pool.shutdown(wait=False, cancel_futures=True)
    return [results[entry.name] for entry in modules if entry.name in results]


def _known_and_waiting(
    modules: Sequence[Entry], lines: Sequence[dict[str, Any]], options: Mapping[str, Any]
) -> tuple[dict[str, dict[str, Any]], deque[Entry]]:
    """Results by module, and the modules without one, those first that no line names."""
    named = {line["file"] for line in lines}
    sources = {entry.name: entry.digest for entry in modules}
    results = {line["file"]: line for line in lines if _is_known(line, sources.get(line["file"]), options)}
    unknown = (entry for entry in modules if entry.name not in results)
    return results, deque(sorted(unknown, key=lambda entry: entry.name in named))


def _is_known(line: Mapping[str, Any], source: str | None, options: Mapping[str, Any]) -> bool:
    """Whether a line is the final result of this source; options that it does not tell are taken for the same, but for
    the track and gradients: there was one, and there were none."""
    if line.get("source") != source or not UNDONE.isdisjoint((line.get("verdict"), line.get("state"))):
        return False
    made_under = {"prepared": False, "gradients": None, **line.get("options", {})}
    return all(made_under.get(name, value) == value for name, value in options.items())


def _result(optimise: Optimise, entry: Entry, most_seconds: float, options: Mapping[str, Any]) -> dict[str, Any]:
    start = time.monotonic()
    try:
        if entry.problem:
            raise BadInput(entry.problem)
        made = optimise(entry.path, most_seconds)
        result = report.as_json(made) if isinstance(made, run_pb2.Run) else made
    except BadInput as error:
        result = {"name": entry.path.stem, "verdict": "BAD_INPUT", "message": str(error), "labels": []}
    seconds = time.monotonic() - start - result.get("stage_seconds", {}).get("wait", 0.0)
    return {"file": entry.name, "source": entry.digest, "seconds": round(seconds, 1), "options": options, **result}


def _append(file: Path, line: Mapping[str, Any]) -> None:
    try:
        with private_files.append_to(private_files.own_file(file, make=True, remedy=REMEDY)) as output:
            output.write(f"{json.dumps(line)}\n".encode())
    except OSError as error:
        raise Infrastructure(f"{file}: cannot be written ({error.strerror}); earlier lines stay readable") from error


def text(result: Mapping[str, Any]) -> str:
    """A line for people: verdict, speedup, file, and what must be known of it."""
    speedup = result.get("speedup_fastest") or {}
    shown = f"{speedup['median']:.2f}x" if speedup else "-"
    went_wrong = result["verdict"] in ("BAD_INPUT", "FAILED")
    note = result["message"] if went_wrong else " ".join(result.get("labels", []))
    return f"{result['verdict']:<12}{shown:>8}  {result['file']}  {note}"


def exit_code(results: Sequence[Mapping[str, Any]]) -> int:
    """As of `optimize`: 3 where a module failed, 2 where one is bad input, 1 where nothing passed, else 0."""
    verdicts = {result.get(key) for result in results for key in ("verdict", "state")}
    for verdict, code in (("FAILED", 3), ("BAD_INPUT", 2)):
        if verdict in verdicts:
            return code
    passed = any(result.get("trials", {}).get("passed") for result in results)
    return 0 if passed or not verdicts.isdisjoint(("PASS", "AT_FLOOR")) else 1


def summary(results: Sequence[Mapping[str, Any]]) -> str:
    """One sentence: how many modules, how many faster, the geometric mean of all against the fastest baseline.

    A module without a faster kernel counts as 1: the user keeps what was there. One that computes nothing does not
    count.
    """
    verdicts: dict[str, int] = {}
    product, judged = 1.0, 0
    trivial = set(map(words.flag, report.TRIVIAL))
    for result in results:
        verdict = str(result.get("verdict"))
        verdicts[verdict] = verdicts.get(verdict, 0) + 1
        is_trivial = not trivial.isdisjoint(result.get("labels", ()))
        if verdict in ("PASS", "NO_FASTER", "AT_FLOOR") and not is_trivial:
            judged += 1
            product *= result["speedup_fastest"]["median"] if verdict == "PASS" else 1.0
    mean = product ** (1 / judged) if judged else 1.0
    counts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items()))
    return f"{len(results)} modules: {counts}; geometric mean of {judged} against the fastest baseline {mean:.2f}x"
