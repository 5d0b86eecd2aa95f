"""Modules whose training steps are tried: one for each kind of derivative."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.nests import interpreter
from agent_synthesis.plans.plan import Plan, plan_zero
from warpsmith.graphs import aten, training_step
from warpsmith.graphs.capture import capture
from warpsmith.v1 import graph_pb2, task_pb2

CPU = task_pb2.TARGET_CPU


class Function(nn.Module):
    """A function of inputs and of parameters of given shapes."""

    def __init__(
        self, function: Callable[..., Any], *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self._function = function
        for number, shape in enumerate(shapes):
            self.register_parameter(f"w{number}", nn.Parameter(torch.randn(shape, dtype=dtype) * 0.3))

    def forward(self, *args: Any) -> Any:
        return self._function(*args, *self.parameters())


class Tied(nn.Module):
    """Two layers of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(9, 9), nn.Linear(9, 9)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(self.first(x).tanh())


class Rotary(nn.Module):
    """A rotary embedding by a table."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        for name in ("cosine", "sine"):
            self.register_buffer(name, torch.randn(length, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rotary(x, self.cosine, self.sine)


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-6)


def rms_norm_by_hand(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def rotary(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat((-second, first), -1) * sine


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    return scores.masked_fill(~seen, -math.inf).softmax(-1) @ v


def integers(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape)


def of(function: Callable[..., Any], *shapes: tuple[int, ...]) -> Callable[[], nn.Module]:
    return lambda: Function(function, *shapes)


x = torch.randn
Case = tuple[Callable[[], nn.Module], Callable[[], Sequence[torch.Tensor]]]
"""Makes the module, makes its inputs."""

ROW_SUMS: dict[str, Case] = {
    "embedding": (lambda: nn.Embedding(20, 8), lambda: [integers(20, 4, 6)]),
    "embedding with padding": (lambda: nn.Embedding(7, 8, padding_idx=3), lambda: [integers(7, 4, 6)]),
    "embedding by frequency": (
        lambda: nn.Embedding(7, 8, padding_idx=0, scale_grad_by_freq=True),
        lambda: [integers(7, 4, 6)],
    ),
    "embedding among others": (
        of(lambda i, w, v: F.rms_norm(F.embedding(i, w) * 3, (8,), v), (20, 8), (8,)),
        lambda: [integers(20, 4, 6)],
    ),
    "rows": (of(lambda a, i: a[i]), lambda: [x(9, 4), integers(9, 6)]),
    "rows from the end": (of(lambda a, i: a[i]), lambda: [x(9, 4), integers(9, 6) - 6]),
    "columns": (of(lambda a, i: a[:, i]), lambda: [x(3, 9, 4), integers(9, 2, 6)]),
    "pairs": (of(lambda a, i, j: a[:, i, j]), lambda: [x(3, 9, 4), integers(9, 6), integers(4, 2, 1)]),
    "pairs apart": (of(lambda a, i, j: a[i, :, j]), lambda: [x(3, 9, 4), integers(3, 6), integers(4, 6)]),
    "selected": (of(lambda a, i: a.index_select(1, i)), lambda: [x(9, 4), integers(4, 6)]),
    "selected rows": (of(lambda a, i: a.index_select(0, i)), lambda: [x(9, 4), integers(9, 6)]),
    "gathered from a part": (of(lambda a, i: a.gather(1, i)), lambda: [x(5, 9), integers(9, 3, 4)]),
    "gathered in rows": (
        of(lambda a, i: a.gather(0, i[:, None].expand(-1, 9))),
        lambda: [x(5, 9), integers(5, 12)],
    ),
    "taken": (of(lambda a, i: a.take(i)), lambda: [x(5, 9), integers(45, 3, 4)]),
    "added to": (of(lambda a, b, i: a.index_add(0, i, b, alpha=0.5)), lambda: [x(5, 9), x(7, 9), integers(5, 7)]),
    "put into": (
        of(lambda a, b, i: torch.index_put(a, [i], b, accumulate=True)),
        lambda: [x(5, 9), x(7, 9), integers(5, 7)],
    ),
    "scattered to": (of(lambda a, b, i: a.scatter_add(1, i, b)), lambda: [x(5, 9), x(3, 11), integers(9, 3, 11)]),
}
"""Rows or elements of which several may go to one place: kernels of ours behind a sort."""
KERNELS: dict[str, Case] = {
    "relu": (of(F.relu), lambda: [x(4, 40)]),
    "gelu": (of(F.gelu), lambda: [x(4, 40)]),
    "gelu by tanh": (of(lambda a: F.gelu(a, approximate="tanh")), lambda: [x(4, 40)]),
    "gate": (of(lambda a, b: F.silu(a) * b), lambda: [x(6, 32), x(6, 32)]),
    "sigmoid and tanh": (of(lambda a: a.sigmoid() * a.tanh()), lambda: [x(3, 7)]),
    "mish": (of(F.mish), lambda: [x(3, 7)]),
    "softplus": (of(F.softplus), lambda: [x(3, 7)]),
    "elu": (of(F.elu), lambda: [x(3, 7)]),
    "leaky relu": (of(F.leaky_relu), lambda: [x(3, 7)]),
    "hardswish": (of(F.hardswish), lambda: [x(3, 7)]),
    "log-sigmoid": (of(F.logsigmoid), lambda: [x(3, 7)]),
    "parametric relu": (lambda: nn.PReLU(7), lambda: [x(3, 7)]),
    "gated linear unit": (of(F.glu), lambda: [x(3, 8)]),
    "quotient that broadcasts": (of(lambda a, b: a / (b.abs() + 1)), lambda: [x(3, 8), x(8)]),
    "choice": (of(lambda a, b: torch.where(a > b, a * 2, b.exp())), lambda: [x(3, 8), x(3, 8)]),
    "clamp": (of(lambda a: a.clamp(-0.5, 0.7)), lambda: [x(3, 8)]),
    "maximum of two": (of(torch.maximum), lambda: [x(3, 8), x(3, 8)]),
    "layer norm": (lambda: nn.LayerNorm(48), lambda: [x(6, 48)]),
    "layer norm of sequences without bias": (lambda: nn.LayerNorm(48, bias=False), lambda: [x(2, 3, 48)]),
    "root mean square norm": (of(rms_norm, (48,)), lambda: [x(6, 48)]),
    "the same by hand": (of(rms_norm_by_hand, (48,)), lambda: [x(2, 3, 48)]),
    "residual and norm": (of(lambda a, b, w: (rms_norm(a + b, w), a + b), (48,)), lambda: [x(6, 48), x(6, 48)]),
    "group norm": (lambda: nn.Sequential(nn.GroupNorm(4, 8), nn.SiLU()), lambda: [x(2, 8, 5, 5)]),
    "instance norm": (lambda: nn.InstanceNorm2d(8, affine=True), lambda: [x(2, 8, 5, 5)]),
    "batch norm": (lambda: nn.BatchNorm2d(8), lambda: [x(3, 8, 5, 5)]),
    "softmax": (of(lambda a: a.softmax(-1)), lambda: [x(5, 33)]),
    "softmax of columns": (of(lambda a: a.softmax(0)), lambda: [x(5, 33)]),
    "log-softmax": (of(lambda a: a.log_softmax(1)), lambda: [x(5, 33)]),
    "log of a sum of exponentials": (of(lambda a: a.logsumexp(-1)), lambda: [x(5, 33)]),
    "cross-entropy": (of(F.cross_entropy), lambda: [x(5, 33), integers(33, 5)]),
    "cross-entropy, smoothed": (
        of(lambda a, t: F.cross_entropy(a, t, label_smoothing=0.1)),
        lambda: [x(5, 33), integers(33, 5)],
    ),
    "cross-entropy of each sample": (
        of(lambda a, t: F.cross_entropy(a, t, reduction="none", ignore_index=3)),
        lambda: [x(5, 33), integers(33, 5)],
    ),
    "cross-entropy of images": (of(F.cross_entropy), lambda: [x(2, 7, 4, 4), integers(7, 2, 4, 4)]),
    "mean squared error": (of(F.mse_loss), lambda: [x(5, 9), x(5, 9)]),
    "Huber": (of(F.huber_loss), lambda: [x(5, 9), x(5, 9)]),
    "binary cross-entropy": (
        of(F.binary_cross_entropy_with_logits),
        lambda: [x(5, 9), torch.rand(5, 9)],
    ),
    "divergence": (
        of(lambda a, b: F.kl_div(a.log_softmax(-1), b.softmax(-1), reduction="batchmean")),
        lambda: [x(5, 9), x(5, 9)],
    ),
    "rotary embedding": (of(rotary), lambda: [x(2, 4, 6, 16), x(6, 16), x(6, 16)]),
    "sums": (of(lambda a: (a.sum(1), a.mean())), lambda: [x(5, 9)]),
    "variance": (of(lambda a: (a.var(-1), a.std(-1))), lambda: [x(5, 9)]),
    "norm": (of(lambda a: F.normalize(a, dim=-1)), lambda: [x(5, 9)]),
    "greatest": (of(lambda a: (a.amax(-1), a.max(0)[0])), lambda: [x(5, 9)]),
    "running sum": (of(lambda a: a.cumsum(-1)), lambda: [x(5, 9)]),
    "gathered": (of(lambda a, i: a.gather(1, i)), lambda: [x(5, 9), integers(9, 5, 3)]),
    "joined and cut": (of(lambda a, b: torch.cat([a, b], 1)[:, 1:5] * 2), lambda: [x(3, 4), x(3, 5)]),
    "slices": (of(lambda a: (a[:, 1:-1] * a[:, 2:], a[..., 1::3].exp(), a[-1].tanh())), lambda: [x(4, 8, 11)]),
    "cross-entropy of what comes next": (
        of(lambda a, t: F.cross_entropy(a[:, :-1].flatten(0, 1), t[:, 1:].flatten())),
        lambda: [x(3, 5, 33), integers(33, 3, 5)],
    ),
    "logarithms of chosen probabilities": (
        of(lambda a, t: a[:, :-1].log_softmax(-1).gather(2, t[:, 1:, None]).squeeze(2).sum(-1)),
        lambda: [x(3, 5, 33), integers(33, 3, 5)],
    ),
    "padded, turned, repeated": (of(lambda a: F.pad(a, (1, 2)).roll(2, 1).repeat(2, 3)), lambda: [x(3, 8)]),
    "triangle": (of(lambda a: a.tril()), lambda: [x(6, 6)]),
    "max-pooling": (lambda: nn.MaxPool2d(3, 2, 1), lambda: [x(2, 3, 9, 9)]),
    "max-pooling with gaps": (lambda: nn.MaxPool2d(2, 3), lambda: [x(2, 3, 9, 8)]),
    "max-pooling, dilated": (lambda: nn.MaxPool2d(2, 1, dilation=2), lambda: [x(2, 3, 6, 7)]),
    "max-pooling of volumes": (lambda: nn.MaxPool3d(2), lambda: [x(1, 2, 4, 4, 6)]),
    "average pooling": (lambda: nn.AvgPool2d(3, 2, 1), lambda: [x(2, 3, 9, 9)]),
    "average pooling of what is inside": (
        lambda: nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False),
        lambda: [x(2, 3, 8, 8)],
    ),
    "average pooling of sequences": (lambda: nn.AvgPool1d(3, 1, 1), lambda: [x(2, 3, 9)]),
    "adaptive pooling": (lambda: nn.AdaptiveAvgPool2d(2), lambda: [x(2, 3, 8, 8)]),
    "adaptive max-pooling": (lambda: nn.AdaptiveMaxPool2d(2), lambda: [x(2, 3, 8, 8)]),
    "global pooling": (lambda: nn.AdaptiveAvgPool2d(1), lambda: [x(2, 3, 8, 8)]),
    "repeated elements": (lambda: nn.Upsample(size=(12, 8)), lambda: [x(2, 3, 4, 4)]),
    "convolution by channel": (lambda: nn.Conv2d(6, 6, 3, 2, 1, groups=6), lambda: [x(2, 6, 8, 7)]),
    "convolution by channel, dilated": (lambda: nn.Conv1d(6, 6, 3, 1, 2, 2, 6), lambda: [x(2, 6, 11)]),
    "convolution in groups": (lambda: nn.Conv2d(8, 12, 3, groups=4, bias=False), lambda: [x(2, 8, 7, 7)]),
    "transposed convolution": (
        lambda: nn.ConvTranspose2d(6, 6, 3, 2, 1, output_padding=1, groups=6),
        lambda: [x(2, 6, 5, 5)],
    ),
    **{f"rows added up: {name}": case for name, case in ROW_SUMS.items()},
    "an output without a gradient": (of(lambda a: (a.exp(), a.argmax(-1), a.sum())), lambda: [x(3, 8)]),
    "a parameter that is not used": (of(lambda a, w, _: a * w, (8,), (8,)), lambda: [x(3, 8)]),
    "a gradient that is stopped": (of(lambda a: a * a.detach()), lambda: [x(3, 8)]),
}
"""Of which all but matrix products can be kernels of ours on a processor."""
CALLS: dict[str, Case] = {
    "linear": (lambda: nn.Linear(24, 40), lambda: [x(2, 8, 24)]),
    "two layers": (lambda: nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 24)), lambda: [x(16, 24)]),
    "tied weights": (Tied, lambda: [x(5, 9)]),
    "gated layers": (
        of(lambda a, u, v, w: (F.silu(a @ u) * (a @ v)) @ w, (24, 40), (24, 40), (40, 24)),
        lambda: [x(16, 24)],
    ),
    "product of batches": (of(torch.matmul), lambda: [x(2, 3, 8, 12), x(2, 3, 12, 8)]),
    "attention": (
        of(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)),
        lambda: [x(2, 3, 16, 8) for _ in range(3)],
    ),
    "attention by hand": (of(attention), lambda: [x(2, 3, 16, 8) for _ in range(3)]),
    "largest few": (of(lambda a: a.topk(3).values), lambda: [x(5, 9)]),
    "sorted": (of(lambda a: a.sort(-1).values), lambda: [x(5, 9)]),
    "batch norm in evaluation": (lambda: nn.BatchNorm2d(8).eval(), lambda: [x(3, 8, 5, 5)]),
    "checkpoint": (
        of(lambda a: torch.utils.checkpoint.checkpoint(lambda y: y.exp().sin(), a, use_reentrant=False)),
        lambda: [x(3, 8)],
    ),
    "transformer layer": (
        lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True),
        lambda: [x(2, 5, 16)],
    ),
}
"""With matrix products, and with what stays PyTorch's."""


