"""What a product of matrices makes, used up in chunks of its rows: it never lies in memory as a whole.

The one idea: calls that keep rows apart, from the product on, are made for some rows at a time. What they leave for
others is small: values of rows, which are joined, and sums over rows, as products of a backward are, which are added
up. What needs one of these as a whole is a loop of its own, in which the product is made again; so is a backward. Which
calls keep rows apart is the business of `row_rules`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from agent_synthesis.graphs import splits
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.graphs.row_rules import Call, Cut, Kind, Rows, Shared, Summed, cut, is_pointwise
from agent_synthesis.rewrite.calls import Draft, Named, Replacement, arguments, operation, replaced
from warpsmith import digest
from warpsmith.graphs import aten, dtypes
from warpsmith.v1 import graph_pb2

PRODUCTS = frozenset({"mm", "addmm", "linear", "matmul"})
"""Calls whose result may be made in chunks."""
_NARROW = (torch.float16, torch.bfloat16)
_MEAN = 1
_LOSSES = frozenset({"cross_entropy_loss", "nll_loss", "nll_loss_nd"})
"""Calls that add up samples, which their parts do not."""
_ANYWHERE = torch.device("cpu")
"""The device on which a graph makes a tensor: the process that runs the graph chooses the real one."""


def chunked(index: GraphIndex, product: str, chunks: int, *, on_gpu: bool) -> graph_pb2.Graph | None:
    """The graph with a product, and what reads it, in so many chunks of rows; None where it cannot be.

    `on_gpu`: 16-bit products are added up in 32 bits by the library's own products of that kind, not by casts.
    """
    whole = _with_samples(index)
    region = _Region.of(whole, product)
    if region is None or not 2 <= chunks <= region.rows:
        return None
    loops = _Loops(whole, region, chunks, on_gpu=on_gpu)
    try:
        return loops.graph()
    except _Apart:
        return None


def rows_of(index: GraphIndex, product: str) -> int:
    """Rows of a product that can be made in chunks; 0 for any other call."""
    region = _Region.of(_with_samples(index), product)
    return region.rows if region is not None else 0


class _Apart(Exception):
    """A call needs rows of other chunks."""


def _with_samples(index: GraphIndex) -> GraphIndex:
    """The graph with losses sample by sample."""
    found = [made for node in index.nodes.values() if (made := _samples(index, node)) is not None]
    if not found:
        return index
    graph = index.graph
    for made in found:
        graph = replaced(graph, made)
    graph.digest = digest.of_graph(graph)
    return GraphIndex(graph, allows_tf32=index.allows_tf32)


def _samples(index: GraphIndex, node: graph_pb2.Node) -> Replacement | None:
    """The loss of each sample and what adds them up, of a call that does both."""
    if operation(node) in _LOSSES:
        return splits.taken_apart(index, node.name)
    if operation(node) != "nll_loss_forward" or not node.results[1].name:
        return None
    given, (loss, counted) = arguments(node), (result.name for result in node.results)
    draft, dtype = Draft(index), dtypes.to_torch(index.spec(counted).dtype)
    if not given["reduction"]:  # a derivative reads what is no weight then
        samples, none = (draft.free(f"{node.name}_{name}") for name in ("samples", "none"))
        draft.calls(samples, [samples, ""], node.target, *given.values())
        draft.call(none, "aten.zeros.default", [], dtype=dtype, device=_ANYWHERE)
        return Replacement((node.name,), tuple(draft.nodes), {loss: samples, counted: none})
    wide = {"dtype": torch.float32} if dtype in _NARROW else {}
    samples = draft.free(f"{node.name}_samples")
    draft.calls(samples, [samples, ""], node.target, *({**given, "reduction": 0}).values())
    total = draft.call(draft.free(f"{node.name}_total"), "aten.sum.default", Named(samples), **wide)
    weight = draft.call(draft.free(f"{node.name}_seen"), "aten.ne.Scalar", given["target"], given["ignore_index"])
    if given["weight"] is not None:  # of class 0 for one that is ignored, which need not be a class
        known = draft.call(draft.free(f"{node.name}_known"), "aten.mul.Tensor", given["target"], weight)
        found = draft.call(draft.free(f"{node.name}_weights"), "aten.take.default", given["weight"], known)
        weight = draft.call(draft.free(f"{node.name}_weighted"), "aten.mul.Tensor", found, weight)
    count = draft.call(draft.free(f"{node.name}_count"), "aten.sum.default", weight, dtype=wide.get("dtype", dtype))
    if given["reduction"] == _MEAN:
        total = draft.call(draft.free(f"{node.name}_mean"), "aten.div.Tensor", total, count)
    renamed = {
        name: draft.call(draft.free(f"{name}_rounded"), "aten._to_copy.default", made, dtype=dtype).name
        if wide
        else made.name
        for name, made in ((loss, total), (counted, count))
        if name
    }
    return Replacement((node.name,), tuple(draft.nodes), renamed)


class _Region:
    """The calls that are made in chunks: which tensors have rows, and in which loop each call is made."""

    def __init__(self, index: GraphIndex, product: str) -> None:
        self.index, self.product = index, product
        self.kinds: dict[str, Kind] = {}
        """Tensor → how its rows lie, or that it is a sum over them."""
        self.loops: dict[str, int] = {}
        """Call → number of its loop."""
        self.rows = self.size = 0
        self.seeds: set[str] = set()
        """Products with which rows begin: the one that is asked about, and others that are as large."""

    @staticmethod
    def of(index: GraphIndex, product: str) -> _Region | None:
        """None where the product's result, or another as large, is needed as a whole."""
        node = index.nodes.get(product)
        if node is None or operation(node) not in PRODUCTS or node.mutates:
            return None
        shape = index.spec(product).shape
        if len(shape) < 2 or 0 in shape:
            return None
        made = _Region(index, product)
        made.rows, made.size = math.prod(shape[:-1]), math.prod(shape)
        alike = {name for name in index.nodes if made._is_alike(name)}
        for seeds in (alike, {name for name in alike if operation(index.nodes[name]) in PRODUCTS}, {product}):
            made.seeds = seeds
            if (found := made._spread(index.nodes)) is None:
                continue
            made.seeds = seeds & made._connected(found)
            found = made._spread(made._leading([name for name in found if name in made._connected(found)]))
            if found is not None and len(found) > 1 and made._levels():
                return made
        return None

    def _is_alike(self, name: str) -> bool:
        """Whether a call is a product of as many rows, or pointwise, and of as many elements at least."""
        node = self.index.nodes[name]
        if node.mutates or len(node.results) != 1 or not (operation(node) in PRODUCTS or is_pointwise(node)):
            return False
        shape = node.results[0].spec.shape
        leads = (math.prod(shape[:lead]) for lead in range(1, len(shape)))
        return self.rows in leads and math.prod(shape) >= self.size

    def _connected(self, among: Sequence[str]) -> set[str]:
        """The calls of `among` that share something with rows with the product, or with others that do."""
        index, found, pending = self.index, {self.product}, [self.product]
        while pending:
            name = pending.pop()
            tensors = [
                each for each in (*index.reads(name), *index.results(name)) if isinstance(self.kinds.get(each), Rows)
            ]
            near = {user for tensor in tensors for user in index.users(tensor)} | {*map(index.producer, tensors)}
            pending += (fresh := [each for each in near & {*among} if each is not None and each not in found])
            found.update(fresh)
        return found

    def is_large(self, tensor: str) -> bool:
        """Whether a tensor with rows is as large as the product's result."""
        return isinstance(self.kinds.get(tensor), Rows) and math.prod(self.index.spec(tensor).shape) >= self.size

    def needed(self, node: str) -> bool:
        """Whether a call is in chunks."""
        return node in self.loops

    def _spread(self, among: Collection[str]) -> list[str] | None:
        """The calls of `among` that keep rows apart, from the product on; None where one that does not reads rows of
        something large."""
        self.kinds.clear()
        found = list[str]()
        for name, node in self.index.nodes.items():
            reads = [tensor for tensor in self.index.reads(name) if tensor in self.kinds]
            is_seed = name in self.seeds
            if not is_seed and not reads:
                continue
            results = None
            if name in among and (is_seed or any(isinstance(self.kinds[each], Rows) for each in reads)):
                made = self.cut(node)
                results = None if made is None else made.results
            if results is None:
                if any(self.is_large(each) for each in reads):
                    return None
                continue
            named = {result.name: kind for result, kind in zip(node.results, results, strict=False) if result.name}
            self.kinds |= {tensor: kind for tensor, kind in named.items() if kind is not None}
            if None in named.values() or any(each in self.index.outputs and self.is_large(each) for each in named):
                return None
            found.append(name)
        return found

    def cut(self, node: graph_pb2.Node) -> Cut | None:
        """A call for some rows."""
        call = Call(node, arguments(node), self.kinds, self.rows, lambda name: list(self.index.spec(name).shape))
        is_first = node.name in self.seeds and self.kinds.keys().isdisjoint(self.index.reads(node.name))
        return cut(call, is_first=is_first)

    def _leading(self, candidates: Sequence[str]) -> set[str]:
        """Those that read or make something large, or lead to what does."""
        found = set[str]()
        for name in reversed(candidates):
            tensors = [*self.index.reads(name), *self.index.results(name)]
            users = {user for tensor in self.index.results(name) for user in self.index.users(tensor)}
            is_row = all(isinstance(self.kinds[tensor], Rows) for tensor in self.index.results(name))
            if any(map(self.is_large, tensors)) or (is_row and users & found):
                found.add(name)
        return found

    def _levels(self) -> bool:
        """Numbers the loops; whether no call outside is written in place by one inside."""
        level = dict[str, int]()
        of_backward = self.index.of_backward
        for name, node in self.index.nodes.items():
            own = 0
            for tensor in self.index.reads(name):
                maker = self.index.producer(tensor)
                if maker is None:
                    continue
                is_joined = maker in self.loops and (
                    not any(result in self.kinds for result in self.index.results(name))
                    or isinstance(self.kinds[tensor], Summed)
                )
                own = max(own, level[maker] + is_joined)
            is_inside = any(result in self.kinds for result in self.index.results(name))
            if is_inside and name in of_backward:
                own = max(own, 1)
            if is_inside:
                self.loops[name] = own
                if node.mutates or node.random:
                    return False
            level[name] = own
        return True


