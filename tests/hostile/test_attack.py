"""`warpsmith doctor --attack`: every probe gets nowhere on the rung under test, and gets out where there is no jail."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from orchestrator.commands import doctor_attack
from orchestrator.commands.doctor_attack import PROBES, Probe
from warpsmith.sandbox.jail import Rung

pytestmark = pytest.mark.hostile


@pytest.fixture(scope="module")
def outside() -> Iterator[doctor_attack.Target]:
    with doctor_attack.target() as made:
        yield made


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
def test_a_probe_of_the_jail_gets_nowhere(probe: Probe, rung: Rung, outside: doctor_attack.Target) -> None:
    finding = doctor_attack.run(probe, rung, outside)
    assert finding.held, finding.detail


WITHOUT = [
    "read a secret file",
    "write beside the secret",
    "connect to a service on loopback",
    "connect to a socket in the file system",
    "connect to services as a debugger may",
    "write through /proc as a debugger may",
    "read the environment of others",
    "read the command lines of others",
    "see shared memory of others",
]


@pytest.mark.parametrize("name", WITHOUT)
def test_a_probe_gets_out_where_there_is_no_jail(name: str, outside: doctor_attack.Target) -> None:
    probe = next(each for each in PROBES if each.name == name)
    finding = doctor_attack.run(probe, Rung.NONE, outside)
    assert not finding.held
    assert doctor_attack.exit_code([finding]) == 1
    assert f"BROKEN on none: {name}" in "\n".join(doctor_attack.rows([finding]))


def test_without_a_rung_there_is_nothing_to_attack() -> None:
    assert doctor_attack.attack(lambda: ()) == []
    assert doctor_attack.exit_code([]) == 3
