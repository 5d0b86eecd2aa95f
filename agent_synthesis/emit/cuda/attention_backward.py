"""CUDA schedule of attention's backward on Hopper's tensor cores: `ws_attention_backward.cuh`.

The one idea: a block keeps a tile of keys and its derivatives, and what it finds of the queries' is added up by all in
a fixed order. One kernel before it makes of each row what its weights and their changes are above, one behind it rounds
the queries' derivatives. Writes shapes, steps and maps; the skeleton has all loops.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from agent_synthesis.emit import function_text
from agent_synthesis.emit.cuda import geometry
from agent_synthesis.emit.cuda.attention_text import MASKS
from agent_synthesis.emit.cuda.geometry import address
from agent_synthesis.emit.cuda.kernel_text import wrapped
from agent_synthesis.emit.cuda.products.operands import workspace
from agent_synthesis.emit.cuda.products.product_engine import NEEDS
from agent_synthesis.emit.cuda.products.product_text import PRODUCT_HEADERS
from agent_synthesis.emit.cuda.schedule import CudaSchedule
from agent_synthesis.nests.calls.attention_backward import AttentionBackward, Derivatives, Rows
from agent_synthesis.nests.element_types import CONTRACT
from agent_synthesis.nests.ir import Nest, Type
from agent_synthesis.schedule import Emission, Footprint
from agent_synthesis.settings import Settings, setting
from warpsmith.errors import IllegalMove
from warpsmith.hardware import Hardware
from warpsmith.v1 import candidate_pb2, tensor_pb2

MOST_DEPTH, LEAST_ROWS = 128, 64
"""Elements of a row, of two derivatives of which a thread has a share in registers; queries below which most of a tile
would be empty."""
MOST_SCORES = 1 << 42
"""Of a layer, whose tiles are counted in 32 bits."""
_ELEMENTS = {Type.F16: "ws::half", Type.BF16: "ws::bfloat16"}
_BLOCK, _TILE_KEYS, _PART_FLOATS = 64, 128, 64 * 64
"""Elements of a box's rows; keys of a tile; floats of a half of a tile of the queries' derivative."""
_THREADS, _ROW_THREADS = 384, 256
_HEADERS = (*PRODUCT_HEADERS, "ws_attention.cuh", "ws_attention_backward.cuh")
_GIVEN = ("gradient", "queries", "keys", "values", "result", "logsumexp")
_MAPS = ("queries", "keys", "values", "gradient")
_MADE = ("query_gradient", "key_gradient", "value_gradient")


@dataclass(frozen=True)
class AttentionBackwardSettings(Settings):
    """Of `cuda_attention_backward`."""

    stages: int = setting(2, "tiles of queries and of gradients in shared memory", (2, 3))


class CudaAttentionBackward(CudaSchedule):
    """Tiles of keys, which walk the queries."""

    name = "cuda_attention_backward"
    settings = AttentionBackwardSettings
    needs = NEEDS

    def accepts(self, nest: Nest) -> bool:
        """Of 16 bits, in rows of up to 128 elements that the copy engine can walk."""
        made = _derivatives(nest)
        if made is None or made.type not in _ELEMENTS or made.depth > MOST_DEPTH or made.depth % 8:
            return False
        if made.queries < LEAST_ROWS or made.heads % made.key_heads or made.queries * made.keys > MOST_SCORES:
            return False
        if made.mask is not None and nest.buffers[made.mask.buffer].type is not made.type:
            return False
        return all(_suits(made, rows) for rows in (*made.given[:5], *made.results))

    def defaults(self, nest: Nest) -> AttentionBackwardSettings:
        """Two stages, which always fit."""
        return geometry.legal([AttentionBackwardSettings()], lambda settings: self._require_fits(nest, settings))[0]

    def alternatives(self, nest: Nest, current: AttentionBackwardSettings) -> Sequence[AttentionBackwardSettings]:
        """One change away."""
        return geometry.legal(current.one_change_away(), lambda settings: self._require_fits(nest, settings))

    def footprint(self, nest: Nest, settings: AttentionBackwardSettings) -> Footprint:
        """Queries' derivatives are floats that are written and read once; adding to them stays on the chip."""
        text = _Text(self.hardware, nest, settings)
        extra = 8 * text.sum_floats + 8 * text.statistics_floats
        flops = 10 * text.made.pair_count * text.made.depth
        return Footprint(extra, text.tile_count, launch_count=3, tensor_flop_count=flops)

    def emit(self, nest: Nest, settings: AttentionBackwardSettings) -> Emission:
        """Three kernels."""
        self._require_fits(nest, settings)
        return _Text(self.hardware, nest, settings).emission(function_text.header(nest, self.name, settings))

    def _require_fits(self, nest: Nest, settings: AttentionBackwardSettings) -> None:
        """Raises IllegalMove, which names the limit."""
        text = _Text(self.hardware, nest, settings)
        if text.shared_bytes > (most := self.hardware.shared_bytes):
            raise IllegalMove(f"{nest.name}: {text.shared_bytes} bytes of shared memory, of {most} a block may have")


