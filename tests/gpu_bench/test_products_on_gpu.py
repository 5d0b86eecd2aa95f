"""Matrix products through plan, NVRTC and executor on a GPU: against fp64, on honest and on hostile values."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from agent_compile.testing import cubin_of
from agent_synthesis.testing import Applied, batched_product
from gpu_bench.running.executor import Sources
from gpu_bench.running.gpu.cuda import CudaExecutor
from warpsmith.v1 import artifact_pb2, candidate_pb2

pytestmark = pytest.mark.gpu

Program = tuple[candidate_pb2.Program, artifact_pb2.Artifact]


class Ended(nn.Module):
    """A linear layer and what follows it."""

    def __init__(self, inputs: int, outputs: int, end: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self._end = end

    def forward(self, x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return self._end(self.linear(x), *rest)


def one_kernel(
    module: nn.Module, args: tuple[torch.Tensor, ...], *, held: bool = False, odd: bool = False, engine: str = ""
) -> Program:
    """The program of the module as one product, compiled; perhaps with its ends made during the next tile.

    `odd`: a product that kernels of other nests may take; `engine`: another than the usual one.
    """
    pytest.importorskip("cuda.bindings.nvrtc")
    from agent_synthesis import generator
    from agent_synthesis.graphs.graph_index import GraphIndex
    from agent_synthesis.plans import fusion, moves
    from agent_synthesis.plans.plan import plan_zero
    from warpsmith.errors import IllegalMove
    from warpsmith.graphs.capture import capture
    from warpsmith.v1 import analysis_pb2, task_pb2

    plan = plan_zero(GraphIndex(capture(module, args), allows_tf32=engine == "tf32"), task_pb2.TARGET_CUDA)
    last, many = plan.groups[-1].name, len(plan.groups) > 1
    kind, choice = (analysis_pb2.MOVE_KIND_FUSE, "*") if many else (analysis_pb2.MOVE_KIND_AUTHOR, "")
    with contextlib.suppress(IllegalMove):  # a product alone is not all that fuses with what reduces it
        plan = moves.apply(plan, analysis_pb2.Move(kind=kind, group=last, choice=choice))
    for group in plan.groups[:-1]:  # a product and what reduces it
        plan = moves.apply(plan, analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_FUSE, group=last, choice=group.name))
    (group,) = plan.groups
    assert odd or group.schedule.startswith("cuda_product")
    if held:
        wanted = {
            "epilogue": "overlapped", "columns": 192, "stages": 4, "cluster": 1, "raster": 8, "warpgroups": 2,
            "split_k": 1,
        }  # fmt: skip
        plan = fusion.with_settings(plan, group.name, group.settings.changed(wanted))
    if engine:
        around = (group.settings, *plan.alternatives(group))
        wanted = next(each for each in around if each.engine == engine)
        plan = fusion.with_settings(plan, group.name, wanted)
    program = generator.generate(plan)
    return program, cubin_of(program)


def ran(made: Program, module: nn.Module, args: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """What the program gives on the GPU, twice the same."""
    loaded = CudaExecutor().load(*made, torch.device("cuda", 0))
    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}
    call = loaded.bind(Sources(list(args), parameters, {}))
    (first,), (second,) = call(), call()
    torch.cuda.synchronize()
    assert torch.equal(first.nan_to_num(7.0), second.nan_to_num(7.0))
    return first


def heads(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A product for each head, which lie beside each other in both operands."""
    return a.transpose(1, 2) @ b.transpose(1, 2)


