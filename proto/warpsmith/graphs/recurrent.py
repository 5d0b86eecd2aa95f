"""Shapes of recurrent networks' results, known without running them.

The one idea: PyTorch has no meta kernel for a whole LSTM. On fake tensors it runs each step of each layer, operation by
operation: eight seconds for six layers and 512 steps, for each capture. Computes nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload


def _outputs(values: torch.Tensor, state: torch.Tensor, is_bidirectional: bool, is_batch_first: bool) -> torch.Tensor:
    """(steps, batch, directions × width), in memory in that order even where the batch comes first."""
    steps, batch = (values.shape[1], values.shape[0]) if is_batch_first else values.shape[:2]
    made = values.new_empty(steps, batch, (1 + is_bidirectional) * state.shape[-1])
    return made.transpose(0, 1) if is_batch_first else made


def _one_state(
    values: torch.Tensor, state: torch.Tensor, _params: Any, _biases: bool, _layers: int, _dropout: float, _train: bool,
    is_bidirectional: bool, is_batch_first: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    made = _outputs(values, state, is_bidirectional, is_batch_first)
    return made, values.new_empty(state.shape)


def _two_states(
    values: torch.Tensor, states: Sequence[torch.Tensor], _params: Any, _biases: bool, _layers: int, _dropout: float,
    _train: bool, is_bidirectional: bool, is_batch_first: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    made = _outputs(values, states[0], is_bidirectional, is_batch_first)
    return made, *(values.new_empty(state.shape) for state in states)


SHAPES: Final[Mapping[OpOverload, Callable[..., tuple[torch.Tensor, ...]]]] = {
    torch.ops.aten.lstm.input: _two_states,
    torch.ops.aten.gru.input: _one_state,
    torch.ops.aten.rnn_tanh.input: _one_state,
    torch.ops.aten.rnn_relu.input: _one_state,
}
"""By operation, what gives uninitialised results for its arguments."""
_KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd, DispatchKey.Meta)


_lock = threading.Lock()
_within: list[Mapping[tuple[OpOverload, DispatchKey], Any]] = []
"""PyTorch's own, once for each that is within."""


@contextmanager
def shapes_alone() -> Iterator[None]:
    """Within, the dispatcher answers with these on fake and meta tensors, in torch.export too; in all threads."""
    with _lock:
        own = _within[0] if _within else {(each, key): each.py_kernels[key] for each in SHAPES for key in _KEYS}
        _within.append(own)
        _put({(each, key): shapes for each, shapes in SHAPES.items() for key in _KEYS})
    try:
        yield
    finally:
        with _lock:
            _within.pop()
            if not _within:
                _put(own)


def _put(kernels: Mapping[tuple[OpOverload, DispatchKey], Any]) -> None:
    for (overload, key), kernel in kernels.items():
        overload.py_kernels[key] = kernel
        overload._dispatch_cache.clear()
