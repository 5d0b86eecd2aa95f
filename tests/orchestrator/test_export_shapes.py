"""Several runs of one module in one export: a call is answered by the kernel for its inputs, or by the original."""

from __future__ import annotations

import copy
import importlib.util
import re
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.timing import host_time
from orchestrator.commands import cli
from orchestrator.exports import export_shapes
from orchestrator.exports.export_cu import CudaExporter
from orchestrator.exports.export_kernelbench import KernelBenchExporter
from orchestrator.exports.export_module import ModuleExporter
from orchestrator.exports.export_shapes import export_all
from warpsmith import digest
from warpsmith.errors import BadInput, NotFound
from warpsmith.v1 import optimization_service_pb2 as messages
from warpsmith.v1 import run_pb2, task_pb2

MODULE = """import torch

BATCH = 4
WIDTH = 8


class Model(torch.nn.Module):
    def __init__(self, width, offset=0.0):
        super().__init__()
        self.offset = offset
        self.bias = torch.nn.Parameter(torch.randn(width))

    def forward(self, x, y):
        return torch.tanh(x + self.bias) + y + self.offset


def get_inputs():
    return [torch.randn(BATCH, WIDTH), torch.randn(WIDTH)]


def get_init_inputs():
    return [8]
"""

COLUMNS = "torch.randn(WIDTH, BATCH).t()"
FOUR, SIXTEEN = ("BATCH = 4", "BATCH = 4"), ("BATCH = 4", "BATCH = 16")
LONG, TURNED = (
    ("torch.randn(BATCH, WIDTH)", "torch.randn(BATCH, WIDTH).double()"),
    ("torch.randn(BATCH, WIDTH)", COLUMNS),
)


def a_run(folder: Path, *changes: tuple[str, str], target: str = "cpu", name: str = "gated") -> run_pb2.Run:
    """A run that what a search begins with has won, of the module with some of its text replaced."""
    text = MODULE
    for before, after in changes:
        assert before in text
        text = text.replace(before, after, 1)
    place = folder / str(len(list(folder.iterdir())))
    place.mkdir()
    (place / f"{name}.py").write_text(text)
    run = host_time.a_run(place / f"{name}.py", target)
    run.id = f"2026-{place.name}"
    run.task.digest = digest.of_task(run.task)
    run.best.timing.speedup_fastest.median = 1.5 + int(place.name) / 10
    return run


