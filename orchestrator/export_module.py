"""The flavour `module`: kernels are built when first called, by NVRTC on a GPU and by g++ on a CPU."""

from __future__ import annotations

import inspect

from orchestrator import export
from orchestrator.export import Exported, Names
from orchestrator.exported import cpu_runtime, cuda_runtime
from warpsmith.v1 import candidate_pb2, run_pb2, task_pb2

_INTEGERS = {"int32": "ctypes.c_int32", "int64": "ctypes.c_int64", "float32": "ctypes.c_float"}


class ModuleExporter:
    """A file that a plain `import` turns into a faster class."""

    def export(self, run: run_pb2.Run) -> Exported:
        """The file; see `export.Exporter`."""
        program = export.require_winner(run)
        names = Names(program)
        on_gpu = program.target == task_pb2.TARGET_CUDA
        runtime = inspect.getsource(cuda_runtime if on_gpu else cpu_runtime).split('"""\n', 1)[1]
        sources = "".join(f"    {s.name!r}: r{_raw(s.text)},\n" for s in program.sources)
        launch = _cuda_launch if on_gpu else _cpu_launch
        body = export.bindings(program, names)
        for step in program.steps:
            match step.WhichOneof("kind"):
                case "launch":
                    body.append(launch(step.launch, names))
                case "library":
                    body.append(export.library_call(step.library, names))
                case "memset":
                    body.append(f"{names[step.memset.buffer]}.view(torch.uint8).fill_({step.memset.byte})")
        body.append(f"return {export.outputs(program, names)}")
        device = "tensors[0].device"
        forward = "\n".join(
            [
                "def _ws_forward(module, leaves):",
                '    """The verified program, step by step."""',
                f"    device = {device.replace('tensors', 'leaves')}",
                *[f"    {line}" for line in body],
            ]
        )
        parts = [
            export.header(run),
            "import importlib.util\nimport sys\n" + runtime.strip(),
            export.reference(run.task).strip(),
            f"_WS_SOURCES = {{\n{sources}}}\n_ws_kernels = _WsKernels(_WS_SOURCES)",
            export.members(program).strip(),
            export.guard(run.task).strip(),
            forward,
            export.MODEL.strip(),
        ]
        return Exported(f"{run.task.name}_warpsmith.py", "\n\n\n".join(parts) + "\n")


def _raw(text: str) -> str:
    if "'''" in text:
        raise AssertionError("generated sources hold no triple quotes")
    return f"'''{text}'''"


def _cpu_launch(launch: candidate_pb2.Launch, names: Names) -> str:
    tensors = [names[argument.buffer] for argument in launch.arguments]
    return f"_ws_kernels.launch({', '.join([repr(launch.entry), *tensors])})"


def _cuda_launch(launch: candidate_pb2.Launch, names: Names) -> str:
    arguments = [_argument(argument, names) for argument in launch.arguments]
    shapes = ", ".join(str(extents(extent)) for extent in (launch.grid, launch.block, launch.cluster))
    settings = f"{launch.shared_bytes}, {launch.cooperative}, {launch.programmatic_dependent}"
    return f"_ws_kernels.launch({launch.entry!r}, {shapes}, {settings}, ({', '.join(arguments)},))"


def _argument(argument: candidate_pb2.LaunchArgument, names: Names) -> str:
    kind = argument.WhichOneof("kind") or "buffer"
    value = getattr(argument, kind)
    return names[value] if kind == "buffer" else f"{_INTEGERS[kind]}({value})"


def extents(extent: candidate_pb2.Extent3) -> tuple[int, int, int]:
    """Three extents, each at least 1."""
    return max(extent.x, 1), max(extent.y, 1), max(extent.z, 1)
