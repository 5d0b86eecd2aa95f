"""A program's machine code without a service: for tests and measurements on a GPU."""

from __future__ import annotations

from warpsmith import hardware
from warpsmith.v1 import artifact_pb2, candidate_pb2


def cubin_of(program: candidate_pb2.Program) -> artifact_pb2.Artifact:
    """The program compiled for its architecture by NVRTC, in this process.

    Raises AssertionError with the compiler's words where it refuses; ImportError without cuda-bindings.
    """
    from cuda.bindings import nvrtc

    main, *headers = program.sources
    names, texts = [each.name.encode() for each in headers], [each.text.encode() for each in headers]
    _, unit = nvrtc.nvrtcCreateProgram(main.text.encode(), main.name.encode(), len(names), texts, names)
    options = [f"--gpu-architecture={hardware.architecture(program)}".encode(), b"--std=c++20"]
    (outcome,) = nvrtc.nvrtcCompileProgram(unit, len(options), options)
    if int(outcome) != 0:
        log = b" " * nvrtc.nvrtcGetProgramLogSize(unit)[1]
        nvrtc.nvrtcGetProgramLog(unit, log)
        raise AssertionError(f"the kernel does not compile: {log.decode()}")
    cubin = b" " * nvrtc.nvrtcGetCUBINSize(unit)[1]
    nvrtc.nvrtcGetCUBIN(unit, cubin)
    return artifact_pb2.Artifact(format=artifact_pb2.BINARY_FORMAT_CUBIN, content=cubin)
