"""What schedules share whose product ends by reducing: tiles leave states, which a kernel of its own joins.

The one idea: the product is `cuda_product`'s, in one slice, so that each row or column of a tile has one state; a
kernel's end gets the memory of states before its buffers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from agent_synthesis.emit.cuda import geometry
from agent_synthesis.emit.cuda.geometry import address
from agent_synthesis.emit.cuda.kernel_text import Kernel, KernelText
from agent_synthesis.emit.cuda.products import tensor_core_product
from agent_synthesis.emit.cuda.products.converted_product import CudaConvertedProduct
from agent_synthesis.emit.cuda.products.product_engine import NEEDS, Engine
from agent_synthesis.emit.cuda.products.product_text import ProductText
from agent_synthesis.emit.cuda.products.product_tiling import ProductSettings, Tiling
from agent_synthesis.emit.cuda.products.streamed_product import CudaStreamedProduct
from agent_synthesis.emit.cuda.products.tensor_core_product import CudaProduct
from agent_synthesis.emit.cuda.schedule import CudaSchedule
from agent_synthesis.emit.expression import Scope
from agent_synthesis.nests.ir import Nest
from agent_synthesis.nests.product import MatrixProduct
from warpsmith.errors import IllegalMove
from warpsmith.hardware import Hardware


class CudaStatesProduct(CudaSchedule):
    """Products whose rows or columns are reduced; the depth is in one slice."""

    settings = ProductSettings
    needs = NEEDS
    reduced: ClassVar[str]
    """What has a state in each tile."""

    @abstractmethod
    def product_of(self, nest: Nest) -> Nest:
        """The product alone, of a nest that is accepted."""

    def is_tiled(self, product: Nest) -> bool:
        """Whether `cuda_product` takes the product, and no schedule of few tiles would rather make it."""
        others = (CudaStreamedProduct(self.hardware), CudaConvertedProduct(self.hardware))
        return not any(other.accepts(product) for other in others) and CudaProduct(self.hardware).accepts(product)

    def defaults(self, nest: Nest) -> ProductSettings:
        """Those of the product, in one slice."""
        given = CudaProduct(self.hardware).defaults(self.product_of(nest))
        return replace(given, epilogue=None, split_k=1, warpgroups=2)

    def alternatives(self, nest: Nest, current: ProductSettings) -> Sequence[ProductSettings]:
        """The product's, without slices, and with a warpgroup to 64 rows."""
        found = CudaProduct(self.hardware).alternatives(self.product_of(nest), current)
        return geometry.legal(found, lambda settings: self.require(nest, settings))

    def require(self, nest: Nest, settings: ProductSettings) -> None:
        """Checks that the product fits, and that each state is left by one kernel. Raises IllegalMove."""
        tensor_core_product.require_fits(self.hardware, self.product_of(nest), settings)
        if settings.split_k != 1 or settings.warpgroups != 2:
            raise IllegalMove(f"{nest.name}: {self.reduced} of a product are reduced in one slice, by two warpgroups")


class StatesText(ProductText):
    """A product's pieces of text, with an end that leaves states."""

    states: ClassVar[str]
    """Their name in the text and among workspaces."""
    members: ClassVar[Sequence[str]]
    """What an end has besides buffers."""

    def __init__(
        self, hardware: Hardware, nest: Nest, product: MatrixProduct, engine: Engine, tiling: Tiling, joined: Nest
    ) -> None:
        """`joined`: the stores of what states have become."""
        super().__init__(hardware, nest, product, engine, tiling)
        function = self._text.function
        for name, given in function.buffers.items():
            if given in self.members:
                function.buffers[name] = function.names.take(f"{given}_given")
        self._joined_text = KernelText(joined, "", 1)

    @property
    def state(self) -> str:
        """C++ type of what the memory of states holds."""
        return "float"

    def signature(self, name: str, arguments: list[str], *, whole: bool = False) -> list[str]:
        """As of every product, with the states before what the end needs."""
        return super().signature(name, [*arguments, f"{self.state}* __restrict__ {self.states}"], whole=whole)

    def end_value(self, *, whole: bool = False) -> str:
        """What a kernel makes of sums."""
        del whole
        given = [self.states, *(self._passed(each.name) for each in self._end.buffers)]
        return f"{self.entry}_end{{{', '.join(given)}}}"

    def ends(self) -> list[str]:
        """Buffers that a kernel's end gets."""
        return [self.operands.workspace(self.states), *super().ends()]

    def written(self) -> list[str]:
        """Buffers that a kernel's end writes."""
        return [self.operands.workspace(self.states), *super().written()]

    def place(self, root: Scope, number: str) -> None:
        """Makes the coordinates of a joined point known, from its number."""
        text = self._joined_text
        for axis, place in geometry.coordinates(text.nest.parallel, number).items():
            root.line(f"const {text.offset} {text.function.axes[axis]} = {place};")
        root.learn(axis.name for axis in text.nest.parallel)

    def joining(self, name: str, root: Scope, states: str, blocks: int, threads: int) -> Kernel:
        """The kernel that joins states; `root`: its statements, but for the stores, which these end."""
        text = self._joined_text
        for store in text.nest.stores:
            root.store(store)
        buffers = text.nest.buffers
        head = text.signature(f"{self.entry}_{name}", threads, 1, buffers, {states: f"const {self.state}"})
        names = [*(buffer.name for buffer in buffers), self.operands.workspace(self.states)]
        written = [buffer.name for buffer in buffers if buffer.written]
        return Kernel([*head, *root.lines, "}"], self.launch(name, blocks, threads, map(address, names), written))
