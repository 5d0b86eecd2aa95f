"""Where an exported kernel for a processor is built, and what is loaded: nothing that others could have changed."""

from __future__ import annotations

import ctypes
import itertools
import os
import stat
import struct
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.exports import export, export_module
from warpsmith.processor_flags import FLAGS, LINKED

SOURCE = 'extern "C" void put(void* const* arguments) { *static_cast<float*>(arguments[0]) = %d; }\n'
VALUES = itertools.count(1)
"""Each kernel writes another, and is loaded once: what the process has loaded by a name it does not load again."""
STRANGER = 4242
cpu_runtime: Any = types.ModuleType("cpu_runtime")
"""As an exported file has it."""
exec("\n".join([export.pasted(["library_check", "cpu_runtime"]), *export_module._calls()]), cpu_runtime.__dict__)


def kernels(value: int) -> Any:
    return cpu_runtime._WsKernels({"kernel.cpp": SOURCE % value}, ["-fPIC"], LINKED, cpu_runtime._ws_require)


def given(value: int) -> int:
    """What the kernel that should write a value writes."""
    x = torch.zeros(1)
    launch(kernels(value), x)
    return int(x)


def launch(made: Any, *tensors: torch.Tensor) -> None:
    made["put"](struct.pack(f"{len(tensors)}P", *[each.data_ptr() for each in tensors]))


