"""Where torch.compile keeps what it compiled for one task, so that a fresh process need not compile again.

The one idea: a process that has loaded a candidate could poison a cache, and with it a baseline. So each process works
on a copy of a seed, and only a process that has loaded no candidate is ever copied back into the seed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from warpsmith.sandbox import jail, private_files, trees

HEADERS_VARIABLE = "WARPSMITH_COMPILED_HEADERS"
"""Names the folder of headers that were compiled for all processes."""
MOST_BYTES = 512 << 20
"""A seed does not grow beyond this; what is left out is compiled again."""
_LONGEST_PATH = 3072
"""Of a copy, in bytes: with room for what is made beside it within the system's 4096."""


class CompilerCache:
    """Two directories of one task: the seed, and the working copy that a jailed process may write.

    `start`: another cache, whose seed this one begins with. `headers`: the folder of the C++ compiler's precompiled
    headers, which a jailed process may read; by default the other's.
    """

    def __init__(self, start: CompilerCache | None = None, headers: Path | None = None) -> None:
        self._headers: Path | None = headers or (start._headers if start is not None else None)
        self._root = Path(tempfile.mkdtemp(prefix="warpsmith-compiled-", dir=private_files.temporary_directory()))
        self._seed = self._root / "seed"
        self.directory = self._root / "work"
        """The working copy; its path stays the same, because a jail that waits may have it mounted."""
        self._seed.mkdir()
        self.directory.mkdir()
        if start is not None:
            _replace(self._seed, start._seed)

    def environment(self) -> dict[str, str]:
        """What tells torch.compile and Triton to use the working copy."""
        return {
            "TORCHINDUCTOR_CACHE_DIR": str(self.directory / "inductor"),
            "TRITON_CACHE_DIR": str(self.directory / "triton"),
        } | ({HEADERS_VARIABLE: str(self._headers)} if self._headers is not None else {})

    def allowed(self, policy: jail.Policy) -> jail.Policy:
        """The policy of a process that uses it."""
        headers = [self._headers] if self._headers is not None and self._headers.is_dir() else []
        return replace(policy, writable=(*policy.writable, self.directory), readable=(*policy.readable, *headers))

    def begin_with(self, other: CompilerCache) -> None:
        """Makes both directories equal to the other's seed. No process may be compiling in this one."""
        self.learn(other)
        self.renew()

    def learn(self, other: CompilerCache) -> None:
        """Makes the seed equal to the other's; the working copy stays as it is until it is renewed."""
        _replace(self._seed, other._seed)

    def renew(self) -> None:
        """Makes the working copy equal to the seed. No process may be using it."""
        _replace(self.directory, self._seed)

    def keep(self) -> None:
        """Makes the seed equal to the working copy, which no candidate's process has written."""
        _replace(self._seed, self.directory)

    def close(self) -> None:
        """Removes both."""
        trees.remove(str(self._root))


def _replace(target: Path, source: Path) -> None:
    """Copies plain files and directories only: what a jailed process left may hold links, pipes or devices, and be
    nested without end."""
    for old in target.iterdir():  # the directory itself stays: a jail that waits may have it mounted
        if old.is_dir() and not old.is_symlink():
            trees.remove(str(old))
        else:
            old.unlink(missing_ok=True)
    left, waiting = MOST_BYTES, [(source, target)]
    while waiting:
        place, there = waiting.pop()
        with os.scandir(place) as entries:
            for entry in entries:
                copy = there / entry.name
                if len(os.fsencode(copy)) > _LONGEST_PATH:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    copy.mkdir()
                    waiting.append((Path(entry), copy))
                elif entry.is_file(follow_symlinks=False) and (size := entry.stat().st_size) <= left:
                    left -= size
                    shutil.copyfile(entry, copy, follow_symlinks=False)  # it may be a link by now
