"""Where KernelBench keeps things: tasks in a checkout, solutions in the folder of a run.

The one idea: a solution and its task meet by the numbers in their names, as KernelBench's own scripts pair them. It
parses and runs nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.tasks import intake
from warpsmith.errors import BadInput
from warpsmith.sandbox import private_files

_NUMBER = "(0|[1-9][0-9]{0,8})"
_LEVEL = re.compile("level([1-9][0-9]{0,8})")
_TASK = re.compile(rf"{_NUMBER}_.*\.py", re.DOTALL)
_SOLUTION = re.compile(rf"level_{_NUMBER}_problem_{_NUMBER}_sample_{_NUMBER}_kernel\.py")
SOLUTION_NAME = "level_L_problem_P_sample_S_kernel.py"
TaskKey = tuple[int, int]
"""(level, number)."""


@dataclass(frozen=True, order=True)
class Solution:
    """A file of a run."""

    level: int
    number: int
    """Of the task in its level."""
    sample: int

    @property
    def task(self) -> TaskKey:
        """The task that it is for."""
        return self.level, self.number

    @property
    def file_name(self) -> str:
        """Its name in the folder."""
        return f"level_{self.level}_problem_{self.number}_sample_{self.sample}_kernel.py"


def tasks(checkout: Path) -> dict[TaskKey, Path]:
    """The tasks of a checkout, or of the folder in it that holds level1, sorted.

    Raises:
        BadInput: no such folder, or none of a level in it.
    """
    root = checkout / "KernelBench" if (checkout / "KernelBench").is_dir() else checkout
    found = {}
    for folder in _names(root):
        if (level := _LEVEL.fullmatch(folder)) and (root / folder).is_dir():
            for name in _names(root / folder):
                if task := _TASK.fullmatch(name):
                    found[int(level[1]), int(task[1])] = root / folder / name
    if not found:
        raise BadInput(f"{checkout}: holds no level1/1_NAME.py; name a checkout of KernelBench")
    return dict(sorted(found.items()))


def solutions(folder: Path) -> tuple[list[Solution], list[str]]:
    """The solutions of a run, sorted, and the names of Python files that are named otherwise.

    Raises:
        BadInput: no such folder, or no solution in it.
    """
    found, others = [], []
    for name in _names(folder):
        if match := _SOLUTION.fullmatch(name):
            found.append(Solution(*map(int, match.groups())))
        elif name.endswith(".py"):
            others.append(name)
    if not found:
        raise BadInput(f"{folder}: holds no {SOLUTION_NAME}; name the folder of a run of KernelBench")
    return sorted(found), others


def chosen(found: Sequence[Solution], only: Sequence[str], samples: int) -> list[Solution]:
    """Those of the levels and tasks that `only` names, of each task the first `samples`; all where 0.

    Raises:
        BadInput: a part is no `1` and no `1/23`, or none is left.
    """
    for part in only:
        if not re.fullmatch(rf"{_NUMBER}(/{_NUMBER})?", part):
            raise BadInput(f"--only {part}: write 1 for a level, 1/23 for a task")
    kept = [
        each
        for each in found
        if (not only or {f"{each.level}", f"{each.level}/{each.number}"} & set(only))
        and (not samples or each.sample < samples)
    ]
    if not kept:
        raise BadInput(f"--only {' '.join(only)}, --samples {samples}: leave none of the run's {len(found)} solutions")
    return kept


def content(path: Path) -> bytes:
    """The text of a task or a solution; raises BadInput where it cannot be read."""
    try:
        return private_files.read(path, most_bytes=intake.SOURCE_BYTES)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from error


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise BadInput(f"{folder}: cannot be listed: {error.strerror}") from error
