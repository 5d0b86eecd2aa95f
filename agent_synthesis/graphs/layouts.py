"""A graph laid out anew: convolutions read and give channels-last, and the calls behind them keep it as PyTorch does.

The one idea: calls stay as they are. Those that read a tensor in another layout than before are tried on tensors
without data, which says how PyTorch lays their results out, so that a layout runs on through norms, sums and pooling by
itself. Copies stand at its borders alone: where a convolution reads something else, where a call needs the old strides,
and where an output promises them. Memory that is written in place is never split in two: it keeps its old layout.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from agent_synthesis.graphs.graph_index import GraphIndex, byte_count
from agent_synthesis.graphs.sequences import as_images
from agent_synthesis.nests.analysis.convolution import FEW_CHANNELS
from agent_synthesis.rewrite.calls import arguments, operation, rename
from warpsmith import digest
from warpsmith.graphs import aten, dtypes
from warpsmith.v1 import graph_pb2, tensor_pb2

_REPEATED: Final = 2
"""Passes over data and result that are counted for a convolution channel by channel, beside the first: not all of the
4.4, for large windows take longer by arithmetic, which is counted too."""
_CONVOLUTIONS: Final = frozenset({
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution",
})  # fmt: skip
_FORMATS: Final = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Channels-last, by the number of dimensions. Sequences have none: they are laid out as images."""
_RANKS: Final = frozenset({3, *_FORMATS})
_TYPES: Final = frozenset({tensor_pb2.DTYPE_FLOAT32, tensor_pb2.DTYPE_FLOAT16, tensor_pb2.DTYPE_BFLOAT16})
"""Of wider types libraries convolve contiguous tensors only."""
_OF_MEMORY: Final = frozenset({"as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter", "_reshape_alias"})
"""Operations whose values depend on where elements lie."""
_ANYWHERE: Final = torch.device("cpu")
"""Where tensors without data seem to lie, as in a capture."""
_MOST_TRIALS: Final = 64
"""Memories that may turn out to have to stay as they are; each begins anew."""


def channels_last(index: GraphIndex) -> graph_pb2.Graph | None:
    """The graph with its convolutions channels-last; None where no convolution would be laid out otherwise than it is.

    Names stay; new are copies only, and views of sequences as images. Outputs keep their strides and what they share
    memory with.
    """
    index = as_images(index)
    convolutions = [node for node in index.nodes.values() if _convolved(index, node)]
    pinned: set[str] = set()
    for _ in range(_MOST_TRIALS if convolutions else 0):
        try:
            made = _Layout(index, pinned)
            graph = made.graph()
        except _Pinned as stays:
            if stays.root in pinned:
                return None
            pinned.add(stays.root)
            continue
        changed = any(result.name in made.specs for node in convolutions for result in node.results)
        return graph if changed else None
    return None


def converted_bytes(index: GraphIndex, name: str) -> int:
    """Bytes that a library moves to convolve contiguous tensors by its kernels for channels-last.

    A read and a write of what it reads and makes; 0 for any other call, and for convolutions channel by channel, which
    have kernels for contiguous tensors.
    """
    node = index.nodes[name]
    found = _convolved(index, node)
    if found is None or index.spec(found[1]).shape[1] == 1:
        return 0
    specs = [*map(index.spec, found), node.results[0].spec]
    return sum(2 * byte_count(spec) for spec in specs if not _is_last(spec))


def repeated_bytes(index: GraphIndex, name: str) -> int:
    """Bytes that a library could have moved besides while it convolves channel by channel; 0 for any other call.

    An H200's fastest call of KernelBench's five takes 5.4 times as long as what is read and made would take.
    """
    node = index.nodes[name]
    found = _convolved(index, node)
    if found is None or index.spec(found[1]).shape[1] != 1 or index.spec(found[0]).shape[1] == 1:
        return 0
    return _REPEATED * sum(byte_count(spec) for spec in (index.spec(found[0]), node.results[0].spec))


