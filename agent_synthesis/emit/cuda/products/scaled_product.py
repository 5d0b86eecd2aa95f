"""CUDA schedule of products of floats of 8 bits, with their scales at the end: `ws_product_promoted.cuh`.

The one idea: tensor cores multiply them as they lie, twice as fast as 16 bits, where the module writes both factors in
16 bits first. They keep few bits of a sum, so sums are promoted after each stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agent_synthesis.emit import function_text
from agent_synthesis.emit.cuda import generated_struct, geometry, kernel_text
from agent_synthesis.emit.cuda.products import product_tiling, tensor_core_product
from agent_synthesis.emit.cuda.products.product_engine import NEEDS, OF_8_BITS, is_walked
from agent_synthesis.emit.cuda.products.product_text import ProductText
from agent_synthesis.emit.cuda.products.product_tiling import TILE_ROWS, Tiling
from agent_synthesis.emit.cuda.schedule import CudaSchedule
from agent_synthesis.nests import iteration_space
from agent_synthesis.nests.analysis.products.scaled_product import ScaledProduct, is_shared, scaled_product
from agent_synthesis.nests.ir import Nest
from agent_synthesis.nests.product import Operand
from agent_synthesis.schedule import Emission, Footprint
from agent_synthesis.settings import Settings, setting
from warpsmith.errors import IllegalMove

LEAST_ROWS, LEAST_DEPTH = 64, 128
_ALIGNED = 16
"""Elements that the copy engine's steps are whole multiples of."""


@dataclass(frozen=True)
class ScaledSettings(Settings):
    """Of `cuda_product_scaled`."""

    columns: int = setting(128, "columns of a tile, whose rows are 128", (64, 128))
    stages: int = setting(6, "steps of 128 of depth in shared memory", (3, 4, 6))
    cluster: int = setting(1, "blocks that share the columns' copies", (1, 2))
    raster: int = setting(8, "rows of tiles that are walked together", (4, 8, 16))
    split_k: int = setting(1, "slices of the depth, which a kernel of their own adds up")

    @property
    def tiling(self) -> Tiling:
        """What they say of tiles."""
        return Tiling(self.columns, self.stages, self.cluster, self.raster, promote=1, split_k=self.split_k)


