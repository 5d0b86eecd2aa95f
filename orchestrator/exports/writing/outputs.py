"""What an exported forward returns: the module's own structure, with tensors and literals in it.

The one idea: plain containers are written as Python writes them, classes of the user's own are called by name, and any
other container, of which only its name is known here, is made by pytree of a structure that is written anew: what a
container needs beside its children is plain data, or it is refused.
"""

from __future__ import annotations

import json
import keyword
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from warpsmith.contract import structures
from warpsmith.contract.structures import OWN_CLASS
from warpsmith.errors import BadInput
from warpsmith.v1 import candidate_pb2

_CLASS = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", re.ASCII)
_FACTORIES = frozenset({"list", "dict", "set", "tuple", "str", "int", "float", "bool"})
"""Builtins that a defaultdict may call; pytree would import any other by its name."""
_LEAF: Mapping[str, object] = {"type": None, "context": None, "children_spec": []}


class _Names(Protocol):
    def __getitem__(self, buffer: str, /) -> str: ...


def outputs(program: candidate_pb2.Program, names: _Names) -> str:
    """The expression that the forward returns.

    Raises:
        BadInput: the structure is none, does not fit the outputs, or holds what no export can give.
    """
    root = structures.require(program.output_tree, program.output_leaves, len(program.outputs))
    tensors = (names[name] for name in program.outputs)
    leaves = (text or next(tensors) for text in program.output_leaves) if program.output_leaves else tensors
    try:
        return _built(root, leaves)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadInput("the outputs' structure is none that pytree writes") from error


def _built(node: structures.Node, leaves: Iterator[str]) -> str:
    if node.kind is None:
        return next(leaves)
    parts = [_built(child, leaves) for child in node.children]
    match node.kind, node.context:
        case "builtins.tuple", _:
            return f"({', '.join(parts)},)" if parts else "()"
        case "builtins.list", _:
            return f"[{', '.join(parts)}]"
        case "builtins.dict", keys:
            pairs = zip(_keys(json.loads(keys)), parts, strict=True)
            return f"{{{', '.join(f'{key!r}: {part}' for key, part in pairs)}}}"
        case "collections.namedtuple", own if own.startswith(OWN_CLASS):
            return f"{_class(own)}({', '.join(parts)})"
        case own, fields if own.startswith(OWN_CLASS):
            given, absent = map(_fields, json.loads(fields))
            pairs = zip((*given, *absent), (*parts, *["None"] * len(absent)), strict=True)
            return f"{_class(own)}({', '.join(f'{field}={part}' for field, part in pairs)})"
    own_part = {"type": node.kind, "context": _context(node), "children_spec": [_LEAF] * len(parts)}
    tree = f"torch.utils._pytree.treespec_loads({json.dumps([1, own_part])!r})"
    return f"torch.utils._pytree.tree_unflatten([{', '.join(parts)}], {tree})"


def _class(name: str) -> str:
    (own,) = _fields([name.removeprefix(OWN_CLASS)])
    return f"_ws_class(_WsReference, {own!r})"


def _fields(names: list[str]) -> list[str]:
    if any(not name.isidentifier() or keyword.iskeyword(name) for name in names):
        raise BadInput(f"the outputs' structure has classes or fields {str(names)[:80]}, which are no names")
    return names


def _context(node: structures.Node) -> Any:
    """What pytree is told of a container that only it knows."""
    if not _CLASS.fullmatch(node.kind or ""):
        raise BadInput(f"the outputs' structure has a class {str(node.kind)[:40]!r}, which is no name")
    if node.kind == "collections.namedtuple" and _CLASS.fullmatch(node.context):
        return node.context
    if node.kind == "collections.defaultdict":
        factory = node.context["default_factory_name"]
        if node.context["default_factory_module"] != "builtins" or factory not in _FACTORIES:
            raise BadInput(f"the module returns a defaultdict of {str(factory)[:40]!r}, which no export can give")
        keys = _keys(node.context["dict_context"])
        return {"default_factory_module": "builtins", "default_factory_name": factory, "dict_context": keys}
    plain = json.loads(node.context)
    if not _is_plain(plain):
        raise BadInput(f"the module returns a {str(node.kind)[:80]} of more than plain data, which no export can give")
    return json.dumps(plain)


def _keys(keys: list[Any]) -> list[Any]:
    if any(isinstance(key, list) or not _is_plain(key) for key in keys):
        raise BadInput("the module returns a dict with keys that are no plain values, which no export can give")
    return keys


def _is_plain(value: Any) -> bool:
    """Whether it is plain data without objects: of some, pytree makes enums, and imports their modules."""
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
