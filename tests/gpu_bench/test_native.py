"""Sources of our own in C++, built where they are needed: in a jail on any rung."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import warpsmith
from gpu_bench import native
from gpu_bench.machine import worker_policy
from warpsmith.sandbox import jail
from warpsmith.v1 import task_pb2

SCRIPT = """
import subprocess, sys
from pathlib import Path
from gpu_bench import native
sys.exit(subprocess.run([native.built(Path(sys.argv[1]), (), {})], check=False).returncode)
"""


@pytest.mark.parametrize("rung", jail.probe(), ids=lambda rung: rung.value)
def test_what_is_built_in_a_jail_runs_there(rung: jail.Rung, tmp_path: Path) -> None:
    source = tmp_path / "seven.cpp"
    source.write_text("int main() { return 7; }")
    packages = [Path(module.__path__[0]) for module in (sys.modules["gpu_bench"], warpsmith)]
    roots = [package.parent for package in packages]
    policy = worker_policy(task_pb2.TARGET_CPU)
    policy = replace(policy, readable=(*policy.readable, *packages, tmp_path))
    policy = replace(policy, listable=(*policy.listable, *roots))
    paths = os.pathsep.join([*map(str, roots), *jail.package_paths()])
    jailed = jail.Jailed(
        [sys.executable, "-c", SCRIPT, str(source)], policy, rung, env={"PYTHONPATH": paths, "PATH": os.environ["PATH"]}
    )
    jailed.wait(60.0)
    assert jailed.close().code == 7


def test_a_source_that_does_not_build_says_so(tmp_path: Path) -> None:
    (tmp_path / "bad.cpp").write_text("no program")
    with pytest.raises(native.Infrastructure, match=r"bad\.cpp does not build"):
        native.built(tmp_path / "bad.cpp", (), {})
