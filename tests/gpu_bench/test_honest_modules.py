"""Unusual references: each ends in a right verdict on every family of values, or in one sentence that says why not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from unusual_modules import FAMILIES, FRESH, MODULES, SEED, TASK, Desk, source

from gpu_bench.session import Session
from warpsmith.errors import BadInput
from warpsmith.v1 import benchmark_service_pb2, verdict_pb2

REFUSED = {
    "another object": (source("", "return x, torch.Size([2])[0:1], object()"), "return|does not look into"),
    "a sparse tensor": (source("", "return torch.sparse.mm(x.to_sparse(), x.t())"), "layout torch.sparse_coo"),
    "a shape that depends on values": (source("", "return x.nonzero()"), "shape depends on values"),
    "a value that decides a shape": (source("", "return x[:, : (x[0] > 0.5).sum().item()]"), "depends on values"),
    "an input that nothing computes with": (
        source("", "return x.to(torch.int32) * 2", "[torch.zeros(4, 4).to(torch.uint16)]"),
        "convert it inside",
    ),
    "a buffer that the first call registers": (
        source("", "if not hasattr(self, 'p'):\n    self.register_buffer('p', x[:1] * 0 + 2)\nreturn x * self.p"),
        "registers p in its first call",
    ),
    "a count in an attribute": (source("self.n = 0", "self.n += 1\nreturn x * self.n"), "not deterministic"),
    "no tensor": (source("", "return 3"), "returns no tensor"),
}


@pytest.mark.parametrize("name", MODULES)
def test_an_unusual_module_is_judged_right_on_every_family(references: Callable[[str], Desk], name: str) -> None:
    place = references(MODULES[name])
    refused = {}
    for family in FAMILIES:
        try:
            comparison = place.compare(family)
        except BadInput as error:
            refused[family] = str(error)
            continue
        assert len(comparison.outputs) == len(place.judge.regions)
        for error in comparison.outputs:
            assert (error.non_finite_mismatch_count, error.unequal_count, error.unwritten_count) == (0, 0, 0)
            assert max(error.rms_ratio / 4, error.max_ratio / 8, error.block_ratio / 16) <= 1
        noticed = [*comparison.broken_canaries, *comparison.mutated_sources, *comparison.unrepeatable_outputs]
        assert [*noticed, *comparison.stray_read_outputs, *comparison.uninitialized_read_outputs] == []
    allowed = 7 if name == "probabilities" else 0  # beyond 0 and 1 they are none
    assert len(refused) <= allowed, refused
    assert not {TASK, FRESH, verdict_pb2.VALUE_FAMILY_NORMAL} & set(refused)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_judged_is_said_in_one_sentence(references: Callable[[str], Desk], name: str) -> None:
    text, why = REFUSED[name]
    with pytest.raises(BadInput, match=why) as raised:
        references(text)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "name",
    [
        "an embedding bag",
        "a running mean that is set anew",
        "complex inputs",
        "an operation of its own that writes",
        "autocast",
        "rows to two experts",
        "weights of 8-bit floats",
    ],
)
def test_judge_and_candidate_in_processes_of_their_own_draw_alike(
    small: Any, references: Callable[[str], Desk], name: str
) -> None:
    program = small.plan_zero(references(MODULES[name]).judge.graph)
    session = Session(small.task(MODULES[name]))
    try:
        cases = [benchmark_service_pb2.ComparisonCase(family=family, seed=SEED) for family in FAMILIES]
        answer = session.compare(program, small.compiled(program), cases)
    finally:
        session.close()
    assert not answer.HasField("fault"), answer.fault
    assert all(comparison.outputs for comparison in answer.comparisons)
    for comparison in answer.comparisons:
        for error in comparison.outputs:
            assert (error.unequal_count, error.non_finite_mismatch_count, error.max_ratio <= 8) == (0, 0, True)


def test_a_mask_that_dropout_draws_is_the_same_in_truth_and_eager_and_another_by_another_seed(
    references: Callable[[str], Desk],
) -> None:
    place = references(MODULES["dropout"])
    zeros = [place.judge.answers.of(TASK, seed) for seed in (SEED, SEED + (1 << 40))]
    assert all(torch.equal(answer.eager[0] == 0, answer.truth[0] == 0) for answer in zeros)
    assert not torch.equal(zeros[0].eager[0] == 0, zeros[1].eager[0] == 0)
