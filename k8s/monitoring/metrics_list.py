"""What Warpsmith promises to measure, with the expression that shows each: `live_check` asks a real run for all."""

from __future__ import annotations

PROMISED = {
    "calls, by method and code": "sum by (service, method, code) (warpsmith_grpc_calls_total) > 0",
    "share of failed calls": "warpsmith:grpc_errors:ratio5m",
    "time of calls, by method": "sum by (method) (warpsmith_grpc_call_duration_seconds_count) > 0",
    "time of stages": "sum by (stage) (warpsmith_stage_duration_seconds_sum) > 0",
    "queues: runs": "warpsmith_runs_active > 0",
    "queues: stages under way": "warpsmith_stage_active",
    "queues: measurements that wait": "warpsmith_waiting_to_time",
    "candidates, by how far they came": "sum by (outcome) (warpsmith_trials_total) > 0",
    "candidates that are faster": "warpsmith_trials_faster_total",
    "verdicts, by kind": "sum by (kind) (warpsmith_verdicts_total) > 0",
    "best speedup of a task": "warpsmith_task_best_speedup_ratio > 0",
    "share of the floor of a task": "warpsmith_task_floor_ratio > 0",
    "trials a second": "sum(warpsmith:trials:rate5m) > 0",
    "devices, and how many are in use": "warpsmith_devices_timing / warpsmith_devices",
    "time for which a device was held": "sum by (tier) (warpsmith_bench_device_seconds_sum) > 0",
    "use of a device": "warpsmith_bench_device_busy_ratio > 0",
    "clocks": "warpsmith_bench_clock_hertz",
    "throttle reasons": "warpsmith_bench_throttled",
    "devices out of service, by reason": "warpsmith_bench_quarantined",
    "noise floor": "warpsmith_bench_noise_floor_ratio > 0",
    "workers started": "sum by (worker) (warpsmith_worker_starts_total) > 0",
    "workers lost": "sum by (worker) (warpsmith_worker_losses_total)",
    "compilations found in the cache": 'warpsmith_compile_cache_lookups_total{outcome="hit"}',
    "tokens": "sum by (kind) (warpsmith_model_tokens_total) > 0",
    "time of a model's answer": "warpsmith_model_seconds_count > 0",
    "device seconds per improvement": "warpsmith:device_seconds_per_improvement:ratio1h",
}
"""What → PromQL that has data in every run with a language model."""
