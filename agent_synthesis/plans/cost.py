"""Counts what groups must read, write and compute, from their definitions: the roofline's numbers.

Library calls are counted from the shapes of their arguments, kernels of ours from their loops. Nothing is
measured here, and caches are not modelled beyond what a schedule says of itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from agent_synthesis.bundle import Bundle
from agent_synthesis.graphs import biases, layouts
from agent_synthesis.graphs.einsum import MOST_OPERANDS, Einsum, Order
from agent_synthesis.graphs.graph_index import GraphIndex, byte_count
from agent_synthesis.lowering.groups import lower
from agent_synthesis.nests.analysis.convolution import convolves
from agent_synthesis.nests.analysis.products.decoded_product import decoded_product
from agent_synthesis.nests.analysis.products.scaled_product import scaled_product
from agent_synthesis.nests.attention import attention_of
from agent_synthesis.nests.calls.attention_backward import AttentionBackward
from agent_synthesis.nests.calls.recurrence import Recurrence
from agent_synthesis.nests.ir import AxisValue, Call, Expression, Index, Load, Memory, Nest
from agent_synthesis.nests.product import elements_and_rows, matrix_product
from agent_synthesis.nests.tailed import Tailed
from agent_synthesis.plans.partition import Group
from agent_synthesis.plans.plan import Plan
from warpsmith import program_steps
from warpsmith.graphs import aten, kept
from warpsmith.graphs.library import attention as attention_calls
from warpsmith.program_steps import LOOP, tensor_names
from warpsmith.v1 import analysis_pb2, graph_pb2, task_pb2, tensor_pb2

_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})


def of_group(plan: Plan, group: Group) -> analysis_pb2.Cost:
    """Work of a group in a call of the plan: none where it is kept from call to call."""
    if plan.is_kept(group):
        return analysis_pb2.Cost()
    if group.engine == "authored":
        nest = plan.nest(group)
        assert isinstance(nest, Nest), nest
        cost = at_once(plan, group) if isinstance(nest, Recurrence | AttentionBackward) else of_nest(nest)
        footprint = plan.schedule(group).footprint(nest, group.settings)
        cost.launch_count = footprint.launch_count
        cost.parallel_count = footprint.parallel_count
        cost.extra_bytes = footprint.extra_bytes
        if footprint.tensor_flop_count:
            if convolves(nest):  # whose multiply-adds count as operations elsewhere
                cost.operation_count -= cost.product_flop_count // 2
            cost.tensor_flop_count, cost.product_flop_count = footprint.tensor_flop_count, 0
        return cost
    if group.engine == "written":
        return at_once(plan, group)
    cost = total(of_call(plan.index, node) for node in group.nodes)
    if plan.target == task_pb2.TARGET_CUDA:
        moved = (layouts.converted_bytes, layouts.repeated_bytes, biases.added_bytes)
        cost.extra_bytes = sum(of(plan.index, node) for of in moved for node in group.nodes)
        for node in group.nodes:
            flops = product_flops(plan.index, plan.index.nodes[node])
            if each := layouts.tensor_cost(plan.index, node):
                cost.product_flop_count -= flops
                cost.tensor_flop_count += each * flops
    return cost


def at_once(plan: Plan, group: Group) -> analysis_pb2.Cost:
    """Work of a group's calls in one kernel that reads and writes each tensor once."""
    cost = total(of_call(plan.index, node) for node in plan.all_nodes(group))
    cost.read_bytes = sum(byte_count(plan.index.spec(tensor)) for tensor in plan.reads(group))
    cost.write_bytes = sum(byte_count(plan.index.spec(tensor)) for tensor in plan.outputs(group))
    cost.launch_count = 1
    return cost


