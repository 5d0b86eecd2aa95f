"""The floor of a yardstick: what an ordinary sum of so many terms may be off, found for outputs and statistics."""

from __future__ import annotations

import pytest
import torch
from bench_desk import MakeDesk

from gpu_bench.truth import answers, plausible, terms
from gpu_bench.values.keys import Key
from warpsmith.v1 import candidate_pb2, tensor_pb2, verdict_pb2

NORMAL = verdict_pb2.VALUE_FAMILY_NORMAL


def test_a_small_output_has_a_floor_of_its_terms(desk: MakeDesk) -> None:
    place = desk("x.sum()", "[torch.rand(64, 64) - 0.5]")
    answer = place.judge.answers.of(verdict_pb2.VALUE_FAMILY_TASK, 1)
    terms = float((torch.manual_seed(1) and torch.rand(64, 64) - 0.5).abs().sum())
    assert answer.floors[0] == pytest.approx(4 * 2**-24 * terms, rel=1e-3)


def test_statistics_that_a_batch_norm_updates_have_a_floor_of_their_terms(desk: MakeDesk) -> None:
    place = desk("self.norm(x)", "[torch.rand(32, 3, 8) - 0.5]", "self.norm = torch.nn.BatchNorm1d(3, momentum=0.25)")
    answer = place.judge.answers.of(verdict_pb2.VALUE_FAMILY_TASK, 1)
    values = (torch.manual_seed(1) and torch.rand(32, 3, 8) - 0.5).transpose(0, 1).flatten(1)
    floors = dict(zip((str(Key.of(region)) for region in place.judge.regions), answer.floors, strict=True))
    mean, variance = (next(f for name, f in floors.items() if name.endswith(end)) for end in ("_mean", "_var"))
    sizes = values.abs().mean(1)
    assert mean == pytest.approx(4 * 2**-24 * 0.25 * float(sizes.square().mean().sqrt()), rel=1e-3)
    assert variance > 4 * 2**-24 * 0.25 * float(values.var(1).mean())


