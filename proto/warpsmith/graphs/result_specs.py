"""What results are like, where fake tensors on the CPU do not say it: shapes of recurrent networks, types on a GPU.

PyTorch has no meta kernel for a whole LSTM: on fake tensors it runs each step of each layer, operation by operation,
eight seconds for six layers and 512 steps. And statistics that a norm of 16-bit values leaves for its backward are of
16 bits on a CPU, of 32 on a GPU. Computes nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode


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


def _attended(query: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Statistics lie row by row on a processor, head by head on a GPU."""
    batch, heads, rows, _depth = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    order = (0, 1, 2) if _gpu.get() else (0, 2, 1)
    statistics = torch.empty_permuted((batch, heads, rows), order, dtype=wide, device=query.device)
    return torch.empty_like(query), statistics


def _derivatives_of_attention(
    _gradient: torch.Tensor, *operands: Any, attn_mask: torch.Tensor | None = None, **_: Any
) -> tuple[torch.Tensor, ...]:
    """They lie head by head within a row, or on a GPU without a mask as the operands do. PyTorch 2.11 takes heads of
    keys for as many as those of queries."""
    if _gpu.get() and attn_mask is None:
        return tuple(torch.empty_like(each) for each in operands[:3])
    return tuple(
        torch.empty_permuted(each.shape, (0, 2, 1, 3), dtype=each.dtype, device=each.device) for each in operands[:3]
    )


SHAPES: Final[Mapping[OpOverload, Callable[..., tuple[torch.Tensor, ...]]]] = {
    torch.ops.aten.lstm.input: _two_states,
    torch.ops.aten.gru.input: _one_state,
    torch.ops.aten.rnn_tanh.input: _one_state,
    torch.ops.aten.rnn_relu.input: _one_state,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: _attended,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _derivatives_of_attention,
}
"""By operation, what gives uninitialised results for its arguments."""
_KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd, DispatchKey.Meta)

WIDE_ON_GPU: Final[frozenset[OpOverload]] = frozenset(
    {
        torch.ops.aten.native_layer_norm.default,
        torch.ops.aten.native_batch_norm.default,
        torch.ops.aten._native_batch_norm_legit.default,
        torch.ops.aten._native_batch_norm_legit.no_stats,
        torch.ops.aten._batch_norm_with_update.default,
    }
)
"""Operations whose second and third results, of 16-bit values, are of 32 bits on a GPU, as on PyTorch's meta device."""


class _Patch:
    """Something of PyTorch's that is another as long as anybody is within; in all threads."""

    def __init__(self, put: Callable[[], Callable[[], None]]) -> None:
        """`put` puts the other there, and returns what takes it away again."""
        self._put, self._count, self._lock = put, 0, threading.Lock()
        self._take_away: Callable[[], None] = lambda: None

    @contextmanager
    def within(self) -> Iterator[None]:
        with self._lock:
            self._count += 1
            if self._count == 1:
                self._take_away = self._put()
        try:
            yield
        finally:
            with self._lock:
                self._count -= 1
                if not self._count:
                    self._take_away()


def _put_shapes() -> Callable[[], None]:
    own = {(each, key): each.py_kernels[key] for each in SHAPES for key in _KEYS if key in each.py_kernels}
    _put({(each, key): SHAPES[each] for each, key in own})
    return lambda: _put(own)


def _put(kernels: Mapping[tuple[OpOverload, DispatchKey], Any]) -> None:
    for (overload, key), kernel in kernels.items():
        overload.py_kernels[key] = kernel
        overload._dispatch_cache.clear()


def _put_wide() -> Callable[[], None]:
    own: Callable[..., Any] = FakeTensorMode.dispatch

    def dispatch(mode: FakeTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = own(mode, func, types, args, kwargs)
        if func not in WIDE_ON_GPU or args[0].dtype.itemsize != 2 or not _gpu.get():
            return made
        with mode:
            wide = [torch.empty_strided(t.shape, t.stride(), dtype=torch.float32, device=t.device) for t in made[1:3]]
        return (made[0], *wide, *made[3:])

    FakeTensorMode.dispatch = dispatch  # type: ignore[assignment, method-assign]

    def take_away() -> None:
        FakeTensorMode.dispatch = own  # type: ignore[method-assign]

    return take_away


_gpu: ContextVar[bool] = ContextVar("whether a module is traced for a GPU", default=False)
_shapes, _wide = _Patch(_put_shapes), _Patch(_put_wide)


@contextmanager
def known(device_type: str = "cpu") -> Iterator[None]:
    """Within, fake tensors on the CPU are what results of these operations are on the device, in torch.export too.

    Shapes of recurrent networks come at once in all threads; what differs on a GPU, in this one.
    """
    token = _gpu.set(device_type == "cuda")
    try:
        with _shapes.within(), _wide.within():
            yield
    finally:
        _gpu.reset(token)
