"""Equal parts of a network are one decision."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from agent_reasoning.roofline_reasoner import RooflineReasoner
from agent_synthesis.generator import generate
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.nests import interpreter
from agent_synthesis.plans import alike, analysis, moves
from agent_synthesis.plans.plan import Plan, plan_zero
from gpu_bench.running.executor import Sources
from warpsmith import digest
from warpsmith.contract import words
from warpsmith.errors import IllegalMove
from warpsmith.graphs import aten
from warpsmith.graphs.capture import capture
from warpsmith.hardware import H200_MEASURED
from warpsmith.program_steps import buffers_of
from warpsmith.v1 import analysis_pb2, reasoning_service_pb2, task_pb2, trial_pb2

Move, AUTHOR = analysis_pb2.Move, analysis_pb2.MOVE_KIND_AUTHOR


class Blocks(nn.Module):
    """Three equal blocks, and at the end a norm of another width."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(3))
        self.last = nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = layer(norm(x))
        return self.last(x[:, :32])


NORMS = ["layer_norm", "layer_norm_1", "layer_norm_2"]


def zero() -> Plan:
    return plan_zero(GraphIndex(capture(Blocks(), (torch.zeros(48, 64),))), task_pb2.TARGET_CUDA)


def authored() -> Plan:
    return moves.apply(zero(), Move(kind=AUTHOR, group=NORMS[0], also=NORMS[1:]))


def settings(plan: Plan) -> list[analysis_pb2.LegalMove]:
    return [each for each in moves.legal(plan) if each.move.kind == analysis_pb2.MOVE_KIND_SET]


def test_groups_that_compute_the_same_in_the_same_way_are_alike() -> None:
    found = alike.classes(zero())
    assert found["layer_norm_1"] == NORMS
    assert found["layer_norm_3"] == ["layer_norm_3"]
    one = moves.apply(zero(), Move(kind=AUTHOR, group="layer_norm_1"))
    assert alike.classes(one)["layer_norm"] == ["layer_norm", "layer_norm_2"], "another engine is another way"
    change = settings(authored())[0].move
    del change.also[:]
    changed = moves.apply(authored(), change)
    assert alike.classes(changed)["layer_norm"] == ["layer_norm"], "and so are other settings"


def test_a_move_on_all_of_them_is_as_one_on_each() -> None:
    each = moves.apply_all(zero(), [Move(kind=AUTHOR, group=name) for name in NORMS])
    assert analysis.describe(authored(), with_legal_moves=False).plan_digest == (
        analysis.describe(each, with_legal_moves=False).plan_digest
    )
    changed = moves.apply(authored(), settings(authored())[0].move)
    of = [changed.group(name).settings for name in NORMS]
    assert of[0] == of[1] == of[2] != authored().group(NORMS[0]).settings


def test_what_it_makes_is_right() -> None:
    torch.manual_seed(0)
    module, x = Blocks(), torch.randn(48, 64)
    plan = moves.apply(authored(), settings(authored())[0].move)
    members = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    sources = {
        source.name: members[source.qualified_name].detach().clone() if source.qualified_name else x
        for source in plan.index.graph.sources
    }
    wanted = aten.interpret(plan.index.graph, dict(sources))[plan.index.graph.outputs[0]]
    (result,) = interpreter.run_plan(plan, sources)
    torch.testing.assert_close(result, wanted)


def test_a_setting_is_one_decision_with_the_work_of_all() -> None:
    found = settings(authored())
    assert {tuple(each.move.also) for each in found} == {tuple(NORMS[1:])}, "none is offered of one alone"
    assert all(each.effect.endswith(", in all 3 groups that are alike") for each in found)
    single = moves.apply(zero(), Move(kind=AUTHOR, group=NORMS[0]))
    alone = next(each for each in settings(single) if each.move.choice == found[0].move.choice)
    assert found[0].before.read_bytes == 3 * alone.before.read_bytes


def test_all_become_kernels_by_one_move_and_each_by_its_own() -> None:
    offered = [each.move for each in moves.legal(zero()) if each.move.kind == AUTHOR and each.move.group in NORMS]
    assert [list(move.also) for move in offered if move.group == NORMS[0]].count(NORMS[1:]) > 0
    assert {move.group for move in offered if not move.also} == set(NORMS)
    back = [each.move for each in moves.legal(authored()) if each.move.kind == analysis_pb2.MOVE_KIND_LIBRARY]
    assert Move(kind=analysis_pb2.MOVE_KIND_LIBRARY, group=NORMS[0], also=NORMS[1:]) in back


def test_what_joins_groups_is_not_done_to_several_at_once() -> None:
    fuse = Move(kind=analysis_pb2.MOVE_KIND_FUSE, group="linear", choice="layer_norm", also=["linear_1"])
    whole = Move(kind=AUTHOR, group="*", also=["linear_1"])
    for move in (fuse, whole):
        with pytest.raises(IllegalMove, match="only author, library and set are made on several groups"):
            moves.apply(zero(), move)
    with pytest.raises(IllegalMove, match="no group 'nothing'"):
        moves.apply(zero(), Move(kind=AUTHOR, group=NORMS[0], also=["nothing"]))


