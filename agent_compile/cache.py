"""Keeps outcomes of compilations in a directory, by digest.

The one idea: an entry is a directory made aside and published by one rename, so a reader sees all of it or nothing,
and of two writers the first wins. A cache that cannot be read or written, or that others could write, costs time,
never an answer.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import shutil
import threading
from pathlib import Path

from google.protobuf.message import DecodeError

from warpsmith.errors import BadInput
from warpsmith.sandbox import private_files
from warpsmith.v1 import compile_service_pb2

log = logging.getLogger("warpsmith.compile")

SIZE_BYTES = 2 << 30
"""Size at which the entries used longest ago are removed, down to 80 % of it."""

_ANSWER, _CHECKSUM = "answer.binpb", "sha256"


def default_directory() -> Path:
    """`WARPSMITH_CACHE_DIR/compile`, else `~/.cache/warpsmith/compile`."""
    root = os.environ.get("WARPSMITH_CACHE_DIR")
    return (Path(root) if root else Path.home() / ".cache" / "warpsmith") / "compile"


class Cache:
    """Digest → `CompileCandidateResponse`, shared by threads and processes of one user."""

    def __init__(self, directory: Path, *, size_bytes: int = SIZE_BYTES) -> None:
        self._directory = directory
        self._limit = size_bytes
        self._lock = threading.Lock()
        self._size: int | None = None
        self._warned = False
        self._closed = False
        try:
            self._directory = private_files.directory(directory, remedy="set WARPSMITH_CACHE_DIR to another")
        except BadInput as error:
            self._closed = True
            self._warn(error)
        except OSError as error:
            self._warn(error)

    def find(self, digest: str) -> compile_service_pb2.CompileCandidateResponse | None:
        """What was stored under the digest; None when nothing is, or when it is damaged."""
        if self._closed:
            return None
        entry = self._entry(digest)
        name = entry.relative_to(self._directory).as_posix()
        try:
            answer = private_files.read_beneath(self._directory, f"{name}/{_ANSWER}")
            checksum = private_files.read_beneath(self._directory, f"{name}/{_CHECKSUM}").decode(errors="replace")
        except (OSError, BadInput):
            return None
        try:
            if hashlib.sha256(answer).hexdigest() != checksum:
                raise DecodeError("checksum")
            response = compile_service_pb2.CompileCandidateResponse.FromString(answer)
        except DecodeError:
            log.warning("the cache entry %s is damaged and was removed", entry)
            self._remove(entry)
            return None
        try:
            os.utime(entry)  # when it was used last
        except OSError as error:
            self._warn(error)
        return response

    def publish(
        self, digest: str, response: compile_service_pb2.CompileCandidateResponse
    ) -> compile_service_pb2.CompileCandidateResponse:
        """Stores the response and returns it, or the one that another writer had stored first."""
        if self._closed:
            return response
        entry = self._entry(digest)
        aside = self._directory / f".new-{os.getpid()}-{secrets.token_hex(8)}"
        answer = response.SerializeToString(deterministic=True)
        try:
            aside.mkdir(parents=True)
            (aside / _ANSWER).write_bytes(answer)
            (aside / _CHECKSUM).write_text(hashlib.sha256(answer).hexdigest())
            entry.parent.mkdir(exist_ok=True)
            try:
                aside.rename(entry)
            except OSError:
                if not entry.is_dir():
                    raise
                shutil.rmtree(aside, ignore_errors=True)
                return self.find(digest) or response
        except OSError as error:
            shutil.rmtree(aside, ignore_errors=True)
            self._warn(error)
            return response
        self._bound(len(answer))
        return response

    def _entry(self, digest: str) -> Path:
        return self._directory / digest[:2] / digest

    def _bound(self, added: int) -> None:
        """Counts what was added; walks the directory only at the first time and when the count reaches the limit."""
        with self._lock:
            if self._size is not None:
                self._size += added
                if self._size <= self._limit:
                    return
            entries = self._listed()
            self._size = sum(size for _, size, _ in entries)
            if self._size <= self._limit:
                return
            for _, size, entry in sorted(entries):
                if self._size <= self._limit * 0.8:
                    break
                self._remove(entry)
                self._size -= size

    def _listed(self) -> list[tuple[float, int, Path]]:
        """(last use, bytes, path) of every entry."""
        found = []
        for entry in self._directory.glob("??/*"):
            try:
                found.append((entry.stat().st_mtime, (entry / _ANSWER).stat().st_size, entry))
            except OSError:
                continue  # removed by another process
        return found

    def _remove(self, entry: Path) -> None:
        # Renamed first, so that no reader finds half an entry.
        aside = self._directory / f".old-{os.getpid()}-{secrets.token_hex(8)}"
        try:
            entry.rename(aside)
        except OSError:
            return
        shutil.rmtree(aside, ignore_errors=True)

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            log.warning("the compile cache %s cannot be used, going on without: %s", self._directory, error)
