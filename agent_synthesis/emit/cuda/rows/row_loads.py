"""What a row of a reduction on CUDA loads along itself: fields of a vector access, sets of them, and their addresses.

The one idea: a load is a bit, so that a skeleton says by sets what it reads when and where from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from agent_synthesis.emit.cuda.generated_struct import function
from agent_synthesis.emit.cuda.kernel_text import KernelText
from agent_synthesis.emit.expression import Names, Scope
from agent_synthesis.nests import memory_access
from agent_synthesis.nests.ir import Expression, Load, Nest
from warpsmith.errors import IllegalMove

_MOST_LOADS = 64
"""Bits of a set."""


class RowLoads:
    """The loads of one nest along its rows; what is loaded element by element is none of them."""

    def __init__(self, nest: Nest, text: KernelText) -> None:
        self._nest, self._text = nest, text
        self._fields = Names()
        self._loads = self._name_loads()
        bits = Names()
        self._bits = {load: f"k{bits.take(field.title().replace('_', ''))}" for load, (field, _) in self._loads.items()}
        self._kept: list[str] = []

    def _name_loads(self) -> dict[Load, tuple[str, bool]]:
        """Load → its field, and whether that is one value that the elements of a vector share."""
        text = self._text
        roots = [reduction.value for reduction in self._nest.reductions] + [store.value for store in self._nest.stores]
        found = {}
        for load in text.varying_loads(roots):
            how, buffer = text.access_of(load), text.function.buffers[load.buffer]
            if how == "vector" or (text.vector_width == 1 and memory_access.access(load.index, text.axis, 1) == "each"):
                found[load] = (self._fields.take(buffer), False)
            elif how == "same" and text.vector_width > 1:
                found[load] = (self._fields.take(f"{buffer}_at"), True)
        if len(found) > _MOST_LOADS:
            raise IllegalMove(f"{self._nest.name}: reads {len(found)} rows at once, of {_MOST_LOADS} that a set names")
        return found

    def set_of(self, loads: Iterable[Load]) -> str:
        """A set of them, as a constant."""
        wanted = list(loads)
        return " | ".join(self._bits[load] for load in self._loads if load in wanted) or "0"

    def below(self, *roots: Expression) -> str:
        """The set of those that expressions need."""
        return self.set_of(self._text.varying_loads(roots))

    def define(self, inner: Scope) -> None:
        """Makes them known in the block of an element of `vector`."""
        for load, (field, shared) in self._loads.items():
            element = f"vector.{field}[{self._text.e}]"
            narrow = self._text.storage(load.buffer).is_widened
            inner.define(load, f"vector.{field}" if shared else f"ws::widen({element})" if narrow else element)

    def keep(self, kind: str) -> str:
        """A field for what a stage computes and others need again; its element."""
        field = self._fields.take("kept")
        self._kept.append(f"ws::Pack<{kind}, {self._text.vector_width}> {field};")
        return f"vector.{field}[{self._text.e}]"

    def lines(self, more: Sequence[tuple[str, Iterable[Load]]]) -> list[str]:
        """Bits, sets, the vector, and the function that gives each load's address; `more`: further sets, by name."""
        bits = ", ".join(f"{bit} = {1 << number}ull" for number, bit in enumerate(self._bits.values()))
        scalars = [load for load, (_, shared) in self._loads.items() if shared]
        common = [load for load in self._loads if load not in scalars and not self._text.varies_by_row(load)]
        sets = [(name, self.set_of(loads)) for name, loads in [("kScalars", scalars), ("kCommon", common), *more]]
        return [
            *([f"  enum Load : ws::LoadSet {{ {bits} }};"] if self._loads else []),
            *(f"  static constexpr ws::LoadSet {name} = {text};" for name, text in sets if text != "0"),
            *self._vector(),
            *self._each_load(),
        ]

    def _vector(self) -> list[str]:
        fields, sizes, text = [], [], self._text
        for load, (field, shared) in self._loads.items():
            storage = text.storage(load.buffer)
            kind = text.function.dialect.compute(load.type) if shared else text.vector_type(storage)
            fields.append(f"{kind} {field};")
            sizes.append(str(text.vector_width * storage.size_bytes))
        return [
            "  struct Vector {",
            *(f"    {field}" for field in [*fields, *self._kept]),
            "  };",
            *([f"  static constexpr int kLoadBytes[] = {{{', '.join(sizes)}}};"] if sizes else []),
        ]

    def _each_load(self) -> list[str]:
        visits, text = [], self._text
        for load, (field, shared) in self._loads.items():
            if shared:
                index = text.function.index(load.index, {text.axis: text.begin})
                what = f"ws::RowScalar<&Vector::{field}>(), {text.function.element(load.buffer, index)}"
            else:
                address = text.address(load.buffer, load, text.begin)
                what = f"ws::RowLoad<{self._bits[load]}, &Vector::{field}, {text.reuse_of(load)}>(), {address}"
            visits.append(f"    if constexpr (kLoads & {self._bits[load]}) visit({what});")
        head = f"void each_load(int {text.begin}, const Visit& visit) const"
        return ["  template <ws::LoadSet kLoads, class Visit>", *function(head, visits)]
