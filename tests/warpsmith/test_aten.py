"""Calls as data: what is allowed, and that arguments survive the way there and back."""

from __future__ import annotations

import pytest
import torch

from warpsmith.errors import BadInput
from warpsmith.graphs import aten, dtypes
from warpsmith.graphs.capture import capture
from warpsmith.graphs.library.scaled_products import scaled_product
from warpsmith.v1 import tensor_pb2


def nothing(_: object) -> None:
    return None


def test_arguments_survive_encoding() -> None:
    values = [None, True, 3, 2.5, "reflect", torch.float16, torch.device("cpu"), torch.channels_last, [1, [2.0]]]
    for value in values:
        assert aten.decode(aten.encode(value, nothing), lambda _: torch.empty(0)) == value


def test_a_device_argument_follows_the_caller() -> None:
    encoded = aten.encode(torch.device("cpu"), nothing)
    assert aten.decode(encoded, lambda _: torch.empty(0), torch.device("meta")).type == "meta"


def test_an_argument_without_a_form_is_refused() -> None:
    with pytest.raises(BadInput, match="takes a Generator"):
        aten.encode(torch.Generator(), nothing)


@pytest.mark.parametrize("target", ["aten.from_file.default", "aten.set_.source_Tensor", "prims.add.default", "aten"])
def test_only_harmless_aten_operations_are_allowed(target: str) -> None:
    assert not aten.is_allowed(target)


def test_an_unknown_operation_is_named() -> None:
    with pytest.raises(BadInput, match=r"no operation aten\.frobnicate\.default"):
        aten.resolve("aten.frobnicate.default")


def test_results_come_flat_with_absent_ones_none() -> None:
    x = torch.rand(2, 3)
    args = [aten.encode(value, lambda v: "x" if v is x else None) for value in (x, [3], None, None, 1e-5)]
    out, mean, rstd = aten.call("aten.native_layer_norm.default", args, [], {"x": x}.__getitem__)
    assert [t is not None and tuple(t.shape) for t in (out, mean, rstd)] == [(2, 3), (2, 1), (2, 1)]


def test_element_types_map_both_ways() -> None:
    for dtype in (torch.float64, torch.bfloat16, torch.uint8, torch.bool, torch.complex64):
        assert dtypes.to_torch(dtypes.from_torch(dtype)) is dtype
    with pytest.raises(BadInput, match="complex32"):
        dtypes.from_torch(torch.complex32)
    with pytest.raises(BadInput, match="not one of"):
        dtypes.to_torch(tensor_pb2.DTYPE_UNSPECIFIED)


def test_a_spec_tells_layout_and_span() -> None:
    spec = dtypes.spec_of(torch.zeros(4, 6)[:, ::2])
    assert (list(spec.shape), list(spec.strides)) == ([4, 3], [6, 2])
    assert dtypes.element_span(spec) == 23
    assert dtypes.element_span(dtypes.spec_of(torch.zeros(0, 3))) == 0


BLOCKS = {
    # scales of the left and of the right, of a product of (16, 32) and (32, 48)
    "one": ((1,), (1,)),
    "rows and columns": ((16, 1), (1, 48)),
    "blocks": ((16, 2), (2, 3)),
}


@pytest.mark.parametrize("blocks", BLOCKS)
def test_floats_of_8_bits_have_a_truth(blocks: str) -> None:
    scale_left, scale_right = (torch.rand(shape, dtype=torch.float64) + 0.5 for shape in BLOCKS[blocks])
    left, right = (torch.randn(shape).to(torch.float8_e4m3fn) for shape in ((16, 32), (32, 48)))

    def whole(scale: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        table = torch.atleast_2d(scale)
        parts = [size // count for size, count in zip(factor.shape, table.shape, strict=True)]
        return factor * table.kron(torch.ones(parts, dtype=torch.float64))

    factors = left.double(), right.double()
    truth = whole(scale_left, factors[0]) @ whole(scale_right, factors[1])
    found = scaled_product(*factors, scale_left, scale_right, None, out_dtype=torch.float64)
    torch.testing.assert_close(found, truth)


def test_a_module_of_floats_of_8_bits_is_computed_in_float64() -> None:
    class Scaled(torch.nn.Module):
        def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            scale = x.abs().amax(-1, keepdim=True) / 448
            short = (x / scale).to(torch.float8_e4m3fn)
            one = torch.ones(1, w.shape[0])
            bias = torch.ones(w.shape[0], dtype=torch.bfloat16)
            factors = short, w.to(torch.float8_e4m3fn).t()
            return torch._scaled_mm(*factors, scale_b=one, scale_a=scale, bias=bias, out_dtype=torch.bfloat16)

    x, w = torch.randn(16, 32), torch.randn(48, 32)
    graph = capture(Scaled(), (x, w))
    (truth,) = aten.interpret(graph, {"x": x, "w": w}, widen=True).values()
    torch.testing.assert_close(truth, x.double() @ w.double().T + 1)
    off = (Scaled()(x, w).double() - truth).norm() / truth.norm()
    assert 0.01 < off < 0.1
