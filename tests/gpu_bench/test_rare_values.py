"""Rare values: the task's own but for a few elements, where those lie and how large they are."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from unusual_modules import SEED, Desk, source

from agent_correctness.checks.values import ARRANGED
from gpu_bench.values import inputs
from warpsmith.v1 import judging_pb2, verdict_pb2

MakeDesk = Callable[[str], Desk]
RARE, NON_FINITE = verdict_pb2.VALUE_FAMILY_RARE, verdict_pb2.VALUE_FAMILY_NON_FINITE


def rare(leaf: torch.Tensor, seed: int = SEED, **known: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The rare values in the place of `leaf`, and which of them are others; `known` of its `Legal`, and restraint."""
    held = judging_pb2.Restraint(family=RARE, floats_within=known.pop("floats_within", False))
    legal = judging_pb2.Legal(varies=True, **known)
    (drawn,) = inputs.replaced([leaf], RARE, seed, judging_pb2.Learned(inputs=[legal], restraints=[held]))
    return drawn, drawn != leaf


def test_a_few_elements_are_others_and_the_rest_as_the_task_draws_them() -> None:
    own = torch.rand(1 << 10, 1 << 10)
    drawn = inputs.replaced([own], RARE, SEED)[0]  # nothing is known of them
    changed = drawn != own
    assert 0 < int(changed.sum()) <= own.numel() // 64
    assert float(drawn[changed].abs().max()) > 1.0
    assert bool(torch.isin(drawn[changed], own).any())
    numbers, others = rare(own.long(), lowest=-3, highest=9)
    assert {*numbers[others].tolist()} == {-3, 9}
    assert 0 < int(others.sum()) <= own.numel() // 64


@pytest.mark.parametrize("shape", [(1024, 512), (64, 3, 96, 96), (5000, 400), (600, 1, 900)])
def test_in_most_cases_rare_values_are_met_at_every_index_of_a_dimension_that_has_few(shape: tuple[int, ...]) -> None:
    kinds = []
    for seed in range(64, 68):
        changed = rare(torch.zeros(shape, dtype=torch.bool), seed)[1]
        count, every = int(changed.sum()), changed.numel() // max(1, int(changed.sum()))
        lines = max(int(changed.sum(dim=dim).max()) for dim in range(len(shape)) if shape[dim] > 200 or len(shape) > 3)
        are_thick = every < 100
        are_few = count <= max(1, changed.numel() >> 16)
        kinds.append("few" if are_few else "thick" if are_thick else "lines" if lines > 30 else "scattered")
        assert every >= 64
        for dim, extent in enumerate(shape):
            met = changed.movedim(dim, 0).reshape(extent, -1).any(dim=1)
            assert bool(met.all()) or extent > 4096 or are_few
    assert kinds == ["thick", "scattered", "lines", "few"]


def test_many_rare_values_of_one_case_lie_in_the_same_way_in_each_input() -> None:
    own = torch.zeros(3, 1024, 512, dtype=torch.bool)
    learned = judging_pb2.Learned(inputs=[judging_pb2.Legal(varies=True)] * 3)
    for seed, (least, most) in enumerate([(8000, 8192), (2000, 2048), (1500, 2048), (8, 8)]):
        counts = [int(each.sum()) for each in inputs.replaced([*own], RARE, seed + 64, learned)]
        assert least <= min(counts) <= max(counts) <= most


HANDFULS = [number for number in ARRANGED[RARE] if number % 8 >= 4]
"""Those of a final, beside the first of its seeds."""


def test_a_handful_lies_in_one_input_and_each_has_its_turn() -> None:
    own = [torch.rand(64, 64), torch.zeros(64, 64, dtype=torch.bool), torch.arange(64)]
    learned = judging_pb2.Learned(inputs=[judging_pb2.Legal(least=0.0, most=1.0, highest=63)] * 3)
    learned.inputs[2].distinct = True  # no single element of it may be another
    for first in range(0, 16 * 20, 16):
        turns = list[int]()
        for number in HANDFULS:
            drawn = inputs.replaced(own, RARE, first + number, learned)
            counts = [int((new != old).sum()) for new, old in zip(drawn, own, strict=True)]
            assert counts[2] == 0
            assert min(counts[:2]) == 0
            assert max(counts) <= (1 if number % 8 < 6 else 4)
            turns.append(int(counts[1] > 0))
        assert turns in ([0, 0, 1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0, 1, 1])


