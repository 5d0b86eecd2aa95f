"""The suite of networks: files that anybody can run, and one sentence where a package is missing."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from orchestrator.commands import directory_bench
from orchestrator.tasks import model_suite
from warpsmith.errors import BadInput
from warpsmith.graphs.capture import capture
from warpsmith.graphs.task_module import load
from warpsmith.v1 import task_pb2


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(model_suite, "is_installed", lambda _: True)
    return directory_bench.place(None, "models", tmp_path)


def test_every_architecture_is_a_file_in_each_element_type(written: Path) -> None:
    entries = directory_bench.entries(written)
    assert len(entries) == 2 * len(model_suite.ARCHITECTURES) == 24
    for entry in entries:
        text = entry.path.read_text()
        imported = {
            name.name for step in ast.walk(ast.parse(text)) if isinstance(step, ast.Import) for name in step.names
        }
        assert imported == {"torch"}
        assert max(map(len, text.splitlines())) <= 120
    assert {entry.name.rpartition("_")[2] for entry in entries} == {"float32.py", "bfloat16.py"}


def test_what_a_package_begins_with_zeros_and_the_result_depends_on_is_drawn(written: Path) -> None:
    drawn = [entry.name for entry in directory_bench.entries(written) if "torch.nn.init" in entry.path.read_text()]
    assert sorted(drawn) == ["vit_b_16_bfloat16.py", "vit_b_16_float32.py"]
    assert "        torch.nn.init.normal_(self.model.heads.head.weight, std=0.02)\n" in (written / drawn[0]).read_text()


@pytest.mark.parametrize("dtype", model_suite.DTYPES)
def test_the_block_that_needs_no_package_is_captured(written: Path, tmp_path: Path, dtype: str) -> None:
    name = f"unet_block_{dtype}.py"
    source = task_pb2.SourceFile(path=name, content=(written / name).read_bytes())
    module = load(task_pb2.Task(name="block", sources=[source], entry_path=name), tmp_path / "loaded")
    built = module.build()
    assert not built.training
    with torch.device("meta"):
        assert module.inputs(0)[0].dtype == getattr(torch, dtype)
    graph = capture(built, (torch.randn(1, 320, 8, 8, dtype=getattr(torch, dtype)),))
    assert [node.target for node in graph.nodes].count("aten.conv2d.default") == 2


def test_packages_that_are_missing_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_suite, "is_installed", lambda name: name != "torchvision")
    with pytest.raises(BadInput, match=r"needs torchvision: pip install 'warpsmith\[models\]'"):
        directory_bench.place(None, "models", tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("directory", "suite", "message"),
    [
        (None, "", "a DIRECTORY of modules, or --suite models"),
        (Path("here"), "models", "one of the two"),
        (None, "level9", "no such suite; there is: models"),
    ],
)
def test_a_bench_takes_a_directory_or_a_suite(directory: Path | None, suite: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=message):
        directory_bench.place(directory, suite, tmp_path)
