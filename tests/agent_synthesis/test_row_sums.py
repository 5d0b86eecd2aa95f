"""Rows added up by an index: what a processor makes of them, in which order, and of which form they are."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree
from training_steps import ROW_SUMS, Case, Tried, integers, of

from agent_synthesis.emit.cuda.segments.segments import CudaSegments
from agent_synthesis.graphs import row_sums, splits
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.nests import interpreter
from agent_synthesis.nests.ir import Call, Load, Nest, Type
from agent_synthesis.nests.verifier import MalformedNest, verify
from agent_synthesis.plans import cost, moves
from agent_synthesis.plans.plan import Plan, schedules_for
from agent_synthesis.schedule import Emission
from agent_synthesis.testing import Applied, at, bags
from warpsmith.errors import IllegalMove
from warpsmith.graphs.capture import capture
from warpsmith.hardware import H200
from warpsmith.v1 import analysis_pb2, task_pb2

CUDA = task_pb2.TARGET_CUDA
WHOLE = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group="*")
Kernel = Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]
CompileJobs = Callable[[Sequence[object]], list[Kernel]]


class Sum(nn.Module):
    """A table's gradient is a sum of many rows for each word."""

    def __init__(self, words: int, columns: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = nn.Embedding(words, columns, padding_idx=1, dtype=dtype)

    def forward(self, i: torch.Tensor) -> torch.Tensor:
        return self.table(i)


def run_compiled(
    plan: Plan, tried: Tried, compile_jobs: CompileJobs, monkeypatch: pytest.MonkeyPatch
) -> list[torch.Tensor]:
    """The plan's outputs, its kernels compiled and run here."""
    own = [(plan.nest(group), plan.schedule(group).made, group.settings) for group in plan.groups if group.schedule]
    kernels = {nest.name: kernel for (nest, *_), kernel in zip(own, compile_jobs(own), strict=True)}

    def run(nest: Nest, memory: dict[str, torch.Tensor]) -> None:
        read = {buffer.name: memory[buffer.name] for buffer in nest.buffers if not buffer.written}
        for name, made in kernels[nest.name](read).items():
            memory[name].copy_(made)

    monkeypatch.setattr(interpreter, "run", run)
    return interpreter.run_plan(plan, tried.sources())


@pytest.mark.parametrize("name", ROW_SUMS)
def test_a_processor_adds_up_what_autograd_does(
    name: str, compile_jobs: CompileJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = Tried.of(ROW_SUMS[name])
    plan = moves.apply(tried.plan, WHOLE)
    made = run_compiled(plan, tried, compile_jobs, monkeypatch)
    for one, other in zip(made, tried.truth(), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_many_rows_of_one_word_are_added_up_with_less_error_than_eager_and_alike_each_time(
    dtype: torch.dtype, compile_jobs: CompileJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = torch.cat([torch.full((3000,), 2), integers(9, 1000)])[torch.randperm(4000)]
    tried = Tried.of((lambda: Sum(9, 40, dtype), lambda: [words]))
    plan = moves.apply(tried.plan, WHOLE)
    *_, made = run_compiled(plan, tried, compile_jobs, monkeypatch)
    *_, truth = tried.truth()
    *_, eager = pytree.tree_leaves(tried.module(*tried.args))
    assert made.dtype is dtype
    assert not made[1].any(), "the word that pads has no gradient"
    assert (made.double() - truth).abs().max() <= (eager.double() - truth).abs().max()
    *_, again = interpreter.run_plan(plan, tried.sources())
    assert torch.equal(made, again)


def test_a_lookup_among_others_is_folded_into_them_and_so_is_what_its_gradient_adds_up() -> None:
    plan = moves.apply(Tried.of(ROW_SUMS["embedding among others"], CUDA).plan, WHOLE)
    bodies = [[plan.index.nodes[node].target.split(".")[1] for node in plan.all_nodes(group)] for group in plan.groups]
    assert any("embedding" in body and len(body) > 1 for body in bodies)
    table = Tried.of((of(lambda i, w: F.embedding(i, w) * 3, (20, 8)), lambda: [integers(20, 4, 6)]), CUDA)
    made = moves.apply(table.plan, WHOLE)
    table.check(made)
    sums = next(group for group in made.groups if group.schedule == "cuda_segments")
    assert len(sums.nodes) > 1, "three times a row is made where it is added"


def test_a_gradient_of_a_vocabulary_moves_its_rows_once() -> None:
    case: Case = (lambda: nn.Embedding(4096, 512, dtype=torch.bfloat16), lambda: [integers(4096, 4, 2048)])
    plan = moves.apply(Tried.of(case, CUDA).plan, WHOLE)
    (sums,) = (group for group in plan.groups if group.schedule == "cuda_segments")
    made = cost.of_group(plan, sums)
    assert made.write_bytes == 2 * 4096 * 512
    assert made.read_bytes <= 2 * 8192 * 512 + 8 * (8192 + 4097 + 4096)
    assert made.operation_count < 16 * 8192 * 512


# ---- on a GPU: the text --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "words", "columns", "type_"),
    [(4096, 32000, 1024, Type.BF16), (4096, 500, 768, Type.F32), (600, 40, 1, Type.F32), (4096, 500, 64, Type.F64)],
)
def test_kernels_of_the_defaults_and_of_settings_beside_them_compile_without_spills(
    rows: int, words: int, columns: int, type_: Type, compile_cuda: Callable[[Emission], str]
) -> None:
    nest, schedule = bags(rows, words, columns, type_), CudaSegments(H200)
    default = schedule.defaults(nest)
    assert default.piece == (0 if rows < 1024 else 64)
    for settings in (default, *schedule.alternatives(nest, default)[::4]):
        emission = schedule.emit(nest, settings)
        assert len(emission.launches) == (2 if settings.piece else 1)
        assert set(re.findall(r"(\d+) bytes spill", compile_cuda(emission))) == {"0"}
        assert "atomic" not in emission.text


def test_a_lookup_of_rows_is_wide_accesses(compile_cuda: Callable[[Emission], str]) -> None:
    plan = moves.apply(
        Tried.of((lambda: nn.Embedding(64, 32, dtype=torch.bfloat16), lambda: [integers(64, 8)]), CUDA).plan, WHOLE
    )
    forward = plan.group("embedding")
    emission = plan.schedule(forward).emit(plan.nest(forward), forward.settings)  # type: ignore[arg-type]
    assert "ws::load<8, ws::kShared>(p_weight + (" in emission.text
    compile_cuda(emission)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lanes": 3}, "no multiple"),
        ({"vector_width": 8}, "do not lie together"),
        ({"vectors": 0}, "a vector and a row"),
        ({"piece": 512}, "do not lie in its parts"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict[str, int], reason: str) -> None:
    nest, schedule = bags(300, 40, 12), CudaSegments(H200)
    with pytest.raises(IllegalMove, match=reason):
        schedule.emit(nest, schedule.defaults(nest).changed(changes))


# ---- forms -----------------------------------------------------------------------------------------------------


def test_sums_of_integers_and_what_only_puts_stay_as_they_are() -> None:
    def tried(function: Callable[..., torch.Tensor], *args: torch.Tensor) -> GraphIndex:
        return GraphIndex(capture(Applied(function), args))

    place = integers(5, 7)
    whole = tried(lambda a, b, i: a.index_add(0, i, b), integers(9, 5, 3), integers(9, 7, 3), place)
    put = tried(lambda a, b, i: torch.index_put(a, [i], b), torch.randn(5, 3), torch.randn(7, 3), place)
    mask = tried(
        lambda a, b, m: torch.index_put(a, [m], b, accumulate=True),
        torch.randn(5, 3), torch.randn(3), torch.tensor([True, False, True, False, True]),
    )  # fmt: skip
    for index in (whole, put, mask):
        (node,) = (name for name in index.nodes if row_sums.is_one(index, name))
        assert splits.taken_apart(index, node) is None


def test_zeros_that_others_read_are_still_made() -> None:
    def both(a: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        zeros = a.new_zeros(5, 3)
        return zeros.index_add(0, i, a), zeros

    index = GraphIndex(capture(Applied(both), (torch.randn(7, 3), integers(5, 7))))  # type: ignore[arg-type]
    (node,) = (name for name in index.nodes if row_sums.is_one(index, name))
    made = splits.taken_apart(index, node)
    assert made is not None
    assert made.removed == (node,)


def test_schedules_that_know_no_parts_are_not_asked_about_them() -> None:
    for target, name in ((CUDA, "cuda_segments"), (task_pb2.TARGET_CPU, "cpu_column_reduction")):
        assert [each.name for each in schedules_for(target, bags(300, 40, 12))] == [name]


def test_parts_that_differ_by_element_are_no_nest() -> None:
    nest = bags(300, 40, 12)
    (segment,) = nest.segments
    moving = Call("segment", (segment.parts[0], Load("order", at(k=1), Type.I64), segment.parts[2]), Type.F32)
    with pytest.raises(MalformedNest, match="parts that differ by element"):
        verify(replace(nest, reductions=(replace(segment, value=moving),)))