@dataclass(frozen=True)
class Tried:
    """A training step, its arguments and its plan zero."""

    module: nn.Module
    args: tuple[Any, ...]
    plan: Plan

    @staticmethod
    def of(case: Case, target: task_pb2.Target.ValueType = CPU) -> Tried:
        """Of a case, all gradients that it has wanted."""
        torch.manual_seed(1)
        base, inputs = case[0](), tuple(case[1]())
        step = training_step.described(task_pb2.TrainingStep(), copy.deepcopy(base), inputs)
        base.__class__ = training_step.stepping(type(base), training_step.Step.of(step))
        args = (*inputs, *training_step.drawn(step.gradients, "cpu"))
        graph = capture(base, args, "cuda" if target == task_pb2.TARGET_CUDA else "cpu")
        return Tried(base, args, plan_zero(GraphIndex(graph), target))

    def truth(self) -> list[torch.Tensor]:
        """Outputs and gradients in float64, by autograd."""
        module = copy.deepcopy(self.module).double()
        args = pytree.tree_map_only(torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, self.args)
        return [leaf for leaf in pytree.tree_leaves(module(*args)) if isinstance(leaf, torch.Tensor)]

    def sources(self) -> dict[str, torch.Tensor]:
        """What a plan's graph reads, by name."""
        held = dict(self.module.named_parameters(remove_duplicate=False)) | dict(self.module.named_buffers())
        return {
            source.name: held[source.qualified_name].detach().clone()
            if source.qualified_name
            else self.args[source.input_index]
            for source in self.plan.index.graph.sources
            if source.origin != graph_pb2.ORIGIN_CONSTANT
        }

    def values(self) -> dict[str, torch.Tensor]:
        """Every tensor of the graph as PyTorch computes it here, by name."""
        index, found = self.plan.index, self.sources()
        constants = (each for each in index.graph.sources if each.origin == graph_pb2.ORIGIN_CONSTANT)
        found |= {each.name: aten.constant(each, torch.device("cpu")) for each in constants}
        for node in index.graph.nodes:
            results = aten.call(node.target, node.args, node.kwargs, found.__getitem__)
            found |= {
                each.name: made
                for each, made in zip(node.results, results, strict=True)
                if each.name and made is not None
            }
        return {name: self._laid_out(name, tensor) for name, tensor in found.items()}

    def strides(self, name: str) -> tuple[int, ...]:
        """Of a tensor as the plan has it."""
        return tuple(self.plan.index.spec(name).strides)

    def _laid_out(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.stride() == (strides := self.strides(name)):
            return tensor
        return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)

    def run(self) -> list[torch.Tensor]:
        """Outputs and gradients as plan zero gives them."""
        return list(interpreter.run_plan(self.plan, self.sources()))

    def check(self, plan: Plan) -> None:
        """Compares what a plan means with the truth."""
        made, wanted = interpreter.run_plan(plan, self.sources()), self.truth()
        for one, other in zip(made, wanted, strict=True):
            torch.testing.assert_close(one.double(), other.double(), rtol=1e-4, atol=1e-4)
