"""Which calls keep the rows of their operands apart, and how such a call reads where it is made for some rows.

The one idea: a tensor's rows are its first dimensions, or the last one of a matrix that is turned; however many
dimensions they are, some of the rows are one. A rule says of a call what its results are, given what its operands are.
It makes no calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from agent_synthesis.rewrite.calls import Named, operation
from warpsmith.graphs import aten
from warpsmith.v1 import graph_pb2


@dataclass(frozen=True)
class Rows:
    """A tensor with rows."""

    lead: int = 1
    """Dimensions that are rows, the first ones."""
    dim: int = 0
    """1 of a matrix that is turned: its rows are the second dimension, and `lead` is 1."""


@dataclass(frozen=True)
class Shared:
    """A tensor that is the same for all rows, with dimensions of one element in front where others have rows."""

    lead: int = 1


@dataclass(frozen=True)
class Summed:
    """A sum over all rows."""


Kind = Rows | Summed


@dataclass(frozen=True)
class Cut:
    """A call for some rows."""

    results: Sequence[Kind | None]
    """None for one that nobody may read."""
    operands: Mapping[str, Rows | Shared] = field(default_factory=dict)
    """Argument → what is read of it; others are read as they are."""
    changed: Mapping[str, Any] = field(default_factory=dict)
    """Argument → its other value; -1 stands for the number of rows."""
    target: str = ""
    """Another call; "" for the same."""


@dataclass(frozen=True)
class Call:
    """A call whose operands are known."""

    node: graph_pb2.Node
    given: Mapping[str, Any]
    """Its arguments by ATen's names."""
    kinds: Mapping[str, Kind]
    """Tensor → what it is, of those with rows and of sums over them."""
    count: int
    """Rows."""
    shape_of: Callable[[str], list[int]]

    def kind(self, name: str) -> Kind | None:
        """Of an argument; None for one that has no rows, as far as is known."""
        value = self.given.get(name)
        return self.kinds.get(value.name) if isinstance(value, Named) else None

    def shape(self, name: str) -> list[int]:
        """Of an argument; none for a number."""
        value = self.given.get(name)
        return self.shape_of(value.name) if isinstance(value, Named) else []

    @property
    def result(self) -> list[int]:
        """The shape of the first result."""
        return list(self.node.results[0].spec.shape)

    def lead(self, shape: Sequence[int]) -> int | None:
        """How many first dimensions are rows, of a tensor that has some."""
        for lead in range(1, len(shape) + 1):
            if math.prod(shape[:lead]) == self.count:
                return lead
        return None

    def beside(self, name: str, lead: int, rows: Sequence[int]) -> Rows | Shared | None:
        """What an argument is that is broadcast against a tensor with rows; None where it is of some of them."""
        shape, kind = self.shape(name), self.kind(name)
        if kind is not None:
            is_alike = isinstance(kind, Rows) and not kind.dim and shape[:lead] == list(rows[:lead])
            return Rows(lead) if is_alike and len(shape) == len(rows) else None
        seen = shape[: max(0, lead - (len(rows) - len(shape)))]
        if all(extent == 1 for extent in seen):
            return Shared(max(1, len(seen)))
        return Rows(lead) if seen == list(rows[:lead]) else None


def cut(call: Call, *, is_first: bool) -> Cut | None:
    """The call for some rows; None where it mixes them or is not known. `is_first`: rows begin with it."""
    if call.node.mutates or call.node.random or not call.given:
        return None
    if is_first and not is_pointwise(call.node):
        return _first(call)
    if rule := _RULES.get(operation(call.node)):
        return rule(call)
    return _pointwise(call) if is_pointwise(call.node) else None


def is_pointwise(node: graph_pb2.Node) -> bool:
    """Whether each element of the result is a formula of elements at its place."""
    return not aten.is_outside(node.target) and torch.Tag.pointwise in aten.resolve(node.target).tags


def _first(call: Call) -> Cut | None:
    left, right = ("mat1", "mat2") if "mat1" in call.given else ("self", "mat2")
    if "weight" in call.given:
        left, right = "input", "weight"
    elif "other" in call.given:
        right = "other"
    shape, lead = call.shape(left), len(call.shape(left)) - 1
    if len(call.shape(right)) != 2 or lead < 1 or math.prod(shape[:lead]) != call.count:
        return None
    if "mat1" in call.given and len(call.shape("self")) > 1 and call.shape("self")[0] != 1:
        return None
    return Cut([Rows(lead)], {left: Rows(lead)})


