"""Intake: every bad input is one sentence that names file and cause; every good one becomes a task."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from orchestrator.tasks import intake, intake_worker, module_entry
from warpsmith.errors import BadInput
from warpsmith.sandbox.jail import Policy
from warpsmith.sandbox.worker import Worker
from warpsmith.v1 import task_pb2, tensor_pb2

GOOD = """
import torch

class Model(torch.nn.Module):
    def __init__(self, n=2):
        super().__init__()
        self.n = n

    def forward(self, x, index):
        return {"scaled": x * self.n, "index": index + 1}

def get_inputs():
    return [torch.rand(4, 8, dtype=torch.float16), torch.arange(3)]

def get_init_inputs():
    return [3]
"""


def read(path: Path, text: str) -> task_pb2.Task:
    path.write_text(text)
    return intake.read(intake.Request(str(path)))


def test_a_file_becomes_a_task_with_specs_and_digest(tmp_path: Path) -> None:
    task = intake.inspect(read(tmp_path / "scale.py", GOOD))
    assert (task.name, task.entry_path, task.class_name) == ("scale", "scale.py", "Model")
    assert [list(spec.shape) for spec in task.inputs] == [[4, 8], [3]]
    assert [spec.dtype for spec in task.outputs] == [tensor_pb2.DTYPE_FLOAT16, tensor_pb2.DTYPE_INT64]
    assert task.precision == task_pb2.PRECISION_FP16
    intake.accept(task)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class Model(:\n", r"bad\.py:1: syntax error"),
        ("import torch\ndef get_inputs(): ...\n", r"bad\.py: defines no class Model"),
        ("class Model: ...\n", r"bad\.py: defines no get_inputs"),
    ],
)
def test_what_can_be_said_without_running_is_said_at_once(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        read(tmp_path / "bad.py", text)


def test_missing_files_and_directories_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such file"):
        intake.read(intake.Request(str(tmp_path / "none.py")))
    with pytest.raises(BadInput, match="is a directory"):
        intake.read(intake.Request(str(tmp_path)))


def test_inputs_in_floats_of_8_bits_are_drawn_in_32() -> None:
    entry = module_entry.write_entry("torch.nn", "Identity", ["float8_e4m3fn[4,8]"], [])
    assert "torch.randn((4, 8)).to(torch.float8_e4m3fn)" in entry


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("float32[1 2]", "whole numbers with commas"),
        (f"float32[{'9' * 5000}]", "whole numbers with commas"),
        (f"float32[{'9' * 4000}]", "more elements than any machine holds"),
        ("float32[1000000000, 1000000000]", "more elements than any machine holds"),
    ],
)
def test_a_shape_that_no_tensor_has_is_named(spec: str, message: str) -> None:
    with pytest.raises(BadInput, match=message) as refused:
        intake.read(intake.Request("torch.nn:Softmax", [spec]))
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("text", ["[" * 90 + "]" * 90, "[" * 5000 + "]" * 5000, "{[]: 1}", "{{}}", "a=1+", "9" * 5000])
def test_a_constructors_argument_that_is_no_literal_is_named(text: str) -> None:
    with contextlib.suppress(BadInput):  # how deep a literal may be depends on Python
        intake.read(intake.Request("torch.nn:Softmax", ["float32[4]"], [text]))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (intake.Request("a\udcff.py"), r"file 'a\\udcff\.py': is not UTF-8"),
        (intake.Request("good.py", class_name="\udcff"), r"--class '\\udcff': is not UTF-8"),
        (intake.Request("torch.nn:Softmax", ["float32[4]\udcff"]), "--input .* is not UTF-8"),
        (intake.Request("torch.nn:Softmax", ["float32[4]"], ["'\udcff'"]), "--init .* is not UTF-8"),
        (intake.Request("package.good:Model", ["float32[4]"]), r"file 'package/b\\udcff\.py': is not UTF-8"),
        (intake.Request("imports.py"), r"file 'package/b\\udcff\.py': is not UTF-8"),
        (intake.Request("x" * 300 + ".py"), "cannot be read: File name too long"),
        (intake.Request("x" * 300 + ":Model", ["float32[4]"]), "cannot be looked for: File name too long"),
        (intake.Request("good.py/more.py"), "cannot be read: Not a directory"),
    ],
)
def test_names_that_no_task_or_no_file_can_have_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request_: intake.Request, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("package").mkdir()
    for name in ("a\udcff.py", "good.py", "package/__init__.py", "package/good.py", "package/b\udcff.py"):
        Path(name).write_text(GOOD)
    Path("imports.py").write_text(f"import package\n{GOOD}")
    with pytest.raises(BadInput, match=message):
        intake.read(request_)


def test_neither_a_folder_of_any_name_nor_an_import_of_any_length_is_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "b\udcff").mkdir()
    task = read(tmp_path / "b\udcff" / "good.py", f"try:\n    import {'x' * 300}\nexcept ImportError: ...\n{GOOD}")
    assert [source.path for source in task.sources] == ["good.py"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("return [torch.rand", "raise OSError('no data')\n    return [torch.rand", r"bad\.py:13: .*no data"),
        ("return [torch.rand(4, 8, dtype=torch.float16), torch.arange(3)]", "return [1]", "returned no tensor"),
        ("x * self.n", "x @ x", r"bad\.py:10: forward failed"),
        ("(torch.nn.Module)", "", "nn.Module"),
        ('{"scaled": x * self.n, "index": index + 1}', "7", "returned no tensor"),
    ],
)
def test_what_fails_when_run_names_file_and_cause(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in GOOD
    task = read(tmp_path / "bad.py", GOOD.replace(old, new))
    with pytest.raises(BadInput, match=message):
        intake_worker.inspect(task)


def test_a_module_that_looks_at_values_is_run_on_real_tensors(tmp_path: Path) -> None:
    text = GOOD.replace("return {", "assert x.sum().item() > 0\n        return {")
    seen = intake_worker.inspect(read(tmp_path / "peek.py", text))
    assert len(seen.inputs) == 2


def test_arguments_that_are_no_tensors_are_kept_as_python(tmp_path: Path) -> None:
    text = GOOD.replace("forward(self, x, index)", "forward(self, x, index, rest)")
    text = text.replace("torch.arange(3)]", "torch.arange(3), [0.5, float('inf'), 'sum', None, object]]")
    seen = intake.inspect(read(tmp_path / "numbers.py", text))
    assert list(seen.input_literals) == ["", "", "0.5", "float('inf')", "'sum'", "None", "object()"]


def test_an_argument_that_is_no_literal_is_not_accepted(tmp_path: Path) -> None:
    task = intake.inspect(read(tmp_path / "good.py", GOOD))
    task.input_literals[0] = "__import__('os').getcwd()"
    with pytest.raises(BadInput, match="is no literal"):
        intake.accept(task)


def test_a_module_that_ends_the_process_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"die\.py"):
        intake.inspect(read(tmp_path / "die.py", "import os\nos._exit(3)\n" + GOOD))


def test_files_beside_a_module_are_carried_as_far_as_it_imports_them(tmp_path: Path) -> None:
    (tmp_path / "used.py").write_text("import deeper\n")
    (tmp_path / "deeper.py").write_text("")
    (tmp_path / "unused.py").write_text("")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    task = read(tmp_path / "main.py", "import used\nfrom package import x\n" + GOOD)
    assert sorted(source.path for source in task.sources) == ["deeper.py", "main.py", "package/__init__.py", "used.py"]


def test_tasks_of_one_owner_can_share_a_worker_after_a_bad_one(tmp_path: Path) -> None:
    with Worker(intake.WORKER_ENTRY, Policy()) as worker:
        first = intake.inspect(read(tmp_path / "one.py", GOOD), worker)
        with pytest.raises(BadInput, match=r"bad\.py"):
            intake.inspect(read(tmp_path / "bad.py", GOOD + "1 / 0\n"), worker)
        second = intake.inspect(read(tmp_path / "two.py", GOOD), worker)
    assert list(first.outputs) == list(second.outputs)


def test_too_large_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="at most 8388608"):
        read(tmp_path / "large.py", GOOD + "#" * (8 << 20))


def test_a_class_in_a_package_gets_an_entry_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "blocks"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "gate.py").write_text(
        "import torch\nclass Gate(torch.nn.Module):\n"
        "    def __init__(self, n, *, scale):\n        super().__init__()\n        self.scale = scale\n"
        "    def forward(self, x, mask):\n        return x.masked_fill(mask, self.scale)\n"
    )
    monkeypatch.chdir(tmp_path)
    request = intake.Request("blocks.gate:Gate", ["float32[4, 8]", "bool[4,8]"], ["8", "scale=0.5"])
    task = intake.read(request)
    assert sorted(source.path for source in task.sources) == [
        "blocks/__init__.py",
        "blocks/gate.py",
        "warpsmith_entry.py",
    ]
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    seen = intake_worker.inspect(task)
    assert [spec.dtype for spec in seen.inputs] == [tensor_pb2.DTYPE_FLOAT32, tensor_pb2.DTYPE_BOOL]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (intake.Request("torch.nn:Softmax"), "name the inputs"),
        (intake.Request("torch.nn:Softmax", ["float33[4]"]), "float33"),
        (intake.Request("torch.nn:Softmax", ["float32[4]"], ["open('x')"]), "not a Python literal"),
        (intake.Request("no_such_package.x:Softmax", ["float32[4]"]), "no module 'no_such_package.x'"),
        (intake.Request("torch.nn:", ["float32[4]"]), "package.module:Class"),
        (intake.Request("x.py", ["float32[4]"]), "go with module:Class"),
        (intake.Request("x.py", target="tpu"), "--target tpu: choose one of auto, cpu, cuda"),
    ],
)
def test_what_is_wrong_with_a_request_is_said(request_: intake.Request, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        intake.read(request_)


def test_named_constructor_arguments_need_no_subclass() -> None:
    entry = module_entry.write_entry("torch.nn", "Softmax", ["float32[4,4]"], ["dim=-1"])
    assert "class Model" not in entry
    assert "return {'dim': -1}" in entry
