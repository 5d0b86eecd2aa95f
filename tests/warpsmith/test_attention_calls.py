"""Attention of a training step: the two calls where a device has none of them, and what a GPU calls in their stead."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from training_steps import Tried, of

from agent_synthesis import generator
from warpsmith.graphs.library import attention, attention_products
from warpsmith.v1 import task_pb2

GPU, CPU = task_pb2.TARGET_CUDA, task_pb2.TARGET_CPU
attend = torch.nn.functional.scaled_dot_product_attention


def operands(
    heads: int, key_heads: int, rows: int, keys: int, dtype: torch.dtype = torch.float64
) -> list[torch.Tensor]:
    generator_ = torch.Generator().manual_seed(1)
    shapes = [(2, heads, rows, 16), (2, key_heads, keys, 16), (2, key_heads, keys, 16)]
    return [torch.randn(*shape, generator=generator_, dtype=torch.float64).to(dtype) for shape in shapes]


FORMS: dict[str, tuple[list[torch.Tensor], dict[str, object]]] = {
    "all keys": (operands(3, 3, 10, 14), {}),
    "causal and scaled": (operands(3, 3, 10, 14), {"is_causal": True, "scale": 0.3}),
    "shared keys": (operands(6, 2, 10, 14), {"is_causal": True}),
    "a mask": (operands(3, 3, 10, 14), {"attn_mask": torch.randn(3, 10, 14, dtype=torch.float64)}),
}


@pytest.mark.parametrize("form", FORMS)
def test_products_and_a_softmax_are_what_the_calls_are(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (query, key, value), options = FORMS[form]
    monkeypatch.setattr(attention_products, "_MOST_SCORES", 300)  # rows come in several parts
    given = [each.clone().requires_grad_() for each in (query, key, value)]
    named = {"attn_mask": None, "is_causal": False, **options}
    wanted = attend(*given, enable_gqa=True, **named)
    gradient = torch.randn_like(wanted)
    is_causal = bool(named.pop("is_causal"))
    out, statistics = attention_products.forward(query, key, value, 0.0, is_causal, **named)
    made = attention_products.backward(gradient, query, key, value, out, statistics, 0.0, is_causal, **named)
    torch.testing.assert_close(out, wanted)
    for one, other in zip(made, torch.autograd.grad(wanted, given, gradient), strict=True):
        torch.testing.assert_close(one, other)


def test_a_row_that_sees_nothing_has_no_part_in_a_gradient() -> None:
    query, key, value = operands(3, 3, 10, 14)
    mask = torch.zeros(10, 14, dtype=torch.float64)
    mask[4] = -torch.inf
    out, statistics = attention_products.forward(query, key, value, attn_mask=mask)
    gradients = attention_products.backward(out, query, key, value, out, statistics, 0.0, False, attn_mask=mask)
    assert not out[:, :, 4].any()
    assert not gradients[0][:, :, 4].any()
    assert not any(each.isnan().any() for each in gradients)


def bf16(heads: int, key_heads: int, rows: int, keys: int) -> Callable[[], list[torch.Tensor]]:
    return lambda: operands(heads, key_heads, rows, keys, torch.bfloat16)


def calls(tried: Tried) -> list[str]:
    return [node.target for node in tried.plan.index.graph.nodes if node.target in attention.STAND_INS]


WHOLE = {
    "causal": (of(lambda q, k, v: attend(q, k, v, is_causal=True)), bf16(3, 3, 10, 14)),
    "shared keys": (of(lambda q, k, v: attend(q, k, v, enable_gqa=True, scale=0.3)), bf16(6, 2, 10, 14)),
    "a mask": (of(lambda q, k, v: attend(q, k, v, torch.ones(32, 16).tril() > 0)), bf16(3, 3, 32, 16)),
}
APART = {
    "dropout": (of(lambda q, k, v: attend(q, k, v, dropout_p=0.1)), bf16(3, 3, 10, 14)),
    "a mask with a gradient": (
        of(lambda q, k, v, m: attend(q, k, v, m.to(q.dtype)), (32, 16)),
        bf16(3, 3, 32, 16),
    ),
    "three dimensions": (of(attend), lambda: [each[0] for each in bf16(3, 3, 10, 14)()]),
    "rows of values of another length": (
        of(lambda q, k, v: attend(q, k, v[..., :8])),
        bf16(3, 3, 10, 14),
    ),
}


@pytest.mark.parametrize("target", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("name", [*WHOLE, *APART])
def test_attention_is_two_calls_where_a_library_has_them(name: str, target: task_pb2.Target.ValueType) -> None:
    tried = Tried.of({**WHOLE, **APART}[name], target)
    assert calls(tried) == ([attention.FORWARD, attention.BACKWARD] if name in WHOLE else [])
    if name == "dropout":
        return
    truth = tried.truth()
    for one, other in zip(tried.run(), truth, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0.1, atol=0.05)


def test_floats_are_two_calls_on_a_processor_alone() -> None:
    case = (of(attend), lambda: operands(3, 3, 10, 14, torch.float32))
    assert calls(Tried.of(case, CPU)) == [attention.FORWARD, attention.BACKWARD]
    assert not calls(Tried.of(case, GPU))


@pytest.mark.parametrize("name", WHOLE)
def test_a_gpu_calls_its_own_with_all_arguments_and_results(name: str) -> None:
    steps = generator.generate(Tried.of(WHOLE[name], GPU).plan).steps
    found = [step.library for step in steps if "attention" in step.library.target]
    kind = "efficient" if name == "a mask" else "flash"
    assert [f"_scaled_dot_product_{kind}_attention" in each.target for each in found] == [True, True]
    for each in found:
        schema = getattr(torch.ops.aten, each.target.split(".")[1]).default._schema
        assert len(each.results) == len(schema.returns)
        assert len(each.args) == sum(not argument.kwarg_only for argument in schema.arguments)
        for value, argument in zip(each.args, schema.arguments, strict=False):
            kinds = {"Tensor": {"tensor", "none"}, "float": {"real"}, "bool": {"boolean"}}
            given, wanted = value.WhichOneof("kind"), str(argument.type).removeprefix("Optional[").removesuffix("]")
            assert given in kinds.get(wanted, {given}), argument.name
