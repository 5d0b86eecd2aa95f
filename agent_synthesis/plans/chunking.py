"""A product and what uses it up in chunks of its rows, as a move: plan zero over the graph that has the chunks.

The one idea: chunks are calls like others, so all other moves work on them, and what is alike in all of them is done to
all at once. How many there are is chosen: more hold less memory, fewer fill a GPU better. What becomes of the graph is
the business of `graphs.chunks`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace

from agent_synthesis.graphs import chunks
from agent_synthesis.graphs.graph_index import GraphIndex, byte_count
from agent_synthesis.plans.partition import Group, Partition
from agent_synthesis.plans.plan import Plan
from agent_synthesis.rewrite.calls import operation
from warpsmith.errors import IllegalMove
from warpsmith.v1 import analysis_pb2, task_pb2

CHOICE = "chunks"
"""Choice of such a rewrite, and the name of its argument."""
COUNTS = (4, 8, 16)
"""How many are offered."""
_MOST_LEFT = 0.8
"""Of what a plan holds, where chunks are offered."""
_LEAST_ROWS = 128
"""Of a chunk that is offered: a product of fewer does not fill a GPU."""
_LEAST_BYTES = 64 << 20
"""Of a result that is offered to be made in chunks."""


def chunked(plan: Plan, move: analysis_pb2.Move) -> Plan:
    """The plan over the graph with a product in chunks.

    Raises:
        IllegalMove: it is no such number, kernels of ours are there already, or rows of the product are not used up
            one by one.
    """
    count = dict(move.arguments).get(CHOICE, 0)
    plan.group(move.group)
    if any(group.engine != "library" for group in plan.groups):
        raise IllegalMove("chunks are made while all groups are library calls")
    index = _chunked(plan.index, move.group, count, plan.target == task_pb2.TARGET_CUDA)
    if index is None:
        raise IllegalMove(
            f"{move.group} is not made in {count} {CHOICE}: it is no product of matrices of so many rows, or something "
            "as large as its result mixes rows or is given back"
        )
    groups = tuple(Group(node.name, (node.name,)) for node in index.graph.nodes if not index.is_view(node.name))
    return replace(plan, partition=Partition(index, groups))


def candidates(plan: Plan) -> Iterator[tuple[analysis_pb2.Move, str]]:
    """Moves worth trying, with their effect in words: of the first product whose result is as large as anything made.

    To find out costs a graph each, so that networks of many products are not asked about all.
    """
    if any(group.engine != "library" for group in plan.groups):
        return
    largest = max((_bytes(plan, group) for group in plan.groups), default=0)
    for group in plan.groups:
        what = operation(plan.index.nodes[group.name])
        if what not in chunks.PRODUCTS or _bytes(plan, group) < max(largest, _LEAST_BYTES):
            continue
        rows, held = chunks.rows_of(plan.index, group.name), held_bytes(plan)
        for count in (count for count in COUNTS if rows >= count * _LEAST_ROWS):
            move = analysis_pb2.Move(
                kind=analysis_pb2.MOVE_KIND_REWRITE, group=group.name, choice=CHOICE, arguments={CHOICE: count}
            )
            left = held_bytes(chunked(plan, move))
            if left <= _MOST_LEFT * held:
                effect = f"makes {what} and what uses it up in {count} chunks of its rows after each other, and holds "
                yield move, f"{effect}{left / 1e6:,.0f} MB between calls instead of {held / 1e6:,.0f}"
        return


def _bytes(plan: Plan, group: Group) -> int:
    """Of the largest tensor that a group makes."""
    return max((byte_count(plan.index.spec(tensor)) for tensor in plan.outputs(group)), default=0)


def held_bytes(plan: Plan) -> int:
    """Most memory that results of groups take at once, beside what is given and what is given back."""
    index, places = plan.index, plan.partition.places
    given_back = {index.root[tensor] for tensor in index.base_tensors(index.graph.outputs)[0]}
    first, last = dict[str, int](), dict[str, int]()
    for group in plan.groups:
        for tensor in plan.outputs(group):
            memory, readers = index.root[tensor], plan.partition.readers[tensor]
            if memory not in given_back and memory not in index.sources:
                first.setdefault(memory, places[group.name])
                last[memory] = max(last.get(memory, 0), *(places[name] for name in readers))
    change = [0] * (len(plan.groups) + 1)
    for memory, place in first.items():
        change[place] += byte_count(index.spec(memory))
        change[last[memory] + 1] -= byte_count(index.spec(memory))
    return max(itertools.accumulate(change))


def holds_more(made: Plan, plan: Plan) -> bool:
    """Whether a plan that was made of one with chunks holds more than that: rows of several chunks at once, or from the
    forward to the backward."""
    if not any(move.choice == CHOICE for move in plan.moves):
        return False
    return held_bytes(made) > held_bytes(plan) or _kept_bytes(made) > _kept_bytes(plan)


def _kept_bytes(plan: Plan) -> int:
    """Of a training step, what groups of the forward make and others read."""
    forward, readers = plan.index.of_forward, plan.partition.readers
    early = {group.name for group in plan.groups if not forward.isdisjoint(group.nodes)}
    made = (tensor for group in plan.groups if group.name in early for tensor in plan.outputs(group))
    return sum(byte_count(plan.index.spec(tensor)) for tensor in made if readers[tensor] - early - {""})


@functools.lru_cache(maxsize=16)
def _chunked(index: GraphIndex, product: str, count: int, on_gpu: bool) -> GraphIndex | None:
    """One for each graph: what was found out about its calls is kept by it."""
    graph = chunks.chunked(index, product, count, on_gpu=on_gpu)
    return None if graph is None else GraphIndex(graph, allows_tf32=index.allows_tf32)
