"""CUDA schedule of convolutions whose result is reduced at once: over channels, in windows that pool it, or over space.

The one idea: where a tile has all that a result is reduced of, the tile's end makes the reduction in the place of the
stores, so that nothing of the convolution itself goes to memory; where that is larger, the end leaves a part. Settings
are `cuda_convolution_product`'s; texts are in `reduced_channels_text`, `pooled_text` and `spread_text`.
"""

from __future__ import annotations

from dataclasses import replace

from agent_synthesis.emit import function_text
from agent_synthesis.emit.cuda import geometry
from agent_synthesis.emit.cuda.pointwise import CudaPointwise
from agent_synthesis.emit.cuda.products.convolutions.convolution_product import (
    COLUMNS,
    ENGINE_OF,
    REGISTERS,
    ConvolutionProductSettings,
    CudaConvolutionProduct,
)
from agent_synthesis.emit.cuda.products.convolutions.convolution_product_text import ConvolutionProductText
from agent_synthesis.emit.cuda.products.convolutions.pooled_text import PooledText
from agent_synthesis.emit.cuda.products.convolutions.reduced_channels_text import ReducedChannelsText
from agent_synthesis.emit.cuda.products.convolutions.spread_text import SpreadText, states_bytes
from agent_synthesis.emit.cuda.products.convolutions.window_boxes import STORED_BYTES_A_CYCLE, WHOLE, Boxes
from agent_synthesis.emit.cuda.products.product_engine import ENGINES
from agent_synthesis.nests import iteration_space
from agent_synthesis.nests.analysis.convolution import is_hopeful
from agent_synthesis.nests.analysis.products.convolution_product import points
from agent_synthesis.nests.analysis.products.pooled_product import PooledProduct, pooled_product
from agent_synthesis.nests.analysis.products.spread_product import SpreadProduct, spread_product
from agent_synthesis.nests.analysis.products.tailed_product import ReducedChannels, reduced_channels
from agent_synthesis.nests.ir import Nest, remembered
from agent_synthesis.nests.tailed import Tailed
from agent_synthesis.schedule import Emission, Footprint
from warpsmith.errors import IllegalMove

Found = ReducedChannels | PooledProduct | SpreadProduct
MOST_COLUMNS = 128
"""Of tiles that are compared."""
PHASES = (1, 2, 4, 8)
"""Of a transposed convolution that may be pooled together: so many tiles are one above the other in a raster."""


