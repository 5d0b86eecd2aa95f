"""A real Prometheus scrapes a real run on this machine, and every dashboard expression must return data.

The run is a small module's, with a scripted server in the language model's place, so that its metrics move too.

The one idea: what a panel would draw is asked of Prometheus over the time of the run; a panel that is empty then names
a metric that nobody exports, or labels that never meet. Also prints each service's scrape: seconds and series. It tests
no alert: that is rules_test.yaml.
"""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent / "tests" / "model_server"))

import model_replies  # noqa: E402
import scripted_model  # noqa: E402

MODULE = """import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.clamp(torch.nn.functional.gelu(x * 1.5 - 0.25), -2.0, 2.0) + 1.0


def get_inputs():
    return [torch.randn(256, 2048)]


def get_init_inputs():
    return []
"""
BUDGET = ("--budget", "8s", "--trials", "12")
SCRAPE_SECONDS, SERIES = 0.05, 2000
"""Most that one scrape of a service may take, and hold."""
RUN_SECONDS = 900.0
START_SECONDS = 30.0
VARIABLES = {"$__rate_interval": "20s", "$__range": "600s"}


class Prometheus:
    """A server of our own on loopback, scraping what a runs directory names."""

    def __init__(self, directory: Path, runs: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._address = f"127.0.0.1:{free.getsockname()[1]}"
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(HERE / "rules.yaml")],
            "scrape_configs": [
                {
                    "job_name": "warpsmith",
                    "file_sd_configs": [{"files": [str(runs / "prometheus_targets.json")], "refresh_interval": "1s"}],
                }
            ],
        }
        file = directory / "prometheus.yaml"
        file.write_text(yaml.safe_dump(config))
        self._log = (directory / "prometheus.log").open("w")
        self._process = subprocess.Popen(
            ["prometheus", f"--config.file={file}", f"--storage.tsdb.path={directory / 'series'}",
             f"--web.listen-address={self._address}"],
            stdout=self._log,
            stderr=self._log,
        )  # fmt: skip
        deadline = time.monotonic() + START_SECONDS
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"prometheus did not start:\n{(directory / 'prometheus.log').read_text()}")
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self._address}/-/ready", timeout=2) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False

    def query_range(self, expression: str, start: float, end: float) -> list[dict[str, Any]]:
        """The series of an expression over a time, a value a second."""
        parameters = urllib.parse.urlencode({"query": expression, "start": start, "end": end, "step": 1})
        with urllib.request.urlopen(f"http://{self._address}/api/v1/query_range?{parameters}", timeout=30) as reply:
            found: list[dict[str, Any]] = json.load(reply)["data"]["result"]
        return found

    def stop(self) -> None:
        """Ends the server."""
        self._process.terminate()
        self._process.wait(timeout=30)
        self._log.close()


def expressions() -> dict[str, str]:
    """Where → PromQL, of every target of every dashboard and every recorded rule."""
    found = {}
    for path in sorted((HERE / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                text = target["expr"]
                for variable, value in VARIABLES.items():
                    text = text.replace(variable, value)
                found[f"{path.stem}: {panel['title']}: {target['legendFormat']}"] = text
    for group in yaml.safe_load((HERE / "rules.yaml").read_text())["groups"]:
        found |= {f"rule {rule['record']}": rule["record"] for rule in group["rules"] if "record" in rule}
    return found


def has_data(series: list[dict[str, Any]]) -> bool:
    """Whether some value is a finite number."""
    return any(math.isfinite(float(value)) for each in series for _, value in each["values"])


def scrapes_are_small(prometheus: Prometheus, start: float, end: float) -> bool:
    """Prints scrape times and series of each service; whether median times and all counts are in bounds."""
    fine = True
    for each in prometheus.query_range("scrape_duration_seconds", start, end):
        service = each["metric"]["service"]
        seconds = sorted(float(value) for _, value in each["values"])
        count = prometheus.query_range(f'scrape_samples_scraped{{service="{service}"}}', start, end)
        most = max(float(value) for one in count for _, value in one["values"])
        median = seconds[len(seconds) // 2]
        times = f"{median * 1e3:5.1f} ms median, {seconds[-1] * 1e3:6.1f} ms longest"
        print(f"  {service:<14}scrape {times}, {most:4.0f} series")
        fine &= median <= SCRAPE_SECONDS and most <= SERIES
    return fine


def main() -> int:
    """Runs, scrapes, asks; 1 when a panel is empty or a scrape is too large."""
    with tempfile.TemporaryDirectory(prefix="warpsmith-monitoring-") as name:
        directory, runs = Path(name), Path(name) / "runs"
        prometheus = Prometheus(directory, runs)
        try:
            start = time.time()
            warpsmith = Path(sys.executable).parent / "warpsmith"
            module = directory / "gelu.py"
            module.write_text(MODULE)
            command = [warpsmith, "optimize", module, *BUDGET, "--runs", runs, "--target", "cpu"]
            with scripted_model.ScriptedModel(model_replies.illegal, model_replies.good) as model:
                environment = {**os.environ, "WARPSMITH_MODEL_URL": model.url}
                finished = subprocess.run(
                    [*command, "--plugin", "reasoner=vllm"],
                    capture_output=True,
                    text=True,
                    timeout=RUN_SECONDS,
                    check=False,
                    env=environment,
                )
            if finished.returncode:
                print(finished.stdout, finished.stderr, sep="\n", file=sys.stderr)
                return 1
            end = time.time()
            print(f"a run of {end - start:.0f} s was scraped every second")
            asked = expressions()
            empty = [where for where, text in asked.items() if not has_data(prometheus.query_range(text, start, end))]
            print(f"{len(asked) - len(empty)} of {len(asked)} expressions have data")
            for where in empty:
                print(f"  no data: {where}")
            return 0 if scrapes_are_small(prometheus, start, end) and not empty else 1
        finally:
            prometheus.stop()


if __name__ == "__main__":
    sys.exit(main())
