"""The standing red team in small: a fixed slice of drawn attacks, dropped cases, and honest solutions that are let in.

The one idea: the numbers of record are made by `make red-team` and `make honest`; these slices keep both from rotting.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "honest"))
sys.path.insert(0, str(Path(__file__).parents[1] / "red_team"))

import drawn_attacks
import honest
import ledger
import rehearsal
import where_it_hides
from dropped_cases import Case, cases
from judging_bench import PASS, Bench, Told
from workers import Job, Setting, judged, one

from gpu_bench import truths

pytestmark = pytest.mark.hostile

SEED, COUNT, WORKERS = 19, 200, max(1, min(2, len(os.sched_getaffinity(0))))
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
    attacks = {str(number): drawn_attacks.drawn(SEED, number) for number in range(COUNT)}
    jobs = [Job(n, a.text, a.reference.text("cpu"), is_wrong=a.is_wrong) for n, a in attacks.items()]
    found = list(judged(jobs, setting, WORKERS))
    assert len(found) == COUNT
    believed = [f"{job.name}: {attacks[job.name].parts}: {told}" for job, is_believed, told in found if is_believed]
    broken = [f"{job.name}: {attacks[job.name].parts}: {told}" for job, _, told in found if told.verdict == "BROKEN"]
    assert not believed, "\n".join(believed)
    assert len(broken) <= COUNT // 100, "\n".join(broken)


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


# ---- the red team itself ---------------------------------------------------------------------------------------


def test_seed_and_number_name_an_attack() -> None:
    assert drawn_attacks.drawn(3, 7) == drawn_attacks.drawn(3, 7)
    texts = {drawn_attacks.drawn(3, number).text for number in range(100)}
    assert len(texts) == 100


def test_whatever_is_drawn_compiles() -> None:
    for number in range(500):
        compile(drawn_attacks.drawn(5, number).text, f"attack {number}", "exec")


@pytest.mark.timeout(600)
def test_every_part_runs_where_only_the_jail_stands_in_its_way(tmp_path: Path) -> None:
    kept = tmp_path / ".cache" / "kept"
    kept.parent.mkdir()
    kept.write_text("mine")
    environment = {**os.environ, "HOME": str(tmp_path)}
    command = [sys.executable, rehearsal.__file__]
    ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    assert ran.returncode == 0, ran.stdout
    assert kept.read_text() == "mine"


def test_a_rehearsal_finds_a_part_that_fails() -> None:
    bad = where_it_hides.Part("bad", "def plant(self): nobody_defined_this")
    reference = drawn_attacks.REFERENCES[0]
    text = drawn_attacks.composed((rehearsal.NEVER, rehearsal.MEMO, bad, rehearsal.BLAND), reference, "cpu")
    with pytest.raises(NameError):
        rehearsal.calls(text, reference)


@pytest.mark.parametrize(
    ("told", "expect", "is_right"),
    [
        (Told("PASS", "", "", 1.0, speedup=5.0, is_faster=True), "NO GAIN", False),
        (Told("PASS", "", "", 1.0, speedup=5.0), "NO GAIN", True),
        (Told("PASS", "", "", 1.0, speedup=1.05, is_faster=True), "NO GAIN", True),
        (Told("PASS", "", "", 1.0, speedup=1.3, noise=0.2, is_faster=True), "NO GAIN", True),
        (Told("PASS", "", "", 1.0, speedup=5.0, noise=9.0, is_faster=True), "NO GAIN", False),
        (Told("FAIL", "CHEAT", "", 1.0), "FAIL CHEAT", True),
        (Told("FAIL", "CHEAT", "", 1.0), "FAIL WRONG_VALUE", False),
        (Told("PASS", "", "", 1.0, speedup=1.0), "FAIL", False),
        (Told("PASS", "", "", 1.0, speedup=1.7), "AT MOST 1.5", False),
        (Told("FAIL", "CHEAT", "", 1.0), "PASS", False),
    ],
)
def test_an_expectation_says_what_has_to_become_of_a_case(told: Told, expect: str, is_right: bool) -> None:
    assert (Case("case", "", "", expect).complaint(told, believed=told.is_gain) == "") is is_right


def test_an_expectation_that_nobody_knows_is_an_error(tmp_path: Path) -> None:
    for suffix, text in (("solution.py", ""), ("reference.py", ""), ("expect", "MAYBE")):
        (tmp_path / f"case.{suffix}").write_text(text)
    with pytest.raises(ValueError, match="MAYBE"):
        list(cases(tmp_path))


def test_a_line_that_was_cut_off_is_judged_again(tmp_path: Path) -> None:
    line: dict[str, Any] = {"name": "one"}
    ledger.append(tmp_path / "judged.jsonl", line)
    with (tmp_path / "judged.jsonl").open("a") as file:
        file.write(json.dumps({"name": "two"})[:5])
    assert ledger.read(tmp_path / "judged.jsonl") == [line]
