"""CUDA schedule of nests without reductions: vectors of the innermost axis, a few for each thread, loads before stores.

Where all axes are one, of any length, the last vector is predicated. No shared memory, so a transposed input is read
with strides: `cuda_transpose` tiles it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from agent_synthesis.emit import function_text
from agent_synthesis.emit.cuda import generated_struct, geometry, kernel_text
from agent_synthesis.emit.cuda.block_work import BlockWork
from agent_synthesis.emit.cuda.schedule import DEPENDENT_LAUNCH, CudaSchedule
from agent_synthesis.emit.cuda.transposes import transpose
from agent_synthesis.nests import iteration_space, memory_access
from agent_synthesis.nests.analysis import costly_parts
from agent_synthesis.nests.analysis.neighbours import Neighbours, neighbours, with_pairs_merged
from agent_synthesis.nests.ir import Axis, Expression, Index, Load, Nest
from agent_synthesis.schedule import Emission, Footprint
from agent_synthesis.settings import Exp, Loads, Settings, Stores, setting
from warpsmith.errors import IllegalMove

HEADERS = (*geometry.HEADERS, "ws_axes.cuh", "ws_vectors.cuh", "ws_pointwise.cuh")
_MEMBERS = ("Offset", "kTiling", "kColumns", "Outer", "Loads", "load", "compute", "at")
"""What the struct calls things of its own."""
_OF_A_ROW, _MOST_IDLE = 4, 8
"""Vectors of a thread whose block stays in one row, and blocks of a row from which on its last may be idle in part."""
_TAILED = 256
"""Elements from which on vectors are worth a predicated one at the end."""


@dataclass(frozen=True)
class PointwiseSettings(Settings):
    """Of `cuda_pointwise`."""

    loads: Loads = setting(Loads.CACHED, "whether what is read is kept for others")
    stores: Stores = setting(Stores.PLAIN, "whether results pass the caches")
    exp: Exp = setting(Exp.ACCURATE, "the exponential")
    dependent_launch: bool = setting(True, DEPENDENT_LAUNCH)
    threads: int = setting(256, "threads of a block", (128, 256, 512))
    vectors: int = setting(1, "vector accesses of a thread", (1, 2, 4))
    vector_width: int = setting(1, "elements of a vector access, a power of two", (1, 2, 4, 8))
    by_rows: bool = setting(False, "whether a block stays in one row, so that a thread finds what a row shares once")


class CudaPointwise(CudaSchedule):
    """Vectors of the innermost axis."""

    name = "cuda_pointwise"
    settings = PointwiseSettings

    def accepts(self, nest: Nest) -> bool:
        """Any nest that reduces nothing and reads what it overwrites only in place, but for large ones that turn."""
        # A group keeps its schedule through a fusion for as long as that accepts it, so another's must say no.
        return (
            not nest.reductions
            and iteration_space.is_safe_in_place(nest)
            and not transpose.dominates(self.hardware, nest)
            and self._holds(nest, PointwiseSettings())
        )

    def defaults(self, nest: Nest) -> PointwiseSettings:
        """As wide as memory allows; one vector a thread, or four where a long row shares values.

        Cross-entropy's gradient of 8192x128256 in bf16, whose rows share two quotients: 1116 us instead of 1189, and
        1028 with the exponential that suits what is stored in 16 bits.
        """
        simple, axis = _canonical(nest)
        exp = Exp.FAST if costly_parts.exponentials(simple) and costly_parts.is_stored_short(simple) else Exp.ACCURATE
        plain = PointwiseSettings(dependent_launch=self.pdl[0], vector_width=_widest_vector(simple, axis), exp=exp)
        while plain.vector_width > 1 and not self._holds(nest, plain):  # of many tensors narrower vectors
            plain = replace(plain, vector_width=plain.vector_width // 2)
        by_rows = replace(plain, by_rows=True, vectors=_OF_A_ROW)
        is_long = axis.extent >= _MOST_IDLE * by_rows.vector_width * by_rows.threads * _OF_A_ROW
        shares = any(axis.name not in load.index.axes() for load in memory_access.loads(simple))
        if is_long and shares and geometry.legal([by_rows], lambda settings: self._require(nest, settings)):
            return by_rows
        return plain

    def alternatives(self, nest: Nest, current: PointwiseSettings) -> Sequence[PointwiseSettings]:
        """One change away."""
        widest = _widest_vector(*_canonical(nest))
        widths = [width for width in (1, 2, 4, 8) if width <= widest]
        changes = current.one_change_away(dependent_launch=self.pdl, vector_width=widths)
        return geometry.legal(changes, lambda settings: self._require(nest, settings))

    def footprint(self, nest: Nest, settings: PointwiseSettings) -> Footprint:
        """Nothing beyond the nest's own bytes, but for sectors of which a strided access uses an element."""
        return Footprint(transpose.saved_bytes(nest), _blocks(_canonical(nest)[0], settings), 1)

    def emit(self, nest: Nest, settings: PointwiseSettings) -> Emission:
        """One kernel."""
        work = self.work(nest, settings)
        lines = function_text.header(nest, self.name, settings) + work.kernel()
        return geometry.one_kernel(
            nest, lines, HEADERS, grid=work.blocks, threads=settings.threads, dependent=settings.dependent_launch
        )

    def work(self, nest: Nest, settings: PointwiseSettings) -> BlockWork:
        """What a block does, in a kernel of this nest or of several.

        Raises:
            IllegalMove: the settings cannot run this nest.
        """
        self._require(nest, settings)
        simple, axis = _canonical(nest)
        name, struct, text = _text(simple, axis, settings)
        return BlockWork(
            name, struct, text, "compute_pointwise", _blocks(simple, settings), settings.threads, HEADERS,
            _held_registers(simple, axis, settings), settings.dependent_launch,
        )  # fmt: skip

    def _holds(self, nest: Nest, settings: PointwiseSettings) -> bool:
        """Whether a thread has registers for what it loads."""
        simple, axis = _canonical(nest)
        return geometry.has_registers(self.hardware, settings.threads, 1, _held_registers(simple, axis, settings))

    def _require(self, nest: Nest, settings: PointwiseSettings) -> None:
        simple, axis = _canonical(nest)
        width, vectors = settings.vector_width, settings.vectors
        if width < 1 or _widest_vector(simple, axis) % width:
            raise IllegalMove(f"{nest.name}: {width} elements do not lie together everywhere")
        if settings.by_rows and (len(simple.parallel) == 1 or axis.extent < width * settings.threads * vectors):
            raise IllegalMove(f"{nest.name}: a row of {axis.extent} is less than a block of {settings.threads} takes")
        held = _held_registers(simple, axis, settings)
        geometry.require_block(self.hardware, nest, threads=settings.threads, held_registers=held)