class _Loops:
    """The graph of a region's loops."""

    def __init__(self, index: GraphIndex, region: _Region, chunks: int, *, on_gpu: bool) -> None:
        self._index, self._region, self._on_gpu = index, region, on_gpu
        step = -(-region.rows // chunks)
        self._parts = [(first, min(first + step, region.rows)) for first in range(0, region.rows, step)]
        self._draft = Draft(index)
        self._flat: dict[str, Named] = {}
        """Tensor → the same with its rows as one dimension."""
        self._made_in = {number: self._in_loop(number) for number in sorted(set(region.loops.values()))}
        """Loop → the calls that are made in it."""

    def graph(self) -> graph_pb2.Graph:
        """Raises _Apart where an operand has rows that no view cuts."""
        order = list(self._ordered())
        graph = graph_pb2.Graph()
        graph.CopyFrom(self._index.graph)
        del graph.nodes[:]
        graph.nodes.extend(order)
        graph.digest = digest.of_graph(graph)
        return graph

    def _ordered(self) -> Iterator[graph_pb2.Node]:
        """The calls that are not in chunks as they were, and each loop when all that it reads is there."""
        index, region = self._index, self._region
        after: dict[str, set[str]] = {}
        for earlier, later, _ in index.ordered_pairs:
            after.setdefault(later, set()).add(earlier)
        waiting = {name: node for name, node in index.nodes.items() if not region.needed(name)}
        loops = list(self._made_in)
        done = set[str]()

        def is_ready(name: str) -> bool:
            makers = {index.producer(tensor) for tensor in index.reads(name)} - {None}
            return all(maker in done for maker in (*makers, *after.get(name, ())))

        while waiting or loops:
            ready = [name for name in waiting if is_ready(name)]
            while ready:
                for name in ready:
                    done.add(name)
                    yield waiting.pop(name)
                ready = [name for name in waiting if is_ready(name)]
            if not loops:
                if waiting:
                    raise _Apart
                return
            number = loops.pop(0)
            outside = {tensor for name in self._made_in[number] for tensor in index.reads(name)} - region.kinds.keys()
            if any(maker is not None and maker not in done for maker in map(index.producer, outside)):
                raise _Apart
            self._loop(number)
            done.update(name for name, loop in region.loops.items() if loop == number)
            yield from self._draft.nodes
            del self._draft.nodes[:]

    def _in_loop(self, number: int) -> set[str]:
        """Its calls, and those of earlier ones that are made again in it: of what is large, what is needed."""
        index, region = self._index, self._region
        found = {name for name, loop in region.loops.items() if loop == number and not self._is_large(name)}
        pending = list(found)
        while pending:
            for tensor in index.reads(pending.pop()):
                maker = index.producer(tensor)
                if maker in region.loops and maker not in found and region.is_large(tensor):
                    found.add(maker)
                    pending.append(maker)
        return found

    def _is_large(self, name: str) -> bool:
        return any(map(self._region.is_large, self._index.results(name)))

    def _loop(self, number: int) -> None:
        index, region, made_in = self._index, self._region, self._made_in[number]
        order = [name for name in index.nodes if name in made_in]
        own = [tensor for name in order if region.loops[name] == number for tensor in index.results(name)]
        left = {tensor: list[Named]() for tensor in own if self._is_left(tensor, number)}
        sums: dict[str, Named | None] = {each: None for each in own if isinstance(region.kinds[each], Summed)}
        for place, (begin, end) in enumerate(self._parts):
            chunk = _Chunk(self, place, begin, end)
            for name in order:
                chunk.make(name, sums)
            for tensor, parts in left.items():
                parts.append(chunk.made[tensor])
        for tensor, parts in left.items():
            self._join(tensor, parts)
        for tensor, total in sums.items():
            assert total is not None
            self._finish(tensor, total)

    def _is_left(self, tensor: str, number: int) -> bool:
        """Whether others than the calls of its loop read rows of a tensor."""
        if not isinstance(self._region.kinds[tensor], Rows) or self._region.is_large(tensor):
            return False
        users = {*self._index.users(tensor)}
        others = (made_in for loop, made_in in self._made_in.items() if loop != number)
        return (
            tensor in self._index.outputs
            or not users <= self._region.loops.keys()
            or any(map(users.intersection, others))
        )

    def _join(self, tensor: str, parts: Sequence[Named]) -> None:
        shape = list(self._index.spec(tensor).shape)
        kind = self._region.kinds[tensor]
        assert isinstance(kind, Rows)
        is_whole = kind.lead == 1
        name = tensor if is_whole else self._draft.free(f"{tensor}_rows")
        joined = self._draft.call(name, "aten.cat.default", list(parts), kind.dim)
        if not is_whole:
            self._draft.view(tensor, "aten.view.default", joined, shape)

    def _finish(self, tensor: str, total: Named) -> None:
        spec, made = self._index.spec(tensor), self._draft.meta(total.name)
        wanted = dtypes.to_torch(spec.dtype)
        if made.dtype is not wanted:
            total = self._draft.call(
                self._draft.free(f"{tensor}_rounded"), "aten._to_copy.default", total, dtype=wanted
            )
        if list(made.shape) != list(spec.shape):
            self._draft.view(tensor, "aten.view.default", total, list(spec.shape))
        else:
            self._draft.rename(total, tensor)


class _Chunk:
    """Some rows of all that a loop makes."""

    def __init__(self, loops: _Loops, number: int, begin: int, end: int) -> None:
        self._loops, self._number, self._begin, self._end = loops, number, begin, end
        self._index, self._region, self._draft = loops._index, loops._region, loops._draft
        self.made: dict[str, Named] = {}
        """Tensor → its rows."""

    def make(self, name: str, sums: dict[str, Named | None]) -> None:
        """Makes a call for these rows; sums are added to those of the chunks before."""
        node = self._index.nodes[name]
        given = self._given(node)
        results = [result.name for result in node.results]
        if any(isinstance(self._region.kinds.get(tensor), Summed) for tensor in results):
            (tensor,) = results
            if tensor in sums:
                sums[tensor] = self._added(tensor, node, given, sums[tensor])
            return
        names = [tensor and self._draft.free(f"{tensor}_{self._number}") for tensor in results]
        target, args, kwargs = given
        made = self._draft.calls(names[0] or self._draft.free(f"{name}_{self._number}"), names, target, *args, **kwargs)
        if self._index.is_view(name):
            self._draft.nodes[-1].results[0].alias_of = next(each.name for each in args if isinstance(each, Named))
        self.made |= {tensor: part for tensor, part in zip(results, made, strict=True) if tensor}

    def _given(self, node: graph_pb2.Node) -> tuple[str, list[Any], dict[str, Any]]:
        """Target and arguments of a call for these rows."""
        made = self._region.cut(node)
        assert made is not None
        target, args, kwargs = made.target or node.target, list[Any](), dict[str, Any]()
        values = {**arguments(node), **made.changed}
        for argument in aten.resolve(target)._schema.arguments:
            value = values[argument.name]
            match made.operands.get(argument.name) if isinstance(value, Named) else None:
                case Rows(lead, dim):
                    value = self._rows(value.name, dim, lead)
                case Shared(lead):
                    value = self._shared(value.name, lead)
            if argument.kwarg_only:
                kwargs[argument.name] = value
            else:
                args.append(value)
        return target, args, kwargs

    def _added(self, tensor: str, node: graph_pb2.Node, given: Any, before: Named | None) -> Named:
        """The sum of this chunk's rows and of those before: in 32 bits where results have 16."""
        target, args, kwargs = given
        draft, name = self._draft, self._draft.free(f"{tensor}_{self._number}")
        is_narrow = dtypes.to_torch(self._index.spec(tensor).dtype) in _NARROW
        if operation(node) != "mm":
            kwargs = {**kwargs, "dtype": torch.float32} if is_narrow else kwargs
            made = draft.call(name, target, *args, **kwargs)
            return made if before is None else draft.into(draft.free(f"{name}_sum"), "aten.add_.Tensor", before, made)
        if is_narrow and self._loops._on_gpu:
            if before is None:
                return draft.call(name, "aten.mm.dtype", *args, torch.float32)
            return draft.into(name, "aten.addmm.dtype_out", before, *args, torch.float32, out=before)
        if is_narrow:
            args = [
                draft.call(draft.free(f"{name}_wide"), "aten._to_copy.default", each, dtype=torch.float32)
                for each in args
            ]
        return (
            draft.call(name, "aten.mm.default", *args)
            if before is None
            else draft.into(name, "aten.addmm_.default", before, *args)
        )

    def _rows(self, tensor: str, dim: int, lead: int) -> Named:
        """These rows of a tensor whose dimensions from `dim` on, `lead` of them, are rows."""
        if tensor in self.made:
            return self.made[tensor]
        if self._region.is_large(tensor):
            raise _Apart
        draft = self._draft
        if lead > 1 and tensor not in self._loops._flat:
            shape = list(self._index.spec(tensor).shape)
            try:
                self._loops._flat[tensor] = draft.view(
                    draft.free(f"{tensor}_flat"), "aten.view.default", Named(tensor), [self._region.rows, *shape[lead:]]
                )
            except RuntimeError:
                raise _Apart from None
        whole = self._loops._flat.get(tensor, Named(tensor))
        name = draft.free(f"{tensor}_{self._number}")
        self.made[tensor] = draft.view(name, "aten.slice.Tensor", whole, dim, self._begin, self._end)
        return self.made[tensor]

    def _shared(self, tensor: str, lead: int) -> Named:
        """A tensor that has the same for all rows, without some dimensions of one element in front."""
        if lead <= 1:
            return Named(tensor)
        key = f"{tensor}/{lead}"
        if key not in self._loops._flat:
            shape = list(self._index.spec(tensor).shape)
            name = self._draft.free(f"{tensor}_all")
            self._loops._flat[key] = self._draft.view(name, "aten.view.default", Named(tensor), shape[lead - 1 :])
        return self._loops._flat[key]
