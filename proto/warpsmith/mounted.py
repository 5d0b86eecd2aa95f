"""A mounted file of lines, read again when it changes, so that who changes it restarts nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from warpsmith.errors import BadInput

LineT = TypeVar("LineT")


class Lines(Generic[LineT]):
    """What the lines of a file say, empty ones left out.

    `read` makes it of one line and raises BadInput, `kind` is what a line holds, `variable` names the file, which is
    ASCII.
    """

    def __init__(self, file: Path, read: Callable[[str], LineT], kind: str, variable: str) -> None:
        self.file, self._read, self._kind, self._variable = file, read, kind, variable
        self._stamp: tuple[int, int, int] | None = None
        self._last: tuple[LineT, ...] = ()
        self._last = self.now()

    def now(self) -> tuple[LineT, ...]:
        """What the file says now; what it said last where it is just being replaced.

        Raises:
            BadInput: it never held a line that can be used; names it.
        """
        try:
            found = self.file.stat()
            stamp = found.st_mtime_ns, found.st_ino, found.st_size
            if stamp != self._stamp:
                lines = (line.strip() for line in self.file.read_text("ascii").splitlines())
                read = tuple(self._read(line) for line in lines if line)
                if not read:
                    raise BadInput(f"holds no {self._kind}")
                self._last, self._stamp = read, stamp
        except (OSError, UnicodeDecodeError, BadInput) as error:
            if not self._last:
                said = error if isinstance(error, BadInput) else f"cannot be read as a {self._kind} ({error})"
                raise BadInput(f"{self.file}: {said}; see {self._variable}") from error
        return self._last
