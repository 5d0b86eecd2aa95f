"""The text of scans down columns on CUDA: threads lie across the scanned axis, those of a block above each other too.

See `cuda_scan` for the strategies and the skeleton `ws_scan_columns.cuh` for how they go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agent_synthesis.emit.cuda import generated_struct, geometry
from agent_synthesis.emit.cuda.scans.scan_text import HEADERS, ScanSettings, ScanStruct
from agent_synthesis.nests.ir import Axis, Nest
from agent_synthesis.schedule import Emission


@dataclass(frozen=True)
class ColumnTeam:
    """Who has which columns, and which rows of them."""

    axis: Axis
    """The contiguous axis."""
    settings: ScanSettings
    rows: int
    """Elements of a column."""

    @property
    def tiles(self) -> int:
        """Blocks next to each other along the axis."""
        return -(-self.axis.extent // (self.settings.lanes * self.settings.vector_width))


def scan_columns(nest: Nest, original: Nest, team: ColumnTeam, header: Sequence[str]) -> Emission:
    """One kernel, or with splits one for the totals and one for the scan."""
    settings = team.settings
    made = ScanStruct(nest, settings, team.axis.name)
    others = [axis for axis in nest.parallel if axis.name != team.axis.name]
    points = nest.row_count // team.axis.extent
    tiling = generated_struct.constant("ws::ColumnScanTiling", "kTiling", {
        "rows": team.rows, "columns": team.axis.extent, "others": points, "vector_width": settings.vector_width,
        "rows_in_flight": settings.vectors, "threads": settings.threads, "lanes": settings.lanes,
        "ctas_per_column": settings.ctas, "reverse": made.scans[0].reverse, "overlap": settings.dependent_launch,
    })  # fmt: skip
    lines = [*header, *made.lines(tiling, settings.vectors, "unsigned outer", geometry.coordinates(others, "outer"))]
    launches, spaces = [], []
    kernels = {"": "scan_whole_columns"}
    if settings.ctas > 1:
        kernels = {"_totals": "total_parts_of_columns", "": "scan_parts_of_columns"}
        (scan,) = made.scans
        words = -(-settings.ctas * nest.row_count * scan.type.compute.size_bytes // 8)
        spaces.append(geometry.workspace(original, f"{scan.name}_totals", words))
    workspaces = {made.function.names.take(f"{scan.name}_totals"): made.kind(scan) for scan in made.scans if spaces}
    for suffix, skeleton in kernels.items():
        totals = bool(suffix)
        entry = f"{made.text.entry}{suffix}"
        types = {name: kind if totals else f"const {kind}" for name, kind in workspaces.items()}
        lines += generated_struct.kernel(
            made.name, made.text, skeleton, settings.threads, settings.min_blocks, types, entry, stores=not totals
        )
        buffers = [buffer for buffer in nest.buffers if not (totals and buffer.written)]
        names = [space.name for space in spaces]
        launches.append(geometry.launch(
            original, grid=points * team.tiles * settings.ctas, threads=settings.threads, entry=entry,
            buffers=buffers, workspaces=names, dependent=settings.dependent_launch,
            writes=names if totals else [buffer.name for buffer in buffers if buffer.written],
        ))  # fmt: skip
    return Emission("\n".join(lines), (*HEADERS, "ws_scan_columns.cuh"), tuple(launches), tuple(spaces))
