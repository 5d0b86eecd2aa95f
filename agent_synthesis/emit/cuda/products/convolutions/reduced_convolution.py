"""CUDA schedule of convolutions whose result is reduced at once, over channels or in windows that pool it.

The one idea: where a tile has all that a result is reduced of, the tile's end makes the reduction in the place of the
stores, so that nothing of the convolution itself goes to memory. Tiles and settings are `cuda_convolution_product`'s;
texts are in `reduced_channels_text` and `pooled_text`.
"""

from __future__ import annotations

from agent_synthesis.emit import function_text
from agent_synthesis.emit.cuda import geometry
from agent_synthesis.emit.cuda.products.convolutions.convolution_product import (
    COLUMNS,
    ENGINE_OF,
    REGISTERS,
    ConvolutionProductSettings,
    CudaConvolutionProduct,
)
from agent_synthesis.emit.cuda.products.convolutions.pooled_text import PooledText
from agent_synthesis.emit.cuda.products.convolutions.reduced_channels_text import ReducedChannelsText
from agent_synthesis.emit.cuda.products.convolutions.window_boxes import WHOLE, Boxes
from agent_synthesis.emit.cuda.products.product_engine import ENGINES
from agent_synthesis.nests import iteration_space
from agent_synthesis.nests.analysis.convolution import is_hopeful
from agent_synthesis.nests.analysis.products.convolution_product import points
from agent_synthesis.nests.analysis.products.pooled_product import PooledProduct, pooled_product
from agent_synthesis.nests.analysis.products.tailed_product import ReducedChannels, reduced_channels
from agent_synthesis.nests.ir import Nest, remembered
from agent_synthesis.nests.tailed import Tailed
from agent_synthesis.schedule import Emission
from warpsmith.errors import IllegalMove

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
        if any(iteration_space.reads_what_it_writes(member) for member in nest.members):
            return False
        boxes = self.boxes(nest)
        if isinstance(found, ReducedChannels) and points(found.product.made) > COLUMNS[-1]:
            return False
        if isinstance(found, PooledProduct) and (boxes.phases not in PHASES or not boxes.possible):
            return False
        result = nest.result.element_count * nest.result.type.size_bytes
        return (result >= boxes.laid_bytes or not is_hopeful(nest.convolution)) and self.fits(boxes)

    def boxes(self, nest: Nest) -> Boxes:
        """Those of the convolution, with whole windows."""
        return _boxes(nest)

    def emit(self, nest: Nest, settings: ConvolutionProductSettings) -> Emission:
        """The kernels of the convolution, with an end that reduces."""
        if not self.accepts(nest):
            raise IllegalMove(f"{nest.name} reduces no convolution over what a tile has whole")
        assert isinstance(nest, Tailed)
        self.require(nest, settings)
        given, found = (self.boxes(nest), settings.tiling, settings.boxes), _found(nest)
        if isinstance(found, ReducedChannels):
            text: ReducedChannelsText | PooledText = ReducedChannelsText(self.hardware, nest, found, *given)
        else:
            text = PooledText(self.hardware, nest, found, *given)
        kernels, headers = text.kernels()
        return text.emission(function_text.header(nest, self.name, settings), kernels, headers)

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
        elif (phases := self.boxes(nest).phases) > 1:
            if settings.raster % phases:
                raise IllegalMove(f"{nest.name}: {phases} phases are pooled together, of {settings.raster} rows of tiles")
            registers = 2 * settings.columns // settings.warpgroups + geometry.KERNEL_OVERHEAD_REGISTERS
            if registers > (limit := REGISTERS[settings.warpgroups] // settings.resident):
                raise IllegalMove(f"{nest.name}: about {registers} registers a thread, of {limit}, with pooled phases")
        super().require(nest, settings)


@remembered
def _boxes(nest: Nest) -> Boxes:
    found = _found(nest)
    pools = found.pools if isinstance(found, PooledProduct) else WHOLE
    return Boxes(found.product, ENGINES[ENGINE_OF[found.product.type]], pools)


def _reduced(nest: Nest) -> ReducedChannels | PooledProduct | None:
    return reduced_channels(nest) or pooled_product(nest)


def _found(nest: Nest) -> ReducedChannels | PooledProduct:
    found = _reduced(nest)
    assert found is not None, nest.name
    return found
