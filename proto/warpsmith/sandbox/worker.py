"""A jailed process that answers typed requests over two inherited pipes.

The one idea: the parent believes nothing it has not bounded. Records are a length, a name and protobuf bytes, never
pickles; every wait has a deadline; output is kept as a tail; and a worker that overruns or dies is killed with all
its descendants, so that the caller makes a new one. A worker shares its process with untrusted code: its answers
are evidence to be checked, not facts. It holds no queue and retries nothing.

Run as `python -m warpsmith.sandbox.worker ENTRY REQUEST_FD REPLY_FD` by `Worker`, inside `warpsmith.sandbox.jail`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import json
import os
import select
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NoReturn, Self, TypeVar

from google.protobuf.message import DecodeError, Message

from warpsmith import plugins, printable
from warpsmith.errors import BadInput, WorkerCrashed, WorkerFault, WorkerRaised, WorkerTimeout
from warpsmith.sandbox import fork_server, jail, jail_init, processors

Methods = Mapping[str, tuple[type[Message], Callable[[Any], Message]]]
"""What an entry point names: method name -> (request type, handler)."""

Reply = TypeVar("Reply", bound=Message)

MAX_RECORD_BYTES: Final = 64 << 20
"""Largest request or reply. Bulk tensors travel in `shared_fds`."""
TAIL_BYTES: Final = 4096
"""How much of a worker's output is kept: its end."""
_TRACE_CHARACTERS: Final = 8192
_START_DEADLINE_S: Final = 60.0
_PAUSE_DEADLINE_S: Final = 60.0
_FIRST_LOOK_S, _LAST_LOOK_S = 2e-5, 5e-3
"""Between two looks whether all stand still, twice as long each time: threads cannot stop on a processor while the
thread that looks never leaves it (3 ms a pause on two processors), and one that came back every 20 us kept a busy
processor from them for more than ten seconds (Linux 6.18)."""

# A record: kind, length of the name, length of the body; then the name and the body.
_HEADER: Final = struct.Struct("!BHI")
_REQUEST, _READY, _REPLY, _BAD_INPUT, _RAISED = range(1, 6)


def _record(kind: int, name: str, body: bytes) -> bytes:
    encoded = name.encode()[:0xFFFF]
    return _HEADER.pack(kind, len(encoded), len(body)) + encoded + body


# --- The parent's side ----------------------------------------------------------------------------


class _Tail:
    """Empties a pipe for as long as a process may write to it, and keeps the last bytes."""

    def __init__(self, descriptor: int) -> None:
        self._kept = bytearray()
        self._thread = threading.Thread(target=self._drain, args=(descriptor,), daemon=True, name="worker-output")
        self._thread.start()

    def _drain(self, descriptor: int) -> None:
        with contextlib.suppress(OSError):
            while chunk := os.read(descriptor, 1 << 18):
                self._kept = (self._kept + chunk)[-TAIL_BYTES:]
        os.close(descriptor)

    def text(self, settle_s: float = 0.0) -> str:
        """What is kept, after waiting up to `settle_s` for the writers to end."""
        self._thread.join(settle_s)
        return printable.lines(self._kept.decode(errors="replace"), TAIL_BYTES)


