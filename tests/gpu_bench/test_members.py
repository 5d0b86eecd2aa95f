"""Parameters and state of a case: what moves in which families, and what stays as the constructor made it."""

from __future__ import annotations

import math

import pytest
import torch

from gpu_bench.values import learning, members
from warpsmith.v1 import judging_pb2, verdict_pb2

MIXED, RARE, NORMAL = (
    verdict_pb2.VALUE_FAMILY_MIXED, verdict_pb2.VALUE_FAMILY_RARE, verdict_pb2.VALUE_FAMILY_NORMAL,
)  # fmt: skip
SEED = (1 << 40) + 7


def varied(
    tensor: torch.Tensor, family: verdict_pb2.ValueFamily.ValueType = RARE, learned: judging_pb2.Learned | None = None
) -> torch.Tensor:
    """A trainable tensor of the name `own` after it was varied."""
    moved = tensor.clone()
    members.vary({"own": moved}, family, SEED, trainable={"own"}, learned=learned)
    return moved


def signs_kept(family: verdict_pb2.ValueFamily.ValueType = RARE) -> judging_pb2.Learned:
    return judging_pb2.Learned(restraints=[judging_pb2.Restraint(family=family, own_signs=True)])


def test_weights_vary_but_keep_signs_and_masks() -> None:
    weights = {"w": torch.tensor([1.0, -1.0, 0.0, float("-inf")]), "b": torch.zeros(4)}
    members.vary(weights, NORMAL, 9)
    assert torch.equal(weights["w"].sign(), torch.tensor([1.0, -1.0, 0.0, -1.0]))
    assert not torch.equal(weights["w"][:2], torch.tensor([1.0, -1.0]))
    assert bool(weights["b"].count_nonzero())


@pytest.mark.parametrize("family", [MIXED, RARE])
@pytest.mark.parametrize("value", [1.0, -3.0, 1e-6, 0.0])
def test_a_parameter_of_one_value_is_of_both_signs_and_of_ordinary_size_as_after_training(
    family: verdict_pb2.ValueFamily.ValueType, value: float
) -> None:
    moved = varied(torch.full((256,), value), family)
    assert {*moved.sign().tolist()} == {-1.0, 1.0}
    assert float(moved.abs().max()) > 0.09
    assert torch.equal(varied(torch.full((256,), value), family), moved)


def test_a_parameter_keeps_its_signs_where_the_reference_needs_them_and_gets_an_ordinary_size_all_the_same() -> None:
    moved = varied(torch.full((256,), 1e-6), learned=signs_kept())
    assert float(moved.min()) > 0.05
    identity = varied(torch.eye(16), learned=signs_kept())
    assert bool((identity[torch.eye(16) == 0] == 0).all())


def test_zeros_of_a_parameter_are_filled_and_those_of_state_and_of_what_is_frozen_stay() -> None:
    identity = torch.eye(64)
    moved = varied(identity)
    assert bool((moved != 0).all())
    assert 0.3 < float(moved[identity == 0].square().sum() / 64) < 3.0  # as large as an ordinary product of that size
    frozen = identity.clone()
    members.vary({"own": frozen}, RARE, SEED, trainable=set())
    assert bool((frozen[identity == 0] == 0).all())


@pytest.mark.parametrize("odd", [math.inf, -math.inf, math.nan])
def test_a_parameter_that_is_not_finite_keeps_what_it_has(odd: float) -> None:
    moved = varied(torch.tensor([odd, 0.0, 1.0]))
    assert float(moved[1]) == 0.0
    assert torch.equal(moved[:1].nan_to_num(7.0), torch.tensor([odd]).nan_to_num(7.0))


def test_state_that_is_drawn_comes_in_another_order_and_what_is_alike_for_every_seed_stays() -> None:
    own = {"codes": torch.arange(64).flip(0), "index": torch.arange(64).flip(0), "mask": torch.rand(64) < 0.5}
    learned = judging_pb2.Learned(drawn_state=["codes", "mask"])
    for family, moves in ((MIXED, True), (RARE, True), (NORMAL, False)):
        state = {name: tensor.clone() for name, tensor in own.items()}
        members.vary(state, family, SEED, learned=learned)
        assert torch.equal(state["index"], own["index"])
        for name in learned.drawn_state:
            assert torch.equal(state[name], own[name]) is not moves
            assert torch.equal(state[name].sort().values, own[name].sort().values)
    kept = judging_pb2.Learned(
        drawn_state=["codes"], restraints=[judging_pb2.Restraint(family=RARE, own_integers=True)]
    )
    state = {"codes": own["codes"].clone()}
    members.vary(state, RARE, SEED, learned=kept)
    assert torch.equal(state["codes"], own["codes"])


def test_a_count_that_the_module_writes_is_farther_on_and_one_that_it_only_reads_is_its_own() -> None:
    state = {"calls": torch.tensor(3), "width": torch.tensor(3), "flag": torch.tensor(True)}
    members.vary(state, RARE, SEED, learned=judging_pb2.Learned(written_state=["calls", "flag"]))
    assert 3 < int(state["calls"]) <= 10
    assert int(state["width"]) == 3
    assert bool(state["flag"])


@pytest.mark.parametrize(
    ("tensor", "may"),
    [
        (torch.randint(-128, 128, (8, 8), dtype=torch.int8), True),
        (torch.tensor([True, False, True]), True),
        (torch.tensor([0.0, 1.0, 0.0, 1.0]), True),
        (torch.arange(64).flip(0), True),
        (torch.arange(64), False),  # in order, as the rows of a sparse matrix
        (torch.zeros(64), False),
        (torch.randn(64), False),
        (torch.tensor(5), False),
        (torch.zeros(0, dtype=torch.long), False),
    ],
    ids=["codes", "mask", "few", "falling", "rising", "alike", "floats", "one", "none"],
)
def test_what_may_be_in_another_order_has_no_order_and_is_of_integers_or_few_values(
    tensor: torch.Tensor, may: bool
) -> None:
    assert members.may_be_drawn(tensor) is may


def test_a_family_as_trained_is_held_back_by_signs_then_integers_then_both() -> None:
    learned, seen = judging_pb2.Learned(), []
    while learning.restrain(learned, RARE):
        (restraint,) = learned.restraints
        seen.append((restraint.own_signs, restraint.own_integers))
    assert seen == [(True, False), (False, True), (True, True)]