def built(value: int, cache: Path) -> Path:
    """A library that is built and not loaded."""
    before = {*cache.glob("*.so")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ctypes.CDLL", lambda *_, **__: None)
        kernels(value)._load()
    (library,) = {*cache.glob("*.so")} - before
    return library


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of libraries, which is not there yet, in a cache folder with others on the way."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home" / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    return tmp_path / "home" / "cache" / "warpsmith"


def in_temporary(cache: Path) -> bool:
    """Whether something was built in a folder for one process, which nobody else can enter."""
    made = list((cache.parents[2] / "temporary").glob("warpsmith-*/*.so"))
    return bool(made) and all(not (place.parent.stat().st_mode | place.stat().st_mode) & 0o077 for place in made)


def test_a_library_is_built_once_and_its_folders_are_ours_alone_whatever_the_umask(cache: Path) -> None:
    value, umask = next(VALUES), os.umask(0)
    try:
        library = built(value, cache)
    finally:
        os.umask(umask)
    for place in (library, cache, *cache.parents[:2]):
        assert not stat.S_IMODE(place.stat().st_mode) & 0o077, place
    before = library.stat().st_mtime_ns
    assert given(value) == value
    assert [library] == list(cache.iterdir())
    assert library.stat().st_mtime_ns == before


def _everybodys(cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.parents[1].chmod(0o777)


def _everybodys_last(cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o1777)


def _a_groups(cache: Path) -> None:
    cache.mkdir(parents=True)
    os.chown(cache.parent, -1, STRANGER)
    cache.parent.chmod(0o770)


def _anothers(cache: Path) -> None:
    cache.mkdir(parents=True)
    os.chown(cache.parents[1], STRANGER, -1)


def _a_file(cache: Path) -> None:
    cache.parents[1].mkdir()
    cache.parent.touch()


NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="gives folders to another user")


@pytest.mark.parametrize(
    "spoil",
    [
        _everybodys,
        _everybodys_last,
        _a_file,
        pytest.param(_a_groups, marks=NEEDS_ROOT),
        pytest.param(_anothers, marks=NEEDS_ROOT),
    ],
)
def test_nothing_is_built_below_a_folder_that_others_can_change(cache: Path, spoil: Callable[[Path], None]) -> None:
    spoil(cache)
    value = next(VALUES)
    assert given(value) == value
    assert in_temporary(cache)
    assert not list(cache.parents[1].rglob("*.so"))


def _sticky(cache: Path) -> None:
    cache.parents[1].chmod(0o1777)


def _own_group(cache: Path) -> None:
    os.chown(cache.parent, -1, 0)
    cache.parent.chmod(0o770)


@pytest.mark.parametrize("loosen", [_sticky, pytest.param(_own_group, marks=NEEDS_ROOT)])
def test_the_cache_is_used_below_folders_in_which_what_is_ours_stays_ours(
    cache: Path, loosen: Callable[[Path], None]
) -> None:
    cache.mkdir(parents=True)
    for place in (cache, *cache.parents[:2]):
        place.chmod(0o700)
    loosen(cache)
    value = next(VALUES)
    assert given(value) == value
    assert len(list(cache.glob("*.so"))) == 1


def test_a_folder_that_is_no_longer_ours_is_refused_by_name(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _everybodys(cache)
    swapped = cache.parents[2] / "swapped"
    swapped.mkdir()
    swapped.chmod(0o777)
    monkeypatch.setattr("tempfile.mkdtemp", lambda **_: str(swapped))
    with pytest.raises(RuntimeError, match=r"swapped: another user could change it; set XDG_CACHE_HOME"):
        given(next(VALUES))


def _writable(library: Path) -> None:
    library.chmod(0o666)


def _linked(library: Path) -> None:
    os.replace(library, library.with_name("elsewhere.so"))
    library.symlink_to("elsewhere.so")


def _twice(library: Path) -> None:
    os.link(library, library.with_name("elsewhere.so"))


def _pipe(library: Path) -> None:
    library.unlink()
    os.mkfifo(library)


def _theirs(library: Path) -> None:
    os.chown(library, STRANGER, -1)


@pytest.mark.parametrize("spoil", [_writable, _linked, _twice, _pipe, pytest.param(_theirs, marks=NEEDS_ROOT)])
def test_a_library_that_others_could_have_changed_is_built_again(cache: Path, spoil: Callable[[Path], None]) -> None:
    value = next(VALUES)
    planted, library = built(next(VALUES), cache), built(value, cache)
    os.replace(planted, library)
    spoil(library)
    assert given(value) == value


def test_what_is_loaded_lies_in_the_folder_that_was_looked_at(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, value = built(next(VALUES), cache), next(VALUES)
    content = theirs.read_bytes()
    theirs.unlink()
    load = ctypes.CDLL

    def swapped_before(path: str, *arguments: Any, **named: Any) -> Any:
        if cache.exists() and (found := list(cache.glob("*.so"))):
            os.rename(cache, cache.with_name("moved"))
            cache.mkdir()
            (cache / found[0].name).write_bytes(content)
        return load(path, *arguments, **named)

    monkeypatch.setattr("ctypes.CDLL", swapped_before)
    assert given(value) == value
    assert (cache.parent / "moved").exists()


def test_libraries_of_two_exports_are_not_taken_for_each_other(cache: Path) -> None:
    values = [next(VALUES) for _ in range(5)]
    assert [given(value) for value in values] == values
    assert len(list(cache.iterdir())) == 5


# ---- what is built -------------------------------------------------------------------------------------

ENTRY = 'extern "C" void put(void* const* arguments) {{ {} }}\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"#include <cstdlib>\n{ENTRY.format('std::system(__DATE__);')}", "calls 'system'"),
        (
            f"#include <cmath>\nvolatile float x;\nfloat ran = std::exp(x);\n{ENTRY.format('')}",
            "runs code when it is loaded",
        ),
        (ENTRY.format('asm volatile("nop");'), "holds assembly"),
        (
            'extern "C" int one() { return 1; }\nstatic auto chosen() { return one; }\n'
            '__attribute__((ifunc("_ZL6chosenv"))) int late();\n' + ENTRY.format("late();"),
            "chooses a function when it is loaded",
        ),
        (
            'typedef void (*F)(); static void one() {}\nextern "C" { static F chosen() { return one; } }\n'
            'static void late() __attribute__((ifunc("chosen")));\n' + ENTRY.format("late();"),
            "chooses a function when it is loaded",
        ),
        ("static long calls;\n" + ENTRY.format("++calls; **(float* const*)arguments = calls;"), "keeps memory"),
    ],
)
def test_what_a_text_means_here_is_looked_at_before_it_is_loaded(cache: Path, text: str, said: str) -> None:
    made = cpu_runtime._WsKernels({"kernel.cpp": text}, FLAGS, LINKED, cpu_runtime._ws_require)
    with pytest.raises(RuntimeError, match=said):
        launch(made)
    assert not list(cache.glob("*.so"))


def test_a_kernel_may_compute_and_share_its_loops(cache: Path) -> None:
    text = """#include <cmath>
#include <cstring>
extern "C" void put(void* const* arguments) {
  float* out = static_cast<float*>(arguments[0]);
#pragma omp parallel for
  for (int i = 0; i < 64; ++i) out[i] = std::exp(std::pow(1.5f, i % 3));
  std::memmove(out, out + 1, 63 * sizeof(float));
}
"""
    x = torch.zeros(64)
    launch(cpu_runtime._WsKernels({"kernel.cpp": text}, FLAGS, LINKED, cpu_runtime._ws_require), x)
    torch.testing.assert_close(x[0], torch.tensor(1.5).exp())
    assert len(list(cache.glob("*.so"))) == 1
