"""The live page's container: its variables are enough, it takes the secret's token and no other, and it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import check
import httpx
import pytest
import render

from orchestrator.web.testing import told_orchestrator

K8S = Path(__file__).parents[2] / "k8s"
TOKEN = "of a secret, and long enough".replace(" ", "-") + "-0123456789"


@pytest.fixture
def port() -> int:
    """One that is free at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def test_the_variables_of_its_container_are_enough(tmp_path: Path, port: int) -> None:
    objects = render.render(K8S / "examples" / "live-page")
    pod = check.deployments(objects)["orchestrator"]["spec"]["template"]["spec"]
    (container,) = (each for each in pod["containers"] if each["name"] == "page")
    variables = {each["name"]: each["value"] for each in container["env"]}
    (tmp_path / "token").write_text(TOKEN)
    with told_orchestrator() as told:
        own = {
            "WARPSMITH_WEB_LISTEN": variables["WARPSMITH_WEB_LISTEN"].replace(f":{check.PAGE}", f":{port}"),
            "WARPSMITH_WEB_TOKEN_FILE": str(tmp_path / Path(variables["WARPSMITH_WEB_TOKEN_FILE"]).name),
            "WARPSMITH_ORCHESTRATOR_ADDRESS": told.address,
            "HOME": str(tmp_path),
        }
        assert own.keys() == variables.keys()
        paths = {each: os.environ[each] for each in ("PATH", "PYTHONPATH") if each in os.environ}
        command = [sys.executable, "-m", *container["args"]]
        process = subprocess.Popen(command, env=paths | own, stdout=subprocess.PIPE, text=True)
        with process:
            assert process.stdout is not None
            said = process.stdout.readline()  # where it is, once it serves
            assert said == f"http://0.0.0.0:{port}\n"
            url = f"http://127.0.0.1:{port}/"
            run = told.begin()
            answer = httpx.get(url, headers={"Authorization": f"Bearer {TOKEN}"})
            assert run.run.id in answer.text
            assert httpx.get(url, headers={"Authorization": "Bearer another"}).status_code == 401
            run.end()
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 128 + signal.SIGTERM
