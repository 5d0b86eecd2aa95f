"""The text of a convolution whose channels are reduced in its tiles: `ws_windows_reduced.cuh`.

The one idea: a position's sums are all in registers, so the reductions are passes over these, in order, and stores are
of what comes of them. All but the end is the convolution's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agent_synthesis.emit import function_text
from agent_synthesis.emit.cuda import generated_struct
from agent_synthesis.emit.cuda.kernel_text import Kernel, KernelText
from agent_synthesis.emit.cuda.products.convolutions.convolution_product_text import HEADERS, ConvolutionProductText
from agent_synthesis.emit.cuda.products.convolutions.window_boxes import Boxes
from agent_synthesis.emit.cuda.products.product_tiling import Tiling
from agent_synthesis.emit.cuda.stage_state import results, state_of, state_type
from agent_synthesis.emit.expression import Scope
from agent_synthesis.emit.spelling import CUDA
from agent_synthesis.nests import passes
from agent_synthesis.nests.analysis.products.tailed_product import FIRST, SUMS, ReducedChannels
from agent_synthesis.nests.analysis.stages import Stage
from agent_synthesis.nests.ir import ARG_REDUCTIONS, Reduction
from agent_synthesis.nests.tailed import Tailed
from warpsmith.hardware import Hardware

_MEMBERS = (
    "Row", "kLevels", "kClasses", "kStores", "begin", "of", "learn", "finish", "value", "row", "state", "sum", "n",
    "kept", "made", "batch", "m", "part", "first", "k",
)  # fmt: skip
"""What the struct calls things of its own."""


class ReducedChannelsText(ConvolutionProductText):
    """A convolution's pieces of text, with an end that reduces."""

    def __init__(
        self, hardware: Hardware, nest: Tailed, found: ReducedChannels, boxes: Boxes, tiling: Tiling, held: int
    ) -> None:
        super().__init__(hardware, found.stored, boxes, tiling, held, function_text.entry_name(nest))
        self._joined = KernelText(found.rows, "", 1, reserved=_MEMBERS)
        self._classes, self._stores_elements = found.classes, found.stores_elements
        self._levels, self._carried = passes.levels(found.rows), found.carried()
        function = self._joined.function
        for axis in found.rows.parallel:
            function.axes[axis.name] = f"row.{axis.name}"
        function.axes["k"] = "k" if self._classes > 1 else "n"
        self._results = {r.name: function.reductions[r.name] for r in found.rows.reductions}
        function.reductions = {name: f"row.{given}" for name, given in self._results.items()} | {SUMS: "sum"}
        self._first = found.first
        function.reductions[FIRST] = "row.first"
        self._text.function.buffers |= function.buffers
        self._end = replace(self._end, buffers=found.rows.buffers)

    def end(self) -> list[str]:
        """The function that stores elements, where they are, and those that reduce."""
        return super().end() if self._stores_elements else self.end_struct([], "", ("", ""), [])

    def kernels(self) -> tuple[list[Kernel], list[str]]:
        """Those of the convolution."""
        kernels, _ = super().kernels()
        return kernels, [*HEADERS, "ws_reduce.cuh", "ws_windows_reduced.cuh"]

    def end_struct(
        self, members: Sequence[str], head: str, given: tuple[str, str], lines: Sequence[str], more: Sequence[str] = ()
    ) -> list[str]:
        """That of the convolution, with what is reduced."""
        text, nest = self._joined, self._joined.nest
        dialect, offset = text.function.dialect, text.offset
        kinds = {r.name: dialect.compute(r.result) for r in nest.reductions}
        stores = [store for store in nest.stores if not nest.is_element_store(store)]
        row = [
            f"  static constexpr int kLevels = {len(self._levels)}, kClasses = {self._classes};",
            f"  static constexpr bool kStores = {str(self._stores_elements).lower()};",
            "  struct Row {",
            f"    {offset} batch, m, part;",
            *(["    float first;"] if self._first else []),
            *(f"    {kinds[name]} {given};" for name, given in self._results.items()),
            "  };",
        ]
        functions: list[str] = []
        if self._first:
            first = self._scope([], [])
            first.expect([self._first])
            first.line(f"row.first = {first.value(self._first).text};")
            functions += generated_struct.function("void begin(Row& row, float sum) const", first.lines)
        for number, level in enumerate(self._levels):
            functions += self._level(number, level)
        finish = self._scope([], nest.reductions)
        finish.store_all(stores)
        functions += generated_struct.function("void finish(const Row& row) const", finish.lines)
        for store in nest.stores:
            if nest.is_element_store(store):
                value = self._scope(["k"], nest.reductions, len(self._levels))
                value.expect([store.value])
                value.line(f"return {value.value(store.value).text};")
                functions += generated_struct.function(
                    f"float value(const Row& row, {offset} n, float sum) const", value.lines
                )
        return super().end_struct([*members, *row], head, given, lines, [*more, *functions])

    def _level(self, number: int, level: Sequence[Reduction]) -> list[str]:
        offset, stage = self._joined.offset, Stage("folds", tuple(level))
        before = [r for sweep in self._levels[:number] for r in sweep]
        body = self._scope(["k"], before, number)
        kept = self._carried[number + 1]
        changes = kept is not self._carried[number]
        body.expect([*(r.value for r in level), *([kept] if changes else [])])
        if changes:
            body.line(f"const float kept = {body.value(kept).text};")
            body.define(kept, "kept")
        values = [
            body.value(r.value).text if r.operation in ARG_REDUCTIONS else body.converted(r.value, r.type)
            for r in level
        ]
        kind = state_type(stage, CUDA)
        if changes:
            body.line(f"const {kind} made = {state_of(values)};")
            body.line("sum = kept;")
        body.line(f"return {'made' if changes else state_of(values)};")
        results_kept = [f"    row.{self._results[name]} = {text};" for name, text in results(stage, "state").items()]
        level_type = f"ws::WindowLevel<{number}>"
        return [
            *generated_struct.function(
                f"{kind} of({level_type}, const Row& row, {offset} n, float& sum) const", body.lines
            ),
            *generated_struct.function(f"void learn({level_type}, Row& row, const {kind}& state) const", results_kept),
        ]

    def _scope(self, axes: Sequence[str], known: Sequence[Reduction], level: int = 0) -> Scope:
        """The block of a function of a row or, with the axis of its columns, of an element at a level."""
        nest = self._joined.nest
        names = [*(axis.name for axis in nest.parallel), *axes, *(f"%{r.name}" for r in known), f"%{SUMS}", f"%{FIRST}"]
        body = Scope(self._joined.function, None, names, depth=2)
        body.define(self._carried[level], "sum")
        if axes and self._classes > 1:
            body.line(f"const {self._joined.offset} k = n / {self._classes};")
        return body
