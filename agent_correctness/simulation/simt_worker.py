"""Runs a compiler, or what it made, inside a jailed worker: files and a command in, files and messages out.

The one idea: nothing here knows what the command is for. Each gets a fresh directory and a deadline, and its messages
are cut where they grow too long.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from google.protobuf.message import Message

from warpsmith.v1 import simulation_pb2

MOST_LOG_BYTES = 1 << 20


def _run(request: simulation_pb2.SimulationRequest) -> simulation_pb2.SimulationReply:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for file in request.files:
            path = directory / file.name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.content)
        program = request.command[0]
        if program.startswith("./"):
            (directory / program).chmod(0o700)
        environment = {**os.environ, "TMPDIR": name, "LC_ALL": "C", **request.environment}
        environment.pop("PYTHONPATH", None)
        reply = simulation_pb2.SimulationReply()
        with (directory / ".log").open("wb+") as log:
            try:
                reply.exit_code = subprocess.run(
                    list(request.command), cwd=directory, env=environment, stdin=subprocess.DEVNULL, stdout=log,
                    stderr=subprocess.STDOUT, timeout=request.limit_seconds, check=False,
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                reply.timed_out = True
            log.seek(0)
            reply.log = log.read(MOST_LOG_BYTES).decode(errors="replace").replace(f"{name}/", "")
        for wanted in request.results:
            path = directory / wanted
            if path.is_file():
                reply.results.add(name=wanted, content=path.read_bytes())
        return reply


METHODS: Mapping[str, tuple[type[Message], Callable[..., Message]]] = {
    "run": (simulation_pb2.SimulationRequest, _run),
}
