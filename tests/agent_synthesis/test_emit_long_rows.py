"""CUDA schedules of rows that are long or begin anywhere: what they keep on chip, and that they compile for sm_90a."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from agent_synthesis.emit.cuda.rows.row_reduction import CudaRowReduction
from agent_synthesis.emit.cuda.rows.rows_and_columns import CudaRowsAndColumns
from agent_synthesis.emit.registry import INCLUDE_DIRECTORY
from agent_synthesis.nests import iteration_space, memory_access
from agent_synthesis.nests.analysis import stages
from agent_synthesis.nests.ir import Nest, Type
from agent_synthesis.schedule import Emission
from agent_synthesis.settings import Settings
from agent_synthesis.testing import batch_statistics, group_norm, layer_norm, norm_backward, row_dot, softmax
from warpsmith.errors import IllegalMove
from warpsmith.hardware import H200

Compile = Callable[[Emission], str]


def with_settings(nest: Nest, **changes: str | int) -> Settings:
    """The defaults of a nest with other settings."""
    default = CudaRowReduction(H200).defaults(nest)
    return default.changed({"lanes": changes["threads"], **changes})


def preferred(nest: Nest, reduce: str) -> Settings:
    """The settings of a strategy that suit the nest best."""
    schedule = CudaRowReduction(H200)
    default = schedule.defaults(nest)
    return next(p for p in (default, *schedule.alternatives(nest, default)) if p.reduce == reduce)


def spilled_bytes(report: str) -> int:
    return max(int(count) for count in re.findall(r"(\d+) bytes spill stores", report))


@pytest.mark.parametrize(
    ("nest", "changes"),
    [
        (layer_norm(16, 1 << 22), {}),
        (layer_norm(16, 1 << 22), {"ctas": 66, "stages": 13}),
        (softmax(7, 1 << 22), {"lag": 4, "stores": "streaming"}),
        (softmax(999, 65536), {"ctas": 1, "stages": 4}),
        (layer_norm(7, 100004), {"ctas": 6, "stages": 5}),
        (batch_statistics(64, 64, 1 << 18), {}),
        (batch_statistics(64, 64, 1 << 18), {"ctas": 128, "vectors": 4, "stages": 6, "lag": 0, "held": 12}),
        (group_norm(112, 8, 8, 1 << 18), {"ctas": 33, "vectors": 4, "stages": 6, "held": 8}),
        (softmax(7, 1 << 22), {"ctas": 66, "vectors": 4, "stages": 5, "held": 12}),
        (layer_norm(64, 1 << 20, Type.BF16), {"vector_width": 8, "ctas": 33, "stages": 4}),
    ],
    ids=lambda v: v.name if isinstance(v, Nest) else " ".join(f"{key}={value}" for key, value in v.items()) or "plain",
)
def test_rows_that_are_kept_in_shared_memory_compile(
    compile_cuda: Compile, nest: Nest, changes: dict[str, str | int]
) -> None:
    settings = {"reduce": "resident", "preload": "no", "merge": "yes", "dependent_launch": "yes", "stores": "streaming"}
    sizes = {"threads": 512, "ctas": 132, "vectors": 2, "vector_width": 4, "stages": 8, "lag": 2, "held": 0}
    sizes["min_blocks"] = 1
    emission = CudaRowReduction(H200).emit(nest, with_settings(nest, **settings | sizes | changes))
    assert spilled_bytes(compile_cuda(emission)) == 0
    (launch,) = emission.launches
    ctas = int(changes.get("ctas", 132))
    assert launch.cooperative == (ctas > 1)
    assert launch.grid.x == min(nest.row_count, 132 // ctas) * ctas
    assert [space.zero_between_calls for space in emission.workspaces] == [True, True] * (ctas > 1)


@pytest.mark.parametrize("build", [softmax, layer_norm, row_dot], ids=lambda f: f.__name__)
@pytest.mark.parametrize("reduce", ["warp", "block", "cluster", "grid", "two_kernels"])
def test_rows_that_begin_anywhere_are_read_in_vectors_behind_a_ragged_head(
    compile_cuda: Compile, build: Callable[[int, int], Nest], reduce: str
) -> None:
    nest = build(5, 4099)
    ctas = 2 if reduce in ("cluster", "grid", "two_kernels") else 1
    settings = {
        "reduce": reduce,
        "threads": 64,
        "lanes": 32 if reduce == "warp" else 64,
        "ctas": ctas,
        "vector_width": 4,
        "vectors": 4,
        "min_blocks": 1,
    }
    emission = CudaRowReduction(H200).emit(nest, with_settings(nest, **settings))
    compile_cuda(emission)
    assert "int shift() const { return (4099 * i) % 4; }" in emission.text
    assert ".unaligned = true" in emission.text


def test_long_rows_that_begin_anywhere_get_vectors_unasked() -> None:
    schedule = CudaRowReduction(H200)
    assert schedule.defaults(softmax(32768, 65535)).vector_width == 4
    assert schedule.defaults(softmax(999, 333)).vector_width == 1, "short rows would be mostly head and tail"


def test_merged_axes_that_lie_together_are_contiguous_although_others_are_not() -> None:
    nest = group_norm(35, 8, 3, 11449)
    simple = iteration_space.canonical(nest)
    (x,) = {index for name, index in memory_access.accesses(simple) if name == "y"}
    assert x.coefficient(simple.reduced[0].name) == 1
    assert CudaRowReduction(H200).defaults(nest).vector_width == 4


def test_a_long_row_is_shared_by_as_many_blocks_as_keep_it_in_shared_memory() -> None:
    found = preferred(group_norm(112, 8, 8, 1 << 18), "resident")
    assert found.ctas == 32, "shared memory and registers of 132 SMs hold four rows of 8 MB at once"


def test_of_a_row_that_is_too_long_to_keep_only_the_rest_is_read_again() -> None:
    nest = batch_statistics(64, 64, 1 << 18)
    schedule, held = CudaRowReduction(H200), {"threads": 512, "ctas": 132, "vectors": 4, "stages": 6, "lag": 2}
    kept = with_settings(nest, reduce="resident", preload="no", **held)
    x_bytes = 4 * (64 * 64 << 18)
    waiting = 64 * (24 << 20)  # what memory could have moved while the blocks of 64 rows agree
    again = schedule.footprint(nest, kept).extra_bytes - waiting
    assert 0.4 * x_bytes < again < 0.8 * x_bytes


def test_blocks_that_cannot_keep_a_row_leave_the_rest_to_the_cache() -> None:
    found = CudaRowReduction(H200).defaults(batch_statistics(64, 64, 1 << 18))
    assert (found.reduce, found.loads) == ("resident", "cached")
    assert (found.ctas, found.held, found.lag) == (128, 12, 0)
    text = CudaRowReduction(H200).emit(batch_statistics(64, 64, 1 << 18), found).text
    assert "kResident = kX;" in text
    assert f".depth = {found.stages}, .lag = 0, .held = 12" in text
    skeleton = (INCLUDE_DIRECTORY / "ws_rows_resident.cuh").read_text()
    assert "CopyVector<Shared, Shape, kLast> copy" in skeleton, "what stays leaves its room in the cache to the rest"


def test_where_blocks_could_keep_little_of_a_row_two_kernels_read_it() -> None:
    found = CudaRowReduction(H200).defaults(batch_statistics(128, 64, 1 << 18))
    assert (found.reduce, found.stages) == ("two_kernels", 1)


@pytest.mark.parametrize("vectors", [1, 4])
def test_blocks_that_store_channels_follow_each_other_as_memory_does(vectors: int) -> None:
    nest = batch_statistics(64, 64, 1 << 18)
    settings = with_settings(nest, reduce="two_kernels", threads=512, ctas=64, vectors=vectors, stages=1)
    text = CudaRowReduction(H200).emit(nest, settings).text
    ((together, backwards),) = re.findall(r"store_rows<batch_statistics_stores, (\d+), (\w+), 64>", text)
    assert backwards == "false"
    skeleton = (INCLUDE_DIRECTORY / "ws_rows_two_kernels.cuh").read_text().replace("unsigned(kRows)", "kRows")
    rank, row = (re.findall(rf"      {name} = (.*kTogether.*);", skeleton)[0] for name in ("rank", "number"))
    blocks = (64 * 64 << 18) // (2048 * vectors)
    for number in (0, 1, 31, 32, 127, 128, 4095, 77777, blocks - 1):
        scope = {"block": number, "kTogether": int(together), "kRows": 64}
        column = eval(rank.replace("/", "//"), dict(scope)) * 2048 * vectors
        place = (column >> 18) * (64 << 18) + (eval(row.replace("/", "//"), dict(scope)) << 18) + column % (1 << 18)
        assert place == number * 2048 * vectors


def test_stores_walk_backwards_where_the_cache_still_has_much_of_what_was_read() -> None:
    for images, backwards in ((4, True), (64, False)):
        nest = batch_statistics(images, 64, 1 << 18)
        settings = with_settings(nest, reduce="two_kernels", threads=512, ctas=4, vectors=4, stages=1)
        text = CudaRowReduction(H200).emit(nest, settings).text
        assert re.findall(r"store_rows<batch_statistics_stores, \d+, (\w+), 4>", text) == [str(backwards).lower()]


def test_rows_that_share_weights_load_them_once() -> None:
    nest = layer_norm(16, 1 << 22)
    emission = CudaRowReduction(H200).emit(nest, preferred(nest, "two_kernels"))
    assert "kCommon = kWeight | kBias;" in emission.text
    assert "ws::store_several_rows<layer_norm_stores, 16, " in emission.text
    skeleton = (INCLUDE_DIRECTORY / "ws_rows_two_kernels.cuh").read_text()
    before, _, of_a_row = skeleton.partition("for (int number = 0; number < kRows")
    assert "fill<Shape, kCommon, true>" in before
    assert "fill<Shape, kOwn, true>" in of_a_row
    assert emission.launches[1].grid.x == (1 << 22) // (2 * 2048)


@pytest.mark.parametrize(
    ("nest", "changes"),
    [
        (softmax(4096, 393216), {"ctas": 8, "vectors": 24}),
        (softmax(4096, 393216), {"ctas": 16, "vectors": 24, "threads": 256, "min_blocks": 2}),
        (softmax(32768, 65535), {"ctas": 4, "vectors": 9}),
        (layer_norm(4096, 16384), {"ctas": 1, "vectors": 8}),
        (softmax(999, 65536, Type.F16), {"ctas": 2, "vectors": 8, "vector_width": 8}),
    ],
    ids=lambda v: v.name if isinstance(v, Nest) else " ".join(f"{key}={value}" for key, value in v.items()),
)
def test_prefetched_rows_compile(compile_cuda: Compile, nest: Nest, changes: dict[str, int]) -> None:
    sizes = {"threads": 512, "vector_width": 4, "min_blocks": 1, **changes}
    emission = CudaRowReduction(H200).emit(
        nest, with_settings(nest, reduce="prefetched", preload="no", merge="yes", **sizes)
    )
    assert spilled_bytes(compile_cuda(emission)) == 0
    (launch,) = emission.launches
    ctas = changes["ctas"]
    teams = min(nest.row_count, H200.resident_clusters(ctas) * sizes["min_blocks"])
    assert (launch.grid.x, max(1, launch.cluster.x)) == (teams * ctas, ctas)
    assert "kAhead = kX;" in emission.text


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"vector_width": 1, "vectors": 96}, "16 bytes"), ({"vectors": 12, "ctas": 4}, "shared memory"),
     ({"stages": 9}, "from 1 to 8 rows"), ({"ctas": 3}, "1, 2, 4, 8 or 16"),
     ({"threads": 1024, "vectors": 24, "ctas": 4}, "shared memory")],
)  # fmt: skip
def test_what_cannot_be_prefetched_is_refused_with_the_reason(changes: dict[str, int], reason: str) -> None:
    nest = softmax(4096, 393216)
    with pytest.raises(IllegalMove, match=reason):
        CudaRowReduction(H200).emit(nest, with_settings(nest, reduce="prefetched", **{"threads": 512, **changes}))


@pytest.mark.parametrize(
    ("columns", "storage"), [(1024, Type.F32), (2048, Type.BF16), (8192, Type.F32), (16384, Type.BF16)]
)
def test_rows_that_are_summed_over_spill_nothing_and_are_ahead_of_a_block_that_stays(
    columns: int, storage: Type, compile_cuda: Compile
) -> None:
    nest, schedule = norm_backward((64 << 20) // columns, columns, storage), CudaRowsAndColumns(H200)
    settings = schedule.defaults(nest)
    emission = schedule.emit(nest, settings)
    assert spilled_bytes(compile_cuda(emission)) == 0
    rows, held = emission.launches[0], settings.vectors * settings.threads * settings.vector_width
    ahead = settings.stages - (held < columns)  # a row that passes through registers in parts keeps its place
    in_flight = settings.min_blocks * ahead * columns * 2 * storage.size_bytes
    assert settings.ctas == 1, "one block has a row"
    assert in_flight >= 48 << 10
    assert settings.min_blocks * rows.shared_bytes <= H200.shared_bytes


def test_blocks_of_a_cluster_walk_together_through_rows_that_exceed_the_cache() -> None:
    settings = {"reduce": "cluster", "threads": 256, "ctas": 8, "vectors": 16, "vector_width": 4, "min_blocks": 2}
    for rows, together in ((16, False), (4096, True)):
        nest = softmax(rows, 131072)
        text = CudaRowReduction(H200).emit(nest, with_settings(nest, **settings)).text
        assert (".interleaved = true" in text) == together


def test_the_next_row_is_asked_for_where_it_lies() -> None:
    nest = group_norm(112, 8, 8, 1 << 18)
    text = CudaRowReduction(H200).emit(nest, preferred(nest, "resident")).text
    assert "kTogether = kX;" in text
    (address,) = re.findall(r"&Vector::x, ws::kOnce>\(\), x \+ \((.*) \+ \w+_begin\)\);", text)
    axes = re.findall(r"(\w+) = (row.*?);", text[text.index("void at(int row)") :].split("}")[0])
    for row in (0, 7, 128, 895):
        # Offsets are of 32 bits, in which the row's number times what eight rows hold would wrap.
        scope = {"row": torch.tensor(row, dtype=torch.int32)}
        place = eval(address, {axis: eval(value.replace("/", "//"), dict(scope)) for axis, value in axes})
        assert place == row << 21


def test_a_mean_in_float64_is_one_stage_with_the_squares_about_it() -> None:
    (stage,) = stages.plan(batch_statistics(4, 8, 64), merge=True)
    assert stage.kind == "moments"
    assert stage.state_bytes() == 16


def test_only_the_thread_that_overwrites_a_row_value_reads_it() -> None:
    nest = batch_statistics(64, 64, 256)
    code = CudaRowReduction(H200).emit(nest, CudaRowReduction(H200).defaults(nest)).text.partition("struct ")[2]
    assert code.count("running[c]") == 2
    assert code.partition("void store_row() const {")[2].count("running[c]") == 2, "by the thread that leads the row"
    assert "kElementsFirst = true;" in code


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"merge": "no"}, "one exchange"),
        ({"vector_width": 1}, "16 bytes"),
        ({"stages": 0}, "stages = 0"),
        ({"lag": 99}, "lag = 99"),
        ({"vectors": 33, "ctas": 16}, "from 1 to 128 elements"),
        ({"ctas": 133}, "more than"),
        ({"stages": 16, "ctas": 66}, "shared memory"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_the_reason(changes: dict[str, str | int], reason: str) -> None:
    nest = softmax(16, 1 << 22)
    kept = {"reduce": "resident", "merge": "yes", "preload": "no", "threads": 512, "ctas": 132, "vectors": 2,
            "stages": 8, "lag": 2, "vector_width": 4, "min_blocks": 1}  # fmt: skip
    CudaRowReduction(H200).emit(nest, with_settings(nest, **kept))
    with pytest.raises(IllegalMove, match=reason):
        CudaRowReduction(H200).emit(nest, with_settings(nest, **{**kept, **changes}))


def test_groups_with_a_weight_for_each_channel_are_pipelined_too() -> None:
    nest = group_norm(112, 8, 8, 1 << 18)
    schedule = CudaRowReduction(H200)
    found = schedule.alternatives(nest, schedule.defaults(nest))
    assert {"pipelined", "block"} <= {candidate.reduce for candidate in found}


RING = {"reduce": "ring", "preload": "no", "merge": "yes", "dependent_launch": "yes", "stores": "streaming",
        "threads": 512, "ctas": 128, "vectors": 2, "vector_width": 4, "stages": 14, "lag": 12, "held": 18,
        "min_blocks": 1}  # fmt: skip


@pytest.mark.parametrize(
    ("nest", "changes"),
    [
        (layer_norm(16, 1 << 22), {}),
        (layer_norm(16, 1 << 22), {"held": 0, "lag": 13}),
        (layer_norm(16, 1 << 22), {"threads": 256, "vectors": 4, "held": 40}),
        (layer_norm(64, 1 << 20), {"ctas": 32}),
        (layer_norm(16, 4000004), {"ctas": 132, "held": 16}),
        (layer_norm(16, 1 << 22, Type.BF16), {"ctas": 64, "vector_width": 8, "held": 8}),
        (softmax(16, 1 << 22), {"vectors": 1, "stages": 28, "lag": 26}),
        (group_norm(112, 8, 8, 1 << 18), {"ctas": 64}),
    ],
    ids=lambda v: v.name if isinstance(v, Nest) else " ".join(f"{key}={value}" for key, value in v.items()) or "plain",
)
def test_rows_that_roll_through_shared_memory_compile(
    compile_cuda: Compile, nest: Nest, changes: dict[str, int]
) -> None:
    settings = with_settings(nest, **RING | changes)
    emission = CudaRowReduction(H200).emit(nest, settings)
    assert spilled_bytes(compile_cuda(emission)) == 0
    (launch,) = emission.launches
    ctas = settings.ctas
    assert launch.cooperative
    assert launch.grid.x == min(nest.row_count, 132 // ctas) * ctas
    assert launch.shared_bytes <= H200.shared_bytes - 1024
    assert [space.zero_between_calls for space in emission.workspaces] == [True, True]


def test_rows_too_many_for_registers_and_too_long_for_a_cluster_pass_rings() -> None:
    schedule, wanted = CudaRowReduction(H200), ("reduce", "ctas", "vectors", "stages", "lag", "held")
    for nest, settings in (
        (layer_norm(16, 1 << 22), ("ring", 128, 2, 14, 12, 20)),
        (softmax(16, 1 << 22), ("ring", 128, 2, 14, 12, 0)),
        (layer_norm(64, 1 << 20), ("ring", 32, 2, 14, 12, 20)),
        (group_norm(112, 8, 8, 1 << 18), ("ring", 64, 2, 14, 12, 0)),
    ):
        found = schedule.defaults(nest)
        assert tuple(found.words()[key] for key in wanted) == settings
        others = [p for p in schedule.alternatives(nest, found) if p.reduce == "ring"]
        assert {11, 13} <= {p.lag for p in others}


def test_what_rows_share_is_held_by_registers_as_far_as_it_fits(compile_cuda: Compile) -> None:
    nest = layer_norm(16, 1 << 22)
    emission = CudaRowReduction(H200).emit(nest, with_settings(nest, **RING))
    assert "kSharedByRows = kWeight | kBias;" in emission.text
    common = "ws::SharedLoads<ws::RowShape<layer_norm_tiling>, layer_norm_row, layer_norm_tiling.held>"
    parts = {"kWeight": 8, "kBias": 1}
    checks = [f"static_assert({common}::held_parts(layer_norm_row::{bit}) == {n});" for bit, n in parts.items()]
    compile_cuda(replace(emission, text="\n".join([emission.text, *checks])))


def test_a_rolling_row_is_added_up_long_before_it_is_stored() -> None:
    schedule = CudaRowReduction(H200)
    rolling = schedule.footprint(layer_norm(16, 1 << 22), with_settings(layer_norm(16, 1 << 22), **RING))
    kept = RING | {"reduce": "resident", "stages": 6, "vectors": 4, "lag": 0, "held": 8}
    holding = schedule.footprint(layer_norm(16, 1 << 22), with_settings(layer_norm(16, 1 << 22), **kept))
    assert rolling.extra_bytes < holding.extra_bytes / 3, "blocks agree while memory has other rows to move"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"merge": "no"}, "one exchange"),
        ({"vector_width": 1}, "16 bytes"),
        ({"lag": 7}, "7 of 14 parts"),
        ({"lag": 14}, "14 of 14 parts"),
        ({"ctas": 256}, "more than"),
        ({"stages": 15}, "shared memory"),
        ({"held": 26}, "registers"),
        ({"ctas": 64}, "12 of 14 parts"),
    ],
)
def test_what_cannot_roll_is_refused_with_the_reason(changes: dict[str, str | int], reason: str) -> None:
    nest = layer_norm(16, 1 << 22)
    CudaRowReduction(H200).emit(nest, with_settings(nest, **RING))
    with pytest.raises(IllegalMove, match=reason):
        CudaRowReduction(H200).emit(nest, with_settings(nest, **{**RING, **changes}))


def test_rows_that_are_only_added_up_or_read_otherwise_pass_no_rings() -> None:
    for nest in (row_dot(16, 1 << 22), batch_statistics(64, 64, 1 << 18)):
        with pytest.raises(IllegalMove):
            CudaRowReduction(H200).emit(nest, with_settings(nest, **RING))
