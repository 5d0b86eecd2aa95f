"""A turn of an agent with a language model: how long it may take, how much is shown, and what it cost in tokens.

The one idea: the length of a turn is fixed, and every question in it gets what is left. So its caller knows how long
it takes at most, whatever the server does and the settings of its client say; the sums are in `orchestrator.agents`.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from warpsmith.errors import WarpsmithError
from warpsmith.models.language_model import Answer, LanguageModel, Message

TURN_SECONDS = 270.0
"""Longest turn of the reasoner or of a kernel's writer. With the defaults, a question that waits for a slot and is
tried again (30 s each) still has its whole 120 s, and the 180 s that a thinking model is given too."""
ASIDE_SECONDS = 60.0
"""Longest turn of an agent that can do without: an explanation, inputs to try."""
_TASKS_REMEMBERED = 256


class Turn:
    """One turn, which begins when it is made. Used by one thread."""

    def __init__(self, model: LanguageModel, seconds: float) -> None:
        self._model = model
        self._seconds, self._end = seconds, time.monotonic() + seconds

    def answer(self, messages: Sequence[Message], schema: Mapping[str, Any] | None) -> Answer:
        """As `LanguageModel.answer`, by the end of the turn."""
        return self._model.answer(messages, schema, self._end - time.monotonic())

    @property
    def may_ask_again(self) -> bool:
        """Whether another answer is worth beginning: half of the turn is left."""
        return self._end - time.monotonic() > self._seconds / 2


class PromptSizes:
    """How much of a prompt a model takes: by its context where that is told, else as learnt from its refusals, for each
    task by itself, since one long module says nothing of the next. Sizes are numbered from the whole to the least."""

    def __init__(self, model: LanguageModel, count: int) -> None:
        self._model, self._count = model, count
        self._least: OrderedDict[tuple[str, int], int] = OrderedDict()
        self._lock = threading.Lock()

    def fitting(self, task: str, estimate: Callable[[int], int]) -> int:
        """The largest size that fits; `task` is the task's digest, `estimate` the tokens of a size, guessed high."""
        context = self._model.context_tokens()
        room = context * 2 // 3  # a third is the answer's
        for size in range(self._least.get((task, context), 0), self._count - 1):
            if not room or estimate(size) <= room:
                return size
        return self._count - 1

    def refused(self, task: str, size: int) -> int | None:
        """The next size, after the model found this one too long; None where there is none."""
        if size + 1 >= self._count:
            return None
        with self._lock:
            self._least[task, self._model.context_tokens()] = size + 1
            while len(self._least) > _TASKS_REMEMBERED:
                self._least.popitem(last=False)
        return size + 1


@dataclass
class Spent:
    """What a turn has cost."""

    tokens: int = 0
    """Prompts and answers, those of attempts and answers that could not be used among them."""


_account: ContextVar[Spent | None] = ContextVar("account", default=None)


@contextmanager
def counting() -> Iterator[Spent]:
    """Counts tokens of the questions that this thread asks inside; an exception of ours that leaves carries them."""
    spent = Spent()
    before = _account.set(spent)
    try:
        yield spent
    except WarpsmithError as error:
        error.model_tokens = max(error.model_tokens, spent.tokens)
        raise
    finally:
        _account.reset(before)


def took(tokens: int) -> None:
    """A client of a model says what one exchange cost."""
    spent = _account.get()
    if spent is not None:
        spent.tokens += tokens