def test_it_is_told_in_words_and_has_a_digest_of_its_own() -> None:
    every, one = (
        Move(kind=AUTHOR, group=NORMS[0], choice="x", also=NORMS[1:]),
        Move(kind=AUTHOR, group=NORMS[0], choice="x"),
    )
    assert words.move(every) == "author layer_norm and 2 alike x"
    assert digest.of_moves([every]) != digest.of_moves([one])


def test_a_reasoner_counts_the_gain_of_all() -> None:
    """Three slow kernels that are alike go back to the library by one move: about all of the time is saved."""

    def best(plan: Plan) -> float:
        described = analysis.describe(plan, with_legal_moves=True)
        request = reasoning_service_pb2.ProposeHypothesesRequest(
            task=task_pb2.Task(target=task_pb2.TARGET_CUDA), device=H200_MEASURED, analysis=described, limit=200
        )
        trial = trial_pb2.Trial(number=1)
        trial.candidate.moves.extend(plan.moves)
        for group in described.groups:
            step = trial.timing.steps.add(group=group.name, median_ns=9000.0 if group.name in NORMS else 100.0)
            step.computed_by = group.computed_by
        trial.timing.arms.add(kind=1, median_ns=28_000.0)
        request.history.append(trial)
        found = RooflineReasoner().propose(request).hypotheses
        return max(each.predicted_speedup for each in found if each.moves[-1].kind == analysis_pb2.MOVE_KIND_LIBRARY)

    assert best(authored()) > 1.5 * best(moves.apply(zero(), Move(kind=AUTHOR, group=NORMS[0])))


@pytest.mark.parametrize("target", [task_pb2.TARGET_CPU, task_pb2.TARGET_CUDA])
def test_groups_that_are_alike_launch_one_kernel_on_tensors_of_their_own(target: task_pb2.Target.ValueType) -> None:
    plan = plan_zero(GraphIndex(capture(Blocks(), (torch.zeros(48, 64),))), target)
    plan = moves.apply(plan, Move(kind=AUTHOR, group=NORMS[0], also=[*NORMS[1:]]))
    plan = moves.apply(plan, Move(kind=AUTHOR, group="layer_norm_3"))
    program = generate(plan)
    launches = [step.launch for step in program.steps if step.HasField("launch")]
    entries = [launch.entry for launch in launches]
    assert len(entries) == 4
    assert len({*entries}) == 2, "the last has another width"
    assert all(program.sources[0].text.count(f"{entry}(") == 1 for entry in {*entries})
    written = [launch.writes[0] for launch in launches]
    assert written == [*NORMS, "layer_norm_3"]
    read = {name for step in program.steps if step.HasField("launch") for name in buffers_of(step)}
    assert len([name for name in read if "weight" in name]) == 4
    change = next(each.move for each in moves.legal(plan) if each.move.kind == analysis_pb2.MOVE_KIND_SET)
    del change.also[:]
    other = generate(moves.apply(plan, change))
    assert len({step.launch.entry for step in other.steps if step.HasField("launch")}) == 3, "other settings"


def test_a_program_whose_kernels_are_shared_gives_what_the_module_does(checking: ModuleType, tmp_path: Path) -> None:
    module, x = Blocks(), torch.randn(48, 64)
    for norm in (*module.norms, module.last):
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    plan = plan_zero(GraphIndex(capture(module, (x,))), task_pb2.TARGET_CPU)
    program = generate(moves.apply(plan, Move(kind=AUTHOR, group="*")))
    (built,) = checking.compile_batch([program], tmp_path)
    given = Sources([x], {name: tensor.detach() for name, tensor in module.named_parameters()})
    (result,) = checking.loaded_from(built, program).bind(given)()
    with torch.no_grad():
        torch.testing.assert_close(result, module(x), rtol=1e-4, atol=1e-4)


def test_a_group_has_one_form_in_whatever_network_it_stands_and_another_for_another_shape() -> None:
    def forms(module: nn.Module, x: torch.Tensor) -> dict[str, str]:
        plan = plan_zero(GraphIndex(capture(module, (x,))), task_pb2.TARGET_CUDA)
        return {group.name: group.form for group in analysis.describe(plan, with_legal_moves=False).groups}

    first = forms(nn.Sequential(nn.LayerNorm(64), nn.GELU()), torch.randn(8, 64))
    other = forms(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)), torch.randn(8, 64))
    wider = forms(nn.Sequential(nn.LayerNorm(128), nn.GELU()), torch.randn(8, 128))
    assert first["layer_norm"] == other["layer_norm"] != wider["layer_norm"]
    assert first["gelu"] == other["gelu"] != first["layer_norm"]
    # Kept in an archive, it has to be the same in another process too.
    script = (
        "import torch; from torch import nn\n"
        "from agent_synthesis.graphs.graph_index import GraphIndex\n"
        "from agent_synthesis.plans import analysis\n"
        "from agent_synthesis.plans.plan import plan_zero\n"
        "from warpsmith.graphs.capture import capture\n"
        "graph = capture(nn.Sequential(nn.LayerNorm(64), nn.GELU()), (torch.randn(8, 64),))\n"
        f"plan = plan_zero(GraphIndex(graph), {task_pb2.TARGET_CUDA})\n"
        "print(analysis.describe(plan, with_legal_moves=False).groups[0].form)\n"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert said.strip() == first["layer_norm"]
