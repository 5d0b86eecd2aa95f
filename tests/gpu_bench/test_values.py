"""Values that no candidate can know: ranges learned from the module, families of every type, seeds, dependence."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import pytest
import torch
from unusual_modules import FAMILIES, FRESH, MODULES, SEED, TASK, Desk, source

from agent_correctness.checks.check import Finding, seed_from
from agent_correctness.checks.overfit import OverfitCheck
from gpu_bench.judging import dependence, judge_worker
from gpu_bench.session import Session
from gpu_bench.timing import headline
from gpu_bench.values import inputs, integers, learning
from gpu_bench.values.keys import Key
from warpsmith.contract import words
from warpsmith.errors import BadInput
from warpsmith.graphs.task_module import seed_all, seed_generator
from warpsmith.models.proposed_values import Recipe, recipe_of, seed_of
from warpsmith.v1 import judging_pb2, timing_pb2, verdict_pb2

MakeDesk = Callable[[str], Desk]
NORMAL, RARE = verdict_pb2.VALUE_FAMILY_NORMAL, verdict_pb2.VALUE_FAMILY_RARE
CLASSES = source(
    "", "return torch.nn.functional.cross_entropy(x, rest[0])", "[torch.randn(16, 100), torch.randint(3, 9, (16,))]"
)
TABLE = source("self.e = torch.nn.Embedding(50, 8)", "return self.e(x)", "[torch.randint(5, 9, (40,))]")
LENGTHS = source(
    "", "return x * (torch.arange(32) < rest[0][:, None])", "[torch.rand(400, 32), torch.randint(1, {}, (400,))]"
)
LABELS = source("", "return x[:, None] == torch.arange(32)", "[torch.randint(0, 20, (400,))]")


def numbers(drawn: str, result: str = "x * 3") -> str:
    return source("", f"return {result}", f"[{drawn}]")


COUNTS = source("", "return x * 3", "[torch.randint(1, 9, (40,))]")
BAG = MODULES["an embedding bag"]
STORED = source("self.e = torch.nn.Embedding(64, 8)", "return self.e(x)", "[torch.arange(32)]")


# ---- ranges --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "position", "lowest", "highest"),
    [
        (TABLE, 0, 0, 49),
        (CLASSES, 1, 0, 99),
        (COUNTS, 0, 1, 8),
        (source("", "return x[rest[0]]", "[torch.rand(30, 4), torch.randint(0, 9, (40,))]"), 1, 0, 29),
        (source("", "return x + rest[0]", "[torch.rand(4), torch.tensor(2)]"), 1, 2, 9),
        (source("self.e = torch.nn.Embedding(2, 8)", "return self.e(x)", "[torch.arange(9) * 0]"), 0, 0, 1),
    ],
    ids=["rows of a table", "classes", "numbers", "a gather", "a number that never varies", "one of two rows"],
)  # fmt: skip
def test_a_range_reaches_to_where_the_reference_begins_to_refuse_and_else_no_farther_than_the_task(
    references: MakeDesk, text: str, position: int, lowest: int, highest: int
) -> None:
    legal = references(text).report.learned.inputs[position]
    assert (legal.lowest, legal.highest) == (lowest, highest)


@pytest.mark.parametrize(
    ("text", "position", "lowest", "highest"),
    [
        (COUNTS, 0, 1, 15),
        (numbers("torch.randint(-4, 5, (400,))"), 0, -12, 12),
        (numbers("torch.randint(-30, 31, (40,)) "), 0, -39, 39),
        (numbers("torch.randint(-9, 0, (400,))"), 0, -9, -1),
        (numbers("torch.randint(0, 2, (40,))"), 0, 0, 1),
        (numbers("torch.randint(0, 101, (4000,), dtype=torch.int8)"), 0, 0, 127),
        (numbers("torch.randint(0, 61, (400,))", "x.float().exp()"), 0, 0, 60),
        (numbers("torch.randint(0, 9, (400,))", "1 << x"), 0, 0, 8),
        (TABLE, 0, 0, 49),
        (LENGTHS.format(33), 1, 1, 32),
        (LENGTHS.format(21), 1, 1, 31),
        (LABELS, 0, 0, 31),
    ],
    ids=["numbers", "of two signs", "up to a size", "negative", "a mask", "of a short type", "overflows", "shifts",
         "rows", "lengths", "lengths below the most", "labels"],
)  # fmt: skip
def test_numbers_that_nothing_bounds_go_beyond_in_a_few_elements(
    references: MakeDesk, text: str, position: int, lowest: int, highest: int
) -> None:
    place = references(text)
    legal = place.report.learned.inputs[position]
    assert (legal.beyond_lowest, legal.beyond_highest) == (lowest, highest)
    is_beyond = (lowest, highest) != (legal.lowest, legal.highest)
    for family in FAMILIES:
        leaf = place.leaves(family)[position]
        outside = (leaf < legal.lowest) | (leaf > legal.highest)
        assert int(outside.sum()) <= max(1, leaf.numel() // 64), "few elements"
        assert bool(outside.any()) == (is_beyond and family == verdict_pb2.VALUE_FAMILY_RARE)


def test_every_family_of_an_index_stays_in_the_range_and_reaches_its_ends(references: MakeDesk) -> None:
    place = references(TABLE)
    by_family = {family: place.leaves(family)[0] for family in FAMILIES}
    assert all(int(each.min()) >= 0 and int(each.max()) <= 49 for each in by_family.values())
    assert len({tuple(each.tolist()) for each in by_family.values()}) >= len(FAMILIES) - 2  # three are the task's own
    assert int(by_family[verdict_pb2.VALUE_FAMILY_LARGE].min()) >= 49 - 49 // 8
    assert int(by_family[verdict_pb2.VALUE_FAMILY_TINY].max()) <= 49 // 8
    assert len(by_family[verdict_pb2.VALUE_FAMILY_CONSTANT_ROWS].unique()) == 1
    assert len(by_family[verdict_pb2.VALUE_FAMILY_NON_FINITE].unique()) <= 3
    assert {0, 49} <= set(by_family[verdict_pb2.VALUE_FAMILY_MIXED].tolist())


def test_offsets_stay_in_order_from_their_first_to_their_last_and_vary_between(references: MakeDesk) -> None:
    place = references(BAG)
    legal = place.report.learned.inputs[1]
    assert (legal.ordered, legal.begins_fixed, legal.ends_fixed, legal.varies) == (True, True, True, False)
    drawn = [place.leaves(family)[1].tolist() for family in FAMILIES]
    assert all((each[0], each[-1], sorted(each)) == (0, 20, each) for each in drawn)
    assert len(set(map(tuple, drawn))) > 4


def test_a_permutation_stays_one_and_positions_come_in_another_order(references: MakeDesk) -> None:
    scattered = references(MODULES["a scatter"])
    assert all(sorted(scattered.leaves(family)[1].tolist()) == list(range(16)) for family in FAMILIES)
    positions = references(STORED)
    for family in FAMILIES:
        drawn = positions.leaves(family)[0].tolist()
        assert len(set(drawn)) == 32
        assert (drawn == list(range(32))) is (family == TASK)


def test_what_the_task_draws_alike_from_every_seed_is_said_and_drawn_in_its_likeness(references: MakeDesk) -> None:
    fixed = "[torch.ones(64), torch.tensor([0.0, -torch.inf] * 32), (torch.arange(64.0) - 7) / 9, torch.ones(64) > 0]"
    place = references(source("", "return x + rest[1] + (rest[0] * x).exp() * rest[2]", fixed))
    assert list(place.report.flags) == [learning.TASK_VALUES_FIXED]
    own, fresh, other = place.leaves(TASK), place.leaves(FRESH), place.leaves(FRESH, SEED + 1)
    for position in range(4):
        assert not torch.equal(own[position], fresh[position])
        assert not torch.equal(fresh[position], other[position])
    assert set(fresh[1].tolist()) == {0.0, -torch.inf}
    assert float(fresh[2].min()) >= float(own[2].min())
    assert learning.TASK_VALUES_FIXED not in references(TABLE).report.flags


def test_complex_numbers_have_two_parts_of_their_family(references: MakeDesk) -> None:
    place = references(MODULES["complex inputs"])
    leaf = place.leaves(NORMAL)[0]
    assert leaf.dtype == torch.complex64
    assert not torch.equal(leaf.real, leaf.imag)
    assert not torch.isfinite(torch.view_as_real(place.leaves(verdict_pb2.VALUE_FAMILY_NON_FINITE)[0])).all()


@pytest.mark.parametrize("family", [family for family in FAMILIES if family > TASK])
def test_masks_are_all_none_dense_sparse_and_by_rows(family: Any) -> None:
    leaf = torch.ones(40, 50, dtype=torch.bool).tril()
    drawn = integers.drawn(leaf, family, judging_pb2.Legal(), torch.Generator().manual_seed(3))
    share = float(drawn.float().mean())
    wanted = {verdict_pb2.VALUE_FAMILY_LARGE: 1.0, verdict_pb2.VALUE_FAMILY_TINY: 0.0, NORMAL: 0.5}
    assert drawn.shape == leaf.shape
    assert not torch.equal(drawn, leaf)
    assert abs(share - wanted.get(family, share)) < 0.05
    if family == verdict_pb2.VALUE_FAMILY_CONSTANT_ROWS:
        assert bool((drawn == drawn[:, :1]).all())


@pytest.mark.parametrize(
    "leaf",
    [
        torch.ones(64, 256).tril() > 0,
        torch.ones(64, 256) > 0,
        torch.arange(64 * 256).reshape(64, 256) // 300,
        torch.zeros(64, 256).masked_fill(torch.ones(64, 256).triu(1) > 0, -torch.inf),
        (torch.arange(64 * 256) > 10_000).float().reshape(64, 256),
    ],
    ids=["causal", "all", "indices", "added", "late"],
)
def test_fresh_masks_and_indices_resemble_the_tasks_and_differ_in_every_row(leaf: torch.Tensor) -> None:
    legal = judging_pb2.Legal(lowest=0, highest=60)
    learned = judging_pb2.Learned(inputs=[legal, judging_pb2.Legal(varies=True)])
    fresh, other = (inputs.replaced([leaf, torch.rand(3)], FRESH, seed, learned)[0] for seed in (1, 2))
    assert fresh.dtype == leaf.dtype
    for one in (leaf, other):
        for rows in range(64):  # whatever was moved where
            assert not (fresh == one.roll(rows, 0)).all(dim=1).any()
    steps = (leaf[:, 1:] != leaf[:, :-1]).float().mean()
    assert (fresh[:, 1:] != fresh[:, :-1]).float().mean() < steps + 0.1
    alone = inputs.replaced([leaf], FRESH, 1, judging_pb2.Learned(inputs=[legal]))[0]
    assert not any((alone == leaf.roll(rows, 0)).all(dim=1).any() for rows in range(64))


# ---- what the reference refuses ------------------------------------------------------------------------------


def test_a_family_that_the_reference_refuses_is_drawn_with_restraint(references: MakeDesk) -> None:
    place = references(MODULES["probabilities"])
    prediction, target = place.leaves(NORMAL)
    assert 0 <= float(prediction.min()) < float(prediction.max()) <= 1
    assert not set(target.flatten().tolist()) <= {0.0, 1.0}
    (restraint,) = [each for each in place.report.learned.restraints if each.family == NORMAL]
    assert (restraint.own_integers, restraint.floats_within) == (False, True)
    with pytest.raises(BadInput, match="between 0 and 1"):
        place.leaves(verdict_pb2.VALUE_FAMILY_LARGE)


@pytest.mark.parametrize("is_complex", [False, True])
def test_floats_that_only_fit_one_another_are_moved_a_little(references: MakeDesk, *, is_complex: bool) -> None:
    dtype = "torch.complex64" if is_complex else "torch.float32"
    draw = f"torch.randn(40, 40, dtype={dtype})"
    place = references(source("", "return torch.linalg.cholesky(x)",
        f"[(lambda each: each @ each.mH + 40 * torch.eye(40))({draw})]"))  # fmt: skip
    (own,) = place.judge._loaded.user.inputs(SEED)
    (near,) = place.leaves(NORMAL)
    size = float(own.abs().square().mean().sqrt())
    moved = (near - own).abs()
    assert bool((moved > 0).all())
    assert 1e-4 * size < float(moved.mean()) < 1e-2 * size
    (restraint,) = [each for each in place.report.learned.restraints if each.family == NORMAL]
    assert (restraint.floats_near, restraint.floats_within, restraint.own_integers) == (True, False, False)


def test_values_are_held_back_by_steps_and_no_farther() -> None:
    learned, seen = judging_pb2.Learned(), []
    while learning.restrain(learned, NORMAL):
        (each,) = learned.restraints
        seen.append((each.own_integers, each.floats_within, each.floats_near))
    assert seen == [
        (True, False, False),
        (False, True, False),
        (True, True, False),
        (False, False, True),
        (True, False, True),
    ]


def test_integers_that_only_fit_one_another_stay_as_the_task_draws_them(references: MakeDesk) -> None:
    coupled = source(
        "", "return torch.nn.functional.embedding(x, rest[0][: 20 + 10 * int(bool(0))])",
        "[torch.randint(0, 9, (30,)), torch.rand(20, 4)]",
    )  # fmt: skip
    place = references(coupled)
    family = verdict_pb2.VALUE_FAMILY_LARGE
    place.judge._loaded.learned.inputs[0].highest = 1000  # as if something had hidden the end
    own = place.judge._loaded.user.inputs(SEED)[0]
    assert torch.equal(place.leaves(family)[0], own)
    assert [each.own_integers for each in place.report.learned.restraints if each.family == family] == [True]


def test_on_a_gpu_nothing_reaches_the_device_that_a_processor_has_not_taken_first(references: MakeDesk) -> None:
    place = references(TABLE)
    cases, ran = place.judge.cases, []
    cases._rehearsal = learning.Rehearsal(place.judge._loaded.user)
    place.report.learned.inputs[0].highest = 1000

    def run(args: Any, _: int) -> Any:
        ran.append(int(args[0].max()))
        return [], {}

    cases._run = run
    cases.taken(NORMAL, SEED)
    assert len(ran) == 1
    assert ran[0] < 50
    assert not cases._takes(cases._loaded.case(TASK, 0), [torch.full((40,), 50)])
    assert len(ran) == 1


def test_a_processor_is_asked_about_integers_alone_and_about_what_it_computes_in_a_second(
    references: MakeDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rehearsal(text: str) -> learning.Rehearsal | None:
        place = references(text)
        return learning.Rehearsal.of(place.judge._loaded.user, place.judge.graph, place.leaves(TASK))

    assert rehearsal(TABLE) is not None
    assert rehearsal(MODULES["a scalar"]) is None
    monkeypatch.setattr(learning, "_MOST_NUMBERS", 8)
    assert rehearsal(TABLE) is None


def test_where_nothing_may_be_tried_integers_stay_the_tasks_own() -> None:
    draws = [[torch.randint(0, 9, (40,)), torch.rand(3)] for _ in range(3)]
    learned = learning.held_back(learning.learn(draws[0], draws[1:], learning.Tries(None), [50]))
    assert learned.inputs[0].highest == 8
    for family in FAMILIES:
        assert inputs.replaced(draws[0], family, SEED, learned)[0] is draws[0][0]


def test_trying_ends_when_its_time_is_over() -> None:
    now = [0.0]
    tries = learning.Tries(lambda _: 0.0, lambda: now[0])
    assert tries([torch.zeros(2)], 0, torch.ones(2)) is True
    now[0] = 2 * learning.SECONDS
    assert tries([torch.zeros(2)], 0, torch.ones(2)) is None


def test_a_case_is_drawn_again_as_it_was_drawn_first_whatever_was_learned_since(
    references: MakeDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, rare = references(COUNTS), verdict_pb2.VALUE_FAMILY_RARE
    judge, answers, loaded = place.judge, place.judge.answers, place.judge._loaded
    first = answers.of(rare, SEED)
    learning.restraint_in(loaded.learned, rare).own_integers = True
    now, then = (loaded.case(rare, SEED, learned)[0] for learned in (loaded.learned, first.learned))
    assert not torch.equal(now, then)
    answers.give_back()
    assert torch.equal(answers.of(rare, SEED).eager[0], first.eager[0])
    monkeypatch.setattr(judge.reference, "rounds_to_tf32", True)
    assert torch.equal(answers.rounded(rare, SEED)[0], first.eager[0])

    seen = []
    monkeypatch.setattr(judge_worker.alone, "judge", lambda *given: seen.append(given[3]) or verdict_pb2.Comparison())
    judge._boundaries = {"group": judge_worker.alone.Boundary(judge.graph, [], 0)}
    judge.judge_alone(judging_pb2.Observation(family=rare, seed=SEED, group="group"), first.learned)
    assert torch.equal(next(iter(seen[0].values())), then)


# ---- seeds ---------------------------------------------------------------------------------------------------


def test_every_bit_of_a_seed_counts_and_small_ones_give_what_they_give_elsewhere() -> None:
    def drawn(seed: int) -> list[float]:
        return torch.rand(8, generator=seed_generator(torch.Generator(), seed)).tolist()

    assert drawn(42) == torch.rand(8, generator=torch.Generator().manual_seed(42)).tolist()
    seeds = [5, *(5 + (1 << bit) for bit in (31, 32, 40, 62))]
    assert len({tuple(drawn(seed)) for seed in seeds}) == len(seeds)
    assert drawn(SEED) == drawn(SEED)


def test_every_generator_that_get_inputs_may_draw_from_is_seeded() -> None:
    def drawn(seed: int) -> list[float]:
        seed_all(seed)
        return [torch.rand(()).item(), random.random(), numpy.random.rand()]

    first, again, other = drawn(SEED), drawn(SEED), drawn(SEED + (1 << 40))
    assert first == again
    assert all(one != another for one, another in zip(first, other, strict=True))


def test_seeds_of_cases_have_63_bits_and_recipes_keep_48_of_them() -> None:
    drawn = [seed_from(random.SystemRandom()) for _ in range(64)]
    assert max(drawn) > 1 << 60
    recipe = Recipe(base=2, special=3)
    assert recipe_of(seed_of(recipe, max(drawn))) == recipe
    assert seed_of(recipe, 1 << 47) != seed_of(recipe, 0)
    assert seed_of(Recipe(3, 9, 9, 7, 4), (1 << 63) - 1) < 1 << 63


# ---- what results depend on ----------------------------------------------------------------------------------


def test_a_stored_answer_of_fixed_integers_is_right_on_the_tasks_own_alone(references: MakeDesk) -> None:
    place = references(STORED)
    stored = place.judge.answers.of(TASK, SEED).eager[0].clone()
    comparisons = []
    for family in (TASK, FRESH):
        place.judge.answers.of(family, SEED + 1)
        place.shared.tensors(place.judge.regions)[0].copy_(stored)
        comparisons.append(place.judge.judge(judging_pb2.Observation(family=family, seed=SEED + 1)))
    assert comparisons[0].outputs[0].max_ratio == 0
    found = OverfitCheck().judge(comparisons)
    assert isinstance(found, Finding)
    assert found.kind == verdict_pb2.FAILURE_KIND_WRONG_OVERFIT


@pytest.mark.parametrize(
    ("body", "values", "flags", "unused"),
    [
        ("return x * 2", "[torch.rand(8, 8), torch.rand(4)]", ["INPUT_UNUSED"], ["input 1"]),
        ("return x * 2 + rest[0] * 1e-12", "[torch.rand(8, 8), torch.rand(8, 8)]", ["INPUT_UNUSED"], ["input 1"]),
        ("return torch.ones_like(x)", "[torch.rand(8, 8)]", ["OUTPUT_CONSTANT", "INPUT_UNUSED"], ["input 0"]),
        ("return x.softmax(1).sum(1)", "[torch.rand(8, 8)]", ["OUTPUT_CONSTANT", "INPUT_UNUSED"], ["input 0"]),
        ("return torch.relu(x - 2)", "[torch.rand(8, 8)]", ["OUTPUT_ZERO", "OUTPUT_CONSTANT"], []),
        ("return x.softmax(1).sum(1), x", "[torch.rand(8, 8)]", [], []),
        ("return torch.sigmoid(x + 40), x", "[torch.rand(8, 8)]", ["OUTPUT_CONSTANT"], []),
        ("return x.argmax(), x", "[torch.rand(2)]", [], []),
        ("return torch.cat([x * 1e9, rest[0].sigmoid()], 1)", "[torch.rand(512, 1), torch.rand(512, 4)]", [], []),
        ("return x + 1", "[torch.arange(8)]", ["TASK_VALUES_FIXED"], []),
        ("return x * 0", "[torch.arange(8)]",
         ["TASK_VALUES_FIXED", "OUTPUT_ZERO", "OUTPUT_CONSTANT", "INPUT_UNUSED"], ["input 0"]),
        ("return x.masked_fill(rest[0], 0)", "[torch.rand(8, 8), torch.zeros(8, 8) > 0]", ["TASK_VALUES_FIXED"], []),
    ],
)  # fmt: skip
def test_what_a_reference_does_not_depend_on_is_found_by_trying(
    references: MakeDesk, body: str, values: str, flags: Sequence[str], unused: Sequence[str]
) -> None:
    report = references(source("", body, values)).report
    assert ([words.flag(flag) for flag in report.flags], list(report.unused)) == (flags, unused)


@pytest.mark.parametrize(("offset", "is_constant"), [(40.0, True), (0.0, False)])
def test_state_that_is_the_same_to_the_bit_whatever_the_task_draws_is_constant(
    references: MakeDesk, offset: float, is_constant: bool
) -> None:
    body = f"self.s.copy_(torch.sigmoid(x + {offset})); return x * 2"
    report = references(source("self.register_buffer('s', torch.zeros(8, 8))", body, "[torch.rand(8, 8)]")).report
    assert (headline.OUTPUT_CONSTANT in report.flags) is is_constant


def test_state_that_moves_by_less_than_pytorchs_own_error_is_not() -> None:
    drawn, wide = [torch.rand(4)], [10 * torch.rand(4)]

    def run(leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        # A mean that PyTorch computes in TF32: two draws are as near to each other as each is to the truth.
        return [leaves[0] * 2, 1 + 1e-3 * leaves[0] + (1.0 if float(leaves[0].max()) > 1 else 0.0)]

    eager = run([torch.rand(4)])
    truth = [eager[0].double(), eager[1].double() - 1e-3]
    found = {
        count: dependence.find(
            dependence.Base(eager, truth, [0.0, 0.0], count), [torch.rand(4)],
            lambda family, _: drawn if family == verdict_pb2.VALUE_FAMILY_FRESH else wide, run,
        ).flags
        for count in (1, 2)
    }  # fmt: skip
    assert found == {1: [], 2: [headline.OUTPUT_CONSTANT]}


def test_parameters_and_state_without_influence_are_named(references: MakeDesk) -> None:
    text = source("self.l = torch.nn.Linear(32, 8); self.n = torch.nn.BatchNorm1d(8)", "return self.n(self.l(x))")
    assert list(references(text).report.unused) == []  # the norm takes the bias out, but its running mean does not
    unused = text.replace("BatchNorm1d(8)", "BatchNorm1d(8, track_running_stats=False)")
    assert list(references(unused).report.unused) == ["parameter l.bias"]


class Tried:
    """A reference without influence of anything, on a clock of its own; it refuses what is negative."""

    def __init__(self) -> None:
        self.now, self.count = 0.0, 0
        self.base = dependence.Base([torch.ones(4)], [torch.ones(4).double()], [0.0])
        self.leaves = [torch.ones(4), torch.ones(4)]

    def run(self, leaves: Sequence[torch.Tensor]) -> Sequence[torch.Tensor] | None:
        self.now, self.count = self.now + 0.3, self.count + 1
        return None if any(float(leaf.min()) < 0 for leaf in leaves) else [torch.ones(4)]

    def find(self, others: Sequence[torch.Tensor], members: int = 0) -> dependence.Dependence:
        changes = [(Key.parameter(str(number)), lambda: self.run(self.leaves)) for number in range(members)]
        return dependence.find(self.base, self.leaves, lambda *_: others, self.run, changes, lambda: self.now)


def test_sources_are_tried_as_long_as_there_is_time() -> None:
    tried = Tried()
    found = tried.find([torch.zeros(4), torch.zeros(4)], 3)
    assert found.unused == [Key.input(0), Key.input(1)]  # which took longer than parameters are waited for
    assert tried.count == 7
    tried.leaves = []
    tried.now = 0.0
    assert tried.find([], 3).unused == [Key.parameter(each) for each in "012"]


def test_nothing_is_said_of_an_input_of_which_no_other_value_could_be_tried() -> None:
    refused, same = torch.full((4,), -1.0), torch.ones(4)
    found = Tried().find([refused, same])
    assert (found.flags, found.unused) == ([], [])
    found = Tried().find([torch.zeros(4), same])
    assert (found.flags, found.unused) == ([headline.OUTPUT_CONSTANT, headline.INPUT_UNUSED], [Key.input(0)])


# ---- the headline --------------------------------------------------------------------------------------------


def faster_timing() -> timing_pb2.Timing:
    timing = timing_pb2.Timing(faster=True, noise_floor=0.01)
    timing.speedup_fastest.low = 2.0
    return timing


@pytest.mark.parametrize("label", sorted(headline.NEVER_FASTER))
def test_a_label_that_speaks_against_a_speedup_takes_it_back_whoever_adds_it(label: str) -> None:
    timing = faster_timing()
    headline.settle(timing, [timing_pb2.FLAG_UNSTEADY_MACHINE])
    assert timing.faster
    headline.settle(timing, [label, label])
    assert not timing.faster
    assert list(timing.raised) == [timing_pb2.FLAG_UNSTEADY_MACHINE, label]
    headline.settle(timing)
    assert not timing.faster


def test_a_speedup_within_the_noise_is_none() -> None:
    timing = faster_timing()
    timing.speedup_fastest.low = 1.02
    headline.settle(timing)
    assert not timing.faster


def test_whatever_is_measured_a_reference_that_computes_nothing_is_not_beaten(small: Any) -> None:
    session = Session(small.task(source("", "return torch.ones_like(x)")))
    try:
        timing = faster_timing()
        session._conclude(timing)
    finally:
        session.close()
    assert not timing.faster
    assert headline.OUTPUT_CONSTANT in timing.raised
