"""The command that writes a run's best kernel as files.

The one idea: as in `cli`, it reads its arguments, asks the service and writes what that gives; the service makes it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.commands import client
from orchestrator.commands.options import DEFAULT_RUNS, RunIds, Runs, Server
from orchestrator.commands.terminal import STDOUT, tell_file, tell_line
from orchestrator.exports import export_files
from orchestrator.trust import record
from warpsmith.errors import BadInput
from warpsmith.v1 import optimization_service_pb2 as messages

EXAMPLE = (
    "Examples:\n\n  warpsmith export last --output fast_softmax.py\n\n"
    "  warpsmith export 20260101-120000 20260101-130000 --output fast_softmax.py   # two shapes, one file"
)


def export(
    run: RunIds = None,
    flavour: Annotated[str, typer.Option("--flavour", help="One of those above, or a plugin's.")] = "module",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File or folder to write; `-` for stdout; a name of its own otherwise."),
    ] = None,
    server: Server = "",
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Writes the best kernel of a run, and its record.

    A training step (--grad) becomes a module that trains, by the flavours module, package and hub.

    Several runs of one module with other inputs (shapes, types) make one export, by the flavours module, package and
    hub: a table in it says which kernel answers which inputs, and the original answers all others.

    --flavour module: a Python file that needs only torch, with the record beside it.

    --flavour package: a folder that pip installs; under torch.compile the kernel is one operator of one graph.

    --flavour hub: a folder for Hugging Face's Kernel Hub, which `kernels.get_kernel` loads and kernel-builder builds.

    --flavour cu: a CUDA file that nvcc alone compiles, with a launcher for C; for kernels without library calls.

    --flavour kernelbench: a solution file for KernelBench's own harness.
    """
    if output is not None and not output.name:
        raise BadInput(f"--output {str(output)!r}: names no file; write one, or `-` for stdout")
    first, *others = run or ["last"]
    with client.reading(server, runs) as orchestrator:
        request = messages.ExportBestRequest(run_id=first, other_run_ids=others, flavour=flavour)
        reply = orchestrator.ExportBest(request, timeout=60.0)
        asked = [messages.GetRunRequest(run_id=each) for each in (first, *others)]
        kept = [orchestrator.GetRun(each, timeout=30.0).run for each in asked]
    if output in STDOUT:
        if reply.files:
            raise BadInput(f"--flavour {flavour} writes a folder, which stdout cannot be: name one with --output")
        tell_file(reply.text)
        return
    place = output or Path(export_files.own_name(reply.file_name))
    if reply.files:
        export_files.write_folder(place, {file.path: file.text for file in reply.files})
    else:
        export_files.write(place, reply.text, *map(record.text, kept))
    tell_line(str(place))
