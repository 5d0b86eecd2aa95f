"""The flavour `cu`: nvcc alone compiles it, and it says what its launcher takes."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import simulated
import subjects

from benchmarks.timing import host_time
from orchestrator.exports import export_kernelbench
from orchestrator.exports.export_cu import CudaExporter
from warpsmith.errors import BadInput
from warpsmith.v1 import analysis_pb2, candidate_pb2, run_pb2, tensor_pb2

MODULE = """import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.randn(8))

    def forward(self, x):
        return torch.tanh(x + self.bias) * 0.5


def get_inputs():
    return [torch.randn(4, 8)]


def get_init_inputs():
    return []
"""
PRODUCT = (
    MODULE.replace("torch.tanh(x + self.bias) * 0.5", "torch.relu(x @ x.t())")
    .replace("torch.randn(4, 8)", "torch.randn(256, 256, dtype=torch.bfloat16)")
    .replace("torch.randn(8)", "torch.randn(8, dtype=torch.bfloat16)")
)
SUM = (
    MODULE.replace("torch.tanh(x + self.bias) * 0.5", "(x + self.bias).sum()")
    .replace("4, 8", "512, 8192")
    .replace("randn(8)", "randn(8192)")
)


def a_run(folder: Path, text: str = MODULE, target: str = "cuda") -> run_pb2.Run:
    (folder / "rows.py").write_text(text)
    return host_time.a_run(folder / "rows.py", target)


def compiled(folder: Path, run: run_pb2.Run) -> tuple[str, str]:
    """The file, and the names that its object defines."""
    exported = CudaExporter().export(run)
    assert exported.file_name == "ws_rows_launch.cu"
    (folder / exported.file_name).write_text(exported.text)
    (command,) = re.findall(r"^// Compile: (nvcc .*)$", exported.text, re.MULTILINE)
    subprocess.run(command.split(), cwd=folder, check=True)
    names = subprocess.run(["nm", "-g", "ws_rows_launch.o"], cwd=folder, check=True, capture_output=True, text=True)
    return exported.text, names.stdout


needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")


@needs_nvcc
def test_nvcc_alone_compiles_the_file_to_an_object_with_the_launcher_for_c(tmp_path: Path) -> None:
    text, names = compiled(tmp_path, a_run(tmp_path))
    assert re.search(r"\bT ws_rows_launch$", names, re.MULTILINE)
    assert "nvcc -gencode=arch=compute_90a,code=sm_90a " in text
    signature = text.partition('extern "C" int ws_rows_launch(')[2].partition(")")[0]
    taken = re.findall(r"(\w+ ?\w*\*?) (\w+)(?:,|$)", signature)
    assert [kind for kind, _ in taken] == ["const void*", "const void*", "void*", "void*", "cudaStream_t"]
    assert re.search(rf"^//   {taken[0][1]}: read, float32 \[4, 8\] by \[8, 1\]$", text, re.MULTILINE)
    assert re.search(rf"^//   {taken[1][1]}: read, float32 \[8\] by \[1\], bias$", text, re.MULTILINE)
    assert re.search(rf"^//   {taken[2][1]}: written, float32 \[4, 8\] by \[8, 1\]$", text, re.MULTILINE)


@needs_nvcc
def test_scratch_lies_in_the_callers_workspace_with_what_stays_zero_first(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    program, scratch = run.best.candidate.program, candidate_pb2.ROLE_WORKSPACE
    spec = tensor_pb2.TensorSpec(dtype=tensor_pb2.DTYPE_FLOAT32, shape=[100], strides=[1])
    program.buffers.add(name="scratch", role=scratch, spec=spec)
    counters = tensor_pb2.TensorSpec(dtype=tensor_pb2.DTYPE_INT64, shape=[3], strides=[1])
    program.buffers.add(name="counters", role=scratch, spec=counters, zero_between_calls=True)
    program.steps.add().memset.CopyFrom(candidate_pb2.Memset(buffer="scratch", byte=7))
    text, _ = compiled(tmp_path, run)
    assert "workspace: 768 bytes at a multiple of 256" in text
    assert "the first 256 are 0 before the first call" in text
    assert "cudaMemsetAsync(static_cast<char*>(workspace) + 256, 7, 400, stream)" in text


@needs_nvcc
def test_a_sum_whose_parts_lie_in_the_workspace_compiles_too(tmp_path: Path) -> None:
    text, _ = compiled(tmp_path, a_run(tmp_path, SUM))
    assert "ws::Fold<ws::Sum, float>*" in text, "a type with a comma of its own"


@pytest.mark.parametrize("subject", subjects.a_slice(), ids=lambda subject: subject.name)
def test_the_host_code_of_every_schedule_and_class_of_shape_knows_its_parameters(subject: simulated.Subject) -> None:
    program = simulated.program_of(subject.nest, subject.emission())
    for step in program.steps:
        if step.HasField("launch"):
            export_kernelbench.host_function("launch", step.launch, program)


@needs_nvcc
def test_a_product_whose_copies_see_tensor_maps_compiles_too(tmp_path: Path) -> None:
    run = a_run(tmp_path, PRODUCT)
    program = run.best.candidate.program
    assert any(argument.HasField("tensor_map") for step in program.steps for argument in step.launch.arguments)
    _, names = compiled(tmp_path, run)
    assert "cuTensorMapEncodeTiled" not in names, "the driver is asked for by the runtime"


def test_what_nvcc_alone_cannot_make_is_refused_with_the_flavours_that_fit(tmp_path: Path) -> None:
    def refused(run: run_pb2.Run, why: str) -> None:
        with pytest.raises(BadInput, match=f"{why}.*--flavour module or package"):
            CudaExporter().export(run)

    library = a_run(tmp_path)
    library.best.candidate.program.steps.add().library.target = "aten.relu.default"
    refused(library, "calls 'aten.relu.default' of PyTorch's")
    model = a_run(tmp_path)
    model.best.candidate.moves.add(kind=analysis_pb2.MOVE_KIND_WRITE)
    refused(model, "written by a model")
    returned = a_run(tmp_path)
    returned.best.candidate.program.outputs.append(returned.best.candidate.program.buffers[0].name)
    refused(returned, "gives back an input")
    refused(a_run(tmp_path, target="cpu"), "for CUDA kernels")


def test_foreign_text_in_the_comment_ends_no_line_of_it(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    run.task.name = 'rows\\\n#include "/etc/passwd"\n'
    run.best.candidate.rewrites.append("odd\\")
    lines = CudaExporter().export(run).text.splitlines()
    head = lines[: next(place for place, line in enumerate(lines) if line.startswith("#include"))]
    assert all(line.startswith("//") and not line.endswith("\\") for line in head)
    assert not any(line.startswith("#include") and "passwd" in line for line in lines)
