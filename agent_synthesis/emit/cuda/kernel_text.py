"""The text that all CUDA kernels share: the signature, and one aligned vector of elements loaded, computed and stored.

The one idea: everything below a vector's first element is an unrolled loop over its elements, and an access that the
elements make to neighbours becomes one wide access. Nothing here knows rows, threads or exchanges.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from agent_synthesis.emit import function_text
from agent_synthesis.emit.cuda import geometry
from agent_synthesis.emit.expression import Function, Names, Scope
from agent_synthesis.emit.spelling import CUDA, CUDA_FAST_EXP, Dialect
from agent_synthesis.nests import memory_access
from agent_synthesis.nests.ir import BufferRef, Expression, Index, Load, Nest, Store, Type
from agent_synthesis.nests.memory_access import Lookup
from agent_synthesis.settings import Exp, Loads, Stores
from warpsmith.v1 import candidate_pb2

UNROLL = "#pragma unroll"

_LINE_CHARACTERS = 112


class Kernel(NamedTuple):
    """A kernel's text, and how it is launched."""

    text: list[str]
    launch: candidate_pb2.Launch


class KernelText:
    """Pieces of one kernel over a canonical nest whose vectors lie along `axis`."""

    def __init__(
        self,
        nest: Nest,
        axis: str,
        vector_width: int,
        loads: Loads = Loads.CACHED,
        stores: Stores = Stores.PLAIN,
        dialect: Dialect = CUDA,
        *,
        skew: Index | None = None,
        reserved: Iterable[str] = (),
    ) -> None:
        """`reserved`: what no buffer or variable may be called."""
        self.nest = nest
        self.axis = axis
        self.vector_width = vector_width
        self.function = Function(dialect, nest, Names(reserved))
        self.entry = function_text.name_everything(self.function)
        self.offset = geometry.offset_type(nest)
        self.streaming = stores is Stores.STREAMING
        names = self.function.names
        self.j = self.function.axes[axis] if axis else ""
        self.begin = names.take(f"{self.j}_begin") if axis else ""
        self.e = names.take("e")
        self._streams = loads is Loads.EVICT_FIRST
        self._skew = skew
        """Where unaligned rows begin, whose vectors are predicated by the number of the element."""
        self._loaded = {load.buffer for load in memory_access.loads(nest)}
        self._rows = {a.name for a in nest.parallel if a.name != axis}

    # -- signature

    def signature(
        self,
        entry: str,
        threads: int,
        min_blocks: int,
        buffers: Iterable[BufferRef] | None = None,
        workspaces: Mapping[str, str] | None = None,
    ) -> list[str]:
        """The head of a kernel; workspaces are name → pointer type."""
        passed = list(self.nest.buffers if buffers is None else buffers)
        arguments = [self.argument(buffer) for buffer in passed]
        arguments += [f"{kind}* {name}" for name, kind in (workspaces or {}).items()]
        bounds = f"__launch_bounds__({threads}, {min_blocks})"
        head = f'extern "C" __global__ void {bounds} {entry}('
        one_line = f"{head}{', '.join(arguments)}) {{"
        return [one_line] if len(one_line) <= 120 else [head, *wrapped(arguments)]

    def argument(self, buffer: BufferRef, name: str = "") -> str:
        """A buffer as a parameter; `name`: another than it has here."""
        kind = self.function.dialect.storage[buffer.type]
        name = name or self.function.buffers[buffer.name]
        if not buffer.written:
            return f"const {kind}* __restrict__ {name}"
        return f"{kind}* {name}" if buffer.name in self._loaded else f"{kind}* __restrict__ {name}"

    # -- one access

    def storage(self, buffer: str) -> Type:
        """Type of a buffer's elements."""
        return self.nest.buffer(buffer).type

    def varies_by_row(self, load: Load) -> bool:
        """Whether rows differ in what they load."""
        return bool(load.index.axes() & self._rows)

    def vector_type(self, type_: Type, count: int = 0) -> str:
        """A vector of stored elements; `count`: of how many, if not the vector's width."""
        return f"ws::Pack<{self.function.dialect.storage[type_]}, {count or self.vector_width}>"

    def vector_load(self, load: Load, begin: str, count: int = 0) -> str:
        """The vector that begins at element `begin` of the axis; `count`: of how many elements, likewise."""
        reuse = self.reuse_of(load)
        address = self.address(load.buffer, load, begin)
        if self._skew is not None:
            return f"ws::load_inside<{self.vector_width}, {reuse}, kColumns>({address}, {begin})"
        return f"ws::load<{count or self.vector_width}, {reuse}>({address})"

    def reuse_of(self, load: Load) -> str:
        """How a load treats the caches."""
        if self.nest.buffer(load.buffer).written:
            return "ws::kWritten"
        return "ws::kOnce" if self._streams and (load.index.axes() & self._rows or not self._rows) else "ws::kShared"

    def address(self, buffer: str, access: Load | Store, begin: str) -> str:
        """The address of an access by the element `begin`."""
        index = self.function.index(access.index, {self.axis: begin})
        # One sum, so that vectors a constant apart share one address: 0 instead of 16 spilled bytes at 4096x16384.
        return f"{self.function.buffers[buffer]} + {f'({index})' if ' + ' in index else index}"

    def element(self, buffer: str, vector: str, place: str = "") -> str:
        """One element of a vector loaded from a buffer, widened; `place`: another than the element's own."""
        text = f"{vector}[{place or self.lane}]"
        return f"ws::widen({text})" if self.storage(buffer).is_widened else text

    def access_of(self, access: Load | Store) -> memory_access.Access:
        """How a vector makes the access."""
        if self._skew is not None:
            return memory_access.unaligned_access(access.index, self.axis, self.vector_width, self._skew)
        return memory_access.access(access.index, self.axis, self.vector_width)

    def varying_loads(self, roots: Iterable[Expression], without: Iterable[Expression] = ()) -> list[Load]:
        """Loads below the roots, and not only below what is `without`, that use the axis, in order of first use."""
        parts = self.function.interner.parts(roots, without)
        found = {n: part for n, part in parts.items() if isinstance(part, Load) and self.axis in part.index.axes()}
        return [found[number] for number in sorted(found)]

    def wide_lookups(self, roots: Iterable[Expression], without: Iterable[Expression] = ()) -> list[Lookup]:
        """Lookups below the roots, and not only below what is `without`, whose vectors are one access each."""
        if self._skew is not None or self.vector_width == 1:
            return []
        parts = self.function.interner.parts(roots, without)
        found = memory_access.lookups_among(part for _, part in sorted(parts.items(), key=operator.itemgetter(0)))
        return [each for each in found if memory_access.lookup_access(each, self.axis, self.vector_width) == "vector"]

    def vector_lookup(self, scope: Scope, lookup: Lookup, begin: str) -> str:
        """The vector of a lookup that begins at element `begin` of the axis; what finds it is added to the scope."""
        places = [self.function.index(lookup.index, {self.axis: begin})]
        for value, step in lookup.positions:
            place = scope.value(value).operand
            places.append(place if step == 1 else f"{step} * {place}")
        address = f"{self.function.buffers[lookup.buffer]} + ({' + '.join(places)})"
        return f"ws::load<{self.vector_width}, ws::kShared>({address})"

    # -- one vector

    def elements(
        self,
        scope: Scope,
        roots: Sequence[Expression],
        body: Callable[[Scope], None],
        *,
        begin: str = "",
        held: Sequence[tuple[Load | Lookup, str]] = (),
        known: Iterable[str] = (),
        settled: Sequence[tuple[Expression, str]] = (),
    ) -> None:
        """Inside `scope`, for the vector at `begin`: loads what is not held, then `body` for each element.

        `held`: loads and lookups whose vectors are in registers, with the text of the vector. `settled`: known values,
        with the text of an element's.
        """
        begin = begin or self.begin
        single = self.vector_width == 1
        inner = scope.child([self.axis, *known], deeper=0 if single else 1 + (self._skew is not None))
        number = self.function.interner.number
        vectors = {number(load): text for load, text in held if isinstance(load, Load)}
        for part, known_text in settled:
            inner.define(part, known_text)
        self._define_lookups(scope, inner, roots, begin, held, [part for part, _ in settled])
        for load in self.varying_loads(roots, [part for part, _ in settled]):
            text = vectors.get(number(load))
            how = self.access_of(load)
            if text is not None:
                inner.define(load, self.element(load.buffer, text))
            elif how == "vector":
                name = self.pack(load)
                kind = self.vector_type(self.storage(load.buffer))
                scope.line(f"const {kind} {name} = {self.vector_load(load, begin)};")
                inner.define(load, self.element(load.buffer, name))
            elif how == "same" and not single:
                name = self.function.names.take(f"{self.function.buffers[load.buffer]}_at")
                element = self.function.element(load.buffer, self.function.index(load.index, {self.axis: begin}))
                scope.line(f"const {self.function.dialect.compute(load.type)} {name} = {element};")
                inner.define(load, name)
        inner.expect(roots)
        body(inner)
        uses_axis = any(re.search(rf"\b{self.j}\b", line) for line in inner.lines)
        declaration = f"const {self.offset} {self.j} = {begin}{'' if single else f' + {self.e}'};"
        if single:
            if uses_axis:
                scope.line(declaration)
            scope.absorb(inner)
            return
        scope.line(UNROLL)
        scope.line(f"for (int {self.e} = 0; {self.e} < {self.vector_width}; ++{self.e}) {{")
        if uses_axis or self._skew is not None:
            scope.line(f"  {declaration}")
        if self._skew is not None:
            scope.line(f"  if (ws::is_inside<kColumns>({self.j})) {{")
            scope.absorb(inner)
            scope.line("  }")
        else:
            scope.absorb(inner)
        scope.line("}")

    def _define_lookups(
        self,
        scope: Scope,
        inner: Scope,
        roots: Iterable[Expression],
        begin: str,
        held: Sequence[tuple[Load | Lookup, str]],
        settled: Iterable[Expression],
    ) -> None:
        """Has `inner` know the elements of lookups, whose vectors are held or are loaded in `scope`."""
        vectors = [(lookup, text) for lookup, text in held if isinstance(lookup, Lookup)]
        for lookup in self.wide_lookups(roots, [*settled, *(lookup.call for lookup, _ in vectors)]):
            vectors.append((lookup, self.pack(lookup)))
            kind = self.vector_type(self.storage(lookup.buffer))
            scope.line(f"const {kind} {vectors[-1][1]} = {self.vector_lookup(scope, lookup, begin)};")
        for lookup, vector in vectors:
            inner.define(lookup.call, self.element(lookup.buffer, vector))

    @property
    def lane(self) -> str:
        """Index of an element in its vector."""
        return self.e if self.vector_width > 1 else "0"

    def stores(
        self,
        scope: Scope,
        stores: Sequence[Store],
        define: Callable[[Scope], None] = lambda _: None,
        *,
        begin: str = "",
        held: Sequence[tuple[Load | Lookup, str]] = (),
        settled: Sequence[tuple[Expression, str]] = (),
    ) -> None:
        """Stores of every element of the vector at `begin`; `define` may make values known to the element's scope."""
        wide = [(store, self.pack(store)) for store in stores if self.access_of(store) == "vector"]
        for store, name in wide:
            scope.line(f"{self.vector_type(self.storage(store.buffer))} {name};")
        places = {id(store): f"{name}[{self.lane}]" for store, name in wide}

        def body(inner: Scope) -> None:
            define(inner)
            for store in stores:
                inner.store(store, places.get(id(store)))

        values = [store.value for store in stores]
        self.elements(scope, values, body, begin=begin, held=held, settled=settled)
        function = "ws::store_streaming" if self.streaming else "ws::store"
        for store, name in wide:
            place = self.address(store.buffer, store, begin or self.begin)
            if self._skew is not None:
                scope.line(f"{function}_inside<kColumns>({place}, {name}, {begin or self.begin});")
            else:
                scope.line(f"{function}({place}, {name});")

    def pack(self, access: Load | Lookup | Store) -> str:
        """A name for a vector of what is accessed."""
        return self.function.names.take(f"{self.function.buffers[access.buffer]}_pack")


def wrapped(arguments: Sequence[str]) -> list[str]:
    """A function's arguments in lines of readable length, closed with the body's brace."""
    lines, indent = [""], "    "
    for argument in arguments:
        if lines[-1] and len(indent) + len(lines[-1]) + len(argument) > _LINE_CHARACTERS:
            lines.append("")
        lines[-1] += f"{argument}, "
    lines = [f"{indent}{line.rstrip()}" for line in lines]
    lines[-1] = lines[-1].rstrip(",") + ") {"
    return lines


def dialect_of(exponential: Exp) -> Dialect:
    """The dialect with the chosen exponential."""
    return CUDA_FAST_EXP if exponential is Exp.FAST else CUDA
