"""A real Prometheus scrapes a real run on this machine, and every dashboard expression must return data.

    python k8s/monitoring/live_check.py [--model scripted|vllm] [--pictures DIRECTORY]

The run is a small module's, with a language model in the place of the reasoner, as a writer of kernels and as one that
proposes inputs. The model is a real vLLM with a tiny random one where `make test-vllm` has made its environment; else a
scripted server, and vLLM's own panels are not asked. `--pictures` runs two modules longer, and draws the dashboards.

The one idea: what a panel would draw is asked of Prometheus over the time of the run; a panel that is empty then names
a metric that no service exports, or labels that never meet. Also prints each service's scrape: seconds and series. It
tests no alert: that is rules_test.yaml.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent / "tests" / "model_server"))

import kernel_replies  # noqa: E402
import metrics_list  # noqa: E402
import model_replies  # noqa: E402
import pictures  # noqa: E402
import scripted_model  # noqa: E402
import vllm_server  # noqa: E402

MODULE = """import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return {expression}


def get_inputs():
    return [torch.randn({shape})]


def get_init_inputs():
    return []
"""
SMALL = {
    "gelu": ("torch.clamp(torch.nn.functional.gelu(x * 1.5 - 0.25), -2.0, 2.0) + 1.0", "256, 2048"),
    "softmax": ("torch.softmax(x * 0.5, dim=1) * 2.0", "256, 2048"),
}
"""Name → what a module computes, and on what shape: small, because two processors do all the work."""
BUDGET = ("--budget", "8s", "--trials", "12")
PICTURE_BUDGET = ("--budget", "25s")
SCRAPE_SECONDS, SERIES = 0.25, 2000
"""Most that one scrape of a service may take, and hold."""
RUN_SECONDS = 660.0
"""After which a run is cut off: what was scraped until then is asked."""
START_SECONDS = 30.0
RATE_INTERVAL = "20s"


class Prometheus:
    """A server of our own on loopback, scraping what a runs directory names."""

    def __init__(self, directory: Path, runs: Path, model: str = "") -> None:
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
                },
                {
                    "job_name": "vllm",
                    "static_configs": [{"targets": [model], "labels": {"service": "vllm"}}] * bool(model),
                },
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

    def query_range(self, expression: str, start: float, end: float, step: float = 1.0) -> list[dict[str, Any]]:
        """The series of an expression over a time, a value every `step` seconds."""
        parameters = urllib.parse.urlencode({"query": expression, "start": start, "end": end, "step": step})
        with urllib.request.urlopen(f"http://{self._address}/api/v1/query_range?{parameters}", timeout=30) as reply:
            found: list[dict[str, Any]] = json.load(reply)["data"]["result"]
        return found

    def stop(self) -> None:
        """Ends the server."""
        self._process.terminate()
        self._process.wait(timeout=30)
        self._log.close()


def filled(expression: str, seconds: float) -> str:
    """An expression of a dashboard with Grafana's variables set for a range of so many seconds."""
    chosen = {"$__rate_interval": RATE_INTERVAL, "$__range": f"{math.ceil(seconds)}s", "$namespace": ".*", "$run": ".*"}
    for variable, value in chosen.items():
        expression = expression.replace(variable, value)
    return expression


