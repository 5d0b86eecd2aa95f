"""What the command that times exports in processes of their own makes of its results."""

from __future__ import annotations

import pytest

from benchmarks.timing import exports_apart


def row(name: str, *kept: float) -> exports_apart.Row:
    arms = dict(zip(exports_apart.ARMS, kept, strict=True))
    taken = {f"{memory} {arm}": [ns] for memory in exports_apart.MEMORY for arm, ns in arms.items()}
    return {"name": name, "verdict": "PASS", "arms_ns": {}, "apart_ns": taken}


def test_an_export_that_is_slower_apart_than_was_told_fails_and_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    good, slow = row("good", 9e3, 8e3, 7e3), row("slow", 9e3, 7e3, 8e3)
    none = {"name": "none", "verdict": "NO_FASTER"}
    assert exports_apart.ended([good, none]) == 0
    assert exports_apart.ended([good, none, slow]) == 1
    assert capsys.readouterr().err == "told faster, and slower in a process of its own: slow\n"
