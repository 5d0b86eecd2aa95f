"""How outputs get from a session's candidate to its judge: GPU memory in the place of the shared file where they are
large.

The one idea: `outbox` makes such memory, both workers have to map it, and where one of them cannot, both keep to the
file. It moves no output itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from gpu_bench.workers.outbox import LEAST_BYTES, Outbox, Passage
from warpsmith.sandbox.worker import Worker
from warpsmith.v1 import judging_pb2

MOST_BYTES = 4 << 30
"""Of an outbox for groups, beside which the GPU has to hold what it is filled from, and its truth."""


class Parcels:
    """The outbox of a session, if any, and which of its workers know it."""

    def __init__(self, passage: Passage, move_seconds: float) -> None:
        self._passage = passage
        self._move_seconds = move_seconds
        self._making: Future[Outbox | None] | None = None
        self._outbox: Outbox | None = None
        self._moved: list[Worker] = []
        """Workers that know it."""
        self._refused_bytes: float = math.inf
        """There was no memory for an outbox of this size."""

    def begin(self, size: int) -> None:
        """Makes memory of the GPU for large outputs while other things are prepared."""
        if size >= LEAST_BYTES and self._outbox is None and self._making is None:
            maker = ThreadPoolExecutor(1)
            self._making = maker.submit(Outbox.make, size)
            maker.shutdown(wait=False)

    @property
    def is_there(self) -> bool:
        """Whether there is an outbox, without waiting for one that is being made."""
        return self._outbox is not None

    def share(self, workers: Callable[[], Sequence[Worker]]) -> None:
        """Lets both workers put outputs there; where one cannot, both keep to the file."""
        self._receive()
        if self._outbox is None:
            return
        for worker in workers():
            if any(worker is known for known in self._moved):
                continue
            self._passage.send(self._outbox.descriptor)
            if not self._moves(worker, self._outbox.size):
                self.give_up()
                return
            self._moved.append(worker)

    def hold(self, size: int) -> bool:
        """Whether there is an outbox of at least so many bytes, made anew where it was smaller; none for a few bytes.

        Sizes are rounded up to powers of two, so that not every group of a network has its memory made anew.
        """
        self._receive()
        rounded = 1 << (size - 1).bit_length()
        if self._outbox is None or self._outbox.size < size:
            self.give_up()
            if LEAST_BYTES <= rounded < self._refused_bytes and rounded <= MOST_BYTES:
                self.begin(rounded)
                self._receive()
                self._refused_bytes = self._refused_bytes if self._outbox else rounded
        return self._outbox is not None

    def give_up(self) -> None:
        """Has everybody use the file."""
        self._receive()
        moved, self._moved = self._moved, []
        if self._outbox is not None:
            self._outbox.close()
            self._outbox = None
        for worker in (worker for worker in moved if worker.alive):
            self._moves(worker, 0)

    def forget(self, worker: Worker) -> None:
        """The worker is gone."""
        self._moved = [known for known in self._moved if known is not worker]

    def _receive(self) -> None:
        if self._making is not None:
            self._outbox, self._making = self._making.result(), None

    def _moves(self, worker: Worker, size: int) -> bool:
        request = judging_pb2.MoveRequest(total_bytes=size)
        return worker.call("move", request, judging_pb2.Moved, deadline_s=self._move_seconds).total_bytes == size
