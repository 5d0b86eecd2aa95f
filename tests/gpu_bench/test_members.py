"""Parameters and state of a case: what moves in which families, and what stays as the constructor made it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from unusual_modules import Desk, source

from gpu_bench.judging.loaded import CONSTRUCTORS, LoadedTask
from gpu_bench.solutions.witness import find_timed_members, has_truth
from gpu_bench.values import inputs, learning, members
from warpsmith.errors import BadInput
from warpsmith.v1 import judging_pb2, verdict_pb2

MIXED, RARE, NORMAL = (
    verdict_pb2.VALUE_FAMILY_MIXED, verdict_pb2.VALUE_FAMILY_RARE, verdict_pb2.VALUE_FAMILY_NORMAL,
)  # fmt: skip
SEED = (1 << 40) + 8


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


def test_a_parameter_named_keeps_its_signs_and_others_do_not() -> None:
    held_back = judging_pb2.Restraint(family=RARE, signed_parameters=["scale"])
    both = {"scale": torch.ones(64), "gain": torch.ones(64)}
    members.vary(both, RARE, SEED, trainable=set(both), learned=judging_pb2.Learned(restraints=[held_back]))
    assert bool((both["scale"] > 0).all())
    assert {*both["gain"].sign().tolist()} == {-1.0, 1.0}


@pytest.mark.parametrize("family", [MIXED, RARE, NORMAL])
def test_some_rows_are_larger_than_the_constructor_makes_any_unless_signs_are_kept(
    family: verdict_pb2.ValueFamily.ValueType,
) -> None:
    weight = torch.randn(64, 32)
    growth = (varied(weight, family).norm(dim=1) / weight.norm(dim=1)).sort().values
    assert bool((growth[:32] < 1.3).all())
    assert bool(growth[-1] > 2) == (family != NORMAL)
    kept = varied(weight, family, signs_kept(family)).norm(dim=1) / weight.norm(dim=1)
    assert float(kept.max()) < 1.3


def test_of_many_parameters_a_few_have_larger_rows() -> None:
    many = {f"w{number}": torch.ones(4, 4) for number in range(80)}
    members.vary(many, MIXED, SEED, trainable=set(many))
    assert 2 <= sum(float(each.abs().max()) > 2 for each in many.values()) <= 20


def test_nearly_all_of_one_sign_is_of_one_sign() -> None:
    moved = varied(torch.cat([torch.ones(255), -torch.ones(1)]))
    assert 64 < int((moved < 0).sum()) < 192


@pytest.mark.parametrize(("family", "is_timed", "sign"), [(RARE, False, -1.0), (RARE, True, 1.0), (MIXED, False, 1.0)])
def test_a_single_number_has_the_other_sign_in_one_family_and_its_own_while_timed(
    family: verdict_pb2.ValueFamily.ValueType, is_timed: bool, sign: float
) -> None:
    for seed in range(20):
        number = torch.tensor([2.0])
        members.vary({"own": number}, family, seed, trainable={"own"}, is_timed=is_timed)
        assert float(number.sign()) == sign


def test_zeros_of_a_parameter_are_filled_and_those_of_state_and_of_what_is_frozen_stay() -> None:
    identity = torch.eye(64)
    moved = varied(identity)
    assert bool((moved != 0).all())
    assert {*moved.diagonal().sign().tolist()} == {-1.0, 1.0}
    assert 0.1 < float(moved[identity == 0].square().sum() / 64) < 3.0  # as large as an ordinary product of that size
    frozen = identity.clone()
    members.vary({"own": frozen}, RARE, SEED, trainable=set())
    assert bool((frozen[identity == 0] == 0).all())


@pytest.mark.parametrize("odd", [math.inf, -math.inf, math.nan])
def test_a_parameter_that_is_not_finite_keeps_what_it_has(odd: float) -> None:
    moved = varied(torch.tensor([odd, 0.0, 1.0]))
    assert float(moved[1]) == 0.0
    assert torch.equal(moved[:1].nan_to_num(7.0), torch.tensor([odd]).nan_to_num(7.0))


def test_state_is_what_another_seed_draws_where_there_is_such_and_stays_elsewhere() -> None:
    own, drawn = {"codes": torch.arange(64), "index": torch.arange(64)}, {"codes": torch.arange(64).flip(0)}
    for family, moves in ((MIXED, True), (RARE, True), (NORMAL, False)):
        state = {name: tensor.clone() for name, tensor in own.items()}
        members.vary(state, family, SEED, drawn=drawn)
        assert torch.equal(state["index"], own["index"])
        assert torch.equal(state["codes"], drawn["codes"] if moves else own["codes"])
    for held_back, moves in (({"own_integers": True}, True), ({"own_state": True}, False)):
        learned = judging_pb2.Learned(restraints=[judging_pb2.Restraint(family=RARE, **held_back)])
        state = {"codes": own["codes"].clone()}
        members.vary(state, RARE, SEED, drawn=drawn, learned=learned)
        assert torch.equal(state["codes"], drawn["codes"] if moves else own["codes"])


def test_a_count_that_the_module_writes_is_farther_on_and_one_that_it_only_reads_is_its_own() -> None:
    state = {"calls": torch.tensor(3), "width": torch.tensor(3), "flag": torch.tensor(True)}
    members.vary(state, RARE, SEED, learned=judging_pb2.Learned(written_state=["calls", "flag"]))
    assert 3 < int(state["calls"]) <= 10
    assert int(state["width"]) == 3
    assert bool(state["flag"])


@pytest.mark.parametrize(
    ("tensor", "has"),
    [
        (torch.ones(8), True),
        (-torch.rand(64), True),
        (torch.eye(8), True),
        (torch.zeros(8), False),
        (torch.linspace(-1, 1, 8), False),
        (torch.arange(8), False),
    ],
    ids=["ones", "below", "identity", "zeros", "both", "integers"],
)
def test_which_parameters_have_signs_or_zeros_that_training_may_change(tensor: torch.Tensor, has: bool) -> None:
    assert members.has_signs(tensor) is has


@pytest.mark.parametrize("family", [MIXED, RARE])
def test_a_family_as_trained_is_held_back_by_signs_then_integers_then_both_then_state_and_rare_floats_before_each(
    family: verdict_pb2.ValueFamily.ValueType,
) -> None:
    learned, seen = judging_pb2.Learned(), []
    while learning.restrain(learned, family):
        (each,) = learned.restraints
        seen.append((each.own_signs, each.own_integers, each.own_state, each.floats_within))
    steps = [(False, False, False), (True, False, False), (False, True, False), (True, True, False)]
    by_floats = [(*step, is_held) for step in steps for is_held in (False, True)]
    free = [(*step, False) for step in steps]
    assert seen == (
        [*by_floats[1:], (True, True, True, True)] if family == RARE else [*free[1:], (True, True, True, False)]
    )


@pytest.mark.parametrize("family", sorted(inputs.UNUSUAL))
def test_with_unusual_values_parameters_are_as_training_may_leave_them_as_in_timed_calls(family: Any) -> None:
    gain = torch.ones(64)
    moved = varied(gain, family)
    assert bool((moved > 0).any())
    assert bool((moved < 0).any())
    assert bool((varied(gain, family, signs_kept(RARE)) > 0).all())
    held = judging_pb2.Learned(restraints=[judging_pb2.Restraint(family=family, own_state=True)])
    assert torch.equal(varied(gain, family, held), gain)


def test_unusual_values_are_held_back_by_integers_then_by_the_constructors_parameters() -> None:
    learned, seen = judging_pb2.Learned(), []
    while learning.restrain(learned, verdict_pb2.VALUE_FAMILY_LARGE):
        (each,) = learned.restraints
        seen.append((each.own_integers, each.own_state))
    assert seen == [(True, False), (False, True), (True, True)]


# ---- of a module -------------------------------------------------------------------------------------------------


def test_what_seeds_draw_is_another_seeds_and_what_the_constructor_makes_alike_stays(
    references: Callable[[str], Desk],
) -> None:
    drawn = source(
        "self.codes = torch.nn.Buffer(torch.randint(-99, 99, (16, 1)));"
        "self.ends = torch.nn.Buffer(torch.rand(64).sort().values);"
        "self.later = torch.nn.Buffer(torch.ones(16, 32).triu(1).bool())",
        "return torch.bucketize(x, self.ends) + self.codes * x.masked_fill(self.later, 2.0)",
    )
    desk = references(drawn)
    loaded = desk.judge._loaded
    before = {name: tensor.clone() for name, tensor in loaded.module.named_buffers()}
    assert [*desk.report.learned.drawn_state] == ["codes", "ends"]
    for family in (RARE, MIXED):
        assert desk.compare(family).outputs[0].max_ratio <= 1.0  # the candidate's process draws the same
        loaded.case(family, SEED)
        now = dict(loaded.module.named_buffers())
        assert torch.equal(now["later"], before["later"])
        assert not torch.equal(now["codes"], before["codes"])
        grown = now["ends"] / before["ends"]
        assert not bool(((grown >= 1.0) & (grown <= 1.25)).all())  # as by scaling alone


@pytest.mark.parametrize(
    "needs",
    ["self.scale.log()", "torch.nn.functional.binary_cross_entropy(self.scale / 2, torch.ones(32), reduction='none')"],
)
def test_only_parameters_that_a_module_needs_of_one_sign_keep_it(references: Callable[[str], Desk], needs: str) -> None:
    gains = "; ".join(f"self.gain{n} = torch.nn.Parameter(torch.ones(32))" for n in range(5))
    desk = references(
        source(
            f"self.scale = torch.nn.Parameter(torch.ones(32)); {gains}",
            f"return (x * self.gain0 + self.gain1) * self.gain2 + self.gain3 * self.gain4 + {needs}",
        )
    )
    for family in (RARE, MIXED):
        assert desk.compare(family).outputs[0].max_ratio <= 1.0
        (restraint,) = [each for each in desk.report.learned.restraints if each.family == family]
        assert (restraint.own_signs, [*restraint.signed_parameters]) == (False, ["scale"])


def test_a_module_that_overflows_whatever_the_signs_keeps_none(references: Callable[[str], Desk]) -> None:
    desk = references(source("self.gain = torch.nn.Parameter(torch.ones(32))", "return torch.exp(x * self.gain)"))
    desk.leaves(MIXED)
    assert not [each for each in desk.report.learned.restraints if each.own_signs or each.signed_parameters]


@pytest.mark.parametrize("wrapper", ["", "torch.nn.utils.parametrizations.weight_norm"])
def test_a_tables_row_of_padding_stays(references: Callable[[str], Desk], wrapper: str) -> None:
    table = f"self.table = {wrapper}(torch.nn.Embedding(9, 4, padding_idx=2))"
    desk = references(source(table, "return self.table(x.clamp(0, 8)).nan_to_num()", "[torch.arange(9)]"))
    desk.leaves(RARE)
    weight = desk.judge._loaded.module.table.weight
    assert bool(wrapper) or not bool(weight[2].any())
    assert bool(weight[3].all())


def test_what_a_constructor_draws_elsewhere_is_alike_in_both_processes_or_stays(
    references: Callable[[str], Desk],
) -> None:
    drawn = source(
        "self.order = torch.nn.Buffer(torch.from_numpy(numpy.random.permutation(32)));"
        "self.mine = torch.nn.Buffer(torch.rand(32, generator=OWN))",
        "return x[:, self.order] * self.mine", before="import numpy\nOWN = torch.Generator().manual_seed(3)",
    )  # fmt: skip
    desk = references(drawn)
    assert desk.compare(RARE).outputs[0].max_ratio <= 1.0
    assert "mine" not in desk.report.learned.drawn_state


def test_state_whose_shape_follows_the_seed_stays_as_a_whole(references: Callable[[str], Desk]) -> None:
    pairs = "torch.nn.Buffer(torch.randint(32, (int(torch.randint(5, 50_000, ())),)))"
    desk = references(
        source(
            f"self.some = {pairs}; self.end = torch.nn.Buffer(self.some.cumsum(0)[:1] % 32)",
            "return x[:, self.some] + x[:, self.end]",
        )
    )
    assert not desk.report.learned.drawn_state
    assert desk.compare(RARE).outputs[0].max_ratio <= 1.0


def test_a_rehearsal_begins_with_the_modules_own_state_each_time(small: Any) -> None:
    text = source(
        "self.at = torch.nn.Buffer(torch.zeros((), dtype=torch.long)); self.register_buffer('made', None)",
        "self.made = x + self.at\nassert self.at < 3\nself.at += 1\nreturn self.made * 2",
        "[torch.arange(9)]",
    )
    rehearsal = learning.Rehearsal(LoadedTask.load(small.task(text)).user)
    for _ in range(5):
        rehearsal.take((torch.arange(9),), 0)
    with pytest.raises(BadInput):
        rehearsal.take((torch.arange(9),), 0, {"at": torch.tensor(7), "gone": torch.tensor(1)})


# ---- of timed calls ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "is_asked"),
    [
        ("return x * self.gain", True),
        ("return x * self.gain.log()", True),  # with the signs that it needs
        (
            "return x * self.gain + torch.nn.functional.binary_cross_entropy("
            "self.gain * 500, torch.ones(32), reduction='none')",
            False,
        ),
        ("return x * torch.exp(self.gain.abs() * 3e3)", False),
    ],
    ids=["anything goes", "needs one sign", "refuses what training makes", "overflows with what training makes"],
)
def test_timed_calls_have_parameters_as_trained_or_others_where_the_reference_has_no_answer(
    references: Callable[[str], Desk], body: str, is_asked: bool
) -> None:
    desk = references(source("self.gain = torch.nn.Parameter(torch.full((32,), 5e-4))", body))
    loaded = desk.judge._loaded
    tried = find_timed_members(desk.judge, MIXED, SEED)
    assert loaded.fresh_members == (MIXED if is_asked else NORMAL, SEED)
    assert loaded.fresh_members in tried
    assert not [each for each in loaded.learned.restraints if each.family == verdict_pb2.VALUE_FAMILY_FRESH]
    loaded.case(verdict_pb2.VALUE_FAMILY_FRESH, 3)
    gain = loaded.module.gain.detach()
    assert (float(gain.abs().max()) > 0.05) == is_asked
    assert (float(gain.min()) > 0) == (not is_asked or "log" in body)


def test_rare_floats_stay_in_the_tasks_range_where_most_of_a_result_would_be_lost(
    references: Callable[[str], Desk],
) -> None:
    held = {}
    for body in ("return x.log().sum(-1)", "return x.log()"):
        desk = references(source("pass", body, "[torch.rand(2, 600_000) + 0.5]"))
        desk.judge.answers.of(RARE, SEED)
        held[body] = [each.floats_within for each in desk.report.learned.restraints if each.family == RARE]
    assert held == {"return x.log().sum(-1)": [True], "return x.log()": [False]}


def test_before_unusual_values_it_is_found_out_which_parameters_the_module_takes(
    references: Callable[[str], Desk],
) -> None:
    desk = references(
        source("self.scale = torch.nn.Parameter(torch.rand(32) + 0.5)", "return x.abs() * self.scale.log()")
    )
    desk.judge.answers.of(verdict_pb2.VALUE_FAMILY_LARGE, SEED)
    (rare,) = [each for each in desk.report.learned.restraints if each.family == RARE]
    assert [*rare.signed_parameters] == ["scale"]
    assert desk.compare(verdict_pb2.VALUE_FAMILY_LARGE).outputs[0].max_ratio <= 1.0
    assert not torch.equal(desk.judge._loaded.module.scale, desk.judge._loaded.pristine("scale"))


def test_a_module_that_takes_none_but_its_own_parameters_meets_unusual_values_with_those(
    references: Callable[[str], Desk],
) -> None:
    setup = "self.gain = torch.nn.Parameter(torch.ones(32))"
    desk = references(source(setup, "torch._assert_async((self.gain == 1).all())\nreturn x * self.gain"))
    desk.judge.answers.of(verdict_pb2.VALUE_FAMILY_TINY, SEED)
    (tiny,) = [each for each in desk.report.learned.restraints if each.family == verdict_pb2.VALUE_FAMILY_TINY]
    assert tiny.own_state
    assert desk.compare(verdict_pb2.VALUE_FAMILY_TINY).outputs[0].max_ratio <= 1.0


def test_while_others_are_timed_all_values_but_the_tasks_come_with_the_parameters_of_timed_calls(
    references: Callable[[str], Desk],
) -> None:
    loaded = references(source("self.gain = torch.nn.Parameter(torch.ones(32))", "return x * self.gain")).judge.loaded

    def gain(family: verdict_pb2.ValueFamily.ValueType, seed: int) -> torch.Tensor:
        loaded.case(family, seed)
        return loaded.module.gain.detach().clone()

    loaded.fresh_members = (RARE, SEED)
    timed = gain(verdict_pb2.VALUE_FAMILY_FRESH, 1)
    for family in (NORMAL, RARE, verdict_pb2.VALUE_FAMILY_NON_FINITE):
        assert torch.equal(gain(family, 2), timed)
    assert torch.equal(gain(verdict_pb2.VALUE_FAMILY_TASK, 3), torch.ones(32))
    for members_of_judged_calls in (CONSTRUCTORS, None):
        loaded.fresh_members = members_of_judged_calls
        assert not torch.equal(gain(NORMAL, 2), timed)


def test_what_is_learned_of_a_call_between_timed_ones_is_forgotten_and_such_a_call_is_not_made(
    references: Callable[[str], Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = references(source("", "return x + 1")).judge
    judge.answers.of(RARE, SEED)  # as judged calls leave it
    assert has_truth(judge, RARE, SEED + 1)
    before = judging_pb2.Learned.FromString(judge.loaded.learned.SerializeToString())

    def learns(*_: Any) -> None:
        judge.loaded.learned.restraints.add(family=RARE, own_signs=True)

    def refuses(*_: Any) -> None:
        learns()
        raise BadInput("not these")

    for found in (learns, refuses):
        monkeypatch.setattr(judge.answers, "of", found)
        assert not has_truth(judge, RARE, SEED)
        assert judge.loaded.learned == before
