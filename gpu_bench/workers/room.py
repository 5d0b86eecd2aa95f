"""The memory of one GPU between a session's workers: one that runs short is asked again when the other gave back.

The one idea: memory that a process gives back and takes again costs time, 44 of the 215 ms that judging a candidate on
6.4 GB took on an H200, so each keeps some (`loaded.release_surplus`). Imports no torch.
"""

from __future__ import annotations

import contextlib
from typing import TypeVar

from google.protobuf.message import Message

from warpsmith.errors import WorkerFault, WorkerRaised
from warpsmith.sandbox.worker import Worker
from warpsmith.v1 import judging_pb2

Reply = TypeVar("Reply", bound=Message)

SHORT = frozenset({"TruthTooLarge", "OutOfMemoryError"})
"""What a worker raises for want of memory, though it gave back all that it could."""
_GIVE_BACK_SECONDS = 30.0


def call(
    worker: Worker, other: Worker | None, method: str, request: Message, response: type[Reply], deadline_s: float
) -> Reply:
    """As `worker.call`; where memory is short, once more after `other` gave back what it does not need.

    Raises what `Worker.call` raises.
    """
    try:
        return worker.call(method, request, response, deadline_s=deadline_s)
    except WorkerRaised as raised:
        if raised.kind not in SHORT:
            raise
    give_back(other)
    return worker.call(method, request, response, deadline_s=deadline_s)


def give_back(*workers: Worker | None) -> None:
    """Has workers give back what they do not need. One that is gone needs nothing: its next call says how it ended."""
    for worker in workers:
        if worker is not None and worker.alive:
            with contextlib.suppress(WorkerFault):
                worker.call("give_back", judging_pb2.GiveBackRequest(), judging_pb2.Done, _GIVE_BACK_SECONDS)
