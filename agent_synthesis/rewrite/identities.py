"""Rules that drop calls which change nothing, undo each other, or are never read.

Transposes that cancel need no rule: they are views, and views are index expressions.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.rewrite.calls import Named, Replacement, arguments, maker, operation
from agent_synthesis.rewrite.linear import number
from warpsmith.v1 import graph_pb2

_NEUTRAL = {"mul": 1, "div": 1, "true_divide": 1, "sub": 0, "pow": 1}
"""Operation → the second operand with which it gives its first. An addition of 0 is not here: it turns -0 into 0."""
_IDEMPOTENT = frozenset({"relu", "abs", "floor", "ceil", "round", "trunc", "sign", "hardtanh", "relu6"})
_INVERSE = frozenset({"neg", "logical_not", "bitwise_not"})


class Identity:
    """`x · 1`, `x / 1`, `x − 0`, `x ^ 1`, padding by nothing: x, to the last bit. (Dropout in evaluation is a view.)

    Holds where type and layout stay, and where it makes no difference that the result shares x's memory.
    """

    name = "identity"
    effect = "drops a call that gives what it gets"

    def replacement(self, index: GraphIndex, node: str) -> Replacement | None:
        call = index.nodes[node]
        if not call.args or call.args[0].WhichOneof("kind") != "tensor" or not _changes_nothing(index, call):
            return None
        return renamed(index, (node,), Named(call.args[0].tensor))


def _changes_nothing(index: GraphIndex, call: graph_pb2.Node) -> bool:
    given, kind = arguments(call), operation(call)
    if kind in _NEUTRAL:
        other = given.get("other", given.get("exponent"))
        value = number(index, other)
        return value == _NEUTRAL[kind] and given.get("rounding_mode") is None
    return kind in ("pad", "constant_pad_nd") and not any(given["pad"])


class Involution:
    """`−(−x) = x`, `not not x = x`; and `relu(relu(x)) = relu(x)` with its like. To the last bit.

    Holds where it makes no difference that the result shares memory with what it stands for.
    """

    name = "involution"
    effect = "drops a call that undoes or repeats the one before"

    def replacement(self, index: GraphIndex, node: str) -> Replacement | None:
        call = index.nodes[node]
        kind = operation(call)
        if len(call.args) != 1 or kind not in _IDEMPOTENT | _INVERSE or not index.is_pure(node):
            return None
        inner = maker(index, Named(call.args[0].tensor))
        if inner is None or inner.target != call.target or len(inner.args) != 1 or not index.is_pure(inner.name):
            return None
        return renamed(index, (node,), Named((call if kind in _IDEMPOTENT else inner).args[0].tensor))


class Dead:
    """A call that is never read, writes nothing and draws no random numbers, with all before it that is made for it
    alone. Nothing changes."""

    name = "dead"
    effect = "drops a call that is never read, and what is made for it alone"

    def replacement(self, index: GraphIndex, node: str) -> Replacement | None:
        dead = never_read(index, [node], set())
        return Replacement(tuple(sorted(dead, key=index.position.__getitem__))) if dead else None


def never_read(index: GraphIndex, calls: Sequence[str], beside: Set[str]) -> set[str]:
    """`beside`, and of some calls and all before them those that would never be read without it."""
    dead, pending = {*beside}, [*calls]
    while pending:
        name = pending.pop()
        if name in dead or not _is_never_read(index, name, dead):
            continue
        dead.add(name)
        makers = (index.producer(tensor) for tensor in index.reads(name))
        pending.extend(maker for maker in makers if maker is not None)
    return dead


def _is_never_read(index: GraphIndex, node: str, beside: Set[str]) -> bool:
    """Whether nothing would be missed without a call, if the calls `beside` it were not there."""
    if not index.is_pure(node) or index.nodes[node].mutates:
        return False
    return all(result not in index.outputs and beside >= {*index.users(result)} for result in index.results(node))


def renamed(index: GraphIndex, removed: tuple[str, ...], of: Named) -> Replacement | None:
    """The last removed call's first result read as another tensor; None where type, layout or memory would differ."""
    result = index.nodes[removed[-1]].results[0].name
    if not result or index.spec(result) != index.spec(of.name) or not may_share(index, result, of.name):
        return None
    return Replacement(removed, renamed={result: of.name})


def may_share(index: GraphIndex, result: str, other: str) -> bool:
    """Whether a result may lie in another tensor's memory without a visible difference.

    An output has memory of its own: it may not become a source, nor memory that another output shows; and what is
    written in place may not have two names.
    """
    root = index.root[other]
    shown = {index.root[output] for output in index.outputs}
    if index.is_written(result) or index.is_written(other):
        return False
    return index.root[result] not in shown or (root not in shown and root not in index.sources)
