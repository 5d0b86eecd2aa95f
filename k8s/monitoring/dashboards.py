"""Makes the three Grafana dashboards and the Prometheus operator's rules: `make monitoring`.

The one idea: a panel is a title, a kind, expressions and a unit, a third of the width each; all else that Grafana wants
in JSON is the same for all. `--check` fails when a made file is not what this file and rules.yaml say.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
DASHBOARDS = HERE / "dashboards"
OPERATOR_RULES = HERE.parent / "components" / "prometheus-operator" / "rules.yaml"

WIDTH, HEIGHT, COLUMNS = 8, 8, 3


@dataclass(frozen=True)
class Panel:
    """One picture."""

    title: str
    says: str
    """What it shows and how to read it."""
    queries: dict[str, str]
    """Legend → PromQL."""
    unit: str = "short"
    kind: str = "timeseries"
    stacked: bool = False


THROUGHPUT = [
    Panel(
        "Trials a second",
        "On average over the range shown.",
        {"trials": "sum(rate(warpsmith_trials_total[$__range]))"},
        kind="stat",
    ),
    Panel(
        "Trials an hour, by how far they came",
        "The search's speed. Much verify_fail: wrong code is written; much duplicate: the space is used up.",
        {"{{outcome}}": "sum by (outcome) (rate(warpsmith_trials_total[$__rate_interval])) * 3600"},
        stacked=True,
    ),
    Panel(
        "Funnel in the range shown",
        "Proposed, then compiled, then right, then timed, then faster than the fastest baseline beyond noise.",
        {
            "1 proposed": "sum(increase(warpsmith_trials_total[$__range]))",
            "2 compiled": 'sum(increase(warpsmith_trials_total{outcome=~"verify_fail|measure_fail|timed"}[$__range]))',
            "3 right": 'sum(increase(warpsmith_trials_total{outcome=~"measure_fail|timed"}[$__range]))',
            "4 timed": 'sum(increase(warpsmith_trials_total{outcome="timed"}[$__range]))',
            "5 faster": "sum(increase(warpsmith_trials_faster_total[$__range]))",
        },
        kind="bargauge",
    ),
    Panel(
        "Best speedup of a task over time",
        "Screened, against the fastest baseline; by the beginning of the task's digest. The final measurement decides.",
        {"{{task}}": "max by (task) (warpsmith_task_best_speedup_ratio)"},
        unit="x",
    ),
    Panel(
        "Leaderboard",
        "Best screened speedup of the tasks that moved last.",
        {"speedup": "sort_desc(max by (task) (warpsmith_task_best_speedup_ratio))"},
        unit="x",
        kind="table",
    ),
    Panel(
        "How near to the floor",
        "Floor over the best time: 100 % is as fast as the hardware allows, and there the search stops.",
        {"{{task}}": "max by (task) (warpsmith_task_floor_ratio)"},
        unit="percentunit",
    ),
    Panel(
        "Verdicts, by kind",
        "Why candidates fail. CHEAT and SUSPECT deserve a look at the trial; INFRA is ours and no candidate's.",
        {"{{kind}}": "sum by (kind) (increase(warpsmith_verdicts_total[$__range])) > 0"},
        kind="bargauge",
    ),
    Panel(
        "Runs that ended, by state",
        "In the range shown.",
        {"{{state}}": "sum by (state) (increase(warpsmith_runs_total[$__range]))"},
        kind="bargauge",
    ),
    Panel(
        "Device time per improvement",
        "Seconds for which the device was held, over trials that beat the fastest baseline (over 1 while none did).",
        {
            "seconds": "sum(increase(warpsmith_bench_device_seconds_sum[$__range]))"
            " / clamp_min(sum(increase(warpsmith_trials_faster_total[$__range])), 1)"
        },
        unit="s",
        kind="stat",
    ),
    Panel(
        "Time of each stage, 95 %",
        "Waiting for the device left out.",
        {
            "{{stage}}": "histogram_quantile(0.95, sum by (stage, le)"
            " (rate(warpsmith_stage_duration_seconds_bucket[$__rate_interval])))"
        },
        unit="s",
    ),
]

FLEET = [
    Panel(
        "Services up",
        "Pods that answer their scrape, by service.",
        {"{{service}}": 'sum by (service) (up{job="warpsmith"})'},
        kind="stat",
    ),
    Panel(
        "Runs queued or under way",
        "One orchestrator searches one run at a time.",
        {"runs": "sum(warpsmith_runs_active)"},
        kind="stat",
    ),
    Panel(
        "Stages under way",
        "Where the pipeline stands; a stage that stays at its height is the bottleneck.",
        {"{{stage}}": "sum by (stage) (warpsmith_stage_active)"},
        stacked=True,
    ),
    Panel(
        "Calls a second, by service",
        "gRPC calls answered.",
        {"{{service}}": "sum by (service) (rate(warpsmith_grpc_calls_total[$__rate_interval]))"},
        unit="reqps",
    ),
    Panel(
        "Failed calls, by service",
        "Share of calls that failed on our side; 5 % for ten minutes is an alert.",
        {
            "{{service}}": "("
            "sum by (service) (rate(warpsmith_grpc_calls_total"
            '{code=~"UNKNOWN|INTERNAL|UNAVAILABLE|DEADLINE_EXCEEDED|DATA_LOSS"}[$__rate_interval]))'
            " or 0 * sum by (service) (rate(warpsmith_grpc_calls_total[$__rate_interval]))"
            ") / sum by (service) (rate(warpsmith_grpc_calls_total[$__rate_interval]))"
        },
        unit="percentunit",
    ),
    Panel(
        "Time of a call, 95 %",
        "By method.",
        {
            "{{method}}": "histogram_quantile(0.95, sum by (method, le)"
            " (rate(warpsmith_grpc_call_duration_seconds_bucket[$__rate_interval])))"
        },
        unit="s",
    ),
    Panel(
        "Device held by measurements",
        "Share of time; the rest is checking, compiling, or waiting for candidates.",
        {"{{instance}}": "sum by (instance) (rate(warpsmith_bench_device_seconds_sum[$__rate_interval]))"},
        unit="percentunit",
    ),
    Panel(
        "Devices",
        "In all, timed on now, put aside because they say that they cannot be trusted; and measurements that wait.",
        {
            "in all": "sum(warpsmith_devices)",
            "timing": "sum(warpsmith_devices_timing)",
            "put aside": "sum(warpsmith_devices_aside)",
            "waiting": "sum(warpsmith_waiting_to_time)",
        },
    ),
    Panel(
        "Workers started and lost",
        "Jailed processes, in the range shown. A candidate may take its worker with it; an agent should lose none.",
        {
            "started {{worker}}": "sum by (worker) (increase(warpsmith_worker_starts_total[$__range]))",
            "lost {{worker}} {{reason}}": "sum by (worker, reason) (increase(warpsmith_worker_losses_total[$__range]))",
        },
        kind="bargauge",
    ),
    Panel(
        "Compilations found in the cache",
        "In the range shown.",
        {"{{outcome}}": "sum by (outcome) (increase(warpsmith_compile_cache_lookups_total[$__range]))"},
        kind="bargauge",
    ),
    Panel(
        "Measurements a second",
        "By tier and outcome.",
        {"{{tier}} {{outcome}}": "sum by (tier, outcome) (rate(warpsmith_bench_measurements_total[$__rate_interval]))"},
        stacked=True,
    ),
    Panel(
        "Noise floor",
        "How far two equal programs differ; a gain below three times this is not called a gain.",
        {"{{instance}}": "max by (instance) (warpsmith_bench_noise_floor_ratio)"},
        unit="percentunit",
    ),
    Panel(
        "Clock after the last measurement",
        "0 when unknown.",
        {"{{instance}}": "max by (instance) (warpsmith_bench_clock_hertz)"},
        unit="hertz",
    ),
    Panel(
        "Throttled, and impossible times",
        "1 while a throttle reason was in force; flags count times that physics forbids or that nobody reached here.",
        {
            "{{reason}}": "max by (reason) (warpsmith_bench_throttled)",
            "{{flag}}": "sum by (flag) (increase(warpsmith_bench_flagged_timings_total[$__range]))",
        },
    ),
    Panel(
        "Devices out of service, by reason",
        "GPUs that failed a test of themselves. Their pods are not ready; the alert says what to do.",
        {"{{reason}}": "sum by (reason) (warpsmith_bench_quarantined)"},
        kind="bargauge",
    ),
    Panel(
        "Use of each device",
        "Share of time in which a kernel ran, as the driver says; of a machine without a GPU, its processors.",
        {"{{instance}}": "max by (instance) (warpsmith_bench_device_busy_ratio)"},
        unit="percentunit",
    ),
    Panel(
        "Candidates that faulted while timed",
        "By kind, in the range shown. Many at once on one GPU: suspect the GPU.",
        {"{{kind}}": "sum by (kind) (increase(warpsmith_bench_faults_total[$__range]))"},
        kind="bargauge",
    ),
]

MODEL = [
    Panel(
        "Proposals a minute",
        "Calls of the reasoning service.",
        {
            "{{service}}": "sum by (service) (rate(warpsmith_grpc_calls_total"
            '{method="ProposeHypotheses"}[$__rate_interval])) * 60'
        },
    ),
    Panel(
        "Time of a proposal",
        "Half and 95 % of proposals; a language model makes these seconds.",
        {
            f"{share:.0%}": f"histogram_quantile({share}, sum by (le) (rate("
            'warpsmith_grpc_call_duration_seconds_bucket{method="ProposeHypotheses"}[$__rate_interval])))'
            for share in (0.5, 0.95)
        },
        unit="s",
    ),
    Panel(
        "Trials that a proposal leads to",
        "In the range shown.",
        {
            "trials": "sum(increase(warpsmith_trials_total[$__range])) / sum(increase("
            'warpsmith_grpc_calls_total{method="ProposeHypotheses"}[$__range]))'
        },
        kind="stat",
    ),
    Panel(
        "Share of trials that were right",
        "Of those that compiled: how well the synthesizer writes.",
        {
            "right": 'sum(increase(warpsmith_trials_total{outcome=~"measure_fail|timed"}[$__range])) / '
            'sum(increase(warpsmith_trials_total{outcome=~"verify_fail|measure_fail|timed"}[$__range]))'
        },
        unit="percentunit",
        kind="stat",
    ),
    Panel(
        "Who takes the turns",
        "Turns of the language model, and those that the roofline reasoner took from it, with the reason.",
        {"{{by}}: {{reason}}": "sum by (by, reason) (increase(warpsmith_model_turns_total[$__range]))"},
        kind="bargauge",
    ),
    Panel(
        "Answers, by what they were",
        "Chosen, or the fault for which it was asked again.",
        {"{{outcome}}": "sum by (outcome) (increase(warpsmith_model_answers_total[$__range]))"},
        kind="bargauge",
    ),
    Panel(
        "Exchanges with the model's server",
        "By outcome; all but answered and cut_off cost the model its turn or a wait.",
        {"{{outcome}}": "sum by (outcome) (increase(warpsmith_model_calls_total[$__range]))"},
        kind="bargauge",
    ),
    Panel(
        "Tokens a second",
        "As the server counts them.",
        {"{{kind}}": "sum by (kind) (rate(warpsmith_model_tokens_total[$__rate_interval]))"},
    ),
    Panel(
        "Time of an answer, and to its first token",
        "95 %.",
        {
            legend: f"histogram_quantile(0.95, sum by (le) (rate({metric}_bucket[$__rate_interval])))"
            for legend, metric in (
                ("whole answer", "warpsmith_model_seconds"),
                ("first token", "warpsmith_model_first_token_seconds"),
            )
        },
        unit="s",
    ),
    Panel(
        "vLLM: requests under way and waiting",
        "On its side. Requests that wait for long: a second replica, or a smaller model.",
        {
            "under way": "sum(vllm:num_requests_running)",
            "waiting": "sum(vllm:num_requests_waiting)",
        },
    ),
    Panel(
        "vLLM: tokens a second",
        "Of all that ask it, as it counts them.",
        {
            "prompt": "sum(rate(vllm:prompt_tokens_total[$__rate_interval]))",
            "answer": "sum(rate(vllm:generation_tokens_total[$__rate_interval]))",
        },
    ),
    Panel(
        "vLLM: time to the first token, and between tokens",
        "95 %, on its side: without the network and our queue.",
        {
            legend: f"histogram_quantile(0.95, sum by (le) (rate({metric}_bucket[$__rate_interval])))"
            for legend, metric in (
                ("first token", "vllm:time_to_first_token_seconds"),
                ("next token", "vllm:inter_token_latency_seconds"),
            )
        },
        unit="s",
    ),
    Panel(
        "vLLM: cache of keys and values in use",
        "Near 100 % requests wait.",
        {"{{instance}}": "max by (instance) (vllm:kv_cache_usage_perc)"},
        unit="percentunit",
    ),
    Panel(
        "Processor time, by service",
        "Processors used by the service's own process; its jailed workers are seen in the pod's metrics.",
        {"{{service}}": 'sum by (service) (rate(process_cpu_seconds_total{job="warpsmith"}[$__rate_interval]))'},
    ),
    Panel(
        "Memory, by service",
        "Resident, of the service's own process.",
        {"{{service}}": 'max by (service) (process_resident_memory_bytes{job="warpsmith"})'},
        unit="bytes",
    ),
]

BOARDS = {
    "throughput": ("Warpsmith: optimization throughput", THROUGHPUT),
    "fleet": ("Warpsmith: fleet", FLEET),
    "model": ("Warpsmith: model and agents", MODEL),
}


def dashboard(name: str) -> dict[str, Any]:
    """A dashboard as Grafana reads it."""
    title, panels = BOARDS[name]
    return {
        "uid": f"warpsmith-{name}",
        "title": title,
        "tags": ["warpsmith"],
        "schemaVersion": 39,
        "editable": False,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [{"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}]
        },
        "panels": [_panel(number, panel) for number, panel in enumerate(panels)],
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(number, COLUMNS)
    source = {"type": "prometheus", "uid": "${datasource}"}
    instant = panel.kind != "timeseries"
    custom = {"fillOpacity": 30, "stacking": {"mode": "normal"}} if panel.stacked else {}
    return {
        "id": number + 1,
        "title": panel.title,
        "description": panel.says,
        "type": panel.kind,
        "datasource": source,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom}, "overrides": []},
        "options": {"displayMode": "gradient", "orientation": "horizontal"} if panel.kind == "bargauge" else {},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": source,
                "expr": expression,
                "legendFormat": legend,
                "instant": instant,
                "range": not instant,
                **({"format": "table"} if panel.kind == "table" else {}),
            }
            for index, (legend, expression) in enumerate(panel.queries.items())
        ],
    }


def made() -> dict[Path, str]:
    """Every made file with its content."""
    files = {DASHBOARDS / f"{name}.json": json.dumps(dashboard(name), indent=1) + "\n" for name in BOARDS}
    rules = yaml.safe_load((HERE / "rules.yaml").read_text())
    operator = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "warpsmith"},
        "spec": rules,
    }
    files[OPERATOR_RULES] = "# Made of k8s/monitoring/rules.yaml by `make monitoring`.\n" + yaml.safe_dump(
        operator, sort_keys=False, width=120, allow_unicode=True
    )
    return files


def main() -> int:
    """Writes the files, or compares them; 1 when one differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a file is not up to date")
    check = parser.parse_args().check
    stale = 0
    for path, text in made().items():
        if not path.exists() or path.read_text() != text:
            stale += 1
            if check:
                print(f"{path.relative_to(HERE.parent.parent)}: not up to date; make monitoring", file=sys.stderr)
            else:
                path.write_text(text)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
