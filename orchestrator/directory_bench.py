"""Optimises every module of a directory, one line of JSON each, so that it can stop anywhere and go on later.

The one idea: the results file is the state. A module whose line is there, for the same source, is not run again; a
module that fails has a line too. Modules are dealt to shards by their place in the sorted list. A few are under way at
once, so that one is made ready while another has the device.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator import report
from orchestrator.device_gate import most_ahead
from warpsmith.digest import digest
from warpsmith.errors import BadInput, Infrastructure
from warpsmith.v1 import run_pb2

Optimise = Callable[[Path, float], run_pb2.Run]
"""(file, most seconds of search; 0 for the budget as given) → the run in its end."""


@dataclass(frozen=True)
class Entry:
    """A module of the directory. `name`: its path below the directory."""

    name: str
    path: Path
    digest: str


def entries(directory: Path, shard: tuple[int, int] = (0, 1)) -> list[Entry]:
    """The modules of a shard, sorted by name: every `.py` file that defines get_inputs.

    Raises:
        BadInput: no such directory, or no module in it.
    """
    if not directory.is_dir():
        raise BadInput(f"{directory}: no such directory")
    found: list[Entry] = []
    for path in sorted(directory.rglob("*.py")):
        content = path.read_bytes()
        if b"def get_inputs" in content:
            found.append(Entry(path.relative_to(directory).as_posix(), path, digest(content)))
    if not found:
        raise BadInput(f"{directory}: no file here defines get_inputs()")
    return found[shard[0] :: shard[1]]


def read_results(file: Path) -> dict[str, dict[str, Any]]:
    """Results by module name, the last line of each; a line cut short by a crash is passed over."""
    results: dict[str, dict[str, Any]] = {}
    if file.exists():
        for line in file.read_text().splitlines():
            try:
                result = json.loads(line)
                results[result["file"]] = result
            except (ValueError, KeyError, TypeError):
                continue
    return results


def ahead(wanted: int, target: str) -> int:
    """How many modules are made ready beside the one whose turn it is.

    `wanted`: -1 lets the machine decide: none for a processor, whose timings that would disturb.
    """
    if wanted >= 0:
        return wanted
    has_device = target != "cpu" and Path("/dev/nvidiactl").exists()
    return most_ahead(os.cpu_count() or 1) if has_device else 0


def bench(
    modules: Sequence[Entry],
    results_file: Path,
    optimise: Optimise,
    *,
    ahead: int = 0,
    seconds_left: Callable[[], float] = lambda: float("inf"),
    note: Callable[[str], None] = lambda _: None,
    stop: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Runs what has no result yet, while there is time, and returns the results of all modules that have one.

    `ahead`: modules beside the one whose turn it is. Ctrl-C begins no more and calls `stop`, which should end those
    under way; a second one passes through.

    Raises:
        Infrastructure: a service is gone; what was found is in the file.
    """
    results = read_results(results_file)
    waiting = deque(entry for entry in modules if not _is_known(results.get(entry.name), entry))
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
                running[pool.submit(_result, optimise, entry, left if left < float("inf") else 0.0)] = entry
            try:
                ended, _ = wait(running, return_when=FIRST_COMPLETED)
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
    finally:
        if running:
            stop()
        pool.shutdown(wait=False, cancel_futures=True)
    return [results[entry.name] for entry in modules if entry.name in results]


def _is_known(result: Mapping[str, Any] | None, entry: Entry) -> bool:
    """Whether a line is the result of this source; one that the user stopped is none."""
    return result is not None and result.get("source") == entry.digest and result.get("verdict") != "CANCELLED"


def _result(optimise: Optimise, entry: Entry, most_seconds: float) -> dict[str, Any]:
    start = time.monotonic()
    try:
        result = report.as_json(optimise(entry.path, most_seconds))
    except BadInput as error:
        result = {"name": entry.path.stem, "verdict": "BAD_INPUT", "message": str(error), "labels": []}
    seconds = time.monotonic() - start - result.get("stage_seconds", {}).get("wait", 0.0)
    return {"file": entry.name, "source": entry.digest, "seconds": round(seconds, 1), **result}


def _append(file: Path, line: Mapping[str, Any]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as output:
            output.write(json.dumps(line) + "\n")
    except OSError as error:
        raise Infrastructure(f"{file}: cannot be written ({error.strerror}); earlier lines stay readable") from error


def summary(results: Sequence[Mapping[str, Any]]) -> str:
    """One sentence: how many modules, how many faster, the geometric mean of all against the fastest baseline.

    A module without a faster kernel counts as 1: the user keeps what was there. One that computes nothing does not
    count.
    """
    verdicts: dict[str, int] = {}
    product, judged = 1.0, 0
    for result in results:
        verdict = str(result.get("verdict"))
        verdicts[verdict] = verdicts.get(verdict, 0) + 1
        is_trivial = not report.TRIVIAL.keys().isdisjoint(result.get("labels", ()))
        if verdict in ("PASS", "NO_FASTER", "AT_FLOOR") and not is_trivial:
            judged += 1
            product *= result["speedup_fastest"]["median"] if verdict == "PASS" else 1.0
    mean = product ** (1 / judged) if judged else 1.0
    counts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items()))
    return f"{len(results)} modules: {counts}; geometric mean of {judged} against the fastest baseline {mean:.2f}x"
