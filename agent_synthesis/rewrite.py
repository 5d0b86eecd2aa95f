"""Algebra: rules that replace calls of the graph by cheaper calls with the same value.

The one idea: a rule turns nodes into nodes, so its result is plan zero's kind of plan again: each new call
runs in the library as it stands and composes with every other move. Rules state their condition and are
checked before use. Rounding may differ, never the meaning; reports label what was used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from agent_synthesis.graph_index import GraphIndex
from agent_synthesis.plan import Group, Plan, ordered
from warpsmith import digest
from warpsmith.errors import IllegalMove
from warpsmith.v1 import graph_pb2, tensor_pb2


@dataclass(frozen=True)
class Replacement:
    """Calls that go, and calls that come in the place of the last of them, in order."""

    removed: tuple[str, ...]
    added: tuple[graph_pb2.Node, ...]


class Rule(Protocol):
    """One identity of algebra."""

    name: str
    effect: str

    def replacement(self, index: GraphIndex, node: str) -> Replacement | None:
        """What the rule makes of the calls that end in `node`; None where its condition does not hold."""
        ...


def matching(plan: Plan, group: Group) -> list[Rule]:
    """Rules whose condition holds at a group."""
    if group.engine == "authored":
        return []
    return [rule for rule in RULES if _applicable(plan, group, rule) is not None]


def rewritten(plan: Plan, name: str, rule_name: str) -> Plan:
    """The plan over the rewritten graph; new calls are library groups, all others keep theirs.

    Raises:
        IllegalMove: no rule of that name, its condition does not hold, or a group of ours is in the way.
    """
    rule = next((rule for rule in RULES if rule.name == rule_name), None)
    if rule is None:
        raise IllegalMove(f"no rule is called {rule_name!r}; there are {', '.join(r.name for r in RULES)}")
    made = _applicable(plan, plan.group(name), rule)
    if made is None:
        raise IllegalMove(f"rule {rule_name} does not apply to {name}")
    graph = graph_pb2.Graph()
    graph.CopyFrom(plan.index.graph)
    del graph.nodes[:]
    for node in plan.index.graph.nodes:
        if node.name == made.removed[-1]:
            graph.nodes.extend(made.added)
        if node.name not in made.removed:
            graph.nodes.append(node)
    graph.digest = digest.of_graph(graph)
    index = GraphIndex(graph)
    kept = [group for group in plan.groups if not set(group.nodes) & set(made.removed)]
    new = [Group(node.name, (node.name,)) for node in made.added if not index.is_view(node.name)]
    return ordered(replace(plan, index=index, groups=(*kept, *new), rewrites=(*plan.rewrites, rule.name)))


def _applicable(plan: Plan, group: Group, rule: Rule) -> Replacement | None:
    if group.engine == "authored":
        return None
    made = rule.replacement(plan.index, group.nodes[-1])
    if made is None:
        return None
    for other in plan.groups:
        shares = set(plan.all_nodes(other)) & set(made.removed)
        if shares and other.engine == "authored":
            return None
    return made


class LinearRowSum:
    """`sum(x Wᵀ + b, last dimension) = x · (sum of W's rows) + sum(b)`; a mean alike, with means."""

    name = "linear_row_sum"
    effect = "sums the weight's rows first, so the matrix product becomes a matrix-vector product"

    def replacement(self, index: GraphIndex, node: str) -> Replacement | None:
        total = index.nodes[node]
        reduction = {"aten.sum.dim_IntList": "aten.sum.dim_IntList", "aten.mean.dim": "aten.mean.dim"}.get(total.target)
        if reduction is None or any(named.name == "dtype" and not named.value.none for named in total.kwargs):
            return None
        product = _only_use(index, total.args[0].tensor, node)
        if product is None or product.target != "aten.linear.default":
            return None
        rank = len(product.results[0].spec.shape)
        dims = [value.integer % rank for value in total.args[1].list.values]
        if dims != [rank - 1] or rank < 2:
            return None
        x, weight = product.args[0].tensor, product.args[1].tensor
        bias = product.args[2].tensor if len(product.args) > 2 and product.args[2].tensor else None
        keep = len(total.args) > 2 and total.args[2].boolean
        return Replacement((product.name, node), tuple(_row_sum(index, total, x, weight, bias, keep)))


def _row_sum(
    index: GraphIndex, total: graph_pb2.Node, x: str, weight: str, bias: str | None, keep: bool
) -> Sequence[graph_pb2.Node]:
    name, dtype = total.name, total.results[0].spec.dtype
    inner = index.spec(weight).shape[1]
    column = f"{name}_weight"
    nodes = [
        _call(
            column,
            total.target,
            [_tensor(weight), _integers([0]), _flag(keep)],
            dtype,
            [1, inner][not keep :],
        )
    ]
    if bias is not None:
        nodes.append(
            _call(
                f"{name}_bias",
                total.target,
                [_tensor(bias), _integers([0]), _flag(keep)],
                dtype,
                [1][not keep :],
            )
        )
    shape = list(total.results[0].spec.shape)
    if keep:
        args = [_tensor(x), _tensor(column)] + ([_tensor(f"{name}_bias")] if bias is not None else [])
        return [*nodes, _call(name, "aten.linear.default", args, dtype, shape)]
    vector = "aten.mv.default" if len(index.spec(x).shape) == 2 else "aten.matmul.default"
    if bias is None:
        return [*nodes, _call(name, vector, [_tensor(x), _tensor(column)], dtype, shape)]
    nodes.append(_call(f"{name}_product", vector, [_tensor(x), _tensor(column)], dtype, shape))
    added = [_tensor(f"{name}_product"), _tensor(f"{name}_bias")]
    return [*nodes, _call(name, "aten.add.Tensor", added, dtype, shape)]


def _only_use(index: GraphIndex, tensor: str, user: str) -> graph_pb2.Node | None:
    """The call that makes a tensor which only `user` reads."""
    maker = index.producer(tensor)
    if maker is None or list(index.users(tensor)) != [user] or tensor in index.outputs:
        return None
    return index.nodes[maker]


def _call(
    name: str,
    target: str,
    args: Sequence[tensor_pb2.Value],
    dtype: tensor_pb2.Dtype.ValueType,
    shape: Sequence[int],
) -> graph_pb2.Node:
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    spec = tensor_pb2.TensorSpec(dtype=dtype, shape=shape, strides=strides[::-1])
    return graph_pb2.Node(name=name, target=target, args=args, results=[graph_pb2.NodeResult(name=name, spec=spec)])


def _tensor(name: str) -> tensor_pb2.Value:
    return tensor_pb2.Value(tensor=name)


def _flag(value: bool) -> tensor_pb2.Value:
    return tensor_pb2.Value(boolean=value)


def _integers(values: Sequence[int]) -> tensor_pb2.Value:
    return tensor_pb2.Value(list=tensor_pb2.ValueList(values=[tensor_pb2.Value(integer=value) for value in values]))


RULES: tuple[Rule, ...] = (LinearRowSum(),)
"""Every rule, in the order in which they are proposed."""