def tensor_cost(index: GraphIndex, name: str) -> int:
    """Products of 16 bits in whose time a library's tensor cores make one of a convolution's; 0 where they make none.

    Floats they multiply in TF32, at half the rate; of few channels of a group a library makes what is summed in floats.
    """
    node = index.nodes[name]
    found = _convolved(index, node)
    if found is None:
        return 0
    data, weight = (index.spec(each) for each in found)
    read, made = data.shape[1], node.results[0].spec.shape[1]
    groups = (made if operation(node).startswith("conv_transpose") else read) // weight.shape[1]
    if min(read, made) // groups < FEW_CHANNELS:
        return 0
    return 2 if data.dtype == tensor_pb2.DTYPE_FLOAT32 else 1


class _Pinned(Exception):
    """Memory that has to keep its layout: the graph is to be laid out again with that known."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.root = root


_Copies = Mapping[str, torch.memory_format]
"""Tensor → the format that a call is to read a copy of it in."""
_NO_COPIES: _Copies = {}


class _Layout:
    """Walks a graph once."""

    def __init__(self, index: GraphIndex, pinned: Iterable[str]) -> None:
        self._index = index
        self._pinned = frozenset(pinned)
        self._copies: dict[tuple[str, torch.memory_format], str] = {}
        self._nodes: list[graph_pb2.Node] = []
        self._taken = {*index.root, *index.nodes}
        self._last_write = {root: index.position[name] for name in index.nodes for root in index.writes(name)}
        self.specs: dict[str, tensor_pb2.TensorSpec] = {}
        """Of tensors that are laid out otherwise than before."""

    def graph(self) -> graph_pb2.Graph:
        """The graph. Raises _Pinned."""
        with FakeTensorMode(), torch.no_grad():
            for node in self._index.graph.nodes:
                self._lay_out(node)
            outputs = {name: self._promised(name) for name in self._index.graph.outputs}
        made = graph_pb2.Graph()
        made.CopyFrom(self._index.graph)
        del made.nodes[:]
        made.nodes.extend(self._nodes)
        made.outputs[:] = [outputs[name] for name in made.outputs]
        self._check_sharing(made)
        made.digest = digest.of_graph(made)
        return made

    # -- calls

    def _lay_out(self, node: graph_pb2.Node) -> None:
        moved = [name for name in self._index.reads(node.name) if name in self.specs]
        if not self._keeps(node) and (self._convolve(node) or (moved and self._accept(node, self._tried(node, {})))):
            return
        root = self._index.root
        shared = {root[name] for name in (*node.mutates, *(result.alias_of for result in node.results)) if name}
        split = [name for name in moved if root[name] in shared]
        if len(split) > 1 or any(not self._is_settled(name, node) for name in split):
            raise _Pinned(root[split[0]])  # a copy would be written, or read, in place of the tensor
        names = {name: self._restored(name, is_settled=self._is_settled(name, node)) for name in moved}
        self._append(node, names)

    def _keeps(self, node: graph_pb2.Node) -> bool:
        """Whether a call has to read the strides that it read before. Random numbers are drawn in order of memory."""
        if node.random or aten.is_outside(node.target) or operation(node) in _OF_MEMORY:
            return True
        return any(self._index.root[result] in self._pinned for result in self._index.results(node.name))

    def _convolve(self, node: graph_pb2.Node) -> bool:
        """Appends a convolution with copies of what it reads in another layout; False where nothing is to be done."""
        found = _convolved(self._index, node)
        if found is None:
            return False
        needed = {name: _format_of(self._spec(name)) for name in found if not _is_last(self._spec(name))}
        # Both layouts are one where there is one channel: then the strides of the weight tell which is meant.
        for copies in (needed, {**needed, found[1]: _format_of(self._spec(found[1]))}):
            results = self._tried(node, copies)
            if results is not None and _is_last(results[0].spec):
                return bool(copies) and self._accept(node, results, copies)
        return False

    def _accept(
        self, node: graph_pb2.Node, results: Sequence[graph_pb2.NodeResult] | None, copies: _Copies = _NO_COPIES
    ) -> bool:
        """Appends a call that was tried; False where it is refused."""
        if results is None:
            return False
        names = {
            name: self._copied(name, form, is_settled=self._is_settled(name, node)) for name, form in copies.items()
        }
        made = self._append(node, names)
        for old, new, result in zip(node.results, results, made.results, strict=True):
            result.CopyFrom(new)
            result.alias_of = names.get(new.alias_of, new.alias_of)
            if new.spec != old.spec:
                self.specs[old.name] = new.spec
        return True

    def _tried(self, node: graph_pb2.Node, copies: _Copies) -> list[graph_pb2.NodeResult] | None:
        """The results of a call as PyTorch lays them out; None where it refuses to, or they would not share memory as
        they did."""
        given = {name: self._empty(name) for name in self._index.reads(node.name)}
        given |= {name: given[name].clone(memory_format=form) for name, form in copies.items()}
        try:
            made = aten.call(node.target, node.args, node.kwargs, given.__getitem__, _ANYWHERE)
        except Exception:  # whatever PyTorch raises of a view that would need a copy
            return None
        places = {_storage(tensor): name for name, tensor in reversed(given.items())}
        results = []
        for old, tensor in zip(node.results, made, strict=False):
            new = graph_pb2.NodeResult(name=old.name)
            if old.name:
                if tensor is None:
                    return None
                new.spec.CopyFrom(dtypes.spec_of(tensor))
                new.alias_of = places.get(_storage(tensor), "")
                is_same = (new.spec.dtype, new.spec.shape) == (old.spec.dtype, old.spec.shape)
                if not is_same or not self._shares_alike(node, old, new):
                    return None
            results.append(new)
        return results if len(results) == len(node.results) else None

    def _shares_alike(self, node: graph_pb2.Node, old: graph_pb2.NodeResult, new: graph_pb2.NodeResult) -> bool:
        """Whether a result shares memory as it did, or by now shares what nothing writes any more."""
        root = self._index.root
        if old.alias_of:
            return bool(new.alias_of) and root[old.alias_of] == root[new.alias_of]
        return all(self._is_settled(name, node) for name in (new.alias_of, old.name) if new.alias_of)

    def _append(self, node: graph_pb2.Node, names: Mapping[str, str]) -> graph_pb2.Node:
        made = graph_pb2.Node()
        made.CopyFrom(node)
        rename(made, names)
        self._nodes.append(made)
        return made

    # -- tensors

    def _spec(self, name: str) -> tensor_pb2.TensorSpec:
        return self.specs[name] if name in self.specs else self._index.spec(name)

    def _empty(self, name: str) -> torch.Tensor:
        spec = self._spec(name)
        return torch.empty_strided(list(spec.shape), list(spec.strides), dtype=dtypes.to_torch(spec.dtype))

    def _is_settled(self, name: str, node: graph_pb2.Node) -> bool:
        """Whether neither a call nor any behind it writes the tensor's memory, so that a copy stays equal to it."""
        return self._last_write.get(self._index.root[name], -1) < self._index.position[node.name]

    def _copied(self, name: str, form: torch.memory_format, *, is_settled: bool) -> str:
        """A copy of a tensor in a format, by its name; the one that there is where the tensor has not changed since."""
        if is_settled and (name, form) in self._copies:
            return self._copies[name, form]
        suffix = str(form).removeprefix("torch.").removesuffix("_format").removesuffix("_3d")
        copy = self._added(f"{name}_{suffix}", name, "aten.clone.default", memory_format=form)
        if is_settled:
            self._copies[name, form] = copy
        return copy

    def _restored(self, name: str, *, is_settled: bool) -> str:
        """A copy of a tensor with the strides that it had. Raises _Pinned: it had gaps, or elements in common."""
        wanted = self._index.spec(name)
        for form in filter(None, (torch.contiguous_format, _FORMATS.get(len(wanted.shape)))):
            if _are_alike(dtypes.spec_of(self._empty(name).clone(memory_format=form)), wanted):
                return self._copied(name, form, is_settled=is_settled)
        order = sorted(range(len(wanted.shape)), key=lambda dim: (-wanted.strides[dim], -wanted.shape[dim]))
        back = [order.index(dim) for dim in range(len(order))]
        stored = self._empty(name).permute(order).contiguous().permute(back)
        if not _are_alike(dtypes.spec_of(stored), wanted):
            raise _Pinned(self._index.root[name])
        permuted = self._added(f"{name}_permuted", name, "aten.permute.default", order)
        copy = self._added(f"{name}_copied", permuted, "aten.clone.default", memory_format=torch.contiguous_format)
        return self._added(f"{name}_restored", copy, "aten.permute.default", back)

    def _added(self, wanted: str, of: str, target: str, *args: object, **kwargs: object) -> str:
        """Appends a call on one tensor, by a name like the one that is wanted."""
        names = (f"{wanted}_{n}" if n > 1 else wanted for n in itertools.count(1))
        name = next(each for each in names if each not in self._taken)
        self._taken.add(name)
        node = graph_pb2.Node(name=name, target=target, args=[tensor_pb2.Value(tensor=of)])
        node.args.extend(aten.encode(value, _no_name) for value in args)
        node.kwargs.extend(
            tensor_pb2.NamedValue(name=key, value=aten.encode(value, _no_name)) for key, value in kwargs.items()
        )
        given = self._empty(of)
        (made,) = aten.call(target, node.args, node.kwargs, lambda _: given, _ANYWHERE)
        assert made is not None
        alias = of if _storage(made) == _storage(given) else ""
        node.results.append(graph_pb2.NodeResult(name=name, spec=dtypes.spec_of(made), alias_of=alias))
        self.specs[name] = node.results[0].spec
        self._nodes.append(node)
        return name

    # -- outputs

    def _promised(self, name: str) -> str:
        """An output with the strides that it had."""
        if _are_alike(self._spec(name), self._index.spec(name)):
            return name
        return self._restored(name, is_settled=True)

    def _check_sharing(self, made: graph_pb2.Graph) -> None:
        """Raises _Pinned where outputs share memory with each other, or with sources, otherwise than they did."""
        roots = aten.roots(made)
        old = [self._index.root[name] for name in self._index.graph.outputs]
        new = [roots[name] for name in made.outputs]
        for before, after in zip(old, new, strict=True):
            is_moved = before != after and not self._index.sources.keys().isdisjoint((before, after))
            if is_moved or old.index(before) != new.index(after):
                raise _Pinned(before)


