"""CUDA schedule of reductions along rows: softmax, norms, products of rows with a vector, and what else is like them.

The one idea: a row belongs to a team of threads as small as keeps all SMs busy, each holding its part in registers
between the visits, so that most rows are read once and written once. What to choose where was measured on an H200.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from agent_synthesis.emit import (
    cuda_ahead,
    cuda_exchange,
    cuda_hold,
    cuda_ordinary,
    cuda_rolling_rows,
    cuda_rows_footprint,
    cuda_shape,
    cuda_stages,
    cuda_stream,
    cuda_two_pass,
    shape,
    sweeps,
)
from agent_synthesis.emit.cuda_schedule import CudaSchedule
from agent_synthesis.emit.cuda_team import has_common_loads, require, team_of
from agent_synthesis.ir import Nest
from agent_synthesis.schedule import Emission, Footprint, Parameters
from warpsmith.errors import IllegalMove
from warpsmith.hardware import Feature

STRATEGIES = ("warp", "block", "cluster", "grid", "two_pass", "stream", "hold", "roll", "ahead")
_SHORT_ROW = 1024
_CLUSTER_ELEMENTS = 256 << 10
"""Rows * columns up to which the data is read faster than the blocks of a grid meet."""
_MIDDLE_TENSOR, _LARGE_TENSOR = 1 << 20, 32 << 20
"""Elements from which on a reduction of few rows takes 256 blocks a row, and all that the GPU has room for."""
_LONG_BLOCK_ROW = 16384
_STREAM_SLICE = 8192
"""Elements of a row that a block streams at most: three or four such rows fit half an SM's shared memory."""
_LARGE_SLICE_BYTES = 160 << 10
"""Bytes of a row in one block from which on the next row comes ahead: so few rows are in work that memory waits."""
_ROLLING_ROW = 512 << 10
"""Elements of a row from which on blocks that keep what rows share are fewer and larger, and rows roll through them."""
_SHARED_ROWS = 16
"""Rows whose columns a block stores one after the other where they share weights."""
_MOST_REREAD = 1 / 2
"""Share of a row that blocks which keep the rest may read twice: beyond it two kernels are faster."""
_HOLDERS = ((512, 4, 1), (512, 2, 1), (1024, 2, 1), (256, 4, 2), (512, 2, 2))
"""Threads of a block that keeps its part of a row, packs of each that come together, and blocks of an SM."""
_MOST_HELD_BYTES = 384
"""Bytes of a row that a thread may hold in registers."""


