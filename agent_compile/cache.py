"""Keeps outcomes of compilations in a directory, by digest.

The one idea: an entry is a directory made aside and published by one rename, so a reader sees all of it or nothing,
and of two writers the first wins. What is found is run, so every folder and file on the way is made for us alone, and
looked at again before it is read. A cache that cannot be read or written, or that others could write, costs time, never
an answer.
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
        """What was stored under the digest; None when nothing is. What is damaged, or others' to write, is removed."""
        entry = self._entry(digest)
        if self._closed or not self._is_ours(entry):
            return None
        try:
            answer, checksum = (
                private_files.read(private_files.own_file(entry / name)) for name in (_ANSWER, _CHECKSUM)
            )
            if hashlib.sha256(answer).hexdigest().encode() != checksum:
                raise DecodeError("it is damaged")
            response = compile_service_pb2.CompileCandidateResponse.FromString(answer)
        except (FileNotFoundError, BadInput, DecodeError) as error:
            if entry.is_dir():  # not one that another process has removed
                self._discard(entry, error)
            return None
        except OSError:
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
            private_files.make_folder(aside)
            private_files.replace(aside / _ANSWER, answer)
            private_files.replace(aside / _CHECKSUM, hashlib.sha256(answer).hexdigest())
            private_files.make_folder(entry.parent)
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

    def _is_ours(self, entry: Path) -> bool:
        """Whether it is there, in folders that only we can write. What others could, in a cache of ours, is removed."""
        place = self._directory
        try:
            for place in (self._directory, entry.parent, entry):
                private_files.directory(place, make=False)
        except (NotADirectoryError, BadInput) as error:
            if place == self._directory:
                self._warn(error)
            else:
                self._discard(place, error)
            return False
        except OSError:
            return False
        return True

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

    def _discard(self, entry: Path, why: Exception) -> None:
        if self._remove(entry):
            log.warning("the cache entry %s was removed: %s", entry, why)

    def _remove(self, entry: Path) -> bool:
        """Whether it was still there."""
        # Renamed first, so that no reader finds half an entry.
        aside = self._directory / f".old-{os.getpid()}-{secrets.token_hex(8)}"
        try:
            entry.rename(aside)
            if aside.is_symlink() or not aside.is_dir():
                aside.unlink()
        except OSError:
            return False
        shutil.rmtree(aside, ignore_errors=True)
        return True

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            log.warning("the compile cache %s cannot be used, going on without: %s", self._directory, error)
