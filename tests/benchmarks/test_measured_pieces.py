"""The page about pieces of language models is what its rows say."""

from __future__ import annotations

import pytest

from benchmarks.module_tables import read
from benchmarks.training import measured_pieces


def test_the_page_is_what_the_command_prints() -> None:
    assert (measured_pieces.RESULTS / "pieces_h200.md").read_text() == measured_pieces.page() + "\n"


def test_the_fastest_arms_are_nearer_to_the_floors_than_the_bar() -> None:
    fastest, ours = measured_pieces.fastest_over_floors(read(measured_pieces.RESULTS / "training_h200.jsonl"))
    assert fastest == pytest.approx(1.5915, abs=1e-4)
    assert ours < fastest