def total(costs: Iterable[analysis_pb2.Cost]) -> analysis_pb2.Cost:
    """Sum of costs; of what can be busy at once, the greatest."""
    result = analysis_pb2.Cost()
    for cost in costs:
        result.read_bytes += cost.read_bytes
        result.write_bytes += cost.write_bytes
        result.operation_count += cost.operation_count
        result.product_flop_count += cost.product_flop_count
        result.tensor_flop_count += cost.tensor_flop_count
        result.launch_count += cost.launch_count
        result.extra_bytes += cost.extra_bytes
        result.parallel_count = max(result.parallel_count, cost.parallel_count)
    return result


def of_call(index: GraphIndex, name: str) -> analysis_pb2.Cost:
    """Work of one library call: arguments read once, results written once. How it spreads is not known
    (0)."""
    node = index.nodes[name]
    written = [r.spec for r in node.results if r.name and not r.alias_of]
    written += [index.spec(tensor) for tensor in node.mutates]
    specs = [index.spec(tensor) for tensor in index.reads(name)]
    if (einsum := _einsum_of(index, node)) is not None:
        return _of_einsum(einsum, einsum.written_order(), byte_count(written[0]) // max(1, _elements(written[0])))
    if node.target == LOOP:
        return _of_loop(index, node)
    flops = product_flops(index, node)
    operations = 0
    if not flops:
        nest = lower(index, (name,), tuple(index.results(name)[:1])) if index.results(name) else None
        elements = max((_elements(spec) for spec in [*specs, *written]), default=0)
        operations = of_nest(nest).operation_count if isinstance(nest, Nest) else elements
    return analysis_pb2.Cost(
        read_bytes=sum(map(byte_count, specs)),
        write_bytes=sum(map(byte_count, written)),
        operation_count=operations,
        product_flop_count=flops,
        launch_count=_launches(index, node),
    )


def _of_loop(index: GraphIndex, node: graph_pb2.Node) -> analysis_pb2.Cost:
    """A step's calls, as often as there are steps."""
    steps, body = (
        index.spec(node.args[1].list.values[0].tensor).shape[0],
        GraphIndex(program_steps.body(node.args[0].text)),
    )
    cost = total(of_call(body, each) for each in body.nodes if not body.is_view(each))
    for field in ("read_bytes", "write_bytes", "operation_count", "product_flop_count", "launch_count"):
        setattr(cost, field, steps * getattr(cost, field))
    return cost


def _einsum_of(index: GraphIndex, node: graph_pb2.Node) -> Einsum | None:
    if aten.operation(node.target) != "einsum":
        return None
    shapes = [index.spec(tensor).shape for tensor in tensor_names(aten.arguments_of(node))]
    found = Einsum.of(node.args[0].text, shapes)
    return found if found is not None and len(found.terms) > 1 else None


def _orders(einsum: Einsum) -> list[Order]:
    return [einsum.written_order(), *([einsum.best_order()] if len(einsum.terms) <= MOST_OPERANDS else [])]


def _of_einsum(einsum: Einsum, order: Order, item: int = 1) -> analysis_pb2.Cost:
    """Two operands after two, each result stored and read again. `item`: bytes of an element."""
    cost = analysis_pb2.Cost()
    for step in einsum.steps(order):
        cost.read_bytes += item * (einsum.size(step.first) + einsum.size(step.second))
        cost.write_bytes += item * einsum.size(step.made)
        operations = einsum.size(step.united)
        if len(step.united) > len(step.made):
            cost.product_flop_count += 2 * operations
        else:
            cost.operation_count += operations
        cost.launch_count += 1
    return cost


def _launches(index: GraphIndex, node: graph_pb2.Node) -> int:
    """Kernels of one library call, as far as they matter: a recurrent network multiplies and applies its gates in
    every step, layer and direction."""
    if aten.operation(node.target) not in _RECURRENT or not node.target.endswith(".input"):
        return 1
    values, *others = (index.spec(name).shape for name in tensor_names(aten.arguments_of(node)))
    is_batch_first = node.args[-1].boolean
    matrices = sum(len(shape) == 2 for shape in others)  # two for each layer and direction
    return values[1 if is_batch_first else 0] * matrices


def of_nest(nest: Nest) -> analysis_pb2.Cost:
    """Bytes of the elements that a nest touches, each once, and its operations over all iterations."""
    if isinstance(nest, Bundle):
        return total(of_nest(member.nest) for member in nest.members)
    if isinstance(nest, Tailed):
        return _of_tailed(nest)
    values = [r.value for r in nest.reductions] + [s.value for s in nest.stores]
    loads: dict[str, list[Index]] = {}
    looked_into = set[str]()
    for node in _distinct(values):
        if isinstance(node, Memory):
            looked_into.add(node.buffer)
        if isinstance(node, Load):
            loads.setdefault(node.buffer, []).append(node.index)
    read = write = 0
    for buffer in nest.buffers:
        if buffer.name in looked_into:
            read += min(buffer.element_count, nest.row_count * nest.column_count) * buffer.type.size_bytes
        if buffer.name in loads:
            read += min(buffer.element_count, _reach(nest, loads[buffer.name])) * buffer.type.size_bytes
    for store in nest.stores:
        buffer = nest.buffer(store.buffer)
        write += min(buffer.element_count, _reach(nest, [store.index])) * buffer.type.size_bytes
    points = nest.row_count * nest.column_count
    if nest.segments:  # together, the parts of rows are one row
        points = nest.column_count * _columns_of_segments(nest)
    if (parts := elements_and_rows(nest)) is not None:
        product_flops = 2 * points * parts[0].column_count
        cost = of_nest(parts[1])
        cost.read_bytes, cost.write_bytes, cost.product_flop_count = read, write, product_flops
        return cost
    decoded = decoded_product(nest)
    if (scaled := scaled_product(nest)) is not None:
        nest = scaled.nest
    product = matrix_product(nest) or attention_of(nest) or (decoded.product if decoded else None)
    if product is not None:
        operations = nest.row_count * _calls(store.value for store in nest.stores)
        if decoded is not None:
            operations += decoded.weight.row_count * _calls(store.value for store in decoded.weight.stores)
        return analysis_pb2.Cost(
            read_bytes=read,
            write_bytes=write,
            operation_count=operations,
            product_flop_count=product.flop_count,
            launch_count=1,
            parallel_count=nest.row_count,
        )
    product_flops = 2 * points if convolves(nest) else 0
    element_values = [r.value for r in nest.reductions if not product_flops]
    element_values += [s.value for s in nest.stores if nest.is_element_store(s)]
    row_values = [s.value for s in nest.stores if not nest.is_element_store(s)]
    operations = points * (_calls(element_values) + len(nest.reductions)) + nest.row_count * _calls(row_values)
    return analysis_pb2.Cost(
        read_bytes=read,
        write_bytes=write,
        operation_count=operations,
        product_flop_count=product_flops,
        launch_count=1,
        parallel_count=nest.row_count,
    )


def _of_tailed(nest: Tailed) -> analysis_pb2.Cost:
    """Work of both nests, but for the bytes of what is between them."""
    cost, between = total(map(of_nest, nest.members)), nest.result
    cost.write_bytes -= between.element_count * between.type.size_bytes
    cost.read_bytes -= between.element_count * between.type.size_bytes
    return cost


def _columns_of_segments(nest: Nest) -> int:
    """Points of the axes along which segments begin and end at the same places."""
    ends = [part for segment in nest.segments for part in segment.parts[1:]]
    along = {axis for part in _distinct(ends) if isinstance(part, Load | AxisValue) for axis in part.index.axes()}
    return math.prod(axis.extent for axis in nest.parallel if axis.name not in along)


def minimum(plan: Plan) -> analysis_pb2.Cost:
    """Least work of any plan: sources read once, outputs and state written once, matrix products as they
    stand. Without what never changes (on the prepared track parameters too), for how small that can be made is
    not known."""
    index = plan.index
    calls = [name for name in index.nodes if name not in plan.kept_calls]
    used = {tensor for name in calls for tensor in index.reads(name)} | index.outputs
    varying = kept.varying_origins(plan.prepared)
    used -= {name for name, source in index.sources.items() if source.origin not in varying}
    written = {index.root[tensor] for tensor in index.outputs if index.root[tensor] not in index.sources}
    written |= set(aten.written_sources(index.graph))
    return analysis_pb2.Cost(
        read_bytes=sum(byte_count(index.spec(name)) for name in index.sources if name in used),
        write_bytes=sum(byte_count(index.spec(name)) for name in written),
        operation_count=sum(_elements(index.spec(name)) for name in written),
        product_flop_count=sum(product_flops(index, index.nodes[name]) for name in calls),
        launch_count=1,
    )


def product_flops(index: GraphIndex, node: graph_pb2.Node) -> int:
    """Floating-point operations of a matrix product, convolution, attention or recurrence; 0 for anything
    else."""
    kind = aten.operation(node.target)
    shapes = [list(index.spec(name).shape) for name in tensor_names(aten.arguments_of(node))]
    result = list(node.results[0].spec.shape) if node.results else []
    if kind in ("linear", "matmul", "mm", "bmm", "mv", "dot"):
        return 2 * math.prod(result) * shapes[0][-1]
    if kind in ("addmm", "baddbmm", "addmv", "addbmm"):
        return 2 * math.prod(result) * shapes[1][-1]
    if kind == "bilinear":
        return 2 * math.prod(result) * shapes[2][1] * shapes[2][2]
    if kind.startswith("conv_transpose"):
        return 2 * math.prod(shapes[0]) * math.prod(shapes[1][1:])
    if kind.startswith("conv"):
        return 2 * math.prod(result) * math.prod(shapes[1][1:])
    if kind == "scaled_dot_product_attention":
        query, key, value = shapes[:3]
        return 2 * math.prod(query[:-2]) * _scores(node, query[-2], key[-2]) * (query[-1] + value[-1])
    if node.target in attention_calls.PRODUCTS:
        return 2 * attention_calls.PRODUCTS[node.target] * attention_calls.pair_count(node, index.spec) * shapes[0][-1]
    if kind in _RECURRENT:
        steps = math.prod(shapes[0][:-1])
        return 2 * steps * sum(math.prod(shape) for shape in shapes if len(shape) == 2 and shape != shapes[0])
    if kind == "einsum":
        einsum = _einsum_of(index, node)
        return 0 if einsum is None else min(_of_einsum(einsum, order).product_flop_count for order in _orders(einsum))
    return 0


def _scores(node: graph_pb2.Node, queries: int, keys: int) -> int:
    """Pairs of a query and a key that attention multiplies: of a causal one row m has m + 1 keys."""
    named = {each.name: each.value for each in node.kwargs}
    is_causal = named.get("is_causal") or (node.args[5] if len(node.args) > 5 else None)
    if is_causal is None or not is_causal.boolean:
        return queries * keys
    whole = min(queries, keys)
    return whole * (whole + 1) // 2 + (queries - whole) * keys


def _elements(spec: tensor_pb2.TensorSpec) -> int:
    return math.prod(spec.shape)


def _reach(nest: Nest, indices: Sequence[Index]) -> int:
    """Elements that some indices can reach at most: the extents of the axes they use, for each index once."""
    extents = nest.extents
    return sum(math.prod(extents[axis] for axis in index.axes()) for index in dict.fromkeys(indices))


def _calls(values: Iterable[Expression]) -> int:
    return sum(isinstance(node, Call) for node in _distinct(values))


def _distinct(values: Iterable[Expression]) -> list[Expression]:
    seen: dict[Expression, None] = {}
    by_identity: set[int] = set()
    pending = list(values)
    while pending:
        node = pending.pop()
        if id(node) in by_identity:
            continue
        by_identity.add(id(node))
        seen[node] = None
        if isinstance(node, Call):
            pending += node.arguments
    return list(seen)
