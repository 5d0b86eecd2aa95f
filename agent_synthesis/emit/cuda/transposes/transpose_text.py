"""What a nest that is transposed adds to `ws_transpose.cuh`: sizes of a tile, loads, what is computed, and stores.

The one idea: the skeleton moves tiles and knows phases and barriers; it sees the nest as functions of one vector each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from agent_synthesis.emit.cuda import generated_struct, kernel_text
from agent_synthesis.emit.cuda.schedule import DEPENDENT_LAUNCH
from agent_synthesis.emit.expression import Scope
from agent_synthesis.nests.analysis.transposition import Turn
from agent_synthesis.nests.ir import Load, Store
from agent_synthesis.settings import Exp, Loads, Settings, Stores, setting

_MEMBERS = (
    "Offset", "kTiling", "Outer", "Across", "Along", "Results", "load", "compute", "store", "at", "vector", "tiles",
)  # fmt: skip
"""What the struct calls things of its own."""


Order = StrEnum("Order", "ALONG ACROSS")
"""An axis of a tile."""


@dataclass(frozen=True)
class TransposeSettings(Settings):
    """Of `cuda_transpose`."""

    loads: Loads = setting(Loads.CACHED, "whether what is read is kept for others")
    stores: Stores = setting(Stores.PLAIN, "whether results pass the caches")
    preload: bool = setting(True, "whether what runs along is read before the exchange")
    order: Order = setting(Order.ALONG, "the axis along which tiles come one after the other")
    exp: Exp = setting(Exp.ACCURATE, "the exponential")
    dependent_launch: bool = setting(True, DEPENDENT_LAUNCH)
    threads: int = setting(256, "threads of a block", (128, 256, 512))
    along: int = setting(64, "elements of a tile along, a power of two", (32, 64, 128))
    across: int = setting(64, "elements of a tile across, a power of two", (32, 64, 128))
    vector_width: int = setting(1, "elements that are computed together, a power of two", (1, 2, 4, 8))


class TransposeText:
    """The struct of a turn's tiles."""

    def __init__(self, found: Turn, settings: TransposeSettings) -> None:
        self._found, self._settings, self._width = found, settings, settings.vector_width
        self.text = kernel_text.KernelText(
            found.nest, found.along.name, self._width, settings.loads, settings.stores,
            kernel_text.dialect_of(settings.exp), reserved=_MEMBERS,
        )  # fmt: skip
        function = self.text.function
        self._i, self._j = function.axes[found.across.name], self.text.j
        self._i_begin = function.names.take(f"{self._i}_begin")
        self._places = [function.axes[axis.name] for axis in found.others]
        self._crossing = found.crossing
        loads = self.text.varying_loads(store.value for store in found.nest.stores)
        self._along = [
            load for load in loads if found.is_of_a_tile(load.index) and self.text.access_of(load) == "vector"
        ]  # fmt: skip

    @property
    def name(self) -> str:
        """Of the struct."""
        return f"{self.text.entry}_transpose"

    def struct(self) -> list[str]:
        """The struct's lines."""
        text = self.text
        across = [(access, self._vector(access)) for access in self._crossing]
        loads = [kind for access, kind in across if isinstance(access, Load)]
        results = [kind for access, kind in across if isinstance(access, Store)]
        along = [text.vector_type(text.storage(load.buffer)) for load in self._along]
        sizes = [
            "",
            f"  using Offset = {text.offset};",
            *generated_struct.constant("ws::TransposeTiling", "kTiling", self._sizes()),
            f"  using Outer = ws::Axes<{', '.join(str(axis.extent) for axis in self._found.others) or 1}>;",
            f"  using Across = ws::List<{', '.join(loads)}>;",
            f"  using Along = ws::List<{', '.join(along)}>;",
            f"  using Results = ws::List<{', '.join(results)}>;",
            "",
        ]
        return generated_struct.struct(self.name, text, sizes, list(self._moves()), self._compute())

    def _sizes(self) -> dict[str, int | bool]:
        found, settings = self._found, self._settings
        return {
            "threads": settings.threads, "along": settings.along, "across": settings.across,
            "vector_width": self._width,
            "element_bytes": found.nest.buffer(found.nest.stores[0].buffer).type.size_bytes,
            "along_extent": found.along.extent, "across_extent": found.across.extent,
            "prefetch": settings.preload, "across_first": settings.order is Order.ACROSS,
            "overlap": settings.dependent_launch,
        }  # fmt: skip

    def _vector(self, access: Load | Store) -> str:
        """A vector of what crosses, as it lies in memory."""
        kind = self.text.function.dialect.storage[self.text.storage(access.buffer)]
        return f"ws::Pack<{kind}, {self._found.width_across(access)}>"

    def _head(self, result: str, name: str, axes: Sequence[str], *more: str, tag: str = "") -> str:
        offset = self.text.offset
        at = f"const {offset} (&at)[{max(1, len(self._places))}]"
        given = [*([f"ws::{tag}"] if tag else []), at, *(f"{offset} {axis}" for axis in axes), *more]
        return f"{result} {name}({', '.join(given)}) const"

    def _moves(self) -> Iterator[str]:
        """Loads across and along, and stores across, of one vector each."""
        text, across = self.text, (self._i_begin, self._j)
        places = generated_struct.located(self._places, "at")
        loads = [access for access in self._crossing if isinstance(access, Load)]
        for k, load in enumerate(loads):
            head = self._head(self._vector(load), "load", across, tag=f"AcrossLoad<{k}>")
            reuse = "ws::kOnce" if self._settings.loads is Loads.EVICT_FIRST else "ws::kShared"
            reuse = "ws::kWritten" if self._found.nest.buffer(load.buffer).written else reuse
            value = f"ws::load<{self._found.width_across(load)}, {reuse}>({self._address(load)})"
            yield from generated_struct.function(head, [*places, f"    return {value};"])
        for k, load in enumerate(self._along):
            kind = text.vector_type(text.storage(load.buffer))
            head = self._head(kind, "load", (self._i, text.begin), tag=f"AlongLoad<{k}>")
            yield from generated_struct.function(head, [*places, f"    return {text.vector_load(load, text.begin)};"])
        stores = [access for access in self._crossing if isinstance(access, Store)]
        for k, store in enumerate(stores):
            head = self._head("void", "store", across, f"const {self._vector(store)}& vector", tag=f"AcrossStore<{k}>")
            function = "ws::store_streaming" if text.streaming else "ws::store"
            yield from generated_struct.function(head, [*places, f"    {function}({self._address(store)}, vector);"])

    def _compute(self) -> list[str]:
        """Computes a vector along from loaded ones, and stores what lies along."""
        text, nest, names = self.text, self._found.nest, self.text.function.names
        loads = [*(access for access in self._crossing if isinstance(access, Load)), *self._along]
        held = [(load, names.take(f"{text.function.buffers[load.buffer]}_vector")) for load in loads]
        results = {
            id(store): names.take(f"{text.function.buffers[store.buffer]}_result")
            for store in self._crossing
            if isinstance(store, Store)
        }
        inner = generated_struct.body(text, [axis.name for axis in (*self._found.others, self._found.across)])
        wide = [store for store in nest.stores if id(store) not in results and text.access_of(store) == "vector"]
        wide_names = {id(store): names.take(f"{text.function.buffers[store.buffer]}_pack") for store in wide}
        for store in wide:
            inner.line(f"{text.vector_type(text.storage(store.buffer))} {wide_names[id(store)]};")

        def element(scope: Scope) -> None:
            for store in nest.stores:
                place = results.get(id(store)) or wide_names.get(id(store))
                scope.store(store, place and f"{place}[{text.lane}]")

        text.elements(inner, [store.value for store in nest.stores], element, held=held)
        function = "ws::store_streaming" if text.streaming else "ws::store"
        for store in wide:
            inner.line(f"{function}({text.address(store.buffer, store, text.begin)}, {wide_names[id(store)]});")
        vectors = [f"const {text.vector_type(text.storage(load.buffer))}& {name}" for load, name in held]
        stored = (access for access in self._crossing if isinstance(access, Store))
        vectors += [f"{text.vector_type(text.storage(store.buffer))}& {results[id(store)]}" for store in stored]
        head = self._head("void", "compute", (self._i, text.begin), *vectors)
        return generated_struct.function(head, generated_struct.located(self._places, "at") + inner.lines)

    def _address(self, access: Load | Store) -> str:
        """Of a vector that lies across."""
        function = self.text.function
        index = function.index(access.index, {self._found.across.name: self._i_begin})
        return f"{function.buffers[access.buffer]} + {f'({index})' if ' + ' in index else index}"
