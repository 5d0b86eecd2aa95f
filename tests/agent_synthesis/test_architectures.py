"""Cards that no kernel was run on: what is offered there compiles for them, what is not says what the card lacks."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from subjects import every_subject
from torch._subclasses.fake_tensor import FakeTensorMode

from agent_synthesis.emit.cuda.schedule import CudaSchedule
from agent_synthesis.emit.registry import BACKWARDS, PRODUCTS, TAILED, every_schedule, schedules, why_not
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.plans import moves
from agent_synthesis.plans.plan import plan_zero, schedule_named
from agent_synthesis.schedule import Emission
from agent_synthesis.testing import Applied
from warpsmith.errors import IllegalMove
from warpsmith.graphs.capture import capture
from warpsmith.hardware import CARDS, H200, Feature, Hardware
from warpsmith.v1 import analysis_pb2, task_pb2

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "architecture.md"
(NEW,) = re.findall(r"<!-- card -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
OTHERS = [*(card for card in CARDS.values() if card is not H200), eval(NEW)]
"""Those that are known and never ran a kernel, and the one that the tutorial adds."""
ENDS = [card.architecture for card in sorted(OTHERS, key=lambda card: int(re.sub(r"\D", "", card.architecture)))][
    :: len(OTHERS) - 1
]
"""The oldest and the newest: between them the same sources are compiled, a third of them for each card."""
CUDA = task_pb2.TARGET_CUDA
ONE_OF_EACH = list({subject.strategy: subject for subject in every_subject()}.values())
OF_CLUSTERS = {
    subject.strategy
    for subject in ONE_OF_EACH
    if (given := subject.parameters) is not None
    and given.words().get("reduce") in ("cluster", "prefetched")
    and given.ctas > 1
}


@pytest.mark.parametrize("card", OTHERS, ids=lambda card: card.architecture)
def test_every_strategy_compiles_or_says_what_the_card_lacks(
    card: Hardware, build_cubin: Callable[..., tuple[str, bytes]]
) -> None:
    emissions, refusals = [], {}
    for subject in ONE_OF_EACH:
        assert isinstance(subject.schedule, CudaSchedule)
        schedule = replace(subject.schedule, hardware=card)
        try:
            emissions.append(schedule.emit(subject.nest, subject.parameters or schedule.defaults(subject.nest)))
        except IllegalMove as refused:
            refusals[subject.strategy] = str(refused)
    if card.architecture not in ENDS:
        emissions = emissions[OTHERS.index(card) % 3 :: 3]
    text = "\n".join(emission.text for emission in emissions)
    headers = tuple(dict.fromkeys(header for emission in emissions for header in emission.headers))
    launches = tuple(launch for emission in emissions for launch in emission.launches)
    report, _ = build_cubin(Emission(text, headers, launches), card.architecture)
    assert f"for '{card.architecture}'" in report
    of_features = {
        strategy for strategy, said in refusals.items() if said.endswith(f"{card.architecture} does not have")
    }
    assert of_features == (set() if card.has(Feature.CLUSTERS) else OF_CLUSTERS)
    others = [said for strategy, said in refusals.items() if strategy not in of_features]
    sizes = ("shared memory", "that an SM holds", "more than fit the GPU")
    assert all(any(size in said for size in sizes) for said in others), others
    assert len(others) <= 3


@pytest.mark.parametrize("card", OTHERS, ids=lambda card: card.architecture)
def test_schedules_that_need_what_the_card_lacks_say_so_and_are_not_offered(card: Hardware) -> None:
    offered = {schedule.name for schedule in schedules(CUDA, card)}
    refused = {each.name: why_not(each) for each in every_schedule(CUDA, card) if each.name not in offered}
    anywhere = {"cuda_product_simt", "cuda_product_decoded"}
    assert refused.keys() == PRODUCTS - anywhere | BACKWARDS | TAILED | {"cuda_convolution_product"}
    lacking = "warpgroup matrix products (wgmma)"
    for name, said in refused.items():
        assert said.startswith(f"{name} needs ")
        assert said.endswith(f"{lacking}, which {card.architecture} does not have")


@pytest.mark.parametrize("card", OTHERS, ids=lambda card: card.architecture)
def test_many_small_products_have_a_schedule_that_the_card_has(card: Hardware) -> None:
    with FakeTensorMode():
        index = GraphIndex(capture(Applied(torch.bmm), (torch.empty(4096, 64, 64), torch.empty(4096, 64, 64))))
    (group,) = (plan := plan_zero(index, CUDA, card)).groups
    authored = moves.apply(plan, analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group=group.name))
    assert authored.groups[0].schedule == "cuda_product_simt"


def test_a_move_to_a_schedule_that_the_card_lacks_something_for_says_what() -> None:
    with pytest.raises(IllegalMove, match=r"cuda_attention needs .*\(wgmma\), which sm_89 does not have"):
        schedule_named(CUDA, "cuda_attention", CARDS["sm_89"])


def test_a_hopper_card_is_offered_everything() -> None:
    assert schedules(CUDA, H200) == every_schedule(CUDA, H200)
