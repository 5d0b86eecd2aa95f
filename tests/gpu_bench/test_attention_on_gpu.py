"""Attention in one kernel through plan, NVRTC and executor on a GPU: against fp64, on honest and on hostile values."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from agent_compile.testing import cubin_of
from agent_synthesis.testing import Applied
from gpu_bench.running.executor import Sources
from gpu_bench.running.gpu.cuda import CudaExecutor
from warpsmith.v1 import artifact_pb2, candidate_pb2

pytestmark = pytest.mark.gpu

Program = tuple[candidate_pb2.Program, artifact_pb2.Artifact]
attention = F.scaled_dot_product_attention


def one_kernel(function: Callable[..., torch.Tensor], args: tuple[torch.Tensor, ...], **setting: int | str) -> Program:
    """The program of the function as one kernel, compiled."""
    from agent_synthesis import generator
    from agent_synthesis.graphs.graph_index import GraphIndex
    from agent_synthesis.plans import fusion, moves
    from agent_synthesis.plans.plan import plan_zero
    from warpsmith.graphs.capture import capture
    from warpsmith.v1 import analysis_pb2, task_pb2

    plan = plan_zero(GraphIndex(capture(Applied(function), args)), task_pb2.TARGET_CUDA)
    last, many = plan.groups[-1].name, len(plan.groups) > 1
    kind, choice = (analysis_pb2.MOVE_KIND_FUSE, "*") if many else (analysis_pb2.MOVE_KIND_AUTHOR, "")
    plan = moves.apply(plan, analysis_pb2.Move(kind=kind, group=last, choice=choice))
    assert [group.schedule for group in plan.groups] == ["cuda_attention"]
    defaults = plan.groups[0].settings
    settings = defaults.changed(setting)
    program = generator.generate(fusion.with_settings(plan, last, settings))
    return compiled(program)


def in_parts(function: Callable[..., torch.Tensor], args: tuple[torch.Tensor, ...]) -> Program:
    """The program of the function as two products and a softmax of ours, compiled."""
    from agent_synthesis import generator
    from agent_synthesis.graphs.graph_index import GraphIndex
    from agent_synthesis.plans import moves
    from agent_synthesis.plans.plan import plan_zero
    from warpsmith.graphs.capture import capture
    from warpsmith.v1 import analysis_pb2, task_pb2

    plan = plan_zero(GraphIndex(capture(Applied(function), args)), task_pb2.TARGET_CUDA)
    plan = moves.apply(plan, analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group=plan.groups[-1].name))
    assert [group.schedule for group in plan.groups][-3:] == ["cuda_product", "cuda_row_reduction", "cuda_product"]
    return compiled(generator.generate(plan))


def compiled(program: candidate_pb2.Program) -> Program:
    pytest.importorskip("cuda.bindings.nvrtc")
    return program, cubin_of(program)


def ran(made: Program, args: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """What the program gives on the GPU, twice the same."""
    call = CudaExecutor().load(*made, torch.device("cuda", 0)).bind(Sources(list(args), {}, {}))
    (first,), (second,) = call(), call()
    torch.cuda.synchronize()
    assert torch.equal(first.nan_to_num(7.0), second.nan_to_num(7.0))
    return first


def truth_of(function: Callable[..., torch.Tensor], args: tuple[torch.Tensor, ...]) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return function(*(value.double() if value.is_floating_point() else value for value in args))


def heads_last(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Of (batch, sequence, head, element), as projections give them."""
    made = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return made.transpose(1, 2).reshape(q.shape[0], q.shape[1], -1)


def packed(x: torch.Tensor) -> torch.Tensor:
    """Of queries, keys and values beside each other in one tensor."""
    q, k, v = x.permute(2, 0, 3, 1, 4).unbind(0)
    return attention(q, k, v, is_causal=True)


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return attention(q, k, v, is_causal=True)


def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return attention(q, k, v, mask)


def grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return attention(q, k, v, enable_gqa=True)


def grouped_causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return attention(q, k, v, enable_gqa=True, is_causal=True)


