"""The whole `warpsmith` command on what it cannot use: one line for each error, its exit code, and nothing left.

Every case is the real command in a process of its own. A parent that inherits all orphans counts what outlives it,
and its temporary directory shows what was not removed.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from authority import Authority

from warpsmith.sandbox import jail_init
from warpsmith.settings import TLS_VARIABLES

MODULES = {
    "good.py": "def get_inputs(): return [torch.rand(16, 16)]\n",
    "syntax.py": "import torch\nclass Model(:\n",
    "nothing.py": "import torch\ndef get_inputs(): return [torch.rand(4)]\n",
    "no_data.py": "def get_inputs():\n    raise OSError('no data\\nat all')\n",
    "no_tensor.py": "def get_inputs(): return [1, 'two']\n",
    "raises.py": "def get_inputs(): return [torch.rand(4, 5)]\n",
    "branches.py": "def get_inputs(): return [torch.rand(16, 16)]\n",
    "draws.py": "def get_inputs(): return [torch.rand(16, 16)]\n",
}
FORWARDS = {
    "good.py": "x * 2",
    "no_data.py": "x",
    "no_tensor.py": "x",
    "raises.py": "[][0]",
    "branches.py": "x * 2 if x.sum().item() > 0 else x",
    "draws.py": "x + random.random()",
}
MODEL = (
    "import random\nimport torch\nclass Model(torch.nn.Module):\n    def forward(self, x, *rest):\n        return {}\n"
)

# Adopts whatever the command leaves behind, and reports it: nothing may outlive the command by more than a moment.
OVERSEER = """
import ctypes, json, os, subprocess, sys, time
PR_SET_CHILD_SUBREAPER = 36
assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
report, *command = sys.argv[1:]
code = subprocess.call(command)
left = []
for process in os.listdir("/proc"):
    try:
        with open(f"/proc/{process}/stat") as stat:
            state, parent = stat.read().rpartition(")")[2].split()[:2]
        if state != "Z" and int(parent) == os.getpid():
            left.append(open(f"/proc/{process}/cmdline").read().replace(chr(0), " "))
    except (OSError, ValueError):
        pass
with open(report, "w") as file:
    json.dump(left, file)
sys.exit(code)
"""
COMMAND = "from orchestrator.commands.cli import main; main()"


@dataclass(frozen=True)
class Said:
    """How a command ended."""

    code: int
    out: str
    errors: Sequence[str]
    """Lines on stderr that report an error, without `warpsmith: `."""
    left: Sequence[str]
    """Processes and temporary files that were left."""


@dataclass
class Shell:
    """Runs commands in a directory of the test's own."""

    place: Path

    def write(self, *names: str) -> None:
        """Puts modules there."""
        for name in names:
            text = MODEL.format(FORWARDS[name]) if name in FORWARDS else ""
            (self.place / name).write_text(text + MODULES[name])

    def start(
        self, *arguments: str, environment: Mapping[str, str] | None = None, program: str = COMMAND
    ) -> subprocess.Popen[bytes]:
        """Starts `warpsmith ARGUMENTS` under the overseer, its output in files."""
        (self.place / "tmp").mkdir(exist_ok=True)
        command = [sys.executable, "-c", OVERSEER, "left.json", sys.executable, "-c", program, *arguments]
        with (self.place / "out").open("wb") as out, (self.place / "err").open("wb") as err:
            return subprocess.Popen(
                command,
                cwd=self.place,
                env={**os.environ, "TMPDIR": str(self.place / "tmp"), "OMP_NUM_THREADS": "2", **(environment or {})},
                stdout=out,
                stderr=err,
            )

    def end(self, process: subprocess.Popen[bytes]) -> Said:
        """Waits for a command's end."""
        code = process.wait(timeout=120)
        out, err = (self.place / "out").read_text(), (self.place / "err").read_text()
        assert "Traceback" not in out + err, err
        errors = [line.removeprefix("warpsmith: ") for line in err.splitlines() if line.startswith("warpsmith: ")]
        # torch makes a cache folder of its own, for all programs of a user, where part of it is imported.
        files = [name for name in os.listdir(self.place / "tmp") if not name.startswith("torchinductor_")]
        left = [*json.loads((self.place / "left.json").read_text()), *files]
        return Said(code, out, errors, left)

    def run(self, *arguments: str, environment: Mapping[str, str] | None = None) -> Said:
        """Runs a command to its end."""
        return self.end(self.start(*arguments, environment=environment))


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


def test_files_that_are_no_modules_are_all_named_before_anything_starts(shell: Shell) -> None:
    shell.write("syntax.py", "nothing.py")
    said = shell.run("optimize", "missing.py", "syntax.py", "nothing.py")
    assert said == Said(
        2,
        "",
        [
            "missing.py: no such file",
            "syntax.py:2: syntax error: invalid syntax",
            "nothing.py: defines no class Model; name another with --class",
        ],
        [],
    )
    assert not (shell.place / "runs").exists()


def test_an_unknown_plugin_is_told_which_are_installed(shell: Shell) -> None:
    said = shell.run("optimize", "missing.py", "--plugin", "reasoner=oracle")
    assert said == Said(2, "", ["no reasoner is called 'oracle'; installed: roofline, vllm"], [])


