"""Attention: one kernel for 16-bit operands, and two products with a softmax between them for floats in wide rows.

Of floats in rows of up to 128 it is one kernel too: `test_attention_split.py`.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from attention_forms import causal, grouped_causal, masked, some
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from agent_synthesis.emit.cuda.attention import CudaAttention, require_fits
from agent_synthesis.graphs import splits
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.nests import interpreter, iteration_space
from agent_synthesis.nests.attention import attention_of
from agent_synthesis.nests.ir import Nest
from agent_synthesis.nests.product import multiplies_matrices
from agent_synthesis.plans import cost, moves
from agent_synthesis.plans.plan import Plan, plan_zero
from agent_synthesis.schedule import Emission
from agent_synthesis.settings import Settings
from warpsmith.errors import IllegalMove
from warpsmith.graphs.capture import capture
from warpsmith.hardware import H200
from warpsmith.v1 import analysis_pb2, task_pb2

GOLDEN = Path(__file__).parent.parent / "golden"
Q, K, V = (torch.randn(2, 2, 64, 160, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
attention = F.scaled_dot_product_attention


class Attention(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.function(*args)


def planned(
    function: Callable[..., torch.Tensor],
    *args: torch.Tensor,
    target: task_pb2.Target.ValueType = task_pb2.TARGET_CUDA,
) -> Plan:
    return plan_zero(GraphIndex(capture(Attention(function), args)), target)


def authored(
    function: Callable[..., torch.Tensor],
    *args: torch.Tensor,
    target: task_pb2.Target.ValueType = task_pb2.TARGET_CUDA,
) -> Plan:
    plan = planned(function, *args, target=target)
    return moves.apply(plan, analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group=plan.groups[-1].name))


def as_one_kernel(function: Callable[..., torch.Tensor], *args: torch.Tensor) -> Plan:
    plan = planned(function, *args)
    if len(plan.groups) == 1:
        return authored(function, *args)
    return moves.apply(
        plan, analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_FUSE, group=plan.groups[-1].name, choice="*")
    )


def nest_of(plan: Plan) -> Nest:
    nest = plan.nest(plan.groups[-1])
    assert isinstance(nest, Nest), nest
    return nest


def result_of(plan: Plan, *args: torch.Tensor) -> torch.Tensor:
    sources = {source.name: args[source.input_index] for source in plan.index.graph.sources}
    (made,) = interpreter.run_plan(plan, sources)
    return made


def emitted(plan: Plan, parameters: Settings | None = None) -> Emission:
    return CudaAttention(H200).emit(nest_of(plan), parameters or plan.groups[-1].settings)


# ---- of floats in wide rows: in parts


def grouped_masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return attention(q, k, v, mask, enable_gqa=True)


ONE_HEAD = (Q, K[:, :1].contiguous(), V[:, :1].contiguous())
IN_PARTS: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "plain": (attention, (Q, K, V)),
    "scaled": (lambda q, k, v: attention(q, k, v, scale=0.3), (Q, K, V)),
    "causal": (causal, (Q, K, V)),
    "a mask of bools": (masked, (Q, K, V, some(2, 1, 64, 64))),
    "a mask of floats": (masked, (Q, K, V, torch.zeros(64, 64).masked_fill(~some(64, 64), -torch.inf))),
    "shared heads": (lambda q, k, v: attention(q, k, v, enable_gqa=True), ONE_HEAD),
    "shared heads, causal": (lambda q, k, v: attention(q, k, v, enable_gqa=True, is_causal=True), ONE_HEAD),
    "shared heads, a mask each": (grouped_masked, (*ONE_HEAD, some(2, 2, 64, 64))),
    "shared heads, one mask": (grouped_masked, (*ONE_HEAD, some(2, 1, 64, 64))),
}


@pytest.mark.parametrize("name", IN_PARTS)
def test_attention_of_floats_is_two_products_and_a_softmax(name: str) -> None:
    function, args = IN_PARTS[name]
    plan = authored(function, *args)
    assert [group.schedule for group in plan.groups] == ["cuda_product", "cuda_row_reduction", "cuda_product"]
    assert not plan.rewrites
    torch.testing.assert_close(result_of(plan, *args), function(*args), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("function", [attention, causal], ids=["plain", "causal"])
def test_scores_of_floats_that_are_all_infinite_weigh_nothing_and_no_number_stays_none(
    function: Callable[..., torch.Tensor],
) -> None:
    q, k, v = (tensor.clone() for tensor in (Q, K, V))
    q[..., 0], k[..., 0] = 1.0, 0.0
    k[0, 0, :40, 0] = -torch.inf  # the first keys; of a causal row all that it sees
    k[0, 1, :, 0] = -torch.inf
    q[1, 0, 3, 5] = torch.nan
    k[1, 1, 7, 0] = torch.inf
    plan = authored(function, q, k, v)
    with sdpa_kernel(SDPBackend.MATH):  # other backends do not agree on an infinite score that a rule hides
        made, wanted = result_of(plan, q, k, v), function(q, k, v)
    assert not wanted[0, 1].any()
    assert torch.equal(made.isnan(), wanted.isnan())
    torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_floats_with_heads_beside_each_other_are_multiplied_where_they_lie() -> None:
    def projected(x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, 160)).transpose(1, 2) for part in x.chunk(3, -1))
        return causal(q, k, v).transpose(1, 2).flatten(2)

    x = torch.randn(2, 64, 1920, generator=torch.Generator().manual_seed(4))
    plan = authored(projected, x)
    assert [group.schedule for group in plan.groups] == ["cuda_product", "cuda_row_reduction", "cuda_product"]
    torch.testing.assert_close(result_of(plan, x), projected(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "function",
    [
        lambda q, k, v: attention(q, k, v, dropout_p=0.5),
        lambda q, k, v: attention(q.half(), k.half(), v.half(), dropout_p=0.5),
        lambda q, k, v: attention(q.half(), k.half(), v.half(), scale=-1.0),
        lambda q, k, v: attention(q.half()[:, :, :1], k.half(), v.half()),
        lambda q, k, v: attention(q[..., :36].bfloat16(), k[..., :36].bfloat16(), v.bfloat16(), is_causal=True),
    ],
    ids=[
        "with dropout", "of halves with dropout", "of halves, scaled the other way", "of one half-precision query",
        "of 16 bits that would be rounded on the way",
    ],
)  # fmt: skip
def test_other_attention_stays_in_the_library(function: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(IllegalMove):
        authored(function, Q, K, V)


def test_scores_too_many_to_keep_stay_in_the_library() -> None:
    many = torch.empty(1, 1, 1, 160).expand(1, 64, 8192, 160)
    with pytest.raises(IllegalMove):
        authored(attention, many, many, many)


def test_a_processor_has_no_products_of_ours_so_attention_stays_whole() -> None:
    for args in ((Q, K, V), (Q.bfloat16(), K.bfloat16(), V.bfloat16())):
        with pytest.raises(IllegalMove):
            authored(attention, *args, target=task_pb2.TARGET_CPU)


# ---- of 16-bit operands: one kernel


def heads_last(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Of (batch, sequence, head, element), as projections give them."""
    made = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return made.transpose(1, 2).reshape(q.shape[0], q.shape[1], -1)


