"""The text of a convolution whose outputs are pooled in its tiles: `ws_windows_pooled.cuh`.

The one idea: an output's value is one function and what becomes of a window another, each over product axes of its own.
All but the end is the convolution's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agent_synthesis.emit import function_text
from agent_synthesis.emit.accumulation import functor
from agent_synthesis.emit.cuda import generated_struct
from agent_synthesis.emit.cuda.kernel_text import Kernel, KernelText
from agent_synthesis.emit.cuda.products.convolutions.convolution_product_text import HEADERS, ConvolutionProductText
from agent_synthesis.emit.cuda.products.convolutions.window_boxes import Boxes
from agent_synthesis.emit.cuda.products.product_tiling import Tiling
from agent_synthesis.emit.expression import Scope
from agent_synthesis.nests.analysis.products.pooled_product import PooledProduct
from agent_synthesis.nests.analysis.products.tailed_product import SUMS, alone
from agent_synthesis.nests.tailed import Tailed
from warpsmith.hardware import Hardware

_MEMBERS = ("Pooled", "value", "pooled", "sum")
"""What the struct calls things of its own."""


class PooledText(ConvolutionProductText):
    """A convolution's pieces of text, with an end that pools."""

    def __init__(
        self, hardware: Hardware, nest: Tailed, found: PooledProduct, boxes: Boxes, tiling: Tiling, held: int
    ) -> None:
        plain = replace(alone(nest), name=nest.name)
        super().__init__(hardware, plain, boxes, tiling, held, function_text.entry_name(nest))
        (self._reduction,) = found.values.reductions
        both = {each.name: each for each in (*found.values.buffers, *found.stored.buffers)}
        buffers = tuple(each for each in nest.buffers if each.name in both)
        self._values, self._stored = (
            KernelText(replace(each, reductions=(), buffers=buffers), "", 1, reserved=_MEMBERS)
            for each in (found.values, found.stored)
        )
        self._values.function.reductions[SUMS] = "sum"
        self._stored.function.reductions[self._reduction.name] = "value"
        self._text.function.buffers |= self._stored.function.buffers
        self._end = replace(self._end, buffers=buffers)

    def kernels(self) -> tuple[list[Kernel], list[str]]:
        """Those of the convolution."""
        kernels, _ = super().kernels()
        return kernels, [*HEADERS, "ws_reduce.cuh", "ws_windows_pooled.cuh"]

    def end(self) -> list[str]:
        """The functions that make what is pooled, and store what windows come to."""
        value = _scope(self._values, [f"%{SUMS}"])
        value.expect([self._reduction.value])
        value.line(f"return {value.converted(self._reduction.value, self._reduction.type)};")
        stored = _scope(self._stored, [f"%{self._reduction.name}"])
        stored.store_all(self._stored.nest.stores)
        functions = [
            *generated_struct.function(f"float value({_places(self._values)}, float sum) const", value.lines),
            *generated_struct.function(f"void pooled({_places(self._stored)}, float value) const", stored.lines),
        ]
        members = [f"  using Pooled = {functor(self._reduction.operation)};"]
        return self.end_struct(members, "", ("", ""), [], functions)


def _scope(text: KernelText, known: Sequence[str]) -> Scope:
    return Scope(text.function, None, [*(axis.name for axis in text.nest.parallel), *known], depth=2)


def _places(text: KernelText) -> str:
    """The product's axes as parameters."""
    axes = text.function.axes
    return ", ".join(f"{text.offset} {axes.get(name, f'no_{name}')}" for name in ("batch", "m", "n"))