def _held_registers(simple: Nest, axis: Axis, settings: PointwiseSettings) -> int:
    """Of the vectors that a thread loads before it stores."""
    held = (
        max(1, settings.vector_width * simple.buffer(load.buffer).type.size_bytes // 4)
        for load in memory_access.loads(simple)
        if axis.name in load.index.axes()
    )
    return sum(held) * settings.vectors


def _canonical(nest: Nest) -> tuple[Nest, Axis]:
    """The nest with all axes parallel, and its innermost axis."""
    simple = with_pairs_merged(iteration_space.all_parallel(iteration_space.canonical(nest)))
    return simple, simple.parallel[-1]


def _widest_vector(nest: Nest, axis: Axis) -> int:
    """The most elements that every contiguous access can move at once; the last may be fewer where all axes are one."""
    widest = memory_access.widest_vector(nest, axis)
    if widest > 1 or len(nest.parallel) > 1 or geometry.offset_type(nest) != "int":
        return widest
    width = memory_access.best_vector(nest, axis, _TAILED)
    place = memory_access.skew(nest, axis, width)
    return width if place is not None and place.offset % width == 0 else widest


def _blocks(nest: Nest, settings: PointwiseSettings) -> int:
    rows = nest.row_count // nest.parallel[-1].extent if settings.by_rows else 1
    vectors = -(-nest.row_count // (rows * settings.vector_width))
    return rows * -(-vectors // (settings.threads * settings.vectors))


def _text(nest: Nest, axis: Axis, settings: PointwiseSettings) -> tuple[str, list[str], kernel_text.KernelText]:
    """The struct: its name, its lines, and what wrote them."""
    width = settings.vector_width
    skew = memory_access.skew(nest, axis, width)
    text = kernel_text.KernelText(
        nest, axis.name, width, settings.loads, settings.stores, kernel_text.dialect_of(settings.exp),
        skew=skew, reserved=_MEMBERS,
    )  # fmt: skip
    function, offset = text.function, text.offset
    outer = [each for each in nest.parallel if each.name != axis.name]
    places = [function.axes[each.name] for each in outer]
    reads = _Reads(text, is_aligned=skew is None)
    arguments = f"const {offset} (&at)[{max(1, len(outer))}], {offset} {text.begin}"
    located = generated_struct.located(places, "at")
    lines = ["", f"  using Offset = {offset};"]
    lines += generated_struct.constant("ws::PointwiseTiling", "kTiling", {
        "threads": settings.threads, "items": settings.vectors, "vector_width": width,
        "row_vectors": -(-axis.extent // width), "by_rows": settings.by_rows, "overlap": settings.dependent_launch,
    })  # fmt: skip
    if nest.row_count % width:
        lines.append(f"  static constexpr int kColumns = {nest.row_count};  // the last vector hangs over")
    lines.append(f"  using Outer = ws::Axes<{', '.join(str(each.extent) for each in outer) or 1}>;")
    lines += [f"  using Loads = ws::List<{', '.join(vector.kind for vector in reads.vectors)}>;", ""]
    for k, vector in enumerate(reads.vectors):
        head = f"{vector.kind} load(ws::VectorLoad<{k}>, {arguments}) const"
        lines += generated_struct.function(head, [*located, f"    return {vector.text};"])
    inner = generated_struct.body(text, [each.name for each in outer])
    text.stores(inner, nest.stores, settled=reads.elements)
    given = [f"const {vector.kind}& {vector.name}" for vector in reads.vectors]
    head = f"void compute({', '.join([arguments, *given])}) const"
    lines += generated_struct.function(head, [*located, *inner.lines])
    name = f"{text.entry}_pointwise"
    return name, generated_struct.struct(name, text, lines), text


class _Vector(NamedTuple):
    """A vector that is loaded: its type, its name, and what loads it."""

    kind: str
    name: str
    text: str


class _Reads:
    """The vectors that loads need, each once, and the text of each load's element."""

    def __init__(self, text: kernel_text.KernelText, *, is_aligned: bool) -> None:
        self._text, self._is_aligned = text, is_aligned
        self.vectors: list[_Vector] = []
        self.elements: list[tuple[Expression, str]] = []
        known: dict[tuple[str, Neighbours], str] = {}
        for load in text.varying_loads(store.value for store in text.nest.stores):
            found = self._among(load)
            if found is None:
                continue
            all_of_them = (load.buffer, replace(found, place=Index()))
            if all_of_them not in known:
                known[all_of_them] = text.pack(load)
                kind = text.vector_type(text.storage(load.buffer), found.count)
                first = text.vector_load(replace(load, index=found.index), text.begin, found.count)
                self.vectors.append(_Vector(kind, known[all_of_them], first))
            place = text.function.index(found.place, {text.axis: text.lane})
            self.elements.append((load, text.element(load.buffer, known[all_of_them], place)))

    def _among(self, load: Load) -> Neighbours | None:
        """What a vector's elements are among, if one access has them all."""
        text, how = self._text, self._text.access_of(load)
        if how == "vector":
            return Neighbours(load.index, text.vector_width, Index.axis(text.axis))
        if how == "same" or not self._is_aligned:
            return None
        nest = text.nest
        return neighbours(load.index, nest.buffer(load.buffer), text.axis, text.vector_width, nest.extents)
