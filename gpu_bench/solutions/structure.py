"""What a forward returns beside numbers: containers, keys, order, types, layouts, and which tensors share memory.

The one idea: a result is described by a value that can be written down as JSON, made by the same function for the
reference and for a solution (`structure_text` compares the two). It looks at no element. It runs in a solution's
process as well, whose word for it is not believed where that would gain anything.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from gpu_bench.solutions.structure_text import OTHER, TENSOR, Node
from gpu_bench.values.keys import Key


def describe(returned: Any, sources: Mapping[Key, torch.Tensor]) -> tuple[Node, list[torch.Tensor]]:
    """The structure of what a forward returned, and its tensors in order of appearance.

    `sources`: inputs, parameters and state; a tensor that lies in one's memory is said to.
    """
    places = {tensor.untyped_storage().data_ptr(): str(key) for key, tensor in sources.items() if tensor.numel()}
    tensors: list[torch.Tensor] = []
    return _describe(returned, "output", places, tensors), tensors


def _describe(value: Any, path: str, places: dict[int, str], tensors: list[torch.Tensor]) -> Node:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _tensor(value, path, places)
    if (children := _children(value)) is None:
        return {"kind": OTHER, "type": type(value).__name__, "value": repr(value)[:200]}
    made = {name: _describe(child, path + name, places, tensors) for name, child in children}
    return {"kind": _kind(value), "children": made}


def _tensor(value: torch.Tensor, path: str, places: dict[int, str]) -> Node:
    described = {"kind": TENSOR, "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
    if value.layout is not torch.strided:
        return described | {"stride": [], "shares": "", "layout": str(value.layout)}
    # Strides of extents of 1 mean nothing.
    resolved = value.resolve_conj().resolve_neg()  # as results are read
    stride = [step if extent > 1 else 0 for step, extent in zip(resolved.stride(), value.shape, strict=True)]
    shares = places.get(value.untyped_storage().data_ptr(), "") if value.numel() else ""
    if value.numel():
        places.setdefault(value.untyped_storage().data_ptr(), path)
    return described | {"stride": stride if value.numel() else [], "shares": shares}


def _children(value: Any) -> Iterator[tuple[str, Any]] | None:
    """(how it is reached, child) of a container; None for a leaf."""
    if isinstance(value, Mapping):
        return ((f"[{key!r}]", child) for key, child in value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return ((f".{name}", getattr(value, name)) for name in value._fields)
    if isinstance(value, list | tuple):
        return ((f"[{position}]", child) for position, child in enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return ((f".{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value))
    return None


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return "dict"
    if isinstance(value, tuple):
        return "named tuple" if hasattr(value, "_fields") else "tuple"
    return "list" if isinstance(value, list) else "dataclass"


def leaves(value: Any) -> list[torch.Tensor]:
    """The tensors of what a forward returned, in the order of `describe`."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for _, child in _children(value) or () for leaf in leaves(child)]


def written(node: Node) -> str:
    """As text."""
    return json.dumps(node)
