"""Caches of what was compiled: plain files are copied, whatever a jailed process left beside them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from torch._inductor import codecache

from gpu_bench.pytorch import compiling
from gpu_bench.pytorch.compiler_cache import CompilerCache
from warpsmith.sandbox import jail
from warpsmith.v1 import task_pb2


def test_plain_files_are_kept_beside_whatever_a_process_left(tmp_path: Path) -> None:
    cache = CompilerCache()
    root, kept = cache._root, cache.directory / "inductor" / "a" / "kernel.py"
    kept.parent.mkdir(parents=True)
    kept.write_text("compiled")
    (cache.directory / "link").symlink_to(tmp_path)
    (cache.directory / "linked_file").symlink_to(kept)
    os.mkfifo(cache.directory / "pipe")
    here = os.open(cache.directory, os.O_RDONLY)
    for _ in range(1500):  # deeper than Python calls, and than a path is long
        os.mkdir("nested", dir_fd=here)
        inner = os.open("nested", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    try:
        cache.keep()
        cache.renew()
        assert kept.read_text() == "compiled"
        assert {*os.listdir(cache.directory)} == {"inductor", "nested"}
        cache.close()
        assert not root.exists()
        assert tmp_path.exists()
    finally:
        subprocess.run(["rm", "-rf", root], check=True)


def test_headers_that_one_process_compiled_are_every_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    headers = tmp_path / "headers"
    headers.mkdir()
    first = CompilerCache(headers=headers)
    later = CompilerCache(first)
    allowed = later.allowed(jail.Policy(writable=(tmp_path,)))
    assert headers in allowed.readable
    assert headers not in allowed.writable
    assert {tmp_path, later.directory} == {*allowed.writable}
    for name, value in later.environment().items():
        monkeypatch.setenv(name, value)

    def in_process(name: str) -> Path:
        """Where Inductor keeps headers in a process with a TMPDIR of its own."""
        monkeypatch.setattr(codecache, "_HEADER_DIR", str(tmp_path / name))
        return tmp_path / name

    in_process("none")
    compiling.keep_headers()
    assert not os.listdir(headers)
    own = in_process("one")
    (own / "locks").mkdir(parents=True)
    (own / "a.h.gch").write_text("compiled")
    compiling.keep_headers()
    assert os.listdir(headers) == ["a.h.gch"]
    own = in_process("two")
    for _ in range(2):
        with compiling.compiling_here(task_pb2.TARGET_CPU):
            assert (own / "a.h.gch").read_text() == "compiled"
    (headers / "a.h.gch").unlink()  # by a cleaner of temporary files, as the folder itself
    with compiling.compiling_here(task_pb2.TARGET_CPU):
        assert not os.listdir(own)
    headers.rmdir()
    assert headers not in later.allowed(jail.Policy()).readable
    for cache in (first, later):
        cache.close()
