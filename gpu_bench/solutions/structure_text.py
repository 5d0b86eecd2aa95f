"""Two described results compared, place by place, so that a difference has a name.

The one idea: `output['loss'] is float64 [] instead of float32 []` says what to mend. The descriptions are those of
`structure`, as untrusted text. Needs no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Node = Mapping[str, Any]
"""A described result: "kind", and by kind "children" (name → node), or of a tensor "dtype", "shape", "stride",
"shares" (the source or the earlier output whose memory it is), or of another value its "type" and "value"."""

TENSOR, OTHER = "tensor", "value"
_NUMBERS_WITHIN = 1e-4
"""Relative difference of Python floats that are the same result."""


def read(text: str | bytes) -> Node:
    """From untrusted text. Raises ValueError."""
    try:
        node = json.loads(text)
    except RecursionError:
        node = None
    if not isinstance(node, dict):
        raise ValueError("no description of a result")
    return node


def difference(node: Any, wanted: Node, path: str = "the result") -> str:
    """The first place where a described result is not what it should be, in one sentence; empty where there is none.

    `node` is untrusted. Sharing memory is wrong where the reference does not; not to share is always right.
    """
    if not isinstance(node, dict) or node.get("kind") != wanted["kind"]:
        return f"{path} is {_said(node)} instead of {_said(wanted)}"
    if wanted["kind"] == TENSOR:
        if node.get("dtype") != wanted["dtype"] or node.get("shape") != wanted["shape"]:
            return f"{path} is {_said(node)} instead of {_said(wanted)}"
        if node.get("stride") != wanted["stride"] or node.get("layout") != wanted.get("layout"):
            return f"{path} has strides {node.get('stride')} instead of {wanted['stride']}"
        shares = node.get("shares")
        return f"{path} is the memory of {shares}" if shares and shares != wanted["shares"] else ""
    if wanted["kind"] == OTHER:
        return "" if _is_same_value(node, wanted) else f"{path} is {_said(node)} instead of {_said(wanted)}"
    ours, theirs = wanted["children"], node.get("children")
    if not isinstance(theirs, dict) or list(theirs) != list(ours):
        return f"{path} has {_names(theirs)} instead of {_names(ours)}"
    root = "output" if path == "the result" else path
    found = (difference(theirs[name], child, f"{root}{name}") for name, child in ours.items())
    return next(filter(None, found), "")


def tensors_of(node: Node) -> Iterator[Node]:
    """The described tensors of a result."""
    if node["kind"] == TENSOR:
        yield node
    for child in node.get("children", {}).values():
        yield from tensors_of(child)


def _is_same_value(node: Node, wanted: Node) -> bool:
    if node.get("type") != wanted["type"]:
        return False
    if wanted["type"] == "float":
        try:
            own, other = float(node["value"]), float(wanted["value"])
            return math.isclose(own, other, rel_tol=_NUMBERS_WITHIN) or (math.isnan(own) and math.isnan(other))
        except (KeyError, TypeError, ValueError):
            return False
    return bool(node.get("value") == wanted["value"])


def _said(node: Any) -> str:
    if not isinstance(node, dict):
        return "nothing"
    if node.get("kind") == TENSOR:
        return f"{node.get('dtype')} {node.get('shape')}"
    return str(node.get("value") if node.get("kind") == OTHER else f"a {node.get('kind')}")[:200]


def _names(children: Any) -> str:
    names: Sequence[str] = list(children) if isinstance(children, dict) else []
    return ", ".join(names[:6]) + (" …" if len(names) > 6 else "") or "nothing"
