"""The live page's fan-out, where no watcher delays another, and how the page is started."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import threading
from pathlib import Path

import pytest

from orchestrator.web import hub, serving, web_command
from orchestrator.web.hub import Channel, Hub
from warpsmith.errors import BadInput


def test_a_slow_watcher_keeps_nobody_waiting_and_gets_the_newest_state() -> None:
    count = 500

    async def told() -> None:
        begun, published = threading.Event(), threading.Event()

        def feed(channel: Channel) -> None:
            begun.wait(10)
            for number in range(count):
                channel.publish({"now": f"state {number}", f"part {number % 3}": "x" * 1000})
            published.set()
            channel.end()

        watching = Hub()
        with watching.watching("run", feed) as quick, watching.watching("run", feed) as slow:
            begun.set()
            is_last, texts = False, []
            while not is_last:
                text, is_last = await quick.take()
                texts.append(text)
            assert published.is_set()
            assert f"state {count - 1}" in b"".join(texts).decode()
            text, is_last = await slow.take()
            assert is_last
            assert f"state {count - 1}" in text.decode()
            assert len(text) < 10_000, "of each part the newest state alone"
            assert text.endswith(b"event: end\ndata: {}\n\n")

    asyncio.run(told())


def test_a_watcher_who_comes_late_is_told_all_parts_at_once() -> None:
    async def told() -> None:
        go_on = threading.Event()

        def feed(channel: Channel) -> None:
            channel.publish({"a": "1", "b": "2"})
            channel.publish({"a": "1"})  # as it was: not told
            go_on.wait(10)

        watching = Hub()
        with watching.watching("run", feed) as first:
            await first.take()
            with watching.watching("run", feed) as late:
                text, is_last = await late.take()
                assert (text.count(b"event: part"), is_last) == (2, False)
            go_on.set()
            _, is_last = await first.take()
            assert is_last, "the feed has ended, so the watcher asks again"

    asyncio.run(told())


def test_a_feed_that_nobody_watches_ends_and_the_next_watcher_gets_another() -> None:
    async def told() -> None:
        feeds: list[Channel] = []

        def feed(channel: Channel) -> None:
            feeds.append(channel)
            channel.publish({"a": "1"})
            while not channel.may_end():
                channel.wait(0.005)

        watching = Hub()
        for _ in range(2):
            with watching.watching("run", feed) as watcher:
                await watcher.take()
            while not feeds[-1].is_over:
                await asyncio.sleep(0.005)
        assert len(feeds) == 2
        assert watching.watcher_count == 0

    asyncio.run(told())


def test_more_watchers_than_the_page_can_serve_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "MOST_WATCHERS", 1)

    async def told(stack: contextlib.ExitStack) -> None:
        watching = Hub()
        stack.enter_context(watching.watching("run", lambda channel: channel.end()))
        with pytest.raises(hub.Full):
            stack.enter_context(watching.watching("run", lambda channel: channel.end()))

    with contextlib.ExitStack() as stack:
        asyncio.run(told(stack))


# ---- how it is started -----------------------------------------------------------------------------------


def test_a_missing_library_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(BadInput, match=r"pip install 'warpsmith\[web\]'"):
        web_command.page("127.0.0.1:0", None, None)


@pytest.mark.parametrize("place", ["0.0.0.0:0", "example.com:80", "[::]:0"])
def test_beyond_loopback_it_listens_only_with_a_token_that_was_made_on_purpose(place: str) -> None:
    with pytest.raises(BadInput, match="--token-file"):
        serving.listening(place, is_guarded=False)


@pytest.mark.parametrize("place", ["", "1", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:99999"])
def test_what_is_no_place_is_refused(place: str) -> None:
    with pytest.raises(BadInput):
        serving.listening(place, is_guarded=False)


def test_a_place_that_is_taken_is_refused() -> None:
    with serving.listening("127.0.0.1:0", is_guarded=False) as taken, pytest.raises(BadInput, match="cannot listen"):
        serving.listening(f"127.0.0.1:{taken.getsockname()[1]}", is_guarded=False)


def test_a_short_token_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    for text in ("", "short", "x" * 31, "x " * 40):
        file.write_text(text)
        with pytest.raises(BadInput, match="no token of 32 characters"):
            serving.access_of(file, ())
    file.write_text("x" * 32 + "\n")
    assert serving.access_of(file, ()).is_token("x" * 32)
    with pytest.raises(BadInput, match="cannot be read"):
        serving.access_of(tmp_path / "none", ())
