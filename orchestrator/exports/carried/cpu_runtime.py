"""Builds and calls CPU kernels: one g++ run at the first call, kept in the user's cache directory by content."""

import contextlib
import ctypes
import functools
import grp
import hashlib
import mmap
import os
import pathlib
import pwd
import shutil
import stat
import subprocess
import tempfile
import threading
import weakref

import torch


class _WsKernels(dict[str, object]):
    """The compiled kernels of an export, by name: functions of the addresses of their tensors in a row.

    `sources` maps file names to texts; the first is compiled when a kernel is first asked for, with `flags`, and linked
    with those in `linked`; `require` refuses what came of it, by assembly and library.
    """

    def __init__(self, sources, flags, linked, require):
        super().__init__()
        self._sources, self._flags, self._linked, self._require = sources, flags, linked, require
        self._library = None

    def __missing__(self, entry):
        self._library = self._library or self._load()
        self[entry] = getattr(self._library, entry)
        return self[entry]

    def _load(self):
        # One thread pool for PyTorch and for us: the OpenMP that PyTorch brought serves both.
        for library in (pathlib.Path(torch.__file__).parent / "lib").glob("libgomp*"):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
        if compiler is None:
            raise RuntimeError("this kernel needs a C++ compiler: install g++, or set CXX")
        parts = [compiler, _ws_processor(), *self._flags, *self._linked, *self._sources, *self._sources.values()]
        name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32] + ".so"
        folder, place = _ws_folder()
        try:
            if not _ws_is_own_file(folder, name):
                self._build(compiler, place, name)
                if not _ws_is_own_file(folder, name):
                    raise RuntimeError(f"{name}: is not what was built")
            # By the folder's descriptor: by the file's, dlopen takes the number for the name of what it loads, and
            # gives what it once loaded by that number.
            return ctypes.CDLL(os.path.join(place, name))
        finally:
            os.close(folder)

    def _build(self, compiler, place, name):
        with tempfile.TemporaryDirectory(dir=place) as directory:
            for source, text in self._sources.items():
                descriptor = os.open(os.path.join(directory, source), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with open(descriptor, "w", encoding="utf-8") as file:
                    file.write(text)
            compile_it = [compiler, *self._flags, "-S", "-o", "kernel.s", "-x", "c++", next(iter(self._sources))]
            for command in (compile_it, [compiler, *self._linked, "kernel.s", "-o", "kernel.so"]):
                subprocess.run(command, cwd=directory, check=True, umask=0o077)
            made = pathlib.Path(directory)
            self._require((made / "kernel.s").read_text(errors="replace"), (made / "kernel.so").read_bytes())
            os.replace(made / "kernel.so", os.path.join(place, name))


def _ws_folder():
    """A folder that no other user can change, in the user's cache or else a new one: open, and a path by its
    descriptor, which stays that folder whatever has its name by now."""
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    place = _ws_own_folder(pathlib.Path(home) / "warpsmith") or tempfile.mkdtemp(prefix="warpsmith-")
    folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    found = os.fstat(folder)
    if found.st_uid != os.geteuid() or not _ws_is_ours(place, found):
        os.close(folder)
        raise RuntimeError(f"{place}: another user could change it; set XDG_CACHE_HOME to a folder of your own")
    by_descriptor = f"/proc/self/fd/{folder}"
    return folder, by_descriptor if os.path.exists(by_descriptor) else str(place)


def _ws_own_folder(path):
    """The real path of a folder, made for us alone where it is missing; None where another user could change it.

    Whoever can write to a folder on the way can put another in its place: each is looked at, from the root on.
    """
    place = pathlib.Path(os.path.realpath(path))
    try:
        for each in (*reversed(place.parents), place):
            if not os.path.lexists(each):
                with contextlib.suppress(FileExistsError):
                    os.mkdir(each, 0o700)
            found = os.lstat(each)
            is_kept = found.st_mode & stat.S_ISVTX and _ws_is_owned(found)  # what is ours stays in a sticky folder
            if not stat.S_ISDIR(found.st_mode) or not (is_kept or _ws_is_ours(each, found)):
                return None
    except OSError:
        return None
    return place if found.st_uid == os.geteuid() and _ws_is_ours(place, found) else None


def _ws_is_owned(found):
    return found.st_uid in (0, os.geteuid())


def _ws_is_ours(path, found):
    """Whether it belongs to us or root, and only they may write to it, or a group that is ours alone."""
    if not _ws_is_owned(found) or found.st_mode & stat.S_IWOTH:
        return False
    if not found.st_mode & stat.S_IWGRP:
        return True
    try:
        own, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(found.st_gid)
        is_listed = hasattr(os, "listxattr") and "system.posix_acl_access" in os.listxattr(path)
    except (KeyError, OSError):
        return False
    return group.gr_name in (own, "root") and not set(group.gr_mem) - {own, "root"} and not is_listed


def _ws_is_own_file(folder, name):
    """Whether an open folder holds a file that we made and that no other user could have changed."""
    try:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return False
    try:
        found = os.fstat(file)
    finally:
        os.close(file)
    is_private = found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWOTH | stat.S_IWGRP)
    return is_private and stat.S_ISREG(found.st_mode) and found.st_nlink == 1


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


@functools.cache
def _ws_size(shape, strides, dtype):
    """Bytes from the first to the last element."""
    span = 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    return 0 if 0 in shape else span * dtype.itemsize


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
        size = _ws_size(shape, strides, dtype)
        if size < self._LEAST:
            return _ws_small(shape, strides, dtype)
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
# Small ones, by PyTorch's own name where it has it, as Inductor's code does: half of the time.
_ws_small = getattr(
    torch._C._dynamo.guards,
    "_empty_strided_cpu",
    lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype),
)
