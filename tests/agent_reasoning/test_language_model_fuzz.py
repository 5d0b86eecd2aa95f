"""A slice of the fuzzer that `tests/model_server/fuzz_model.py` runs at any length."""

from __future__ import annotations

import fuzz_model


def test_two_hundred_replies_that_nobody_meant_each_end_in_a_known_way() -> None:
    ends = fuzz_model.fuzz(200, seed=20)
    assert sum(ends.values()) == 200
    assert ends[fuzz_model.CHOSEN] > 10
    assert len(ends) >= 8
