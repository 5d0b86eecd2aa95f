"""CUDA schedule of scans: cumulative sums and products, from either end, with or without the element itself.

The one idea: every element is read once and written once. A row stays in registers, chunk by chunk, with what came
before carried on; where rows are too few for the GPU, the chunks of a row go to different blocks that look back on each
other's totals; where the scanned axis is strided, threads lie across it and run down their columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agent_synthesis.emit import function_text
from agent_synthesis.emit.cuda import geometry
from agent_synthesis.emit.cuda.scans.scan_columns import ColumnTeam, scan_columns
from agent_synthesis.emit.cuda.scans.scan_text import By, RowTeam, ScanSettings, scan_rows
from agent_synthesis.emit.cuda.schedule import CudaSchedule
from agent_synthesis.nests import iteration_space, memory_access, passes
from agent_synthesis.nests.analysis import row_loads
from agent_synthesis.nests.ir import Axis, Nest
from agent_synthesis.schedule import Emission, Footprint
from warpsmith.errors import IllegalMove
from warpsmith.hardware import STATIC_SHARED_BYTES

_SMALLEST_EXTENT = 16
"""Least extent of an axis for threads to lie along it."""
_FEW_ROWS = 8 / 11
"""Fewer rows for each SM than this, where they are longer than a block holds, are worth several blocks each."""
_HELD_ELEMENTS = 64
"""Elements of a row that a thread holds at most."""
_SPARED_REGISTERS = 6
"""Registers that a scan needs less than kernels usually do beside their data."""
_WARP_COLUMNS = 1024
"""Columns up to which a warp has a row."""
_SAFE_FACTORS = 512
"""Factors that f64 multiplies apart from what is before them. Those of one row leave its range after a thousand normal
numbers, and an infinity before them times such a zero would be NaN; PyTorch multiplies almost in order."""


class CudaScan(CudaSchedule):
    """Rows, chunk by chunk; grids of chunks that look back; or columns."""

    name = "cuda_scan"
    settings = ScanSettings

    def accepts(self, nest: Nest) -> bool:
        """Nests that reduce nothing but scans, in one direction, and store every element only at its place."""
        return passes.is_scan(nest)

    def defaults(self, nest: Nest) -> ScanSettings:
        """Columns where data lies across the scanned axis; a grid for few long rows; a warp for short ones."""
        simple = iteration_space.canonical(nest)
        least = self._begun(By.ROWS, 32, 32, 1, 1)
        candidates = self._preferred(nest, simple)
        return geometry.first_legal(candidates, lambda settings: self._require(nest, settings), least)

    def _preferred(self, nest: Nest, simple: Nest) -> list[ScanSettings]:
        axis = passes.axis_across(iteration_space.simplified(nest), _SMALLEST_EXTENT)
        if axis is not None:
            return self._columns(simple, axis)
        rows, columns = simple.row_count, simple.column_count
        width = memory_access.wide_vector(simple, simple.reduced[0])
        most = max(1, _HELD_ELEMENTS // width)  # vectors of a thread
        found = []
        if passes.multiplies(simple):
            lanes = min(32, geometry.power_of_two_at_least(-(-columns // width)))
            parts = [max(1, _SAFE_FACTORS // (lanes * width * part)) for part in (1, 2, 4)]
            return [self._begun(By.ROWS, 256, lanes, width, vectors, prefetch=True) for vectors in parts]
        if columns <= _WARP_COLUMNS:
            lanes = min(32, geometry.power_of_two_at_least(-(-columns // width)))
            found.append(self._begun(By.ROWS, 256, lanes, width, -(-columns // (lanes * width))))
        # A whole row in registers is one long piece of memory: 32768x32768 takes 2110 us, in chunks of 4096 2260. Where
        # every element is an access of its own, only many accesses at once hide their latency.
        for threads in (128, 256, 512) if width > 1 else ():
            vectors = -(-columns // (threads * width))
            if vectors <= (most // 4 if threads < 512 else most):
                found.append(self._begun(By.ROWS, threads, threads, width, vectors))
        if rows < int(_FEW_ROWS * self.hardware.sm_count) and columns > 512 * _HELD_ELEMENTS:
            found += [self._begun(By.GRID, 512, 512, width, vectors) for vectors in (most // 2, most // 4)]
        # Asking ahead pays (20000x50000: 1967 us instead of 2078), unless stores need again what it takes the place of.
        prefetch = not row_loads.is_needed_again(simple)
        threads = 256 if width == 1 and rows >= 2 * self.hardware.sm_count else 1024
        while threads > 64 and threads * width * 2 >= columns:
            threads //= 2
        for vectors in (4, 2, 1):
            found.append(self._begun(By.ROWS, threads, threads, width, vectors, prefetch=prefetch))
        return found

    def _columns(self, simple: Nest, axis: Axis) -> list[ScanSettings]:
        width = memory_access.wide_vector(simple, axis)
        found = []
        while width >= 1:
            lanes = min(128 // width, max(8, geometry.power_of_two_at_least(-(-axis.extent // width))))
            threads = max(lanes, 512)
            tiles = simple.row_count // axis.extent * -(-axis.extent // (width * lanes))
            # Few columns: parts of them for all SMs, or at least narrower tiles.
            ctas = min(4 * self.hardware.sm_count // tiles, simple.column_count // (32 * 128 // lanes))
            if tiles >= 2 * self.hardware.sm_count or ctas < 2 or len(simple.scans) > 1 or passes.multiplies(simple):
                ctas = 1
            else:
                threads = 128
            while ctas == 1 and lanes > 8 and tiles < 2 * self.hardware.sm_count:
                lanes, tiles = lanes // 2, tiles * 2
            while threads > max(32, lanes) and threads // lanes * 4 > simple.column_count:
                threads //= 2
            found += [self._begun(By.COLUMNS, threads, lanes, width, vectors, ctas=ctas) for vectors in (8, 4, 2, 1)]
            width //= 2
        return found

    def _begun(
        self, scan: By, threads: int, lanes: int, width: int, vectors: int, *, ctas: int = 1, prefetch: bool = False
    ) -> ScanSettings:
        return ScanSettings(
            scan=scan, dependent_launch=self.pdl[0], prefetch=prefetch, threads=threads, lanes=lanes,
            vector_width=width, vectors=max(1, vectors), ctas=ctas,
        )  # fmt: skip

    def alternatives(self, nest: Nest, current: ScanSettings) -> Sequence[ScanSettings]:
        """One change away; other strategies with the settings that suit them."""
        simple = iteration_space.canonical(nest)
        scan, ctas, columns = current.scan, current.ctas, current.scan is By.COLUMNS
        axis = passes.axis_across(iteration_space.simplified(nest), _SMALLEST_EXTENT) if columns else None
        widest = memory_access.widest_vector(simple, axis or simple.reduced[0])
        sized = ... if columns or current.lanes <= 32 else ()
        changes = current.changes(
            min_blocks=..., vectors=..., prefetch=... if scan is By.ROWS else (), stores=..., loads=...,
            vector_width=[width for width in (1, 2, 4, 8) if width <= widest], lanes=sized, threads=sized,
            ctas={1, ctas * 2, max(1, ctas // 2), 32} if columns else (), exp=..., dependent_launch=self.pdl,
        )  # fmt: skip
        if not columns:
            changes += [replace(current, threads=threads, lanes=threads) for threads in (32, 64, 128, 256, 512, 1024)]
            other = By.ROWS if scan is By.GRID else By.GRID
            changes.append(replace(current, scan=other, prefetch=False, threads=512, lanes=512))
        changes += [p for p in self._preferred(nest, simple) if p.scan is not scan]
        distinct = [p for n, p in enumerate(changes) if p not in changes[:n] and p != current]
        return geometry.legal(distinct, lambda settings: self._require(nest, settings))

    def footprint(self, nest: Nest, settings: ScanSettings) -> Footprint:
        """Columns that blocks share are read twice; totals on boards are small."""
        simple = iteration_space.canonical(nest)
        if settings.scan is By.COLUMNS:
            team = _column_team(nest, simple, settings)
            shared, read = settings.ctas > 1, memory_access.row_data_bytes(simple)
            blocks = simple.row_count // team.axis.extent * team.tiles * settings.ctas
            return Footprint(read if shared and read > self.hardware.l2_bytes // 2 else 0, blocks, 1 + shared)
        row = RowTeam(settings, simple.column_count)
        if row.grid:
            blocks = simple.row_count * row.chunks
            return Footprint(32 * blocks * len(simple.scans), blocks, 1)
        return Footprint(0, -(-simple.row_count // row.rows_a_block), 1)

    def emit(self, nest: Nest, settings: ScanSettings) -> Emission:
        """One kernel."""
        self._require(nest, settings)
        simple = iteration_space.canonical(nest)
        header = function_text.header(nest, self.name, settings)
        if settings.scan is By.COLUMNS:
            return scan_columns(simple, nest, _column_team(nest, simple, settings), header)
        return scan_rows(simple, nest, RowTeam(settings, simple.column_count), header)

    def _require(self, nest: Nest, settings: ScanSettings) -> None:
        """Raises IllegalMove where the settings cannot run this nest."""
        simple = iteration_space.canonical(nest)
        threads, lanes, width, vectors = settings.threads, settings.lanes, settings.vector_width, settings.vectors
        columns, grid = settings.scan is By.COLUMNS, settings.scan is By.GRID
        axis = passes.axis_across(iteration_space.simplified(nest), _SMALLEST_EXTENT) if columns else simple.reduced[0]
        if axis is None:
            raise IllegalMove(f"{nest.name}: no other axis has enough neighbours for threads to lie across the scan")
        if width < 1 or memory_access.widest_vector(simple, axis) % width:
            raise IllegalMove(f"{nest.name}: {width} elements do not lie together everywhere")
        if vectors < 1 or lanes < 1 or threads % lanes or lanes & (lanes - 1):
            raise IllegalMove(f"{nest.name}: {threads} threads in lanes of {lanes}, {vectors} vectors each")
        if simple.column_count > 2**31 - 2**16:
            raise IllegalMove(f"{nest.name}: places along the scan do not fit 32 bits")
        ctas = settings.ctas
        threads_of_a_part = threads // lanes if columns else lanes
        if ctas < 1 or (ctas > 1 and (not columns or len(simple.scans) > 1 or ctas > simple.column_count)):
            raise IllegalMove(f"{nest.name}: splits = {ctas}; blocks share the rows of one scan down columns")
        if columns:
            if threads // lanes > 64:
                raise IllegalMove(f"{nest.name}: {threads // lanes} threads above each other; 64 add up at most")
        elif lanes > 32 and lanes != threads:
            raise IllegalMove(f"{nest.name}: a row has lanes of one warp or all threads of a block")
        if passes.multiplies(simple) and (ctas > 1 or grid or threads_of_a_part * width * vectors > _SAFE_FACTORS):
            raise IllegalMove(
                f"{nest.name}: {_SAFE_FACTORS} factors at most are multiplied apart from those before them"
            )
        if grid and (lanes <= 32 or RowTeam(settings, simple.column_count).chunks * simple.row_count >= 2**31):
            raise IllegalMove(f"{nest.name}: a grid has a block for every chunk")
        if settings.prefetch and settings.scan is not By.ROWS:
            raise IllegalMove(f"{nest.name}: only rows have a next chunk to ask for")
        held = _registers(simple, axis, width * vectors, prefetch=settings.prefetch) - _SPARED_REGISTERS
        boxes = sum(s.type.compute.size_bytes for s in simple.scans) * 2 * (threads * width if columns else 32)
        if boxes > STATIC_SHARED_BYTES:
            raise IllegalMove(f"{nest.name}: what {threads} threads exchange exceeds static shared memory")
        geometry.require_block(
            self.hardware, nest, threads=threads, min_blocks=settings.min_blocks, shared_bytes=boxes,
            held_registers=held,
        )  # fmt: skip


def _registers(simple: Nest, axis: Axis, elements: int, *, prefetch: bool) -> int:
    """Registers of what a thread loads and scans at once: a value takes the place of what it is made of, if it may."""
    wide = [load for load in row_loads.reduced_loads(simple) if axis.name in load.index.axes()]
    loaded = sum(max(1, elements * simple.buffer(load.buffer).type.size_bytes // 4) for load in wide)
    scanned = sum(max(1, elements * scan.type.compute.size_bytes // 4) for scan in simple.scans)
    together = prefetch or len(simple.scans) > 1 or row_loads.is_needed_again(simple)
    return loaded + scanned if together else max(loaded, scanned)


def _column_team(nest: Nest, simple: Nest, settings: ScanSettings) -> ColumnTeam:
    axis = passes.axis_across(iteration_space.simplified(nest), _SMALLEST_EXTENT)
    assert axis is not None  # what requires it has been asked
    return ColumnTeam(axis, settings, simple.column_count)
