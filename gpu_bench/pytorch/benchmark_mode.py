"""Calls for which cuDNN has tried its algorithms, beside others for which it has not.

The one idea: cuDNN's benchmark mode is not asked for in each call. The first call of a shape chooses, by trying or by
rule, and later ones in the same thread do as it did, whatever the flag says then (`Conv_v8.cpp`: its `benchmark_cache`
is of a thread, and its key does not hold the flag). So calls in benchmark mode have a thread of their own: eager and
the candidate's library steps choose as they do without it. Times nothing.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch

_Answer = tuple[Any, BaseException | None]
_Asked = tuple[Callable[[], Any], "SimpleQueue[_Answer]"]


class BenchmarkMode:
    """A thread that makes calls in benchmark mode, one at a time, while the one that asks for them waits.

    To go there and back takes some microseconds of the host's time, which the clock of a GPU does not see. It ends when
    nothing refers to this.
    """

    def __init__(self) -> None:
        self._asked: SimpleQueue[_Asked | None] = SimpleQueue()
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        threading.Thread(target=_serve, args=(self._asked, device), daemon=True, name="benchmark-mode").start()
        weakref.finalize(self, self._asked.put, None)

    def calling(self, call: Callable[[int], Any]) -> Callable[[int], Any]:
        """The same call, made there. What it raises passes through."""
        return functools.partial(self._make, call)

    def _make(self, call: Callable[[int], Any], index: int) -> Any:
        answer: SimpleQueue[_Answer] = SimpleQueue()  # a new one: who was interrupted leaves an answer behind
        self._asked.put((functools.partial(call, index), answer))
        result, error = answer.get()
        if error is None:
            return result
        try:
            raise error
        finally:
            del error  # its traceback holds this frame


def _serve(asked: SimpleQueue[_Asked | None], device: int | None) -> None:
    if device is not None:
        torch.cuda.set_device(device)
    while (request := asked.get()) is not None:
        act, answer = request
        answer.put(_answered(act))
        del request, act, answer  # between calls it keeps nothing


def _answered(act: Callable[[], Any]) -> _Answer:
    was_on = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        return act(), None
    except BaseException as error:  # the caller's to handle
        return None, error
    finally:
        torch.backends.cudnn.benchmark = was_on
