"""`warpsmith up --web` whole: a real module submitted to real services, stopped, and all of it gone in the end."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.services
ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-P", "-c", "from orchestrator.commands.cli import main; main()"]


def test_a_module_is_submitted_to_real_services_and_stopped(tmp_path: Path) -> None:
    command = [*COMMAND, "up", "--web", "--web-listen", "127.0.0.1:0", "--runs", "runs"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as up:
        assert up.stderr is not None
        login = next(found[1] for line in up.stderr if (found := re.match(r"page +(http\S+)", line)))
        url = login.partition("/login")[0]
        with httpx.Client(base_url=url, timeout=200) as browser:
            assert browser.get(login).headers["location"] == "/"
            form = {"budget": "1h", "target": "cpu"}
            module = {"file": ("softmax.py", (ROOT / "examples" / "softmax.py").read_bytes())}
            own = {"Origin": url, "Sec-Fetch-Site": "same-origin"}
            bad = browser.post(
                "/submit", data=form, files={"file": ("bad.py", b"import nothing_of_that_name\n")}, headers=own
            )
            assert (bad.status_code, "defines no class Model" in bad.text) == (422, True)
            taken = browser.post("/submit", data=form, files=module, headers=own)
            run = taken.headers["location"]
            assert "softmax" in browser.get("/").text
            assert browser.post(f"{run}/cancel", headers=own).headers["location"] == run
            with browser.stream("GET", f"{run}/events") as news:
                assert any(line == "event: end" for line in news.iter_lines())
            assert "CANCELLED" in browser.get(run).text
        up.send_signal(signal.SIGTERM)
        assert up.wait(60) == 128 + signal.SIGTERM
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)
