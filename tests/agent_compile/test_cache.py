"""The cache, with real directories."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from agent_compile.cache import Cache
from warpsmith.sandbox import private_files
from warpsmith.v1 import artifact_pb2, compile_service_pb2

Response = compile_service_pb2.CompileCandidateResponse
ENTRY = "ab/ab12"


def response(text: str) -> Response:
    return Response(artifact=artifact_pb2.Artifact(content=text.encode()))


def test_what_was_published_is_found_by_another_cache_on_the_directory(tmp_path: Path) -> None:
    Cache(tmp_path).publish("ab12", response("x"))
    assert Cache(tmp_path).find("ab12") == response("x")
    assert Cache(tmp_path).find("ab13") is None


def test_losing_the_publish_race_returns_the_winner(tmp_path: Path) -> None:
    first, second = Cache(tmp_path), Cache(tmp_path)
    first.publish("ab12", response("winner"))
    assert second.publish("ab12", response("loser")) == response("winner")
    assert [path.name for path in tmp_path.iterdir()] == ["ab"]


def test_many_writers_agree_on_one_answer(tmp_path: Path) -> None:
    cache, answers = Cache(tmp_path), []
    threads = [
        threading.Thread(target=lambda i=i: answers.append(cache.publish("ab12", response(str(i))))) for i in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({answer.artifact.content for answer in answers}) == 1


def test_a_damaged_entry_is_a_miss_and_is_removed(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.publish("ab12", response("x"))
    (tmp_path / "ab" / "ab12" / "answer.binpb").write_bytes(b"half")
    assert cache.find("ab12") is None
    assert not (tmp_path / "ab" / "ab12").exists()
    assert cache.publish("ab12", response("x")) == response("x")


def test_entries_used_longest_ago_go_first(tmp_path: Path) -> None:
    cache = Cache(tmp_path, size_bytes=10_000)
    for number in range(3):
        cache.publish(f"a{number}", response("x" * 3000))
        os.utime(tmp_path / f"a{number}" / f"a{number}", (number, number))
    assert cache.find("a0") is not None  # used now, so a1 is the oldest
    cache.publish("a3", response("x" * 3000))
    assert [cache.find(f"a{number}") is not None for number in range(4)] == [True, False, False, True]


def test_a_directory_that_cannot_be_made_is_a_warning_and_no_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = Cache(tmp_path / "file" / "cache")
    assert cache.publish("ab12", response("x")) == response("x")
    assert cache.find("ab12") is None
    assert len(caplog.records) == 1
    assert "going on without" in caplog.text


def test_a_full_disk_is_a_warning_and_leaves_no_half_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, _: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    cache = Cache(tmp_path)
    monkeypatch.setattr(private_files, "replace", full)
    assert cache.publish("ab12", response("x")) == response("x")
    assert "No space left" in caplog.text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_an_entry_is_for_its_user_alone_whatever_the_umask(umask: int, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    before = os.umask(umask)
    try:
        Cache(tmp_path).publish("ab12", response("x"))
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert modes == {"ab": 0o700, "ab12": 0o700, "answer.binpb": 0o600, "sha256": 0o600}


def replaced_by_a_link(place: Path) -> None:
    place.symlink_to(place.rename(place.with_name("moved")))


@pytest.mark.parametrize(
    "spoil", [lambda place: place.chmod(0o777), lambda place: place.chmod(0o720), replaced_by_a_link]
)
@pytest.mark.parametrize("place", ["ab", ENTRY, f"{ENTRY}/answer.binpb", f"{ENTRY}/sha256"])
def test_what_others_could_have_written_is_not_found_and_makes_way(
    place: str, spoil: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(private_files.ALONE, raising=False)
    monkeypatch.setattr(private_files, "_is_own_group", lambda *_: False)
    cache = Cache(tmp_path)
    cache.publish("ab12", response("x"))
    spoil(tmp_path / place)
    assert cache.find("ab12") is None
    assert not (tmp_path / ENTRY).exists()
    assert cache.publish("ab12", response("y")) == cache.find("ab12") == response("y")
    assert not [each for each in tmp_path.iterdir() if each.name.startswith(".")]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("place", ["ab", ENTRY, f"{ENTRY}/answer.binpb"])
def test_an_entry_of_another_user_is_not_found(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(private_files.ALONE, raising=False)
    cache = Cache(tmp_path)
    cache.publish("ab12", response("x"))
    os.chown(tmp_path / place, 12345, 12345)
    assert cache.find("ab12") is None


def test_a_cache_that_others_can_write_by_now_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(private_files.ALONE, raising=False)
    cache = Cache(tmp_path)
    cache.publish("ab12", response("x"))
    tmp_path.chmod(0o777)
    assert cache.find("ab12") is None
    tmp_path.chmod(0o700)
    assert cache.find("ab12") == response("x")
