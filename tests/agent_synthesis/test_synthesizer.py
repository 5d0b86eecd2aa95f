"""The synthesizer answers from the task and the moves alone, in a jail for the user's code, and mends what it can."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from importlib.metadata import EntryPoint

import pytest

from agent_synthesis.graphs.capture_worker import capture_task
from agent_synthesis.plans import moves
from agent_synthesis.servicer import SynthesisServicer, make_servicer
from agent_synthesis.synthesizer import BuiltInSynthesizer, capture_in_worker
from warpsmith import plugins, testing
from warpsmith.contract import words
from warpsmith.errors import BadInput, IllegalMove, NotFound, UnknownPlugin
from warpsmith.settings import Settings, read
from warpsmith.v1 import analysis_pb2, graph_pb2, hypothesis_pb2, task_pb2, trial_pb2, verdict_pb2
from warpsmith.v1 import synthesis_service_pb2 as pb

HEAD = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        {body}

def get_inputs():
    {inputs}
"""


def task_of(body: str = "return x.softmax(1) * 2", inputs: str = "return [torch.rand(8, 16)]") -> task_pb2.Task:
    text = HEAD.format(body=body, inputs=inputs)
    return task_pb2.Task(
        name="t",
        sources=[task_pb2.SourceFile(path="module.py", content=text.encode())],
        entry_path="module.py",
        class_name="Model",
        target=task_pb2.TARGET_CPU,
        precision=task_pb2.PRECISION_FP32,
    )


def move(kind: str, group: str, choice: str = "", **arguments: int) -> analysis_pb2.Move:
    return analysis_pb2.Move(kind=words.move_kind_of(kind), group=group, choice=choice, arguments=arguments)


def trial_of(moves: list[analysis_pb2.Move], kind: int = verdict_pb2.FAILURE_KIND_RESOURCE) -> trial_pb2.Trial:
    trial = trial_pb2.Trial(hypothesis=hypothesis_pb2.Hypothesis(moves=moves))
    trial.verdict.state = verdict_pb2.VERDICT_STATE_FAIL
    trial.verdict.kind = kind  # type: ignore[assignment]
    return trial


def test_it_fits_the_role() -> None:
    servicer = SynthesisServicer(BuiltInSynthesizer(capture_task))
    analyze = lambda request: servicer.AnalyzePlan(request, None)  # type: ignore[arg-type]  # noqa: E731
    synthesize = lambda request: servicer.SynthesizeCandidate(request, None)  # type: ignore[arg-type]  # noqa: E731
    assert testing.check_synthesis(analyze, synthesize) == []


@pytest.mark.parametrize(("target", "alignment"), [(task_pb2.TARGET_CPU, 0), (task_pb2.TARGET_CUDA, 16)])
def test_what_a_cuda_kernel_reads_is_declared_to_be_aligned(target: task_pb2.Target.ValueType, alignment: int) -> None:
    task = task_of()
    task.target = target
    synthesizer = BuiltInSynthesizer(capture_task)
    hypothesis = hypothesis_pb2.Hypothesis(moves=[move("author", "mul")])
    program = synthesizer.synthesize(task, hypothesis).program
    assert {buffer.name: buffer.alignment_bytes for buffer in program.buffers} == {
        "x": 0,
        "softmax": alignment,
        "mul": 0,
    }


class Idle(BuiltInSynthesizer):
    """A synthesizer of another package: it knows no moves."""

    def analyze(self, task: task_pb2.Task, moves: Sequence[analysis_pb2.Move]) -> analysis_pb2.Analysis:
        del task, moves
        return analysis_pb2.Analysis(groups=[analysis_pb2.Group(name="idle")])


