"""What a forward returns beside numbers: containers, keys, order, types, layouts, and which tensors share memory.

The one idea: a result is described by a value that can be written down as JSON, made by the same function for the
reference and for a solution (`structure_text` compares the two). It looks at no element. It runs in a solution's
process as well, whose word for it is not believed where that would gain anything.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from array import array
from collections.abc import Iterator, Mapping, Set
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from gpu_bench.solutions import structure_text
from gpu_bench.solutions.structure_text import CODES, OTHER, SHOWN, TENSOR, Node
from gpu_bench.values.keys import Key


def describe(returned: Any, sources: Mapping[Key, torch.Tensor]) -> tuple[Node, list[torch.Tensor]]:
    """The structure of what a forward returned, and its tensors in order of appearance.

    `sources`: inputs, parameters and state; a tensor that lies in one's memory is said to.
    """
    places = {tensor.untyped_storage().data_ptr(): str(key) for key, tensor in sources.items() if tensor.numel()}
    tensors: list[torch.Tensor] = []
    return _describe(returned, "output", places, tensors), tensors


def digest(returned: Any) -> bytes:
    """`structure_text.digest` of what a forward returned, before anything is done with its tensors."""
    is_tensor = type(returned) is torch.Tensor
    return structure_text.NO_VALUES if is_tensor else structure_text.digest(_describe(returned, "", None, []))


def _describe(value: Any, path: str, places: dict[int, str] | None, tensors: list[torch.Tensor]) -> Node:
    """`places`: what lies where; None: of tensors only that they are."""
    if (tensor := _as_tensor(value)) is not None:
        tensors.append(tensor)
        form = {} if tensor is value else {"form": "numpy array"}
        return {"kind": TENSOR} if places is None else _tensor(tensor, path, places) | form
    if (numbers := _numbers(value)) is not None:
        return {"kind": _kind(value), **numbers}
    if (children := _children(value)) is None:
        return _other(value)
    made = {name: _describe(child, path + name, places, tensors) for name, child in children}
    return {"kind": _kind(value), "children": made}


def _as_tensor(value: Any) -> torch.Tensor | None:
    """A tensor, or a numpy array's memory as one; None for what neither is, or holds what tensors cannot."""
    if isinstance(value, torch.Tensor):
        return value
    if type(value) is not np.ndarray:
        return None
    is_taken = value.flags.writeable and min(value.strides, default=0) >= 0
    try:
        return torch.from_numpy(value if is_taken else value.copy())
    except (TypeError, ValueError):
        return None


def _numbers(value: Any) -> dict[str, str] | None:
    """The bytes of a list or tuple of Python's floats, or of its integers: of many, fast to write and to compare."""
    if type(value) not in (list, tuple) or len(kinds := set(map(type, value))) != 1:
        return None
    name = kinds.pop().__name__
    try:
        return {"numbers": name, "content": base64.b64encode(array(CODES[name], value).tobytes()).decode()}
    except (KeyError, TypeError, OverflowError):
        return None


def _other(value: Any) -> Node:
    """A value by its type and its text, with a hash of that where it is long; numpy would print no middle."""
    if isinstance(value, np.generic | np.ndarray):
        text = repr(value.item() if isinstance(value, np.generic) else (value.dtype, value.shape, value.tolist()))
    else:
        text = repr(value)
    whole = {"sha256": hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()} if len(text) > SHOWN else {}
    return {"kind": OTHER, "type": type(value).__name__, "value": text[:SHOWN], **whole}


def _tensor(value: torch.Tensor, path: str, places: dict[int, str]) -> dict[str, Any]:
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
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return ((f".flat[{position}]", child) for position, child in enumerate(value.ravel().tolist()))
    if isinstance(value, Set):
        return ((f"{{{position}}}", child) for position, child in enumerate(sorted(value, key=repr)))
    if isinstance(value, type):
        return None
    if dataclasses.is_dataclass(value):
        return ((f".{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value))
    held = {
        f".{name}": child for name, child in getattr(value, "__dict__", {}).items() if _as_tensor(child) is not None
    }
    return iter(held.items()) if held else None  # whose text says little of them


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return "dict"
    if isinstance(value, tuple):
        return "named tuple" if hasattr(value, "_fields") else "tuple"
    if isinstance(value, np.ndarray):
        return f"numpy array {list(value.shape)} of objects"
    if isinstance(value, list | Set):
        return "list" if isinstance(value, list) else "set"
    return "dataclass" if dataclasses.is_dataclass(value) else f"{type(value).__name__} that holds tensors"


def leaves(value: Any) -> list[torch.Tensor]:
    """The tensors of what a forward returned, in the order of `describe`."""
    if (tensor := _as_tensor(value)) is not None:
        return [tensor]
    if _numbers_only(value):
        return []
    return [leaf for _, child in _children(value) or () for leaf in leaves(child)]


def opened_leaves(returned: Any) -> list[torch.Tensor]:
    """Those that PyTorch's pytree finds."""
    return [tensor for leaf in pytree.tree_leaves(returned) if (tensor := _as_tensor(leaf)) is not None]


def _numbers_only(value: Any) -> bool:
    return type(value) in (list, tuple) and {float, int, bool}.issuperset(map(type, value))


def written(node: Node) -> str:
    """As text."""
    return json.dumps(node)
