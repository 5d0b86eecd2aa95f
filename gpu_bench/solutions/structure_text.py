"""Two described results compared, place by place, so that a difference has a name.

The one idea: `output['loss'] is float64 [] instead of float32 []` says what to mend. The descriptions are those of
`structure`, as untrusted text. Needs no torch.
"""

from __future__ import annotations

import base64
import cmath
import hashlib
import json
import math
import statistics
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Node = Mapping[str, Any]
"""A described result: "kind", and by kind "children" (name → node), or of a tensor "dtype", "shape", "stride",
"shares" (the source or the earlier output whose memory it is) and "form" where it is a numpy array, or of a list of
numbers their type as "numbers" and their bytes as "content", or of another value its "type", "value" and, if that is
long, "sha256"."""

TENSOR, OTHER = "tensor", "value"
SHOWN = 200
"""Characters of a value's text that are told as they are."""
CODES = {"float": "d", "int": "q", "bool": "b"}
"""Types of Python's numbers, and how `array` holds them."""
NO_VALUES = bytes(32)
_NUMBERS_WITHIN = 1e-4
"""Relative difference of single numbers that are the same result: a float32 keeps no more of terms that cancel."""
_LISTED_WITHIN, _MANY = 1e-5, 8
"""The same of listed numbers; of so many as a share of their median, where one is smaller, for terms may cancel."""
_ROUNDED = frozenset({
    "float", "float16", "float32", "float64", "complex", "complex64", "complex128",
})  # fmt: skip
"""Types of numbers that rounding may change."""


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
        if any(node.get(name) != wanted.get(name) for name in ("dtype", "shape", "form")):
            return f"{path} is {_said(node)} instead of {_said(wanted)}"
        if node.get("stride") != wanted["stride"] or node.get("layout") != wanted.get("layout"):
            return f"{path} has strides {node.get('stride')} instead of {wanted['stride']}"
        shares = node.get("shares")
        return f"{path} is the memory of {shares}" if shares and shares != wanted["shares"] else ""
    if wanted["kind"] == OTHER:
        if _is_same_value(node, wanted):
            return ""
        if _said(node) == _said(wanted):
            return f"{path} is a {str(node.get('type'))[:SHOWN]} instead of a {wanted['type']}: {_said(wanted)}"
        return f"{path} is {_said(node)} instead of {_said(wanted)}"
    if node.get("numbers") != wanted.get("numbers"):
        return f"{path} is {_said(node)} instead of {_said(wanted)}"
    if "numbers" in wanted:
        return _other_numbers(node, wanted, path)
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


def digest(node: Node) -> bytes:
    """Of all that a result is beside its tensors; NO_VALUES where it is only them, in order.

    A process that says it as its call ends cannot make these values later. An untrusted `node` is without `difference`.
    """
    if _is_only_tensors(node):
        return NO_VALUES
    return hashlib.sha256(json.dumps(_beside_tensors(node)).encode()).digest()


def _beside_tensors(node: Node) -> Node:
    if node["kind"] == TENSOR:
        return {"kind": TENSOR}
    if _is_leaf(node):
        return {name: node.get(name) for name in ("kind", "type", "value", "sha256", "numbers", "content")}
    return {"kind": node["kind"], "children": {name: _beside_tensors(each) for name, each in node["children"].items()}}


def _is_only_tensors(node: Node) -> bool:
    """Keys of a dict are values too."""
    if node["kind"] == TENSOR:
        return True
    if _is_leaf(node) or node["kind"] == "dict":
        return False
    return all(map(_is_only_tensors, node["children"].values()))


def _is_leaf(node: Node) -> bool:
    return node["kind"] == OTHER or node.get("numbers") is not None


def _other_numbers(node: Node, wanted: Node, path: str) -> str:
    ours, theirs = _read_numbers(wanted), _read_numbers({**node, "numbers": wanted["numbers"]})
    if len(ours) != len(theirs):
        return f"{path} has {len(theirs)} numbers instead of {len(ours)}"
    is_rounded = wanted["numbers"] in _ROUNDED
    sizes = [abs(number) for number in ours if math.isfinite(number)] if is_rounded else []
    is_many = len(sizes) >= _MANY
    within, usual = (_LISTED_WITHIN, statistics.median(sizes)) if is_many else (_NUMBERS_WITHIN, 0.0)
    for position, (own, other) in enumerate(zip(theirs, ours, strict=True)):
        if own != other and not (is_rounded and _is_close(own, other, within, usual)):
            return f"{'output' if path == 'the result' else path}[{position}] is {own} instead of {other}"
    return ""


def _read_numbers(node: Node) -> Sequence[float]:
    """None of what is no such text."""
    try:
        return array(CODES[node["numbers"]], base64.b64decode(node["content"]))
    except (KeyError, TypeError, ValueError):
        return ()


def _is_same_value(node: Node, wanted: Node) -> bool:
    if node.get("type") != wanted["type"]:
        return False
    if wanted["type"] in _ROUNDED:
        try:
            return _is_close(complex(node["value"]), complex(wanted["value"]))
        except (KeyError, TypeError, ValueError):
            return False
    return bool(node.get("value") == wanted["value"] and node.get("sha256") == wanted.get("sha256"))


def _is_close(own: complex, other: complex, within: float = _NUMBERS_WITHIN, usual: float = 0.0) -> bool:
    are_close = cmath.isclose(own, other, rel_tol=within, abs_tol=within * usual)
    return are_close or (cmath.isnan(own) and cmath.isnan(other))


def _said(node: Any) -> str:
    if not isinstance(node, dict):
        return "nothing"
    if node.get("kind") == TENSOR:
        return " ".join(str(node[name]) for name in ("form", "dtype", "shape") if name in node)
    if node.get("kind") == OTHER:
        whole = f" (sha256 {node['sha256']})" if "sha256" in node else ""
        return f"{str(node.get('value'))[: 60 if whole else SHOWN]}{whole}"
    return f"a {node.get('kind')}{' of ' + str(node['numbers']) if 'numbers' in node else ''}"[:SHOWN]


def _names(children: Any) -> str:
    names: Sequence[str] = list(children) if isinstance(children, dict) else []
    return ", ".join(names[:6]) + (" …" if len(names) > 6 else "") or "nothing"
