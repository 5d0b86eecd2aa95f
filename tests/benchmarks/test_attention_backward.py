"""The benchmark of attention's backward: every case is kernels of ours, without a GPU."""

from __future__ import annotations

import pytest

from benchmarks.products import attention_backward
from benchmarks.products.attention import BACKENDS, BACKWARD_CASES, Case


@pytest.mark.parametrize("case", BACKWARD_CASES, ids=str)
def test_every_case_is_kernels_of_ours(case: Case) -> None:
    for stages in attention_backward.STAGES:
        launches = [step.launch.entry.rpartition("_")[2] for step in attention_backward.program(case, stages).steps]
        assert launches == ["before", "main", "behind"]


def test_the_best_speed_on_a_line_is_read() -> None:
    names = tuple(BACKENDS)
    cells = ["a case", "9.0", *(["8.0"] * len(names)), "7.0 (500)", "0.91x", "0.9x", "1 1 1", "yes"]
    cells += ["6.0 (510)", "0.97x", "0.9x", "1 1 1", "yes"]
    assert len(cells) == len(attention_backward.heads(names))
    assert attention_backward.reached(cells, names) == 0.97
