"""CUDA schedule of nests without reductions: packs of the innermost axis, a few for each thread, loads before stores.

Where all axes are one, of any length, the last pack may hang over its end. No shared memory, so a transposed input is
read with strides: `cuda_transpose` tiles it.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent_synthesis.emit import shape
from agent_synthesis.emit.cuda import geometry, kernel_text
from agent_synthesis.emit.cuda.schedule import CudaSchedule
from agent_synthesis.emit.cuda.transposes import transpose
from agent_synthesis.emit.expression import Scope
from agent_synthesis.nests.ir import Axis, Load, Nest
from agent_synthesis.schedule import Emission, Footprint, Parameters
from warpsmith.errors import IllegalMove

_TAILED = 256
"""Elements from which on packs are worth the one that hangs over the end."""


class CudaPointwise(CudaSchedule):
    """Choices: `loads` once or shared, `stores` plain or streaming, `exp` accurate or fast, `overlap` (yes: may start
    while the previous kernel ends).

    Integers: `threads` of a block, `items` (packs of a thread), `pack` (elements, a power of two).
    """

    name = "cuda_pointwise"

    def accepts(self, nest: Nest) -> bool:
        """Any nest that reduces nothing and reads what it overwrites only in place, but for large ones that turn."""
        # A group keeps its schedule through a fusion for as long as that accepts it, so another's must say no.
        return not nest.reductions and shape.is_safe_in_place(nest) and not transpose.dominates(self.hardware, nest)

    def defaults(self, nest: Nest) -> Parameters:
        """As wide as memory allows; one pack a thread."""
        pack = _widest_pack(*_canonical(nest))
        return Parameters(
            {"loads": "shared", "stores": "plain", "exp": "accurate", "overlap": self.overlaps[0]},
            {"threads": 256, "items": 1, "pack": pack},
        )

    def alternatives(self, nest: Nest, current: Parameters) -> Sequence[Parameters]:
        """One change away."""
        widest = _widest_pack(*_canonical(nest))
        changes = geometry.domain_without(current, {
            "loads": ("once", "shared"),
            "stores": ("plain", "streaming"),
            "exp": ("accurate", "fast"),
            "overlap": self.overlaps,
            "threads": (128, 256, 512),
            "items": (1, 2, 4),
            "pack": tuple(pack for pack in (1, 2, 4, 8) if pack <= widest),
        })  # fmt: skip
        return geometry.legal(changes, lambda parameters: self._require(nest, parameters))

    def footprint(self, nest: Nest, parameters: Parameters) -> Footprint:
        """Nothing beyond the nest's own bytes, but for sectors of which a strided access uses an element."""
        return Footprint(transpose.saved_bytes(nest), _blocks(*_canonical(nest), parameters), 1)

    def emit(self, nest: Nest, parameters: Parameters) -> Emission:
        """One kernel."""
        self._require(nest, parameters)
        simple, axis = _canonical(nest)
        threads = parameters.integers["threads"]
        lines = shape.header(nest, self.name, parameters) + _body(simple, axis, parameters)
        grid = _blocks(simple, axis, parameters)
        record = geometry.launch(nest, grid=grid, threads=threads, dependent=parameters.choices["overlap"] == "yes")
        return Emission("\n".join([*lines, "}", ""]), geometry.HEADERS, (record,))

    def _require(self, nest: Nest, parameters: Parameters) -> None:
        simple, axis = _canonical(nest)
        pack, items = parameters.integers["pack"], parameters.integers["items"]
        if pack < 1 or _widest_pack(simple, axis) % pack:
            raise IllegalMove(f"{nest.name}: {pack} elements do not lie together everywhere")
        held = sum(max(1, pack * simple.buffer(load.buffer).type.size_bytes // 4) for load in geometry.loads(simple))
        self.require_block(nest, threads=parameters.integers["threads"], held_registers=held * items)


def _canonical(nest: Nest) -> tuple[Nest, Axis]:
    """The nest with all axes parallel, and its innermost axis."""
    simple = geometry.canonical(nest)
    axes = simple.parallel + simple.reduced
    if not axes:
        axes = (Axis("one", 1),)
    return shape.reindexed(simple, lambda index: index, axes, ()), axes[-1]


def _widest_pack(nest: Nest, axis: Axis) -> int:
    """The most elements that every contiguous access can move at once; the last may be fewer where all axes are one."""
    widest = geometry.widest_pack(nest, axis)
    if widest > 1 or len(nest.parallel) > 1 or geometry.offset_type(nest) != "int":
        return widest
    pack = geometry.best_pack(nest, axis, _TAILED)
    place = geometry.skew(nest, axis, pack)
    return pack if place is not None and place.offset % pack == 0 else widest


def _blocks(nest: Nest, axis: Axis, parameters: Parameters) -> int:
    del axis
    packs = -(-nest.row_count // parameters.integers["pack"])
    return -(-packs // (parameters.integers["threads"] * parameters.integers["items"]))


def _body(nest: Nest, axis: Axis, parameters: Parameters) -> list[str]:
    threads, items, pack = (parameters.integers[key] for key in ("threads", "items", "pack"))
    text = kernel_text.KernelText(
        nest, axis.name, pack, kernel_text.dialect_of(parameters.choices["exp"]),
        once=parameters.choices["loads"] == "once", streaming=parameters.choices["stores"] == "streaming",
        skew=geometry.skew(nest, axis, pack),
    )  # fmt: skip
    names, function = text.function.names, text.function
    packs = -(-nest.row_count // pack)
    even = packs % (threads * items) == 0
    root = Scope(function, None)
    if parameters.choices["overlap"] == "yes":
        root.line("ws::wait_for_previous();")
        root.line("ws::launch_dependents();")
    root.line(f"constexpr {text.offset} kPacks = {packs};")
    if nest.row_count % pack:
        root.line(f"constexpr int kColumns = {nest.row_count};  // the last pack hangs over")
    if items > 1:
        root.line(f"constexpr int kItems = {items};")
    first, number, item = names.take("first_pack"), names.take("pack"), names.take("item")
    block = "blockIdx.x" if text.offset == "int" else "static_cast<ws::int64>(blockIdx.x)"
    start = f"{block} * {threads * items} + threadIdx.x"
    root.line(f"const {text.offset} {first if items > 1 else number} = {start};")
    if items == 1 and not even:
        root.line(f"if ({number} >= kPacks) return;")
    wide = [load for load in text.varying_loads(s.value for s in nest.stores) if text.access_of(load) == "pack"]
    held = _hold(text, root, wide, items, even, first, number, item) if items > 1 else []
    inner = root.child(deeper=int(items > 1))
    if items > 1:
        root.line(kernel_text.UNROLL)
        root.line(f"for (int {item} = 0; {item} < kItems; ++{item}) {{")
        inner.line(f"const {text.offset} {number} = {first} + {item} * {threads};")
        if not even:
            inner.line(f"if ({number} >= kPacks) break;")
    _place(text, inner, axis, number)
    inner.learn(a.name for a in nest.parallel if a.name != axis.name)
    text.stores(inner, nest.stores, held=[(load, f"{name}[{item}]") for load, name in held])
    root.absorb(inner)
    if items > 1:
        root.line("}")
    return [*text.signature(text.entry, threads, 1), *root.lines]


def _hold(
    text: kernel_text.KernelText,
    root: Scope,
    wide: list[Load],
    items: int,
    even: bool,
    first: str,
    number: str,
    item: str,
) -> list[tuple[Load, str]]:
    """Loads all packs of a thread before any is used, so that their latencies overlap."""
    held = []
    for load in wide:
        name = text.function.names.take(f"{text.function.buffers[load.buffer]}_packs")
        root.line(f"{text.pack_type(text.storage(load.buffer))} {name}[kItems];")
        held.append((load, name))
    if not held:
        return held
    axis = next(a for a in text.nest.parallel if a.name == text.axis)
    loop = root.child()
    _place(text, loop, axis, number)
    for load, name in held:
        loop.line(f"{name}[{item}] = {text.pack_load(load, text.begin)};")
    threads = f"{first} + {item} * blockDim.x"
    root.line(kernel_text.UNROLL)
    root.line(f"for (int {item} = 0; {item} < {items}; ++{item}) {{")
    root.line(f"  const {text.offset} {number} = {threads};")
    if not even:
        root.line(f"  if ({number} >= kPacks) break;")
    root.absorb(loop)
    root.line("}")
    return held


def _place(text: kernel_text.KernelText, scope: Scope, axis: Axis, number: str) -> None:
    """Declares the axes and the pack's first element from the pack's number."""
    pack = text.pack
    inner = axis.extent // pack
    others = [a for a in text.nest.parallel if a.name != axis.name]
    scaled = f"{pack} * " if pack > 1 else ""
    if not others:
        scope.line(f"const {text.offset} {text.begin} = {scaled}{number};")
        return
    scope.line(f"const {text.offset} {text.begin} = {scaled}({number} % {inner});")
    inside = inner
    for position, other in reversed(list(enumerate(others))):
        value = f"{number} / {inside}"
        if position:
            value = f"{value} % {other.extent}"
        scope.line(f"const {text.offset} {text.function.axes[other.name]} = {value};")
        inside *= other.extent