def test_each_input_has_each_kind_of_value_for_its_single_one() -> None:
    own, legal = torch.rand(16, 16) + 0.5, judging_pb2.Legal(varies=True, least=0.5, most=1.5)
    draw, found = random.Random(1), set[tuple[int, str]]()
    for _ in range(100):
        leaves = [own, own.clone()]
        seed = draw.randrange(1 << 60) * 8 + 4
        drawn = inputs.replaced(leaves, RARE, seed, judging_pb2.Learned(inputs=[legal] * 2))
        for position, values in enumerate(drawn):
            for value in values[values != own].tolist():
                kind = "zero" if value == 0 else "above" if value > 1.5 else "below" if value < 0.5 else "within"
                found.add((position, kind))
    assert {*itertools.product(range(2), ("zero", "above", "below"))} <= found


@pytest.mark.parametrize("shape", [(64, 32), (33, 7), (1, 30), (5,), (2, 3, 4, 5)])
def test_of_a_pair_of_handfuls_each_lies_on_one_side_and_the_other_on_the_other(shape: tuple[int, ...]) -> None:
    own, seen = torch.zeros(shape, dtype=torch.bool), set[tuple[int, ...]]()
    for first in range(0, 16 * 20, 16):
        for number in HANDFULS[::2]:
            pair = [rare(own, first + number + each)[1].nonzero() for each in range(2)]
            seen |= {*map(tuple, pair[0].tolist())}
            for one, other, extent in zip(*(each.T for each in pair), shape, strict=True):
                if extent == 1:
                    continue
                assert {*(one % 2).tolist(), *(other % 2).tolist()} == {0, 1}
                assert len({*(one % 2).tolist()}) == len({*(other % 2).tolist()}) == 1
                if extent % 2 == 0:
                    halves = [{*(each < extent // 2).tolist()} for each in (one, other)]
                    assert halves in ([{True}, {False}], [{False}, {True}])
    assert len(seen) > min(60, own.numel() // 2)


def test_a_handful_of_what_is_seen_many_times_is_seen_many_times() -> None:
    own = torch.rand(64, 1).expand(64, 32)
    for number in HANDFULS:
        drawn, changed = rare(own, number, least=0.0, most=1.0)
        assert drawn.stride() == own.stride()
        assert int(changed.sum()) % 32 == 0
        assert changed.any() or number % 8 < 6


HALVES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "first rows": lambda x: x[:32],
    "last columns": lambda x: x[:, 24:],
    "even rows": lambda x: x[::2],
    "odd columns": lambda x: x[:, 1::2],
    "a quarter": lambda x: x[::2, :24],
}


@pytest.mark.parametrize("half", HALVES)
def test_no_final_lets_through_what_looks_at_half_of_an_input(half: str) -> None:
    own = torch.rand(64, 48) + 1.0
    numbers = torch.randint(2, 9, (64, 48))
    beyond = {"lowest": -3, "highest": 9, "beyond_lowest": -20, "beyond_highest": 30}
    for first in range(0, 16 * 20, 16):
        floats = [rare(own, first + number, least=1.0, most=2.0)[0] for number in HANDFULS]
        integers = [rare(numbers, first + number, **beyond)[0] for number in HANDFULS]
        special = [inputs.replaced([own, own + 1.0], NON_FINITE, first + number) for number in ARRANGED[NON_FINITE]]
        for cases, decisions in (
            (floats, (lambda x: x > 2.0, lambda x: (x < 0.95) & (x != 0), lambda x: x == 0)),
            (integers, (lambda x: x > 9, lambda x: x < -3, lambda x: x == 0)),
            *((each, (torch.isnan, torch.isposinf, torch.isneginf)) for each in zip(*special, strict=True)),
        ):
            for decides in decisions:
                assert any(bool(decides(x).any()) and not bool(decides(HALVES[half](x)).any()) for x in cases)


@pytest.mark.parametrize("count", [1, 40, 600])
def test_of_few_elements_at_least_one_is_another(count: int) -> None:
    for seed in range(40):
        assert 1 <= int(rare(torch.zeros(count, dtype=torch.bool), seed)[1].sum()) <= max(4, count // 64)
        numbers, changed = rare(torch.full((count,), seed % 9), seed, lowest=0, highest=8)
        assert 1 <= int(changed.sum()) <= max(4, count // 64)
        assert {*numbers[changed].tolist()} <= {0, 8}


@pytest.mark.parametrize(
    ("seen", "decides"),
    [
        (lambda x: x[::32, -1], lambda x: x[:, -1]),
        (lambda x: x[:64], lambda x: x),
        (lambda x: x.flatten()[::20], lambda x: x),
        (lambda x: x[:, :50], lambda x: x),
    ],
    ids=["some of a column", "the first rows", "one in twenty", "some columns"],
)
def test_hardly_a_final_lets_through_what_looks_at_a_part_of_what_decides(
    seen: Callable[[torch.Tensor], torch.Tensor], decides: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    own, believed = torch.rand(1024, 1000), 0
    for first in range(0, 16 * 20, 16):
        cases = [rare(own, first + number, least=0.0, most=1.0)[0] for number in range(16)]
        are_usual = [bool((part >= 0).all() and (part <= 1).all()) for part in map(seen, cases)]
        believed += not any(bool((decides(c) > 1.5).any()) and usual for c, usual in zip(cases, are_usual, strict=True))
    assert believed <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("least", "most"), [(2e3, 4e3), (-1.0, 1.0), (-60.0, -60.0), (0.0, 0.0), (-6e4, 6e4)])
def test_rare_floats_lie_far_beyond_both_ends_of_the_tasks_range_and_are_finite(
    dtype: torch.dtype, least: float, most: float
) -> None:
    own = (torch.rand(512, 512) * (most - least) + least).to(dtype)
    drawn, _ = rare(own, least=least, most=most)
    width, limits = (most - least) or abs(most) or 1.0, torch.finfo(dtype)
    far = (1 if dtype == torch.float16 else 20) * width  # squares of halves overflow soon
    assert bool(drawn.isfinite().all())
    assert float(drawn.max()) >= min(most + far, limits.max)
    assert float(drawn.min()) <= max(least - far, limits.min)
    held, changed = rare(own, least=least, most=most, floats_within=True)
    assert least <= float(held.min()) <= float(held.max()) <= most
    assert bool(changed.any()) == (least < most)


def test_among_rare_floats_are_zeros_and_small_halves() -> None:
    own = torch.rand(1024, 1024) + 0.5
    drawn = rare(own, least=0.5, most=1.5)[0]
    assert 200 < int((drawn == 0).sum()) < 4000
    assert all(bool((drawn == half / 2).any()) for half in range(-8, 9))
    assert bool((rare(own, least=0.5, most=1.5, floats_within=True)[0] > 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_of_values_that_are_not_finite_most_cases_have_a_handful_among_the_tasks_own(dtype: torch.dtype) -> None:
    own, count = torch.rand(256, 256).to(dtype), torch.arange(65536).view(256, 256)
    found = set[str]()
    for seed in range(SEED + 3, SEED + 64):
        drawn, integers = inputs.replaced([own, count], NON_FINITE, seed)
        changed = ~drawn.isfinite()
        if seed % 8 < 4:
            assert int(changed.sum()) > 20
            continue
        assert 1 <= int(changed.sum()) <= 4
        assert bool((drawn == own)[~changed].all())
        assert torch.equal(integers, count)
        found |= {*map(str, drawn[changed].real.tolist())}
    assert found == {"nan", "inf", "-inf"}


def test_rare_floats_break_the_order_of_rows_whatever_they_are_held_to() -> None:
    own = torch.rand(256, 256).sort(dim=-1).values
    for is_held in (False, True):
        drawn, changed = rare(own, least=0.0, most=1.0, floats_within=is_held)
        assert bool(torch.isin(drawn[changed], own).any())
        assert int((drawn.diff(dim=-1) < 0).any(dim=-1).sum()) > 100


def test_rare_complex_numbers_are_held_to_the_tasks_own_from_other_places() -> None:
    own = torch.randn(256, 256, dtype=torch.complex64)
    assert float(rare(own)[0].abs().max()) > 100
    held, changed = rare(own, floats_within=True)
    assert bool(changed.any())
    assert bool(torch.isin(held.real, own.real).all())


def test_rare_values_that_a_module_refuses_are_drawn_within_the_tasks(references: MakeDesk) -> None:
    place = references(
        source(
            "", "return torch.nn.functional.binary_cross_entropy(x, rest[0])", "[torch.rand(64, 64) for _ in range(2)]"
        )
    )
    assert place.compare(RARE).outputs[0].max_ratio <= 1.0
    (restraint,) = [each for each in place.report.learned.restraints if each.family == RARE]
    assert restraint == judging_pb2.Restraint(family=RARE, floats_within=True)


@pytest.mark.parametrize("result", ["x.log()", "x.sqrt().sum(-1)", "torch.logit(x)", "x.exp()", "x.softmax(-1)"])
def test_what_leaves_a_modules_domain_is_judged_all_the_same(references: MakeDesk, result: str) -> None:
    assert references(source("", f"return {result}", "[torch.rand(64, 64)]")).compare(RARE).outputs[0].max_ratio <= 1.0
