"""The red team itself: its attacks run, a name draws the same one again, expectations mean something.

The one idea: nothing is judged or timed here, so it runs beside other tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "red_team"))

import drawn_attacks
import ledger
import rehearsal
import where_it_hides
from drawn_attacks import Attack
from dropped_cases import Case, cases
from judging_bench import Told

pytestmark = pytest.mark.hostile


def test_seed_and_number_name_an_attack() -> None:
    assert drawn_attacks.drawn(3, 7) == drawn_attacks.drawn(3, 7)
    texts = {drawn_attacks.drawn(3, number).text for number in range(100)}
    assert len(texts) == 100


def test_a_slice_has_each_two_kinds_together_and_each_module() -> None:
    def told(attacks: Iterable[Attack]) -> Counter[tuple[str, ...]]:
        counts: Counter[tuple[str, ...]] = Counter()
        for attack in attacks:
            kinds = attack.kinds
            counts.update([("gives and knows", kinds["gives"], kinds["knows"])])
            counts.update([("hides and slows", kinds["hides"], kinds["slows"]), ("module", attack.reference.name)])
        return counts

    chosen = drawn_attacks.a_slice(19, pool=1000, times=2)
    assert set(told(chosen)) == set(told(drawn_attacks.drawn(19, number) for number in range(1000)))
    assert min(told(chosen).values()) == 2
    assert len(chosen) == len({attack.number for attack in chosen}) < 100


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
