"""Reads what kernels take of the machine from the notes that ptxas writes under `-v`.

nvcc passes the notes through and NVRTC keeps them in its program log, so one reader serves both. CPU code has none.
"""

from __future__ import annotations

import re

from warpsmith.v1 import artifact_pb2

_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_FUNCTION = re.compile(r"Function properties for (\S+)")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+)(?:\+\d+)? bytes smem")


def parse(log: str) -> list[artifact_pb2.KernelResources]:
    """Resources of each entry in the order of the log; spill bytes are the stores, as ptxas counts them.

    Device functions that were not inlined are listed by ptxas too; their frames are not an entry's and are skipped.
    """
    found: list[artifact_pb2.KernelResources] = []
    current: artifact_pb2.KernelResources | None = None
    own_frame = True
    for line in log.splitlines():
        if entry := _ENTRY.search(line):
            current = artifact_pb2.KernelResources(entry=entry.group(1))
            found.append(current)
            own_frame = True
        elif function := _FUNCTION.search(line):
            own_frame = current is not None and function.group(1) == current.entry
        elif current is None:
            continue
        elif (frame := _FRAME.search(line)) and own_frame:
            current.stack_bytes = int(frame.group(1))
            current.spill_bytes = int(frame.group(2))
        elif used := _USED.search(line):
            current.register_count = int(used.group(1))
            if shared := _SHARED.search(line):
                current.shared_bytes = int(shared.group(1))
    return found
