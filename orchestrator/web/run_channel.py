"""Feeds the watchers of one run from one stream of the orchestrator's.

The one idea: a thread reads the stream, another makes parts of what has come: all that has come meanwhile is made
once. The stream begins with what is past; nothing is shown before that has been read, so that no page goes back in
time.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from dataclasses import dataclass, field

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
SHARE = 0.1
"""Of a processor, that sections of the report may take."""
BYTES_A_SECOND = 1e8
"""That a processor can send to watchers, roughly."""
LEAST_SECONDS = 0.2
"""Between two makings of the sections."""


class _Ended:
    """Stands for the end of the run."""


@dataclass
class RunFeed:
    """What one channel's two threads share. Call it with the channel, in its thread."""

    orchestrator: Optimization
    run_id: str
    run: run_pb2.Run = field(default_factory=run_pb2.Run)
    trials: list[trial_pb2.Trial] = field(default_factory=list)

    def __call__(self, channel: Channel) -> None:
        """Publishes until the run has ended or nobody watches."""
        happened: queue.SimpleQueue[run_pb2.RunEvent | _Ended | WarpsmithError] = queue.SimpleQueue()
        past = self.orchestrator.GetRun(messages.GetRunRequest(run_id=self.run_id), timeout=30.0).run
        self.run = past
        reader = threading.Thread(target=self._read, args=(channel, happened), name="reader", daemon=True)
        reader.start()
        patient_until = time.monotonic() + PAST_SECONDS
        sections_due, is_stale = 0.0, False
        while not channel.may_end():
            taken = self._drain(happened, max(0.0, sections_due - time.monotonic()) if is_stale else 1.0)
            if any(isinstance(each, _Ended) for each in taken):
                self._tell_the_end(channel)
                return
            self._take(channel, taken)
            if not self._knows(past) and time.monotonic() < patient_until:
                continue  # the rest of what is past follows at once
            if taken:
                channel.publish(run_parts.light(self.run, self.trials))
            is_stale |= bool(taken)
            if is_stale and time.monotonic() >= sections_due:
                sections_due, is_stale = self._publish_sections(channel), False

    def _publish_sections(self, channel: Channel) -> float:
        """Publishes them, and gives the time from which they may be made again."""
        begin = time.monotonic()
        made = run_parts.sections(self.run, self.trials)
        channel.publish(made)
        end = time.monotonic()
        cost = end - begin + channel.watcher_count * sum(map(len, made.values())) / BYTES_A_SECOND
        return end + max(LEAST_SECONDS, cost / SHARE)

    def _tell_the_end(self, channel: Channel) -> None:
        """Publishes what the run came to, with its sources, which events do not bring."""
        self.run = self.orchestrator.GetRun(messages.GetRunRequest(run_id=self.run_id), timeout=30.0).run
        request = messages.ListTrialsRequest(run_id=self.run_id)
        self.trials = list(self.orchestrator.ListTrials(request, timeout=30.0).trials)
        channel.publish(run_parts.whole(self.run, self.trials))
        channel.end()

    def _take(self, channel: Channel, taken: list[run_pb2.RunEvent | _Ended | WarpsmithError]) -> None:
        for each in taken:
            if isinstance(each, WarpsmithError):
                channel.publish(
                    {"connection": rendering.escaped("The orchestrator does not answer; it is asked again.")}
                )
            elif isinstance(each, run_pb2.RunEvent):
                channel.publish({"connection": ""})
                if each.HasField("run"):
                    self.run = each.run
                elif each.HasField("trial"):
                    self.trials.append(each.trial)

    def _knows(self, past: run_pb2.Run) -> bool:
        """Whether all that had happened when it began to read has been read."""
        is_there = self.run.state == past.state or self.run.state > past.state
        return len(self.trials) >= past.trial_count and is_there

    def _drain(
        self, happened: queue.SimpleQueue[run_pb2.RunEvent | _Ended | WarpsmithError], seconds: float
    ) -> list[run_pb2.RunEvent | _Ended | WarpsmithError]:
        """All that has come, waiting so long for the first."""
        found = []
        with contextlib.suppress(queue.Empty):
            found.append(happened.get(timeout=seconds))
            while True:
                found.append(happened.get_nowait())
        return found

    def _read(self, channel: Channel, happened: queue.SimpleQueue[run_pb2.RunEvent | _Ended | WarpsmithError]) -> None:
        """Puts events until the run ends or the channel does."""
        seen = 0
        while not channel.is_over:
            try:
                request = messages.WatchRunRequest(run_id=self.run_id, after=seen)
                begin = time.monotonic()
                for reply in self.orchestrator.WatchRun(request, timeout=STREAM_SECONDS):
                    seen = reply.event.number
                    happened.put(reply.event)
                request_now = messages.GetRunRequest(run_id=self.run_id)
                if run_parts.has_ended(self.orchestrator.GetRun(request_now, timeout=30.0).run):
                    happened.put(_Ended())
                    return
            except NotFound:
                happened.put(_Ended())
                return
            except WarpsmithError as error:
                if time.monotonic() - begin < STREAM_SECONDS / 2:  # else its time was over, as it was meant
                    happened.put(error)
                    channel.wait(PAUSE_SECONDS)
