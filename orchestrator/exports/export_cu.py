"""The flavour `cu`: the kernels as one CUDA file that nvcc alone compiles, with a launcher that C can call.

The one idea: a caller without PyTorch owns all memory, so the launcher takes it: tensors, one workspace, a stream. What
is no kernel of ours, library calls and constants, is refused. Nothing is checked at a call: a comment says what it has
to be given.
"""

from __future__ import annotations

import re
from string import Template

from orchestrator.exports import export, export_kernelbench
from orchestrator.exports.export import Exported
from orchestrator.exports.writing import foreign_text
from warpsmith import arguments, hardware
from warpsmith.errors import BadInput
from warpsmith.v1 import analysis_pb2, candidate_pb2, graph_pb2, run_pb2, task_pb2, tensor_pb2

ALIGNMENT = 256
"""Of the workspace and of each buffer in it, in bytes, as cudaMalloc's is; of the other tensors 16 are asked."""

_FILE = Template("""$header
//
// Compile: nvcc -gencode=arch=$virtual,code=$architecture -std=c++20 -O3 -c $file
//
// `$name` at the end launches all kernels on a stream and returns at once: 0, or the cudaError_t of what went wrong.
// Its pointers are device memory, each at a multiple of 16 bytes, laid out with these strides (in elements):
//
$described
//   workspace: $workspace_bytes bytes at a multiple of $alignment, of one call at a time$zeroed
//   stream: on the device that is current
#include <cuda_runtime.h>
#include <cstdint>
#include <stdexcept>
$includes
$kernels

namespace {

struct Failed {
  cudaError_t error;
};

void check(cudaError_t error) {
  if (error != cudaSuccess) throw Failed{error};
}

$hosts
}  // namespace

extern "C" int $name(
    $parameters) {
  const auto at = [](const void* address) { return reinterpret_cast<std::uintptr_t>(address); };
  try {
$steps
  } catch (const Failed& failed) {
    return failed.error;
  } catch (const std::exception&) {
    return cudaErrorUnknown;
  }
  return cudaSuccess;
}
""")


class CudaExporter:
    """A CUDA file with a launcher."""

    def export(self, run: run_pb2.Run) -> Exported:
        """The file; see `export.Exporter`."""
        program = export.require_winner(run)
        _require_own_kernels(run)
        slug = re.sub(r"\W+", "_", run.task.name, flags=re.ASCII).strip("_").lower()[:80]
        name = f"ws_{slug}_launch"
        places, total, zero = _workspace(program)
        words = _Words(program, places)
        hosts, steps = [], []
        for number, step in enumerate(program.steps):
            if step.HasField("memset"):
                buffer = words.buffers[step.memset.buffer]
                filled = f"{words.pointer(buffer.name)}, {step.memset.byte}, {_bytes(buffer.spec)}, stream"
                steps.append(f"    check(cudaMemsetAsync({filled}));")
                continue
            host, _ = export_kernelbench.host_function(f"launch_{number}", step.launch, program)
            hosts.append(host)
            given = [f"at({words.pointer(seen)})" for seen in map(arguments.buffer_of, step.launch.arguments) if seen]
            steps.append(f"    launch_{number}({', '.join(['at(stream)', *given])});")
        architecture = hardware.of_architecture(hardware.architecture(program)).architecture
        maps = any(argument.HasField("tensor_map") for step in program.steps for argument in step.launch.arguments)
        comment = export.header(run, "nvcc alone", *([export.EACH_CALL] if run.task.prepared else []))
        text = _FILE.substitute(
            header=_as_comment(comment),
            architecture=architecture,
            virtual=architecture.replace("sm", "compute"),
            file=f"{name}.cu",
            name=name,
            parameters=",\n    ".join([*words.parameters(), "void* workspace", "cudaStream_t stream"]),
            described="\n".join(f"//   {line}" for line in words.described()),
            workspace_bytes=total,
            alignment=ALIGNMENT,
            zeroed=f"; the first {zero} are 0 before the first call, and each leaves them so" if zero else "",
            includes="#include <cuda.h>\n#include <initializer_list>\n" if maps else "",
            kernels=export_kernelbench.inline_headers(program).strip(),
            hosts="\n".join([*([export_kernelbench.MAP] if maps else []), *hosts]),
            steps="\n".join(steps),
        )
        return Exported(f"{name}.cu", text)