def test_modules_that_fail_when_run_are_all_named_with_their_lines(shell: Shell) -> None:
    shell.write("no_data.py", "no_tensor.py", "raises.py")
    said = shell.run("optimize", "no_data.py", "no_tensor.py", "raises.py")
    assert (said.code, said.out, said.left) == (2, "", [])
    assert said.errors == [
        "no_data.py:7: get_inputs() failed: OSError: no data",
        "no_tensor.py: get_inputs() returned no tensor",
        "raises.py:5: forward failed: IndexError: list index out of range",
    ]


def test_modules_that_do_not_export_or_repeat_end_their_runs_with_the_reason(shell: Shell) -> None:
    shell.write("branches.py", "draws.py")
    said = shell.run("optimize", "branches.py", "draws.py", "--target", "cpu")
    assert (said.code, said.out, said.left) == (2, "", [])
    branches, draws = said.errors
    assert branches.startswith("branches.py:5: the module does not export (torch.export): ")
    assert draws.startswith("draws.py: the module is not deterministic: ")


def test_without_a_compiler_a_run_ends_before_anything_is_timed(shell: Shell) -> None:
    shell.write("good.py")
    said = shell.run("optimize", "good.py", "--target", "cpu", environment={"CXX": "none", "PATH": "/nowhere"})
    assert (said.code, said.out, said.left) == (2, "", [])
    assert said.errors == ["good.py: no C++ compiler: install g++ (Debian: apt-get install g++), or set CXX to one"]


def test_a_gpu_that_is_not_there_is_said_to_be_absent(shell: Shell) -> None:
    shell.write("good.py")
    said = shell.run("optimize", "good.py", "--target", "cuda", environment={"CUDA_VISIBLE_DEVICES": ""})
    assert (said.code, said.out, said.left) == (2, "", [])
    assert said.errors == ["good.py: target cuda was asked for, but torch sees no GPU here; use target cpu"]


def test_a_port_in_use_is_named(shell: Shell) -> None:
    tls = Authority("test").issue(shell.place / "tls", "orchestrator")
    shown = dict(zip(TLS_VARIABLES, map(str, (tls.certificate, tls.key, tls.authority)), strict=True))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = shell.run("up", "--listen", f"127.0.0.1:{port}", environment=shown)
    assert (said.code, said.out, said.left) == (2, "", [])
    (error,) = said.errors
    assert f"cannot listen on 127.0.0.1:{port}: the port is in use" in error


def test_a_port_that_asks_for_no_certificate_is_refused(shell: Shell) -> None:
    said = shell.run("up", "--listen", "127.0.0.1:0")
    assert (said.code, said.out, said.left) == (2, "", [])
    (error,) = said.errors
    assert error.startswith("--listen 127.0.0.1:0: a port is a public place, on loopback too; set WARPSMITH_TLS_")
    assert shell.run("up", "--listen", "50051").errors == ["--listen 50051: write HOST:PORT"]


# The command with its own orchestrator process, archive and intake; the five agents are those of `testing`, so that
# trials come one after another until the disk refuses.
FAKED_AGENTS = """
from orchestrator import testing, servicer
servicer.agents_of = lambda settings, benchmarks: testing.World(
    gains={f"move{number}": 1.01 for number in range(40)}, seconds=0.05).agents()
import orchestrator.__main__
"""
ONLY_THE_ORCHESTRATOR = """
from functools import partial
from orchestrator.commands import client
client.LocalServices = partial(client.LocalServices, modules={"orchestrator": "faked_agents"})
"""


def find_process(ancestor: int, words: str) -> int:
    """The descendant whose command line holds `words`."""
    for process in jail_init.descendants(ancestor):
        if words in Path(f"/proc/{process}/cmdline").read_text().replace("\0", " "):
            return process
    raise AssertionError(f"no descendant runs {words}")


def wait_for(file: Path, words: str) -> None:
    """Waits until a file that is being written holds `words`."""
    end = time.monotonic() + 60
    while words not in file.read_text():
        assert time.monotonic() < end, file.read_text()
        time.sleep(0.02)


def test_a_disk_that_fills_up_during_a_run_leaves_what_was_found_readable(shell: Shell) -> None:
    shell.write("good.py")
    (shell.place / "faked_agents.py").write_text(FAKED_AGENTS)
    command = shell.start(
        "optimize",
        "good.py",
        "--target",
        "cpu",
        environment={
            "PYTHONPATH": str(shell.place),
            "WARPSMITH_BENCHMARK_ADDRESS": "127.0.0.1:1",
            "WARPSMITH_ARCHIVE_PATIENCE_SECONDS": "1",
        },
        program=ONLY_THE_ORCHESTRATOR + COMMAND,
    )
    wait_for(shell.place / "err", "good #3 ")
    # From now on the kernel refuses to let any file of the orchestrator grow past what the archive takes.
    size = (shell.place / "runs" / "warpsmith.sqlite3-wal").stat().st_size
    resource.prlimit(find_process(command.pid, "-m faked_agents"), resource.RLIMIT_FSIZE, (size, size))
    said = shell.end(command)
    assert (said.code, said.out, said.left) == (3, "", [])  # the machine's fault, not the input's
    (error,) = said.errors
    assert error.startswith("good.py: cannot write to sqlite:///")
    assert error.endswith("what was found so far stays readable")
    shown = shell.run("show").out
    assert "#3 (from " in shown
    assert "// ---- kernel.cpp" in shell.run("show", "--trial", "3").out
    assert "good" in shell.run("runs").out
