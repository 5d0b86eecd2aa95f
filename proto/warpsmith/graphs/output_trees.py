"""What a forward returns, as text: the structure of its outputs, and those of its leaves that are no tensors."""

from __future__ import annotations

from math import isfinite
from typing import Any

from torch.utils import _pytree as pytree

from warpsmith.graphs.refusals import CaptureRefused, first_line


def literal(value: object) -> str:
    """A leaf of the outputs that is no tensor, as Python writes it."""
    is_plain = value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and isfinite(value))
    if not is_plain or type(value) not in (type(None), bool, int, float, str):
        raise CaptureRefused(
            f"forward returns a {type(value).__name__} among its outputs; return tensors, numbers or None"
        )
    return repr(value)


def text(spec: pytree.TreeSpec) -> str:
    """The structure as pytree writes it; torch.max and its kin return named tuples, which are written as
    tuples."""
    try:
        return str(pytree.treespec_dumps(spec))
    except Exception:
        plain = pytree.tree_map(lambda leaf: leaf, pytree.tree_unflatten(list(range(spec.num_leaves)), spec))
        try:
            return str(pytree.treespec_dumps(pytree.tree_structure(_plain(plain))))
        except NotImplementedError as error:
            raise CaptureRefused(f"forward returns what has no form as text: {first_line(error)}") from error


def _plain(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _plain(value) for key, value in tree.items()}
    if isinstance(tree, tuple):
        return tuple(_plain(value) for value in tree)
    if isinstance(tree, list):
        return [_plain(value) for value in tree]
    return tree
