"""What capture knows of results without PyTorch: shapes of recurrent networks, types of statistics on a GPU."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from warpsmith.graphs import aten, capture, dtypes, result_specs, training_step
from warpsmith.v1 import graph_pb2

OWN_DISPATCH = FakeTensorMode.dispatch
FORMS = list(itertools.product((nn.LSTM, nn.GRU, nn.RNN), (False, True), (False, True), (1, 3)))


def captured_by_pytorch(module: nn.Module, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> graph_pb2.Graph:
    """As captured where PyTorch runs every step on fake tensors."""
    with monkeypatch.context() as changed:
        changed.setattr(result_specs, "SHAPES", {})
        return capture.capture(module, (x,))


@pytest.mark.parametrize(("kind", "is_batch_first", "is_bidirectional", "layers"), FORMS)
def test_the_graph_is_the_same(
    kind: type[nn.Module], is_batch_first: bool, is_bidirectional: bool, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = kind(5, 6, layers, batch_first=is_batch_first, bidirectional=is_bidirectional)
    for x in (torch.rand(3, 7, 5), torch.rand(7, 5)):
        assert capture.capture(module, (x,)) == captured_by_pytorch(module, x, monkeypatch)


def test_so_it_is_with_projections_in_half_precision_and_with_a_state_that_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = nn.LSTM(5, 6, 2, proj_size=4, bidirectional=True, dtype=torch.bfloat16)
    x = torch.rand(3, 7, 5, dtype=torch.bfloat16)
    assert capture.capture(module, (x,)) == captured_by_pytorch(module, x, monkeypatch)
    state = (torch.rand(4, 7, 4, dtype=torch.bfloat16), torch.rand(4, 7, 6, dtype=torch.bfloat16))
    names = [result.name for result in capture.capture(module, (x, state)).nodes[0].results]
    assert len(names) == 3


def test_pytorchs_own_kernels_come_back_whoever_leaves_first() -> None:
    before = {overload: dict(overload.py_kernels) for overload in result_specs.SHAPES}
    first, second = result_specs.known(), result_specs.known()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert any(dict(overload.py_kernels) != kernels for overload, kernels in before.items())
    second.__exit__(None, None, None)
    assert {overload: dict(overload.py_kernels) for overload in result_specs.SHAPES} == before


def test_no_step_is_run_and_afterwards_pytorch_answers_itself() -> None:
    module, x = nn.GRU(5, 6, 2), torch.rand(2000, 2, 5)
    begin = time.process_time()
    capture.capture(module, (x,))
    assert time.process_time() - begin < 5.0, "25 s step by step"
    meta = nn.GRU(5, 6, 1, device="meta")
    assert meta(torch.empty(3, 2, 5, device="meta"))[0].shape == (3, 2, 6)
    assert torch.equal(module(x[:3])[0], module(x[:3])[0])


class Norm(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(x))


NORMS = {
    "native_layer_norm": (nn.LayerNorm(8), torch.float32),
    "native_batch_norm": (nn.BatchNorm2d(6), torch.float32),
    "native_group_norm": (nn.GroupNorm(2, 6), torch.bfloat16),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_statistics_of_16_bit_norms_are_what_the_device_leaves(name: str, device_type: str) -> None:
    norm, on_gpu = NORMS[name]
    module = Norm(norm.to(torch.bfloat16))
    x = torch.rand(4, 6, 8, 8, dtype=torch.bfloat16)
    step = training_step.stepping(Norm, training_step.Step((0,), tuple(dict(module.named_parameters())), (0,)))
    module.__class__ = step
    graph = capture.capture(module, (x, torch.rand_like(x)), device_type)
    (node,) = [
        each for each in graph.nodes if name.removeprefix("native") in each.target and "backward" not in each.target
    ]
    expected = on_gpu if device_type == "cuda" else torch.bfloat16
    assert [dtypes.to_torch(result.spec.dtype) for result in node.results[1:3]] == [expected, expected]
    assert FakeTensorMode.dispatch is OWN_DISPATCH


class Spectrum(nn.Module):
    """There and back: an inverse STFT looks at its window, but where it runs without data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        window = torch.hann_window(16)
        spectrum = torch.stft(x, 16, 4, window=window, return_complex=True)
        return torch.istft(spectrum, 16, 4, window=window, length=40)


def test_an_inverse_stft_is_captured() -> None:
    x = torch.randn(2, 40)
    graph = capture.capture(Spectrum(), (x,))
    assert graph.nodes[-1].target == "aten.istft.default"
    (name,) = graph.outputs
    torch.testing.assert_close(aten.interpret(graph, {graph.sources[0].name: x})[name], x)
