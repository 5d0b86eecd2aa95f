"""Feeds the watchers of one run from one stream of the orchestrator's.

The one idea: a thread reads the stream, another makes parts of what has come: all that has come meanwhile is made
once. The stream begins with what is past; nothing is shown before that has been read, so that no page goes back in
time.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from dataclasses import dataclass, field

from orchestrator.commands import client
from orchestrator.commands.client import Optimization
from orchestrator.pages import rendering
from orchestrator.web import run_parts
from orchestrator.web.hub import Channel
from warpsmith.errors import NotFound, WarpsmithError
from warpsmith.v1 import optimization_service_pb2 as messages
from warpsmith.v1 import run_pb2, trial_pb2

STREAM_SECONDS = 15.0
"""After which a stream is begun anew, and with it looked whether anybody still watches."""
PAUSE_SECONDS = 1.0
"""Before an orchestrator that does not answer is asked again."""
PAST_SECONDS = 2.0
"""Longest wait for what is past."""
SHARE = 0.03
"""Of a processor, that sections of the report may take."""
BYTES_A_SECOND = 1e8
"""That a processor can send to watchers, roughly."""
LEAST_SECONDS = 0.2
"""Between two makings of the sections."""


class _Ended:
    """Stands for the end of the run."""


@dataclass(frozen=True)
class _Made:
    """The sections, and when they may be made again."""

    sections: dict[str, str]
    due: float


_News = run_pb2.RunEvent | _Ended | _Made | WarpsmithError


@dataclass
class RunFeed:
    """What one channel's threads share. Call it with the channel, in its thread."""

    orchestrator: Optimization
    run_id: str
    run: run_pb2.Run = field(default_factory=run_pb2.Run)
    trials: list[trial_pb2.Trial] = field(default_factory=list)
    _happened: queue.SimpleQueue[_News] = field(default_factory=queue.SimpleQueue)

    def __call__(self, channel: Channel) -> None:
        """Publishes until the run has ended or nobody watches; where the orchestrator is gone, watchers ask again."""
        with contextlib.suppress(WarpsmithError):
            self._feed(channel)

    def _feed(self, channel: Channel) -> None:
        past = self.orchestrator.GetRun(messages.GetRunRequest(run_id=self.run_id), timeout=30.0).run
        self.run = past
        threading.Thread(target=self._read, args=(channel,), name="reader", daemon=True).start()
        patient_until = time.monotonic() + PAST_SECONDS
        due, is_new, is_stale = 0.0, False, False
        while not channel.may_end(STREAM_SECONDS):  # who reloads the page finds the same stream
            for each in self._drain(max(0.0, min(1.0, due - time.monotonic())) if is_stale else 0.5):
                if isinstance(each, _Ended):
                    self._tell_the_end(channel)
                    return
                if isinstance(each, _Made):
                    channel.publish(each.sections)
                    due = each.due
                else:
                    is_new |= self._take(channel, each)
            if not is_new and not is_stale:
                continue
            if not self._knows(past) and time.monotonic() < patient_until:
                continue  # the rest of what is past follows at once
            if is_new:
                channel.publish(run_parts.light(self.run, self.trials))
                is_new, is_stale = False, True
            if is_stale and time.monotonic() >= due:
                is_stale, due = False, math.inf  # until these are made
                self._make_sections(channel.watcher_count)

    def _make_sections(self, watcher_count: int) -> None:
        """Makes them in a thread of their own: the next event does not wait for them."""
        run, trials = self.run, list(self.trials)

        def make() -> None:
            begin = time.monotonic()
            made = run_parts.sections(run, trials)
            end = time.monotonic()
            cost = end - begin + watcher_count * sum(map(len, made.values())) / BYTES_A_SECOND
            self._happened.put(_Made(made, end + max(LEAST_SECONDS, cost / SHARE)))

        threading.Thread(target=make, name="sections", daemon=True).start()

    def _tell_the_end(self, channel: Channel) -> None:
        """Publishes what the run came to, with its sources, which events do not bring."""
        self.run = self.orchestrator.GetRun(messages.GetRunRequest(run_id=self.run_id), timeout=30.0).run
        self.trials = list(client.trials(self.orchestrator, self.run_id))
        channel.publish(run_parts.whole(self.run, self.trials))
        channel.end()

    def _take(self, channel: Channel, news: _News) -> bool:
        """Keeps what has come; whether the run is another by that."""
        if isinstance(news, WarpsmithError):
            channel.publish({"connection": rendering.escaped("The orchestrator does not answer; it is asked again.")})
        if not isinstance(news, run_pb2.RunEvent):
            return False
        channel.publish({"connection": ""})
        if news.HasField("run"):
            self.run = news.run
        elif news.HasField("trial"):
            self.trials.append(news.trial)
        return True

    def _knows(self, past: run_pb2.Run) -> bool:
        """Whether all that had happened when it began to read has been read."""
        is_there = self.run.state == past.state or self.run.state > past.state
        return len(self.trials) >= past.trial_count and is_there

    def _drain(self, seconds: float) -> list[_News]:
        """All that has come, waiting so long for the first."""
        found: list[_News] = []
        with contextlib.suppress(queue.Empty):
            found.append(self._happened.get(timeout=seconds))
            while True:
                found.append(self._happened.get_nowait())
        return found

    def _read(self, channel: Channel) -> None:
        """Puts events until the run ends or the channel does."""
        seen = 0
        while not channel.is_over:
            try:
                request = messages.WatchRunRequest(run_id=self.run_id, after=seen)
                begin = time.monotonic()
                for reply in self.orchestrator.WatchRun(request, timeout=STREAM_SECONDS):
                    seen = reply.event.number
                    self._happened.put(reply.event)
                request_now = messages.GetRunRequest(run_id=self.run_id)
                if run_parts.has_ended(self.orchestrator.GetRun(request_now, timeout=30.0).run):
                    self._happened.put(_Ended())
                    return
            except NotFound:
                self._happened.put(_Ended())
                return
            except WarpsmithError as error:
                if time.monotonic() - begin < STREAM_SECONDS / 2:  # else its time was over, as it was meant
                    self._happened.put(error)
                    channel.wait(PAUSE_SECONDS)
