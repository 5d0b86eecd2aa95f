"""The hostile suite on a GPU, check by check: `pytest -m gpu tests/hostile`, or `make test-hostile-gpu`."""

from __future__ import annotations

from collections.abc import Iterator

import hostile_gpu
import pytest
from hostile_traces import own_place

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpu_bench() -> Iterator[hostile_gpu.Bench]:
    print(f"\non {hostile_gpu.environment()}", flush=True)
    with own_place() as traces:
        made = hostile_gpu.Bench(traces)
        yield made
        made.end()


@pytest.mark.parametrize(
    ("category", "name", "check"),
    list(hostile_gpu.checks()),
    ids=[f"{category}: {name}" for category, name, _ in hostile_gpu.checks()],
)
def test_the_product_holds_on_a_gpu(
    category: str, name: str, check: hostile_gpu.Check, gpu_bench: hostile_gpu.Bench
) -> None:
    held, sentence, seconds = hostile_gpu.outcome(gpu_bench, check)
    # With `-s` this is a log for `hostile_gpu.py --tally`.
    print(f"\n{held:<6} {seconds:5.1f} s  {category}: {name}: {sentence}", flush=True)
    if held == "skip":
        pytest.skip(sentence)
    assert held == "held", sentence
