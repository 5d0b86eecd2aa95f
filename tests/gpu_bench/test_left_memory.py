"""Results are read from a stopped process's memory as they lie there, in whatever strides, or are said not to be."""

from __future__ import annotations

import os
import struct

import pytest
import torch

from gpu_bench.solutions import left_memory
from gpu_bench.solutions.left_memory import LeftMemory
from warpsmith.errors import Infrastructure
from warpsmith.graphs import dtypes
from warpsmith.v1 import judging_pb2, tensor_pb2

X = torch.randn(6, 10)


@pytest.mark.parametrize(
    "tensor",
    [
        X, X.t(), X[:, ::3], X[2:3, 1:2], X[:, :1].expand(6, 4), torch.tensor(3.5), X.view(6, 5, 2).permute(2, 0, 1),
        X > 0, X.bfloat16().t(), X.double(), torch.complex(X, X).t(), torch.arange(7, dtype=torch.int8), X[:0],
    ],
    ids=lambda tensor: f"{tensor.dtype} {list(tensor.shape)} {tensor.stride()}",
)  # fmt: skip
def test_a_tensor_is_read_as_it_lies_in_a_process(tensor: torch.Tensor) -> None:
    spec = dtypes.spec_of(tensor)
    read = bytearray(tensor.numel() * left_memory.item_bytes(spec))
    place = tensor.data_ptr(), tensor.stride()
    with LeftMemory(os.getpid()) as memory:
        assert not read or memory.read(place, spec, memoryview(read))
    assert bytes(read) == tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    "place", [(0, [10, 1]), (8, [10, 1]), (-1, [10, 1]), (1 << 62, [10, 1]), (X.data_ptr(), [-10, 1]),
              (X.data_ptr(), [1 << 60, 1]), (X.data_ptr(), [1 << 40, 1])],
)  # fmt: skip
def test_nothing_is_read_where_nothing_lies(place: left_memory.Place) -> None:
    with LeftMemory(os.getpid()) as memory:
        assert not memory.read(place, dtypes.spec_of(X), memoryview(bytearray(240)))


def test_places_survive_their_bytes_and_no_others_are_places() -> None:
    regions = [judging_pb2.Region(spec=tensor_pb2.TensorSpec(shape=shape)) for shape in ([2, 3], [])]
    places: list[left_memory.Place] = [(77, [3, 1]), (78, [])]
    assert left_memory.unpacked(left_memory.packed(places), regions) == places
    for content in (b"", b"x" * 31, struct.pack("<5q", *range(5))):
        with pytest.raises(ValueError, match="no places"):
            left_memory.unpacked(content, regions)


def test_memory_that_nobody_may_read_is_no_fault_of_a_solution() -> None:
    with pytest.raises(Infrastructure, match="ptrace_scope"):
        LeftMemory(1 << 30)
