"""A slice of the fuzzer that `tests/model_server/fuzz_kernels.py` runs at any length."""

from __future__ import annotations

import fuzz_kernels


def test_two_hundred_replies_that_nobody_meant_each_give_a_kernel_or_a_reason() -> None:
    ends, _ = fuzz_kernels.fuzz(200, seed=20)
    assert sum(ends.values()) == 200
    assert ends[fuzz_kernels.WRITTEN] > 10
    assert len(ends) >= 8
