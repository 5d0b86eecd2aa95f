"""What `torch.autocast` makes of a call: the casts of its arguments, as calls of their own.

The one idea: PyTorch is asked. The call is made on fake tensors of the device's type, outside autocast and within; a
cast of an argument that only the latter makes belongs to the region, and so it becomes a call that anybody can see.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from warpsmith.errors import BadInput

_REPORTS = logging.getLogger("torch._subclasses.fake_tensor")
"""Prints what fails on fake tensors, which here is an answer."""

Cast = Callable[[torch.Tensor, torch.dtype], torch.Tensor]
"""Makes a tensor of another type from a tensor."""


@dataclass(frozen=True)
class Region:
    """A block under `torch.autocast` that is enabled."""

    device_type: str
    """Whose rules hold: "cpu" or "cuda"."""
    dtype: torch.dtype
    """What products are computed in."""

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """As `torch.autocast` does it, which refuses to where the device is not on this machine."""
        kind, before = self.device_type, torch.get_autocast_dtype(self.device_type)
        torch.set_autocast_enabled(kind, True)
        torch.set_autocast_dtype(kind, self.dtype)
        try:
            yield
        finally:
            torch.set_autocast_enabled(kind, False)
            torch.set_autocast_dtype(kind, before)
            torch.clear_autocast_cache()

    def applied(self, overload: OpOverload, args: Any, kwargs: Any, cast: Cast) -> tuple[Any, Any]:
        """The arguments that the call gets in the region; `cast` is called for each that changes.

        Within a FakeTensorMode. Raises BadInput where casts of arguments are not all that it does.
        """
        leaves = {id(leaf): leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        if not any(leaf.is_floating_point() for leaf in leaves.values()):
            return args, kwargs
        given = {key: self._twin(leaf) for key, leaf in leaves.items()}
        twins = _replaced((args, kwargs), given)
        plain, _ = _made(overload, twins)
        with self.entered():
            casts, wanted = _made(overload, twins)
        if wanted is None:
            return args, kwargs  # the call fails by itself: let it, without our words
        of = {id(twin): key for key, twin in given.items()}
        found = {of[place]: dtype for place, dtype in casts if place in of and (place, dtype) not in plain}
        for changes, named in self._ways(overload, args, kwargs, leaves, found, wanted):
            changed = {key: twin.to(changes.get(key, twin.dtype)) for key, twin in given.items()}
            made_args, made_kwargs = _replaced((args, kwargs), changed)
            if _made(overload, (made_args, {**made_kwargs, **named}))[1] == wanted:
                own = {key: cast(leaf, changes[key]) if key in changes else leaf for key, leaf in leaves.items()}
                new_args, new_kwargs = _replaced((args, kwargs), own)
                return new_args, {**new_kwargs, **named}
        raise BadInput(f"forward calls {overload} under torch.autocast, which changes more than its arguments' types")

    @staticmethod
    def _ways(
        overload: OpOverload,
        args: Any,
        kwargs: Any,
        leaves: dict[int, torch.Tensor],
        found: dict[int, torch.dtype],
        wanted: list[torch.dtype | None],
    ) -> Iterator[tuple[dict[int, torch.dtype], dict[str, torch.dtype]]]:
        """Casts and arguments that may be what the region does, the likeliest first."""
        yield found, {}
        result = next((dtype for dtype in wanted if dtype is not None and dtype.is_floating_point), None)
        if result is None:
            return
        names = [argument.name for argument in overload._schema.arguments]
        if "dtype" in names[len(args) :] and kwargs.get("dtype") is None:
            yield found, {"dtype": result}  # sums and their like: the type to add in
        floats = {key: result for key, leaf in leaves.items() if leaf.is_floating_point() and leaf.dtype != result}
        yield floats, {}  # casts of what it makes of its arguments, inside

    def _twin(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device_type)


@contextlib.contextmanager
def traced_for(device_type: str) -> Iterator[None]:
    """Lets `torch.autocast("cuda")` enter on a machine without a GPU, where a module is traced for one."""
    if device_type != "cuda":
        yield
        return
    with (
        mock.patch("torch.cuda.amp.common.amp_definitely_not_available", return_value=False),
        mock.patch("torch.cuda.is_bf16_supported", return_value=True),
    ):
        yield


class _Casts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every cast, by the identity of what is cast."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[tuple[int, torch.dtype]] = []
        self._alive: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dtype = (kwargs or {}).get("dtype")
        if func is torch.ops.aten._to_copy.default and dtype is not None and dtype != args[0].dtype:
            self.made.append((id(args[0]), dtype))
            self._alive.append(args[0])
        return func(*args, **(kwargs or {}))


def _made(overload: OpOverload, given: tuple[Any, Any]) -> tuple[list[tuple[int, torch.dtype]], Any]:
    """The casts of a call and the types of its results, None where it fails."""
    args, kwargs = given
    casts = _Casts()
    try:
        with casts, mock.patch.object(_REPORTS, "disabled", True):
            results = pytree.tree_leaves(overload(*args, **kwargs))
    except Exception:  # mixed types, most often
        return casts.made, None
    return casts.made, [each.dtype if isinstance(each, torch.Tensor) else None for each in results]


def _replaced(tree: Any, by: dict[int, torch.Tensor]) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda leaf: by[id(leaf)], tree)


def region_of(
    kind: str, dtype: torch.dtype | None, is_enabled: bool, outer: Region | None, device_type: str
) -> Region | None:
    """What holds in a block within `outer`. A traced module says "cpu" by `x.device.type`, wherever it is to run."""
    if kind not in ("cpu", device_type):
        return outer
    return Region(device_type, dtype or torch.get_autocast_dtype(device_type)) if is_enabled else None