def test_the_environment_names_the_synthesizer(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = [EntryPoint("idle", f"{__name__}:Idle", "warpsmith.synthesizer")]
    monkeypatch.setattr(plugins, "entry_points", lambda group: [each for each in installed if each.group == group])
    servicer = make_servicer(read({"WARPSMITH_SYNTHESIZER": "idle"}))
    reply = servicer.AnalyzePlan(pb.AnalyzePlanRequest(task=task_of()), None)  # type: ignore[arg-type]
    assert reply.analysis.groups[0].name == "idle"
    with pytest.raises(UnknownPlugin, match="no synthesizer is called 'builtin'; installed: idle"):
        make_servicer(Settings())


def test_a_candidate_is_its_task_and_moves() -> None:
    synthesizer = BuiltInSynthesizer(capture_task)
    moves = [move("fuse", "mul", "softmax")]
    candidate = synthesizer.synthesize(task_of(), hypothesis_pb2.Hypothesis(moves=moves))
    assert [group.schedule for group in candidate.analysis.groups] == ["cpu_row_reduction"]
    assert not candidate.analysis.legal_moves
    other = synthesizer.synthesize(task_of(), hypothesis_pb2.Hypothesis())
    assert candidate.digest != other.digest
    assert candidate.task_digest == other.task_digest
    assert other.program.steps[0].library.target == "aten.softmax.int"


def test_a_module_is_captured_once_however_many_ask() -> None:
    captured = []

    def capture(task: task_pb2.Task) -> graph_pb2.Graph:
        captured.append(task.name)
        return capture_task(task)

    synthesizer = BuiltInSynthesizer(capture)
    threads = [threading.Thread(target=synthesizer.analyze, args=(task_of(), [])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert captured == ["t"]
    assert synthesizer.analyze(task_of(), []) is synthesizer.analyze(task_of(), [])


def test_a_move_that_does_not_apply_is_named() -> None:
    synthesizer = BuiltInSynthesizer(capture_task)
    with pytest.raises(IllegalMove, match=r"move 2 \(author nothing\): the plan has no group 'nothing'"):
        synthesizer.analyze(task_of(), [move("author", "softmax"), move("author", "nothing")])


def test_repair_goes_back_to_defaults_once() -> None:
    synthesizer = BuiltInSynthesizer(capture_task)
    wide = [move("author", "softmax"), move("set", "softmax", lanes=32)]
    hypothesis, candidate = synthesizer.repair(task_of(), trial_of(wide), "too many registers")
    assert list(hypothesis.moves) == wide[:1]
    assert "too many registers" in hypothesis.rationale
    assert list(candidate.moves) == wide[:1]
    with pytest.raises(NotFound, match="defaults already"):
        synthesizer.repair(task_of(), trial_of(wide[:1]), "")
    with pytest.raises(NotFound, match="no remedy is known for WRONG_VALUE"):
        synthesizer.repair(task_of(), trial_of(wide, verdict_pb2.FAILURE_KIND_WRONG_VALUE), "")
    with pytest.raises(BadInput, match="did not fail"):
        synthesizer.repair(task_of(), trial_pb2.Trial(), "")
    request = pb.RepairCandidateRequest(task=task_of(), failed=trial_of(wide), diagnostics="x")
    reply = SynthesisServicer(synthesizer).RepairCandidate(request, None)  # type: ignore[arg-type]
    assert reply.candidate == candidate


def test_inputs_that_depend_on_values_are_made_for_real() -> None:
    task = task_of(inputs="n = int(torch.ones(3).sum()); return [torch.rand(n, 2)]")
    graph = capture_task(task)
    assert list(graph.sources[0].spec.shape) == [3, 2]


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (task_of(body="return x.no_such_thing()"), r"module\.py:6: forward raised AttributeError"),
        (task_of(body="return x + 1 if x.sum() > 0 else x"), r"^module\.py:6: .*does not export.*needs the value"),
        (task_of(body="return x[: int(x[0, 0])]"), r"^module\.py:6: .*needs the value of a tensor to go on"),
        (task_of(body="return x[x > 0]"), r"^module\.py:6: .*shape depends on values.*torch\.where"),
        (task_of(body="return torch.unique(x + 1)"), r"^module\.py:6: .*shape depends on values"),
        (task_of(body="return (x + 1).to_sparse()"), r"^module\.py:6: .*layout torch\.sparse_coo"),
        (
            task_of(body="return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))"),
            r"^module\.py:6: forward uses torch\.cond",
        ),
        (task_of(body="return 3"), r"module\.py.*returns a int"),
        (task_of(inputs="return []"), r"module\.py: get_inputs\(\) returned no tensor"),
    ],
)
def test_modules_that_do_not_capture_are_explained(task: task_pb2.Task, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        capture_task(task)


def test_the_users_module_runs_in_a_jailed_process() -> None:
    graph = capture_in_worker(task_of())
    assert graph == capture_task(task_of())
    with pytest.raises(BadInput, match=r"module\.py:6: forward raised AttributeError"):
        capture_in_worker(task_of(body="return x.no_such_thing()"))
    with pytest.raises(BadInput, match="the process ended while capturing"):
        capture_in_worker(task_of(inputs="import os; os._exit(3)"))


def test_a_task_that_allows_tf32_gets_products_that_may_use_it_after_a_rewrite_too() -> None:
    body = "return (x @ x.T + 0.0) * 1.0"
    task = task_of(body, "return [torch.rand(512, 512)]")
    task.target = task_pb2.TARGET_CUDA
    for precision, engine in ((task_pb2.PRECISION_FP32, "fp16x3"), (task_pb2.PRECISION_TF32, "tf32")):
        task.precision = precision
        synthesizer = BuiltInSynthesizer(capture_task)
        rewrites = [
            each.move
            for each in moves.legal(synthesizer.plan(task, []))
            if each.move.kind == analysis_pb2.MOVE_KIND_REWRITE
        ]
        assert rewrites
        for before in ([], rewrites[:1]):
            product = next(name for name in synthesizer.plan(task, before).index.nodes if "matmul" in name)
            plan = synthesizer.plan(task, [*before, move("author", product)])
            assert plan.group(product).settings.engine == engine
