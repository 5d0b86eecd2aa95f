"""A slice, the same every time, of the command that feeds the services plans, programs and replies with faults."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.hostile

_COMMAND = Path(__file__).parents[2] / "benchmarks" / "fuzzing" / "fuzz.py"


def test_what_nobody_meant_ends_in_a_known_way_and_the_services_stay_well() -> None:
    spec = importlib.util.spec_from_file_location("fuzz", _COMMAND)
    assert spec is not None
    assert spec.loader is not None
    fuzz = sys.modules["fuzz"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fuzz)
    rows = fuzz.fuzz(count=100, seed=4)
    assert {row.what for row in rows} == set(fuzz.SHARES)
    assert all(row.ends.total() > 1 for row in rows)
