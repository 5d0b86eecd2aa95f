"""A network that is cut between two machines, which are namespaces here: packets vanish, and nobody is told.

Needs the right to make network namespaces; only these two send to each other.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from between import Between, agent, orchestrator
from processes import AGENTS, wait_until

from orchestrator import testing
from orchestrator.archive import Archive
from orchestrator.commands import client
from warpsmith.v1 import run_pb2, verdict_pb2

pytestmark = pytest.mark.faults

TRIALS = 20
BUDGET = run_pb2.Budget(wall_seconds=120, trial_count=TRIALS)
NETWORK = "198.18.7"
"""Of addresses for tests between networks (RFC 2544), known in the two namespaces alone."""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@dataclass
class Machines:
    """Two network namespaces with one cable between them: where the orchestrator is, and where the agents are."""

    name: str

    @property
    def orchestrators(self) -> str:
        return f"{self.name}o"

    @property
    def agents(self) -> str:
        return f"{self.name}a"

    def inside(self, namespace: str) -> tuple[str, ...]:
        """Before a command that runs there."""
        return ("ip", "netns", "exec", namespace)

    def cut(self) -> None:
        """What is sent arrives no more, on either side."""
        ip("-n", self.agents, "link", "set", "cable", "down")

    def mend(self) -> None:
        """It does again."""
        ip("-n", self.agents, "link", "set", "cable", "up")


@pytest.fixture
def machines() -> Iterator[Machines]:
    made = Machines(f"ws{secrets.token_hex(3)}")
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need ip and root")
    with ExitStack() as stack:
        for namespace in (made.orchestrators, made.agents):
            try:
                ip("netns", "add", namespace)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
            stack.callback(ip, "netns", "delete", namespace)
            ip("-n", namespace, "link", "set", "lo", "up")
        ip(
            "-n",
            made.orchestrators,
            "link",
            "add",
            "cable",
            "type",
            "veth",
            "peer",
            "name",
            "cable",
            "netns",
            made.agents,
        )
        for number, namespace in enumerate((made.orchestrators, made.agents), 1):
            ip("-n", namespace, "address", "add", f"{NETWORK}.{number}/24", "dev", "cable")
            ip("-n", namespace, "link", "set", "cable", "up")
        yield made


@pytest.fixture
def apart(machines: Machines, tmp_path: Path) -> Iterator[Between]:
    """An orchestrator on one machine, all agents on the other, and a client that reaches it without a network."""
    with ExitStack() as stack:
        there = machines.inside(machines.agents)
        addresses = {
            f"WARPSMITH_{name.upper()}_ADDRESS": agent(stack, tmp_path, name, there, f"{NETWORK}.2") for name in AGENTS
        }
        here = machines.inside(machines.orchestrators)
        yield orchestrator(stack, tmp_path, {**addresses, "DEADLINE_SECONDS": "1"}, {}, here)


def test_a_run_waits_for_agents_that_are_cut_off_and_charges_no_candidate(apart: Between, machines: Machines) -> None:
    run = client.create(apart.client, testing.task("cut"), BUDGET, "", fresh=True)
    cut = False

    def hear(event: run_pb2.RunEvent) -> None:
        nonlocal cut
        if event.trial.number == 3 and not cut:
            machines.cut()
            cut = True
            silences = apart.log.count("asked again")
            wait_until(lambda: apart.log.count("asked again") >= silences + 3, lambda: apart.log)
            machines.mend()

    ended = client.follow(apart.client, run.id, hear)
    assert cut
    assert ended.state == run_pb2.RUN_STATE_FASTER, f"{ended.message}\n{apart.log}"
    assert "ended early" not in ended.message
    archive = Archive.in_directory(apart.place / "runs")
    trials = archive.trials(run.id)
    archive.close()
    assert len({trial.candidate.program.digest for trial in trials}) == len(trials) == TRIALS
    assert {trial.verdict.state for trial in trials} == {verdict_pb2.VERDICT_STATE_PASS}
