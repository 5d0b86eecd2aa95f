"""Norms in evaluation fold into the layer before, of every kind, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.nests import interpreter
from agent_synthesis.plans import moves
from agent_synthesis.plans.plan import Plan, plan_zero
from warpsmith.errors import IllegalMove
from warpsmith.graphs.capture import capture
from warpsmith.v1 import analysis_pb2, graph_pb2, task_pb2

CPU, CUDA = task_pb2.TARGET_CPU, task_pb2.TARGET_CUDA
REWRITE = analysis_pb2.MOVE_KIND_REWRITE
FOLD = analysis_pb2.Move(kind=REWRITE, group="batch_norm", choice="norm_into_weights")


def settled(*layers: nn.Module) -> nn.Sequential:
    """Layers in evaluation, whose norms have seen something."""
    made = nn.Sequential(*layers)
    generator = torch.Generator().manual_seed(5)
    for layer in made:
        for tensor in (*layer.parameters(), *layer.buffers()):
            if tensor.is_floating_point():
                tensor.data.uniform_(0.25, 1.5, generator=generator)
    return made.eval()


def zero(module: nn.Module, x: torch.Tensor, target: Any = CPU, *, prepared: bool = False) -> Plan:
    return plan_zero(GraphIndex(capture(module, (x,))), target, prepared=prepared)


def values(plan: Plan, module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    members = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    sources = plan.index.sources.items()
    given = {n: x if s.origin == graph_pb2.ORIGIN_INPUT else members[s.qualified_name].detach() for n, s in sources}
    return interpreter.run_plan(plan, given)


def offered(plan: Plan) -> list[str]:
    return [legal.move.group for legal in moves.legal(plan) if legal.move.choice == FOLD.choice]


KINDS: list[tuple[tuple[nn.Module, ...], tuple[int, ...]]] = [
    ((nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6)), (8, 4, 33)),
    ((nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d(6)), (8, 4, 9, 9)),
    ((nn.Conv2d(4, 6, 3, groups=2, stride=2, padding="valid"), nn.BatchNorm2d(6, affine=False)), (8, 4, 19, 9)),
    ((nn.Conv2d(6, 6, 3, groups=6, padding=1), nn.BatchNorm2d(6, eps=0.1)), (8, 6, 9, 9)),
    ((nn.Conv3d(4, 6, 2), nn.BatchNorm3d(6)), (4, 4, 5, 6, 7)),
    ((nn.ConvTranspose1d(4, 6, 3), nn.BatchNorm1d(6)), (8, 4, 33)),
    ((nn.ConvTranspose2d(4, 6, 3, stride=2, bias=False), nn.BatchNorm2d(6)), (8, 4, 5, 5)),
    ((nn.Linear(10, 6), nn.BatchNorm1d(6)), (64, 10)),
]


@pytest.mark.parametrize(("layers", "extents"), KINDS, ids=lambda each: str(each[0])[:50])
@pytest.mark.parametrize("prepared", [False, True])
def test_it_folds_into_each_kind_of_layer(
    layers: tuple[nn.Module, ...], extents: tuple[int, ...], prepared: bool
) -> None:
    module, x = settled(*layers, nn.Tanh()), torch.randn(extents)
    plan = zero(module, x, prepared=prepared)
    assert offered(plan) == ["batch_norm"]
    after = moves.apply(plan, FOLD)
    assert "batch_norm" not in {node.target.split(".")[1] for node in after.index.nodes.values()}
    assert after.rewrites == ("norm_into_weights",)
    torch.testing.assert_close(values(after, module, x), values(plan, module, x), rtol=1e-5, atol=1e-5)
    kept = [name for name in after.index.nodes if name.startswith("batch_norm_")]
    assert after.index.kept_calls.issuperset(kept)
    assert kept


class Twice(nn.Module):
    """A convolution whose result is read beside its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = settled(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers[0](x)
        return self.layers[1](y) + y


IMAGES = torch.randn(8, 4, 9, 9)


@pytest.mark.parametrize(
    ("module", "x"),
    [
        (settled(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)).train(), IMAGES),
        (settled(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, track_running_stats=False)), IMAGES),
        (Twice().eval(), IMAGES),
        (settled(nn.Conv2d(4, 6, 3), nn.ReLU(), nn.BatchNorm2d(6)), IMAGES),
        (settled(nn.ConvTranspose2d(4, 6, 3, groups=2), nn.BatchNorm2d(6)), IMAGES),
        (settled(nn.Linear(9, 6), nn.BatchNorm2d(4)), IMAGES),
    ],
    ids=["training", "of the batch", "read twice", "not before it", "transposed in groups", "another dimension"],
)
def test_it_does_not_where_it_would_be_another_value(module: nn.Module, x: torch.Tensor) -> None:
    plan = zero(module, x, prepared=True)
    assert offered(plan) == []
    with pytest.raises(IllegalMove):
        moves.apply(plan, FOLD)


def test_where_it_may_gain_something() -> None:
    wide = settled(nn.Linear(128, 128), nn.BatchNorm1d(128)), torch.randn(4, 128)
    assert offered(zero(*wide)) == []
    assert offered(zero(*wide, prepared=True)) == ["batch_norm"]
    narrow = settled(nn.Linear(8, 8), nn.BatchNorm1d(8)), torch.randn(64, 8)
    assert offered(zero(*narrow, CUDA)) == ["batch_norm"]
    assert offered(zero(settled(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)), IMAGES, CUDA, prepared=True)) == []
