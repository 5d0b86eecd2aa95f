"""Every setting of a product is walked, and the search that is replayed on them finds its way."""

from __future__ import annotations

from pathlib import Path

from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.plans.plan import plan_zero
from benchmarks.kernelbench import level2
from benchmarks.products import product_landscapes
from benchmarks.search import landscape_file
from warpsmith.v1 import task_pb2

NAME = "f32 4096 x 4096 x 4096"
RESULTS = Path(__file__).parents[2] / "docs" / "results"


def test_a_search_is_replayed_on_every_setting_of_a_product(tmp_path: Path) -> None:
    graph = product_landscapes.graph_of(NAME)
    every = product_landscapes.settings(plan_zero(GraphIndex(graph), task_pb2.TARGET_CUDA))
    programs = [setting.program.digest for setting in every.values()]
    assert len(set(programs)) == len(programs) == 36
    ns = {program: 6e5 + 5e3 * place for place, program in enumerate(programs)} | {programs[0]: 7e5}
    wrong = programs.pop()  # what was far from eager's result has no time
    ns.pop(wrong)
    (gpu, *_) = (each.device for each in landscape_file.read([RESULTS / "landscapes_cuda.jsonl"]))
    file = tmp_path / "landscapes.jsonl"
    product_landscapes.keep(file, NAME, graph, gpu, 2.7e6, ns)
    (landscape,) = landscape_file.read([file])
    assert sum(plan.verdict == "NUMERIC" for plan in landscape.plans.values()) == 1
    says, near = product_landscapes.table([landscape], 8)
    assert near == 1
    cells = says.splitlines()[-1].split(" | ")
    assert cells[1:5] == ["35", "605.0", "4.46x", "15.7% slower"]


def test_what_follows_one_product_is_compared_with_the_fastest_pointwise_task() -> None:
    rows = level2.read(RESULTS / "level2_h200.jsonl")
    lines = level2.beyond(rows)
    assert all(line in (RESULTS / "level2_h200.md").read_text() for line in lines)
    numbers = [number for own in level2.SAME_PRODUCT.values() for number in own]
    assert len(set(numbers)) == len(numbers)
    assert all(any(number in own for own in level2.CLASSES.values()) for number in numbers)
