"""Processes that tests start, find and end by signals, and the agents that they talk to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator import testing
from orchestrator.archive import Archive
from warpsmith.sandbox import jail_init
from warpsmith.v1 import run_pb2, verdict_pb2

AGENTS = ("reasoning", "synthesis", "compile", "correctness", "benchmark")
COMMAND = "from orchestrator.commands.cli import main; main()"
FAKED_SERVICES = """
import signal
from functools import partial
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background has it ignored
from orchestrator.commands import client, up_command
modules = {name: f"faked_{name}" for name in ("benchmark", "reasoning", "synthesis", "compile", "correctness")}
for place in (client, up_command):
    place.LocalServices = partial(place.LocalServices, modules=modules | {"orchestrator": "impatient_orchestrator"})
"""
"""Before a command: its agents are those of `fake_service`, each a process; its orchestrator is the real one."""
IMPATIENT = """
import os
from orchestrator import agents
if seconds := os.environ.get("DEADLINE_SECONDS"):
    for name in [name for name in vars(agents) if name.endswith("_SECONDS") and name != "AWAY_SECONDS"]:
        setattr(agents, name, float(seconds))
import orchestrator.__main__
"""
"""An orchestrator that waits for each answer of an agent as long as the environment says, minutes without."""
HOLD_SECONDS = float(os.environ.get("HOLD") or 0)
"""For which a service stands still, or a store takes nothing, once it has been noticed."""
TRIALS = 60
"""Of a search that is long enough for something to happen in it."""
MODULE = "import torch\nclass Model(torch.nn.Module):\n    def forward(self, x):\n        return x * 2\n"
MODULE += "def get_inputs(): return [torch.rand(16, 16)]\n"


def wait_until(is_so: Callable[[], bool], told: Callable[[], str] = lambda: "") -> None:
    """Looks until it is so; `told` says what there is where it never is."""
    end = time.monotonic() + 90
    while not is_so():
        assert time.monotonic() < end, told()
        time.sleep(0.02)


def hold() -> None:
    """A fault lasts for as long again as the environment says, where it does."""
    time.sleep(HOLD_SECONDS)


def find(ancestor: int, words: str) -> int:
    """The descendant whose command line holds `words`; 0 for none."""
    for process in jail_init.descendants(ancestor):
        with suppress(OSError):
            if words in Path(f"/proc/{process}/cmdline").read_text().replace("\0", " "):
                return process
    return 0


def before_others(place: Path) -> str:
    """PYTHONPATH with a folder first; never an empty entry, which would be the current directory."""
    return os.pathsep.join(filter(None, (str(place), os.environ.get("PYTHONPATH"))))


def module_of(service: str) -> str:
    """The module that a service of a place is started from."""
    return "impatient_orchestrator" if service == "orchestrator" else f"faked_{service}"


@dataclass
class Command:
    """`warpsmith ARGUMENTS` under way, its output in a file."""

    process: subprocess.Popen[bytes]
    file: Path

    @property
    def said(self) -> str:
        """What it has printed."""
        return self.file.read_text()

    def wait_for(self, words: str, count: int = 1) -> None:
        """Until it has said so, so often."""
        wait_until(lambda: self.said.count(words) >= count or self.process.poll() is not None)
        assert self.said.count(words) >= count, self.said

    def address(self, name: str) -> str:
        """Where a service answers that it has started."""
        return next(line.split()[1] for line in self.said.splitlines() if line.split()[:1] == [name])

    def kill_service(self, name: str, number: int = signal.SIGKILL) -> None:
        """Sends a signal to the service that it has started now."""
        found = find(self.process.pid, f"-m {module_of(name)}")
        assert found, self.said
        os.kill(found, number)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Ends it by a signal; its code."""
        self.process.send_signal(number)
        return self.process.wait(60)


@dataclass
class Place:
    """A directory in which commands run, with a module and the agents of `fake_service`."""

    path: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)

    def __post_init__(self) -> None:
        (self.path / "good.py").write_text(MODULE)
        for name in AGENTS:
            text = f"from orchestrator.serving.fake_service import serve_role\n\nserve_role({name!r})\n"
            (self.path / f"faked_{name}.py").write_text(text)
        (self.path / "impatient_orchestrator.py").write_text(IMPATIENT)

    def start(self, *arguments: str) -> Command:
        """Starts `warpsmith ARGUMENTS`."""
        file = self.path / f"said{len(self.commands)}"
        named = {"PYTHONPATH": before_others(self.path), "OMP_NUM_THREADS": "1"}
        with file.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", FAKED_SERVICES + COMMAND, *arguments],
                cwd=self.path,
                env={**os.environ, **named, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self.commands.append(Command(process, file))
        return self.commands[-1]


@contextmanager
def place(path: Path, **environment: str) -> Iterator[Place]:
    """A place whose commands do not outlive the block."""
    made = Place(path, environment)
    try:
        yield made
    finally:
        for command in made.commands:
            if command.process.poll() is None:
                command.end()


def up(here: Place, *more: str) -> Command:
    """Services that are up."""
    started = here.start("up", *more)
    started.wait_for("unix:", 7)
    return started


def optimize(here: Place, *more: str) -> Command:
    """A search under way."""
    started = here.start(
        "optimize", "good.py", "--target", "cpu", "--budget", "5m", "--trials", str(TRIALS), "--fresh", *more
    )
    started.wait_for("good #3 ")
    return started


def require_uncharged(here: Place) -> None:
    """The one run of a place blames no candidate, and its search was made to its end."""
    archive = Archive.in_directory(here.path / "runs")
    (run,) = archive.runs()
    trials = archive.trials(run.id)
    archive.close()
    assert {trial.verdict.state for trial in trials} == {verdict_pb2.VERDICT_STATE_PASS}
    assert "ended early" not in run.message


def require_result(here: Place, command: Command) -> None:
    """The command ends with a kernel, and its run has all of its trials once."""
    assert command.process.wait(120) == 0, command.said
    archive = Archive.in_directory(here.path / "runs")
    (run,) = archive.runs()
    trials = archive.trials(run.id)
    archive.close()
    assert run.state == run_pb2.RUN_STATE_FASTER, run.message
    assert len({trial.candidate.program.digest for trial in trials}) == len(trials) == run.trial_count == TRIALS
    assert len(set(map(testing.name_of, run.best.candidate.moves))) == len(run.best.candidate.moves) > 1
    for number in range(1, TRIALS + 1):
        assert command.said.count(f"good #{number} ") == 1, command.said
