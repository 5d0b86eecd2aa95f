"""How often workers start, and why they are lost. Kept out of `worker`, which the jailed process loads too."""

from __future__ import annotations

from prometheus_client import Counter

starts = Counter("warpsmith_worker_starts_total", "Jailed worker processes started, by what they run.", ["worker"])
losses = Counter(
    "warpsmith_worker_losses_total", "Workers that ended in the midst of a call, by why.", ["worker", "reason"]
)


def name(entry: str) -> str:
    """A worker's label: the module of its entry, "service.judge_worker:METHODS" → "service.judge_worker"."""
    return entry.partition(":")[0]
