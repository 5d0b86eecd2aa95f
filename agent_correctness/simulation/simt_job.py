"""A program and its memory as the SIMT machine's runner reads them, and its memory afterwards.

The one idea: memory is bytes by buffer name, and each buffer that a program must not read before writing it holds
a pattern at first, so that a second pattern shows who did.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from warpsmith.errors import BadInput
from warpsmith.v1 import candidate_pb2, tensor_pb2

FILLS = (0xCB, 0x7F)
"""What unwritten memory holds in the first and the second run, as the number of a pattern."""
_OUTPUT_FILLS = {0xCB: 0xB5, 0x7F: 0x6A}
"""What an output holds instead, so that a sum with unwritten memory does not look like an unwritten output."""

_SIZES = {
    tensor_pb2.DTYPE_FLOAT64: 8, tensor_pb2.DTYPE_INT64: 8, tensor_pb2.DTYPE_FLOAT32: 4, tensor_pb2.DTYPE_INT32: 4,
    tensor_pb2.DTYPE_FLOAT16: 2, tensor_pb2.DTYPE_BFLOAT16: 2, tensor_pb2.DTYPE_INT16: 2,
    tensor_pb2.DTYPE_INT8: 1, tensor_pb2.DTYPE_UINT8: 1, tensor_pb2.DTYPE_BOOL: 1,
    tensor_pb2.DTYPE_FLOAT8_E4M3FN: 1, tensor_pb2.DTYPE_FLOAT8_E5M2: 1,
}  # fmt: skip


@dataclass(frozen=True)
class Memory:
    """All buffers of a program after a run."""

    contents: Mapping[str, bytes]
    fills: Mapping[str, int]
    """Buffer → the pattern that it held at first, where that is not FILLS[0]."""

    @classmethod
    def of(cls, program: candidate_pb2.Program, output: bytes, fills: Mapping[str, int]) -> Self:
        """Takes the runner's output apart."""
        contents, begin = {}, 0
        for buffer in program.buffers:
            end = begin + storage_bytes(buffer)
            contents[buffer.name] = output[begin:end]
            begin = end
        return cls(contents, fills)

    def outputs(self, program: candidate_pb2.Program) -> list[bytes]:
        """What a caller sees: outputs, and sources, which may be written in place."""
        roles = (candidate_pb2.ROLE_OUTPUT, candidate_pb2.ROLE_SOURCE)
        return [self.contents[buffer.name] for buffer in program.buffers if buffer.role in roles]

    def untouched(self, buffer: candidate_pb2.Buffer, other: Memory) -> list[int]:
        """Elements that hold what they were filled with, in this run and in the other."""
        size = _SIZES[buffer.spec.dtype]
        own, their = self.contents[buffer.name], other.contents[buffer.name]
        mine, theirs = (pattern(len(own), fill_of(buffer, memory.fills)) for memory in (self, other))
        return [
            begin // size
            for begin in range(0, len(own), size)
            if own[begin : begin + size] == mine[begin : begin + size] != theirs[begin : begin + size]
            and their[begin : begin + size] == theirs[begin : begin + size]
        ]


def storage_bytes(buffer: candidate_pb2.Buffer) -> int:
    """Bytes from a buffer's first element to the end of its last."""
    spec = buffer.spec
    if any(extent == 0 for extent in spec.shape):
        return 0
    last = sum((extent - 1) * stride for extent, stride in zip(spec.shape, spec.strides, strict=True))
    return (last + 1) * _SIZES[spec.dtype]


@functools.lru_cache(maxsize=64)
def pattern(size: int, fill: int) -> bytes:
    """Bytes that differ from place to place: as floats, large numbers of one magnitude; zeros for 0."""
    if fill == 0:
        return bytes(size)
    return bytes(fill if at % 4 == 3 else (7 * at + 13 * (at >> 8) + fill) & 255 for at in range(size))


def fill_of(buffer: candidate_pb2.Buffer, fills: Mapping[str, int]) -> int:
    """The pattern that a workspace or an output holds before the first launch."""
    if buffer.zero_between_calls:
        return 0
    fill = fills.get(buffer.name, FILLS[0])
    return _OUTPUT_FILLS[fill] if buffer.role == candidate_pb2.ROLE_OUTPUT else fill


def job_text(
    program: candidate_pb2.Program, sources: Mapping[str, bytes], seed: int, fills: Mapping[str, int]
) -> tuple[str, bytes]:
    """The job and the input file. `fills`: buffer, or "" for shared memory → the pattern that it holds at first.

    Raises:
        BadInput: a source is missing or has another size than its buffer.
    """
    lines = [f"seed {seed} {fills.get('', FILLS[0])}"]
    data = bytearray()
    numbers = {buffer.name: number for number, buffer in enumerate(program.buffers)}
    for buffer in program.buffers:
        size = storage_bytes(buffer)
        name = "".join(c if c.isalnum() or c in "_.-" else "_" for c in buffer.name)
        if buffer.role in (candidate_pb2.ROLE_WORKSPACE, candidate_pb2.ROLE_OUTPUT):
            lines.append(f"buffer {name} {size} {len(data)}")
            data += pattern(size, fill_of(buffer, fills))
            continue
        given = sources.get(buffer.name)
        if given is None or len(given) != size:
            has = "is missing" if given is None else f"has {len(given)} bytes"
            raise BadInput(f"source {buffer.name} {has}; the program's takes {size}")
        lines.append(f"buffer {name} {size} {len(data)}")
        data += given
    for step in program.steps:
        launch = step.launch
        lines.append(
            " ".join(["launch", launch.entry, *_extents(launch), *_flags(launch), *_arguments(launch, numbers)])
        )
    return "\n".join([*lines, ""]), bytes(data)


def _extents(launch: candidate_pb2.Launch) -> list[str]:
    three = [launch.grid, launch.block, launch.cluster]
    return [str(max(1, extent)) for e in three for extent in (e.x, e.y, e.z)]


def _flags(launch: candidate_pb2.Launch) -> list[str]:
    return [str(launch.shared_bytes), str(int(launch.cooperative)), str(int(launch.programmatic_dependent))]


def _arguments(launch: candidate_pb2.Launch, numbers: Mapping[str, int]) -> list[str]:
    words = [str(len(launch.arguments))]
    for argument in launch.arguments:
        kind = argument.WhichOneof("kind")
        if kind == "buffer":
            words += ["b", str(numbers[argument.buffer])]
        elif kind == "float32":
            words += ["f", str(struct.unpack("<I", struct.pack("<f", argument.float32))[0])]
        else:
            words += ["i" if kind == "int32" else "l", str(argument.int32 if kind == "int32" else argument.int64)]
    return words