def test_statistics_of_all_norms_have_their_floors_from_one_pass(
    desk: MakeDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each was followed by autograd through the whole network: of ResNet-101 a search saw no candidate judged."""
    norms = ", ".join(["torch.nn.BatchNorm1d(3)"] * 3)
    place = desk("self.m(x)", "[torch.rand(32, 3, 8) - 0.5]", f"self.m = torch.nn.Sequential({norms})")
    reference, args = place.judge.reference, place.judge.loaded.case(verdict_pb2.VALUE_FAMILY_TASK, 1)
    sources, names = reference.graph_sources(args), [str(Key.of(region)) for region in place.judge.regions]
    statistic, large = torch.ones(3).double(), torch.ones(3, 2000).double()
    truth = [statistic if name.endswith(("_mean", "_var")) else large for name in names]
    first = [source.name for source in reference.graph.sources if source.name.startswith("b_m_0_running")]
    followed = [terms.terms_floor(reference.graph, sources, name, statistic) for name in first]
    monkeypatch.setattr(terms, "_followed", lambda *_: pytest.fail("followed by itself"))
    floors = reference.terms_floors(sources, truth)
    found = {name: floor for name, floor in zip(names, floors, strict=True) if name.endswith(("_mean", "_var"))}
    assert len(found) == 6
    assert all(floor > 0 for floor in found.values())
    assert [floor for name, floor in found.items() if ".0." in name] == pytest.approx(followed, rel=1e-3)


def test_a_statistic_whose_floor_explains_too_little_is_followed_before_it_is_doubted(
    desk: MakeDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = desk("self.m(x)", "[torch.rand(32, 3, 8) - 0.5]", "self.m = torch.nn.BatchNorm1d(3)")
    names = [source.name for source in place.judge.graph.sources if source.name.endswith(("_mean", "_var"))]
    monkeypatch.setattr(plausible, "share", lambda *_, **__: 1e-12)
    monkeypatch.setattr("gpu_bench.truth.reference.statistics_floors", lambda *_: dict.fromkeys(names, 1e-30))
    answer = place.judge.answers.of(verdict_pb2.VALUE_FAMILY_NORMAL, 3)
    keys = [str(Key.of(region)) for region in place.judge.regions]
    floors = [floor for key, floor in zip(keys, answer.floors, strict=True) if key.endswith(("_mean", "_var"))]
    assert all(floor > 1e-10 for floor in floors)


def test_a_statistic_that_something_else_changes_too_is_followed(desk: MakeDesk) -> None:
    setup = "self.register_buffer('v', torch.ones(3)), self.register_buffer('w', torch.ones(3))"
    norm = "torch.nn.functional.batch_norm(x, self.w, self.v, training=True)"
    place = desk(f"{norm} + self.w.mul_(1e3)[:, None]", "[torch.rand(32, 3, 8)]", setup)
    args = place.judge.loaded.case(verdict_pb2.VALUE_FAMILY_TASK, 1)
    floors = terms.statistics_floors(place.judge.graph, place.judge.reference.graph_sources(args))
    assert [name.endswith("_v") for name in floors] == [True]


def test_a_network_with_dropout_has_floors_too_and_generators_are_left_alone(desk: MakeDesk) -> None:
    setup = "self.norm, self.drop = torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.5)"
    place = desk("self.drop(self.norm(x).relu_())", "[torch.rand(32, 3, 8) - 0.5]", setup)
    args = place.judge.loaded.case(verdict_pb2.VALUE_FAMILY_TASK, 1)
    sources, truth = place.judge.reference.graph_sources(args), [torch.ones(3).double()] * len(place.judge.regions)
    before = torch.get_rng_state()
    floors = place.judge.reference.terms_floors(sources, truth)
    assert torch.equal(torch.get_rng_state(), before)
    names = [str(Key.of(region)) for region in place.judge.regions]
    assert all(floor > 0 for name, floor in zip(names, floors, strict=True) if name.endswith(("_mean", "_var")))


CANCELLING = "torch.nn.functional.group_norm(x, 4).mean([1, 2])"
"""Terms of size 1 that sum to 0 whatever x is: derivatives by x vanish, roundings do not."""


def test_terms_that_cancel_in_between_count_although_the_inputs_do_not_matter(desk: MakeDesk) -> None:
    place = desk(CANCELLING, "[torch.rand(8, 8, 512) - 0.5]")
    answer = place.judge.answers.of(verdict_pb2.VALUE_FAMILY_TASK, 1)
    normalised = torch.nn.functional.group_norm(torch.manual_seed(1) and torch.rand(8, 8, 512) - 0.5, 4)
    assert answer.floors[0] == pytest.approx(4 * 2**-24 * float(normalised.abs().mean()), rel=2e-2)


def test_more_seeds_of_a_small_output_take_the_floors_of_their_family(desk: MakeDesk) -> None:
    made = desk("x.sum().reshape(1)")
    floors = [made.judge.answers.of(NORMAL, seed).floors[0] for seed in (1, 2, 3)]
    assert len(set(floors)) == 3
    assert made.judge.answers.of(NORMAL, 4, once=True).floors[0] == min(floors)


def test_ordinary_values_in_large_tensors_have_the_floors_of_their_family(
    desk: MakeDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "_MANY", 64 * 48)
    large, small = desk("x.sum()", "[torch.rand(64, 48)]").judge, desk("x.sum()", "[torch.rand(64, 47)]").judge
    for family, count in ((NORMAL, 1), (verdict_pb2.VALUE_FAMILY_MIXED, 3)):
        assert len({large.answers.of(family, seed).floors[0] for seed in (1, 2, 3)}) == count
        assert len({small.answers.of(family, seed).floors[0] for seed in (1, 2, 3)}) == 3


@pytest.mark.parametrize("narrow", [tensor_pb2.DTYPE_FLOAT16, tensor_pb2.DTYPE_BFLOAT16])
def test_a_precision_cut_shows_among_terms_that_cancel(desk: MakeDesk, narrow: tensor_pb2.Dtype.ValueType) -> None:
    place = desk(CANCELLING, "[torch.rand(8, 8, 512) - 0.5]")
    program = place.plan_zero()
    (fine,) = place.compare(program, verdict_pb2.VALUE_FAMILY_NORMAL).outputs
    assert fine.rms_ratio < 2
    assert fine.max_ratio < 2
    (cut,) = place.compare(
        _cut_after(program, "aten.group_norm.default", narrow), verdict_pb2.VALUE_FAMILY_NORMAL
    ).outputs
    assert cut.rms_ratio > 4
    assert cut.max_ratio > 8


def _cut_after(
    program: candidate_pb2.Program, target: str, narrow: tensor_pb2.Dtype.ValueType
) -> candidate_pb2.Program:
    """The program with one call's result rounded to 16 bits and back."""
    made = candidate_pb2.Program()
    made.CopyFrom(program)
    del made.steps[:]
    renamed: dict[str, str] = {}
    specs = {buffer.name: buffer.spec for buffer in program.buffers}
    for step in program.steps:
        added = made.steps.add()
        added.CopyFrom(step)
        for argument in added.library.args:
            if argument.tensor in renamed:
                argument.tensor = renamed[argument.tensor]
        if step.library.target != target:
            continue
        (result,) = step.library.results
        renamed[result] = f"{result}_back"
        for source, name, dtype in (
            (result, f"{result}_cut", narrow),
            (f"{result}_cut", f"{result}_back", tensor_pb2.DTYPE_FLOAT32),
        ):
            call = made.steps.add(group=step.group).library
            call.target = "aten._to_copy.default"
            call.args.add(tensor=source)
            call.kwargs.add(name="dtype").value.dtype = dtype
            call.results.append(name)
            buffer = made.buffers.add(name=name, role=candidate_pb2.ROLE_LIBRARY)
            buffer.spec.CopyFrom(specs[result])
            buffer.spec.dtype = dtype
    made.digest = f"cut to {narrow}"
    return made