class Worker:
    """One jailed process serving the methods of `entry` ("package.module:TABLE"), one call at a time.

    The interpreter, `warpsmith` and the entry's own package are readable inside; all else is up to `policy`.
    `env` is all that the process gets beside a path and its private directory. `shared_fds` are inherited under the
    same numbers. `rung` None: the strongest that works here. `alone`: what other entries import is not in its
    memory. Raises WorkerFault when it does not start.
    """

    def __init__(
        self,
        entry: str,
        policy: jail.Policy,
        *,
        rung: jail.Rung | None = None,
        env: Mapping[str, str] | None = None,
        shared_fds: Sequence[int] = (),
        alone: bool = False,
    ) -> None:
        self.entry = entry
        self.rung: Final = rung or jail.choose()
        self._lock = threading.Lock()
        roots, packages = _import_paths("warpsmith", entry.partition(":")[0].partition(".")[0])
        policy = dataclasses.replace(
            policy, readable=(*policy.readable, *packages), listable=(*policy.listable, *roots)
        )
        requests, self._requests = os.pipe()
        self._replies, replies = os.pipe()
        output, printed = os.pipe()
        # -s, -P: neither the user's own packages nor the current directory can stand in for a module.
        command = [sys.executable, "-s", "-P", "-m", "warpsmith.sandbox.worker", entry, str(requests), str(replies)]
        try:
            environment = _environment(roots, env or {})
            fork = None
            if self.rung is not jail.Rung.BUBBLEWRAP and not policy.gpu:
                fork = fork_server.forking(entry, (requests, replies), environment, alone=alone)
            self._jailed = jail.Jailed(
                command, policy, self.rung, env=environment, pass_fds=(requests, replies, *shared_fds), stdout=printed,
                stderr=printed, fork=fork,
            )  # fmt: skip
        except BaseException:
            for descriptor in (self._requests, self._replies, output):
                os.close(descriptor)
            raise
        finally:
            for descriptor in (requests, replies, printed):
                os.close(descriptor)
        self._open = True
        self.at_first = self._of_the_jail = frozenset[int]()
        """Processes of the jail before it was called; of them those that confine the others, and are never stopped."""
        self.stopped: set[int] = set()
        """Processes that `pause` has stopped at some time."""
        self._tail = _Tail(output)
        os.set_blocking(self._requests, False)
        os.set_blocking(self._replies, False)
        try:
            self._exchange("start", b"", _READY, _START_DEADLINE_S)
        except BaseException:
            self.close()
            raise
        # Nothing untrusted has run: a process that has a child now is the jail's own.
        self.at_first = self.processes
        self._of_the_jail = frozenset(each for each in self.at_first if jail_init.descendants(each))
        self._losses = _counted(entry)

    @property
    def alive(self) -> bool:
        """Whether it can take another call."""
        return self._open and self._jailed.process.poll() is None

    @property
    def exit(self) -> jail.Exit | None:
        """How it ended; None while it has not."""
        return self._jailed.wait(0.0)

    @property
    def processes(self) -> frozenset[int]:
        """Every process of its jail, seen from outside, where nothing inside can hide one."""
        return frozenset(jail_init.descendants(self._jailed.process.pid))

    @property
    def stderr_tail(self) -> str:
        """The end of all that it printed, on either stream."""
        return self._tail.text()

    def call(self, method: str, request: Message, response: type[Reply], deadline_s: float) -> Reply:
        """Sends `request` to `method` and returns its answer.

        Raises BadInput as the handler raised it, in one line that code inside may have written; WorkerRaised for any
        other exception, after which the worker lives on; WorkerTimeout and WorkerCrashed, after which it is gone.
        """
        body = request.SerializeToString()
        if len(body) > MAX_RECORD_BYTES:
            raise BadInput(f"{method}: a request of {len(body)} bytes; the limit is {MAX_RECORD_BYTES}")
        with self._lock:
            try:
                answer = self._exchange(method, _record(_REQUEST, method, body), _REPLY, deadline_s)
            except (WorkerTimeout, WorkerCrashed) as error:
                self._losses["timeout" if isinstance(error, WorkerTimeout) else "crash"].inc()
                raise
            try:
                return response.FromString(answer)
            except DecodeError:
                raise self._crashed(method, "sent an answer of another type") from None

    def begin(self, method: str, request: Message) -> None:
        """Sends `request` to `method` and leaves the answer to `finish`. Raises as `call`."""
        with self._lock:
            try:
                end = time.monotonic() + _START_DEADLINE_S
                self._send(_record(_REQUEST, method, request.SerializeToString()), end)
            except (EOFError, OSError) as error:  # TimeoutError is one
                raise self._crashed(method, str(error)) from None

    def finish(self, method: str, response: type[Reply], deadline_s: float) -> Reply:
        """The answer to what `begin` sent. Raises as `call`."""
        with self._lock:
            answer = self._exchange(method, b"", _REPLY, deadline_s)
            try:
                return response.FromString(answer)
            except DecodeError:
                raise self._crashed(method, "sent an answer of another type") from None

    def stop(self) -> None:
        """Stops every process that `pause` has stopped before, at once; does not wait until they stand still."""
        _signal(self.stopped, signal.SIGSTOP)

    def pause(self) -> None:
        """Stops every process of the worker, with all threads; returns when all of them stand still.

        Raises WorkerTimeout, after which it is gone: one did not stop.
        """
        end = time.monotonic() + _PAUSE_DEADLINE_S
        told, look_s = set(self.stopped), _FIRST_LOOK_S
        self.stop()
        # Those that are new once all stand still were born while it was looked at their parents.
        while running := self._running(told) or self.processes - self._of_the_jail - told:
            _signal(running, signal.SIGSTOP)
            told |= running
            self.stopped |= running
            if time.monotonic() > end:
                self.close()
                raise WorkerTimeout(f"{self.entry}: a process did not stop within {_PAUSE_DEADLINE_S:g} s")
            time.sleep(look_s)
            look_s = min(2 * look_s, _LAST_LOOK_S)

    def _running(self, told: Collection[int]) -> set[int]:
        """Processes that may run code; `told`: those that have had the signal to stop."""
        return {each for each in self.processes - self._of_the_jail if _is_running(each, is_told=each in told)}

    def resume(self) -> None:
        """Lets every process that `pause` stopped go on."""
        _signal(self.stopped, signal.SIGCONT)

    def close(self) -> None:
        """Ends the process and its descendants. A call in flight in another thread ends with WorkerCrashed."""
        self.resume()  # what stands still cannot leave by itself
        if self._lock.acquire(timeout=0):  # idle: let it leave by itself
            self._hang_up()
            self._jailed.wait(1.0)
            self._lock.release()
        self._jailed.close()
        with self._lock:
            self._hang_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _hang_up(self) -> None:
        if self._open:
            self._open = False
            os.close(self._requests)
            os.close(self._replies)

    def _exchange(self, method: str, record: bytes, expected: int, deadline_s: float) -> bytes:
        end = time.monotonic() + deadline_s
        try:
            if not self.alive:
                raise EOFError("has already ended")
            self._send(record, end)
            kind, name_length, body_length = _HEADER.unpack(self._receive(_HEADER.size, end))
            if body_length > MAX_RECORD_BYTES:
                raise self._crashed(method, "sent a malformed record")
            name = self._receive(name_length, end).decode(errors="replace")
            body = self._receive(body_length, end)
        except TimeoutError:
            late = _late(self, f"within {deadline_s:g} s", method)
            self._jailed.close()
            self._hang_up()
            raise late from None
        except (EOFError, OSError) as error:
            self._jailed.wait(1.0)  # the pipe closes a moment before the process can say how it ended
            raise self._crashed(method, str(error)) from None
        if kind == expected:
            return body
        if kind == _BAD_INPUT:
            raise BadInput(printable.line(body.decode(errors="replace"), _TRACE_CHARACTERS))
        if kind == _RAISED:
            raise _raised(method, name, body)
        raise self._crashed(method, "sent a malformed record")

    def _crashed(self, method: str, reason: str) -> WorkerCrashed:
        own, end = self.exit is not None, self._jailed.close()
        self._hang_up()
        said, last = f"{self.entry}: {method}: the worker {reason} ({end})", self._tail.text(settle_s=1.0)
        return WorkerCrashed(
            said, signal_number=end.signal_number, exit_code=end.code, stderr_tail=last, method=method, by_itself=own
        )

    def _send(self, record: bytes, end: float) -> None:
        left = memoryview(record)
        while left:
            try:
                left = left[os.write(self._requests, left) :]
            except BlockingIOError:
                self._wait(self._requests, select.POLLOUT, end)
            except BrokenPipeError:
                raise EOFError("ended") from None

    def _receive(self, size: int, end: float) -> bytes:
        received = bytearray()
        while len(received) < size:
            try:
                chunk = os.read(self._replies, min(size - len(received), 1 << 20))
            except BlockingIOError:
                self._wait(self._replies, select.POLLIN, end)
                continue
            if not chunk:
                raise EOFError("ended")
            received += chunk
        return bytes(received)

    def _wait(self, descriptor: int, event: int, end: float) -> None:
        """Waits for the pipe; a dead worker ends the wait even where a stray process still holds the pipe open."""
        poll = select.poll()
        poll.register(descriptor, event)
        while (left := end - time.monotonic()) > 0:
            ended = self._jailed.process.poll() is not None
            if poll.poll(0 if ended else min(left, 0.2) * 1000):
                return
            if ended:
                raise EOFError("ended")
        raise TimeoutError


