"""Programs with Hopper's tensor cores and copy engine, for the SIMT machine: what these do is said in C++ here.

The one idea: the headers with their instructions are replaced by those of `tensor_cores/`, and a tensor map by its
buffer's address, in a type that knows the rest of it.
"""

from __future__ import annotations

import re
from pathlib import Path

from simulated import program_of

from agent_synthesis.nests.ir import Nest
from agent_synthesis.schedule import Emission
from warpsmith import digest
from warpsmith.v1 import candidate_pb2, tensor_pb2

_HEADERS = {path.name: path.read_text() for path in (Path(__file__).parent / "tensor_cores").glob("*.cuh")}
_PARAMETER = re.compile(r"const __grid_constant__ ws::TensorMap (\w+)")
_BYTES = {
    tensor_pb2.DTYPE_FLOAT32: 4, tensor_pb2.DTYPE_FLOAT16: 2, tensor_pb2.DTYPE_BFLOAT16: 2, tensor_pb2.DTYPE_UINT8: 1,
}  # fmt: skip


def program_with_tensor_cores(nest: Nest, emission: Emission) -> candidate_pb2.Program:
    """A program of the nest's own kernels, as the machine takes it."""
    program = program_of(nest, emission)
    types = []
    for step in program.steps:
        launch = step.launch
        for number, argument in enumerate(launch.arguments):
            if argument.HasField("tensor_map"):
                types.append(_type_of(f"{launch.entry}_map_{number}", argument.tensor_map))
                argument.buffer = argument.tensor_map.buffer
    names = iter(re.findall(r"struct (\w+) \{", "\n".join(types)))
    text = _PARAMETER.sub(lambda found: f"const {next(names)} {found[1]}", program.sources[0].text)
    includes = re.findall(r"^#include .*\n", text, re.MULTILINE)
    program.sources[0].text = "".join([*includes, *types, text[sum(map(len, includes)) :]])
    for source in program.sources[1:]:
        source.text = _HEADERS.get(source.name, source.text)
    program.digest = digest.of_program(program)
    return program


def _type_of(name: str, map_: candidate_pb2.TensorMap) -> str:
    size = _BYTES[map_.dtype]
    extents, strides, box = (", ".join(map(str, each)) for each in (map_.extents, (size, *map_.byte_strides), map_.box))
    rounds = str(map_.rounds_to_tf32).lower()
    return (
        f"struct {name} {{\n  const char* base;\n"
        f"  operator ws::TensorMap() const {{\n"
        f"    return {{base, {len(map_.box)}, {{{extents}}}, {{{strides}}}, {{{box}}}, {size}, {map_.swizzle_bytes}, "
        f"{rounds}}};\n  }}\n}};\n"
    )
