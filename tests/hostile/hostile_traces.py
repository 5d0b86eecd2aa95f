"""What a case leaves behind: processes, temporary files, shared memory.

The one idea: what there is before a case has to be all that there is after it, once what is ending has ended.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from warpsmith.sandbox import fork_server, jail_init

_KERNELS = "kernel_runner", "T"
"""Name and state of a kernels' process that stands still: a bench keeps the last one until it needs another."""
_PYTORCHS_CACHE = "torchinductor_"
"""One directory of a user, made by whichever process imports PyTorch's compiler first."""
SETTLE_SECONDS = 20.0
"""For what is left behind to go away: a jail closes 1,500 processes in that time on a busy machine too."""
_EQUAL_LOOKS = 5

Footprint = tuple[Counter[str], int, frozenset[str]]
"""Descendants by name, number of temporary files, names of shared memory that no process holds."""


@dataclass
class Traces:
    """Finds what outlives a case."""

    place: Path
    """The temporary directory of this run; no other run uses it."""

    def now(self) -> Footprint:
        """What there is, once several looks see the same: something may just be ending, or changing its name."""
        end = time.monotonic() + SETTLE_SECONDS
        looks = [self._look()]
        while len(looks) < _EQUAL_LOOKS and time.monotonic() < end:
            time.sleep(0.02)
            seen = self._look()
            looks = [*looks, seen] if seen == looks[0] else [seen]
        return looks[-1]

    def _look(self) -> Footprint:
        names: Counter[str] = Counter()
        for process in jail_init.descendants(os.getpid()):
            try:
                name = Path(f"/proc/{process}/comm").read_text().strip()
                state = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][:1]
            except OSError:
                continue  # ended in between
            if (name, state) != _KERNELS and name != fork_server.NAME:  # that stays
                names[name] += 1
        files = [name for name in os.listdir(self.place) if not name.startswith(_PYTORCHS_CACHE)]
        return names, len(files), _ownerless()

    def assert_same(self, before: Footprint) -> None:
        """Fails unless there is again what there was, once what is ending has ended."""
        end = time.monotonic() + SETTLE_SECONDS
        while not _is_within(seen := self._look(), before) and time.monotonic() < end:
            time.sleep(0.02)
        assert _is_within(seen, before), f"{seen} instead of {before}; files: {sorted(os.listdir(self.place))}"


@contextmanager
def own_place() -> Iterator[Traces]:
    """A temporary directory that all of this process and its children use meanwhile."""
    usual = os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory(prefix="hostile-") as place:
        os.environ["TMPDIR"], tempfile.tempdir = place, None
        try:
            yield Traces(Path(place))
        finally:
            if usual is None:
                del os.environ["TMPDIR"]
            else:
                os.environ["TMPDIR"] = usual
            tempfile.tempdir = None


def _is_within(now: Footprint, before: Footprint) -> bool:
    """Whether nothing is there that was not; others on this machine may remove theirs."""
    return now[:2] == before[:2] and now[2] <= before[2]


_OF_OTHERS = ("psm_", "sem.mp-")
"""What Python's multiprocessing makes: other programs on this machine do, nothing of ours does."""


def _ownerless() -> frozenset[str]:
    names = {name for name in os.listdir("/dev/shm") if not name.startswith(_OF_OTHERS)}
    for maps in Path("/proc").glob("[0-9]*/maps") if names else ():
        try:
            held = maps.read_text()
        except OSError:
            continue
        names -= {name for name in names if f"/dev/shm/{name}" in held}
    return frozenset(names)