class CudaScaledProduct(CudaSchedule):
    """Tiles of 128 rows."""

    name = "cuda_product_scaled"
    settings = ScaledSettings
    needs = NEEDS

    def accepts(self, nest: Nest) -> bool:
        """A product of two of one type of 8 bits, both along the depth, of 64 rows and columns at least.

        What is stored has 16 bits at most: of sums in fp32 from factors of 8 bits more is expected than the 14 bits
        that tensor cores keep between promotions.
        """
        found = scaled_product(nest)
        if found is None or iteration_space.reads_what_it_writes(nest):
            return False
        if any(not nest.buffer(store.buffer).type.is_widened for store in nest.stores):
            return False
        product = found.product
        _, m, n, k = product.extents
        if product.left.type is not product.right.type or min(m, n) < LEAST_ROWS or k < LEAST_DEPTH:
            return False
        return _suits(product.left) and _suits(product.right)

    def defaults(self, nest: Nest) -> ScaledSettings:
        """Narrower tiles, then slices, where tiles are few."""
        product = _scaled(nest).product
        few = [n for n in (128, 64) if product.tile_count(TILE_ROWS, n) >= self.hardware.sm_count]
        columns = few[0] if few else 64
        return ScaledSettings(columns=columns, split_k=max(self._slice_counts(nest, columns)))

    def alternatives(self, nest: Nest, current: ScaledSettings) -> Sequence[ScaledSettings]:
        """One change away."""
        changes = current.one_change_away(split_k=self._slice_counts(nest, current.columns))
        return geometry.legal(changes, lambda settings: self._require(nest, settings))

    def footprint(self, nest: Nest, settings: ScaledSettings) -> Footprint:
        """Slices' sums are written and read."""
        product, slices = _scaled(nest).product, settings.split_k
        return Footprint(
            extra_bytes=8 * product.sum_count * slices if slices > 1 else 0,
            parallel_count=slices * product.tile_count(TILE_ROWS, settings.columns),
            launch_count=1 + (slices > 1),
            tensor_flop_count=product.flop_count // 2,
        )

    def emit(self, nest: Nest, settings: ScaledSettings) -> Emission:
        """One kernel, and one that adds slices."""
        self._require(nest, settings)
        found = _scaled(nest)
        engine = OF_8_BITS[found.product.left.type]
        made = _PromotedText(self.hardware, found.nest, found.product, engine, settings.tiling)
        made.add_scales(found, settings.columns)
        kernels, headers = made.kernels()
        heading = function_text.header(iteration_space.simplified(nest), self.name, settings)
        return made.emission(heading, kernels, [*headers, "ws_product_promoted.cuh"])

    def _slice_counts(self, nest: Nest, columns: int) -> tuple[int, ...]:
        """Slices of whole stages that leave no multiprocessor idle; none where stages have scales of their own."""
        found = _scaled(nest)
        product = found.product
        batch, _, _, k = product.extents
        tiles = product.tile_count(TILE_ROWS, columns)
        is_sliced = batch == 1 and found.left_scale is None and found.right_scale is None
        most = self.hardware.sm_count // tiles if is_sliced else 1
        whole = [n for n in (2, 4, 8) if n <= most and k % (n * OF_8_BITS[product.left.type].stage_depth) == 0]
        return (1, *(n for n in whole if k // n >= tensor_core_product.LEAST_SLICE))

    def _require(self, nest: Nest, settings: ScaledSettings) -> None:
        """Checks shared memory and slices.

        Raises:
            IllegalMove: names the limit.
        """
        if not self.accepts(nest):
            raise IllegalMove(f"{nest.name} is no product of floats of 8 bits, both of which lie along the depth")
        needed = product_tiling.shared_bytes(settings.tiling, 1)
        if needed > self.hardware.shared_bytes:
            raise IllegalMove(f"{nest.name}: {needed} bytes of shared memory, of {self.hardware.shared_bytes}")
        if settings.split_k not in self._slice_counts(nest, settings.columns):
            raise IllegalMove(f"{nest.name}: {settings.split_k} slices are not of whole stages, or too short")


class _ScaleText:
    """The struct of a scale of each stage of an operand's rows."""

    def __init__(self, name: str, scale: Nest, *, is_shared: bool) -> None:
        self.name, self._scale, self._is_shared = name, scale, is_shared
        self.buffers = [buffer for buffer in scale.buffers if not buffer.written]

    def lines(self) -> list[str]:
        """The struct."""
        text = kernel_text.KernelText(self._scale, "k", 1, reserved=("made",))
        function, (store,) = text.function, self._scale.stores
        outer = [axis.name for axis in self._scale.parallel if axis.name != "k"]
        inner = generated_struct.body(text, outer)
        inner.line("float made;")
        text.elements(inner, [store.value], lambda each: each.store(store, "made"))
        inner.line("return made;")
        places = ", ".join(f"int {function.axes[axis]}" if axis in outer else "int" for axis in ("batch", "n"))
        return [
            f"struct {self.name} {{",
            f"  static constexpr bool kIsShared = {str(self._is_shared).lower()};",
            *(f"  {text.argument(buffer)};" for buffer in self.buffers),
            *generated_struct.function(f"float at({places}, int {text.begin}) const", inner.lines),
            "};",
        ]


class _PromotedText(ProductText):
    """A product's pieces of text, whose sums are promoted."""

    _scales: Sequence[_ScaleText | None] = (None, None)
    """Of the left and of the right."""

    def add_scales(self, found: ScaledProduct, columns: int) -> None:
        """Takes over the scales of each stage; tiles have so many columns."""
        self._scales = [
            _ScaleText(f"{self.entry}_{side}_scale", scale, is_shared=is_shared(scale, columns)) if scale else None
            for side, scale in (("left", found.left_scale), ("right", found.right_scale))
        ]

    def shape(self) -> list[str]:
        """The product's type, and scales."""
        return [*super().shape(), *(line for each in self._scales if each for line in ("", *each.lines()))]

    def multiply(self, call: str) -> str:
        """The function that promotes."""
        return f"{call}_promoted"

    def given(self) -> tuple[list[str], str, list[str]]:
        """Pointers to what scales are read from, both scales, and their buffers."""
        storage, parameters, passed, buffers = self._text.function.dialect.storage, list[str](), "", list[str]()
        for side, each in zip(("left", "right"), self._scales, strict=True):
            names = [f"{side}_scale_{number}" for number, _ in enumerate(each.buffers if each else ())]
            passed += f"{each.name}{{{', '.join(names)}}}, " if each else "ws::NoScale{}, "
            for name, buffer in zip(names, each.buffers if each else (), strict=True):
                parameters.append(f"const {storage[buffer.type]}* __restrict__ {name}")
                buffers.append(buffer.name)
        return parameters, passed, buffers


def _scaled(nest: Nest) -> ScaledProduct:
    found = scaled_product(nest)
    assert found is not None, nest
    return found


def _suits(operand: Operand) -> bool:
    """Whether the copy engine can walk an operand along its depth."""
    return operand.depth_stride == 1 and operand.row_stride > 0 and is_walked(operand, operand.row_stride, _ALIGNED)
