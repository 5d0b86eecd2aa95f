"""What a case leaves behind: processes, temporary files, shared memory, work that goes on.

The one idea: what there is before a case has to be all that there is after it, once what is ending has ended.
"""

from __future__ import annotations

import contextlib
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
_REST_SECONDS, _MOST_WORK = 0.1, 0.2
"""For how long processes are watched that have nothing to do, and the share of a processor that they may want then."""

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

    def assert_at_rest(self) -> None:
        """Fails unless no descendant has work, once what is ending has ended; a busy machine changes nothing there."""
        end = time.monotonic() + SETTLE_SECONDS
        while (work := _work()) > _MOST_WORK and time.monotonic() < end:
            pass
        assert work <= _MOST_WORK, f"with nothing to do, descendants want {work:.1f} processors"


def _work() -> float:
    """How many processors the descendants want: the time in which their threads run or wait for one, by the watch."""
    begin, before = time.monotonic(), _wanted_ns()
    time.sleep(_REST_SECONDS)
    after, seconds = _wanted_ns(), time.monotonic() - begin
    return sum(max(0, ns - before.get(thread, ns)) for thread, ns in after.items()) / (1e9 * seconds)


def _wanted_ns() -> dict[str, int]:
    """For each thread of a descendant the time that it has run or waited for a processor."""
    wanted = {}
    for process in jail_init.descendants(os.getpid()):
        with contextlib.suppress(OSError):  # one that ends in between
            for file in Path(f"/proc/{process}/task").glob("*/schedstat"):
                ran, waited, _ = file.read_text().split()
                wanted[str(file)] = int(ran) + int(waited)
    return wanted


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
