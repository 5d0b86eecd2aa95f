"""Folders that others filled: counted and removed however deep, long-named, closed or linked."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from warpsmith.errors import BadInput
from warpsmith.sandbox import jail, trees
from warpsmith.sandbox.jail import Policy, Rung
from warpsmith.sandbox.jail_layout import specify

DEEP, LONG = 3000, "n" * 250


def nest(folder: Path, depth: int, name: str = "d") -> int:
    """Makes folders within one another; gives a descriptor of the last."""
    here = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=here)
        inner = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    return here


def write(folder: int, size: int) -> None:
    file = os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=folder)
    os.write(file, bytes(size))
    os.fsync(file)
    os.close(file)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """One that is gone after the test, whatever it found: pytest cannot remove what is nested so deep, now or later."""
    folder = tmp_path / "folder"
    folder.mkdir()
    yield folder
    subprocess.run(["rm", "-rf", folder], check=True)


def test_files_below_long_names_are_counted(folder: Path) -> None:
    inner = nest(folder, 40, LONG)  # a path of 10,000 bytes, which no call takes
    write(inner, 1 << 20)
    os.close(inner)
    assert 1 << 20 <= trees.bytes_below(str(folder)) < 2 << 20
    trees.remove(str(folder))
    assert not folder.exists()


def test_what_is_nested_too_deep_is_too_much_and_is_removed(folder: Path) -> None:
    os.close(nest(folder, DEEP))
    before = len(os.listdir("/proc/self/fd"))
    assert trees.bytes_below(str(folder)) == math.inf
    trees.remove(str(folder))
    assert not folder.exists()
    assert len(os.listdir("/proc/self/fd")) == before


def test_folders_without_permissions_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "closed"
    os.makedirs(folder / "a" / "b" / "c")
    for each in ("a/b/c", "a/b", "a"):
        (folder / each).chmod(0)
    trees.remove(str(folder))
    assert not folder.exists()


def test_a_folder_that_cannot_be_looked_into_is_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "listdir", refuse)  # root may look into any
    assert trees.bytes_below(str(tmp_path)) == math.inf


def test_nothing_behind_a_link_is_counted_or_removed(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    outside.mkdir()
    (outside / "file").write_bytes(bytes(1 << 20))
    (folder / "in").mkdir(parents=True)
    (folder / "link").symlink_to(outside)
    (folder / "in" / "link").symlink_to(outside)
    assert trees.bytes_below(str(folder)) < 1 << 18
    trees.remove(str(folder))
    assert not folder.exists()
    assert (outside / "file").stat().st_size == 1 << 20
    link = tmp_path / "link"
    link.symlink_to(outside)
    trees.remove(str(link))
    assert (outside / "file").exists()


def test_what_is_made_and_removed_meanwhile_is_no_error(tmp_path: Path) -> None:
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            for number in range(20):
                (tmp_path / str(number)).mkdir(exist_ok=True)
            for number in range(20):
                (tmp_path / str(number)).rmdir()

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        assert max(trees.bytes_below(str(tmp_path)) for _ in range(200)) < math.inf
    finally:
        stop.set()
        thread.join()


def test_nothing_is_below_a_folder_that_is_gone(tmp_path: Path) -> None:
    assert trees.bytes_below(str(tmp_path / "gone")) == 0
    trees.remove(str(tmp_path / "gone"))


@pytest.mark.parametrize("rung", jail.probe(), ids=lambda rung: rung.value)
def test_of_a_jail_that_nests_folders_nothing_lives_on(rung: Rung) -> None:
    code = """
import os, time
if (child := os.fork()) == 0:
    time.sleep(600)
print(child, flush=True)
os.chdir(os.environ["TMPDIR"])
for _ in range(1500):
    os.mkdir("d")
    os.chdir("d")
with open("file", "wb") as file:
    file.write(os.urandom(1 << 20) * 100)
    file.flush()
    os.fsync(file.fileno())
time.sleep(1)
"""
    finished = jail.run([sys.executable, "-I", "-c", code], Policy(), rung, deadline_s=20.0)
    if rung is Rung.LANDLOCK:  # others have a mount of bounded size, and numbers of their own
        assert b"bytes in folders of the machine's; all killed" in finished.stderr
        assert not Path("/proc", finished.stdout.decode().strip()).exists()


def test_no_jail_is_tried_where_others_could_change_what_it_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for act in (lambda: jail._confines(Rung.UNSHARE), lambda: specify(Policy(), Rung.UNSHARE, control_fd=0)):
        with pytest.raises(BadInput, match=r"everybody may write there .* set TMPDIR to another folder"):
            act()
    assert not os.listdir(tmp_path)
    tmp_path.chmod(0o1777)
    assert specify(Policy(), Rung.UNSHARE, control_fd=0)


def test_where_there_is_no_proc_a_folder_is_removed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    os.makedirs(folder / "a" / "b")
    monkeypatch.setattr(os.path, "isdir", lambda _: False)
    trees.remove(str(folder))
    assert not os.path.lexists(folder)