def grouped_heads_last(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return attention(q, k, v, mask, enable_gqa=True).transpose(1, 2)


def repeated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    k, v = (x[:, :, None].expand(-1, -1, 3, -1, -1).reshape(q.shape[:2] + x.shape[2:]) for x in (k, v))
    return attention(q, k, v, is_causal=True)


def shared_by(group: int, queries: int, keys: int, depth: int, *, heads: int = 2) -> tuple[torch.Tensor, ...]:
    """Queries of two layers with heads that share one of a few heads of keys."""
    return *of(queries, keys, depth, layers=(2, group * heads))[:1], *of(queries, keys, depth, layers=(2, heads))[1:]


def some(*shape: int) -> torch.Tensor:
    """A mask of bools whose second row of each layer sees nothing, and of which the first 128 columns hide much."""
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(6)) < 0.7
    mask[..., 1, :] = False
    mask[..., 2:9, :128] = False
    return mask


def of(
    queries: int, keys: int, depth: int, columns: int = 0, layers: tuple[int, ...] = (2, 3)
) -> tuple[torch.Tensor, ...]:
    shapes = ((*layers, queries, depth), (*layers, keys, depth), (*layers, keys, columns or depth))
    return tuple(torch.randn(*shape, generator=torch.Generator().manual_seed(5)) for shape in shapes)


CASES: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...], torch.dtype, dict[str, int | str]]] = {
    "odd lengths": (attention, of(300, 257, 64), torch.bfloat16, {}),
    "three warpgroups": (attention, of(300, 257, 64), torch.bfloat16, {"warpgroups": 3, "ping_pong": "no"}),
    "three warpgroups in ping-pong": (
        attention,
        of(500, 640, 64),
        torch.bfloat16,
        {"warpgroups": 3, "ping_pong": "yes"},
    ),
    "small tiles of keys": (attention, of(300, 513, 128), torch.bfloat16, {"keys": 64, "stages": 3, "lag": 8}),
    "one tile of keys": (attention, of(77, 50, 80), torch.float16, {}),
    "many keys": (attention, of(129, 5000, 128, layers=(1, 2)), torch.float16, {"ping_pong": "no", "lag": 8}),
    "no batch": (attention, of(200, 200, 128, layers=()), torch.bfloat16, {}),
    "wide rows": (attention, of(200, 300, 256), torch.bfloat16, {}),
    "wider values": (attention, of(200, 300, 64, 192), torch.bfloat16, {}),
    "causal": (causal, of(300, 300, 128), torch.bfloat16, {"lag": 8}),
    "causal, fewer keys": (causal, of(700, 300, 64), torch.float16, {"warpgroups": 3, "ping_pong": "no"}),
    "causal, more keys": (causal, of(300, 700, 64), torch.bfloat16, {"keys": 64}),
    "scaled": (lambda q, k, v: attention(q, k, v, scale=0.5), of(200, 200, 64), torch.bfloat16, {}),
    "heads last": (heads_last, (torch.randn(2, 333, 4, 128),) * 3, torch.bfloat16, {}),
    "packed": (packed, (torch.randn(2, 333, 3, 4, 64),), torch.float16, {}),
    "an end": (lambda q, k, v: F.gelu(attention(q, k, v)) * 2, of(200, 300, 128), torch.bfloat16, {}),
    "a mask of bools": (masked, (*of(300, 513, 128), some(2, 3, 300, 513)), torch.bfloat16, {}),
    "bools of all heads": (masked, (*of(256, 512, 64), some(2, 1, 256, 512)), torch.float16, {"lag": 8}),
    "a mask of floats": (masked, (*of(300, 514, 128), 4 * torch.randn(2, 1, 300, 514)), torch.bfloat16, {}),
    "a mask of all": (
        masked,
        (*of(300, 514, 64), 4 * torch.randn(300, 514).masked_fill(~some(300, 514), -math.inf)),
        torch.float16,
        {"warpgroups": 3, "keys": 64, "ping_pong": "no"},
    ),
    "a mask of keys": (masked, (*of(300, 512, 256), some(2, 1, 9, 512)[:, :, -1:].contiguous()), torch.bfloat16, {}),
    "shared heads": (grouped, shared_by(4, 50, 300, 128), torch.bfloat16, {}),
    "shared heads, causal": (grouped_causal, shared_by(3, 300, 300, 128), torch.bfloat16, {}),
    "shared heads, masked": (
        grouped_heads_last,
        (*(x.transpose(1, 2).contiguous() for x in shared_by(4, 300, 200, 64)), some(2, 8, 300, 200)),
        torch.float16,
        {},
    ),
    "one head for all": (grouped_causal, shared_by(4, 300, 300, 64, heads=1), torch.bfloat16, {}),
    "heads repeated": (repeated, shared_by(3, 300, 300, 128), torch.bfloat16, {}),
}


