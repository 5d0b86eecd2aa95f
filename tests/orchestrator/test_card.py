"""The GPU that a device is goes with the task to plan, machine code and exported file; none named is an H200."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agent_compile.compiler import Compiler
from agent_synthesis.graphs.capture_worker import capture_task
from agent_synthesis.synthesizer import BuiltInSynthesizer
from gpu_bench import device
from orchestrator import testing
from orchestrator.commands import doctor
from orchestrator.exports.export_kernelbench import KernelBenchExporter
from orchestrator.exports.export_module import ModuleExporter
from orchestrator.prepare import prepare
from orchestrator.serving.device_gate import DeviceGate
from orchestrator.tasks import intake
from warpsmith import digest, hardware
from warpsmith.errors import BadInput
from warpsmith.graphs import dtypes
from warpsmith.v1 import analysis_pb2, candidate_pb2, hypothesis_pb2, run_pb2, task_pb2

MODULE = """
import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.softmax(x, dim=-1)


def get_inputs():
    return [torch.rand(16, 16384)]


def get_init_inputs():
    return []
"""
A100 = hardware.CARDS["sm_80"].message()
FUSED = hypothesis_pb2.Hypothesis(moves=[analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group="softmax")])


@pytest.fixture(scope="module")
def synthesizer() -> BuiltInSynthesizer:
    return BuiltInSynthesizer(capture=capture_task)


@pytest.fixture
def task(tmp_path: Path) -> task_pb2.Task:
    (tmp_path / "rows.py").write_text(MODULE)
    made = intake.read(intake.Request(str(tmp_path / "rows.py"), target="cuda"))
    made.inputs.append(dtypes.spec_of(torch.empty(16, 16384)))
    return made


def widest_cluster(program: candidate_pb2.Program) -> int:
    return int(max(step.launch.cluster.x for step in program.steps))


def test_a_plan_is_for_the_tasks_card(synthesizer: BuiltInSynthesizer, task: task_pb2.Task) -> None:
    unnamed = synthesizer.synthesize(task, FUSED)
    task.hardware.CopyFrom(A100)
    named = synthesizer.synthesize(task, FUSED)
    assert (unnamed.program.architecture, named.program.architecture) == ("sm_90a", "sm_80")
    assert unnamed.digest != named.digest
    assert unnamed.program.digest != named.program.digest
    assert widest_cluster(unnamed.program) > 1
    assert widest_cluster(named.program) <= 1
    offered = [each.move.choice for each in synthesizer.analyze(task, FUSED.moves).legal_moves]
    assert not any("cluster" in each or "prefetched" in each for each in offered)
    assert named.task_digest == unnamed.task_digest


def test_digests_of_an_h200_are_those_from_before_cards_were_named(
    synthesizer: BuiltInSynthesizer, task: task_pb2.Task
) -> None:
    program = synthesizer.synthesize(task, FUSED).program
    before = candidate_pb2.Program()
    before.CopyFrom(program)
    before.architecture = ""
    assert digest.of_program(before) == digest.of_program(program)


def test_a_module_on_another_card_is_planned_for_it() -> None:
    class Ampere(testing.World):
        def DescribeDevice(self, request: Any, /, timeout: float | None = None) -> Any:
            reply = super().DescribeDevice(request, timeout)
            reply.device.hardware.CopyFrom(A100)
            return reply

        def AnalyzePlan(self, request: Any, /, timeout: float | None = None) -> Any:
            asked.append(request.task.hardware.architecture)
            return super().AnalyzePlan(request, timeout)

    asked: list[str] = []
    agents = Ampere().agents()
    task = testing.task(target=task_pb2.TARGET_CUDA)
    prepared = prepare(agents, DeviceGate(agents.benchmarks), task)
    assert prepared is not None
    assert asked == ["", "sm_80"]
    assert task.hardware == A100


def test_a_card_of_another_size_has_its_own_numbers() -> None:
    found = hardware.of(task_pb2.Hardware(architecture="sm_90a", sm_count=78, l2_bytes=60 << 20, shared_bytes=232448))
    assert (found.sm_count, found.l2_bytes) == (78, 60 << 20)
    assert found.resident_clusters(8) <= 78 // 8
    assert hardware.of(task_pb2.Hardware()) is hardware.H200
    assert hardware.of(hardware.H200.message()) is hardware.H200


def properties(major: int, minor: int, sm_count: int) -> Any:
    return SimpleNamespace(
        major=major, minor=minor, multi_processor_count=sm_count, L2_cache_size=60 << 20,
        shared_memory_per_block_optin=232448, max_threads_per_multi_processor=2048,
    )  # fmt: skip


def test_a_device_says_which_card_it_is() -> None:
    assert device.hardware_of(properties(9, 0, 132)) is hardware.H200
    assert device.hardware_of(properties(8, 0, 108)) is hardware.CARDS["sm_80"]
    assert device.hardware_of(properties(9, 0, 114)).sm_count == 114
    assert device.hardware_of(properties(10, 0, 148)).architecture == "sm_100a"


def test_no_kernels_for_a_card_is_one_sentence() -> None:
    with pytest.raises(BadInput, match=r"no kernels are made for sm_75: only for sm_90a, sm_80, "):
        device.hardware_of(properties(7, 5, 40))
    foreign = candidate_pb2.Program(target=task_pb2.TARGET_CUDA, architecture="sm_75")
    foreign.sources.add(name="kernel.cu", text="")
    with pytest.raises(BadInput, match="no kernels are made for sm_75"):
        Compiler([], None).compile(foreign)


def test_an_export_runs_on_the_card_that_it_was_made_for(synthesizer: BuiltInSynthesizer, task: task_pb2.Task) -> None:
    task.hardware.CopyFrom(A100)
    run = run_pb2.Run(id="r1", state=run_pb2.RUN_STATE_FASTER, task=task)
    run.best.candidate.CopyFrom(synthesizer.synthesize(task, FUSED))
    run.best.timing.faster = True
    module, inline = (each.export(run).text for each in (ModuleExporter(), KernelBenchExporter()))
    assert "_WsKernels(_WS_SOURCES, 'sm_80')" in module
    assert "capability=(8, 0)," in module
    assert "arch=compute_80,code=sm_80" in inline
    assert "capability=(8, 0)," in inline


def test_the_doctor_says_what_is_tried_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "NVIDIA H200, 9.0\nNVIDIA H200, 9.0\nNVIDIA A100-SXM4-80GB, 8.0\nTesla T4, 7.5\n"
    monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, stdout=said))
    found = list(doctor.cards())
    assert [each.health for each in found] == [doctor.Health.GOOD, doctor.Health.LIMITED, doctor.Health.BAD]
    assert found[1].detail == "NVIDIA A100-SXM4-80GB: kernels for sm_80 compile, and were run on no such card yet"
    assert "--target cpu" in found[2].fix
