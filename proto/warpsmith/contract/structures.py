"""What a forward takes and gives beside tensors: literals, and the structure that they stand in.

The one idea: both are texts that others wrote, and both end up in Python that a user runs. So a literal is one as
`repr` writes it, and a structure is read as data. Nothing here is run, and pytree's own reader, which imports what a
text names, is not asked; which structures a file can give is the export's to say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from warpsmith.errors import BadInput
from warpsmith.v1 import tensor_pb2

OWN_CLASS = "warpsmith_task_module."
"""How names of classes begin that are the user's own, in a structure that `task_module` let pytree write down."""
TORCH_CONSTANTS = frozenset({
    "torch.contiguous_format", "torch.channels_last", "torch.channels_last_3d", "torch.preserve_format",
    "torch.strided", "torch.jagged", "torch._mkldnn", "torch.sparse_coo", "torch.sparse_csr", "torch.sparse_csc",
    "torch.sparse_bsr", "torch.sparse_bsc",
})  # fmt: skip
"""Memory formats and layouts as torch writes them."""
DEEPEST = 50
"""Levels of a structure; Python's parser takes 200 parentheses."""

_NUMBER = r"(?:0|[1-9][0-9]{0,399})(?:\.[0-9]{1,400})?(?:e[+-]?[0-9]{1,3})?"
_ESCAPE = r"\\(?:[\\'nrt]|x[0-9a-f]{2}|u[0-9a-f]{4}|U00(?:0[0-9a-f]|10)[0-9a-f]{4})"
_OUTPUT = re.compile(rf"""None|True|False|-?{_NUMBER}|'(?:[^'\\]|{_ESCAPE})*'|"(?:[^"\\]|{_ESCAPE})*\"""")
_INPUT = re.compile(
    rf"-?{_NUMBER}j|\(-?{_NUMBER}[+-]{_NUMBER}j\)|torch\.[a-z][a-z0-9_]*|float\('(?:-?inf|nan)'\)|object\(\)"
)


# ---- literals ------------------------------------------------------------------------------------------


def is_output_literal(text: str) -> bool:
    """Whether a text is a leaf of the outputs that is no tensor: None, a bool, a number, a string, as `repr` has it."""
    return text.isprintable() and bool(_OUTPUT.fullmatch(text))


def is_input_literal(text: str) -> bool:
    """The same of the inputs: also a complex number, a dtype, an infinity, and `object()` for anything else."""
    return is_output_literal(text) or bool(_INPUT.fullmatch(text))


def torch_constants(values: Iterable[tensor_pb2.Value]) -> Iterator[str]:
    """Every `torch_constant` among arguments, those in lists included."""
    for value in values:
        if value.WhichOneof("kind") == "torch_constant":
            yield value.torch_constant
        yield from torch_constants(value.list.values)


# ---- structures ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    """A container of a structure, or a leaf."""

    kind: str | None
    """Name by which pytree knows its class; None for a leaf."""
    context: Any
    """What its class needs beside the children, as JSON holds it: not looked at here."""
    children: tuple[Node, ...] = ()

    @property
    def leaf_count(self) -> int:
        """Leaves below it; 1 for a leaf."""
        return sum(child.leaf_count for child in self.children) if self.kind is not None else 1


def read(text: str) -> Node:
    """The structure that pytree wrote down.

    Raises:
        BadInput: it is none, or has more than `DEEPEST` levels.
    """
    try:
        protocol, root = json.loads(text)
        if protocol != 1:
            raise ValueError("another form than the one that is read here")
        return _node(root, DEEPEST)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise BadInput("the outputs' structure is none that pytree writes") from error


def require(text: str, leaves: Sequence[str], tensor_count: int) -> Node:
    """The structure of outputs whose `leaves` are literals, or empty for a tensor each; none where all are tensors.

    An empty text is one leaf alone, or a tuple of several.

    Raises:
        BadInput: a leaf is no literal, the structure is none, or the numbers do not fit.
    """
    if strange := next((leaf for leaf in leaves if leaf and not is_output_literal(leaf)), ""):
        raise BadInput(f"the output {strange[:40]!r} is no literal")
    if leaves and list(leaves).count("") != tensor_count:
        raise BadInput(f"the outputs' structure has {list(leaves).count('')} leaves for {tensor_count} tensors")
    if not tensor_count:
        raise BadInput("there is no output")
    expected = len(leaves) or tensor_count
    root = read(text) if text else _plain(expected)
    if root.leaf_count != expected:
        raise BadInput(f"the outputs' structure has {root.leaf_count} leaves instead of {expected}")
    return root


def _plain(leaf_count: int) -> Node:
    leaves = (Node(None, None),) * leaf_count
    return leaves[0] if leaf_count == 1 else Node("builtins.tuple", "null", leaves)  # as pytree writes one


def _node(spec: Any, depth: int) -> Node:
    kind, context, children = spec["type"], spec["context"], spec["children_spec"]
    if kind is None:
        return Node(None, None)
    if depth == 0 or not isinstance(kind, str) or not isinstance(children, list):
        raise ValueError("too deep, or no container")
    return Node(kind, context, tuple(_node(child, depth - 1) for child in children))
