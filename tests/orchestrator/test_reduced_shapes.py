"""A module made small: which numbers are sizes, what they become, and that the rest of the source stays as it is."""

from __future__ import annotations

import pytest

from orchestrator.tasks.reduced_shapes import STEPS, Step, reduce

SOURCE = '''"""Größen: 4096 in a docstring stays."""
class Model:
    limit = 4096

batch_size, width = 1024, 4096  # as on the box
height = depth = 512 * 2
channels = [64] * 16
num_groups = 256
shape = (channels, 1, 96)
kernel_size = (3, 5)
bias = True
eps = 1e-5
def get_inputs():
    return [torch.rand(batch_size, 3, 224, width), 0.5]
def get_init_inputs():
    return [4096]
'''


def changes(step: Step) -> list[str]:
    return list(reduce(SOURCE, step).changes)


def test_sizes_are_halved_until_they_fit_and_each_change_is_told() -> None:
    assert changes(Step(64, 8)) == [
        "batch_size 1024 → 8", "width 4096 → 64", "height, depth 1024 → 64", "num_groups 256 → 8", "shape 96 → 48",
        "get_inputs 224 → 56",
    ]  # fmt: skip


def test_only_the_numbers_change_in_the_source() -> None:
    reduced = reduce(SOURCE, Step(64, 8)).source
    assert 'Größen: 4096 in a docstring stays."""\nclass Model:\n    limit = 4096\n' in reduced
    assert "batch_size, width = 8, 64  # as on the box\nheight = depth = 64\n" in reduced
    assert "shape = (channels, 1, 48)\nkernel_size = (3, 5)\nbias = True\neps = 1e-5\n" in reduced
    assert "torch.rand(batch_size, 3, 56, width), 0.5]" in reduced
    assert reduced.endswith("return [4096]\n")


def test_numbers_inside_get_inputs_can_be_left_alone() -> None:
    assert not any(change.startswith("get_inputs") for change in changes(Step(64, 8, literals=False)))


def test_an_odd_size_stays_odd() -> None:
    assert reduce("n = 8205", Step(128, 8)).source == "n = 127"
    assert reduce("n = 65535", Step(512, 8)).source == "n = 511"


def test_a_number_of_groups_or_heads_leaves_each_several_elements() -> None:
    source = "num_groups = 512\nn_head = 12\nhidden_size = 8192"
    assert reduce(source, Step(128, 8)).source == "num_groups = 8\nn_head = 6\nhidden_size = 128"


def test_the_last_steps_reduce_the_batch_only_and_then_nothing() -> None:
    assert changes(STEPS[-2]) == ["batch_size 1024 → 2"]
    assert reduce(SOURCE, STEPS[-1]).source == SOURCE


def test_a_step_keeps_equal_what_has_to_be_equal() -> None:
    assert any(reduce("batch_size = 32768\nwidth = 32768", step).source.count("= 128") == 2 for step in STEPS)


def test_a_batch_is_cut_to_what_fits_and_never_to_one() -> None:
    assert reduce("batch_size = 100", STEPS[-2]).source == "batch_size = 2"
    assert reduce("batch_size = 10", Step(64, 8)).source == "batch_size = 8"


def test_an_expression_over_several_lines_becomes_one_number() -> None:
    assert reduce("n = (1024\n     * 2)\nm = 7\n", Step(16, 8)).source == "n = (16)\nm = 7\n"


def test_a_source_that_does_not_parse_is_an_error() -> None:
    with pytest.raises(SyntaxError):
        reduce("def", STEPS[0])
