"""The prepared track: which steps depend on parameters alone, what is kept of them, and what a call then runs."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from agent_synthesis.generator import generate
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.plans import analysis, cost, moves
from agent_synthesis.plans.plan import Plan, plan_zero
from gpu_bench.policy import objections_to_kept
from gpu_bench.running.executor import Sources
from gpu_bench.timing.floor import work_of
from warpsmith.graphs import aten
from warpsmith.graphs.capture import capture
from warpsmith.graphs.kept import is_function, kept_calls
from warpsmith.program_steps import buffers_of
from warpsmith.v1 import analysis_pb2, candidate_pb2, graph_pb2, task_pb2, tensor_pb2

CPU = task_pb2.TARGET_CPU
WHOLE = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group="*", choice="beside_products")


class Normed(nn.Module):
    """A layer whose weight is a direction and a length, and a gate that reads the bias."""

    def __init__(self) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.randn(24, 16))
        self.g, self.b = nn.Parameter(torch.rand(24, 1)), nn.Parameter(torch.randn(24))
        self.register_buffer("scale", torch.tensor(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.v * (self.g / self.v.norm(dim=1, keepdim=True))
        return torch.relu(functional.linear(x, weight, self.b) * self.scale) * torch.sigmoid(self.b)


class Deep(nn.Module):
    """Three of them, and norms between."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Normed() for _ in range(3))
        self.back = nn.Linear(24, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = functional.layer_norm(torch.tanh(self.back(layer(x))), (16,))
        return x


class Made(nn.Module):
    """An expression of an input, a parameter and a buffer."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("s", torch.randn(4, 4))
        self._forward = eval(f"lambda x, w, s: {text}", {"torch": torch})

    def forward(self, x: torch.Tensor) -> Any:
        return self._forward(x, self.w, self.s)


X = torch.randn(8, 16)


def plan_of(module: nn.Module) -> Plan:
    return plan_zero(GraphIndex(capture(module, (X,))), CPU, prepared=True)


def kept_targets(program: candidate_pb2.Program) -> list[str]:
    return [step.library.target.split(".")[1] or step.launch.entry for step in program.steps if step.prepared]


def sources(module: nn.Module) -> Sources:
    return Sources([X], {name: each.detach() for name, each in module.named_parameters()}, dict(module.named_buffers()))


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("x @ (w * s + 1)", ["mul", "add"]),
        ("x @ w.t()", ["t"]),
        ("x + torch.arange(4) * 2", ["arange", "mul"]),
        ("x @ torch.dropout(w, 0.5, True)", []),
        ("x * s.add_(1) + s * 2", []),
        ("(x + 1, w * 2)", []),
        ("(x + 1, (w * 2).t())", []),
        ("x + (w * 2).relu_()", []),
        ("torch.tanh((w * 2).index_put_((torch.tensor([0]),), x[0]))", []),
        ("x + torch.rand(4) + torch.bernoulli(w.sigmoid())", ["sigmoid"]),
        ("(x * w).sum() + (w * s).sum()", ["mul_1", "sum_2"]),
    ],
)  # fmt: skip
def test_what_is_kept_depends_on_nothing_that_changes(text: str, kept: list[str]) -> None:
    graph = capture(Made(text), (torch.randn(4, 4),))
    assert [node.name for node in graph.nodes if node.name in kept_calls(graph, prepared=True)] == kept


def test_steps_on_parameters_alone_are_marked_and_cost_nothing() -> None:
    plan = plan_of(Normed())
    program = generate(plan)
    assert kept_targets(program) == ["linalg_vector_norm", "div", "mul", "sigmoid"]
    assert not any(step.prepared for step in generate(plan_zero(plan.index, CPU)).steps)
    plain = plan_zero(plan.index, CPU)
    for group, own in zip(plan.groups, plain.groups, strict=True):
        assert (cost.of_group(plan, group).launch_count == 0) == (group.name in plan.index.kept_calls)
        assert cost.of_group(plain, own).launch_count == 1
    parameters = 4 * (24 * 16 + 24 + 24 + 1)
    assert cost.minimum(plain).read_bytes - cost.minimum(plan).read_bytes == parameters
    one, other = (analysis.describe(each, with_legal_moves=False).plan_digest for each in (plan, plain))
    assert one != other


def test_a_whole_plan_leaves_to_once_what_is_made_once() -> None:
    plan = moves.apply(plan_of(Deep()), WHOLE)
    authored = [group for group in plan.groups if group.engine == "authored"]
    assert authored
    assert not any(plan.index.kept_calls & {*plan.all_nodes(group)} for group in authored)


@pytest.mark.parametrize("module", [Normed(), Deep()], ids=["layer", "network"])
def test_a_call_runs_the_other_steps_and_gives_the_same(
    module: nn.Module, checking: ModuleType, tmp_path: Path
) -> None:
    plan = plan_of(module)
    whole = moves.apply(plan, WHOLE) if isinstance(module, Deep) else plan
    authored = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group="mul", choice="")
    programs = [generate(plan), generate(whole if whole is not plan else moves.apply(plan, authored))]
    for program, built in zip(programs, checking.compile_batch(programs, tmp_path), strict=True):
        loaded, steps = checking.loaded_from(built, program), list[None]()
        kept = loaded.keep(sources(module))
        call = loaded.bind(sources(module), after_step=lambda steps=steps: steps.append(None), kept=kept)
        with torch.no_grad():
            torch.testing.assert_close(call()[0], module(X), rtol=1e-4, atol=1e-5)
            assert len(steps) == sum(not step.prepared for step in program.steps) < len(program.steps)
            torch.testing.assert_close(loaded.bind(sources(module))()[0], module(X), rtol=1e-4, atol=1e-5)
            before = call()[0].clone()
            for parameter in module.parameters():
                parameter.mul_(1.5)
            kept.renew()
            torch.testing.assert_close(call()[0], module(X), rtol=1e-4, atol=1e-5)
            assert not torch.allclose(call()[0], before)


def test_a_prepared_step_that_reads_an_input_is_refused() -> None:
    program = generate(plan_of(Normed()))
    assert objections_to_kept(program, is_function, prepared=True) == []
    assert "a parameter or state, or is a kernel" in objections_to_kept(program, is_function, prepared=False)[0]
    next(step for step in program.steps if not step.prepared).prepared = True
    assert "is prepared and reads an input" in objections_to_kept(program, is_function, prepared=True)[0]


def test_the_floor_leaves_out_parameters_and_products_of_them() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(16, 16)), nn.Parameter(torch.randn(16, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ (self.a @ self.b)

    graph = capture(Two(), (X,))
    plain, prepared = (work_of(graph, task_pb2.PRECISION_FP32, prepared=prepared) for prepared in (False, True))
    assert (plain.parameter_bytes, prepared.parameter_bytes) == (2 * 4 * 256, 0)
    assert plain.needed_flops - prepared.needed_flops == 2 * 16**3
    assert prepared.input_bytes == plain.input_bytes == 4 * X.numel()


class Masked(nn.Module):
    """A causal mask and a table of angles, made of constants in each call, beside a parameter and an input."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = torch.tril(torch.ones(16, 16)) > 0
        angles = torch.arange(16) * torch.arange(1, 3).reshape(2, 1) * 0.5
        scores = (x[:, :, None] * x[:, None, :]).masked_fill(~seen, -1e9).softmax(-1)
        return (scores @ (torch.sin(angles).sum(0) * self.w)[:, None])[..., 0]


def test_off_that_track_what_depends_on_constants_alone_is_kept(checking: ModuleType, tmp_path: Path) -> None:
    module = Masked()
    plan = plan_zero(GraphIndex(capture(module, (X,))), CPU)
    fused = [analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group="softmax")]
    fused.append(analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_FUSE, group="softmax", choice="*"))
    programs = [generate(plan), generate(moves.apply_all(plan, fused))]
    assert {"tril", "gt", "bitwise_not", "sin", "sum"} <= {*kept_targets(programs[0])}
    for program, built in zip(programs, checking.compile_batch(programs, tmp_path), strict=True):
        assert objections_to_kept(program, is_function, prepared=False) == []
        assert not any(step.prepared and step.HasField("launch") for step in program.steps)
        reads = {name for step in program.steps if step.prepared for name in buffers_of(step)}
        assert "p_w" not in reads
        assert any(step.prepared for step in program.steps)
        loaded = checking.loaded_from(built, program)
        call = loaded.bind(sources(module), kept=loaded.keep(sources(module)))
        with torch.no_grad():
            torch.testing.assert_close(call()[0], module(X), rtol=1e-4, atol=1e-5)


