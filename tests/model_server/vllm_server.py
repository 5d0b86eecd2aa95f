"""A real vLLM on loopback that serves the tiny random model: for what only the real server can show."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
VLLM = ROOT / ".venv-vllm" / "bin"
START_SECONDS = 400.0


def is_installed() -> bool:
    """Whether `make test-vllm` has made its environment."""
    return (VLLM / "vllm").exists()


@contextmanager
def serving(directory: Path) -> Iterator[str]:
    """Base address of a server that is up; model and log lie in the directory.

    Raises:
        RuntimeError: it does not start.
    """
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    environment = {**os.environ, **quiet}
    script = ROOT / "tests" / "model_server" / "tiny_model.py"
    subprocess.run([VLLM / "python", script, directory / "tiny"], env=environment, check=True, timeout=300)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [VLLM / "vllm", "serve", directory / "tiny", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "2048", "--served-model-name", "tiny"]
    log = directory / "log"
    with log.open("wb") as output:
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _answers(f"http://127.0.0.1:{port}/health"):
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("vLLM does not start:\n" + log.read_text()[-3000:])
            time.sleep(1.0)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2.0) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False