def imported(folder: Path, runs: list[run_pb2.Run]) -> Any:
    """The file of several runs, imported."""
    exported = ModuleExporter().export_several(runs)
    assert exported.file_name == "gated_warpsmith.py"
    (folder / exported.file_name).write_text(exported.text)
    spec = importlib.util.spec_from_file_location("gated_warpsmith", folder / exported.file_name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SHAPES = {"four rows": FOUR, "sixteen rows": SIXTEEN, "doubles": LONG, "columns": TURNED}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The file of four runs, imported."""
    folder = tmp_path_factory.mktemp("shapes")
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    patch.setattr(sys, "meta_path", sys.meta_path[:])
    (folder / "runs").mkdir()
    module = imported(folder, [a_run(folder / "runs", change) for change in SHAPES.values()])
    with torch.no_grad():
        for x in inputs():  # kernels are built
            module.ModelNew(8)(x, torch.randn(8))
    yield module
    patch.undo()


def inputs() -> list[torch.Tensor]:
    """One for each shape."""
    return [torch.randn(4, 8), torch.randn(16, 8), torch.randn(4, 8).double(), torch.randn(8, 4).t()]


def answered_by(made: Any, module: Any, *args: Any, **kwargs: Any) -> int:
    """The number of the row that answers a call, from 1; 0 for the original."""
    answer, _ = made._ws_shapes.read(module, args, kwargs)
    return [None, *(row[2] for row in made._ws_shapes.rows)].index(answer)


def test_each_call_is_answered_by_the_kernel_for_its_inputs(made: Any) -> None:
    ours, theirs = made.ModelNew(8), made._WsReference(8)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    theirs.load_state_dict(ours.state_dict())
    y = torch.randn(8)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for row, x in enumerate(inputs(), start=1):
            assert answered_by(made, ours, x, y) == row
            assert answered_by(made, ours, y=y, x=x) == row
            torch.testing.assert_close(ours(x, y), theirs(x, y))
        ours.bias.fill_(3.0)
        theirs.bias.fill_(3.0)
        for x in inputs():
            torch.testing.assert_close(ours(x, y), theirs(x, y))


def test_inputs_in_no_row_are_the_originals_which_says_once_what_has_kernels(made: Any) -> None:
    ours, y = made.ModelNew(8), torch.randn(8)
    said = re.escape(
        "float32[4,8], float32[8]; float32[16,8], float32[8]; float64[4,8], float32[8]; float32[4,8] strides"
    )
    with torch.no_grad():
        with pytest.warns(UserWarning, match=said):
            result = ours(torch.ones(5, 8), y)
        torch.testing.assert_close(result, torch.tanh(1 + ours.bias) + y + torch.zeros(5, 8))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ours(torch.ones(6, 8), y)


OTHERS: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], tuple[Any, tuple[Any, ...]]]] = {
    "other strides": lambda m, x, y: (m, (x.repeat_interleave(2, 0)[::2], y)),
    "where it lies": lambda m, x, y: (m, (torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape), y)),
    "its sign is to be turned": lambda m, x, y: (m, (torch._neg_view(x), y)),
    "the other input": lambda m, x, y: (m, (x, y.double())),
    "no tensor": lambda m, x, _: (m, (x, {1, 2})),
    "one without a hash": lambda m, x, _: (m, (x, bytearray(8))),
    "a kind of tensor": lambda m, x, y: (m, (x, y.as_subclass(Other))),
    "an attribute": lambda m, x, y: (setattr(m, "offset", 1.0), (m, (x, y)))[1],
    "another construction": lambda m, x, y: (type(m)(8, 2.0), (x, y)),
    "its type": lambda m, x, y: (m.double(), (x, y)),
    "a shallow copy": lambda m, x, y: (copy.copy(m), (x, y)),
}


class Other(torch.Tensor): ...


@pytest.mark.parametrize("different", OTHERS)
@pytest.mark.parametrize("row", [1, 2])
def test_a_row_is_as_strict_as_a_kernel_that_is_alone(made: Any, row: int, different: str) -> None:
    ours, x, y = made.ModelNew(8), inputs()[row - 1], torch.randn(8)
    assert answered_by(made, ours, x, y) == row
    module, args = OTHERS[different](ours, x, y)
    assert answered_by(made, module, *args) == 0


def test_copies_and_what_is_around_a_call_are_looked_at_for_every_row(made: Any) -> None:
    ours, y = made.ModelNew(8), torch.randn(8)
    for row, x in enumerate(inputs(), start=1):
        assert answered_by(made, copy.deepcopy(ours), x, y) == row
        with torch.autocast("cpu", torch.bfloat16):
            assert answered_by(made, ours, x, y) == 0
        with torch.autograd.forward_ad.dual_level():
            assert answered_by(made, ours, x, y) == 0
    x = torch.randn(4, 8, requires_grad=True)
    ours(x, y).sum().backward()
    assert x.grad is not None


def test_the_table_is_read_by_people(made: Any) -> None:
    text = Path(made.__file__).read_text()
    head, _, tail = text.partition("_ws_shapes = _WsShapes([\n")
    rows = tail.partition("])")[0].splitlines()
    assert rows[:2] == [
        "    ('float32[4,8], float32[8]',               _ws_guard_1, _ws_forward_1),",
        "    ('float32[16,8], float32[8]',              _ws_guard_2, _ws_forward_2),",
    ]
    assert len(rows) == 4
    assert len(tail.splitlines()) < 40, "the table is near the end"
    assert "  float32[16,8], float32[8]: 1.60x over" in head
    assert all(f"(run 2026-{number})" in head for number in range(4))
    assert len(re.findall(r"'ws_math.hpp': r?'''", head)) == 1, "a header that all share is written once"


def test_a_processors_kernels_are_no_slower_to_find_in_the_last_row(made: Any) -> None:
    table = made._ws_shapes
    assert len(table._by_kind) == 3, "columns have the kind of rows, and other strides"
    assert [len(rows) for rows in table._by_kind.values()] == [2, 1, 1]


# ---- runs that do not fit together -------------------------------------------------------------------


def _lost(run: run_pb2.Run) -> None:
    run.state, run.best.timing.faster = run_pb2.RUN_STATE_NO_FASTER, False


CHANGES: dict[str, tuple[list[tuple[str, str]], Callable[[run_pb2.Run], object], str]] = {
    # what is different in the second run: text, a change of the run, what is said
    "the same inputs": (
        [FOUR],
        lambda _: None,
        r"same inputs, float32\[4,8\], float32\[8\]: name one.*2026-1 is the",
    ),
    "the class": ([("torch.tanh", "torch.sin"), SIXTEEN], lambda _: None, "different sources"),
    "a constant of the forward": (
        [("+ self.offset", "* WIDTH + self.offset"), ("WIDTH = 8", "WIDTH = 8")],
        lambda _: None,
        "different sources",
    ),
    "the arguments": ([("return [8]", "return [8, 1.0]"), SIXTEEN], lambda _: None, "constructor arguments"),
    "the track": ([SIXTEEN], lambda run: setattr(run.task, "prepared", True), "prepared and plain"),
    "tf32": ([SIXTEEN], lambda run: setattr(run.task, "precision", task_pb2.PRECISION_TF32), "tf32 and another"),
    "the target": ([SIXTEEN], lambda run: setattr(run.task, "target", task_pb2.TARGET_CUDA), "cpu and cuda"),
    "the name of the class": ([SIXTEEN], lambda run: setattr(run.task, "class_name", "Other"), "different classes"),
}


@pytest.mark.parametrize("different", CHANGES)
def test_runs_that_do_not_fit_together_are_named_with_their_difference(tmp_path: Path, different: str) -> None:
    texts, change, said = CHANGES[different]
    runs = [a_run(tmp_path, FOUR), a_run(tmp_path, *texts)]
    change(runs[1])
    with pytest.raises(BadInput, match=rf"runs 2026-0 and 2026-1 .*{said}"):
        export_all(ModuleExporter(), "module", runs)


def test_a_run_without_a_winner_is_named(tmp_path: Path) -> None:
    runs = [a_run(tmp_path, FOUR), a_run(tmp_path, SIXTEEN)]
    _lost(runs[1])
    with pytest.raises(NotFound, match="run 2026-1 found no faster kernel"):
        export_all(ModuleExporter(), "module", runs)


@pytest.mark.parametrize("flavour", ["kernelbench", "cu"])
def test_a_flavour_of_one_shape_says_which_take_several(tmp_path: Path, flavour: str) -> None:
    exporter = {"kernelbench": KernelBenchExporter(), "cu": CudaExporter()}[flavour]
    with pytest.raises(BadInput, match=r"writes one shape, and 2 runs are named.*--flavour module, package or hub"):
        export_all(exporter, flavour, [a_run(tmp_path, FOUR), a_run(tmp_path, SIXTEEN)])


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        ([("BATCH = 4", "BATCH = 2 * 8")], True),
        ([("BATCH = 4\n", "BATCH = 16\nUNUSED = 3\n")], True),
        ([("torch.randn(BATCH, WIDTH)", "torch.rand(16, 8)")], True),
        ([("import torch\n", "import torch\n# another comment\n"), SIXTEEN], True),
        ([("return [8]", "return [WIDTH]"), SIXTEEN], False),
        ([("+ self.offset", "+ self.offset * 1.0"), SIXTEEN], False),
    ],
)
def test_sources_may_differ_in_what_get_inputs_alone_reads(
    tmp_path: Path, changes: list[tuple[str, str]], fits: bool
) -> None:
    runs = [a_run(tmp_path, FOUR), a_run(tmp_path, *changes)]
    if fits:
        assert len(export_shapes.alike(runs)) == 2
    else:
        with pytest.raises(BadInput, match="different"):
            export_shapes.alike(runs)


def test_a_constant_that_code_may_find_without_its_name_has_to_be_the_same(tmp_path: Path) -> None:
    reads = ("x + self.bias", "x + self.bias * globals()['BAT' + 'CH']")
    with pytest.raises(BadInput, match="different sources"):
        export_shapes.alike([a_run(tmp_path, reads), a_run(tmp_path, reads, SIXTEEN)])


def test_a_run_that_is_named_twice_is_said(tmp_path: Path) -> None:
    run = a_run(tmp_path, FOUR)
    with pytest.raises(BadInput, match="run 2026-0 is named twice"):
        export_shapes.alike([run, run])


def test_get_inputs_that_the_module_itself_calls_has_to_be_the_same(tmp_path: Path) -> None:
    reads = ("+ self.offset", "+ self.offset * len(get_inputs())")
    with pytest.raises(BadInput, match="different sources"):
        export_shapes.alike([a_run(tmp_path, reads), a_run(tmp_path, reads, SIXTEEN)])


def test_programs_that_read_different_parameters_share_one_look_at_the_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[:])
    reads = ("torch.tanh(x + self.bias) + y", "(torch.tanh(x + self.bias) if x.shape[0] > 8 else torch.tanh(x)) * y")
    (tmp_path / "runs").mkdir()
    made = imported(tmp_path, [a_run(tmp_path / "runs", reads, change) for change in (FOUR, SIXTEEN)])
    ours, y = made.ModelNew(8), torch.randn(8)
    with torch.no_grad():
        for row, x in enumerate(inputs()[:2], start=1):
            assert answered_by(made, ours, x, y) == row
            torch.testing.assert_close(ours(x, y), torch.tanh(x + ours.bias * (row == 2)) * y)
        ours.double()
        assert {answered_by(made, ours, x, y) for x in inputs()} == {0}


def test_a_gpus_kernels_have_launches_of_their_own(tmp_path: Path) -> None:
    runs = [a_run(tmp_path, change, target="cuda") for change in (FOUR, SIXTEEN)]
    text = ModuleExporter().export_several(runs).text
    compile(text, "exported.py", "exec")
    for mark in ("_1", "_2"):
        assert f"_ws_launch{mark}_0 = _WsLaunch(_ws_kernels{mark}, " in text
        assert f"_ws_kernels{mark} = _WsKernels(_WS_SOURCES{mark}, 'sm_90a')" in text
    assert text.count("class _WsLaunch:") == 1


def test_a_gpus_kernels_are_compiled_from_the_file_with_the_headers_that_they_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[:])
    (tmp_path / "runs").mkdir()
    made = imported(tmp_path, [a_run(tmp_path / "runs", change, target="cuda") for change in (FOUR, SIXTEEN)])
    assert made._WS_SHARED
    codes = {made._ws_compiled(sources, "sm_90a") for sources in (made._WS_SOURCES_1, made._WS_SOURCES_2)}
    assert len(codes) == 2
    assert all(code.startswith(b"\x7fELF") for code in codes)


def test_an_input_that_is_named_as_a_launch_names_its_gpu_is_named_otherwise(tmp_path: Path) -> None:
    renamed = ("forward(self, x, y)", "forward(self, x, index)"), (" + y ", " + index ")
    text = ModuleExporter().export(a_run(tmp_path, *renamed, target="cuda")).text
    forward = text.partition("def _ws_forward(")[2]
    assert forward.count("    index = ") == 1, "the number of the GPU"
    assert "    index_ = leaves[1]" in forward


def test_the_command_writes_one_file_and_the_record_of_each_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = {run.id: run for run in (a_run(tmp_path, FOUR), a_run(tmp_path, SIXTEEN))}

    def export(asked: messages.ExportBestRequest, **_: object) -> messages.ExportBestResponse:
        wanted = [runs[each] for each in (asked.run_id, *asked.other_run_ids)]
        made = export_all(ModuleExporter(), asked.flavour, wanted)
        return messages.ExportBestResponse(file_name="own.py", text=made.text)  # type: ignore[union-attr]

    server = types.SimpleNamespace(
        ExportBest=export, GetRun=lambda asked, **_: messages.GetRunResponse(run=runs[asked.run_id])
    )

    class Reading:
        def __enter__(self) -> Any:
            return server

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(cli.client, "reading", lambda *_: Reading())
    monkeypatch.chdir(tmp_path)
    for _ in range(2):  # the second time it replaces its own
        said = CliRunner().invoke(cli.app, ["export", *runs, "-o", "fast.py"])
        assert said.exit_code == 0, said.exception
    written = {path.name for path in tmp_path.glob("fast*")}
    assert written == {"fast.py", "fast.1.record.json", "fast.2.record.json"}
    for number, run_id in enumerate(runs, start=1):
        assert f'"id": "{run_id}"' in (tmp_path / f"fast.{number}.record.json").read_text()
