"""What the skeletons of row reductions on CUDA do to one element: expressions for each stage, and for the stores.

The one idea: a value that does not depend on the place in the row is a member of the struct, so that loops over
elements find it ready.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from agent_synthesis.emit.cuda import ordinary_numbers
from agent_synthesis.emit.cuda.generated_struct import Members, function
from agent_synthesis.emit.cuda.kernel_text import KernelText
from agent_synthesis.emit.cuda.rows.row_loads import RowLoads
from agent_synthesis.emit.cuda.stage_state import folds_type, results, state_of, state_type
from agent_synthesis.emit.expression import Names, Scope
from agent_synthesis.emit.spelling import accumulator
from agent_synthesis.nests import memory_access, passes
from agent_synthesis.nests.analysis import costly_parts
from agent_synthesis.nests.analysis.stages import Stage, kept_parts, narrowed
from agent_synthesis.nests.ir import Expression, Nest, Reduction, Summed


class RowElements:
    """Writes the functions of one struct; used once, stage by stage in order and then the stores."""

    def __init__(
        self, nest: Nest, text: KernelText, loads: RowLoads, stages: Sequence[Stage], *, keeps: bool = False
    ) -> None:
        """`keeps`: whether registers hold a row from its first visit to its last."""
        self._nest, self._stages, self.text, self.loads = nest, list(stages), text, loads
        self.function, self.dialect = text.function, text.function.dialect
        self.once = Members(self.function, [])
        """What no row changes."""
        self.row = Members(self.function, [axis.name for axis in nest.parallel], self.once)
        """What is known of a row."""
        self.element_stores = [s for s in nest.stores if nest.is_element_store(s) and not isinstance(s, Summed)]
        self._to_keep = kept_parts(nest, stages) if keeps else {}
        self._kept: list[tuple[Expression, str]] = []
        self._rescale: tuple[Stage, str] | None = None
        self._results = dict(self.function.reductions)

    # -- elements

    def _element(self, known: Iterable[str] = ()) -> Scope:
        """The block of one element, in which its loads are known."""
        inner = Scope(self.function, self.row, [self.text.axis, *known], depth=2)
        self.loads.define(inner)
        for part, text in self._kept:
            inner.define(part, text)
        return inner

    def _keep(self, inner: Scope, number: int) -> None:
        """Lets the vector keep parts that are needed again."""
        for part in self._to_keep.get(number, ()):
            place = self.loads.keep(self.dialect.compute(part.type))
            inner.line(f"{place} = {inner.value(part).text};")
            inner.define(part, place)
            self._kept.append((part, place))

    def _returns(self, kind: str, name: str, number: int, inner: Scope, text: str, more: str = "") -> list[str]:
        inner.line(f"return {text};")
        vector = f"Vector& vector, {self.text.offset} {self.text.j}, int {self.text.e}{more}"
        return function(f"{kind} {name}(ws::RowNumber<{number}>, {vector}) const", inner.lines)

    # -- stages

    def stage(self, number: int) -> tuple[str, list[str]]:
        """The stage's type, and its functions of an element."""
        stage = self._stages[number]
        make = {"folds": self._folds, "shifted": self._shifted, "moments": self._moments}[stage.kind]
        return make(stage, number)

    def _folds(self, stage: Stage, number: int) -> tuple[str, list[str]]:
        state, roots = state_type(stage, self.dialect), [reduction.value for reduction in stage.reductions]
        logarithms = costly_parts.logarithms(roots, self.text.axis) if not self._to_keep.get(number) else []
        lines = []
        for quick in (True, False) if logarithms else (False,):
            inner = self._element()
            values = [costly_parts.of_ordinary(root, logarithms) if quick else root for root in roots]
            inner.expect(values)
            if quick:
                ordinary_numbers.know_logarithms(inner, logarithms, "ordinary")
            self._keep(inner, number)
            name, more = ("element_quick", ", bool& ordinary") if quick else ("element", "")
            text = self._folded(stage.reductions, values, inner)
            lines += self._returns(state, name, number, inner, text, more)
        return f"ws::RowStage<{state}, {self.loads.below(*roots)}{', 0, true' if logarithms else ''}>", lines

    def _folded(self, reductions: Sequence[Reduction], values: Sequence[Expression], inner: Scope) -> str:
        """The state of folds that one element makes."""
        parts = []
        for reduction, value in zip(reductions, values, strict=True):
            kind, text = accumulator(reduction, self.dialect), inner.converted(value, reduction.type)
            wide = kind in ("float", "double", "ws::int64") or kind.startswith("ws::At")
            parts.append(text if wide else f"static_cast<{kind}>({text})")
        return state_of(parts)

    def _shifted(self, stage: Stage, number: int) -> tuple[str, list[str]]:
        top, total, *others = stage.reductions
        kind, state = self.dialect.compute(top.type), state_type(stage, self.dialect)
        first = self._element()
        first.expect([top.value])
        lines = self._returns(kind, "top", number, first, first.converted(top.value, top.type))
        values = [other.value for other in others]
        if others:
            beside = self._element()
            beside.expect(values)
            of_folds = folds_type(others, self.dialect)
            lines += self._returns(of_folds, "element", number, beside, self._folded(others, values, beside))
        self.function.reductions[top.name] = "pivot"
        second = self._element([f"%{top.name}"])
        second.expect([total.value])
        assert stage.shared is not None
        same = self.function.interner.number
        if not others and same(stage.shared) in {same(part) for part in self._to_keep.get(number, ())}:
            self._to_keep = {**self._to_keep, number: [stage.shared]}
            self._keep(second, number)
            _, place = self._kept.pop()
            self._rescale = (stage, place)
        lines += self._returns(
            kind, "term", number, second, second.converted(total.value, total.type), f", {kind} pivot"
        )
        loads = self.loads.below(top.value, *values), self.loads.below(total.value)
        return f"ws::RowStage<{state}, {', '.join(loads)}>", lines

    def _moments(self, stage: Stage, number: int) -> tuple[str, list[str]]:
        total, squares = stage.reductions
        kind, state = self.dialect.compute(squares.type), state_type(stage, self.dialect)
        # A thread's few elements add up in the narrower type, also where the row's sum is a wider one.
        own = narrowed(total.value, squares.type)
        first, second = self._element(), self._element([f"%{total.name}"])
        first.expect([own])
        lines = self._returns(kind, "value", number, first, first.converted(own, squares.type))
        assert stage.shared is not None
        second.define(stage.shared, "mean")
        second.expect([squares.value])
        text = second.converted(squares.value, squares.type)
        lines += self._returns(kind, "square", number, second, text, f", {kind} mean")
        return f"ws::RowStage<{state}, {self.loads.below(own)}, {self.loads.below(squares.value)}>", lines

    def learn(self, number: int) -> None:
        """From here on the stage's results are known, from the row's state."""
        stage, row = self._stages[number], self.row
        for name, text in results(stage, "state").items():
            reduction = next(r for r in stage.reductions if r.name == name)
            kind = self.dialect.compute(reduction.result)
            self.function.reductions[name] = row.member(kind, self._results[name], text)
        row.learn(passes.names_of(stage.reductions))
        if stage.kind == "moments" and stage.shared is not None:
            kind = self.dialect.compute(stage.shared.type)
            same = stage.shared.type is stage.reductions[0].type
            text = "state.mean" if same else f"static_cast<{kind}>(state.mean)"
            row.define(stage.shared, row.declare(kind, f"{stage.name}_mean", text))
        if self._rescale is not None and stage.shared is not None:
            _, place = self._rescale
            text = f"State::exponential(own.greatest - {self.function.reductions[stage.name]})"
            factor = row.declare(self.dialect.compute(stage.reductions[0].type), "rescale", text)
            self._kept.append((stage.shared, f"({place} * {factor})"))
            self._rescale = None

    # -- stores

    def stores(self) -> list[str]:
        """The functions of an element that is stored, and of whole vectors."""
        names, text = Names(), self.text
        wide = {s.buffer: names.take(self.function.buffers[s.buffer]) for s in self.element_stores
                if text.access_of(s) == "vector"}  # fmt: skip
        values = [store.value for store in self.element_stores]
        quick = ordinary_numbers.quick_quotients(self.row, self.element_stores, text.axis)
        if len(wide) < len(self.element_stores):
            quick = None
        lines = [f"  static constexpr ws::LoadSet kStoreLoads = {self.loads.below(*values)};"]
        if quick is not None:
            lines.append("  static constexpr bool kQuickStores = true;")
        given = f"Stored& stored, Vector& vector, {text.offset} {text.j}, int {text.e}"
        for hurried in (True, False) if quick is not None else (False,):
            inner = self._element()
            inner.expect(values)
            if hurried and quick is not None:
                quick(inner, "ordinary")
            for store in self.element_stores:
                inner.store(store, f"stored.{wide[store.buffer]}[{text.e}]" if store.buffer in wide else None)
            head = f"finish_quick({given}, bool& ordinary)" if hurried else f"finish({given})"
            lines += function(f"void {head} const", inner.lines)
        if wide:
            fields = [f"{text.vector_type(text.storage(name))} {field};" for name, field in wide.items()]
            visits = [f"    visit(stored.{wide[s.buffer]}, {text.address(s.buffer, s, text.begin)});"
                      for s in self.element_stores if s.buffer in wide]  # fmt: skip
            head = f"void each_store(Stored& stored, int {text.begin}, const Visit& visit) const"
            lines = [f"  struct Stored {{ {' '.join(fields)} }};", *lines, "  template <class Visit>",
                     *function(head, visits)]  # fmt: skip
        return lines

    def sums(self) -> list[str]:
        """A thread's running sums over rows of a vector of columns: their type, what an element adds, where they go."""
        text, summed = self.text, self._nest.summed
        if not summed:
            return []
        inner, values = self._element(), [store.value for store in summed]
        inner.expect(values)
        fields, visits = [], []
        for store in summed:
            name, kind = self.function.buffers[store.buffer], self.dialect.compute(store.type)
            inner.line(f"sums.{name}[{text.e}] += {inner.converted(store.value, store.type)};")
            fields.append(f"ws::Pack<{kind}, {text.vector_width}> {name};")
            visits.append(f"    visit(sums.{name}, {text.address(store.buffer, store, text.begin)});")
        return [
            "  static constexpr bool kHasSums = true;",
            f"  static constexpr ws::LoadSet kSumLoads = {self.loads.below(*values)};",
            f"  struct Sums {{ {' '.join(fields)} }};",
            *function(f"void add(Sums& sums, Vector& vector, {text.offset} {text.j}, int {text.e}) const", inner.lines),
            "  template <class Visit>",
            *function(f"void each_sum(const Sums& sums, int {text.begin}, const Visit& visit) const", visits),
        ]

    def row_stores(self) -> list[str]:
        """What is stored once a row.

        Where these stores read what they overwrite, only the thread that writes it may read it, so nothing of them is
        computed further out; they come last, since the other stores do not wait for these reads.
        """
        stores = [store for store in self._nest.stores if not self._nest.is_element_store(store)]
        if not stores:
            return []
        values, names = [store.value for store in stores], {store.buffer for store in stores}
        in_place = any(load.buffer in names for load in memory_access.loads_below(values))
        inner = Scope(self.function, self.row, depth=2, closed=in_place)
        (inner if in_place else self.row).expect(values)
        for store in stores:
            inner.store(store)
        flag = ["  static constexpr bool kElementsFirst = true;"] if in_place else []
        return [*flag, *function("void store_row() const", inner.lines)]