def test_a_kernel_on_constants_runs_in_each_call_where_nothing_else_is_prepared() -> None:
    plan = plan_zero(GraphIndex(capture(Masked(), (X,))), CPU)
    authored = moves.apply(plan, analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group="sin"))
    assert cost.of_group(plan, plan.group("sin")).launch_count == 0
    assert cost.of_group(authored, authored.group("sin")).launch_count == 1
    (reader,) = (group for group in authored.groups if "sin" in authored.producers(group))
    assert cost.of_group(plan, plan.group(reader.name)).launch_count == 0
    assert cost.of_group(authored, reader).launch_count == 1
    program = generate(authored)
    assert not any(step.prepared for step in program.steps if step.group in ("sin", "sum_1"))
    next(step for step in program.steps if step.group == "sin").prepared = True
    assert objections_to_kept(program, is_function, prepared=False)


class Table(nn.Module):
    """Three kernels, of which two read a table of constants."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = torch.sin(torch.arange(16) * 0.5)
        y = functional.layer_norm(x * table, (16,))
        return functional.layer_norm(functional.layer_norm(torch.tanh(y).t().contiguous(), (8,)).t() * table, (16,))


def test_a_whole_plan_leaves_a_table_that_several_read_to_once() -> None:
    plan = moves.apply(plan_zero(GraphIndex(capture(Table(), (X,))), CPU), WHOLE)
    assert plan.group("sin").engine == "library"
    assert "sin" in {step.group for step in generate(plan).steps if step.prepared}


class ReadTwice(nn.Module):
    """Positions that are read before and by what is kept, and expanded ones."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(16)
        y = x + places
        wide = (places * 2 % 16).unsqueeze(0).expand(8, 16)
        return torch.tanh(y * (places * 2)) + torch.gather(x, 1, wide)


