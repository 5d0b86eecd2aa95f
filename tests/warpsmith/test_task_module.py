"""A task's sources become a module, or one sentence that names the file and the cause."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from warpsmith.errors import BadInput
from warpsmith.graphs.capture import capture
from warpsmith.graphs.task_module import load
from warpsmith.v1 import task_pb2

GOOD = """
import torch
from helper_of_task import scale

class Model(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.line = torch.nn.Linear(width, 2)
    def forward(self, x, table):
        return self.line(x) * scale + table["y"][0]

def get_inputs():
    return [torch.rand(3, 4), {"y": (torch.rand(2), 7)}]

def get_init_inputs():
    return [4]
"""


def task_of(text: str) -> task_pb2.Task:
    entry = task_pb2.SourceFile(path="pack/model.py", content=text.encode())
    return task_pb2.Task(name="t", sources=[entry], entry_path="pack/model.py")


def test_a_module_of_several_files_builds_and_draws_inputs(tmp_path: Path) -> None:
    task = task_of(GOOD)
    task.sources.add(path="pack/helper_of_task.py", content=b"scale = 2.0\n")
    loaded = load(task, tmp_path)
    module = loaded.build()
    assert module.training
    assert torch.equal(module.line.weight, loaded.build().line.weight)
    args = loaded.inputs(seed=1)
    assert [tuple(leaf.shape) for leaf in loaded.tensor_leaves(args)] == [(3, 4), (2,)]
    assert torch.equal(args[0], loaded.inputs(seed=1)[0])
    assert not torch.equal(args[0], loaded.inputs(seed=2)[0])
    zeros = loaded.with_leaves(args, [torch.zeros(3, 4), torch.zeros(2)])
    assert zeros[1]["y"][1] == 7
    assert module(*zeros).shape == (3, 2)
    assert loaded.inputs(seed=1, device="meta")[0].device.type == "meta"


KEEPING = """
import torch

class Table(torch.nn.Module):
    shared = None
    def __init__(self):
        super().__init__()
        self.large, self.small, self.several = torch.rand(512, 1024), torch.rand(4), [torch.rand(512, 1024)]
        self.shared = torch.rand(512, 1024)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = Table()
"""


def test_large_tensors_in_attributes_are_buffers_in_no_state_dict(tmp_path: Path) -> None:
    module = load(task_of(KEEPING), tmp_path).build()
    assert [name for name, _ in module.named_buffers()] == ["table.large"]
    assert not module.state_dict()
    assert [module.table.shared.shape, module.table.several[0].shape] == [module.table.large.shape] * 2


BY_NAME = """
import torch

class Model(torch.nn.Module):
    def forward(self, ids, mask=None, scale=2.0, *rest, only=None):
        return ids * scale if mask is None else ids * mask * scale

def get_inputs():
    return {given}
"""


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("{'ids': ONES}", ["tensor"]),
        ("{'mask': ONES, 'ids': ONES}", ["tensor", "tensor"]),
        ("{'scale': 3.0, 'ids': ONES}", ["tensor", None, 3.0]),
        ("{'tokens': ONES, 'ids': ONES}", ["dict"]),
        ("{0: ONES}", ["dict"]),
        ("[{'ids': ONES}]", ["dict"]),
    ],
)
def test_inputs_by_name_go_to_their_places_in_forward(tmp_path: Path, given: str, expected: list[object]) -> None:
    loaded = load(task_of(BY_NAME.replace("{given}", given.replace("ONES", "torch.ones(2)"))), tmp_path)
    kinds = {torch.Tensor: "tensor", dict: "dict"}
    args = loaded.inputs(seed=1)
    assert [kinds.get(type(argument), argument) for argument in args] == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{'ids': torch.ones(2), 'only': torch.ones(2)}", r"names only, which forward takes in or behind \*rest, and"),
        ("{'mask': torch.ones(2)}", r"get_inputs\(\) gives no ids, which forward needs"),
    ],
)
def test_inputs_by_name_that_have_no_place_are_named(tmp_path: Path, given: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        load(task_of(BY_NAME.replace("{given}", given)), tmp_path).inputs(seed=1)


BY_NAME_ONLY = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
    def forward(self, x, scale=2.0, *, shift, mask=None, negate=False):
        y = self.weight * x * scale + shift
        y = y if mask is None else y * mask
        return -y if negate else y

def get_inputs():
    return {"negate": True, "x": torch.ones(2), "shift": torch.full((2,), 3.0)}
"""


def test_what_forward_takes_by_name_only_comes_last(tmp_path: Path) -> None:
    loaded = load(task_of(BY_NAME_ONLY), tmp_path)
    args = loaded.inputs(seed=1)
    assert [type(argument) for argument in args] == [torch.Tensor, float, torch.Tensor, type(None), bool]
    built = loaded.build()
    assert torch.equal(built(*args), torch.full((2,), -5.0))
    copied = copy.deepcopy(built)
    with torch.no_grad():
        copied.weight.fill_(0.0)
    assert torch.equal(copied(*args), torch.full((2,), -3.0))
    assert torch.equal(built(*args), torch.full((2,), -5.0))
    assert (type(built).__name__, type(built).__module__) == ("Model", type(built).__mro__[1].__module__)


def test_a_file_without_the_class_says_so(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"pack/model\.py: defines no class Model"):
        load(task_of("x = 1\n"), tmp_path)


def test_a_syntax_error_is_located(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"pack/model\.py:2: syntax error"):
        load(task_of("x = 1\ndef f(:\n"), tmp_path)


def test_a_failing_import_is_located(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"pack/model\.py:1: importing the file failed: ModuleNotFoundError"):
        load(task_of("import nothing_of_that_name\n"), tmp_path)


def test_a_path_that_leaves_the_folder_is_refused(tmp_path: Path) -> None:
    task = task_of("")
    task.sources.add(path="../evil.py", content=b"")
    with pytest.raises(BadInput, match="must be relative"):
        load(task, tmp_path)


MODEL = "import torch\nclass Model(torch.nn.Module):\n    def forward(self, x):\n        return x\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MODEL, r"defines no get_inputs\(\)"),
        (MODEL + "def get_inputs():\n    return [1]\n", r"get_inputs\(\) returned no tensor"),
        (MODEL + "def get_inputs():\n    return 1 / 0\n", r"pack/model\.py:6: get_inputs\(\) failed: ZeroDivision"),
    ],
)
def test_bad_inputs_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        load(task_of(text), tmp_path).inputs(seed=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class Model: pass\n", "is not an nn.Module subclass"),
        (MODEL + "def get_init_inputs():\n    return [1, 2]\n", r"Model\(\.\.\.\) failed: TypeError"),
        (MODEL + "def get_init_inputs():\n    return 3\n", "must return a list"),
        (MODEL + "def get_init_inputs():\n    raise SystemExit(3)\n", "failed: SystemExit: 3"),
    ],
)
def test_bad_constructors_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        load(task_of(text), tmp_path).build()


REGISTERED = """
import torch
from dataclasses import dataclass

@dataclass
class Out:
    a: torch.Tensor
    b: torch.Tensor

torch.export.register_dataclass(Out)

class Model(torch.nn.Module):
    def forward(self, x):
        return Out(x + 1, x * 2)

def get_inputs():
    return [torch.ones(2)]
"""


def test_a_class_that_the_file_registers_by_itself_has_a_name_in_the_outputs_structure(tmp_path: Path) -> None:
    loaded = load(task_of(REGISTERED), tmp_path)
    graph = capture(loaded.build(), loaded.inputs(seed=1))
    assert ".Out" in graph.output_tree
    assert len(graph.outputs) == 2