def _require_own_kernels(run: run_pb2.Run) -> None:
    """Refuses what nvcc alone cannot make, and what it should not."""
    program = run.best.candidate.program
    if program.target != task_pb2.TARGET_CUDA:
        raise BadInput("the cu flavour is for CUDA kernels: export with --flavour module or package instead")
    if any(move.kind == analysis_pb2.MOVE_KIND_WRITE for move in run.best.candidate.moves):
        raise BadInput(
            "a kernel of this winner was written by a model, and the cu flavour has nvcc compile it for the host too: "
            "export with --flavour module or package instead, which compile for the GPU alone"
        )
    for step in program.steps:
        if step.HasField("library"):
            raise BadInput(
                f"this winner calls {step.library.target[:80]!r} of PyTorch's, which a CUDA file alone has not: export "
                "with --flavour module or package instead"
            )
    if any(buffer.source.origin == graph_pb2.ORIGIN_CONSTANT for buffer in program.buffers):
        raise BadInput("this winner reads constants of the forward, which the cu flavour does not hold: "
                       "export with --flavour module or package instead")  # fmt: skip
    if {*program.outputs} & {each.name for each in program.buffers if each.role == candidate_pb2.ROLE_SOURCE}:
        raise BadInput("this winner gives back an input as it is, for which there is no kernel: "
                       "export with --flavour module or package instead")  # fmt: skip


class _Words:
    """C's names of a program's buffers: parameters of the launcher, or places in the workspace."""

    def __init__(self, program: candidate_pb2.Program, places: dict[str, int]) -> None:
        self.buffers = {buffer.name: buffer for buffer in program.buffers}
        self._places = places
        self._written = {name for step in program.steps for name in step.launch.writes} | {*program.outputs}
        given = [buffer for buffer in program.buffers if buffer.name not in places]
        self._given = sorted(given, key=lambda buffer: buffer.role == candidate_pb2.ROLE_OUTPUT)
        plain = re.compile(r"\W", re.ASCII)
        self._names = {b.name: f"t{place}_{plain.sub('_', b.name)[:60]}" for place, b in enumerate(self._given)}

    def pointer(self, buffer: str) -> str:
        """The expression of where a buffer lies."""
        if buffer in self._places:
            return f"static_cast<char*>(workspace) + {self._places[buffer]}"
        return self._names[buffer]

    def parameters(self) -> list[str]:
        """Declarations of the launcher's tensors, what is read before what is written."""
        return [f"{'' if b.name in self._written else 'const '}void* {self._names[b.name]}" for b in self._given]

    def described(self) -> list[str]:
        """A line for each of them."""
        lines = []
        for buffer in self._given:
            spec, member = buffer.spec, buffer.source.qualified_name
            what = "read" if buffer.role == candidate_pb2.ROLE_SOURCE else "written"
            what += " and written" if what == "read" and buffer.name in self._written else ""
            origin = f", {member}" if member else ""
            kind = tensor_pb2.Dtype.Name(spec.dtype).removeprefix("DTYPE_").lower()
            lines.append(f"{self._names[buffer.name]}: {what}, {kind} {[*spec.shape]} by {[*spec.strides]}{origin}")
        return [_as_comment(foreign_text.comment([line])).removeprefix("// ") for line in lines]


def _workspace(program: candidate_pb2.Program) -> tuple[dict[str, int], int, int]:
    """Where each buffer of the workspace begins, its size, and how much at its beginning stays zero between calls."""
    roles = (candidate_pb2.ROLE_SOURCE, candidate_pb2.ROLE_OUTPUT)
    inner = [buffer for buffer in program.buffers if buffer.role not in roles]
    places, at, zero = {}, 0, 0
    for buffer in sorted(inner, key=lambda each: not each.zero_between_calls):
        places[buffer.name] = at
        at += -(-_bytes(buffer.spec) // ALIGNMENT) * ALIGNMENT
        zero = at if buffer.zero_between_calls else zero
    return places, at, zero


def _bytes(spec: tensor_pb2.TensorSpec) -> int:
    """From a tensor's first to its last element."""
    if 0 in spec.shape:
        return 0
    span = 1 + sum((extent - 1) * stride for extent, stride in zip(spec.shape, spec.strides, strict=True))
    bits = re.search(r"\d+", tensor_pb2.Dtype.Name(spec.dtype))
    return span * (int(bits.group()) // 8 if bits else 1)


def _as_comment(text: str) -> str:
    """A comment of Python's as one of C's, of whose lines none goes on into the next."""
    lines = text.replace("\\", "/").splitlines()
    return "\n".join(f"//{line.removeprefix('#')}".rstrip() for line in lines)
