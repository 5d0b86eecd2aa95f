"""The hostile suite on a GPU, check by check: `pytest -m gpu tests/hostile`, or `make test-hostile-gpu`."""

from __future__ import annotations

from collections.abc import Iterator

import hostile_gpu
import pytest

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpu_bench() -> Iterator[hostile_gpu.Bench]:
    made = hostile_gpu.Bench()
    yield made
    made.close()
    made.compiler.close()
    made.machine.close()


@pytest.mark.parametrize(
    "check",
    [check for _, _, check in hostile_gpu.checks()],
    ids=[f"{category}: {name}" for category, name, _ in hostile_gpu.checks()],
)
def test_the_product_holds_on_a_gpu(check: hostile_gpu.Check, gpu_bench: hostile_gpu.Bench) -> None:
    check(gpu_bench)
