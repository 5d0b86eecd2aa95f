"""What the three dashboards show: each panel with what it means and the PromQL that it asks.

The one idea: a panel is a title, a kind, expressions and a unit, a third of the width each; `dashboards` makes all else
that Grafana wants in JSON. Every metric of ours is in a panel here or in a rule of rules.yaml (tests/k8s hold that).
"""

from __future__ import annotations

from dataclasses import dataclass


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
    is_of_runs: bool = False
    """Whether its series have a run, whose page on the live page a click opens."""


REASONS_TO_HOLD_DOWN = {"power cap": 4, "slowdown": 8, "heat": 32, "much heat": 64, "power brake": 128}
"""Bits of NVML's clock throttle reasons that a person can do something about."""
OF_THE_RUNS = '{run=~"$run"}'

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
        "Best speedup of a run over time",
        "Screened, against the fastest baseline. The final measurement decides.",
        {"{{module}} {{run}}": f"max by (module, run) (warpsmith_task_best_speedup_ratio{OF_THE_RUNS})"},
        unit="x",
        is_of_runs=True,
    ),
    Panel(
        "Leaderboard",
        "Best screened speedup of the runs that moved last. `warpsmith show RUN` says all of one.",
        {"speedup": f"sort_desc(max by (module, run) (warpsmith_task_best_speedup_ratio{OF_THE_RUNS}))"},
        unit="x",
        kind="table",
        is_of_runs=True,
    ),
    Panel(
        "How near to the floor",
        "Floor over the best time: 100 % is as fast as the hardware allows, more is algebra. At 95 % a search stops, "
        "but for products.",
        {"{{module}} {{run}}": f"max by (module, run) (warpsmith_task_floor_ratio{OF_THE_RUNS})"},
        unit="percentunit",
        is_of_runs=True,
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
        "Seconds for which devices were held, whatever for, over trials that beat the fastest baseline (or over 1).",
        {
            "seconds": "sum(increase(warpsmith_bench_held_seconds_total[$__range]))"
            " / clamp_min(sum(increase(warpsmith_trials_faster_total[$__range])), 1)"
        },
        unit="s",
        kind="stat",
    ),
    Panel(
        "Gains of runs that ended",
        "Runs in the range shown whose winner is at least so many times as fast as the fastest baseline.",
        {
            f"over {bound} x": "sum(increase(warpsmith_run_speedup_ratio_count[$__range]))"
            f' - sum(increase(warpsmith_run_speedup_ratio_bucket{{le="{bound}"}}[$__range]))'
            for bound in (1.01, 1.1, 1.6, 3.0, 10.0)
        },
        kind="bargauge",
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
        "Those that another orchestrator left and this one took up, in the range shown; and what waits to be archived.",
        {
            "runs": "sum(warpsmith_runs_active)",
            "taken up": "sum(increase(warpsmith_runs_taken_up_total[$__range]))",
            "wait for the archive": "sum(warpsmith_archive_waiting)",
            "wait in files": "sum(warpsmith_spool_records)",
            "size of these files, in MB": "sum(warpsmith_spool_bytes) / 1e6",
            "not taken by it": "sum(increase(warpsmith_archive_refused_total[$__range]))",
            "longest silence of a run, in s": "max(warpsmith_run_silent_seconds)",
        },
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
        "Calls under way, and waiting for a thread",
        "A service answers WARPSMITH_THREADS calls at once; what waits for long wants more replicas, or more threads.",
        {
            "{{service}}": "sum by (service) (warpsmith_grpc_calls_active)",
            "{{service}} waiting": "sum by (service) (warpsmith_grpc_calls_waiting)",
        },
    ),
    Panel(
        "Device time, by project",
        "In the range shown: for how long runs had a device, in seconds; those of parallel trials add up.",
        {"{{project}}": "sum by (project) (increase(warpsmith_device_seconds_total[$__range]))"},
        unit="s",
        kind="bargauge",
    ),
    Panel(
        "Device time, by what for",
        "What a second of runs' device time goes to: baselines (prepare), trials (screen), finalists (final).",
        {"{{purpose}}": "sum by (purpose) (rate(warpsmith_device_purpose_seconds_total[$__rate_interval]))"},
        unit="s",
        stacked=True,
    ),
    Panel(
        "Calls refused, and readers sent away",
        "In the range shown: by what a client, or a project, has had enough of; streams whose reader took nothing.",
        {
            "{{limit}}": "sum by (limit) (increase(warpsmith_refused_total[$__range]))",
            "slow readers": "sum(increase(warpsmith_slow_readers_total[$__range]))",
        },
        kind="bargauge",
    ),
    Panel(
        "Device held, by what",
        "Share of time; calls at the same time share it. The rest is compiling, or waiting for candidates.",
        {
            "{{instance}} {{call}}": "sum by (instance, call) "
            "(rate(warpsmith_bench_held_seconds_total[$__rate_interval]))"
        },
        unit="percentunit",
        stacked=True,
    ),
    Panel(
        "Time of a measurement, 95 %",
        "For which it held the device, by tier; references and checks left out.",
        {
            "{{tier}}": "histogram_quantile(0.95, sum by (tier, le)"
            " (rate(warpsmith_bench_device_seconds_bucket[$__rate_interval])))"
        },
        unit="s",
    ),
    Panel(
        "Devices",
        "In all, timed on now, put aside because they say that they cannot be trusted; and measurements that wait.",
        {
            "in all": "sum(warpsmith_devices)",
            "timing": "sum(warpsmith_devices_timing)",
            "put aside": "sum(warpsmith_devices_aside)",
            "waiting": "sum(warpsmith_waiting_to_time)",
            "waiting for a turn": "sum(warpsmith_bench_calls_waiting)",
        },
    ),
    Panel(
        "Runs, by who has them",
        "Which orchestrator has which run; one that ends hands its runs over to the others.",
        {"{{instance}} {{id}}": "warpsmith_run_here"},
    ),
    Panel(
        "Work whose lease was lost",
        "In the range shown: work for a device that was ended or refused, because its caller left, its run is another "
        "orchestrator's by now, or the same was asked for again.",
        {"{{loss}}": "sum by (loss) (increase(warpsmith_bench_leases_lost_total[$__range]))"},
        kind="bargauge",
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
        "How far two equal programs differ; a gain below three times this is no gain. More than 100 %, drawn as 100 %, "
        "says that something else held the machine.",
        {"{{instance}}": "clamp_max(max by (instance) (warpsmith_bench_noise_floor_ratio), 1)"},
        unit="percentunit",
    ),
    Panel(
        "Clock after the last measurement",
        "0 when unknown.",
        {"{{instance}}": "max by (instance) (warpsmith_bench_clock_hertz)"},
        unit="hertz",
    ),
    Panel(
        "GPU clocks beside trials, by DCGM",
        "MHz of the GPUs that pods of ours hold, and trials a minute: fewer trials at a lower clock are the machine's.",
        {
            "{{pod}} GPU {{gpu}}, MHz": "max by (pod, gpu) (DCGM_FI_DEV_SM_CLOCK)",
            "trials a minute": "sum(rate(warpsmith_trials_total[$__rate_interval])) * 60",
        },
    ),
    Panel(
        "GPUs held down, and Xid errors beside trials, by DCGM",
        "1 while a reason is in force; the last Xid of each, of which 13, 31, 43, 45, 68 and 109 are candidates' own.",
        {
            **{
                f"{{{{pod}}}} GPU {{{{gpu}}}} {reason}": "max by (pod, gpu)"
                f" (floor(DCGM_FI_DEV_CLOCK_THROTTLE_REASONS / {bit}) % 2)"
                for reason, bit in REASONS_TO_HOLD_DOWN.items()
            },
            "{{pod}} GPU {{gpu}} Xid": "max by (pod, gpu) (DCGM_FI_DEV_XID_ERRORS)",
            "trials a second": "sum(rate(warpsmith_trials_total[$__rate_interval]))",
        },
    ),
    Panel(
        "Throttled, and impossible times",
        "1 while a throttle reason was in force; flags count times that physics forbids or no kernel reached here.",
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
        "Hypotheses in answers",
        "Legal ones were walked; dropped ones named no open option.",
        {"{{kind}}": "sum by (kind) (increase(warpsmith_model_choices_total[$__range]))"},
        kind="bargauge",
    ),
    Panel(
        "Kernels asked of the model",
        "Written, or the fault of the answer; those written are compiled and verified as any other.",
        {"{{outcome}}": "sum by (outcome) (increase(warpsmith_model_kernels_total[$__range]))"},
        kind="bargauge",
    ),
    Panel(
        "Inputs that the model proposed",
        "Used beside those that are always compared, dropped, or none where the model had nothing to say.",
        {"{{kind}}": "sum by (kind) (increase(warpsmith_model_inputs_total[$__range]))"},
        kind="bargauge",
    ),
    Panel(
        "Runs that search without their model",
        "Its server is away; they ask it again.",
        {"runs": "sum(warpsmith_runs_waiting_for_model)"},
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