def packed(x: torch.Tensor) -> torch.Tensor:
    """Of queries, keys and values beside each other in one tensor."""
    q, k, v = x.permute(2, 0, 3, 1, 4).unbind(0)
    return attention(q, k, v, is_causal=True)


def of(
    queries: int, keys: int, depth: int, columns: int = 0, layers: tuple[int, ...] = (2, 3)
) -> tuple[torch.Tensor, ...]:
    shapes = ((*layers, queries, depth), (*layers, keys, depth), (*layers, keys, columns or depth))
    return tuple(torch.randn(*shape, generator=torch.Generator().manual_seed(5)).bfloat16() for shape in shapes)


def grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return attention(q, k, v, enable_gqa=True)


def grouped_heads_last(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return attention(q, k, v, mask, enable_gqa=True).transpose(1, 2)


def repeated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Shared heads as models write them who do not know of a name for it."""
    k, v = (x[:, :, None].expand(-1, -1, 3, -1, -1).reshape(q.shape[:2] + x.shape[2:]) for x in (k, v))
    return attention(q, k, v, is_causal=True)


def masked_keys(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return attention(q, k, v, mask[:, None, None])


def shared_by(group: int, queries: int, keys: int, depth: int, *, last: bool = False) -> tuple[torch.Tensor, ...]:
    """Queries of two layers with heads that share one of two heads of keys."""
    made = (*of(queries, keys, depth, layers=(2, 2 * group))[:1], *of(queries, keys, depth, layers=(2, 2))[1:])
    return tuple(tensor.transpose(1, 2).contiguous() for tensor in made) if last else made


EVERY_FORM: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "odd lengths": (attention, of(77, 50, 64)),
    "halves": (attention, tuple(tensor.half() for tensor in of(64, 70, 64))),
    "causal": (lambda q, k, v: attention(q, k, v, is_causal=True), of(80, 66, 64)),
    "wider values": (attention, of(64, 40, 40, 192)),
    "wide rows": (attention, of(64, 64, 256, layers=(2,))),
    "no batch, scaled": (lambda q, k, v: attention(q, k, v, scale=0.5), of(65, 64, 128, layers=())),
    "heads last": (heads_last, (torch.randn(2, 70, 3, 64).bfloat16(),) * 3),
    "packed": (packed, (torch.randn(2, 70, 3, 4, 32).half(),)),
    "an end": (lambda q, k, v, r: F.gelu(attention(q, k, v)) + r, (*of(70, 64, 64), torch.randn(70, 64).bfloat16())),
    "a mask of bools": (masked, (*of(70, 66, 64), some(2, 3, 70, 66))),
    "a mask of odd rows": (masked, (*of(70, 65, 64), some(2, 1, 70, 65))),
    "a mask of all heads": (masked, (*of(70, 66, 64), 4 * torch.randn(2, 1, 70, 66).bfloat16())),
    "a mask of floats": (masked, (*of(70, 66, 64), torch.zeros(70, 66).masked_fill(~some(70, 66), -torch.inf))),
    "a mask of keys": (masked_keys, (*of(70, 66, 64), some(2, 2, 66)[:, 0])),
    "a mask across": (lambda q, k, v, m: attention(q, k, v, m.mT), (*of(70, 66, 64), torch.randn(66, 70).bfloat16())),
    "shared heads": (grouped, shared_by(3, 70, 66, 64)),
    "shared heads, causal": (grouped_causal, shared_by(3, 70, 66, 64)),
    "shared heads last": (grouped_heads_last, shared_by(3, 70, 66, 64, last=True)),
    "shared heads, masked": (grouped_heads_last, (*shared_by(2, 70, 66, 64, last=True), some(2, 4, 70, 66))),
    "one head for all": (grouped_causal, (*of(70, 66, 64, layers=(2, 4))[:1], *of(70, 66, 64, layers=(2, 1))[1:])),
    "heads repeated": (repeated, shared_by(3, 70, 66, 64)),
}  # fmt: skip


@pytest.mark.parametrize("name", EVERY_FORM)
def test_one_kernel_means_what_the_module_does(name: str) -> None:
    function, args = EVERY_FORM[name]
    plan = as_one_kernel(function, *args)
    assert [group.schedule for group in plan.groups] == ["cuda_attention"]
    exact = function(*(tensor.float() if tensor.is_floating_point() else tensor for tensor in args))
    torch.testing.assert_close(result_of(plan, *args).float(), exact, rtol=1e-2, atol=1e-2)


ALIKE = {"shared heads", "shared heads last", "one head for all", "heads repeated", "a mask of keys"}
"""Forms whose kernel differs from another's in its numbers alone."""


@pytest.mark.parametrize("name", sorted(EVERY_FORM.keys() - ALIKE))
def test_one_kernel_compiles_without_spilling(name: str, compile_cuda: Callable[[Emission], str]) -> None:
    function, args = EVERY_FORM[name]
    assert_compiles_well(compile_cuda(emitted(as_one_kernel(function, *args))))


@pytest.mark.parametrize(
    ("depth", "mask"),
    [(64, None), (128, None), (256, None), (128, some(512, 300).bfloat16()), (256, some(512, 301)[:, 1:])],
    ids=["64", "128, causal", "256, causal", "128, floats", "256, odd bools"],
)
def test_every_setting_compiles_without_spilling(
    depth: int, mask: torch.Tensor | None, compile_cuda: Callable[[Emission], str]
) -> None:
    masks = () if mask is None else (mask,)
    causal = mask is None and depth > 64
    plan = as_one_kernel(lambda *args: attention(*args, is_causal=causal), *of(512, 300, depth), *masks)
    settings = plan.groups[-1].settings
    for parameters in [settings, *CudaAttention(H200).alternatives(nest_of(plan), settings)]:
        assert_compiles_well(compile_cuda(emitted(plan, parameters)))


def assert_compiles_well(report: str) -> None:
    assert "0 bytes spill stores" in report
    assert "bytes spill stores" not in report.replace(" 0 bytes spill stores", "")
    assert "serializ" not in report  # what ptxas says of products that it cannot keep in flight
    assert "injected" not in report  # of a wait that it adds between them
    assert "setmaxnreg ignored" not in report


HGMMA, HGMMA_HELD, LOCAL_LOAD, LOCAL_STORE, EXPONENTIAL, MARK = 0x9F0, 0xDF0, 0x983, 0x387, 0x308, 0x9C5
GLOBAL_LOAD = 0x981
"""Low twelve bits of machine instructions of sm_90, as nvdisasm prints them; marks are where products begin or end."""


def test_machine_code_makes_exponentials_between_the_waits_for_scores_and_for_sums(
    build_cubin: Callable[[Emission], tuple[str, bytes]],
) -> None:
    plan = as_one_kernel(attention, *of(256, 512, 128))
    _, cubin = build_cubin(emitted(plan))
    found = operations(cubin, "ws_scaled_dot_product_attention_attention")
    # Scores in 8 steps of depth, of the first tile and in the loop; sums in 8 of keys, there and of the last tile.
    assert found.count(HGMMA) == 2 * 8
    assert found.count(HGMMA_HELD) == 2 * 8
    assert LOCAL_LOAD not in found
    assert LOCAL_STORE not in found
    marks = [at for at, operation in enumerate(found) if operation == MARK]
    between = [found[first:last].count(EXPONENTIAL) for first, last in itertools.pairwise(marks)]
    # Begun and waited for: the first scores; then in the loop scores and sums, with all 64 exponentials between the
    # waits for the one and for the others; then the last sums.
    assert len(marks) == 7
    assert between[3] >= 64 > between[4]


def test_machine_code_asks_for_a_mask_before_it_waits_for_the_scores(
    build_cubin: Callable[[Emission], tuple[str, bytes]],
) -> None:
    plan = as_one_kernel(masked, *of(256, 512, 128), some(256, 512))
    _, cubin = build_cubin(emitted(plan))
    found = operations(cubin, "ws_scaled_dot_product_attention_attention")
    marks = [at for at, operation in enumerate(found) if operation == MARK]
    loads = [found[first:last].count(GLOBAL_LOAD) for first, last in itertools.pairwise(marks)]
    # Two rows of 16 pairs: of the first tile, and in the loop, both between the products' beginning and the wait.
    assert loads == [32, 0, 32, 0, 0, 0]
    assert found.count(HGMMA) == found.count(HGMMA_HELD) == 2 * 8


def operations(cubin: bytes, entry: str) -> list[int]:
    """The operations of a kernel's instructions, 16 bytes each, from the sections of an ELF file."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + size * number) for number in range(count)]
    for name, _, _, _, offset, length in sections:
        start = sections[names][4] + name
        if cubin[start : cubin.index(b"\0", start)].decode() == f".text.{entry}":
            return [struct.unpack_from("<H", cubin, offset + at)[0] & 0xFFF for at in range(0, length, 16)]
    raise AssertionError(f"no code of {entry}")


def test_golden_source() -> None:
    plan = as_one_kernel(heads_last, *(torch.empty(2, 2048, 16, 128, dtype=torch.bfloat16) for _ in range(3)))
    assert emitted(plan).text == (GOLDEN / "attention.cu").read_text()


@pytest.mark.parametrize("name", ["odd lengths", "heads last", "packed", "no batch, scaled"])
def test_the_copy_engine_sees_what_the_call_reads(name: str) -> None:
    function, args = EVERY_FORM[name]
    plan = as_one_kernel(function, *args)
    (launch,) = emitted(plan).launches
    maps = [argument.tensor_map for argument in launch.arguments if argument.HasField("tensor_map")]
    given = {source.name: args[source.input_index] for source in plan.index.graph.sources}
    seen = []
    for each in maps:
        strides = [1, *(stride // 2 for stride in each.byte_strides)]
        whole = given[each.buffer].flatten().as_strided(list(each.extents)[::-1], strides[::-1])
        assert all(stride % 16 == 0 for stride in each.byte_strides)
        depth = args[0].shape[-1]
        seen.append(whole[..., whole.shape[-1] - depth :])  # what lies before an operand counts as columns
    if name == "packed":
        wanted = args[0].permute(2, 0, 3, 1, 4).unbind(0)
    else:
        wanted = tuple(tensor.transpose(1, 2) if name == "heads last" else tensor for tensor in args)
    for got, tensor in zip(seen, wanted, strict=True):
        assert torch.equal(got.flatten(0, 1), tensor.reshape(-1, *tensor.shape[-2:]))


def test_two_large_tiles_or_wide_rows_are_refused_before_they_are_compiled() -> None:
    plan = as_one_kernel(attention, *of(256, 256, 128))
    settings = plan.groups[-1].settings

    def changed(**integers: int) -> Settings:
        return settings.changed(integers)

    with pytest.raises(IllegalMove, match="shared memory"):
        require_fits(H200, nest_of(plan), changed(stages=4))
    with pytest.raises(IllegalMove, match="registers"):
        require_fits(H200, nest_of(plan), changed(warpgroups=3))
    wide = as_one_kernel(attention, *of(256, 256, 256))
    assert wide.groups[-1].settings.keys == 64
    with pytest.raises(IllegalMove):
        require_fits(H200, nest_of(wide), changed())


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (of(64, 64, 36), "rows that are no multiple of 16 bytes"),
        (of(64, 64, 264), "rows of more than one instruction's"),
        (of(40, 64, 64), "few queries"),
        (tuple(tensor[:, :, :, ::2] for tensor in of(64, 64, 128)), "elements that are no neighbours"),
        (tuple(tensor.float() for tensor in of(64, 64, 136)), "floats in wide rows"),
    ],
)
def test_what_one_kernel_does_not_take_is_no_other_kernels_either(args: tuple[torch.Tensor, ...], why: str) -> None:
    nest = nest_of(planned(attention, *args))
    assert attention_of(nest) is not None, why
    assert not CudaAttention(H200).accepts(nest)
    assert multiplies_matrices(nest)


def test_rows_of_heads_that_share_keys_are_one_tile_s_where_no_rule_counts_them() -> None:
    plain = attention_of(iteration_space.simplified(nest_of(as_one_kernel(grouped, *shared_by(3, 70, 66, 64)))))
    causal = attention_of(iteration_space.simplified(nest_of(as_one_kernel(grouped_causal, *shared_by(3, 70, 66, 64)))))
    assert plain is not None
    assert causal is not None
    assert (plain.layers, plain.rows.extent, plain.group) == (4, 210, 1)
    assert (causal.layers, causal.rows.extent, causal.group, causal.inner) == (12, 70, 3, 3)
    assert plain.flop_count == 2 * causal.flop_count


def test_a_mask_that_no_load_is_is_made_before() -> None:
    plan = authored(lambda q, k, v, m: attention(q, k, v, ~m), *of(70, 66, 64), some(70, 66))
    assert [group.schedule for group in plan.groups] == ["", "cuda_attention"]
    with pytest.raises(IllegalMove, match="reads what the same kernel computes"):
        moves.apply(
            plan,
            analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_FUSE, group=plan.groups[-1].name, choice=plan.groups[0].name),
        )


def test_a_mask_takes_registers_so_three_warpgroups_have_smaller_tiles() -> None:
    args = (*of(512, 512, 64), some(2, 3, 512, 512))
    plan = as_one_kernel(masked, *args)
    settings = plan.groups[-1].settings
    three = replace(settings, ping_pong=False, warpgroups=3)
    with pytest.raises(IllegalMove, match="registers"):
        require_fits(H200, nest_of(plan), three)


def test_projections_stay_out_of_the_kernel() -> None:
    q, k, v = of(64, 64, 64, layers=(2,))
    plan = authored(lambda q, k, v: attention(torch.relu(q), k, v), q, k, v)
    producer = plan.groups[0].name
    with pytest.raises(IllegalMove, match="reads what the same kernel computes"):
        moves.apply(
            plan, analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_FUSE, group=plan.groups[-1].name, choice=producer)
        )


def test_tiles_follow_the_waves_that_they_make() -> None:
    def warpgroups(layers: int, queries: int, depth: int) -> int:
        args = (torch.empty(layers, queries, depth, dtype=torch.float16, device="meta"),) * 3
        return (
            authored(attention, *(torch.empty_like(each, device="cpu") for each in args)).groups[-1].settings.warpgroups
        )

    assert warpgroups(64, 2048, 64) == 3
    assert warpgroups(8, 1024, 64) == 2  # less than a wave of either: the smaller tile
    assert warpgroups(64, 2048, 128) == 2  # whose registers do not suffice for three


def test_the_cost_is_both_products_and_every_operand_once() -> None:
    q, k, v = of(128, 256, 64, 32)
    whole = authored(attention, q, k, v)
    found = cost.of_group(whole, whole.groups[-1])
    assert found.tensor_flop_count == 2 * 6 * 128 * 256 * (64 + 32)
    assert found.product_flop_count == 0
    assert found.launch_count == 1
    moved = found.read_bytes + found.write_bytes + found.extra_bytes
    assert moved == 2 * (q.numel() + k.numel() + v.numel() + 6 * 128 * 32)
    assert found.parallel_count == 6 < H200.sm_count
    causal = authored(lambda q, k, v: attention(q, k, v, is_causal=True), q, k, v)
    assert cost.of_group(causal, causal.groups[-1]).tensor_flop_count == found.tensor_flop_count // 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_attention_is_taken_apart_but_of_16_bits_whose_scores_would_be_rounded(dtype: torch.dtype) -> None:
    index = GraphIndex(capture(Attention(attention), [each.to(dtype) for each in (Q, K, V)]))
    (node,) = (name for name, each in index.nodes.items() if "scaled_dot_product" in each.target)
    assert (splits.taken_apart(index, node) is None) is (dtype != torch.float32)