def batches(seed: int, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Several batch axes."""
    function, args = batched_product(seed, 152, 136, 96, dtype)
    return Applied(function), args


R = torch.randn
CASES: dict[str, tuple[nn.Module, tuple[torch.Tensor, ...]]] = {
    "weights by rows": (Ended(512, 384, lambda y, r: F.gelu(y) * 2 + r), (R(256, 512), R(256, 384))),
    "odd sizes": (Ended(333, 201, torch.relu), (R(131, 333),)),
    "parts in TF32": (Ended(333, 201, lambda y, r: F.gelu(y) + r), (R(131, 333), R(131, 201))),
    "parts in TF32, deep": (Applied(lambda a, b: a @ b.T), (R(128, 20000), R(128, 20000))),
    "parts in TF32, a batch": (Applied(lambda a, b: a @ b.transpose(1, 2)), (R(3, 150, 96), R(3, 140, 96))),
    "second by columns": (Applied(lambda a, b: a @ b), (R(199, 321), R(321, 137))),
    "both by columns": (Applied(lambda a, b: a.T @ b), (R(320, 200), R(320, 136))),
    "a batch": (Applied(torch.bmm), (R(3, 150, 96), R(3, 96, 140))),
    "deep": (Applied(lambda a, b: a @ b.T), (R(128, 20000), R(128, 20000))),
    "few rows": (Ended(320, 15361, torch.relu), (R(100, 320),)),
    "read as they are": (Applied(lambda a, b: torch.relu(a @ b)), (R(200, 65536), R(65536, 132))),
    "a batch read as it is": (Applied(lambda a, b: torch.bmm(a, b) + 1), (R(256, 72, 512), R(256, 512, 64))),
    "first by columns": (Applied(lambda a, b: a.T @ b.T), (R(96, 260), R(190, 96))),
    "a batch with one matrix": (Applied(lambda a, b: a @ b), (R(5, 70, 96), R(96, 132))),
    "the upper triangle": (Applied(lambda a, b: torch.triu(a @ b, -3)), (R(400, 96), R(96, 520))),
    "the lower triangle of a batch": (
        Applied(lambda a, b: torch.bmm(a, b).tril(1) + 1),
        (R(2, 300, 64), R(2, 64, 290)),
    ),
    "a short depth": (Applied(lambda a, b: a @ b), (R(1000, 33), R(33, 520))),
    "deep by columns": (Applied(lambda a, b: torch.relu(a @ b)), (R(96, 40007), R(40007, 150))),
    "bf16": (Ended(512, 385, torch.relu).bfloat16(), (R(300, 512).bfloat16(),)),
    "bf16 by rows": (Applied(lambda a, b: a @ b), (R(300, 512).bfloat16(), R(512, 392).bfloat16())),
    "fp16 by columns": (Applied(lambda a, b: a.T @ b), (R(512, 304).half(), R(512, 136).half())),
    "bf16 first by columns": (Applied(lambda a, b: a.T @ b.T), (R(512, 304).bfloat16(), R(136, 512).bfloat16())),
    "bf16 deep": (Applied(lambda a, b: a @ b), (R(128, 16384).bfloat16(), R(16384, 256).bfloat16())),
    "held, bf16": (Applied(lambda a, b: F.gelu(a @ b.T)), (R(1002, 2048).bfloat16(), R(3080, 2048).bfloat16())),
    "held, fp16 batch": (Applied(torch.bmm), (R(3, 264, 2048).half(), R(3, 2048, 520).half())),
    "a logsumexp of rows": (Ended(512, 1032, lambda y: torch.logsumexp(y * 2, 1, keepdim=True)), (R(300, 512),)),
    "the greatest of a batch": (Applied(lambda a, b: torch.bmm(a, b).amax(2)), (R(2, 200, 320), R(2, 320, 512))),
    "fp16 batch": (Applied(torch.bmm), (R(3, 150, 96).half(), R(3, 96, 136).half())),
    "batches in any order": batches(5),
    "batches of another order": batches(13),
    "parts in TF32, batches": batches(9),
    "batches of heads read as they are": (Applied(heads), (R(64, 128, 4, 64), R(64, 64, 4, 128))),
    "batches of small matrices": (Applied(heads), (R(256, 64, 8, 16), R(256, 16, 8, 64))),
    "bf16 batches of three axes": batches(13, torch.bfloat16),
    "bf16 batches in any order": batches(10, torch.bfloat16),
    "fp16 batches, one matrix for an axis": batches(4, torch.float16),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("family", ["normal", "uniform", "mixed", "tiny"])
def test_products_err_no_more_than_the_judge_allows(name: str, family: str) -> None:
    module, args = CASES[name]
    made = _made(name)
    values = [_drawn(family, tensor.cuda()) for tensor in args]
    module = module.cuda()
    out = ran(made, module, tuple(values)).double()
    with torch.no_grad():
        eager = module(*values)
        truth = module.double()(*(value.double() for value in values))
        module.to(args[0].dtype)
    rounding = 2 * torch.finfo(eager.dtype).eps * _rms(truth)
    assert _rms(out - truth) <= 4 * max(_rms(eager.double() - truth), rounding)


@functools.cache
def _made(name: str) -> Program:
    module, args = CASES[name]
    return one_kernel(module.cpu(), args, held=name.startswith("held"), engine="tf32x3" if "TF32" in name else "")


def _drawn(family: str, tensor: torch.Tensor) -> torch.Tensor:
    match family:
        case "uniform":
            return torch.rand_like(tensor)
        case "mixed":
            return (tensor.sign() * 10 ** (torch.rand_like(tensor.float()) * 8 - 4)).to(tensor.dtype)
        case "tiny":
            return tensor * 1e-30
    return tensor


def _rms(tensor: torch.Tensor) -> float:
    return tensor.double().pow(2).mean().sqrt().item()


@pytest.mark.parametrize(
    ("rows", "columns", "depth", "transposed", "engine"),
    [
        (300, 200, 320, True, ""),
        (300, 200, 320, True, "tf32x3"),
        (128, 15361, 256, True, ""),
        (200, 132, 65536, False, ""),
    ],
    ids=["split in memory", "split to TF32", "few rows", "read as they are"],
)
def test_rows_that_have_no_halves_are_repaired_and_others_untouched(
    rows: int, columns: int, depth: int, transposed: bool, engine: str
) -> None:
    module = Applied((lambda a, b: a @ b.T) if transposed else (lambda a, b: a @ b))
    a, b = R(rows, depth), R(columns, depth) if transposed else R(depth, columns)
    made = one_kernel(module, (a, b), engine=engine)
    a, b = a.cuda(), b.cuda()
    plain = ran(made, module, (a, b))
    a[3, 5], a[7], a[11, 2], a[13, 1], a[17, 4], a[19] = 1e30, 1e-40, float("inf"), float("nan"), 1e-20, 0.0
    a[23, 4], a[29, 0] = float("-inf"), 1e-42
    out, eager, truth = ran(made, module, (a, b)), module(a, b), module(a.double(), b.double())
    assert torch.equal(out.isnan(), eager.isnan())
    assert torch.equal(out.isinf(), eager.isinf())
    assert torch.equal(out.isneginf(), eager.isneginf())
    for row in (3, 7, 17, 19, 29):
        error = _rms(out[row].double() - truth[row])
        assert error <= 4 * max(_rms(eager[row].double() - truth[row]), 2**-22 * _rms(truth[row]))
    assert torch.equal(out[128:], plain[128:])


@pytest.mark.parametrize("family", ["normal", "uniform", "mixed", "tiny"])
@pytest.mark.parametrize("shape", [(300, 200, 320), (1024, 2048, 4096), (131, 201, 32)], ids=str)
def test_whoever_allows_tf32_gets_no_worse_than_a_library_gives(shape: tuple[int, int, int], family: str) -> None:
    rows, columns, depth = shape
    module = Applied(lambda a, b: a @ b.T)
    made = one_kernel(module, (R(rows, depth), R(columns, depth)), engine="tf32")
    a, b = (_drawn(family, torch.randn(count, depth, device="cuda")) for count in (rows, columns))
    out, truth = ran(made, module, (a, b)), module(a.double(), b.double())
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        eager = module(a, b)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    assert _rms(out - truth) <= 4 * max(_rms(eager - truth), 2**-11 * _rms(truth) / depth**0.5)


def test_a_row_of_very_different_sizes_needs_no_repair_in_tf32() -> None:
    module = Applied(lambda a, b: a @ b.T)
    a, b = torch.randn(300, 320, device="cuda"), torch.randn(200, 320, device="cuda")
    a[:, ::2] *= 1e-20
    b[:, 1::2] *= 1e-20  # halves hold neither; every sum is of neighbours that are 10^20 apart
    made = one_kernel(module, (a.cpu(), b.cpu()), engine="tf32x3")
    out, truth = ran(made, module, (a, b)), module(a.double(), b.double())
    assert _rms(out - truth) <= 4 * _rms(module(a, b) - truth)


def test_a_result_beyond_every_float_is_the_references() -> None:
    module = Applied(lambda a, b: a @ b.T)
    made = one_kernel(module, (R(256, 320), R(192, 320)))
    a, b = torch.rand(256, 320, device="cuda"), torch.rand(192, 320, device="cuda")
    a[5] *= 1e30
    b[7] *= 1e9  # their product is no float, and neither row alone says so
    b[8] *= -1e9
    out, eager = ran(made, module, (a, b)), module(a, b)
    assert eager[5, 7] == torch.inf
    assert eager[5, 8] == -torch.inf
    assert torch.equal(out.isinf(), eager.isinf())
    assert torch.equal(out.isneginf(), eager.isneginf())
    assert not out.isnan().any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("held", [False, True], ids=["direct", "held"])
def test_infinities_of_sixteen_bits_are_the_references(dtype: torch.dtype, held: bool) -> None:
    module = Applied(lambda a, b: a @ b.T)
    a, b = torch.randn(1002, 2048, dtype=dtype), torch.randn(3080, 2048, dtype=dtype)
    made = one_kernel(module, (a, b), held=held)
    a, b = a.cuda(), b.cuda()
    plain = ran(made, module, (a, b))
    large, least = torch.finfo(dtype).max / 4096, torch.finfo(dtype).smallest_normal / 4
    a[3, 5], a[7, 2], a[11, 1], a[13], a[17] = torch.inf, -torch.inf, torch.nan, large, least
    b[19] = b[19].abs() + 8  # all of one sign, so that its product with row 13 is no number of the type
    b[23, 4] = torch.inf
    a[17, 4] = a[29, 4] = 0.0
    out, eager, truth = ran(made, module, (a, b)), module(a, b), a.double() @ b.double().T
    assert eager[13, 19] == torch.inf
    assert eager[29, 23].isnan()
    assert torch.equal(out.isnan(), eager.isnan())
    assert torch.equal(out.isposinf(), eager.isposinf())
    assert torch.equal(out.isneginf(), eager.isneginf())
    for rows in ([13], [17], slice(30, None)):
        kept = eager[rows].isfinite()
        wanted, found, theirs = (each[rows].double()[kept] for each in (truth, out, eager))
        assert _rms(found - wanted) <= 2 * max(_rms(theirs - wanted), torch.finfo(dtype).eps * _rms(wanted))
    others = [column for column in range(3080) if column not in (19, 23)]
    assert torch.equal(out[30:][:, others], plain[30:][:, others])


ODD: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "a depth of one": (lambda a, b: torch.relu(a @ b), (R(128, 1), R(1, 96))),
    "a depth of one in a batch": (torch.bmm, (R(3, 128, 1), R(3, 1, 96))),
    "one row in every place": (lambda a, b: a.expand(128, 64) @ b, (R(1, 64), R(64, 96))),
    "one element for a whole depth": (lambda a, b: a.expand(128, 64) @ b, (R(128, 1), R(64, 96))),
    "one matrix for a whole batch": (lambda a, b: torch.bmm(a.expand(3, 128, 64), b), (R(1, 128, 64), R(3, 64, 96))),
    "a last row first": (lambda a, b: a.flip(0) @ b, (R(128, 64), R(64, 96))),
    "a depth backwards": (lambda a, b: a.flip(1) @ b.flip(0), (R(128, 64), R(64, 96))),
    "columns backwards": (lambda a, b: a @ b.flip(1), (R(128, 64).bfloat16(), R(64, 96).bfloat16())),
    "a result stored across": (lambda a, b: torch.relu(a @ b).T.contiguous(), (R(128, 64), R(64, 96))),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_operands_give_what_the_module_does(name: str) -> None:
    function, args = ODD[name]
    module = Applied(function)
    values = tuple(tensor.cuda() for tensor in args)
    out, eager = ran(one_kernel(module, args, odd=True), module, values), module(*values)
    truth = function(*(value.double() for value in values))
    rounding = 2 * torch.finfo(eager.dtype).eps * _rms(truth)
    assert _rms(out.double() - truth) <= 4 * max(_rms(eager.double() - truth), rounding)


LARGE: dict[str, tuple[Callable[..., torch.Tensor], tuple[tuple[int, ...], ...], torch.dtype]] = {
    "a result": (lambda a, b: a @ b.T, ((65600, 64), (32832, 64)), torch.float32),
    "a result of 16 bits": (lambda a, b: a @ b.T, ((65600, 64), (32832, 64)), torch.bfloat16),
    "many results": (torch.bmm, ((140000, 128, 64), (140000, 64, 128)), torch.float32),
    "rows": (lambda a, b: a @ b.T, ((2**24 + 64, 128), (64, 128)), torch.float32),
    "a depth": (lambda a, b: a @ b, ((128, 2**24 + 64), (2**24 + 64, 128)), torch.float32),
    "a depth across": (lambda a, b: a.T @ b.T, ((2**24 + 64, 128), (128, 2**24 + 64)), torch.float32),
    "the least of each row": (lambda a, b: (a @ b.T).amin(1), ((2**25 + 64, 64), (128, 64)), torch.float32),
}
"""Operands or results of more than 2^31 elements."""


@pytest.mark.parametrize("name", LARGE)
def test_more_than_two_to_the_31_elements_are_as_right_as_few(name: str) -> None:
    function, shapes, dtype = LARGE[name]
    with FakeTensorMode():
        args = tuple(torch.empty(shape, dtype=dtype) for shape in shapes)
    made = one_kernel(Applied(function), args)
    torch.cuda.empty_cache()  # of the tests before
    values = tuple(torch.rand(shape, dtype=dtype, device="cuda") - 0.5 for shape in shapes)
    out, eager = ran(made, Applied(function), values), function(*values)
    if name.startswith("a depth"):
        truth = torch.zeros_like(eager, dtype=torch.float64)
        for left, right in zip(*map(_by_depth, values), strict=True):
            truth += function(left.double(), right.double())
    else:
        size, eps = eager.abs().amax().item(), torch.finfo(dtype).eps
        for part, other in zip(out.flatten().split(2**28), eager.flatten().split(2**28), strict=True):
            assert (part - other).abs().amax().item() <= 16 * eps * size
        out, eager = out[-70:], eager[-70:]
        truth = function(values[0][-70:].double(), (values[1][-70:] if values[1].dim() == 3 else values[1]).double())
    rounding = 2 * torch.finfo(dtype).eps * _rms(truth)
    assert _rms(out.double() - truth) <= 4 * max(_rms(eager.double() - truth), rounding)


def _by_depth(operand: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Parts of a matrix along its longer side."""
    return operand.split(2**20, dim=int(operand.shape[1] > operand.shape[0]))