def _product(call: Call) -> Cut | None:
    """A matrix with rows times one that all share has rows; one with turned rows, or with columns, sums over them."""
    left, right = ("mat1", "mat2") if "mat1" in call.given else ("self", "mat2")
    first, second = call.kind(left), call.kind(right)
    if isinstance(first, Summed) or isinstance(second, Summed) or call.kind("self" if left == "mat1" else ""):
        return None
    if isinstance(first, Rows) and not first.dim and second is None:
        is_shared = left == "self" or len(call.shape("self")) == 1 or call.shape("self")[0] == 1
        return Cut([Rows()], {left: Rows()}) if is_shared else None
    if left == "mat1":
        return None
    if isinstance(second, Rows) and second.dim and first is None:
        return Cut([Rows(dim=1)], {right: Rows(dim=1)})
    is_sum = (first is None or bool(first.dim)) and (second is None or not second.dim)
    return Cut([Summed()], {left: Rows(dim=1), right: Rows()}) if is_sum else None


def _pointwise(call: Call) -> Cut | None:
    tensors = [name for name, value in call.given.items() if isinstance(value, Named)]
    if any(isinstance(each, Named) for value in call.given.values() if isinstance(value, list) for each in value):
        return None
    found = [kind for name in tensors if (kind := call.kind(name)) is not None]
    lead = call.lead(call.result)
    (first, *others) = found or [Rows(lead or 1)]
    if not isinstance(first, Rows) or len(call.node.results) != 1:
        return None
    if first.dim:
        is_alike = all(each == first for each in others) and len(found) == len(tensors)
        return Cut([first], dict.fromkeys(tensors, first)) if is_alike else None
    rows, operands = call.result, dict[str, Rows | Shared]()
    for name in tensors:
        operand = call.beside(name, first.lead, rows)
        if operand is None:
            return None
        operands[name] = operand
    return Cut([first], operands) if math.prod(rows[: first.lead]) == call.count else None


def _same(call: Call) -> Cut | None:
    kind = call.kind("self")
    return Cut([kind], {"self": kind}) if isinstance(kind, Rows) else None


def _reshaped(call: Call) -> Cut | None:
    kind, lead = call.kind("self"), call.lead(call.result)
    if not isinstance(kind, Rows) or kind.dim or lead is None:
        return None
    rest = call.result[lead:]
    size = "shape" if "shape" in call.given else "size"
    return Cut([Rows(lead)], {"self": kind}, {size: [-1, *rest]}, "aten.view.default")


def _turned(call: Call) -> Cut | None:
    kind = call.kind("self")
    if not isinstance(kind, Rows) or kind.lead > 1 or len(call.result) != 2:
        return None
    is_turned = call.given.get("dims", [1, 0]) in ([1, 0], [-1, -2]) and {
        call.given.get("dim0", 0) % 2, call.given.get("dim1", 1) % 2,
    } == {0, 1}  # fmt: skip
    return Cut([Rows(dim=1 - kind.dim)], {"self": kind}) if is_turned else None


def _inner(call: Call, name: str, dim: Any) -> list[int] | None:
    """Dimensions of an argument with rows as they are counted where these are one; None where one of them is rows."""
    kind, rank = call.kind(name), len(call.shape(name))
    if not isinstance(kind, Rows) or kind.dim or dim is None:
        return None
    dims = [each % rank for each in ([dim] if isinstance(dim, int) else dim)]
    return [each - kind.lead + 1 for each in dims] if dims and min(dims) >= kind.lead else None


def _unsqueezed(call: Call) -> Cut | None:
    kind, dim = call.kind("self"), call.given["dim"]
    if not isinstance(kind, Rows) or kind.dim or dim % len(call.result) < kind.lead:
        return None
    return Cut([kind], {"self": kind}, {"dim": dim % len(call.result) - kind.lead + 1})


def _squeezed(call: Call) -> Cut | None:
    kind, dims = call.kind("self"), _inner(call, "self", call.given.get("dim"))
    if dims is None or kind is None:
        return None
    return Cut([kind], {"self": Rows(getattr(kind, "lead", 1))}, {"dim": _like(call.given["dim"], dims)})


