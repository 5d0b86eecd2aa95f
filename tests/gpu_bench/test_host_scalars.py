"""Numbers made in a forward: which stay on the host, as in eager."""

from __future__ import annotations

import struct
from typing import Any

import torch

from gpu_bench.running.executor import Sources
from gpu_bench.running.host_scalars import host_scalars
from gpu_bench.running.straight_line import source_tensors
from warpsmith.v1 import candidate_pb2, graph_pb2, tensor_pb2

NUMBER = tensor_pb2.TensorSpec(dtype=tensor_pb2.DTYPE_FLOAT32)


def program_of(small: Any, *targets: str) -> candidate_pb2.Program:
    """Each target is called on x and the constant 0.5."""
    program: candidate_pb2.Program = small.library_program()
    content = struct.pack("f", 0.5)
    source = graph_pb2.Source(name="half", origin=graph_pb2.ORIGIN_CONSTANT, spec=NUMBER, content=content)
    program.buffers.add(name="half", role=candidate_pb2.ROLE_SOURCE, spec=NUMBER, source=source)
    for target in targets:
        call = program.steps.add(group=target).library
        call.target = target
        call.args.extend([tensor_pb2.Value(tensor="x"), tensor_pb2.Value(tensor="half")])
    return program


def test_a_number_that_only_binary_operations_read_stays_on_the_host(small: Any) -> None:
    program = program_of(small, "aten.min.other", "aten.mul.Tensor")
    assert host_scalars(program) == {"half"}
    given = Sources([torch.empty(small.rows, small.columns, device="meta")])
    tensors = source_tensors(program, given, torch.device("meta"))
    assert tensors["half"].device.type == "cpu"
    assert float(tensors["half"]) == 0.5


def test_a_number_that_another_operation_reads_goes_to_the_device(small: Any) -> None:
    program = program_of(small, "aten.min.other", "aten.prelu.default")
    assert not host_scalars(program)
    given = Sources([torch.empty(small.rows, small.columns, device="meta")])
    assert source_tensors(program, given, torch.device("meta"))["half"].device.type == "meta"


def test_a_number_beside_numbers_only_goes_to_the_device(small: Any) -> None:
    program = program_of(small, "aten.min.other")
    program.steps[-1].library.args[0].tensor = "half"
    assert not host_scalars(program)


def test_a_number_that_a_kernel_reads_or_that_is_returned_goes_to_the_device(small: Any) -> None:
    program = program_of(small, "aten.min.other")
    program.outputs.append("half")
    assert not host_scalars(program)
    program = program_of(small, "aten.min.other")
    launch = program.steps.add(group="k").launch
    launch.arguments.add(buffer="half")
    assert not host_scalars(program)