def _convolved(index: GraphIndex, node: graph_pb2.Node) -> tuple[str, str] | None:
    """What a convolution of a batch reads: its data and its weight; None for any other call."""
    if operation(node) not in _CONVOLUTIONS:
        return None
    given = arguments(node)
    data, weight = given["input"], given["weight"]
    specs = [index.spec(data.name), index.spec(weight.name)]
    ranks = {len(spec.shape) for spec in specs}
    if len(ranks) > 1 or not ranks <= _RANKS or any(0 in spec.shape for spec in specs):
        return None
    return (data.name, weight.name) if specs[0].dtype in _TYPES else None


def _format_of(spec: tensor_pb2.TensorSpec) -> torch.memory_format:
    return _FORMATS[len(spec.shape)]


def _is_last(spec: tensor_pb2.TensorSpec) -> bool:
    """Whether channels lie next to each other, extents of one aside: a weight of one by one always does."""
    expected = 1
    for dim in (1, *reversed(range(2, len(spec.shape))), 0):
        if spec.shape[dim] > 1 and spec.strides[dim] != expected:
            return False
        expected *= spec.shape[dim]
    return True


def _are_alike(one: tensor_pb2.TensorSpec, other: tensor_pb2.TensorSpec) -> bool:
    """Whether strides are the same, but for those of extents of one, which are never used."""
    return all(n <= 1 or a == b for n, a, b in zip(one.shape, one.strides, other.strides, strict=True))


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _no_name(_: object) -> None:
    return None