def test_what_is_kept_may_be_read_by_both_and_be_expanded(checking: ModuleType, tmp_path: Path) -> None:
    module = ReadTwice()
    program = generate(plan_zero(GraphIndex(capture(module, (X,))), CPU))
    marks = [step.prepared for step in program.steps]
    assert marks == sorted(marks, reverse=True)
    (built,) = checking.compile_batch([program], tmp_path)
    loaded = checking.loaded_from(built, program)
    kept = loaded.keep(sources(module))
    kept.renew()
    for call in (loaded.bind(sources(module), kept=kept), loaded.bind(sources(module))):
        torch.testing.assert_close(call()[0], module(X))


def program_of(*calls: tuple[str, str, list[Any], bool]) -> candidate_pb2.Program:
    """Library steps: operation, result, arguments (names of tensors, and numbers), and whether each is prepared."""
    spec = tensor_pb2.TensorSpec(dtype=tensor_pb2.DTYPE_FLOAT32, shape=[4], strides=[1])
    program = candidate_pb2.Program(target=CPU, outputs=["y"])
    x = graph_pb2.Source(name="x", origin=graph_pb2.ORIGIN_INPUT, spec=spec)
    program.buffers.add(name="x", role=candidate_pb2.ROLE_SOURCE, source=x, spec=spec)
    for target, result, arguments, prepared in calls:
        step = program.steps.add(group=result, prepared=prepared)
        step.library.target = target
        step.library.results.append(result)
        for argument in arguments:
            step.library.args.append(aten.encode(argument, lambda value: value if isinstance(value, str) else None))
        if result not in {buffer.name for buffer in program.buffers}:
            program.buffers.add(name=result, role=candidate_pb2.ROLE_LIBRARY, spec=spec)
    return program


ZEROS = ("aten.zeros.default", "k", [[4]], True)
READ = ("aten.add.Tensor", "u", ["x", "k"], False)


@pytest.mark.parametrize(
    ("calls", "why"),
    [
        ([ZEROS, READ, ("aten.fill_.Scalar", "f", ["k", 9.0], True)], "function"),
        ([ZEROS, READ, ("aten.ones.default", "k2", [[4]], True)], "behind"),
        ([ZEROS, ("aten.rand.default", "r", [[4]], True)], "function"),
        ([ZEROS, ("aten.add.Tensor", "u", ["x", "k"], True)], "reads an input"),
    ],
)  # fmt: skip
def test_a_timed_call_runs_what_a_judged_one_runs_in_the_same_order(calls: list[Any], why: str) -> None:
    program = program_of(*calls, ("aten.mul.Tensor", "y", ["x", "k"], False))
    for prepared in (False, True):
        assert why in objections_to_kept(program, is_function, prepared=prepared)[0]
    fine = program_of(ZEROS, ("aten.mul.Tensor", "y", ["x", "k"], False))
    assert objections_to_kept(fine, is_function, prepared=False) == []
