"""Runs a program's kernels once on plausible values: what compute-sanitizer looks at.

The one idea: no module, no baselines and no library calls, so that every finding is a kernel's of ours. Buffers come
straight from the driver (`PYTORCH_NO_CUDA_MEMORY_CACHING`), so that the first byte past one is past an allocation.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from gpu_bench.cuda import CudaExecutor
from gpu_bench.executor import Sources, name_of
from warpsmith import dtypes
from warpsmith.v1 import artifact_pb2, candidate_pb2, graph_pb2, tensor_pb2


def main(place: Path) -> None:
    """Runs each `N.program` of that directory with its `N.artifact`, and says so."""
    device = torch.device("cuda")
    for file in sorted(place.glob("*.program")):
        program = kernels_alone(candidate_pb2.Program.FromString(file.read_bytes()))
        _run(program, artifact_pb2.Artifact.FromString(file.with_suffix(".artifact").read_bytes()), device)
    print("the kernels ran", flush=True)


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


def _run(program: candidate_pb2.Program, artifact: artifact_pb2.Artifact, device: torch.device) -> None:
    executor = CudaExecutor()
    loaded = executor.load(program, artifact, device)
    inputs: dict[int, torch.Tensor] = {}
    named: dict[str, torch.Tensor] = {}
    for buffer in program.buffers:
        if buffer.role != candidate_pb2.ROLE_SOURCE or buffer.source.origin == graph_pb2.ORIGIN_CONSTANT:
            continue
        if buffer.source.origin == graph_pb2.ORIGIN_INPUT:
            inputs[buffer.source.input_index] = _plausible(buffer.spec, device)
        else:
            named[name_of(buffer.source)] = _plausible(buffer.spec, device)
    nothing = torch.empty(0, device=device)
    ordered = [inputs.get(position, nothing) for position in range(max(inputs, default=-1) + 1)]
    rest = Sources.from_named(named)
    call = loaded.bind(Sources(ordered, rest.parameters, rest.state))
    call()
    executor.synchronize()


def _plausible(spec: tensor_pb2.TensorSpec, device: torch.device) -> torch.Tensor:
    """Normal numbers, or small integers that are valid as indices more often than not."""
    made = torch.empty_strided(list(spec.shape), list(spec.strides), dtype=dtypes.to_torch(spec.dtype), device=device)
    return made.normal_() if made.is_floating_point() else made.zero_()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