def _signal(processes: Iterable[int], number: signal.Signals) -> None:
    for each in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, number)


def _is_running(process: int, *, is_told: bool) -> bool:
    """Whether a thread of the process is not stopped; one that has ended is not running. One in uninterruptible sleep
    stops before it runs any code, if it `is_told`: a parent whose child was stopped between `vfork` and `exec` does
    not wake before that child goes on."""
    still = b"TtZXxD" if is_told else b"TtZXx"
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{process}/task"):
            with contextlib.suppress(OSError):
                state = Path(f"/proc/{process}/task/{thread}/stat").read_bytes().rpartition(b") ")[2][:1]
                if state not in still:
                    return True
    return False


def _counted(entry: str) -> dict[str, Any]:
    """Counts a start; the counters of how workers are lost."""
    from warpsmith.sandbox import worker_metrics as metrics

    metrics.starts.labels(metrics.name(entry)).inc()
    return {why: metrics.losses.labels(metrics.name(entry), why) for why in ("timeout", "crash")}


def _late(worker: Worker, when: str, method: str) -> WorkerTimeout:
    """Says whether a worker that gives no answer stands still by a signal that is not `pause`'s. What it has started
    may stop itself."""
    was_stopped = any(map(_is_stopped, worker.at_first - worker.stopped))
    how = "stood still" if was_stopped else "gave no answer"
    return WorkerTimeout(f"{worker.entry}: {method} {how} {when}; the worker was killed", was_stopped=was_stopped)


