"""How many processors this process may keep busy, which in a container are fewer than the machine has.

The one idea: the least of what its affinity names and what its control groups (version 2) let it have. Binds nothing.
"""

from __future__ import annotations

import math
import os
from pathlib import Path


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