def projected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Heads beside each other, of operands with a row of heads for each place."""
    return causal(*(x.unflatten(-1, (4, -1)).transpose(1, 2) for x in (q, k, v))).transpose(1, 2).flatten(2)


IN_PARTS: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "causal": (causal, of(300, 300, 160)),
    "causal, fewer keys": (causal, of(300, 200, 256)),
    "a mask of bools": (masked, (*of(300, 512, 160), some(2, 1, 300, 512))),
    "a mask of floats": (
        masked,
        (*of(256, 514, 160), 4 * torch.randn(256, 514).masked_fill(~some(256, 514), -math.inf)),
    ),
    "shared heads, causal": (grouped_causal, shared_by(3, 300, 300, 160)),
    "heads last": (projected, tuple(torch.randn(2, 333, 640) for _ in range(3))),
}
FLOATS: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...], dict[str, int | str]]] = {
    "heads of 32": (attention, of(1000, 1000, 32), {}),
    "heads of 64": (attention, of(300, 257, 64), {}),
    "heads of 80": (attention, of(300, 257, 80), {}),
    "heads of 128": (attention, of(300, 257, 128), {}),
    "wider values": (attention, of(200, 300, 32, 128), {}),
    "odd rows": (attention, of(200, 301, 33, 17), {}),
    "many keys": (attention, of(129, 16384, 32, layers=(1, 2)), {}),
    "three warpgroups": (attention, of(500, 640, 64), {"warpgroups": 3}),
    "without turns": (attention, of(500, 640, 64), {"ping_pong": "no", "stages": 4}),
    "causal": (causal, of(300, 300, 64), {}),
    "causal, fewer keys": (causal, of(300, 200, 128), {}),
    "a mask of bools": (masked, (*of(300, 512, 128), some(2, 1, 300, 512)), {}),
    "a mask of floats": (
        masked,
        (*of(256, 514, 64), 4 * torch.randn(256, 514).masked_fill(~some(256, 514), -math.inf)),
        {},
    ),
    "shared heads, causal": (grouped_causal, shared_by(3, 300, 300, 64), {}),
    "heads last": (projected, tuple(torch.randn(2, 333, 256) for _ in range(3)), {}),
}


@pytest.mark.parametrize("name", IN_PARTS)
@pytest.mark.parametrize("family", ["normal", "uniform", "large"])
def test_floats_err_no_more_than_the_judge_allows(name: str, family: str) -> None:
    function, args = IN_PARTS[name]
    values = (*(_drawn(family, tensor).cuda() for tensor in args[:3]), *(mask.cuda() for mask in args[3:]))
    out, truth, eager = ran(_made_in_parts(name), values).double(), truth_of(function, values), function(*values)
    assert _rms(out - truth) <= 2 * max(_rms(eager.double() - truth), 2**-23 * _rms(truth))


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("family", ["normal", "uniform", "large"])
def test_floats_in_one_kernel_err_about_as_eager_ones_at_most(name: str, family: str) -> None:
    """About: a causal row of few keys is one value or two in eager, and has the parts' rounding here."""
    function, args, _ = FLOATS[name]
    values = (*(_drawn(family, tensor).cuda() for tensor in args[:3]), *(mask.cuda() for mask in args[3:]))
    out, truth, eager = ran(_made_of_floats(name), values).double(), truth_of(function, values), function(*values)
    assert _rms(out - truth) <= 1.25 * max(_rms(eager.double() - truth), 2**-23 * _rms(truth))


@functools.cache
def _made_of_floats(name: str) -> Program:
    function, args, setting = FLOATS[name]
    return one_kernel(function, args, **setting)


@functools.cache
def _made_in_parts(name: str) -> Program:
    return in_parts(*IN_PARTS[name])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("family", ["normal", "uniform", "large"])
