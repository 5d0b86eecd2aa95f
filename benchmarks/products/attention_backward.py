"""Times attention's backward of ours beside that of PyTorch's backends.

    python -m benchmarks.products.attention --backward

Prints a table as the forward's, of the backward alone: errors of three gradients against fp64, of the first head of
keys and those that share it, over those of PyTorch's own choice, and whether bits repeat from run to run.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from agent_compile.testing import cubin_of
from agent_synthesis import generator
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.plans import fusion, moves
from agent_synthesis.plans.plan import plan_zero
from gpu_bench.running.executor import Sources
from gpu_bench.running.gpu.cuda import CudaExecutor
from warpsmith.errors import IllegalMove
from warpsmith.graphs.capture import capture
from warpsmith.graphs.library import attention_products
from warpsmith.v1 import analysis_pb2, candidate_pb2, task_pb2

if TYPE_CHECKING:
    from benchmarks.products.attention import Case

BAR = 0.95
"""Least speed against PyTorch's cuDNN backend (bf16, 128 elements, 16384 keys)."""
STAGES = (2, 3)
RUNS = 3
"""Runs whose bits are compared."""
Gradients = Sequence[torch.Tensor]
_CALL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class Backward(torch.nn.Module):
    """The call: of a gradient, operands, the result and its rows' statistics, perhaps a mask that is added."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self._causal = causal

    def forward(
        self, gradient: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        statistics: torch.Tensor, mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        made: tuple[torch.Tensor, ...] = _CALL(
            gradient, q, k, v, out, statistics, 0.0, self._causal, attn_mask=mask, scale=None
        )
        return made


def program(case: Case, stages: int) -> candidate_pb2.Program:
    """The case as kernels of ours.

    Raises:
        IllegalMove: there is no room for so many stages.
    """
    with FakeTensorMode():
        q, k, v = (torch.empty(shape, dtype=case.dtype) for shape in case.shapes())
        args = [torch.empty_like(q), q, k, v, torch.empty_like(q), torch.empty(q.shape[:-1])]
        args += [_added(mask, q) for mask in case.masks(torch.device("cpu"))]
        graph = capture(Backward(case.causal), args, "cuda")
    plan = plan_zero(GraphIndex(graph), task_pb2.TARGET_CUDA)
    name = plan.groups[-1].name
    plan = moves.apply(plan, analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group=name))
    settings = plan.group(name).settings.changed({"stages": stages})
    return generator.generate(fusion.with_settings(plan, name, settings))


def _added(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """A mask as the call takes it: floats of the operands' type, for every head."""
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
    return mask.expand(*query.shape[:-1], mask.shape[-1])


