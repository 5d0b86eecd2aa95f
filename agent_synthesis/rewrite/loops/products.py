"""Products of a graph with weights: which columns of a weight are multiplied by which tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.rewrite.calls import Named, arguments, operation, shape
from agent_synthesis.rewrite.loops.numbering import Numbering


@dataclass(frozen=True)
class Part:
    """A tensor that is multiplied by some columns of a weight."""

    tensor: str
    begin: int
    width: int


@dataclass(frozen=True)
class Factor:
    """Tensors beside each other, times a weight."""

    weight: str
    is_turned: bool
    """Whether the weight has a row for each column that it is multiplied by, as `x @ w` wants it."""
    parts: tuple[Part, ...]


def product_of(index: GraphIndex, numbering: Numbering, term: Named) -> tuple[Factor, list[str]] | None:
    """A term that is a product with a weight, and its biases."""
    call = numbering.maker(term)
    kind = operation(call)
    if call is None or kind not in ("linear", "matmul", "mm", "addmm"):
        return None
    given = arguments(call)
    if kind == "linear":
        of, weight, bias = given["input"], given["weight"], given["bias"]
    elif kind == "addmm":
        of, weight, bias = given["mat1"], given["mat2"], given["self"]
        if (given["beta"], given["alpha"]) != (1, 1):
            return None
    else:
        of, weight, bias = given["self"], given["other" if kind == "matmul" else "mat2"], None
    if len(shape(index, of)) != 2 or len(shape(index, weight)) != 2 or (bias and len(shape(index, bias)) != 1):
        return None
    parts = tuple(_parts(index, numbering, of))
    biases = [numbering.first(bias.name)] if bias is not None else []
    return Factor(numbering.first(weight.name), kind != "linear", parts), biases


def _parts(index: GraphIndex, numbering: Numbering, of: Named) -> Sequence[Part]:
    """What lies beside each other in a factor of two dimensions."""
    call, tensors = numbering.maker(of), [Named(numbering.first(of.name))]
    if call is not None and call.target == "aten.cat.default" and arguments(call)["dim"] in (1, -1):
        tensors = [Named(numbering.first(each.name)) for each in arguments(call)["tensors"]]
        if any(len(shape(index, each)) != 2 for each in tensors):
            tensors = [of]
    parts, begin = list[Part](), 0
    for each in tensors:
        parts.append(Part(each.name, begin, shape(index, each)[1]))
        begin += parts[-1].width
    return parts
