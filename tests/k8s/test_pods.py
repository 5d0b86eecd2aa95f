"""The variables of the rendered pods are enough: all six services start with them alone, answer the kubelet, end."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import check
import pytest
import render
from authority import Authority

from orchestrator.serving.dialing import orchestrator_at
from warpsmith.errors import TokenRefused
from warpsmith.service import wait_until_healthy
from warpsmith.v1 import optimization_service_pb2

K8S = Path(__file__).parents[2] / "k8s"


@pytest.fixture(params=["plain", "mutual-tls"])
def pods(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, tuple[subprocess.Popen[bytes], str]]]:
    """Component → (process, its own loopback address); the ports are those of the manifests."""
    objects = render.render(K8S / "overlays" / "cpu")
    authority = None if request.param == "plain" else Authority("warpsmith")
    if authority is not None:
        for component in ("mutual-tls", "token"):
            objects = render.render(K8S / "components" / component, objects)
        (tmp_path / "token").write_text("a-token-of-this-test-alone\n")
    deployments = check.deployments(objects)
    network = f"127.{random.randint(64, 127)}.{random.randint(1, 254)}"
    hosts = {name: f"{network}.{number}" for number, name in enumerate(deployments, 1)}
    started: dict[str, tuple[subprocess.Popen[bytes], str]] = {}
    for name, deployment in deployments.items():
        container = check.service_container(deployment)
        variables = check.environment(deployment)
        for key, value in variables.items():
            if key.endswith("_ADDRESS"):
                peer = key.removeprefix("WARPSMITH_").removesuffix("_ADDRESS").lower()
                variables[key] = value.replace(f"{peer}:", f"{hosts[peer]}:")
        if authority is not None:
            tls = authority.issue(tmp_path / f"{name}-tls", name)
            mounted = "/etc/warpsmith/tls/"
            variables = {key: value.replace(mounted, f"{tls.key.parent}/") for key, value in variables.items()}
            variables = {
                key: value.replace("/etc/warpsmith/token/", f"{tmp_path}/") for key, value in variables.items()
            }
        own = {"WARPSMITH_HOST": hosts[name], "WARPSMITH_CACHE_DIR": str(tmp_path / name), "HOME": str(tmp_path)}
        if "WARPSMITH_RUNS" in variables:
            own["WARPSMITH_RUNS"] = str(tmp_path / "runs")
        environment = {"PATH": os.environ["PATH"], **variables, **own}
        log = (tmp_path / f"{name}.log").open("wb")
        process = subprocess.Popen([sys.executable, "-m", *container["args"]], env=environment, stdout=log, stderr=log)
        log.close()
        started[name] = process, hosts[name]
    yield started
    for process, _ in started.values():
        process.kill()
        process.wait()


def test_the_pods_environment_is_enough_for_all_six_services(
    pods: dict[str, tuple[subprocess.Popen[bytes], str]], tmp_path: Path
) -> None:
    for name, (_, host) in pods.items():
        assert wait_until_healthy(f"{host}:{check.HEALTH}", 60), name
        with urllib.request.urlopen(f"http://{host}:{check.METRICS}/metrics", timeout=10) as reply:
            series = [line for line in reply.read().decode().splitlines() if not line.startswith("#")]
        assert 20 < len(series) <= 2000
    with_tls = (tmp_path / "orchestrator-tls").exists()
    tls = Authority.issued(tmp_path / "orchestrator-tls") if with_tls else None
    address = f"{pods['orchestrator'][1]}:{check.GRPC}"
    if with_tls:
        with pytest.raises(TokenRefused):
            orchestrator_at(address, tls).ListRuns(optimization_service_pb2.ListRunsRequest())
    api = orchestrator_at(address, tls, tmp_path / "token" if with_tls else None)
    assert not api.ListRuns(optimization_service_pb2.ListRunsRequest()).runs
    is_plain = wait_until_healthy(address, 1 if with_tls else 30)
    assert is_plain != with_tls, "plain text is refused where certificates are demanded"
    begin = time.monotonic()
    for process, _ in pods.values():
        process.send_signal(signal.SIGTERM)
    assert {name: process.wait(30) for name, (process, _) in pods.items()} == dict.fromkeys(pods, 0)
    assert time.monotonic() - begin < 25, "idle services wait for nothing"
