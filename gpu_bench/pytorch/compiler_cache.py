"""Where torch.compile keeps what it compiled for one task, so that a fresh process need not compile again.

The one idea: a process that has loaded a candidate could poison a cache, and with it a baseline. So each process works
on a copy of a seed, and only a process that has loaded no candidate is ever copied back into the seed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

MOST_BYTES = 512 << 20
"""A seed does not grow beyond this; what is left out is compiled again."""


class CompilerCache:
    """Two directories of one task: the seed, and the working copy that a jailed process may write.

    `start`: another cache, whose seed this one begins with.
    """

    def __init__(self, start: CompilerCache | None = None) -> None:
        self._root = Path(tempfile.mkdtemp(prefix="warpsmith-compiled-"))
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
        }

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
        shutil.rmtree(self._root, ignore_errors=True)


def _replace(target: Path, source: Path) -> None:
    """Copies plain files and directories only: what a jailed process left may hold links, pipes or devices."""
    for old in target.iterdir():  # the directory itself stays: a jail that waits may have it mounted
        if old.is_dir() and not old.is_symlink():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.unlink(missing_ok=True)
    left = MOST_BYTES
    for place, directories, names in os.walk(source):
        there = target / Path(place).relative_to(source)
        for name in directories:
            if not os.path.islink(os.path.join(place, name)):
                (there / name).mkdir()
        for name in names:
            path = Path(place, name)
            if path.is_symlink() or not path.is_file() or path.stat().st_size > left:
                continue
            left -= path.stat().st_size
            shutil.copyfile(path, there / name, follow_symlinks=False)  # it may be one by now
