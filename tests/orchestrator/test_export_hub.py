"""The flavour `hub`: in Hugging Face's layout, loadable as it is, and read by their own loader."""

from __future__ import annotations

import ast
import base64
import hashlib
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.timing import host_time
from orchestrator.exports import export_files
from orchestrator.exports.export_hub import HubExporter
from warpsmith.errors import BadInput
from warpsmith.v1 import run_pb2, timing_pb2

MODULE = """import torch

ROWS = 4


class Model(torch.nn.Module):
    def __init__(self, width, offset=0.0):
        super().__init__()
        self.offset = offset
        self.bias = torch.nn.Parameter(torch.randn(width))

    def forward(self, x):
        return torch.tanh(x + self.bias) * 0.5 + self.offset


def get_inputs():
    return [torch.randn(ROWS, 8)]


def get_init_inputs():
    return [8]
"""


def runs(folder: Path, target: str, *rows: int) -> list[run_pb2.Run]:
    """One for each number of rows."""
    found = []
    for count in rows:
        place = folder / f"rows_{count}"
        place.mkdir()
        (place / "shifted.py").write_text(MODULE.replace("ROWS = 4", f"ROWS = {count}"))
        run = host_time.a_run(place / "shifted.py", target)
        run.id, run.best.timing.tier = f"run-{count}", timing_pb2.TIER_FINAL
        found.append(run)
    return found


def written(folder: Path, target: str, *rows: int) -> Path:
    """The folder of an export."""
    found = runs(folder, target, *rows)
    exported = HubExporter().export(found[0]) if len(found) == 1 else HubExporter().export_several(found)
    assert exported.name == "shifted_warpsmith"
    export_files.write_folder(folder / exported.name, exported.files)
    return folder / exported.name


@pytest.mark.parametrize(("target", "rows"), [("cpu", (4,)), ("cpu", (4, 16)), ("cuda", (4, 16))])
def test_source_and_build_stand_where_the_builder_and_the_loader_look(
    tmp_path: Path, target: str, rows: tuple[int, ...]
) -> None:
    folder = written(tmp_path, target, *rows)
    general = tomllib.loads((folder / "build.toml").read_text())["general"]
    assert (general["name"], general["backends"], general["edition"]) == ("shifted-warpsmith", [target], 5)
    source, built = folder / "torch-ext/shifted_warpsmith", folder / f"build/torch-{target}"
    for name in ("__init__.py", "kernel.py"):
        assert (source / name).read_text() == (built / name).read_text()
        imports = [
            node for node in ast.walk(ast.parse((source / name).read_text())) if isinstance(node, ast.ImportFrom)
        ]
        assert not any((node.module or "").startswith("shifted") for node in imports), "it is loaded from any path"
    metadata = json.loads((built / "metadata.json").read_text())
    assert metadata["backend"] == {"cpu": {"type": "cpu"}, "cuda": {"type": "cuda", "archs": ["9.0a"]}}[target]
    assert metadata["id"].isidentifier()
    hashes = {
        str(path.relative_to(built)): base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
        for path in built.rglob("*.py")
    }
    assert metadata["digest"] == {"algorithm": "sha256", "files": hashes}
    assert f"torch.ops.{metadata['id']}" in (built / "_ops.py").read_text()
    assert (folder / ("record.json" if len(rows) == 1 else "record_2.json")).exists()


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The build of two shapes, imported by its identifier as a loader does."""
    folder = tmp_path_factory.mktemp("hub")
    built = written(folder, "cpu", 4, 16) / "build/torch-cpu"
    name = json.loads((built / "metadata.json").read_text())["id"]
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    patch.setattr(sys, "meta_path", sys.meta_path[:])
    spec = importlib.util.spec_from_file_location(name, built / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    patch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    yield module
    patch.undo()


def test_a_build_is_the_module_with_its_kernels_and_one_operator_in_its_own_namespace(loaded: Any) -> None:
    ours = loaded.ModelNew(8)
    graphs = list[str]()

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(str(graph.graph))
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend=backend)
    with torch.no_grad():
        for row, count in enumerate((4, 16)):
            x = torch.randn(count, 8)
            answer, _ = loaded.kernel._ws_shapes.read(ours, (x,), {})
            assert answer is loaded.kernel._ws_shapes.rows[row][2]
            for result in (ours(x), compiled(x)):
                torch.testing.assert_close(result, torch.tanh(x + ours.bias) * 0.5)
        x = torch.randn(5, 8)
        torch.testing.assert_close(compiled(x), torch.tanh(x + ours.bias) * 0.5)
    assert [f"{loaded.__name__}.call" in graph for graph in graphs] == [True, True, False]


def test_older_loaders_find_the_same_module_in_a_folder_of_its_name(loaded: Any) -> None:
    place = Path(loaded.__file__).parent / "shifted_warpsmith/__init__.py"
    spec = importlib.util.spec_from_file_location("shifted_warpsmith", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.ModelNew is loaded.ModelNew


def test_no_text_of_others_is_code_or_a_template_in_any_file(tmp_path: Path) -> None:
    (run,) = runs(tmp_path, "cpu", 4)
    run.task.name = 'a"]\nname = "b\'""" {{ x }} $x ../../c'
    run.best.candidate.program.digest = '"""; import os'
    run.best.candidate.rewrites.append('"""\n{% y %}\n')
    exported = HubExporter().export(run)
    assert exported.name == "a_name_b_x_x_c_warpsmith"
    assert tomllib.loads(exported.files["build.toml"])["general"]["name"] == "a-name-b-x-x-c-warpsmith"
    for path, text in exported.files.items():
        if path.endswith(".py"):
            compile(text, path, "exec")
    assert not any(mark in exported.files["CARD.md"] for mark in ("{{", "{%", "{#"))


def test_a_program_that_may_write_to_a_buffer_is_refused_with_the_flavour_that_fits(tmp_path: Path) -> None:
    (run,) = runs(tmp_path, "cpu", 4)
    run.best.candidate.program.steps.add().library.target = "aten.add_.Tensor"
    with pytest.raises(BadInput, match="export with --flavour module"):
        HubExporter().export(run)


@pytest.mark.parametrize(("target", "rows"), [("cpu", (4,)), ("cpu", (4, 16)), ("cuda", (4,))])
def test_hugging_faces_own_loader_takes_it(tmp_path: Path, target: str, rows: tuple[int, ...]) -> None:
    rust: Any = importlib.import_module("kernels._rust")  # of which nothing is typed
    folder = written(tmp_path, target, *rows)
    assert str(rust.Build.open(folder).general.backends[0]).lower().endswith(target)
    built = folder / f"build/torch-{target}"
    digest = rust.Metadata.read_from_file(built / "metadata.json").digest
    digest.validate(rust.Digest.hash_variant(rust.DigestAlgorithm.SHA256, built))
    if target == "cpu":
        environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
        environment |= {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder / "tests")]
        ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout[-3000:]
        assert f"{3 * len(rows)} passed" in ran.stdout
