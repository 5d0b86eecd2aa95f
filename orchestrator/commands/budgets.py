"""Reads budgets and shards as people write them: `60s`, `5m`, `1h`, `90`; `1/4`."""

from __future__ import annotations

import re

from warpsmith.errors import BadInput
from warpsmith.v1 import run_pb2

_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def seconds(text: str, option: str = "--budget") -> float:
    """Seconds of a time such as `60s`, `5m`, `1.5h` or `90`.

    Raises:
        BadInput: not a positive time; names the option.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip().lower())
    if match is None or float(match[1]) <= 0:
        raise BadInput(f"{option} {text}: write a time such as 60s, 5m or 1h")
    return float(match[1]) * _SECONDS[match[2]]


def shard(text: str) -> tuple[int, int]:
    """(index from 0, count) of a shard such as `1/4`.

    Raises:
        BadInput: not of that form.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", text.strip())
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise BadInput(f"--shard {text}: write 1/4 for the first of four")
    return int(match[1]) - 1, int(match[2])


def limits(wall: str, trials: int, device_time: str, tokens: int) -> run_pb2.Budget:
    """What a search may spend. Raises as `seconds`."""
    return run_pb2.Budget(
        wall_seconds=seconds(wall),
        trial_count=trials,
        device_seconds=seconds(device_time, "--device-time") if device_time else 0.0,
        model_tokens=tokens,
    )
