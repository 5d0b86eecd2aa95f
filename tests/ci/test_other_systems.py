"""What who is not on Linux is told: in one line, and before anything is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_setup_names_the_system_that_is_wanted_before_it_installs(tmp_path: Path) -> None:
    (tmp_path / "uname").write_text("#!/bin/sh\necho Darwin\n")
    (tmp_path / "uname").chmod(0o755)
    environment = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "PYTHON": sys.executable}
    environment["VENV"] = str(tmp_path / "venv")
    command = ["bash", str(ROOT / ".ci" / "setup.sh")]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "  - Linux; this is Darwin: on Windows use WSL 2, on macOS a Linux virtual machine" in ran.stderr
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize(("platform", "module"), [("darwin", "orchestrator.commands.cli"), ("win32", "orchestrator")])
def test_the_command_and_the_api_name_it_too(platform: str, module: str) -> None:
    program = f"import sys; sys.platform = {platform!r}; import {module}"
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert f"ImportError: Warpsmith runs on Linux, and this is {platform}: on Windows use WSL 2" in ran.stderr
