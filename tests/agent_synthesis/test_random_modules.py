"""Random modules: fused plans compute what PyTorch computes, and every module that ever failed stays mended."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch

from agent_synthesis.emit.registry import INCLUDE_DIRECTORY
from benchmarks.fuzzing import sketches
from benchmarks.fuzzing.sketches import Sketch, Source, Step
from warpsmith.v1 import task_pb2

KEPT = sorted((Path(__file__).parent / "kept").glob("*.py"))
COUNT = 110


@pytest.mark.filterwarnings("ignore")  # PyTorch's about what modules do
def test_a_hundred_random_modules_are_right_when_fused(checking: ModuleType) -> None:
    texts = ((seed, sketches.generate(seed).module_text()) for seed in range(COUNT))
    outcomes = dict(checking.check(texts))
    failed = {seed: outcome for seed, outcome in outcomes.items() if outcome.failed}
    assert not failed
    assert len(outcomes) == COUNT
    assert Counter(outcome.kind for outcome in outcomes.values())["fused"] >= 80


@pytest.mark.filterwarnings("ignore")
def test_the_cuda_of_random_modules_compiles(checking: ModuleType) -> None:
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
    try:
        nvrtc.nvrtcVersion()
    except RuntimeError as missing:
        pytest.skip(str(missing))
    texts = [sketches.generate(seed).module_text() for seed in range(24)]
    made = [checking.make(text, random.Random(0), task_pb2.TARGET_CUDA) for text in texts]
    assert sum(bool(each.fused_groups) for each in made) >= 15
    headers = sorted(INCLUDE_DIRECTORY.glob("*.cuh"))
    contents, names = [path.read_bytes() for path in headers], [path.name.encode() for path in headers]
    text = checking.unit_text([each.program for each in made])
    _, program = nvrtc.nvrtcCreateProgram(text.encode(), b"modules.cu", len(headers), contents, names)
    options = [b"--gpu-architecture=sm_90a", b"--std=c++20"]
    (outcome,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = b" " * size
    nvrtc.nvrtcGetProgramLog(program, log)
    assert int(outcome) == 0, log.decode()
    nvrtc.nvrtcDestroyProgram(program)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_modules_that_failed_once_pass_under_every_setting(checking: ModuleType, path: Path) -> None:
    for outcome in checking.outcomes(checking.every_setting(path.read_text())):
        assert outcome.kind in ("fused", "unfused"), outcome.detail


@pytest.mark.filterwarnings("ignore")
def test_a_seed_gives_one_module_that_runs() -> None:
    for seed in range(20):
        sketch = sketches.generate(seed)
        assert sketch == sketches.generate(seed)
        namespace: dict[str, object] = {}
        exec(sketch.module_text(), namespace)
        module, inputs = namespace["Model"](), namespace["get_inputs"]()  # type: ignore[operator]
        with torch.no_grad():
            results = module(*inputs)
        results = results if isinstance(results, tuple) else (results,)
        assert len(results) == len(sketch.outputs)


def test_a_failure_shrinks_to_the_step_that_makes_it() -> None:
    sketch = Sketch(
        "A chain.",
        (Source("a", (5, 7), "float64", layout="reversed"), Source("b", (7,), "float32", "parameter")),
        (
            Step("v0", "{0} + {1}", ("a", "b")),
            Step("v1", "torch.exp({0})", ("v0",)),
            Step("v2", "{0} * {1}", ("v1", "v0")),
            Step("v3", "{0}.sum(1)", ("v2",)),
        ),
        ("v1", "v3"),
    )

    def first_failing(candidates: Sequence[Sketch]) -> Sketch | None:
        return next((candidate for candidate in candidates if "torch.exp(" in candidate.module_text()), None)

    small = sketches.shrunk(sketch, first_failing)
    assert [step.text for step in small.steps] == ["torch.exp({0})"]
    (source,) = small.sources
    assert (source.shape, source.dtype, source.origin, source.layout) == ((1, 1), "float32", "input", "contiguous")


def test_what_writes_in_place_survives_pruning() -> None:
    sketch = Sketch(
        "A write.",
        (Source("a", (3,), "float32"), Source("b", (3,), "float32")),
        (Step("v0", "{0}.add_(1)", ("a",)), Step("v1", "{0} * 2", ("b",)), Step("v2", "{0} - 1", ("a",))),
        ("v2",),
    )
    pruned = sketch.pruned()
    assert [step.result for step in pruned.steps] == ["v0", "v2"]
    assert [source.name for source in pruned.sources] == ["a"]
