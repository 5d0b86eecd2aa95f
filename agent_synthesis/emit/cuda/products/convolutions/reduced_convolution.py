"""CUDA schedule of convolutions whose result is reduced at once: `ws_windows_reduced.cuh`.

The one idea: where a tile has all that a result is reduced of, the tile's end makes the reduction in the place of the
stores, so that nothing of the convolution itself goes to memory. Tiles and settings are `cuda_convolution_product`'s.
"""

from __future__ import annotations

from agent_synthesis.emit import function_text
from agent_synthesis.emit.cuda.products.convolutions.convolution_product import (
    COLUMNS,
    ENGINE_OF,
    ConvolutionProductSettings,
    CudaConvolutionProduct,
)
from agent_synthesis.emit.cuda.products.convolutions.reduced_channels_text import ReducedChannelsText
from agent_synthesis.emit.cuda.products.convolutions.window_boxes import Boxes
from agent_synthesis.emit.cuda.products.product_engine import ENGINES
from agent_synthesis.nests import iteration_space
from agent_synthesis.nests.analysis.products.convolution_product import points
from agent_synthesis.nests.analysis.products.tailed_product import ReducedChannels, reduced_channels
from agent_synthesis.nests.ir import Nest, remembered
from agent_synthesis.nests.tailed import Tailed
from agent_synthesis.schedule import Emission
from warpsmith.errors import IllegalMove


class CudaReducedConvolution(CudaConvolutionProduct):
    """Tiles of 128 positions with all channels of each."""

    name = "cuda_convolution_reduced"

    def accepts(self, nest: Nest) -> bool:
        """A convolution of floats whose channels are reduced, all of which a tile may have."""
        found = reduced_channels(nest)
        if found is None or found.product.type not in ENGINE_OF or points(found.product.made) > COLUMNS[-1]:
            return False
        return not iteration_space.reads_what_it_writes(found.rows) and self.fits(self.boxes(nest))

    def boxes(self, nest: Nest) -> Boxes:
        """Those of the convolution."""
        return _boxes(nest)

    def emit(self, nest: Nest, settings: ConvolutionProductSettings) -> Emission:
        """The kernels of the convolution, with an end that reduces."""
        if not self.accepts(nest):
            raise IllegalMove(f"{nest.name} reduces no channels of a convolution, of which a tile has all")
        assert isinstance(nest, Tailed)
        self.require(nest, settings)
        made = ReducedChannelsText(
            self.hardware, nest, _found(nest), self.boxes(nest), settings.tiling, settings.boxes
        )
        kernels, headers = made.kernels()
        return made.emission(function_text.header(nest, self.name, settings), kernels, headers)

    def require(self, nest: Nest, settings: ConvolutionProductSettings) -> None:
        """Checks too that a warpgroup has all channels of its positions, summed to the end."""
        made = points(_found(nest).product.made)
        if settings.columns < made:
            raise IllegalMove(f"{nest.name}: tiles of {settings.columns} channels, of {made} that are reduced")
        if settings.split_k != 1 or settings.warpgroups != 2:
            raise IllegalMove(f"{nest.name}: channels of a convolution are reduced in one slice, by two warpgroups")
        super().require(nest, settings)


@remembered
def _boxes(nest: Nest) -> Boxes:
    found = _found(nest).product
    return Boxes(found, ENGINES[ENGINE_OF[found.type]])


def _found(nest: Nest) -> ReducedChannels:
    found = reduced_channels(nest)
    assert found is not None, nest.name
    return found