class CudaRowReduction(CudaSchedule):
    """Choices: `reduce`, `merge` (yes: pairs of reductions share an exchange), `loads` once or shared, `stores` plain
    or streaming, `preload` (yes: what only stores read is loaded before the exchange), `exp` accurate or fast,
    `overlap` (yes: may start while the previous kernel ends).

    Integers: `threads` of a block, `lanes` (threads of a row, for warp), `splits` (blocks of a row, for cluster, grid,
    two_pass, stream, hold, roll and ahead), `pack` (elements; more than lie aligned together: packs begin before the
    row), `packs` (in registers at once; for hold and roll, of a part), `min_blocks` (blocks that share an SM), `depth`
    (rows of a block in shared memory, for stream; parts of its row, for hold; parts of rows, for roll; rows of which a
    block stores a chunk, 0 for a slice of one, for two_pass), `lag` (rows that a block goes on to while others answer,
    for stream; parts of the next row asked for meanwhile, for hold; parts added up before they are stored, for roll),
    `held` (packs of a thread in registers: beside those in shared memory, for hold; of what rows share, for roll).
    """

    name = "cuda_row_reduction"

    def accepts(self, nest: Nest) -> bool:
        """Any nest with reductions that reads what it overwrites only in place; places in a row fit 32 bits."""
        if nest.column_count > 2**31 - 2**16:
            return False
        return bool(nest.reductions) and not (nest.windows or nest.scans) and shape.is_safe_in_place(nest)

    def defaults(self, nest: Nest) -> Parameters:
        """The measured rule: lanes for short rows; clusters or a grid for few long rows; a block for many."""
        simple = cuda_shape.canonical(nest)
        for candidate in self._preferred(simple):
            try:
                self._require(nest, candidate)
            except IllegalMove:
                continue
            return candidate
        return self._parameters(simple, "block", threads=256, packs=1, pack=1)

    def _preferred(self, simple: Nest) -> list[Parameters]:
        rows, columns = simple.row_count, simple.column_count
        found: list[Parameters] = []
        single = len(sweeps.levels(simple)) == 1 and not sweeps.element_stores(simple)
        if columns <= _SHORT_ROW or (single and rows >= 4 * self.hardware.sm_count and columns < 4096):
            found.append(self._short(simple))
        elements = rows * columns
        if rows < self.hardware.sm_count and columns > _SHORT_ROW:
            if elements <= _CLUSTER_ELEMENTS and columns >= 4096:
                found.append(self._parameters(simple, "cluster", threads=128, splits=8))
            # A cluster's exchange is the cheapest; where very many blocks share a row, two kernels that overlap beat
            # one whose blocks meet (1x1048576: 6.9 us against 8.2).
            if 8192 <= columns <= 65536 and 16 <= rows <= 3 * self.hardware.resident_clusters(8):
                found.append(self._parameters(simple, "cluster", threads=256, splits=8, min_blocks=3, loads="shared"))
            if rows <= 8 and columns <= 8192 * self._splits(rows, 1, columns):
                splits = self._splits(rows, 1, columns)
                if splits > 1:
                    found.append(
                        self._parameters(simple, "two_pass", threads=512, splits=splits, packs=4, loads="shared")
                    )
            # Few slices of 8K to one block an SM; more data, more blocks of smaller slices whose waits overlap. Where
            # nothing is read twice, nobody waits for the sum in two kernels (of 2 M elements: 8.4 us instead of 22.9).
            slices = ((1, 512, 8192), (4, 256, 4096), (2, 512, 16384), (1, 512, 32768))
            is_summed = single and columns >= 8192 and elements > _MIDDLE_TENSOR
            for per_sm, threads, longest in () if is_summed else slices:
                splits = self._splits(rows, per_sm, columns)
                if splits > 1 and columns <= longest * splits:
                    found.append(self._parameters(simple, "grid", threads=threads, splits=splits, min_blocks=per_sm))
        found += self._summed_twice(simple)
        if single:
            found.append(self._parameters(simple, "block", threads=512 if columns >= 4096 else 256, packs=4))
        if columns <= _LONG_BLOCK_ROW:
            threads = 512 if columns > 4096 else (256 if columns > 2048 else 128)
            found.append(self._parameters(simple, "block", threads=threads, min_blocks=1024 // threads, loads="shared"))
        # Blocks that stay hold what all rows share; where there is no such thing, clusters are as fast or faster
        # (4096x393216: layer norm 3495 us against 3970, softmax 3563 against 3239).
        # Very long ones roll (layer norm of 64x1048576: 150 us instead of 214; of 512x131072: 153 instead of 145).
        streaming, rolling = self._streaming(simple), self._rolling(simple, threads=512, packs=2)
        if has_common_loads(simple):
            found += [*(rolling if columns >= _ROLLING_ROW else ()), *streaming]
        clusters = [(2, 256, 2), (4, 256, 2), (8, 256, 2), (8, 256, 1), (8, 512, 1), (16, 512, 1)]
        best = cuda_shape.best_pack(simple, simple.reduced[0])
        if best == 1:
            # Rows read element by element want more threads (L1 norm of 32768x65535: 5758 us instead of 7855).
            clusters = [(2, 512, 2), (4, 512, 2), (8, 512, 2), *clusters]
        for splits, threads, min_blocks in clusters:
            found += self._ahead(simple, threads=threads, splits=splits, min_blocks=min_blocks)
            # 7168x262144, 32 packs of 256 threads: 3887 us instead of 3989 with 16 of 512.
            packs = 128 // best if self.hardware.register_limit(threads, min_blocks) > 128 else 0
            found.append(self._parameters(
                simple, "cluster", threads=threads, splits=splits, min_blocks=min_blocks, packs=packs, loads="shared"
            ))  # fmt: skip
        # A slice that no cluster holds: group norm of 896 slices of 2 M elements 3777 us; by blocks that hold one, and
        # wait for each other before the next comes, 4187. These take too few rows to roll, or rows that not even all
        # blocks hold (64 channels of 16 M: 2701 us; two kernels 3112); but reading weights that rows share delays them
        # (layer norm of 16x4194304: 290 us, two kernels 259).
        holding = self._holding(simple, threads=512, packs=4, min_blocks=1, most_reread=_MOST_REREAD)
        found += [*rolling, *(() if has_common_loads(simple) else holding)]
        found += streaming
        if rows < self.hardware.sm_count:
            found.append(self._two_pass(simple))
        # What is read again may still lie in the L2 (group norm, 896 slices of 2 M elements: 5463 us instead of 5748).
        found.append(self._parameters(simple, "block", threads=512, packs=8, loads="shared"))
        found.append(self._parameters(simple, "block", threads=512, packs=4))
        found.append(self._parameters(simple, "block", threads=256, packs=2))
        return [p for p in found if self._holds_or_rereads(simple, p)]

    def _summed_twice(self, simple: Nest) -> list[Parameters]:
        """Kernels of many blocks where few rows' results are all (8192x8192: sum 75 us, not 78; argmax 82, not 191)."""
        rows, columns = simple.row_count, simple.column_count
        if sweeps.element_stores(simple) or columns < 8192 or rows >= 2 * self.hardware.sm_count:
            return []
        found: list[Parameters] = []
        if self._logarithms(simple):
            # Many instructions want many warps (two logarithms of 268 M pairs: 520 us instead of 572).
            splits = max(2, min(2048, columns // 8192, 2048 // rows))
            found.append(self._parameters(simple, "two_pass", threads=512, splits=splits, packs=2, min_blocks=2))
        # Mean of 5.9 M squared differences: 17.4 us with 256 blocks, 27.9 with 64.
        blocks, threads, packs = 64, 256, 4
        if rows * columns > _MIDDLE_TENSOR:
            blocks, threads, packs = 256, 512, 2
        if rows * columns >= _LARGE_TENSOR:
            blocks, threads, packs = 4 * self.hardware.sm_count, 512, 4
        splits = min(blocks, 4 * self.hardware.sm_count // max(1, rows))
        if splits > 1:
            found.append(self._parameters(simple, "two_pass", threads=threads, splits=splits, packs=packs))
        return found

    def _splits(self, rows: int, per_sm: int, columns: int) -> int:
        """Blocks of a row so that about `per_sm` blocks are on every SM; a slice of at least 2048 elements."""
        splits = (1 << self.hardware.sm_count.bit_length() - 1) * per_sm // rows
        while splits > 1 and columns // splits < 2048:
            splits //= 2
        return splits

    def _holds_or_rereads(self, simple: Nest, parameters: Parameters) -> bool:
        """Clusters and grids are worth their exchange only where the row stays in registers."""
        return (
            parameters.choices["reduce"] not in ("cluster", "grid")
            or team_of(self.hardware, simple, parameters).holds_row
        )

    def _two_pass(self, simple: Nest) -> Parameters:
        """Kernels of many blocks; the one that stores has a chunk of one row in each, or of several that share weights.

        Layer norm of 16x4194304: 214 us instead of 245. A tensor of 9 M elements over its norm: 35 us with 256 blocks,
        40.7 with 64.
        """
        splits = 64
        while max(1, simple.row_count) * splits < 256:
            splits *= 2
        while splits > 2 and simple.column_count < 16384 * splits:
            splits //= 2
        depth = min(_SHARED_ROWS, simple.row_count) if has_common_loads(simple) and not _is_skewed(simple) else 1
        packs, min_blocks = (2, 2) if depth > 1 else (4, 1)
        return self._parameters(
            simple, "two_pass", threads=512, splits=splits, packs=packs, min_blocks=min_blocks, depth=depth
        )

    def _ahead(self, simple: Nest, *, threads: int, splits: int, min_blocks: int) -> list[Parameters]:
        """Clusters that stay, where one has so much of a row that an SM has room for no other."""
        if not sweeps.element_stores(simple):
            return []
        found = self._parameters(simple, "ahead", threads=threads, splits=splits, min_blocks=min_blocks)
        team = team_of(self.hardware, simple, found)
        large = team.holds_row and team.ring_bytes(simple) >= _LARGE_SLICE_BYTES
        return [found] if large and simple.row_count >= 4 * team.teams(simple.row_count, min_blocks) else []

    @staticmethod
    def _logarithms(simple: Nest) -> bool:
        return bool(cuda_ordinary.logarithms([r.value for r in simple.reductions], simple.reduced[0].name))

    def _streaming(self, simple: Nest) -> list[Parameters]:
        """Blocks that take at least four rows each, slices of at most 8K elements, two blocks an SM.

        Four warps a block: with eight, whose exchanges take longer, 4096x393216 takes 3569 us instead of 3495.
        """
        if not sweeps.element_stores(simple) or simple.column_count <= _LONG_BLOCK_ROW:
            return []
        splits = cuda_shape.power_of_two_at_least(-(-simple.column_count // _STREAM_SLICE))
        draft = self._parameters(
            simple, "stream", threads=128, splits=splits, min_blocks=2, depth=1, stores="streaming"
        )
        team = team_of(self.hardware, simple, draft)
        if simple.row_count < 4 * team.teams(simple.row_count, 2):
            return []
        slot = max(1, team.ring_bytes(simple))
        depth = min(4, (self.hardware.shared_bytes // 2 - self.hardware.reserved_shared_bytes) // slot)
        settings = {"depth": depth, "lag": max(1, depth - 2)}
        return [Parameters(draft.choices, {**draft.integers, **settings})] if depth >= 3 else []

    def _holding(
        self, simple: Nest, *, threads: int, packs: int, min_blocks: int, most_reread: float = 1.0
    ) -> list[Parameters]:
        """Blocks that keep a row, or nearly all of it."""
        if not sweeps.element_stores(simple) or simple.column_count <= _LONG_BLOCK_ROW:
            return []
        draft = self._parameters(
            simple, "hold", threads=threads, packs=packs, min_blocks=min_blocks, depth=1, stores="streaming"
        )
        return cuda_hold.holders(self.hardware, simple, draft, most_reread)

    def _rolling(self, simple: Nest, *, threads: int, packs: int) -> list[Parameters]:
        """Blocks through whose shared memory at least four rows roll, one after the other.

        Layer norm of 16x4194304: 158 us instead of 217 in two kernels.
        """
        if not sweeps.element_stores(simple) or simple.column_count <= _LONG_BLOCK_ROW:
            return []
        draft = self._parameters(simple, "roll", threads=threads, packs=packs, splits=2, depth=1, stores="streaming")
        found = cuda_rolling_rows.rollers(self.hardware, simple, draft)
        return [
            p for p in found if simple.row_count >= 4 * team_of(self.hardware, simple, p).teams(simple.row_count, 1)
        ]

    def _short(self, simple: Nest) -> Parameters:
        pack = cuda_shape.widest_pack(simple, simple.reduced[0])
        lanes = min(32, cuda_shape.power_of_two_at_least(-(-simple.column_count // pack)))
        if simple.column_count == 64 and pack == 4:
            lanes = 16
        threads = 128 if lanes == 32 else 256
        return self._parameters(
            simple, "warp", threads=threads, lanes=lanes, loads="once" if simple.column_count > 256 else "shared"
        )

    def _parameters(
        self,
        simple: Nest,
        reduce: str,
        *,
        threads: int,
        lanes: int = 32,
        splits: int = 1,
        min_blocks: int = 1,
        packs: int = 0,
        pack: int = 0,
        loads: str = "once",
        depth: int = 0,
        lag: int = 0,
        stores: str = "plain",
    ) -> Parameters:
        pack = pack or cuda_shape.best_pack(simple, simple.reduced[0])
        size = max((b.type.size_bytes for b in simple.buffers if not b.written), default=4)
        packs = packs or max(1, _MOST_HELD_BYTES // (pack * size))
        merge = reduce != "warp" and cuda_stages.can_merge(simple)
        draft = Parameters(
            {
                "reduce": reduce,
                "merge": "yes" if merge else "no",
                "loads": loads,
                "stores": stores,
                "preload": "yes" if reduce == "stream" else "no",
                "overlap": "no" if reduce == "grid" else self.overlaps[0],
                "exp": "fast" if cuda_stages.distance_exponentials_only(simple) else "accurate",
            },
            {
                "threads": threads,
                "lanes": lanes if reduce == "warp" else threads,
                "splits": splits,
                "pack": pack,
                "packs": packs,
                "min_blocks": min_blocks,
                "depth": depth,
                "lag": lag,
                "held": 0,
            },
        )
        team = team_of(self.hardware, simple, draft)
        held = team.packs * pack * size
        tight = self._tight(simple, draft)
        most = {"cluster": 64, "grid": 64, "warp": 128}.get(reduce, 0)
        if team.holds_row and held <= most:
            eager = shape.changed(tight, "preload", "yes")
            if cuda_shape.legal([eager], lambda parameters: self._require(simple, parameters)):
                return eager
        return tight

    def alternatives(self, nest: Nest, current: Parameters) -> Sequence[Parameters]:
        """One change away, those first that gave most on an H200; another strategy has the settings that suit it.

        A change of the team's size keeps what the team holds; settings that make no difference are left out.
        """
        simple = cuda_shape.canonical(nest)
        changes = [self._tight(simple, change) for change in self._changes(simple, current)]
        found = [change for change in _distinct(changes) if change != current]
        return cuda_shape.legal(found, lambda parameters: self._require(nest, parameters))

    def _changes(self, simple: Nest, current: Parameters) -> Iterator[Parameters]:
        integers, reduce = current.integers, current.choices["reduce"]
        splits, threads, depth = integers["splits"], integers["threads"], integers["depth"]
        stored = self._later_loads(simple)
        stream, hold, roll = (reduce == name for name in ("stream", "hold", "roll"))
        yield from cuda_shape.domain_without(
            current,
            {
                "loads": () if stream or roll else ("once", "shared"),
                "stores": ("plain", "streaming") if sweeps.element_stores(simple) else (),
                "preload": ("yes", "no") if stored and reduce != "two_pass" and not (hold or roll) else (),
                "exp": ("accurate", "fast") if cuda_stages.exponentials(simple) else (),
            },
        )
        if hold or roll:
            yield from self._other_holders(simple, current) if hold else self._other_rollers(simple, current)
            yield from (p for p in self._preferred(simple) if p.choices["reduce"] != reduce)
            return
        for wanted in (threads * 2, threads // 2):
            blocks = {integers["min_blocks"], max(1, integers["min_blocks"] * threads // max(32, wanted))}
            for min_blocks in sorted(blocks, reverse=True):
                yield _resized(current, threads=wanted, min_blocks=min_blocks)
        if reduce == "warp":
            yield from (_resized(current, lanes=lanes) for lanes in (4, 8, 16, 32))
        elif reduce != "block":
            sizes = (2, 4, 8, 16) if reduce in ("cluster", "ahead") else (splits * 2, splits // 2)
            yield from (_resized(current, splits=wanted) for wanted in sizes if wanted >= 1)
        if reduce in ("cluster", "block", "ahead"):
            others = ("block" if splits == 1 else "cluster") if reduce == "ahead" else "ahead"
            yield Parameters({**current.choices, "reduce": others}, integers)
        if reduce == "two_pass" and sweeps.element_stores(simple):
            yield from cuda_shape.domain_without(current, {"depth": (1, _SHARED_ROWS, 0)})
        if stream:
            domain = {"depth": (depth + 1, depth - 1, depth * 2), "lag": (1, 2, 3) if splits > 1 else ()}
            yield from cuda_shape.domain_without(current, domain)
        yield from cuda_shape.domain_without(current, {"min_blocks": (1, 2, 3, 4)})
        yield from (p for p in self._preferred(simple) if p.choices["reduce"] != reduce)
        if reduce != "cluster":
            yield self._parameters(simple, "cluster", threads=256, splits=8)
        widest = cuda_shape.best_pack(simple, simple.reduced[0], 0)
        yield from (_resized(current, pack=pack) for pack in (1, 2, 4, 8) if pack <= widest)
        yield from cuda_shape.domain_without(
            current,
            {
                "merge": ("yes", "no") if cuda_stages.can_merge(simple) else (),
                "overlap": self.overlaps,
                "packs": () if stream else (16, 8, 4, 2, 1),
            },
        )

    def _other_holders(self, simple: Nest, current: Parameters) -> Iterator[Parameters]:
        """Blocks of other sizes that keep what fits them, and more or less of the next row asked for in time."""
        for threads, packs, min_blocks in _HOLDERS:
            for held in self._holding(simple, threads=threads, packs=packs, min_blocks=min_blocks):
                yield Parameters({**current.choices, "loads": held.choices["loads"]}, held.integers)
        yield from cuda_shape.domain_without(current, {"lag": (0, 2, 4, 8), "held": (16, 12, 8, 4, 0)})

    def _other_rollers(self, simple: Nest, current: Parameters) -> Iterator[Parameters]:
        for threads, packs in ((512, 2), (512, 1), (1024, 1), (256, 4)):
            yield from self._rolling(simple, threads=threads, packs=packs)
        yield from cuda_rolling_rows.others(current)

    @staticmethod
    def _later_loads(simple: Nest) -> bool:
        """Whether stores read along the row what no reduction reads."""
        axis = simple.reduced[0].name
        early = cuda_shape.loads_below(reduction.value for reduction in simple.reductions)
        late = cuda_shape.loads_below(sweeps.element_stores(simple))
        return any(axis in load.index.axes() and load not in early for load in late)

    def footprint(self, nest: Nest, parameters: Parameters) -> Footprint:
        """Visits after the first cost their bytes again where the rows in flight exceed the second-level cache."""
        simple = cuda_shape.canonical(nest)
        stages = self._stages(simple, parameters)
        return cuda_rows_footprint.footprint(
            simple, team_of(self.hardware, simple, parameters), stages, parameters.integers["min_blocks"]
        )

    def emit(self, nest: Nest, parameters: Parameters) -> Emission:
        """One kernel, or with two_pass one for each stage and one for the stores."""
        self._require(nest, parameters)
        simple = cuda_shape.canonical(nest)
        stages = self._stages(simple, parameters)
        header = shape.header(nest, self.name, parameters)
        writers = {"two_pass": cuda_two_pass.emit, "stream": cuda_stream.emit, "hold": cuda_hold.emit,
                   "ahead": cuda_ahead.emit, "roll": cuda_rolling_rows.emit}  # fmt: skip
        write = writers.get(parameters.choices["reduce"], cuda_exchange.emit)
        return write(self.hardware, sweeps.with_reciprocal(simple), nest, parameters, stages, header)

    def _stages(self, simple: Nest, parameters: Parameters) -> list[cuda_stages.Stage]:
        even = team_of(self.hardware, simple, parameters).exchanges_evenly
        return cuda_stages.plan(simple, merge=parameters.choices["merge"] == "yes", even=even)

    def _tight(self, simple: Nest, parameters: Parameters) -> Parameters:
        """With no more packs than a thread has of a row."""
        integers = parameters.integers
        if min(integers["lanes"], integers["threads"], integers["splits"], integers["pack"], integers["packs"]) < 1:
            return parameters
        return Parameters(parameters.choices, {**integers, "packs": team_of(self.hardware, simple, parameters).packs})

    def _require(self, nest: Nest, parameters: Parameters) -> None:
        """Raises IllegalMove where the parameters cannot run this nest."""
        simple = cuda_shape.canonical(nest)
        integers, reduce = parameters.integers, parameters.choices["reduce"]
        pack, splits, lanes, threads = (integers[key] for key in ("pack", "splits", "lanes", "threads"))
        if reduce not in STRATEGIES:
            raise IllegalMove(f"{nest.name}: reduce = {reduce} is none of {', '.join(STRATEGIES)}")
        axis = simple.reduced[0]
        if pack < 1 or (cuda_shape.widest_pack(simple, axis) % pack and cuda_shape.best_pack(simple, axis, 0) % pack):
            raise IllegalMove(f"{nest.name}: {pack} elements do not lie together everywhere")
        if reduce == "warp" and (lanes not in (1, 2, 4, 8, 16, 32) or threads % 32):
            raise IllegalMove(f"{nest.name}: lanes = {lanes} is no part of a warp")
        if reduce != "warp" and lanes != threads:
            raise IllegalMove(f"{nest.name}: all threads of a block share a row, so lanes = threads")
        if reduce in ("warp", "block") and splits != 1:
            raise IllegalMove(f"{nest.name}: reduce = {reduce} has one block a row, so splits = 1")
        if reduce in ("cluster", "ahead") and splits > 1 and not self.hardware.has(Feature.CLUSTERS):
            raise IllegalMove(f"{nest.name}: reduce = {reduce} {self.hardware.refusal({Feature.CLUSTERS})}")
        if reduce == "cluster" and splits not in (2, 4, 8, 16):
            raise IllegalMove(f"{nest.name}: a cluster has 2, 4, 8 or 16 blocks")
        if reduce in ("cluster", "ahead") and splits in (2, 4, 8, 16) and not self.hardware.resident_clusters(splits):
            raise IllegalMove(f"{nest.name}: {self.hardware.architecture} holds no clusters of {splits} blocks")
        if reduce in ("grid", "two_pass") and splits < 2:
            raise IllegalMove(f"{nest.name}: reduce = {reduce} splits a row over at least 2 blocks")
        if reduce == "grid" and (simple.row_count * splits > self.hardware.resident_blocks(integers["min_blocks"])):
            raise IllegalMove(
                f"{nest.name}: {simple.row_count * splits} blocks wait for each other, more than fit the GPU"
            )
        team = team_of(self.hardware, simple, parameters)
        if (team.splits - 1) * team.slice >= team.columns:
            raise IllegalMove(f"{nest.name}: {splits} blocks are more than a row of {team.columns} can occupy")
        if team.packs < 1 or team.packs * pack > 128:
            raise IllegalMove(f"{nest.name}: a thread holds from 1 to 128 elements, not {team.packs * pack}")
        stages = self._stages(simple, parameters)
        require(simple, team, stages, integers["min_blocks"], preload=parameters.choices["preload"] == "yes")


def _resized(current: Parameters, **changes: int) -> Parameters:
    """With a team of another size, whose threads hold as much of a row together as before."""
    old, new = current.integers, {**current.integers, **changes}
    if current.choices["reduce"] != "warp":
        new["lanes"] = new["threads"]

    def width(integers: Mapping[str, int]) -> int:
        return integers["lanes"] * max(1, integers["splits"]) * max(1, integers["pack"])

    new["packs"] = max(1, -(-old["packs"] * width(old) // max(1, width(new))))
    return Parameters(current.choices, new)


def _is_skewed(simple: Nest) -> bool:
    """Whether rows begin anywhere, and the packs that they are taken in before them."""
    axis = simple.reduced[0]
    return cuda_shape.skew(simple, axis, cuda_shape.best_pack(simple, axis)) is not None


def _distinct(candidates: Sequence[Parameters]) -> list[Parameters]:
    found: list[Parameters] = []
    for candidate in candidates:
        if candidate not in found:
            found.append(candidate)
    return found
