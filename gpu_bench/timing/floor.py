"""The least time a task can take, and the guard against results that are too good to be true.

One idea: inputs and parameters are read once, outputs are written once, and products that algebra cannot remove are
computed; all counted from the captured graph, never from a candidate. Every count errs towards less work, because
the guard rejects what is faster than the floor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch.utils.flop_counter import FlopCounterMode

from gpu_bench.device import Ceilings
from gpu_bench.timing import headline
from gpu_bench.timing.second_sweeps import REGISTER_BYTES, Slices, slices_of
from warpsmith.graphs import aten, dtypes
from warpsmith.graphs.kept import kept_calls, varying_origins
from warpsmith.graphs.library import attention
from warpsmith.program_steps import tensor_names
from warpsmith.v1 import candidate_pb2, graph_pb2, task_pb2, tensor_pb2, timing_pb2

REJECT_BELOW = 0.98
"""Faster than this part of the physical floor is impossible."""
FLOOR_REJECT, FLOOR_SUSPECT = headline.FLOOR_REJECT, headline.FLOOR_SUSPECT
REFERENCE_WASTEFUL = timing_pb2.FLAG_REFERENCE_WASTEFUL
WASTEFUL_ABOVE = 2.0

_PARTIAL = frozenset({
    "slice", "select", "narrow", "index", "index_select", "gather", "embedding", "take", "diagonal", "as_strided",
    "nll_loss", "nll_loss_nd", "nll_loss2d", "split", "split_with_sizes", "chunk", "unbind", "masked_select",
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "grid_sampler", "grid_sampler_2d",
    "grid_sampler_3d", "unfold", "constant_pad_nd", "pad", "take_along_dim", "diag",
})  # fmt: skip
"""Operations that may leave elements of their first argument unread: it counts as read no more than the result."""

_TRIANGULAR = frozenset({"tril", "triu"})

_WINDOWED = frozenset({
    "conv1d", "conv2d", "conv3d", "convolution", "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d",
    "avg_pool3d",
})  # fmt: skip
"""Operations that skip elements when the stride exceeds the window."""

_SHAPE_ONLY = frozenset({
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "new_zeros", "new_ones",
    "new_full", "new_empty", "new_empty_strided", "sym_size", "detach_",
})  # fmt: skip
"""Operations that look at the shape of an argument, never at its values."""

_LINEAR = frozenset({"add", "sub", "mul", "div", "neg", "add_", "sub_", "mul_", "div_", "to", "_to_copy", "clone"})
_CONTRACTING = frozenset({
    "sum", "mean", "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "mv", "dot", "avg_pool1d",
    "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "conv1d",
    "conv2d", "conv3d", "convolution",
})  # fmt: skip
_COPIES = frozenset({"to", "_to_copy", "clone", "contiguous"})
_SUMMING = frozenset({"sum", "mean"})
_PRODUCTS = frozenset({"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "mv", "dot", "_scaled_mm"})
_OF_PRODUCTS = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu", "bilinear", "chain_matmul", "linalg_multi_dot"})
_SCALING = frozenset({"mul", "div", "float", "reshape", "type_as"})
_DIAGONAL = frozenset({"diag", "diag_embed", "eye"})


@dataclass(frozen=True)
class Work:
    """Least work of a task. Bytes are of distinct elements."""

    input_bytes: int
    """Bytes of the inputs that must be read."""
    parameter_bytes: int
    """Bytes of parameters, state and constants that must be read."""
    output_bytes: int
    """Bytes that must be written: outputs that are new memory, and state that is updated."""
    product_flops: int
    """Matrix products and attention of fp32 accuracy that no algebra here removes."""
    convolution_flops: int
    """Convolutions, counted directly; faster algorithms (Winograd) exist for some."""
    executed_flops: int
    """Products and convolutions that the reference executes."""
    needed_flops: int
    """What is left of those without dead, repeated, diagonal and summed-away products."""
    slices: tuple[Slices, ...] = ()
    """Inputs that a reduction over their slices reads before they are needed."""
    reduced_product_flops: int = 0
    """As `product_flops`, of 16-bit operands, or of fp32 ones where TF32 is allowed."""

    @property
    def total_bytes(self) -> int:
        """Bytes read and written."""
        return self.input_bytes + self.parameter_bytes + self.output_bytes


def work_of(graph: graph_pb2.Graph, precision: task_pb2.Precision.ValueType, *, prepared: bool = False) -> Work:
    """Counts a captured graph, without what depends on constants alone, and without reading them: how small they can
    be made beforehand is not known. `prepared`: nor on parameters and state."""
    counter = _Counter(graph, tf32=precision == task_pb2.PRECISION_TF32, prepared=prepared)
    inputs = parameters = 0
    for source in graph.sources:
        if source.origin not in varying_origins(prepared):
            continue
        needed = counter.read_bytes(source.name)
        if source.origin == graph_pb2.ORIGIN_INPUT:
            inputs += needed
        else:
            parameters += needed
    products, convolutions, executed, needed, reduced = counter.flops()
    return Work(
        input_bytes=inputs,
        parameter_bytes=parameters,
        output_bytes=counter.write_bytes(),
        product_flops=products,
        convolution_flops=convolutions,
        executed_flops=executed,
        needed_flops=needed,
        slices=slices_of(graph, {source.name: spec_bytes(source.spec) for source in graph.sources}),
        reduced_product_flops=reduced,
    )


def work_by(work: Work, algebra: candidate_pb2.Program, precision: task_pb2.Precision.ValueType) -> Work:
    """Least work of a task that `algebra`, library steps, computes in another way: the same bytes, of each kind the
    products of the way that makes fewer, and no second sweeps, which it may do without."""
    other = work_of(_graph_of(algebra), precision)
    return replace(
        work,
        product_flops=min(work.product_flops, other.product_flops),
        convolution_flops=min(work.convolution_flops, other.convolution_flops),
        reduced_product_flops=min(work.reduced_product_flops, other.reduced_product_flops),
        slices=(),
    )


def floor_ns(work: Work, ceilings: Ceilings, *, parameters_warm: bool = False) -> float:
    """Least time at the measured ceilings: the larger of memory time and product time.

    What a second sweep must read again counts. `parameters_warm`: calls were timed in groups, so parameters that fit
    the cache are not read again.
    """
    device = ceilings.device
    reads = _reads(work, device.cache_bytes, parameters_warm)
    on_chip = device.cache_bytes + device.unit_count * (device.shared_bytes + _registers(device))
    reads += sum(each.again(on_chip) for each in work.slices)
    memory_s = _memory_s(reads, work.output_bytes, device)
    products_s = 0.0
    if ceilings.fp32_product_rate:
        products_s = work.product_flops / ceilings.fp32_product_rate
        products_s += work.convolution_flops / 4 / ceilings.convolution_rate
    if ceilings.reduced_product_rate:
        products_s += work.reduced_product_flops / ceilings.reduced_product_rate
    return max(memory_s, products_s) * 1e9


def physical_floor_ns(work: Work, ceilings: Ceilings, *, parameters_warm: bool) -> float:
    """Least time that physics allows; 0 where nothing can be said (a task that fits a processor's cache).

    Writes that fit the cache are not counted, convolutions a quarter (Winograd's best case for 3x3, twice over).
    """
    device = ceilings.device
    if device.target == task_pb2.TARGET_CPU and work.total_bytes <= device.cache_bytes:
        return 0.0
    writes = max(work.output_bytes - device.cache_bytes, 0)
    reads = _reads(work, device.cache_bytes, parameters_warm)
    if device.target == task_pb2.TARGET_CPU:  # a sweep does not empty every core's cache for certain
        reads = max(reads - device.cache_bytes, 0)
    memory_s = (reads + writes) / device.physical_bytes_per_second if device.physical_bytes_per_second else 0.0
    products_s = 0.0
    if ceilings.physical_product_rate:
        products_s = work.product_flops / ceilings.physical_product_rate
        products_s += work.convolution_flops / 4 / ceilings.physical_convolution_rate
    if ceilings.physical_reduced_product_rate:
        products_s += work.reduced_product_flops / ceilings.physical_reduced_product_rate
    return max(memory_s, products_s) * 1e9


def may_lie_in_cache(work: Work, ceilings: Ceilings) -> bool:
    """Whether rates of memory do not bound it: a processor's cache is shared with the sweep, so nothing in it is surely
    cold.
    """
    return ceilings.device.target == task_pb2.TARGET_CPU and work.total_bytes <= 2 * ceilings.device.cache_bytes


def guard(
    median_ns: float, work: Work, ceilings: Ceilings, *, parameters_warm: bool
) -> list[timing_pb2.Flag.ValueType]:
    """Flags of a time: `FLOOR_REJECT` when physics forbids it, `FLOOR_SUSPECT` when no measurement here was as fast."""
    physical = physical_floor_ns(work, ceilings, parameters_warm=parameters_warm)
    if physical and median_ns < REJECT_BELOW * physical:
        return [FLOOR_REJECT]
    if may_lie_in_cache(work, ceilings):
        return []
    achievable = floor_ns(work, ceilings, parameters_warm=parameters_warm)
    return [FLOOR_SUSPECT] if median_ns < achievable else []


def reference_flags(work: Work, ceilings: Ceilings) -> list[timing_pb2.Flag.ValueType]:
    """`REFERENCE_WASTEFUL` when the reference's products are more than twice the least, and matter to its time."""
    if work.executed_flops <= WASTEFUL_ABOVE * work.needed_flops or not ceilings.fp32_product_rate:
        return []
    wasted_s = (work.executed_flops - work.needed_flops) / ceilings.fp32_product_rate
    bytes_alone = replace(work, product_flops=0, convolution_flops=0, reduced_product_flops=0, slices=())
    return [REFERENCE_WASTEFUL] if wasted_s * 1e9 > floor_ns(bytes_alone, ceilings) else []


def spec_bytes(spec: tensor_pb2.TensorSpec) -> int:
    """Bytes of the distinct elements of a tensor: an expanded dimension (stride 0) counts once."""
    extents = [extent for extent, stride in zip(spec.shape, spec.strides, strict=True) if stride]
    if 0 in spec.shape:
        return 0
    return math.prod(extents) * dtypes.to_torch(spec.dtype).itemsize


def _registers(device: timing_pb2.Device) -> int:
    return REGISTER_BYTES if device.target == task_pb2.TARGET_CUDA else 0


def _reads(work: Work, cache_bytes: int, parameters_warm: bool) -> int:
    parameters = work.parameter_bytes
    if parameters_warm:
        parameters = max(parameters - cache_bytes, 0)
    return work.input_bytes + parameters


def _memory_s(reads: int, writes: int, device: timing_pb2.Device) -> float:
    """Seconds of memory traffic: at the separate rates, or at a copy's where that is faster."""
    if not device.read_bytes_per_second or not device.write_bytes_per_second:
        return 0.0
    separate = reads / device.read_bytes_per_second + writes / device.write_bytes_per_second
    if not device.copy_bytes_per_second or 2 * min(reads, writes) < max(reads, writes):
        return separate
    return min(separate, (reads + writes) / device.copy_bytes_per_second)


def _graph_of(program: candidate_pb2.Program) -> graph_pb2.Graph:
    """Its library steps as calls of a graph."""
    specs = {buffer.name: buffer.spec for buffer in program.buffers}
    graph = graph_pb2.Graph(outputs=program.outputs)
    for buffer in program.buffers:
        if buffer.HasField("source"):
            graph.sources.add(name=buffer.name, origin=buffer.source.origin, spec=buffer.spec)
    for number, step in enumerate(program.steps):
        if step.WhichOneof("kind") == "library":
            call = step.library
            node = graph.nodes.add(name=f"call{number}", target=call.target, args=call.args, kwargs=call.kwargs)
            for name in call.results:
                node.results.add(name=name, spec=specs.get(name))
    return graph


class _Counter:
    """Walks a graph backwards from what is needed."""

    def __init__(self, graph: graph_pb2.Graph, *, tf32: bool, prepared: bool) -> None:
        self._graph = graph
        self._tf32 = tf32
        self._kept = kept_calls(graph, prepared=prepared)
        self._specs: dict[str, tensor_pb2.TensorSpec] = {source.name: source.spec for source in graph.sources}
        self._consumers: dict[str, list[graph_pb2.Node]] = {}
        self._producer: dict[str, graph_pb2.Node] = {}
        self._alias: dict[str, str] = {}
        for node in graph.nodes:
            for result in node.results:
                if result.name:
                    self._specs[result.name] = result.spec
                    self._producer[result.name] = node
                    if result.alias_of:
                        self._alias[result.name] = result.alias_of
            for name in set(tensor_names(aten.arguments_of(node))):
                self._consumers.setdefault(name, []).append(node)
        self._outputs = set(graph.outputs)
        self._live = self._live_nodes()
        self._needed: dict[str, int] = {}

    def read_bytes(self, name: str) -> int:
        """Bytes of a tensor that some live consumer must read, at most its own."""
        if name not in self._needed:
            own = spec_bytes(self._specs[name])
            consumers = [node for node in self._consumers.get(name, []) if id(node) in self._live]
            wanted = sum(self._consumer_reads(name, own, node) for node in consumers)
            self._needed[name] = min(own, wanted)
        return self._needed[name]

    def write_bytes(self) -> int:
        """Bytes of outputs with memory of their own, and of sources written in place, each memory once."""
        sources = {source.name for source in self._graph.sources}
        written: dict[str, int] = {}
        for name in self._outputs:
            root = self._root(name)
            if root not in sources:
                written[root] = max(written.get(root, 0), spec_bytes(self._specs[name]))
        for node in self._graph.nodes:
            for name in node.mutates:
                root = self._root(name)
                if root in sources:
                    written[root] = spec_bytes(self._specs[root])
        return sum(written.values())

    def flops(self) -> tuple[int, int, int, int, int]:
        """(least products, least convolutions, executed, needed, least reduced products)."""
        executed = needed = products = convolutions = reduced = 0
        seen: set[bytes] = set()
        for node in self._graph.nodes:
            count = self._node_flops(node)
            executed += count
            key = _content_key(node)
            is_needed = id(node) in self._live and node.name not in self._kept
            if not count or not is_needed or key in seen or self._has_diagonal_factor(node):
                continue
            seen.add(key)
            count = int(count * self._kept_part(node))
            if not self._reaches_linearly(node, _SUMMING):
                needed += count
            if self._reaches_linearly(node, _CONTRACTING):
                continue
            if "conv" in _operation(node):
                convolutions += count
            elif self._is_of_8_bits(node):
                reduced += count // 2  # at twice the rate
            elif self._is_reduced(node):
                reduced += count
            else:
                products += count
        return products, convolutions, executed, needed, reduced

    def _consumer_reads(self, name: str, own: int, node: graph_pb2.Node) -> int:
        operation = _operation(node)
        results = [result for result in node.results if result.name]
        if operation in _SHAPE_ONLY:
            return 0
        views = [result for result in results if result.alias_of]
        if views and not node.mutates:
            return sum(self.read_bytes(result.name) for result in views)
        first = next(iter(tensor_names(node.args)), name)
        if operation in _PARTIAL and name == first:
            return sum(spec_bytes(result.spec) for result in results)
        if operation in _TRIANGULAR:
            return own // 2
        if operation in _WINDOWED and name == first:
            return int(own * self._touched_part(node))
        return own

    def _touched_part(self, node: graph_pb2.Node) -> float:
        """Part of the input that windows touch: stride over window, at least; a safe guess from output and input."""
        source = self._specs[tensor_names(node.args)[0]]
        window = 1
        names = tensor_names(node.args)
        if "conv" in _operation(node) and len(names) > 1:
            window = math.prod(self._specs[names[1]].shape[2:])
        elif len(node.args) > 1:
            sizes = [value.integer for value in node.args[1].list.values] or [node.args[1].integer]
            spatial = max(len(source.shape) - 2, 1)
            window = math.prod(sizes) if len(sizes) > 1 else sizes[0] ** spatial
        result = next(result for result in node.results if result.name)
        touched = math.prod(result.spec.shape[2:]) * max(window, 1)
        return min(1.0, touched / max(math.prod(source.shape[2:]), 1))

    def _node_flops(self, node: graph_pb2.Node) -> int:
        """Flops of one call, by making it on meta tensors; 0 for what cannot be."""
        if "random" in node.target or node.random:
            return 0

        def meta(name: str) -> torch.Tensor:
            spec = self._specs[name]
            return torch.empty_strided(
                tuple(spec.shape), tuple(spec.strides), dtype=dtypes.to_torch(spec.dtype), device="meta"
            )

        if not _may_multiply(_operation(node)):
            return 0
        if node.target in attention.PRODUCTS:
            return attention.least_flops(node, self._specs.__getitem__)
        counter = FlopCounterMode(display=False)
        try:
            with torch.no_grad(), counter:
                aten.call(node.target, node.args, node.kwargs, meta, torch.device("meta"))
        except Exception:  # no meta kernel: counting less is the safe side
            return 0
        return int(counter.get_total_flops())

    def _is_reduced(self, node: graph_pb2.Node) -> bool:
        """Whether one product of 16-bit operands may do the work."""
        return self._tf32 or any(map(self._is_narrow, tensor_names(aten.arguments_of(node))))

    def _is_of_8_bits(self, node: graph_pb2.Node) -> bool:
        """Whether a product of two in floats of 8 bits, scaled afterwards, may do the work."""
        factors = [name for name in tensor_names(node.args) if len(self._specs[name].shape) > 1][:2]
        return _operation(node) in _PRODUCTS and len(factors) == 2 and all(map(self._is_scaled, factors))

    def _is_scaled(self, name: str) -> bool:
        """Whether a tensor's values are floats of 8 bits times a scale."""
        if dtypes.to_torch(self._specs[name].dtype) in dtypes.FLOATS_OF_8_BITS:
            return True
        node = self._producer.get(name)
        is_made = node is not None and (_operation(node) in _COPIES | _SCALING or name in self._alias)
        return is_made and any(map(self._is_scaled, tensor_names(node.args if node is not None else ())))

    def _is_narrow(self, name: str) -> bool:
        """Whether a tensor's values have 16 bits, whatever type holds them now."""
        if self._specs[name].dtype in (tensor_pb2.DTYPE_FLOAT16, tensor_pb2.DTYPE_BFLOAT16):
            return True
        node = self._producer.get(name)
        is_made = node is not None and (_operation(node) in _COPIES or name in self._alias)
        return is_made and any(map(self._is_narrow, tensor_names(node.args if node is not None else ())))

    def _has_diagonal_factor(self, node: graph_pb2.Node) -> bool:
        """Whether a product with a diagonal matrix is written as a full one."""
        producers = (self._producer.get(name) for name in tensor_names(node.args))
        diagonal = any(producer is not None and _operation(producer) in _DIAGONAL for producer in producers)
        return diagonal and _operation(node) in _PRODUCTS

    def _kept_part(self, node: graph_pb2.Node) -> float:
        """Part of a product's elements that is used: less than all where only triangles of it are kept."""
        if "attention" in _operation(node) and node.target not in attention.PRODUCTS:
            return self._attended_part(node)
        if _operation(node) not in _PRODUCTS:
            return 1.0
        equal = [other for other in self._graph.nodes if _content_key(other) == _content_key(node)]
        names = [result.name for other in equal for result in other.results]
        consumers = [each for name in names for each in self._consumers.get(name, []) if id(each) in self._live]
        kept = all(_operation(each) in _TRIANGULAR for each in consumers) and not self._outputs.intersection(names)
        if not consumers or not kept:
            return 1.0
        rows, columns = self._specs[names[0]].shape[-2:]
        return min(1.0, sum(_triangle(each, rows, columns) for each in consumers) / (rows * columns))

    def _attended_part(self, node: graph_pb2.Node) -> float:
        """Part of the scores that attention needs: none that a mask may hide, what is left of a causal one."""
        named = {each.name: each.value for each in node.kwargs}
        is_causal = named.get("is_causal") or (node.args[5] if len(node.args) > 5 else None)
        if len(tensor_names(aten.arguments_of(node))) > 3:
            return 0.0
        if is_causal is None or not is_causal.boolean:
            return 1.0
        rows, columns = (self._specs[name].shape[-2] for name in tensor_names(node.args)[:2])
        return sum(min(columns, row + 1) for row in range(rows)) / (rows * columns)

    def _reaches_linearly(self, node: graph_pb2.Node, ends: frozenset[str]) -> bool:
        """Whether the result of a product goes only through linear operations into one of `ends`.

        Then algebra can pull the contraction in front of the product and make it small.
        """
        if not (_operation(node) in _PRODUCTS or "conv" in _operation(node)):
            return False
        frontier = [result.name for result in node.results if result.name]
        visited: set[str] = set()
        while frontier:
            name = frontier.pop()
            visited.add(name)
            for consumer in self._consumers.get(name, []):
                if _operation(consumer) in ends:
                    return True
                results = [result for result in consumer.results if result.name]
                if _operation(consumer) in _LINEAR or any(result.alias_of for result in results):
                    frontier += [result.name for result in results if result.name not in visited]
        return False

    def _live_nodes(self) -> set[int]:
        """Nodes that an output or an update of a source depends on."""
        sources = {source.name for source in self._graph.sources}
        wanted = {self._root(name) for name in self._outputs} | self._outputs
        live: set[int] = set()
        for node in reversed(self._graph.nodes):
            updates = any(self._root(name) in sources or self._root(name) in wanted for name in node.mutates)
            if updates or any(result.name in wanted for result in node.results):
                live.add(id(node))
                for name in tensor_names(aten.arguments_of(node)):
                    wanted |= {name, self._root(name)}
        return live

    def _root(self, name: str) -> str:
        """The memory behind a view."""
        while name in self._alias:
            name = self._alias[name]
        return name


def _triangle(node: graph_pb2.Node, rows: int, columns: int) -> int:
    """Elements of a matrix that triu or tril keeps."""
    diagonal = node.args[1].integer if len(node.args) > 1 else 0
    below = sum(max(0, min(columns, row + diagonal)) for row in range(rows))  # left of the diagonal
    on = sum(0 <= row + diagonal < columns for row in range(rows))
    return rows * columns - below if _operation(node) == "triu" else below + on


def _operation(node: graph_pb2.Node) -> str:
    """ "softmax" of "aten.softmax.int"."""
    return aten.operation(node.target)


def _may_multiply(operation: str) -> bool:
    return operation in _PRODUCTS | _OF_PRODUCTS or "conv" in operation or "attention" in operation


def _content_key(node: graph_pb2.Node) -> bytes:
    """Equal for calls of one operation on the same arguments: the second of them is needless."""
    bare = graph_pb2.Node(target=node.target, args=node.args, kwargs=node.kwargs)
    return bare.SerializeToString(deterministic=True)