def test_attention_errs_no_more_than_the_judge_allows(name: str, family: str) -> None:
    function, args, dtype, _ = CASES[name]
    values = (*(_drawn(family, tensor).to("cuda", dtype) for tensor in args[:3]), *_masks(name, "cuda"))
    out, truth, eager = ran(_made(name), values).double(), truth_of(function, values), function(*values)
    rounding = 2 * torch.finfo(dtype).eps * _rms(truth)
    assert _rms(out - truth) <= 2 * max(_rms(eager.double() - truth), rounding)


@functools.cache
def _made(name: str) -> Program:
    function, args, dtype, setting = CASES[name]
    return one_kernel(function, (*(tensor.to(dtype) for tensor in args[:3]), *_masks(name, "cpu")), **setting)


def _masks(name: str, device: str) -> list[torch.Tensor]:
    """Masks of floats have the operands' type."""
    _, args, dtype, _ = CASES[name]
    return [mask.to(device, dtype if mask.is_floating_point() else None) for mask in args[3:]]


def _drawn(family: str, tensor: torch.Tensor) -> torch.Tensor:
    match family:
        case "uniform":
            return torch.rand(tensor.shape, generator=torch.Generator().manual_seed(7))
        case "large":  # rows whose softmax is nearly one key's
            return 8 * tensor
    return tensor


def _rms(tensor: torch.Tensor) -> float:
    return tensor.double().pow(2).mean().sqrt().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_scores_beyond_every_float_are_what_the_formula_says(dtype: torch.dtype) -> None:
    q, k, v = (tensor.to(dtype) for tensor in of(128, 256, 64, layers=(1, 2)))
    made = one_kernel(attention, (q, k, v))
    q, k, v = (tensor.cuda().clone() for tensor in (q, k, v))
    plain = ran(made, (q, k, v))
    q[..., 0], k[..., 0] = 1.0, 0.0
    k[0, 0, :128, 0] = -math.inf  # a whole tile of scores of -inf, before finite ones
    k[0, 1, :, 0] = -math.inf  # nothing else
    q[0, 0, 3, 5] = math.nan
    k[0, 0, 200, 0] = -math.inf
    out, truth = ran(made, (q, k, v)), truth_of(attention, (q, k, v))
    assert torch.equal(out.isnan(), truth.isnan())
    assert not out[0, 1].any()  # what sees nothing is nothing
    finite = ~truth.isnan()
    close = 1e-5 if dtype == torch.float32 else 0.01
    assert _rms(out.double()[finite] - truth[finite]) <= close * _rms(truth[finite])
    assert not plain.isnan().any()


def test_a_mask_that_is_nearly_the_least_float_hides_as_the_formula_says() -> None:
    q, k, v = (tensor.bfloat16() for tensor in of(128, 256, 64, layers=(1, 2)))
    least = torch.finfo(torch.bfloat16).min
    mask = torch.zeros(128, 256).masked_fill(~some(128, 256), least).bfloat16()  # the second row: all alike
    mask[5, :] = -math.inf
    mask[6, 7] = math.nan
    values = tuple(tensor.cuda() for tensor in (q, k, v, mask))
    out, truth = ran(one_kernel(masked, (q, k, v, mask)), values), truth_of(masked, values)
    assert torch.equal(out.isnan(), truth.isnan())
    assert out[:, :, 6].isnan().all()
    assert not out[:, :, 5].any()
    finite = ~truth.isnan()
    assert _rms(out.double()[finite] - truth[finite]) <= 0.01 * _rms(truth[finite])
    assert _rms(out[:, :, 1].double() - v.double().mean(2).cuda()) <= 0.01 * _rms(truth[:, :, 1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scores_of_a_thousand_million_leave_one_key_a_row_and_no_infinity(dtype: torch.dtype) -> None:
    q, k, v = (tensor.to("cuda", dtype) for tensor in of(300, 2048, 128))
    q, k = 1e4 * q, 1e4 * k
    made = one_kernel(attention, tuple(tensor.cpu() for tensor in (q, k, v)))
    out, truth = ran(made, (q, k, v)).double(), truth_of(attention, (q, k, v))
    assert out.isfinite().all()
    assert _rms(out - truth) <= torch.finfo(dtype).eps * _rms(truth)
