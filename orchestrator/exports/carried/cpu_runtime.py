"""Builds and calls CPU kernels: one g++ run at the first call, kept in the user's cache directory by content."""

import ctypes
import functools
import hashlib
import mmap
import os
import pathlib
import shutil
import stat
import subprocess
import tempfile
import threading
import weakref

import torch


class _WsKernels:
    """The compiled kernels of an export. `sources` maps file names to texts; the first is compiled, with `flags`."""

    def __init__(self, sources, flags):
        self._sources, self._flags = sources, flags
        self._library = None

    def launch(self, entry, *tensors):
        """Calls one kernel with the addresses of the tensors, in order."""
        if self._library is None:
            self._library = self._load()
        addresses = (ctypes.c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors])
        getattr(self._library, entry)(addresses)

    def _load(self):
        # One thread pool for PyTorch and for us: the OpenMP that PyTorch brought serves both.
        for library in (pathlib.Path(torch.__file__).parent / "lib").glob("libgomp*"):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(self._build()))

    def _build(self):
        compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
        if compiler is None:
            raise RuntimeError("this kernel needs a C++ compiler: install g++, or set CXX")
        parts = [compiler, _ws_processor(), *self._flags, *self._sources, *self._sources.values()]
        key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
        cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "warpsmith"
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _ws_is_own(cache):  # a user who can write there could run code here
            cache = pathlib.Path(tempfile.mkdtemp(prefix="warpsmith-"))
        library = cache / f"{key}.so"
        if not _ws_is_own(library):
            with tempfile.TemporaryDirectory(dir=cache) as directory:
                for name, text in self._sources.items():
                    (pathlib.Path(directory) / name).write_text(text)
                command = [compiler, *self._flags, "-c", next(iter(self._sources)), "-o", "kernel.o"]
                subprocess.run(command, cwd=directory, check=True)
                # Linked without libgomp on purpose: see _load.
                link = [compiler, "-shared", "kernel.o", "-o", "kernel.so"]
                subprocess.run(link, cwd=directory, check=True)
                os.replace(pathlib.Path(directory) / "kernel.so", library)
        return library


def _ws_is_own(path):
    """Whether a path is there, is no link, and no other user could have changed what it holds."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return False
    others = stat.S_IWOTH if found.st_gid == os.getegid() else stat.S_IWOTH | stat.S_IWGRP
    return found.st_uid == os.geteuid() and not stat.S_ISLNK(found.st_mode) and not found.st_mode & others


def _ws_processor():
    """What -march=native stands for here: a cache shared by several machines must not mix their code."""
    path = pathlib.Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


_ws_thread = threading.get_ident


@functools.cache
def _ws_workspace(name, shape, strides, dtype, thread):
    """Memory that holds anything; each thread has its own, and keeps it."""
    del name, thread
    return torch.empty_strided(shape, strides, dtype=dtype)


class _WsResults:
    """Memory of large results: that of one that is gone serves the next of its size.

    The C library may give it back to the system, which then makes its pages anew in each call: on two processors a
    result of 16 MB took 5.0 ms in place of 2.0 in two of three processes.
    """

    _LEAST, _MOST = 1 << 20, 1 << 30  # bytes of one, and of all that wait

    def __init__(self):
        self._idle = {}

    def empty(self, shape, strides, dtype):
        """A tensor that holds anything."""
        span = 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
        size = span * dtype.itemsize
        if size < self._LEAST or 0 in shape:
            return torch.empty_strided(shape, strides, dtype=dtype)
        idle = self._idle.setdefault(size, [])
        try:
            memory = idle.pop()
        except IndexError:  # none, or another thread took it
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages = (ctypes.c_char * size).from_buffer(memory)
        weakref.finalize(pages, self._give_back, memory, size).atexit = False
        # A view of what `frombuffer` gives could not be written in place where gradients are kept.
        storage = torch.frombuffer(pages, dtype=dtype).untyped_storage()
        return torch.empty(0, dtype=dtype).set_(storage, 0, shape, strides)

    def _give_back(self, memory, size):
        waiting = sum(each * len(idle) for each, idle in list(self._idle.items()))
        if waiting + size <= self._MOST:
            self._idle[size].append(memory)


_ws_result = _WsResults().empty