def expressions(seconds: float) -> dict[str, str]:
    """Where → PromQL, of every target of every dashboard, every recorded rule and every promised metric."""
    found = {f"promised: {what}": text for what, text in metrics_list.PROMISED.items()}
    for path in sorted((HERE / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                where = f"{path.stem}: {panel['title']}: {target['legendFormat']}"
                found[where] = filled(target["expr"], seconds)
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


@contextlib.contextmanager
def language_model(kind: str, directory: Path) -> Iterator[str]:
    """The address of a server in its role, while it is up."""
    if kind == "vllm":
        with vllm_server.serving(directory) as url:
            yield url
    else:
        with scripted_model.ScriptedModel(model_replies.illegal, answered) as model:
            yield model.url


def answered(asked: scripted_model.Asked) -> scripted_model.Reply:
    """What a model says to the question of each agent: options, inputs, or a kernel (which is a wrong one here)."""
    wanted = asked.body.get("response_format", {}).get("json_schema", {}).get("schema", {}).get("properties", {})
    if "hypotheses" in wanted:
        return model_replies.good(asked)
    if "inputs" in wanted:
        return scripted_model.streamed('{"inputs": [{"base": "normal", "scale": 10.0}]}')
    return kernel_replies.good(asked)


def run(modules: Sequence[Path], budget: Sequence[str], runs: Path, model: str) -> None:
    """Optimises the modules one after the other in one command."""
    warpsmith = Path(sys.executable).parent / "warpsmith"
    command = [warpsmith, "optimize", *modules, *budget, "--runs", runs, "--target", "cpu"]
    command += ["--plugin", "reasoner=vllm", "--plugin", "synthesizer=vllm"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={
            **os.environ,
            "WARPSMITH_METRICS_PORT": "0",
            "WARPSMITH_MODEL_URL": model,
            "WARPSMITH_MODEL_ASSISTS": "correctness",
        },
    )
    try:
        said, _ = process.communicate(timeout=RUN_SECONDS)
    except subprocess.TimeoutExpired:
        print(f"cut off after {RUN_SECONDS:.0f} s")
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=60)
        return
    if process.returncode not in (0, 1):  # whether a kernel was found is not what is asked here
        raise SystemExit(said)


def draw(prometheus: Prometheus, start: float, end: float, directory: Path) -> None:
    """Writes a picture of each dashboard."""
    directory.mkdir(parents=True, exist_ok=True)
    step = max(1.0, (end - start) / 150)

    def ask(expression: str, at_the_end: bool) -> list[tuple[dict[str, str], list[tuple[float, float]]]]:
        text = filled(expression, end - start)
        found = prometheus.query_range(text, end - 5 * step if at_the_end else start, end, step)
        points = [
            [(at - start, float(value)) for at, value in each["values"] if math.isfinite(float(value))]
            for each in found
        ]
        return [(each["metric"], values) for each, values in zip(found, points, strict=True)]

    modules = ", ".join(SMALL)
    caption = (
        f"A run of {modules} on {os.cpu_count()} processors (target cpu), scraped every second for {end - start:.0f} s"
    )
    for path in sorted((HERE / "dashboards").glob("*.json")):
        file = directory / f"{path.stem}.svg"
        file.write_text(pictures.picture(json.loads(path.read_text()), ask, caption))
        print(f"drawn: {file}")


def main() -> int:
    """Runs, scrapes, asks; 1 when a panel is empty or a scrape is too large."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = "vllm" if vllm_server.is_installed() else "scripted"
    parser.add_argument("--model", choices=("vllm", "scripted"), default=default, help=f"here: {default}")
    parser.add_argument("--pictures", type=Path, help="where to draw the dashboards")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="warpsmith-monitoring-") as name, contextlib.ExitStack() as stack:
        directory, runs = Path(name), Path(name) / "runs"
        modules = [directory / f"{name}.py" for name in (SMALL if options.pictures else ("gelu",))]
        for module in modules:
            expression, shape = SMALL[module.stem]
            module.write_text(MODULE.format(expression=expression, shape=shape))
        budget = PICTURE_BUDGET if options.pictures else BUDGET
        url = stack.enter_context(language_model(options.model, directory))
        server = url.removeprefix("http://").removesuffix("/v1") if options.model == "vllm" else ""
        prometheus = Prometheus(directory, runs, server)
        stack.callback(prometheus.stop)
        start = time.time()
        run(modules, budget, runs, url)
        end = time.time()
        print(f"a run of {end - start:.0f} s was scraped every second")
        asked = expressions(end - start)
        unasked = [where for where, text in asked.items() if ("vllm:" in text and not server) or "DCGM_" in text]
        for where in unasked:
            del asked[where]
        print(f"{len(unasked)} expressions are not asked: of DCGM's, and of vLLM's own without `make test-vllm`")
        empty = [where for where, text in asked.items() if not has_data(prometheus.query_range(text, start, end))]
        print(f"{len(asked) - len(empty)} of {len(asked)} expressions have data")
        for where in empty:
            print(f"  no data: {where}")
        if options.pictures:
            draw(prometheus, start, end - 4, options.pictures)  # the services end with the command
        return 0 if scrapes_are_small(prometheus, start, end) and not empty else 1


if __name__ == "__main__":
    sys.exit(main())
