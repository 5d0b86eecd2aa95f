"""What there is no memory for: tried again with all that can be given back, then said in words that help.

The one idea: want of memory is the machine's fault, never a candidate's, and the user wants to know what was not done
and what would help, not where an allocator failed. It allocates nothing.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TypeVar

import torch

from warpsmith.errors import BadInput
from warpsmith.graphs.task_module import cause_of

Result = TypeVar("Result")

_SAID = (
    "can't allocate memory", "CUDA error: out of memory", "CUDA_ERROR_OUT_OF_MEMORY", "CUBLAS_STATUS_ALLOC_FAILED",
)  # fmt: skip
"""How errors of other kinds say that no memory is left."""


class TruthTooLarge(Exception):
    """The machine's memory does not allow to judge something: says what, and what to do."""


class Shortages:
    """What met want of memory. The first time others are asked to give some back, and then it is tried once more."""

    def __init__(self, give_back: Callable[[], object] = lambda: None) -> None:
        """`give_back`: drops what this process itself can do without."""
        self._met: set[tuple[object, ...]] = set()
        self._give_back = give_back

    def is_first(self, *question: object) -> bool:
        """Whether the question meets it for the first time."""
        known = question in self._met
        self._met.add(question)
        return not known

    def ask(self, error: BaseException, *question: object) -> None:
        """Raises OutOfMemoryError where `error` is the question's first want of memory; drops what was made for it."""
        if not is_want_of_memory(error) or not self.is_first(*question):
            return
        traceback.clear_frames(error.__traceback__)
        self._give_back()
        torch.cuda.empty_cache()
        raise torch.OutOfMemoryError(cause_of(error)) from error


def is_want_of_memory(error: BaseException) -> bool:
    """Whether an exception, or what caused it, is that no memory is left on a GPU or on the host."""
    kinds = (torch.OutOfMemoryError, MemoryError)
    return any(isinstance(each, kinds) or any(said in str(each) for said in _SAID) for each in (error, error.__cause__))


def with_room(act: Callable[[], Result], what: str, give_back: Callable[[], object]) -> Result:
    """What `act` gives; where memory does not do, once more after `give_back`.

    Raises:
        TruthTooLarge: it does not do then either; `what` is the subject of its sentence, in the plural.
    """
    reason = ""
    for _ in range(2):
        try:
            return act()
        except (RuntimeError, MemoryError, BadInput) as error:
            if not is_want_of_memory(error):
                raise
            reason = cause_of(error.__cause__ or error)
        give_back()
    raise TruthTooLarge(
        f"not judged: {what} take more memory than is free. Smaller shapes, a device with more memory or fewer others "
        f"on it would do ({reason})"
    )
