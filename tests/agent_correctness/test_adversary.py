"""Inputs that a model proposes for a kernel: from tables, as a seed, beside what is always compared."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import model_replies as replies
import pytest
import torch
from scripted_model import Says, ScriptedModel

from agent_correctness import adversary
from agent_correctness.adversary import Adversary
from agent_correctness.judge import Judge
from gpu_bench.values import inputs
from warpsmith import testing
from warpsmith.errors import Infrastructure
from warpsmith.models.openai_client import OpenAiClient, Patience
from warpsmith.models.proposed_values import BASES, OFFSETS, SCALES, SHARES, SPECIALS, Recipe, recipe_of, seed_of
from warpsmith.settings import ModelSettings, Settings
from warpsmith.v1 import benchmark_service_pb2, candidate_pb2, correctness_service_pb2, timing_pb2, verdict_pb2

GOLDEN = Path(__file__).parents[1] / "golden" / f"{adversary.VERSION}.txt"
PROPOSED = verdict_pb2.VALUE_FAMILY_PROPOSED
OVERFLOWING = {"base": "normal", "scale": 1e4, "offset": 88.0, "special": "none", "share": 0.01}


@contextmanager
def proposing(*script: Says) -> Iterator[Adversary]:
    with ScriptedModel(*script) as server:
        settings = ModelSettings(url=server.url, first_token_seconds=5.0, total_seconds=10.0)
        client = OpenAiClient(settings, Patience(attempts=1, wait_seconds=0.0, rest_seconds=0.0))
        try:
            yield Adversary(client)
        finally:
            client.close()


def request(tier: timing_pb2.Tier.ValueType = timing_pb2.TIER_FINAL) -> correctness_service_pb2.VerifyArtifactRequest:
    made = correctness_service_pb2.VerifyArtifactRequest(task=testing.reasoning_request().task, tier=tier)
    made.program.sources.append(candidate_pb2.DeviceSource(name="kernel.cpp", text="y = exp(x) / sum;"))
    return made


def recipes() -> list[Recipe]:
    return [
        Recipe(base, scale, offset, special, share)
        for base in range(len(BASES)) for scale in range(len(SCALES)) for offset in range(len(OFFSETS))
        for special in range(len(SPECIALS)) for share in range(len(SHARES))
    ]  # fmt: skip


def test_every_recipe_comes_back_from_its_seed_which_fits_the_contract() -> None:
    seeds = [seed_of(recipe, 2**31 - 1) for recipe in recipes()]
    assert [recipe_of(seed) for seed in seeds] == recipes()
    assert max(seeds) < 2**63
    assert recipe_of(7) == Recipe()


def test_values_are_those_of_the_recipe_and_equal_for_equal_seeds() -> None:
    recipe = Recipe(offset=OFFSETS.index(10.0), special=SPECIALS.index("inf"), share=SHARES.index(0.1))
    leaf = torch.zeros(64, 512)
    (drawn,) = inputs.replaced([leaf], PROPOSED, seed_of(recipe, 5))
    (again,) = inputs.replaced([leaf], PROPOSED, seed_of(recipe, 5))
    assert torch.equal(drawn, again)
    assert 0.08 < float(drawn.isinf().float().mean()) < 0.12
    assert abs(float(drawn[drawn.isfinite()].mean()) - 10.0) < 0.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_no_recipe_leaves_the_range_of_a_type_by_itself(dtype: torch.dtype) -> None:
    leaf = torch.zeros(4, 8, dtype=dtype)
    for recipe in recipes():
        if SPECIALS[recipe.special] == "none" and recipe.share == 0:
            (drawn,) = inputs.replaced([leaf], PROPOSED, seed_of(recipe, 1))
            assert drawn.dtype is dtype
            assert bool(drawn.isfinite().all()), recipe


def test_what_is_not_in_the_tables_is_dropped_and_no_more_than_three_are_used() -> None:
    listed = [
        {**OVERFLOWING, "scale": 3.0},
        {**OVERFLOWING, "base": "../x"},
        {"scale": True},
        5,
        OVERFLOWING,
        OVERFLOWING,
    ]
    found = adversary.read(json.dumps({"inputs": listed}))
    assert found == [Recipe(scale=SCALES.index(1e4), offset=OFFSETS.index(88.0), share=SHARES.index(0.01))]
    many = [{**OVERFLOWING, "scale": scale} for scale in SCALES]
    assert len(adversary.read(json.dumps({"inputs": many}))) == 3
    assert adversary.read(json.dumps({"inputs": listed})[:-5]) == found, "it was cut off"


@pytest.mark.parametrize("text", ["", "{", '{"inputs": 5}', '{"inputs": [[]]}', "[" * 10_000])
def test_nonsense_proposes_nothing(text: str) -> None:
    assert adversary.read(text) == []


def test_only_finalists_with_sources_are_asked_about() -> None:
    with proposing(replies.always(json.dumps({"inputs": [OVERFLOWING]}))) as model:
        draw = random.Random(0)
        assert [family for family, _ in model.cases(request(), draw)] == [PROPOSED]
        assert model.cases(request(timing_pb2.TIER_SCREENING), draw) == []
        bare = request()
        del bare.program.sources[:]
        assert model.cases(bare, draw) == []


def test_inputs_of_a_models_thoughts_are_not_used() -> None:
    thought = json.dumps({"inputs": [{**OVERFLOWING, "special": "nan"}]})
    said = f"<think>{'{ x; }' * 40}{thought}</think>{json.dumps({'inputs': [OVERFLOWING]})}"
    with proposing(replies.always(said)) as model:
        ((_, seed),) = model.cases(request(), random.Random(0))
    assert recipe_of(seed) == Recipe(scale=SCALES.index(1e4), offset=OFFSETS.index(88.0), share=SHARES.index(0.01))


@pytest.mark.parametrize("reply", [replies.FAILED, replies.garbage, replies.huge])
def test_a_model_that_says_nothing_changes_nothing(reply: Says) -> None:
    with proposing(reply) as model:
        assert model.cases(request(), random.Random(0)) == []


class Noting:
    """A benchmark service that notes what it is asked."""

    cases: tuple[tuple[int, int], ...] = ()

    def compare(
        self, asked: benchmark_service_pb2.CompareOutputsRequest
    ) -> benchmark_service_pb2.CompareOutputsResponse:
        self.cases = tuple((case.family, case.seed) for case in asked.cases)
        raise Infrastructure("enough is known")


def test_the_judge_compares_on_them_beside_what_it_always_compares_on() -> None:
    usual, with_model = Noting(), Noting()
    Judge(usual, randomness=lambda: random.Random(1)).verify(request())
    with proposing(replies.always(json.dumps({"inputs": [OVERFLOWING]}))) as model:
        Judge(with_model, randomness=lambda: random.Random(1), adversary=model).verify(request())
    assert with_model.cases[:-1] == usual.cases
    family, seed = with_model.cases[-1]
    assert family == PROPOSED
    assert recipe_of(seed) == Recipe(scale=SCALES.index(1e4), offset=OFFSETS.index(88.0), share=SHARES.index(0.01))


def test_it_is_off_unless_a_setting_allows_it() -> None:
    assert Adversary.of(Settings()) is None


def test_the_prompt_of_a_version_does_not_change() -> None:
    text = "\n\n".join(f"== {each.role}\n{each.content}" for each in adversary.messages(request())) + "\n"
    assert text == GOLDEN.read_text()
