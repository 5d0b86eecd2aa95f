"""What a run of KernelBench says of its own solutions: right or not, and how fast.

The one idea: a claim is read as it was made, by KernelBench's own rules, and stands beside a judgement; it changes
none. The files are others' and may hold anything: what has another form is no claim.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.interchange.layout import Solution, TaskKey
from warpsmith.errors import BadInput
from warpsmith.sandbox import private_files

RESULTS_NAME = "eval_results.json"
"""KernelBench's name for a run's results."""
MOST_BYTES = 256 << 20
LEAST_MS, MOST_MS = 1e-6, 1e9
"""Shorter and longer than any time that is one."""


@dataclass(frozen=True)
class Claim:
    """What is said of a solution."""

    is_right: bool
    speedup: float | None = None
    """Time of the reference over that of the solution; None where one is not known."""
    hardware: str = ""
    """What it was timed on; empty where that is not told."""

    @property
    def text(self) -> str:
        """In a few words."""
        if not self.is_right:
            return "wrong"
        return "right" if self.speedup is None else f"right, {self.speedup:.2f}x"


def read(folder: Path, solutions: Sequence[Solution], baselines: Mapping[TaskKey, float]) -> dict[Solution, Claim]:
    """The claims of a run's results about its solutions; empty where it has none.

    `baselines`: times of the references in ms, for results that tell only the solutions'.

    Raises:
        BadInput: the results cannot be read, or name no level and the run has solutions of several.
    """
    file = folder / RESULTS_NAME
    if not os.path.lexists(file):
        return {}
    results = _object(file)
    if len(levels := sorted({each.level for each in solutions})) > 1:
        raise BadInput(
            f"{file}: names no levels, and the folder has solutions of {len(levels)}; its claims are left out"
        )
    found = {}
    for solution in solutions:
        for entry in _entries(results.get(str(solution.number))):
            if entry.get("sample_id") == solution.sample:
                found[solution] = _claim(entry, baselines.get(solution.task))
    return found


def baseline_times(file: Path, tasks: Mapping[TaskKey, Path]) -> dict[TaskKey, float]:
    """Times of references in ms, from a file such as KernelBench's results/timing/GPU/baseline_time_torch.json.

    Raises:
        BadInput: it cannot be read, or has no time of a task.
    """
    levels = _object(file)
    found = {}
    for key, path in tasks.items():
        level = levels.get(f"level{key[0]}")
        entry = level.get(path.name) if isinstance(level, dict) else None
        if (mean := _time(entry, "mean")) is not None:
            found[key] = mean
    if not found:
        raise BadInput(f"--baseline {file}: has the mean time of no task of the checkout")
    return found


def _claim(entry: Mapping[str, Any], baseline_ms: float | None) -> Claim:
    ours, theirs = _time(entry, "runtime"), _time(entry, "ref_runtime") or baseline_ms
    is_right = entry.get("compiled") is True and entry.get("correctness") is True
    metadata = entry.get("metadata")
    hardware = metadata.get("hardware") if isinstance(metadata, dict) else None
    return Claim(
        is_right,
        theirs / ours if is_right and ours and theirs else None,
        hardware if isinstance(hardware, str) else "",
    )


def _time(entry: Any, name: str) -> float | None:
    """A time in ms; KernelBench writes -1 where there is none."""
    value = entry.get(name) if isinstance(entry, dict) else None
    is_time = isinstance(value, int | float) and not isinstance(value, bool) and LEAST_MS < value < MOST_MS
    return float(value) if is_time else None  # type: ignore[arg-type]


def _entries(samples: Any) -> Iterable[dict[str, Any]]:
    """Results of a task's samples; earlier releases of KernelBench had one, outside of a list."""
    return [each for each in (samples if isinstance(samples, list) else [samples]) if isinstance(each, dict)]


def _object(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(private_files.read(file, most_bytes=MOST_BYTES))
    except (ValueError, RecursionError):
        raise BadInput(f"{file}: is not JSON") from None
    except OSError as error:
        raise BadInput(f"{file}: cannot be read: {error.strerror}") from error
    if not isinstance(found, dict):
        raise BadInput(f"{file}: holds no JSON object")
    return found
