"""The calling side of a contest: a jailed process that stands still but while it is asked, and the clock around it.

The one idea: a stopped process cannot work ahead, late, or on the side, nor keep the machine busy while others are
timed. The clock starts as the process is let go and stops at its answer; then the process is stopped again before its
results are looked at. It knows neither solutions nor baselines, and believes no time that a process tells.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_bench.solutions.callee import CALL, CARRYING, DONE, FAILED, LENGTH, VARIABLE, WORD
from gpu_bench.solutions.left_memory import LeftMemory
from warpsmith.errors import WorkerTimeout
from warpsmith.sandbox import jail
from warpsmith.sandbox.worker import Worker
from warpsmith.v1 import judging_pb2, verdict_pb2

UNASKED = "its process answers before it is asked"
HALF_SAID = "its process says that it is done and not where its results lie"
_WRITTEN_SECONDS = 1.0
"""That what was written before a process was stopped is waited for."""
_MOST_CARRIED = 1 << 20
"""Bytes of what an answer may carry."""


@dataclass(frozen=True)
class Answer:
    """What came of a word."""

    seconds: float
    """From letting the process go until its answer."""
    waited_seconds: float
    """That its threads meanwhile waited for a processor, as the system counts it; 0 where it does not."""
    carried: bytes
    """Of CALL, DELIVER and EARLIER."""
    ended: float = 0.0
    """When, in seconds of the system's monotonic clock."""
    left_seconds: float = 0.0
    """That a GPU was at work for longer than the answer says; counted in `seconds`."""


class CallFailed(Exception):
    """A called process says that a call failed; `calls` is what it says of it."""

    def __init__(self, calls: judging_pb2.Calls) -> None:
        super().__init__(calls.detail)
        self.calls = calls


class Called(Worker):
    """A worker that answers `callee` words once `begin_calls` was called; until then one like any other."""

    def __init__(
        self,
        entry: str,
        policy: jail.Policy,
        *,
        rung: jail.Rung | None = None,
        env: Mapping[str, str] | None = None,
        shared_fds: Sequence[int] = (),
    ) -> None:
        words, self._words = os.pipe()
        self._answers, answers = os.pipe()
        self._is_calling = False
        self._word_count = 0
        self.memory: LeftMemory | None = None
        """Its own, to be read while it stands still."""
        try:
            super().__init__(
                entry,
                policy,
                rung=rung,
                env={**(env or {}), VARIABLE: f"{words} {answers}"},
                shared_fds=(*shared_fds, words, answers),
            )
        except BaseException:
            self._close_pipes()
            raise
        finally:
            os.close(words)
            os.close(answers)
        os.set_blocking(self._answers, False)
        try:
            # Nothing untrusted has run: who is not the jail's own is the one that will be called.
            self.memory = LeftMemory(min(self.processes - self._of_the_jail))
        except BaseException:
            self.close()
            raise

    def begin_calls(self) -> None:
        """From here on it answers words, and stands still between them."""
        if not self._is_calling:
            self.begin("calls", judging_pb2.CallsRequest())
            self._is_calling, self._word_count = True, 0
            self.pause()

    def ask(
        self,
        verb: int,
        arm: int = 0,
        number: int = 0,
        *,
        deadline_s: float,
        at_once: Callable[[], object] = lambda: None,
    ) -> Answer:
        """Lets the process go until its answer. It stands still again, which takes a while; `at_once` is called before.

        Raises CallFailed; WorkerTimeout and WorkerCrashed, after which it is gone.
        """
        word, end = WORD.pack(verb, arm, number), time.monotonic() + deadline_s
        carried = b""
        if select.select([self._answers], [], [], 0)[0]:
            raise CallFailed(judging_pb2.Calls(fault=verdict_pb2.FAILURE_KIND_CHEAT, detail=UNASKED))
        waited_ns, is_asked, answer = self._waited_ns(), False, 0
        try:
            begin = time.perf_counter()
            os.write(self._words, word)
            self._word_count += 1
            self.resume()
            answer, count = self._read(2, end)
            self.stop()  # before the clock, so that nothing is done between an answer and the look at what it left
            ended = time.perf_counter()
            at_once()
            waited_ns = self._waited_ns() - waited_ns
            is_asked = count == self._word_count % 256
            if is_asked and answer == DONE[0] and verb in CARRYING:
                if verb == CALL:  # it was written as a whole: where results lie is said before the clock stops
                    end = min(end, time.monotonic() + _WRITTEN_SECONDS)
                else:
                    self.resume()
                (length,) = LENGTH.unpack(self._read(LENGTH.size, end))
                carried = self._read(min(length, _MOST_CARRIED), end)
        except TimeoutError:
            if is_asked and answer == DONE[0] and verb == CALL:
                raise CallFailed(judging_pb2.Calls(fault=verdict_pb2.FAILURE_KIND_CHEAT, detail=HALF_SAID)) from None
            self.close()
            raise WorkerTimeout(f"{self.entry}: no end of a call within {deadline_s:g} s") from None
        except (EOFError, OSError) as error:
            self._jailed.wait(1.0)
            raise self._crashed("calls", str(error)) from None
        if not is_asked:
            self.pause()
            raise CallFailed(judging_pb2.Calls(fault=verdict_pb2.FAILURE_KIND_CHEAT, detail=UNASKED))
        if answer == FAILED[0]:
            self.resume()
            raise CallFailed(self._finish_calls())
        if answer != DONE[0]:
            raise self._crashed("calls", "answered with what is no answer")
        self.pause()
        return Answer(ended - begin, max(0, waited_ns) * 1e-9, carried, ended)

    def close(self) -> None:
        """As `Worker.close`, but without letting it leave by itself: it waits for a word, or runs what is not ours."""
        self._jailed.close()
        super().close()
        self._close_pipes()
        if self.memory is not None:
            self.memory.close()

    def _waited_ns(self) -> int:
        """That all threads have waited for a processor until now (proc(5), schedstat)."""
        waited = 0
        for each in self.stopped:
            with contextlib.suppress(OSError, ValueError, IndexError):
                for thread in os.listdir(f"/proc/{each}/task"):
                    waited += int(Path(f"/proc/{each}/task/{thread}/schedstat").read_text().split()[1])
        return waited

    def _finish_calls(self) -> judging_pb2.Calls:
        self._is_calling = False
        return self.finish("calls", judging_pb2.Calls, deadline_s=10.0)

    def _read(self, size: int, end: float) -> bytes:
        read = b""
        while len(read) < size:
            self._wait(self._answers, select.POLLIN, end)
            chunk = os.read(self._answers, size - len(read))
            if not chunk:
                raise EOFError("ended")
            read += chunk
        return read

    def _close_pipes(self) -> None:
        self._words, self._answers = _closed(self._words), _closed(self._answers)


def _closed(descriptor: int) -> Any:
    if descriptor >= 0:
        os.close(descriptor)
    return -1
