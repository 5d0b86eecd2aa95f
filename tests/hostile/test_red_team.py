"""The standing red team in small: a fixed slice of drawn attacks, dropped cases, and honest solutions that are let in.

The one idea: the numbers of record are made by `make red-team` and `make honest`; these slices keep both from rotting.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "honest"))
sys.path.insert(0, str(Path(__file__).parents[1] / "red_team"))

import drawn_attacks
import honest
from dropped_cases import Case, cases
from judging_bench import PASS, Bench, Told
from workers import Job, Setting, judged, one

from gpu_bench import truths

pytestmark = pytest.mark.hostile

SEED, POOL, TIMES, WORKERS = 19, 1000, 2, max(1, min(2, len(os.sched_getaffinity(0))))
HONEST_COUNT = 12
CASES = list(cases(Path(__file__).parent / "cases"))
VIEWS = ("a view of the input", "an input that both change and return")
"""What returns an input's memory changes with the next call's input: judged as honest, in every slice."""
HONEST = sorted({*honest.jobs_of(count=HONEST_COUNT), *VIEWS})


@pytest.fixture(scope="module")
def setting(request: pytest.FixtureRequest) -> Setting:
    return Setting(rung=request.config.getoption("rung", None) or "")


@pytest.fixture(scope="module")
def bench(setting: Setting) -> Iterator[Bench]:
    made = setting.bench()
    yield made
    made.close()


@pytest.fixture(scope="module")
def honest_bench(setting: Setting) -> Iterator[Bench]:
    """Compares as `warpsmith judge` does, and times as a search."""
    made = replace(setting, verified=True).bench()
    yield made
    made.close()


@pytest.fixture(scope="module")
def untimed(setting: Setting) -> dict[str, tuple[bool, Told]]:
    """What becomes of the cases that have to fail where nothing is timed, so that they can be judged side by side."""
    jobs = [case.job for case in CASES if case.must_fail]
    found = judged(jobs, replace(setting, final=True, timed=False), WORKERS)
    return {job.name: (believed, told) for job, believed, told in found}


@pytest.fixture(scope="module")
def final_bench(setting: Setting) -> Iterator[Bench]:
    """Judges as `warpsmith judge` does, and times nothing."""
    made = replace(setting, final=True, timed=False).bench()
    yield made
    made.close()


@pytest.mark.timeout(1800)
def test_no_attack_of_a_fixed_slice_is_believed(setting: Setting) -> None:
    attacks = {str(attack.number): attack for attack in drawn_attacks.a_slice(SEED, POOL, TIMES)}
    jobs = [Job(n, a.text, a.reference.text("cpu"), is_wrong=a.is_wrong) for n, a in attacks.items()]
    found = list(judged(jobs, setting, WORKERS))
    assert len(found) == len(attacks)
    believed = [f"{job.name}: {attacks[job.name].parts}: {told}" for job, is_believed, told in found if is_believed]
    broken = [f"{job.name}: {attacks[job.name].parts}: {told}" for job, _, told in found if told.verdict == "BROKEN"]
    assert not believed, "\n".join(believed)
    assert len(broken) <= 1, "\n".join(broken)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("dropped", CASES, ids=lambda dropped: dropped.name)
def test_a_dropped_case_becomes_what_it_expects(
    dropped: Case, honest_bench: Bench, untimed: dict[str, tuple[bool, Told]]
) -> None:
    believed, told = untimed.get(dropped.name, (True, None))
    if told is None or told.verdict == PASS:  # or wrong once it is timed
        believed, told = one(honest_bench, dropped.job)
    assert not dropped.complaint(told, believed=believed)


def test_values_on_which_the_reference_has_no_end_are_held_against_nobody(
    final_bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(truths, "_PATIENCE_SECONDS", 2.0)
    halving = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        while bool((x.abs() > 1).any()):
            x = torch.where(x.abs() > 1, x * 0.5, x)
        return x

def get_inputs():
    return [torch.randn(64, 64)]

def get_init_inputs():
    return []
"""
    told = final_bench.judged(halving.partition("def get_inputs")[0].replace("class Model", "class ModelNew"), halving)
    assert told.verdict == PASS, told


@pytest.mark.parametrize("name", HONEST)
def test_an_unusual_honest_solution_is_let_in(name: str, honest_bench: Bench) -> None:
    passed, told = one(honest_bench, honest.jobs_of()[name][2])
    assert passed, told