class CudaReducedConvolution(CudaConvolutionProduct):
    """Tiles of 128 positions with all channels of each, or with whole windows."""

    name = "cuda_convolution_reduced"

    def accepts(self, nest: Nest) -> bool:
        """A convolution of floats that is reduced over channels, all of which a tile may have, or in windows that it
        may have whole."""
        found = _reduced(nest)
        if found is None or found.product.type not in ENGINE_OF or not isinstance(nest, Tailed):
            return False
        if not _is_safe(nest, found):
            return False
        boxes = self.boxes(nest)
        if isinstance(found, ReducedChannels) and points(found.product.made) > COLUMNS[-1]:
            return False
        if not boxes.possible or (isinstance(found, PooledProduct) and boxes.phases not in PHASES):
            return False
        if (
            isinstance(found, SpreadProduct)
            and found.elements
            and not CudaPointwise(self.hardware).accepts(found.elements)
        ):
            return False
        return self.fits(boxes) and self.gains(nest, boxes)

    def gains(self, nest: Tailed, boxes: Boxes) -> bool:
        """Whether the result is worth not reading: more than what is laid out for tensor cores, where plain floats
        would do, and than what tiles of whole windows or of one image make twice or in vain."""
        result = nest.result.element_count * nest.result.type.size_bytes
        if result < boxes.laid_bytes and is_hopeful(nest.convolution):
            return False
        product, size = boxes.product, boxes.product.type.size_bytes
        columns = min(MOST_COLUMNS, geometry.round_up(points(product.made), COLUMNS[0]))
        own, plain = (each.box.cycles(columns, size) for each in (boxes, Boxes(product, boxes.engine)))
        tiles = points(product.groups) * -(-points(product.made) // columns)
        return (own - plain) * tiles <= result / STORED_BYTES_A_CYCLE

    def boxes(self, nest: Nest) -> Boxes:
        """Those of the convolution, with whole windows."""
        return _boxes(nest)

    def emit(self, nest: Nest, settings: ConvolutionProductSettings) -> Emission:
        """The kernels of the convolution, with an end that reduces."""
        if not self.accepts(nest):
            raise IllegalMove(f"{nest.name} reduces no convolution over what a tile has whole")
        assert isinstance(nest, Tailed)
        self.require(nest, settings)
        given, last = (self.boxes(nest), settings.tiling, settings.boxes), None
        match _found(nest):
            case ReducedChannels() as found:
                text: ConvolutionProductText = ReducedChannelsText(self.hardware, nest, found, *given)
            case PooledProduct() as found:
                text = PooledText(self.hardware, nest, found, *given)
            case SpreadProduct() as found:
                text, pointwise = SpreadText(self.hardware, nest, found, *given), CudaPointwise(self.hardware)
                last = pointwise.emit(found.elements, pointwise.defaults(found.elements)) if found.elements else None
        kernels, headers = text.kernels()
        return text.emission(function_text.header(nest, self.name, settings), kernels, headers, last)

    def footprint(self, nest: Nest, settings: ConvolutionProductSettings) -> Footprint:
        """What lies between the kernels is written and read once."""
        given, found = super().footprint(nest, settings), _found(nest)
        if not isinstance(found, SpreadProduct):
            return given
        spaces = [*found.kept, *([found.result] if found.result else [])]
        between = states_bytes(found, self.boxes(nest)) + sum(s.element_count * s.type.size_bytes for s in spaces)
        return replace(
            given,
            extra_bytes=given.extra_bytes + 2 * between,
            launch_count=given.launch_count + 1 + (found.elements is not None),
        )

    def require(self, nest: Nest, settings: ConvolutionProductSettings) -> None:
        """Checks too that a block has all that it reduces, summed to the end. Raises IllegalMove."""
        found = _found(nest)
        if settings.split_k != 1:
            raise IllegalMove(f"{nest.name}: a convolution is reduced in one slice")
        if isinstance(found, ReducedChannels):
            made = points(found.product.made)
            if settings.columns < made:
                raise IllegalMove(f"{nest.name}: tiles of {settings.columns} channels, of {made} that are reduced")
            if settings.warpgroups != 2:
                raise IllegalMove(f"{nest.name}: channels of a convolution are reduced by two warpgroups")
        elif isinstance(found, PooledProduct) and (phases := self.boxes(nest).phases) > 1:
            if settings.raster % phases:
                raise IllegalMove(
                    f"{nest.name}: {phases} phases are pooled together, of {settings.raster} rows of tiles"
                )
            registers = 2 * settings.columns // settings.warpgroups + geometry.KERNEL_OVERHEAD_REGISTERS
            if registers > (limit := REGISTERS[settings.warpgroups] // settings.resident):
                raise IllegalMove(f"{nest.name}: about {registers} registers a thread, of {limit}, with pooled phases")
        super().require(nest, settings)


@remembered
def _boxes(nest: Nest) -> Boxes:
    found = _found(nest)
    pools = found.pools if isinstance(found, PooledProduct) else WHOLE
    return Boxes(found.product, ENGINES[ENGINE_OF[found.product.type]], pools, isinstance(found, SpreadProduct))


def _is_safe(nest: Tailed, found: Found) -> bool:
    """Whether no kernel reads what it overwrites, but for a norm's statistics, each of which a row reads first."""
    if {buffer.name for buffer in nest.convolution.buffers} & {store.buffer for store in nest.tail.stores}:
        return False
    if isinstance(found, SpreadProduct):
        return all(map(iteration_space.is_safe_in_place, (nest.convolution, nest.tail, found.rows)))
    return not any(map(iteration_space.reads_what_it_writes, nest.members))


def _reduced(nest: Nest) -> Found | None:
    return reduced_channels(nest) or pooled_product(nest) or spread_product(nest)


def _found(nest: Nest) -> Found:
    found = _reduced(nest)
    assert found is not None, nest.name
    return found
