"""How many processors this process may keep busy, which in a container are fewer than the machine has; and the use of
all of them where a library has bound a thread to one.

The one idea: the least of what its affinity names and what its control groups (version 2) let it have.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

_allowed: set[int] = set()


def processor_count(root: Path = Path("/")) -> int:
    """At least 1; a quota of a part counts as one more."""
    return max(1, min([len(os.sched_getaffinity(0)), *_quotas(root)]))


def _quotas(root: Path) -> list[int]:
    """Processors by the quota of our control group and of those around it, as far as they can be seen from here."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    own = next((line.removeprefix("0::") for line in groups if line.startswith("0::")), "/")
    mount = root / "sys/fs/cgroup"
    group = mount / own.strip("/")
    found = []
    for place in (group, *group.parents):
        if place.is_relative_to(mount) and (place / "cpu.max").exists():
            quota, period = (place / "cpu.max").read_text().split()
            if quota != "max":
                found.append(math.ceil(int(quota) / int(period)))
    return found


def note_allowed() -> None:
    """Remembers which processors this thread may use now: before libraries are imported."""
    _allowed.update(os.sched_getaffinity(0))


@contextlib.contextmanager
def on_all_processors() -> Iterator[None]:
    """This thread, and whatever it starts, may use all that were noted; afterwards those that it could use before.

    With OMP_PROC_BIND, OpenMP binds the thread that imports torch to one processor, and compilers that it starts to the
    same one: an extension of 71 s took more than 240.
    """
    bound = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):  # none of those is ours any more
        os.sched_setaffinity(0, _allowed or bound)
    try:
        yield
    finally:
        os.sched_setaffinity(0, bound)
