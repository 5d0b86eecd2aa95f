"""Tells many watchers what is new: one feed for all of them, and a slow one keeps nobody waiting.

The one idea: a page is made of parts, and only the newest state of a part matters. So nothing is queued: what a
watcher has not been told is at most one text of each part, and the newer one takes the older one's place. Feeds run in
threads, watchers in the event loop. It knows no run and no HTML.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

MOST_WATCHERS = 256
"""Of all pages together: each is an open connection."""
MOST_CHANNELS = 12
"""Each is a stream of the orchestrator's, which keeps one of its sixteen threads for it."""
END = "end"
"""Name of the part after which nothing comes: what was watched has ended."""
CUT = "cut"
"""Name of the part after which a watcher has to ask again: the feed has failed, or the server ends."""


class Full(Exception):
    """No more can be watched at once."""


@dataclass(eq=False)
class Watcher:
    """What one reader has not been told."""

    _pending: dict[str, bytes] = field(default_factory=dict)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self, parts: Mapping[str, bytes]) -> None:
        """Takes the newest texts of parts. In the event loop only, as all of this class."""
        for name, text in parts.items():
            self._pending.pop(name, None)  # so that the end stays the last
            self._pending[name] = text
        self._news.set()

    async def take(self) -> tuple[bytes, bool]:
        """Everything that is new, as server-sent events, and whether it was the last; waits for something."""
        await self._news.wait()
        self._news.clear()
        told, self._pending = self._pending, {}
        return b"".join(told.values()), END in told or CUT in told


Feed = Callable[["Channel"], None]
"""Publishes until the channel `may_end`, or what it tells of has ended and `end` was called."""


class Channel:
    """One thing that is watched, and its watchers."""

    def __init__(self, name: str, feed: Feed, loop: asyncio.AbstractEventLoop) -> None:
        self._feed, self._loop = feed, loop
        self._watchers: set[Watcher] = set()
        self._newest: dict[str, bytes] = {}
        self._sent: dict[str, str] = {}
        """By part, what was published last; of the feed's thread alone."""
        self._lock = threading.Lock()
        self._left_at = 0.0
        """When the last watcher went."""
        self._over = False
        """Whether the feed publishes no more."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"feed of {name}", daemon=True)

    @property
    def watcher_count(self) -> int:
        """How many are told."""
        return len(self._watchers)

    # ---- from the feed's thread

    def may_end(self, linger_seconds: float = 0.0) -> bool:
        """Whether nobody has watched for so long. Who hears so ends: whoever comes then is told by another channel."""
        with self._lock:
            is_left = not self._watchers and time.monotonic() >= self._left_at + linger_seconds
            self._over |= is_left or self._closing.is_set()
            return self._over

    def wait(self, seconds: float) -> None:
        """Waits as long, or until the server ends."""
        self._closing.wait(seconds)

    def publish(self, parts: Mapping[str, str]) -> None:
        """Tells all watchers what of these parts is not as it was."""
        new = {name: html for name, html in parts.items() if self._sent.get(name) != html}
        self._sent |= new
        self._send({name: _event(name, html) for name, html in new.items()})

    def end(self) -> None:
        """Tells all watchers that nothing more comes."""
        self._send({END: f"event: {END}\ndata: {{}}\n\n".encode()})

    def _run(self) -> None:
        try:
            self._feed(self)
        finally:
            with self._lock:
                self._over = True
            self._send({CUT: b""})

    def _send(self, parts: dict[str, bytes]) -> None:
        if parts:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self.tell, parts)

    # ---- in the event loop

    def tell(self, parts: Mapping[str, bytes]) -> None:
        """Tells all watchers."""
        self._newest |= parts
        for watcher in self._watchers:
            watcher.tell(parts)

    def add(self, watcher: Watcher) -> bool:
        """Tells one more, beginning with all that is known; False where nothing more comes here."""
        with self._lock:
            if self._over:
                return False
            self._watchers.add(watcher)
        if self._newest:
            watcher.tell(self._newest)
        if self._thread.ident is None:
            self._thread.start()
        return True

    def remove(self, watcher: Watcher) -> None:
        """Tells one no more."""
        with self._lock:
            self._watchers.discard(watcher)
            self._left_at = time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes."""
        return self._over

    def close(self) -> None:
        """Ends the feed, as soon as it looks, and all watchers."""
        self._closing.set()
        self.tell({CUT: b""})


class Hub:
    """All channels of a page's server. In the event loop only."""

    def __init__(self) -> None:
        self._channels: dict[str, Channel] = {}
        self.watcher_count = 0

    @contextmanager
    def watching(self, name: str, feed: Feed) -> Iterator[Watcher]:
        """A watcher of a channel, which is opened with a feed where there is none.

        Raises:
            Full: too many watch already.
        """
        if self.watcher_count >= MOST_WATCHERS:
            raise Full
        watcher = Watcher()
        channel = self._channels.get(name)
        if channel is None or not channel.add(watcher):
            channel = self._opened(name, feed)
            channel.add(watcher)
        self.watcher_count += 1
        try:
            yield watcher
        finally:
            self.watcher_count -= 1
            channel.remove(watcher)

    def _opened(self, name: str, feed: Feed) -> Channel:
        self._channels = {key: each for key, each in self._channels.items() if not each.is_over}
        if len(self._channels) >= MOST_CHANNELS:
            raise Full
        made = self._channels[name] = Channel(name, feed, asyncio.get_running_loop())
        return made

    def close(self) -> None:
        """Ends all feeds and all watchers."""
        for channel in self._channels.values():
            channel.close()


def _event(name: str, html: str) -> bytes:
    return f"event: part\ndata: {json.dumps({'name': name, 'html': html})}\n\n".encode()
