"""Runs a program's kernels once on plausible values: what compute-sanitizer looks at.

The one idea: no module, no baselines and no library calls, so that every finding is in a kernel of ours. It loads first
and makes buffers only when it is told to go on, so that loading disturbs no other work; it imports torch before there
is anything to load. Buffers come straight from the driver (`PYTORCH_NO_CUDA_MEMORY_CACHING`), so that the first byte
past one is past an allocation.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from gpu_bench.running.executor import LoadedProgram, Sources
from gpu_bench.running.gpu.cuda import CudaExecutor
from gpu_bench.sanitizing.sanitizer import GO, LOAD, STOP
from gpu_bench.values.keys import Key
from warpsmith.graphs import dtypes
from warpsmith.v1 import artifact_pb2, candidate_pb2, graph_pb2, tensor_pb2


def main(place: Path) -> None:
    """Loads each `N.program` of that directory with its `N.artifact`, runs them when told to, and says so."""
    device = torch.device("cuda")
    loaded = []
    if not is_told(place, LOAD):
        return
    for file in sorted(place.glob("*.program")):
        program = kernels_alone(candidate_pb2.Program.FromString(file.read_bytes()))
        artifact = artifact_pb2.Artifact.FromString(file.with_suffix(".artifact").read_bytes())
        loaded.append(CudaExecutor().load(program, artifact, device))
    if not is_told(place, GO):
        return
    for each in loaded:
        _run(each, device)
    print("the kernels ran", flush=True)


def is_told(place: Path, word: str) -> bool:
    """Waits for a word: whether to load the programs, or to run the kernels."""
    while not (place / word).exists():
        if (place / STOP).exists() or not place.is_dir():
            return False
        time.sleep(0.01)
    return not (place / STOP).exists()


def kernels_alone(program: candidate_pb2.Program) -> candidate_pb2.Program:
    """The program without its library steps; what they would give are further inputs."""
    alone = candidate_pb2.Program()
    alone.CopyFrom(program)
    kept = [step for step in program.steps if step.WhichOneof("kind") != "library"]
    del alone.steps[:]
    alone.steps.extend(kept)
    unused = max((buffer.source.input_index for buffer in program.buffers), default=-1) + 1
    for buffer in alone.buffers:
        if buffer.role == candidate_pb2.ROLE_LIBRARY:
            buffer.role = candidate_pb2.ROLE_SOURCE
            buffer.source.origin, buffer.source.input_index = graph_pb2.ORIGIN_INPUT, unused
            unused += 1
    return alone


def plausible_sources(program: candidate_pb2.Program, device: torch.device) -> Sources:
    """Values for all that the program reads, as `_plausible` draws them."""
    inputs: dict[int, torch.Tensor] = {}
    own: dict[Key, torch.Tensor] = {}
    for buffer in program.buffers:
        if buffer.role != candidate_pb2.ROLE_SOURCE or buffer.source.origin == graph_pb2.ORIGIN_CONSTANT:
            continue
        if buffer.source.origin == graph_pb2.ORIGIN_INPUT:
            inputs[buffer.source.input_index] = _plausible(buffer.spec, device)
        elif key := Key.of_source(buffer.source):
            own[key] = _plausible(buffer.spec, device)
    nothing = torch.empty(0, device=device)
    ordered = [inputs.get(position, nothing) for position in range(max(inputs, default=-1) + 1)]
    rest = Sources.from_keys(own)
    return Sources(ordered, rest.parameters, rest.state)


def _run(loaded: LoadedProgram, device: torch.device) -> None:
    call = loaded.bind(plausible_sources(loaded.program, device))
    call()
    CudaExecutor().synchronize()


def _plausible(spec: tensor_pb2.TensorSpec, device: torch.device) -> torch.Tensor:
    """Normal numbers, or small integers that are valid as indices more often than not."""
    made = torch.empty_strided(list(spec.shape), list(spec.strides), dtype=dtypes.to_torch(spec.dtype), device=device)
    return made.normal_() if made.is_floating_point() else made.zero_()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
