"""CUDA schedule of nests without reductions: packs of the innermost axis, a few for each thread, loads before stores.

Where all axes are one, of any length, the last pack may hang over its end. No shared memory, so a transposed input is
read with strides: `cuda_transpose` tiles it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agent_synthesis.emit import function_text
from agent_synthesis.emit.cuda import generated_struct, geometry, kernel_text
from agent_synthesis.emit.cuda.schedule import OVERLAP, CudaSchedule
from agent_synthesis.emit.cuda.transposes import transpose
from agent_synthesis.nests import iteration_space, memory_access
from agent_synthesis.nests.ir import Axis, Nest
from agent_synthesis.schedule import Emission, Footprint
from agent_synthesis.settings import Exp, Loads, Settings, Stores, setting
from warpsmith.errors import IllegalMove

HEADERS = (*geometry.HEADERS, "ws_axes.cuh", "ws_vectors.cuh", "ws_pointwise.cuh")
_MEMBERS = ("Offset", "kTiling", "kColumns", "Outer", "Loads", "load", "compute", "at")
"""What the struct calls things of its own."""
_TAILED = 256
"""Elements from which on packs are worth the one that hangs over the end."""


@dataclass(frozen=True)
class PointwiseSettings(Settings):
    """Of `cuda_pointwise`."""

    loads: Loads = setting(Loads.SHARED, "whether what is read is kept for others")
    stores: Stores = setting(Stores.PLAIN, "whether results pass the caches")
    exp: Exp = setting(Exp.ACCURATE, "the exponential")
    overlap: bool = setting(True, OVERLAP)
    threads: int = setting(256, "threads of a block", (128, 256, 512))
    items: int = setting(1, "packs of a thread", (1, 2, 4))
    pack: int = setting(1, "elements of a pack, a power of two", (1, 2, 4, 8))


class CudaPointwise(CudaSchedule):
    """Packs of the innermost axis."""

    name = "cuda_pointwise"
    settings = PointwiseSettings

    def accepts(self, nest: Nest) -> bool:
        """Any nest that reduces nothing and reads what it overwrites only in place, but for large ones that turn."""
        # A group keeps its schedule through a fusion for as long as that accepts it, so another's must say no.
        return (
            not nest.reductions
            and iteration_space.is_safe_in_place(nest)
            and not transpose.dominates(self.hardware, nest)
        )

    def defaults(self, nest: Nest) -> PointwiseSettings:
        """As wide as memory allows; one pack a thread."""
        return PointwiseSettings(overlap=self.overlaps[0], pack=_widest_pack(*_canonical(nest)))

    def alternatives(self, nest: Nest, current: PointwiseSettings) -> Sequence[PointwiseSettings]:
        """One change away."""
        widest = _widest_pack(*_canonical(nest))
        packs = [pack for pack in (1, 2, 4, 8) if pack <= widest]
        changes = current.one_change_away(overlap=self.overlaps, pack=packs)
        return geometry.legal(changes, lambda settings: self._require(nest, settings))

    def footprint(self, nest: Nest, settings: PointwiseSettings) -> Footprint:
        """Nothing beyond the nest's own bytes, but for sectors of which a strided access uses an element."""
        return Footprint(transpose.saved_bytes(nest), _blocks(_canonical(nest)[0], settings), 1)

    def emit(self, nest: Nest, settings: PointwiseSettings) -> Emission:
        """One kernel."""
        self._require(nest, settings)
        simple, axis = _canonical(nest)
        lines = function_text.header(nest, self.name, settings) + _text(simple, axis, settings)
        grid, threads = _blocks(simple, settings), settings.threads
        return geometry.one_kernel(nest, lines, HEADERS, grid=grid, threads=threads, dependent=settings.overlap)

    def _require(self, nest: Nest, settings: PointwiseSettings) -> None:
        simple, axis = _canonical(nest)
        pack, items = settings.pack, settings.items
        if pack < 1 or _widest_pack(simple, axis) % pack:
            raise IllegalMove(f"{nest.name}: {pack} elements do not lie together everywhere")
        held = sum(
            max(1, pack * simple.buffer(load.buffer).type.size_bytes // 4) for load in memory_access.loads(simple)
        )
        geometry.require_block(self.hardware, nest, threads=settings.threads, held_registers=held * items)


def _canonical(nest: Nest) -> tuple[Nest, Axis]:
    """The nest with all axes parallel, and its innermost axis."""
    simple = iteration_space.all_parallel(iteration_space.canonical(nest))
    return simple, simple.parallel[-1]


def _widest_pack(nest: Nest, axis: Axis) -> int:
    """The most elements that every contiguous access can move at once; the last may be fewer where all axes are one."""
    widest = memory_access.widest_pack(nest, axis)
    if widest > 1 or len(nest.parallel) > 1 or geometry.offset_type(nest) != "int":
        return widest
    pack = memory_access.best_pack(nest, axis, _TAILED)
    place = memory_access.skew(nest, axis, pack)
    return pack if place is not None and place.offset % pack == 0 else widest


def _blocks(nest: Nest, settings: PointwiseSettings) -> int:
    packs = -(-nest.row_count // settings.pack)
    return -(-packs // (settings.threads * settings.items))


def _text(nest: Nest, axis: Axis, settings: PointwiseSettings) -> list[str]:
    """The struct and the kernel."""
    pack = settings.pack
    text = kernel_text.KernelText(
        nest, axis.name, pack, settings.loads, settings.stores, kernel_text.dialect_of(settings.exp),
        skew=memory_access.skew(nest, axis, pack), reserved=_MEMBERS,
    )  # fmt: skip
    function, names, offset = text.function, text.function.names, text.offset
    outer = [each for each in nest.parallel if each.name != axis.name]
    places = [function.axes[each.name] for each in outer]
    wide = [load for load in text.varying_loads(s.value for s in nest.stores) if text.access_of(load) == "pack"]
    kinds = [text.pack_type(text.storage(load.buffer)) for load in wide]
    held = [(load, names.take(f"{function.buffers[load.buffer]}_pack")) for load in wide]
    arguments = f"const {offset} (&at)[{max(1, len(outer))}], {offset} {text.begin}"
    located = generated_struct.located(places, "at")
    lines = ["", f"  using Offset = {offset};"]
    lines += generated_struct.constant("ws::PointwiseTiling", "kTiling", {
        "threads": settings.threads, "items": settings.items, "vector_width": pack,
        "row_vectors": -(-axis.extent // pack), "overlap": settings.overlap,
    })  # fmt: skip
    if nest.row_count % pack:
        lines.append(f"  static constexpr int kColumns = {nest.row_count};  // the last vector hangs over")
    lines.append(f"  using Outer = ws::Axes<{', '.join(str(each.extent) for each in outer) or 1}>;")
    lines += [f"  using Loads = ws::List<{', '.join(kinds)}>;", ""]
    for k, (load, kind) in enumerate(zip(wide, kinds, strict=True)):
        head = f"{kind} load(ws::VectorLoad<{k}>, {arguments}) const"
        lines += generated_struct.function(head, [*located, f"    return {text.pack_load(load, text.begin)};"])
    inner = generated_struct.body(text, [each.name for each in outer])
    text.stores(inner, nest.stores, held=held)
    given = [f"const {kind}& {name}" for kind, (_, name) in zip(kinds, held, strict=True)]
    head = f"void compute({', '.join([arguments, *given])}) const"
    lines += generated_struct.function(head, [*located, *inner.lines])
    name = f"{text.entry}_pointwise"
    struct = generated_struct.struct(name, text, lines)
    return struct + generated_struct.kernel(name, text, "compute_pointwise", settings.threads, 1)
