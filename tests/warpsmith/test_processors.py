"""How many processors a process may use, as its affinity and the files of its control groups say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from warpsmith.sandbox.processors import processor_count


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 64 processors that the scheduler would all give us, and a group inside another."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/pod/container\n")
    (tmp_path / "sys/fs/cgroup/pod/container").mkdir(parents=True)
    return tmp_path


def allow(node: Path, group: str, text: str) -> None:
    (node / "sys/fs/cgroup" / group / "cpu.max").write_text(f"{text}\n")


def test_without_a_quota_it_is_the_affinity(node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allow(node, "pod/container", "max 100000")
    assert processor_count(node) == 64
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5})
    assert processor_count(node) == 2


@pytest.mark.parametrize(("quota", "count"), [("400000", 4), ("150000", 2), ("50000", 1)])
def test_a_quota_of_the_container_is_less_than_the_node(node: Path, quota: str, count: int) -> None:
    allow(node, "pod/container", f"{quota} 100000")
    assert processor_count(node) == count


def test_the_least_quota_around_holds(node: Path) -> None:
    allow(node, "pod/container", "max 100000")
    allow(node, "pod", "300000 100000")
    assert processor_count(node) == 3


def test_a_container_that_sees_only_its_own_group_finds_its_quota(node: Path) -> None:
    (node / "proc/self/cgroup").write_text("0::/\n")
    allow(node, ".", "200000 100000")
    assert processor_count(node) == 2


def test_a_machine_without_control_groups_has_what_the_affinity_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert processor_count(tmp_path) == 1


def test_this_machine_has_one_at_least() -> None:
    assert 1 <= processor_count() <= (os.cpu_count() or 1)


def test_what_is_started_on_all_processors_is_not_bound_as_its_starter_is() -> None:
    """OpenMP binds the thread that loads it, and processes inherit that."""
    text = """
import os, subprocess
from warpsmith.sandbox import processors
processors.note_allowed()
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
with processors.on_all_processors():
    print(subprocess.check_output(["nproc"], text=True).strip())
print(len(os.sched_getaffinity(0)))
"""
    told = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout
    assert told.split() == [str(len(os.sched_getaffinity(0))), "1"]
