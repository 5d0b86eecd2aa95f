"""The file behind the memory that the workers of a session share: it grows, and no process can shrink it.

The one idea: a process that writes it could otherwise cut it and let it grow again, and every other would fetch each
page anew in its next timed call: 16 MB take 2.3 ms instead of 0.5. The jail (`lockdown`) refuses holes. Needs no torch.
"""

from __future__ import annotations

import fcntl
import os


def made() -> int:
    """An empty one; its descriptor."""
    descriptor = os.memfd_create("outputs", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return descriptor


def grow(descriptor: int, size: int) -> None:
    """Makes it at least so large."""
    if os.fstat(descriptor).st_size < size:
        os.ftruncate(descriptor, size)
