"""CPU schedule of nests without reductions: blocks of the innermost axis, spread over threads.

Each block is one vectorised loop. With streaming stores it writes to a small buffer that stays in the first-level
cache, and whole lines then go to memory without being read first. No tiling of transposes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from agent_synthesis.emit import shape
from agent_synthesis.emit.expression import Function, Scope
from agent_synthesis.emit.spelling import CPP
from agent_synthesis.ir import Nest
from agent_synthesis.schedule import Emission, Footprint, Parameters
from warpsmith.errors import IllegalMove
from warpsmith.v1 import task_pb2

BLOCK_BUFFER_BYTES = 16 << 10
"""What all buffers of a block may take: half of a first-level cache."""
_SMALLEST_VECTOR_EXTENT = 16


class CpuPointwise:
    """Choices: `stores` plain or streaming, `loop` nested or flat. Integers: `block` (elements), `threads` (0: all)."""

    name = "cpu_pointwise"
    target = task_pb2.TARGET_CPU

    def accepts(self, nest: Nest) -> bool:
        """Any nest that reduces nothing and reads what it overwrites only in place."""
        return not nest.reductions and shape.is_safe_in_place(nest)

    def defaults(self, nest: Nest) -> Parameters:
        """Streams outputs that no cache could keep; one thread for tiny nests; flat when the inner axis is short."""
        simple = shape.simplified(nest)
        axes = simple.parallel + simple.reduced
        short = len(axes) > 1 and axes[-1].extent < _SMALLEST_VECTOR_EXTENT
        inner = simple.row_count * simple.column_count if short else (axes[-1].extent if axes else 1)
        stores = shape.default_stores(nest) if inner >= 256 else "plain"
        return Parameters(
            {"stores": stores, "loop": "flat" if short else "nested"},
            {"block": self._largest_block(nest), "threads": shape.default_threads(nest)},
        )

    def alternatives(self, nest: Nest, current: Parameters) -> Sequence[Parameters]:
        """One change away."""
        largest = self._largest_block(nest)
        domain: Mapping[str, Sequence[str | int]] = {
            "stores": ("plain", "streaming"),
            "loop": ("nested", "flat"),
            "block": tuple(size for size in (512, 1024, 2048, 4096) if size <= largest),
            "threads": (0, 1),
        }
        return shape.variations(current, domain)

    def footprint(self, nest: Nest, parameters: Parameters) -> Footprint:
        """Plain stores read each line of an output before they write it."""
        return Footprint(shape.fill_bytes(nest, parameters), shape.thread_count(nest, parameters), 1)

    def emit(self, nest: Nest, parameters: Parameters) -> Emission:
        """One function."""
        block = parameters.integers["block"]
        if not 1 <= block <= self._largest_block(nest):
            raise IllegalMove(f"block = {block}: from 1 to {self._largest_block(nest)} elements fit for {nest.name}")
        simple = shape.simplified(nest)
        simple = shape.flattened(simple) if parameters.choices["loop"] == "flat" and simple.row_count > 1 else simple
        function = Function(CPP, simple)
        entry = shape.name_everything(function)
        lines = shape.header(nest, self.name, parameters) + shape.prologue(function, entry)
        lines += _body(function, parameters)
        return Emission("\n".join([*lines, "}", ""]), shape.HEADERS, (shape.launch(nest),))

    def _largest_block(self, nest: Nest) -> int:
        bytes_each = sum(nest.buffer(store.buffer).type.size_bytes for store in nest.stores)
        return max(64, min(4096, 1 << int(math.log2(BLOCK_BUFFER_BYTES / bytes_each))))


def _body(function: Function, parameters: Parameters) -> list[str]:
    nest = function.nest
    axes = nest.parallel + nest.reduced
    root = Scope(function, None)
    root.expect(store.value for store in nest.stores)
    if not axes:
        for store in nest.stores:
            root.store(store)
        return root.lines
    inner, outer = axes[-1], axes[:-1]
    threads, block = parameters.integers["threads"], min(parameters.integers["block"], inner.extent)
    streamed = list(dict.fromkeys(
        store.buffer
        for store in nest.stores
        if parameters.choices["stores"] == "streaming" and shape.is_contiguous(store.index, inner.name)
    ))  # fmt: skip
    j = function.axes[inner.name]
    begin, end = function.names.take(f"{j}_begin"), function.names.take(f"{j}_end")
    extent = function.names.take(f"k{inner.name.capitalize()}Extent")
    loops = [shape.loop_over(function, axis) for axis in outer]
    loops.append(f"for (long {begin} = 0; {begin} < {extent}; {begin} += kBlock)")
    region = threads != 1 and bool(streamed)

    body = Scope(function, root, [axis.name for axis in outer], 1 + region + len(loops))
    last = f"{begin} + kBlock"
    body.line(f"const long {end} = {f'{last} < {extent} ? {last} : {extent}' if inner.extent % block else last};")
    element = body.child([inner.name])
    element.expect(store.value for store in nest.stores)
    blocks = {buffer: function.names.take(f"{function.buffers[buffer]}_block") for buffer in streamed}
    for store in nest.stores:
        held = blocks.get(store.buffer)
        element.store(store, held and f"{held}[{j} - {begin}]")
    body.line("#pragma omp simd")
    body.enclose([f"for (long {j} = {begin}; {j} < {end}; ++{j})"], element)
    for buffer, held in blocks.items():
        index = next(store.index for store in nest.stores if store.buffer == buffer)
        start = function.index(index, {inner.name: begin})
        body.line(f"ws::stream({function.buffers[buffer]} + {start}, {held}, {end} - {begin});")

    root.line(f"constexpr long {extent} = {inner.extent};")
    root.line(f"constexpr long kBlock = {block};")
    root.line("")
    around = root.child(deeper=int(region))
    for buffer, held in blocks.items():
        around.line(f"alignas(64) {CPP.storage[nest.buffer(buffer).type]} {held}[kBlock];")
    collapse = f" collapse({len(loops)})" if len(loops) > 1 else ""
    if threads != 1:
        share = f"for schedule(static){collapse}"
        around.line(f"#pragma omp {share}" if region else shape.parallel_pragma(threads, share))
    around.enclose(loops, body)
    if streamed:
        around.line("ws::stream_fence();")
    if region:
        root.line(shape.parallel_pragma(threads))
        root.line("{")
        root.absorb(around)
        root.line("}")
    else:
        root.absorb(around)
    return root.lines
