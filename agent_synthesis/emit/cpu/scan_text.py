"""The struct of a scan on the CPU, over which the skeletons in `ws_scan.hpp` are instantiated.

See `cpu_scan` for the strategies; this file only says how values are made and what is stored. Running values are double
or 64-bit integers.
"""

from __future__ import annotations

from collections.abc import Sequence

from agent_synthesis.emit.accumulation import functor
from agent_synthesis.emit.cpu.cpu_struct import CpuStruct
from agent_synthesis.emit.spelling import CPP
from agent_synthesis.nests.ir import SCANS, Axis, Nest, Scan
from agent_synthesis.schedule import Emission

_MEMBERS = ("Scans", "row", "make", "step", "scanned", "running")


def scan_rows(
    original: Nest, nest: Nest, header: Sequence[str], *, block: int, parts: int, streaming: bool, threads: int
) -> Emission:
    """One kernel for a simplified nest that is scanned along its last axis."""
    axis = nest.reduced[0]
    block = min(block, axis.extent)
    struct = _struct(nest, nest.parallel)
    struct.constant("ws::ScanTiling", {"extent": axis.extent, "block": block, "parts": parts, "threads": threads})
    struct.held.append(f"Scans::Running<{block}> scanned;")
    known: list[str] = []
    for number, scan in enumerate(nest.scans):
        element = struct.located.child([axis.name, *known])
        element.expect([scan.value])
        element.line(f"held->scanned.set<{number}>(e, {element.converted(scan.value, scan.type)});")
        struct.add(
            f"void make(ws::Number<{number}>, long {struct.function.axes[axis.name]}, long e) const", element.lines
        )
        _learn(struct, scan, f"held->scanned.get<{number}>(e)")
        known.append(f"%{scan.name}")
    struct.stores(struct.located, known, nest.stores, axis, block if streaming else 0)
    return struct.emission(original, header, "scan_rows", "ws_scan.hpp")


def scan_columns(original: Nest, nest: Nest, axis: Axis, header: Sequence[str], *, tile: int, threads: int) -> Emission:
    """One kernel for a simplified nest, vectorised along `axis`."""
    struct, rows = _struct(nest, [other for other in nest.parallel if other is not axis]), nest.reduced[0]
    tile = min(tile, axis.extent)
    struct.constant("ws::ScanColumnTiling", {
        "rows": rows.extent, "columns": axis.extent, "tile": tile, "threads": threads,
    })  # fmt: skip
    element = struct.level("void row(const long* at)", {rows.name: "at[0]"}).child([axis.name])
    element.expect([*(scan.value for scan in nest.scans), *(store.value for store in nest.stores)])
    for number, scan in enumerate(nest.scans):
        value = element.converted(scan.value, scan.type)
        stem = f"{struct.function.reductions[scan.name]}_here"
        _learn(struct, scan, element.declare(_kind(scan), stem, f"running.take<{number}>(e, {value})"))
        element.learn([f"%{scan.name}"])
    for store in nest.stores:
        element.store(store)
    place = struct.function.axes[axis.name]
    struct.add(f"void step(Scans::Running<{tile}>& running, long {place}, long e) const", element.lines)
    return struct.emission(original, header, "scan_columns", "ws_scan.hpp")


def _struct(nest: Nest, outer: Sequence[Axis]) -> CpuStruct:
    struct = CpuStruct(nest, "scan", outer, _MEMBERS)
    struct.space("Outer", outer)
    kinds = []
    for scan in nest.scans:
        flags = (str(flag).lower() for flag in (scan.reverse, scan.exclusive))
        kinds.append(f"ws::Scan<{functor(SCANS[scan.operation])}, {_kind(scan)}, {', '.join(flags)}>")
    struct.using("Scans", f"ws::ScanList<{', '.join(kinds)}>")
    return struct


def _kind(scan: Scan) -> str:
    """Type of running values."""
    return "double" if scan.type.is_float else "std::int64_t"


def _learn(struct: CpuStruct, scan: Scan, place: str) -> None:
    """From here on the scan's value at an element is known."""
    kind = CPP.compute(scan.type)
    struct.function.reductions[scan.name] = place if kind == _kind(scan) else f"static_cast<{kind}>({place})"
