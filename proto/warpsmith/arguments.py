"""What a launch's arguments name: the buffers behind addresses and tensor maps."""

from __future__ import annotations

from warpsmith.contract import words
from warpsmith.v1 import candidate_pb2


def buffer_of(argument: candidate_pb2.LaunchArgument) -> str | None:
    """The buffer that an argument is the address or a tensor map of; None for a number."""
    match argument.WhichOneof("kind"):
        case "buffer":
            return argument.buffer
        case "tensor_map":
            return argument.tensor_map.buffer
    return None


def buffers_of(launch: candidate_pb2.Launch) -> list[str]:
    """Every buffer that the launch is given, in the order of its arguments."""
    return [name for argument in launch.arguments if (name := buffer_of(argument)) is not None]


def rename(argument: candidate_pb2.LaunchArgument, name: str) -> None:
    """Makes an address or a tensor map one of another buffer."""
    if argument.WhichOneof("kind") == "tensor_map":
        argument.tensor_map.buffer = name
    else:
        argument.buffer = name


def copied_type(seen: candidate_pb2.TensorMap) -> str:
    """The driver's name for the element type that a map's copies leave (CU_TENSOR_MAP_DATA_TYPE_…)."""
    return "TFLOAT32" if seen.rounds_to_tf32 else words.dtype(seen.dtype).upper()