def _expanded(call: Call) -> Cut | None:
    kind, size = call.kind("self"), call.result
    if not isinstance(kind, Rows) or kind.dim or len(call.shape("self")) != len(size):
        return None
    return Cut([kind], {"self": kind}, {"size": [-1, *size[kind.lead :]]})


def _reduced(call: Call) -> Cut | None:
    """Along what is no row, or over all rows and nothing else."""
    kind, rank = call.kind("self"), len(call.shape("self"))
    if not isinstance(kind, Rows) or kind.dim:
        return None
    dim = call.given.get("dim")
    inner = _inner(call, "self", dim)
    if inner is not None:
        return Cut([kind], {"self": kind}, {"dim": _like(dim, inner)})
    dims = sorted(each % rank for each in dim) if isinstance(dim, list) and dim else list(range(rank))
    if operation(call.node) == "sum" and dims == list(range(kind.lead)) and isinstance(dim, list):
        return Cut([Summed()], {"self": kind}, {"dim": [0]})
    if operation(call.node) == "sum" and len(dims) == rank:
        return Cut([Summed()], {"self": kind})
    return None


def _along(call: Call) -> Cut | None:
    name = "self" if "self" in call.given else "input"
    kind, dims = call.kind(name), _inner(call, name, call.given["dim"])
    return Cut([kind], {name: Rows(getattr(kind, "lead", 1))}, {"dim": dims[0]}) if dims and kind else None


def _along_backward(call: Call) -> Cut | None:
    names = ("grad_output", "output")
    known = next((name for name in names if call.kind(name) is not None), "")
    kind, dims = call.kind(known), _inner(call, known, call.given["dim"])
    if dims is None or not isinstance(kind, Rows):
        return None
    operands = {name: call.beside(name, kind.lead, call.shape(known)) for name in names}
    if any(operand != Rows(kind.lead) for operand in operands.values()):
        return None
    return Cut([kind], {name: Rows(kind.lead) for name in names}, {"dim": dims[0]})


def _placed(call: Call) -> Cut | None:
    kind, dims = call.kind("self"), _inner(call, "self", call.given["dim"])
    if dims is None or not isinstance(kind, Rows):
        return None
    names = [name for name in ("index", "src") if isinstance(call.given.get(name), Named)]
    rows = call.shape("self")[: kind.lead]
    if any(call.shape(name)[: kind.lead] != rows for name in names):
        return None
    return Cut([kind], {name: Rows(kind.lead) for name in ("self", *names)}, {"dim": dims[0]})


def _samples(call: Call) -> Cut | None:
    """A loss of each sample, of classes along a row."""
    kind = call.kind("self")
    if kind != Rows() or len(call.shape("self")) != 2 or call.given["reduction"]:
        return None
    return Cut([Rows(), None], {"self": Rows(), "target": Rows()})


def _samples_backward(call: Call) -> Cut | None:
    if call.kind("self") != Rows() or len(call.shape("self")) != 2:
        return None
    operands: dict[str, Rows | Shared] = {"self": Rows(), "target": Rows()}
    if call.shape("grad_output"):
        operands["grad_output"] = Rows()
    return Cut([Rows()], operands)


def _like(dim: Any, dims: Sequence[int]) -> Any:
    return dims[0] if isinstance(dim, int) else list(dims)


_RULES: Mapping[str, Callable[[Call], Cut | None]] = {
    **dict.fromkeys(("mm", "addmm"), _product),
    **dict.fromkeys(("clone", "_to_copy", "detach", "alias"), _same),
    **dict.fromkeys(("view", "_unsafe_view", "reshape"), _reshaped),
    **dict.fromkeys(("t", "transpose", "permute"), _turned),
    **dict.fromkeys(("sum", "mean", "amax", "amin", "logsumexp"), _reduced),
    **dict.fromkeys(("_softmax", "_log_softmax", "softmax", "log_softmax"), _along),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), _along_backward),
    **dict.fromkeys(("gather", "scatter"), _placed),
    **dict.fromkeys(("nll_loss_forward", "nll_loss", "nll_loss_nd", "cross_entropy_loss"), _samples),
    "nll_loss_backward": _samples_backward,
    "unsqueeze": _unsqueezed,
    "squeeze": _squeezed,
    "expand": _expanded,
}
"""Of calls that are not pointwise."""