def _is_stopped(process: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_bytes().rpartition(b") ")[2][:1] == b"T"
    return False


def _raised(method: str, kind: str, body: bytes) -> WorkerRaised:
    try:
        told = json.loads(body)
        message, trace = str(told["message"]), str(told["trace"])
    except (ValueError, TypeError, KeyError, RecursionError):
        message, trace = "an unreadable report", ""
    kind, message = printable.line(kind, 200), printable.line(message, _TRACE_CHARACTERS)
    return WorkerRaised(f"{method}: {kind}: {message}", kind=kind, trace=printable.lines(trace, _TRACE_CHARACTERS))


def _environment(roots: Iterable[Path], env: Mapping[str, str]) -> dict[str, str]:
    """Of the process: where its packages are, which plugins are chosen, and `env`."""
    return {
        "PYTHONPATH": os.pathsep.join([*map(str, roots), *jail.package_paths()]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",  # a crash leaves its Python stack in the tail
        **plugins.choices(),
        **env,
    }


def _import_paths(*modules: str) -> tuple[list[Path], list[Path]]:
    """(directories to import from, packages or files to read in them) for top-level `modules`, from our own path."""
    roots: dict[Path, None] = {}
    packages: dict[Path, None] = {}
    for module in modules:
        spec = importlib.util.find_spec(module)
        places = list(spec.submodule_search_locations or filter(None, [spec.origin])) if spec else []
        if not places:
            raise WorkerFault(f"a worker's module cannot be found: {module}")
        for place in map(Path, places):
            roots[place.parent.resolve()] = packages[place.resolve()] = None
            # Which plugins there are is read from the distribution's entry points, inside as outside.
            packages |= dict.fromkeys(place.parent.resolve().glob(f"{module}-*.dist-info"))
    return list(roots), list(packages)


# --- The child's side -----------------------------------------------------------------------------


def _read_exactly(descriptor: int, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        chunk = os.read(descriptor, size - len(received))
        if not chunk:
            raise EOFError
        received += chunk
    return bytes(received)


def _requests(descriptor: int) -> Iterator[tuple[str, bytes]]:
    """(method, body) of each request, until the parent hangs up."""
    with contextlib.suppress(EOFError):
        while True:
            _, name_length, body_length = _HEADER.unpack(_read_exactly(descriptor, _HEADER.size))
            name = _read_exactly(descriptor, name_length).decode()
            yield name, _read_exactly(descriptor, body_length)


def _report(error: BaseException) -> bytes:
    """The record of an exception. The exception may be the user's own class, so printing it may fail too."""
    try:
        message, trace = str(error), "".join(traceback.format_exception(error, limit=-30))
    except BaseException:
        message, trace = "an exception that cannot be printed", ""
    if isinstance(error, BadInput):
        return _record(_BAD_INPUT, "", printable.lines(message, _TRACE_CHARACTERS).encode())
    told = {
        "message": printable.lines(message, _TRACE_CHARACTERS),
        "trace": printable.lines(trace, _TRACE_CHARACTERS),
    }
    return _record(_RAISED, type(error).__name__, json.dumps(told).encode())


def _answer(methods: Methods, method: str, body: bytes) -> bytes:
    # SystemExit and KeyboardInterrupt are caught as well: user code that calls sys.exit must not look like success.
    try:
        request_type, handler = methods[method]
        answer = handler(request_type.FromString(body)).SerializeToString()
        if len(answer) > MAX_RECORD_BYTES:
            raise ValueError(f"an answer of {len(answer)} bytes; the limit is {MAX_RECORD_BYTES}")
        return _record(_REPLY, "", answer)
    except BaseException as error:
        return _report(error)


def serve(entry: str, request_fd: int, reply_fd: int) -> NoReturn:
    """Answers requests until the parent hangs up; never returns, and runs no exit handlers."""
    for descriptor in (request_fd, reply_fd):
        os.set_inheritable(descriptor, False)  # a process started by user code must not hold the pipes
    output = os.fdopen(reply_fd, "wb", closefd=False)
    try:
        module, _, table = entry.partition(":")
        methods: Methods = getattr(importlib.import_module(module), table)
    except BaseException as error:
        output.write(_report(error))
        output.flush()
        os._exit(1)
    output.write(_record(_READY, "", b""))
    output.flush()
    for method, body in _requests(request_fd):
        output.write(_answer(methods, method, body))
        output.flush()
    os._exit(0)


if __name__ == "__main__":
    processors.note_allowed()
    if sys.argv[1] == "--fork":
        fork_server.main(int(sys.argv[2]), serve)
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