def _derivatives(nest: Nest) -> Derivatives | None:
    return nest.derivatives if isinstance(nest, AttentionBackward) else None


def _suits(made: Derivatives, rows: Rows) -> bool:
    """Whether rows are neighbours' elements, with steps of whole 16 bytes between them."""
    steps = [rows.row, *([rows.inner] if made.heads > 1 else []), *([rows.outer] if made.batch > 1 else [])]
    return rows.column == 1 and all(step > 0 and step % 8 == 0 for step in steps)


class _Text:
    """The kernels of one nest, and how they are launched."""

    def __init__(self, hardware: Hardware, nest: Nest, settings: AttentionBackwardSettings) -> None:
        made = _derivatives(nest)
        assert made is not None, nest
        self._hardware, self._nest, self._settings, self.made = hardware, nest, settings, made
        self.entry = function_text.entry_name(nest)
        self._element = _ELEMENTS.get(made.type, "float")
        self._depth = geometry.round_up(made.depth, _BLOCK)
        self._tile_queries = _TILE_KEYS if self._depth == _BLOCK else _BLOCK
        self._query_tiles = -(-made.queries // self._tile_queries)

    @property
    def tile_count(self) -> int:
        """Tiles of keys that blocks take."""
        return self.made.batch * self.made.key_heads * -(-self.made.keys // _TILE_KEYS)

    @property
    def sum_floats(self) -> int:
        """Of the queries' derivative, in whole tiles."""
        return self.made.layers * self._query_tiles * 2 * _PART_FLOATS

    @property
    def statistics_floats(self) -> int:
        """Two for each query, in whole tiles."""
        return self.made.layers * self._query_tiles * 2 * self._tile_queries

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: tiles, changes of scores, barriers, and the way to a multiple of 1024."""
        of_queries = self._settings.stages * self._tile_queries * (4 * self._depth + 8)
        return 4 * _TILE_KEYS * self._depth + of_queries + 4 * _TILE_KEYS * self._tile_queries + 2048

    @property
    def _grid(self) -> int:
        return min(self.tile_count, self._hardware.sm_count)

    def emission(self, heading: Sequence[str]) -> Emission:
        """All of them."""
        pieces = [*heading, *self._shape(), "", *self._before(), "", *self._main(), "", *self._behind(), ""]
        launches = (self._before_launch(), self._main_launch(), self._behind_launch())
        floats, tiles = tensor_pb2.DTYPE_FLOAT32, self.made.layers * self._query_tiles
        counters = workspace(self._work("counters"), tensor_pb2.DTYPE_INT32, [2 * tiles])
        counters.zero_between_calls = True
        workspaces = (
            workspace(self._work("statistics"), floats, [self.statistics_floats]),
            workspace(self._work("sums"), floats, [self.sum_floats]),
            counters,
        )
        return Emission("\n".join(pieces), _HEADERS, launches, workspaces)

    # -- text

    def _shape(self) -> list[str]:
        made = self.made
        lines = [
            f"using {self.entry}_shape = ws::AttentionBackward<{self._element},",
            f"    ws::AttentionBackwardExtents{{.layers = {made.layers}, .inner = {made.heads}, "
            f".group = {made.heads // made.key_heads}, .queries = {made.queries},",
            f"                                 .keys = {made.keys}, .depth = {made.depth}, "
            f".causal = {str(made.causal).lower()}}},",
            f"    ws::AttentionBackwardTiling{{.stages = {self._settings.stages}, .blocks = {self._grid}}}",
        ]
        if (mask := made.mask) is not None:
            lines[-1] += ","
            lines += [
                f"    ws::Mask<{MASKS[made.type]}, ws::MaskSteps{{.offset = 0, .outer = {mask.outer}, "
                f".inner = {mask.inner}, .member = 0, .row = {mask.row}, .key = {mask.column}, .pairs = false}}>",
            ]
        lines[-1] += ">;"
        return lines

    def _before(self) -> list[str]:
        result, gradient, statistics = (self.made.given[_GIVEN.index(n)] for n in ("result", "gradient", "logsumexp"))
        return self._kernel(
            "before", _ROW_THREADS,
            [self._read("result"), self._read("gradient"), "const float* __restrict__ logsumexp",
             "float* __restrict__ statistics"],
            f"ws::attention_statistics<{self.entry}_shape>(result, {_steps(result)}, gradient, {_steps(gradient)}, "
            f"logsumexp, {_steps(statistics)}, statistics);",
        )  # fmt: skip

    def _main(self) -> list[str]:
        maps = [
            f"const __grid_constant__ ws::TensorMap {name}_map" for name in ("queries", "keys", "values", "gradient")
        ]
        of_keys, of_values = self.made.results[1:]
        is_masked = self.made.mask is not None
        scale = self.made.scale
        call = [
            f"  constexpr float kScale = {scale!r}f, "
            f"kScaleOfScores = {scale if is_masked else scale * math.log2(math.e)!r}f;",
            f"  ws::attention_backward<{self.entry}_shape>(queries_map, keys_map, values_map, gradient_map, kScale, "
            f"kScaleOfScores, {'mask' if is_masked else 'nullptr'}, statistics,",
            f"      ws::BackwardResults<{self.entry}_shape>{{key_gradient, value_gradient, {_steps(of_keys)}, "
            f"{_steps(of_values)}, sums}}, counters);",
        ]
        arguments = [*maps, *([self._read("mask")] if is_masked else []), "const float* __restrict__ statistics"]
        arguments += [
            self._written("key_gradient"),
            self._written("value_gradient"),
            "float4* sums",
            "unsigned* counters",
        ]
        return self._kernel("main", _THREADS, arguments, *call)

    def _behind(self) -> list[str]:
        return self._kernel(
            "behind", _ROW_THREADS,
            ["const float4* __restrict__ sums", "unsigned* counters", self._written("query_gradient")],
            f"ws::store_query_gradients<{self.entry}_shape>(sums, counters, query_gradient, "
            f"{_steps(self.made.results[0])});",
        )  # fmt: skip

    def _kernel(self, name: str, threads: int, arguments: Sequence[str], *lines: str) -> list[str]:
        head = f'extern "C" __global__ void __launch_bounds__({threads}, 1) {self.entry}_{name}('
        return [head, *wrapped(arguments), *(line if line.startswith("  ") else f"  {line}" for line in lines), "}"]

    def _read(self, name: str) -> str:
        return f"const {self._element}* __restrict__ {name}"

    def _written(self, name: str) -> str:
        return f"{self._element}* __restrict__ {name}"

    # -- records

    def _work(self, name: str) -> str:
        return f"{self.entry}_{name}"

    def _buffer(self, name: str) -> str:
        rows = self.made.mask if name == "mask" else dict(
            zip((*_GIVEN, *_MADE), (*self.made.given, *self.made.results), strict=True)
        )[name]  # fmt: skip
        assert rows is not None
        return self._nest.buffers[rows.buffer].name

    def _before_launch(self) -> candidate_pb2.Launch:
        lanes = 8 if self._depth == _BLOCK else 16
        rows = self.made.layers * self._query_tiles * self._tile_queries
        passed = [*map(self._buffer, ("result", "gradient", "logsumexp")), self._work("statistics")]
        return geometry.record(
            self._work("before"), -(-rows * lanes // _ROW_THREADS), _ROW_THREADS, map(address, passed), passed[-1:]
        )

    def _main_launch(self) -> candidate_pb2.Launch:
        maps = [self._map(name) for name in _MAPS]
        mask = ["mask"] if self.made.mask is not None else []
        made = [*map(self._buffer, _MADE[1:]), self._work("sums"), self._work("counters")]
        passed = [*map(self._buffer, mask), self._work("statistics"), *made]
        record = geometry.record(
            self._work("main"), self._grid, _THREADS, [*maps, *map(address, passed)], made,
            shared_bytes=self.shared_bytes,
        )  # fmt: skip
        record.cooperative = True  # blocks wait for each other's turns
        return record

    def _behind_launch(self) -> candidate_pb2.Launch:
        passed = [self._work("sums"), self._work("counters"), self._buffer("query_gradient")]
        grid = self.made.layers * self._query_tiles
        return geometry.record(self._work("behind"), grid, _ROW_THREADS, map(address, passed), passed[1:])

    def _map(self, name: str) -> candidate_pb2.LaunchArgument:
        """An operand as (column, row, head, outer layer)."""
        made, rows = self.made, self.made.given[_GIVEN.index(name)]
        of_keys = name in ("keys", "values")
        heads, count = (made.key_heads, made.keys) if of_keys else (made.heads, made.queries)
        steps = (rows.row, rows.inner if heads > 1 else rows.row, rows.outer if made.batch > 1 else rows.row)
        return candidate_pb2.LaunchArgument(
            tensor_map=candidate_pb2.TensorMap(
                buffer=self._buffer(name),
                dtype=CONTRACT[made.type],
                extents=[made.depth, count, heads, made.batch],
                byte_strides=[2 * step for step in steps],
                box=[_BLOCK, _TILE_KEYS if of_keys else self._tile_queries, 1, 1],
                swizzle_bytes=128,
            )
        )


def _steps(rows: Rows) -> str:
    return f"ws::RowSteps{{{rows.outer}, {rows.inner}, {rows.row}}}"
