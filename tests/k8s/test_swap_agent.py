"""The overlay of ten lines that replaces an agent, with the plugin of docs/plugins.md: what its pod would run, runs."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import check
import render

from warpsmith import service, testing
from warpsmith.v1 import reasoning_service_pb2_grpc

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "examples" / "agents" / "python"


def installed(directory: Path) -> None:
    """The plugin as pip would lay it down: its module, and a distribution with its entry points."""
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]
    shutil.copy(PLUGIN / "least_traffic.py", directory)
    held = directory / f"warpsmith_least_traffic-{project['version']}.dist-info"
    held.mkdir()
    (held / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = [
        line
        for group, names in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {place}" for name, place in names.items()))
    ]
    (held / "entry_points.txt").write_text("\n".join(lines) + "\n")


def test_the_swapped_reasoning_pod_serves_the_tutorials_plugin(tmp_path: Path) -> None:
    site, ports = tmp_path / "site", tmp_path / "ports"
    site.mkdir()
    installed(site)
    pod = check.deployments(render.render(ROOT / "k8s" / "examples" / "swap-agent"))["reasoning"]
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(site),
        **check.environment(pod),
        "WARPSMITH_HOST": "127.0.0.1",
        "WARPSMITH_PORT": "0",
        "WARPSMITH_HEALTH_PORT": "none",
        "WARPSMITH_METRICS_PORT": "none",
        "WARPSMITH_PORT_FILE": str(ports),
    }
    command = [sys.executable, "-m", *check.service_container(pod)["args"]]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not ports.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        address = f"127.0.0.1:{ports.read_text().split()[0]}"
        assert testing.check_server("reasoner", address) == []
        stub = service.dial(reasoning_service_pb2_grpc.ReasoningServiceStub, address)
        proposed = stub.ProposeHypotheses(testing.reasoning_request()).hypotheses
        assert {hypothesis.source for hypothesis in proposed} == {"least_traffic"}
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
