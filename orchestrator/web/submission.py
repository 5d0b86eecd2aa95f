"""Makes a task of a form: a module in a text, with the refusals that the command line has.

The one idea: the text is written to a file of our own in a new folder, alone, and goes the way that a file on the
command line goes; the name that came with it names the task and opens nothing. A jailed process builds and runs the
module once.
"""

from __future__ import annotations

import re
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from orchestrator.commands import budgets
from orchestrator.tasks import intake
from warpsmith.errors import BadInput
from warpsmith.sandbox import private_files
from warpsmith.v1 import run_pb2, task_pb2

NAME_CHARACTERS = 60
TEXT_BYTES = 1 << 20
"""Most of a module's text."""
MOST_WAITING = 4
"""Modules that are looked at or wait for it: each is a process with torch in it."""
DEFAULT_NAME = "module"
LONGEST_SECONDS = 24 * 3600.0
"""Of search, that a form may ask for."""


class Busy(Exception):
    """Too many modules wait to be looked at."""


@dataclass(frozen=True)
class Form:
    """What was filled in, as it came."""

    text: str = ""
    name: str = ""
    target: str = "auto"
    precision: str = "auto"
    budget: str = "60s"
    trials: str = "0"
    search: str = ""
    class_name: str = "Model"
    prepared: bool = False
    fresh: bool = False

    @classmethod
    def of(cls, fields: Mapping[str, str], text: str, name: str) -> Form:
        """Of the fields of a request; `text` and `name` of the file, where one was given."""

        def given(field: str, default: str) -> str:
            return fields.get(field, "").strip()[:NAME_CHARACTERS] or default

        return cls(
            text=text or fields.get("text", ""),
            name=name or given("name", ""),
            target=given("target", "auto"),
            precision=given("precision", "auto"),
            budget=given("budget", "60s"),
            trials=given("trials", "0"),
            search=given("search", ""),
            class_name=given("class", "Model"),
            prepared="prepared" in fields,
            fresh="fresh" in fields,
        )


def file_name(name: str) -> str:
    """A file's name of our own for what somebody calls a module."""
    stem = re.sub(r"\W+", "_", name.strip().removesuffix(".py"), flags=re.ASCII).strip("_")[:NAME_CHARACTERS]
    return f"{stem or DEFAULT_NAME}.py"


def budget_of(form: Form) -> run_pb2.Budget:
    """What the run may spend.

    Raises:
        BadInput: a field is no time, or no count.
    """
    if not re.fullmatch(r"[0-9]{1,9}", form.trials):
        raise BadInput(f"Most trials: {form.trials}: write a whole number, 0 for no limit")
    seconds = budgets.seconds(form.budget, "Search time:")
    if seconds > LONGEST_SECONDS:
        raise BadInput(f"Search time: {form.budget}: at most {LONGEST_SECONDS / 3600:g}h can be asked for here")
    return run_pb2.Budget(wall_seconds=seconds, trial_count=int(form.trials))


class Desk:
    """Takes forms; looks at one module at a time."""

    def __init__(self) -> None:
        self._one = threading.Lock()
        self._places = threading.BoundedSemaphore(MOST_WAITING)

    def task(self, form: Form) -> task_pb2.Task:
        """The task of a form, with its shapes and its digest.

        Raises:
            BadInput: there is no text, it is too long, or no module that can be optimised; names the line.
            Busy: too many wait. Infrastructure: no jail can be built here.
        """
        content = form.text.replace("\r\n", "\n").encode(errors="replace")
        if not content.strip():
            raise BadInput("Module: choose a .py file, or paste its text")
        if len(content) > TEXT_BYTES:
            raise BadInput(f"Module: holds {len(content)} bytes; at most {TEXT_BYTES} can be sent")
        if not self._places.acquire(blocking=False):
            raise Busy
        try:
            with self._one, tempfile.TemporaryDirectory(prefix="warpsmith-form-") as folder:
                return intake.inspect(_read(Path(folder), content, form))
        finally:
            self._places.release()


def _read(folder: Path, content: bytes, form: Form) -> task_pb2.Task:
    file = folder / file_name(form.name)
    private_files.replace(file, content.decode(errors="replace"))
    request = intake.Request(
        str(file),
        target=form.target,
        precision=form.precision,
        class_name=form.class_name,
        prepared=form.prepared,
    )
    try:
        return intake.read(request)
    except BadInput as error:
        raise BadInput(str(error).replace(f"{folder}/", "")) from None