def measure(
    case: Case,
    backends: Mapping[str, torch.nn.attention.SDPBackend],
    times: Callable[[Mapping[str, Callable[[], object]]], Mapping[str, float]],
) -> list[str]:
    """The cells of the case's line; `times`: median nanoseconds of each arm."""
    device = torch.device("cuda", 0)
    draws = torch.Generator(device=device).manual_seed(3)
    operands = [torch.randn(*each, device=device, generator=draws, dtype=case.dtype) for each in case.shapes()]
    gradient = torch.randn(operands[0].shape, device=device, generator=draws, dtype=case.dtype)
    masks = case.masks(device)
    arms: dict[str, Callable[[], Gradients]] = {"default": _backward(case, operands, masks, gradient)}
    for name, backend in backends.items():
        with contextlib.suppress(RuntimeError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of backends that say why they refuse
            with sdpa_kernel(backend):
                arm = _backward(case, operands, masks, gradient)
            arm()
            arms[name] = arm
    mask = [_added(each, operands[0]) for each in masks]
    q, k, v = operands
    result, statistics = attention_products.forward(q, k, v, 0.0, case.causal, attn_mask=mask[0] if mask else None)
    for stages in STAGES:
        with contextlib.suppress(IllegalMove):
            made = program(case, stages)
            given = [gradient, *operands, result, statistics, *mask]
            arms[f"{stages} stages"] = CudaExecutor().load(made, cubin_of(made), device).bind(Sources(given, {}, {}))
    truth = _truth(case, operands, mask, gradient)
    errors = {name: _errors(case, arm(), truth) for name, arm in arms.items()}
    repeats = {name: _repeats(arm) for name, arm in arms.items()}
    ms = {name: 1e-6 * ns for name, ns in times(arms).items()}
    best = min(ms[name] for name in ("default", *backends) if name in ms)
    cells = [str(case)]
    for name in ("default", *backends):
        cells.append(f"{ms[name]:.3f}{'' if repeats[name] else ' (bits differ)'}" if name in ms else "-")
    for name in (f"{stages} stages" for stages in STAGES):
        if name not in ms:
            cells += ["-"] * 5
            continue
        ratios = [own / theirs for own, theirs in zip(errors[name], errors["default"], strict=True)]
        cells.append(f"{ms[name]:.3f} ({2.5 * case.flop_count / ms[name] / 1e9:.0f})")
        cells.append(f"{ms['cudnn'] / ms[name]:.2f}x" if "cudnn" in ms else "-")
        cells += [f"{best / ms[name]:.2f}x", " ".join(f"{each:.2f}" for each in ratios)]
        cells.append("yes" if repeats[name] else "no")
    return cells


def heads(backends: Sequence[str]) -> list[str]:
    """What the columns are."""
    found = ["attention's backward", "default, ms", *(f"{name}, ms" for name in backends)]
    for stages in STAGES:
        found += [f"{stages} stages, ms (TFLOP/s)", "against cuDNN", "against the fastest"]
        found += ["error ratios: q k v", "bits repeat"]
    return found


def reached(cells: Sequence[str], backends: Sequence[str]) -> float:
    """The best speed against cuDNN on a line; 0 where it has none."""
    first = 2 + len(backends)
    found = [cells[first + 5 * number + 1] for number in range(len(STAGES))]
    return max((float(each.rstrip("x")) for each in found if each != "-"), default=0.0)


def _backward(
    case: Case, operands: Sequence[torch.Tensor], masks: Sequence[torch.Tensor], gradient: torch.Tensor
) -> Callable[[], Gradients]:
    """PyTorch's backward, of the backend that is allowed now."""
    leaves = [each.detach().clone().requires_grad_() for each in operands]
    (q, k, v), mask = leaves, next(iter(masks), None)
    with torch.enable_grad():
        out = scaled_dot_product_attention(q, k, v, mask, is_causal=case.causal, enable_gqa=case.key_heads > 0)
    return functools.partial(torch.autograd.grad, out, leaves, gradient, retain_graph=True)


def _checked(case: Case, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The first head of keys, and those of queries that share it."""
    group = case.heads // (case.key_heads or case.heads)
    return [each[:1, : (group if each.shape[1] == case.heads else 1)] for each in tensors]


def _truth(
    case: Case, operands: Sequence[torch.Tensor], mask: Sequence[torch.Tensor], gradient: torch.Tensor
) -> Gradients:
    q, k, v, given = (each.double() for each in _checked(case, [*operands, gradient]))
    added = _checked(case, mask)[0].double() if mask else None
    out, statistics = attention_products.forward(q, k, v, 0.0, case.causal, attn_mask=added)
    return attention_products.backward(given, q, k, v, out, statistics, 0.0, case.causal, attn_mask=added)


def _errors(case: Case, made: Gradients, truth: Gradients) -> list[float]:
    found = _checked(case, made)
    return [float((one.double() - exact).square().mean().sqrt()) for one, exact in zip(found, truth, strict=True)]


def _repeats(arm: Callable[[], Gradients]) -> bool:
    first = [each.clone() for each in arm()]
    runs = ([each.clone() for each in arm()] for _ in range(RUNS))
    return all(torch.equal(one, other) for run in runs for one, other in zip(first, run, strict=True))
