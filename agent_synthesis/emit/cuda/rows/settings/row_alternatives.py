"""Which settings of a row reduction on CUDA lie one change away from others, for a search that goes step by step.

The one idea: a change of the team's size keeps what the team holds, and another strategy comes with the settings that
suit it, so that one step shows what the change is worth.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from agent_synthesis.emit.cuda import geometry, reduction_stages
from agent_synthesis.emit.cuda.rows import rolling_rows
from agent_synthesis.emit.cuda.rows.settings import row_defaults
from agent_synthesis.emit.cuda.schedule import CudaSchedule
from agent_synthesis.nests import memory_access, passes
from agent_synthesis.nests.ir import Nest
from agent_synthesis.schedule import Parameters

_HOLDERS = ((512, 4, 1), (512, 2, 1), (1024, 2, 1), (256, 4, 2), (512, 2, 2))
"""Threads of a block that keeps its part of a row, packs of each that come together, and blocks of an SM."""
_ROLLERS = ((512, 2), (512, 1), (1024, 1), (256, 4))
"""Threads of a block through which rows roll, and packs of each that come together."""


def alternatives(schedule: CudaSchedule, simple: Nest, current: Parameters) -> list[Parameters]:
    """Distinct settings of a canonical nest, those first that gave most on an H200; not all of them are legal."""
    found: list[Parameters] = []
    for change in _changes(schedule, simple, current):
        candidate = row_defaults.tight(schedule, simple, change)
        if candidate != current and candidate not in found:
            found.append(candidate)
    return found


def _changes(schedule: CudaSchedule, simple: Nest, current: Parameters) -> Iterator[Parameters]:
    integers, reduce = current.integers, current.choices["reduce"]
    stream, stays_in_parts = reduce == "stream", reduce in ("hold", "roll")
    preloads = _reads_later(simple) and reduce != "two_pass" and not stays_in_parts
    others = (p for p in row_defaults.preferred(schedule, simple) if p.choices["reduce"] != reduce)
    yield from geometry.domain_without(
        current,
        {
            "loads": () if stream or reduce == "roll" else ("once", "shared"),
            "stores": ("plain", "streaming") if passes.element_stores(simple) else (),
            "preload": ("yes", "no") if preloads else (),
            "exp": ("accurate", "fast") if reduction_stages.exponentials(simple) else (),
        },
    )
    if stays_in_parts:
        yield from (_other_holders if reduce == "hold" else _other_rollers)(schedule, simple, current)
        yield from others
        return
    yield from _other_sizes(current)
    if reduce in ("cluster", "block", "ahead"):
        other = ("block" if integers["splits"] == 1 else "cluster") if reduce == "ahead" else "ahead"
        yield Parameters({**current.choices, "reduce": other}, integers)
    if reduce == "two_pass" and passes.element_stores(simple):
        yield from geometry.domain_without(current, {"depth": (1, row_defaults.SHARED_ROWS, 0)})
    if stream:
        depth, lags = integers["depth"], (1, 2, 3) if integers["splits"] > 1 else ()
        yield from geometry.domain_without(current, {"depth": (depth + 1, depth - 1, depth * 2), "lag": lags})
    yield from geometry.domain_without(current, {"min_blocks": (1, 2, 3, 4)})
    yield from others
    if reduce != "cluster":
        yield row_defaults.settings(schedule, simple, "cluster", threads=256, splits=8)
    widest = memory_access.best_pack(simple, simple.reduced[0], 0)
    yield from (_resized(current, pack=pack) for pack in (1, 2, 4, 8) if pack <= widest)
    yield from geometry.domain_without(
        current,
        {
            "merge": ("yes", "no") if reduction_stages.can_merge(simple) else (),
            "overlap": schedule.overlaps,
            "packs": () if stream else (16, 8, 4, 2, 1),
        },
    )


def _reads_later(simple: Nest) -> bool:
    """Whether stores read along the row what no reduction reads."""
    axis = simple.reduced[0].name
    early = memory_access.loads_below(reduction.value for reduction in simple.reductions)
    late = memory_access.loads_below(passes.element_stores(simple))
    return any(axis in load.index.axes() and load not in early for load in late)


def _other_sizes(current: Parameters) -> Iterator[Parameters]:
    """Teams of more or fewer threads, lanes or blocks."""
    integers, reduce = current.integers, current.choices["reduce"]
    threads, splits = integers["threads"], integers["splits"]
    for wanted in (threads * 2, threads // 2):
        blocks = {integers["min_blocks"], max(1, integers["min_blocks"] * threads // max(32, wanted))}
        for min_blocks in sorted(blocks, reverse=True):
            yield _resized(current, threads=wanted, min_blocks=min_blocks)
    if reduce == "warp":
        yield from (_resized(current, lanes=lanes) for lanes in (4, 8, 16, 32))
    elif reduce != "block":
        sizes = (2, 4, 8, 16) if reduce in ("cluster", "ahead") else (splits * 2, splits // 2)
        yield from (_resized(current, splits=wanted) for wanted in sizes if wanted >= 1)


def _resized(current: Parameters, **changes: int) -> Parameters:
    """With a team of another size, whose threads hold as much of a row together as before."""
    old, new = current.integers, {**current.integers, **changes}
    if current.choices["reduce"] != "warp":
        new["lanes"] = new["threads"]

    def width(integers: Mapping[str, int]) -> int:
        return integers["lanes"] * max(1, integers["splits"]) * max(1, integers["pack"])

    new["packs"] = max(1, -(-old["packs"] * width(old) // max(1, width(new))))
    return Parameters(current.choices, new)


def _other_holders(schedule: CudaSchedule, simple: Nest, current: Parameters) -> Iterator[Parameters]:
    """Blocks of other sizes that keep what fits them, and more or less of the next row asked for in time."""
    for threads, packs, min_blocks in _HOLDERS:
        for found in row_defaults.held(schedule, simple, threads=threads, packs=packs, min_blocks=min_blocks):
            yield Parameters({**current.choices, "loads": found.choices["loads"]}, found.integers)
    yield from geometry.domain_without(current, {"lag": (0, 2, 4, 8), "held": (16, 12, 8, 4, 0)})


def _other_rollers(schedule: CudaSchedule, simple: Nest, current: Parameters) -> Iterator[Parameters]:
    for threads, packs in _ROLLERS:
        yield from row_defaults.rolled(schedule, simple, threads=threads, packs=packs)
    yield from rolling_rows.others(current)
