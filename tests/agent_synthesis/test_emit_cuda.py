"""CUDA schedules: what they choose, what they refuse, and that every emission compiles for sm_90a without a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from agent_synthesis.emit.cuda.columns.column_reduction import CudaColumnReduction
from agent_synthesis.emit.cuda.pointwise import CudaPointwise
from agent_synthesis.emit.cuda.rows.row_reduction import CudaRowReduction
from agent_synthesis.emit.cuda.rows.settings import row_defaults
from agent_synthesis.emit.cuda.rows.settings.row_settings import Reduce
from agent_synthesis.emit.registry import INCLUDE_DIRECTORY, schedules
from agent_synthesis.nests import iteration_space, memory_access
from agent_synthesis.nests.analysis import stages
from agent_synthesis.nests.ir import (
    OPERATIONS,
    Axis,
    BufferRef,
    Call,
    Index,
    Load,
    Nest,
    Quotient,
    Reduced,
    Reduction,
    Store,
    Type,
)
from agent_synthesis.nests.verifier import verify
from agent_synthesis.schedule import Emission, Offered
from agent_synthesis.settings import Settings
from agent_synthesis.testing import (
    F32,
    at,
    batch_norm,
    call,
    column_softmax,
    column_sum,
    gelu,
    layer_norm,
    number,
    row_dot,
    rows_of,
    softmax,
)
from warpsmith.errors import IllegalMove
from warpsmith.hardware import H200
from warpsmith.v1 import task_pb2

GOLDEN = Path(__file__).parent.parent / "golden"
Compile = Callable[[Emission], str]


def first_schedule(nest: Nest) -> Offered:
    return next(schedule for schedule in schedules(task_pb2.TARGET_CUDA) if schedule.accepts(nest))


def emitted(nest: Nest) -> Emission:
    schedule = first_schedule(nest)
    return schedule.emit(nest, schedule.defaults(nest))


def with_strategy(nest: Nest, reduce: str, **changes: str | int) -> Settings:
    """The first alternative of that strategy (or the default itself), changed further."""
    schedule = CudaRowReduction(H200)
    default = schedule.defaults(nest)
    candidates = [default, *schedule.alternatives(nest, default)]
    chosen = next((c for c in candidates if c.reduce == reduce), None)
    if chosen is None:
        ctas = 2 if reduce in ("cluster", "grid", "two_kernels") else 1
        lanes = 32 if reduce == "warp" else 64
        chosen = replace(default, reduce=Reduce(reduce), threads=64, lanes=lanes, ctas=ctas, vectors=2)
    return chosen.changed(changes)


def spilled_bytes(report: str) -> int:
    return max(int(count) for count in re.findall(r"(\d+) bytes spill stores", report))


# ---- what compiles -----------------------------------------------------------------------------------

SHAPES = [(1, 1048576), (16, 16384), (16, 262144), (32, 65536), (128, 131072), (4096, 1024), (4096, 16384),
          (4096, 393216), (1048576, 64), (5, 100003), (7, 1000), (100, 257)]  # fmt: skip


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("build", [softmax, layer_norm, row_dot], ids=lambda f: f.__name__)
def test_default_rows_compile_and_stay_in_registers(
    compile_cuda: Compile, build: Callable[[int, int], Nest], rows: int, columns: int
) -> None:
    assert spilled_bytes(compile_cuda(emitted(build(rows, columns)))) <= 16


@pytest.mark.parametrize(
    "reduce",
    [
        strategy
        for strategy in [each.value for each in Reduce]
        if strategy not in ("pipelined", "resident", "ring", "prefetched")
    ],
)
@pytest.mark.parametrize("merge", ["yes", "no"])
@pytest.mark.parametrize("nest", [softmax(7, 1003), layer_norm(6, 2048, Type.BF16)], ids=lambda n: n.name)
def test_every_strategy_compiles(compile_cuda: Compile, nest: Nest, reduce: str, merge: str) -> None:
    emission = CudaRowReduction(H200).emit(nest, with_strategy(nest, reduce, merge=merge))
    compile_cuda(emission)
    assert len(emission.launches) == (1 if reduce != "two_kernels" else 2 if merge == "yes" else 3)


def pipelined(nest: Nest, **changes: str | int) -> Settings:
    """Settings of the strategy pipelined, from the defaults of whatever the nest would get."""
    default = CudaRowReduction(H200).defaults(nest)
    started: dict[str, str | int] = {"reduce": "pipelined", "merge": "yes", "preload": "yes", "threads": 256, "ctas": 4}
    wanted = started | {"min_blocks": 1, "stages": 4, "lag": 1} | changes
    return default.changed({**wanted, "lanes": wanted["threads"]})


@pytest.mark.parametrize(
    ("nest", "changes"),
    [
        (softmax(999, 16384), {}),
        (softmax(999, 16384), {"ctas": 1, "stages": 2}),
        (softmax(999, 16384), {"ctas": 3, "lag": 2, "stages": 6}),
        (layer_norm(4096, 20004), {}),
        (layer_norm(4096, 20004), {"ctas": 3, "lag": 2, "stages": 6}),
        (layer_norm(4096, 20004), {"preload": "no"}),
        (layer_norm(4096, 8192), {"ctas": 1}),
        (layer_norm(1 << 17, 32768, Type.BF16), {}),
        (layer_norm(1 << 17, 32768, Type.BF16), {"preload": "no"}),
        (row_dot(999, 16384), {}),
        (row_dot(999, 16384), {"ctas": 1, "stages": 3}),
    ],
    ids=lambda v: v.name if isinstance(v, Nest) else " ".join(f"{key}={value}" for key, value in v.items()) or "plain",
)
def test_rows_that_are_pipelined_compile(compile_cuda: Compile, nest: Nest, changes: dict[str, str | int]) -> None:
    emission = CudaRowReduction(H200).emit(nest, pipelined(nest, **changes))
    assert spilled_bytes(compile_cuda(emission)) == 0
    (launch,) = emission.launches
    ctas = changes.get("ctas", 4)
    assert launch.cooperative == (ctas != 1)
    assert launch.grid.x == 132 // int(ctas) * int(ctas)
    assert [space.zero_between_calls for space in emission.workspaces] == [True] * (ctas != 1)


@pytest.mark.parametrize(
    "nest",
    [
        gelu(1000001), gelu(1 << 20), gelu(1 << 20, Type.F16), column_sum(1000, 1001), column_sum(8192, 4096),
        column_sum(64, 4096, Type.I64), column_sum(4096, 64, Type.BF16), column_softmax(512, 2048),
        batch_norm(4, 7, 49), batch_norm(8, 64, 784), softmax(64, 4096, Type.BF16), softmax(1, 1),
    ],
    ids=lambda n: f"{n.name}-{n.row_count}x{n.column_count}",
)  # fmt: skip
def test_other_nests_compile(compile_cuda: Compile, nest: Nest) -> None:
    assert spilled_bytes(compile_cuda(emitted(nest))) == 0


@pytest.mark.parametrize("type_", [Type.F32, Type.F64, Type.I64, Type.I32, Type.U8, Type.BOOL], ids=lambda t: t.value)
def test_every_operation_compiles(compile_cuda: Compile, type_: Type) -> None:
    fit = [name for name in OPERATIONS if _fits(name, type_)]
    buffers = [BufferRef("a", type_, 256), BufferRef("b", type_, 256)]
    stores = []
    for name in fit:
        arguments = [Load(buffer, at(i=1), type_) for buffer in ("a", "b", "a")[: OPERATIONS[name]]]
        if name == "where":
            arguments[0] = call("gt", *arguments[:2], type_=Type.BOOL)  # type: ignore[call-overload]
        is_truth = name in ("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "not", "isnan", "isinf")
        kind = Type.BOOL if is_truth else type_
        buffers.append(BufferRef(f"y_{name}", kind, 256, True))
        stores.append(Store(f"y_{name}", at(i=1), Call(name, tuple(arguments), kind)))
    nest = verify(Nest("operations", (Axis("i", 256),), (), (), tuple(stores), tuple(buffers)))
    compile_cuda(emitted(nest))


def _fits(name: str, type_: Type) -> bool:
    if type_ is Type.BOOL:
        return name in ("and", "or", "xor", "not", "bitwise_not", "bitwise_and", "eq", "max", "where", "cast")
    if not type_.is_float:
        return name in (
            "cast", "neg", "abs", "sign", "add", "sub", "mul", "floor_div", "trunc_div", "fmod", "remainder", "pow",
            "max", "min", "eq", "lt", "and", "not", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "where",
            "shift_left", "shift_right",
        )  # fmt: skip
    return name != "gather" and not name.startswith(
        ("bitwise", "shift")
    )  # gather needs a whole buffer: see test_breadth


@pytest.mark.parametrize("source", [Type.F32, Type.F64, Type.F16, Type.BF16, Type.I64, Type.U8, Type.BOOL])
def test_every_conversion_compiles(compile_cuda: Compile, source: Type) -> None:
    buffers = [BufferRef("x", source, 256)]
    stores = []
    for target in Type:
        buffers.append(BufferRef(f"y_{target.value}", target, 256, True))
        value = Call("cast", (Load("x", at(i=1), source.compute),), target)
        stores.append(Store(f"y_{target.value}", at(i=1), value))
    compile_cuda(emitted(verify(Nest("casts", (Axis("i", 256),), (), (), tuple(stores), tuple(buffers)))))


@pytest.mark.parametrize("type_", [Type.F64, Type.I64, Type.I32], ids=lambda t: t.value)
@pytest.mark.parametrize("reduce", ["warp", "block", "cluster", "grid"])
def test_reductions_of_other_types_compile(compile_cuda: Compile, type_: Type, reduce: str) -> None:
    x = Load("x", at(i=512, j=1), type_)
    names = ("sum", "max", "min", "prod")
    nest = verify(Nest(
        "all_four", (Axis("i", 9),), (Axis("j", 512),), tuple(Reduction(name, name, x, type_) for name in names),
        tuple(Store(f"y_{name}", at(i=1), Reduced(name, type_)) for name in names),
        (BufferRef("x", type_, 9 * 512), *(BufferRef(f"y_{name}", type_, 9, True) for name in names)),
    ))  # fmt: skip
    compile_cuda(CudaRowReduction(H200).emit(nest, with_strategy(nest, reduce)))


def test_a_program_may_have_kernels_of_all_schedules(compile_cuda: Compile) -> None:
    """Names of one header were those of another."""
    headers = tuple(sorted(path.name for path in INCLUDE_DIRECTORY.glob("*.cuh")))
    compile_cuda(Emission('extern "C" __global__ void nothing() {}', headers, ()))


# ---- what is chosen ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "columns", "reduce"),
    [(1, 1048576, "two_kernels"), (16, 16384, "cluster"), (16, 262144, "grid"), (32, 65536, "cluster"),
     (128, 131072, "cluster"), (4096, 1024, "warp"), (4096, 16384, "block"), (4096, 393216, "prefetched"),
     (7168, 262144, "cluster"), (1048576, 64, "warp")],
)  # fmt: skip
@pytest.mark.parametrize("build", [softmax, layer_norm], ids=lambda f: f.__name__)
def test_the_measured_rule_chooses_the_team(
    build: Callable[[int, int], Nest], rows: int, columns: int, reduce: str
) -> None:
    if build is layer_norm and rows >= 128 and columns > 16384:
        reduce = "pipelined"  # rows share the weight, which blocks that stay keep
    assert CudaRowReduction(H200).defaults(build(rows, columns)).reduce == reduce


@pytest.mark.parametrize(
    ("columns", "ctas", "threads"), [(1 << 21, 256, 512), (6 << 20, 256, 512), (64 << 20, 528, 512)]
)
def test_a_sum_over_all_is_read_by_many_blocks(compile_cuda: Compile, columns: int, ctas: int, threads: int) -> None:
    nest = row_dot(1, columns)
    chosen = CudaRowReduction(H200).defaults(nest)
    assert chosen.reduce == "two_kernels"
    assert (chosen.ctas, chosen.threads) == (ctas, threads)
    assert spilled_bytes(compile_cuda(emitted(nest))) == 0


@pytest.mark.parametrize(("rows", "columns", "ctas"), [(1, 9 << 20, 256), (1, 1 << 20, 64), (16, 4 << 20, 64)])
def test_two_kernels_of_few_rows_have_many_blocks(rows: int, columns: int, ctas: int) -> None:
    chosen = row_defaults.two_kernels(CudaRowReduction(H200), iteration_space.canonical(softmax(rows, columns)))
    assert chosen.ctas == ctas


@pytest.mark.parametrize(
    ("nest", "threads", "lanes", "ctas"),
    [
        (column_sum(513, 39 * 511), 256, 32, 1),  # a column each, of a tensor that is no large one
        (column_softmax(64, 40_001), 256, 32, 1),
        (column_softmax(23, 40_001), 128, 32, 1),  # four threads above each other have six rows each
        (column_softmax(8, 40_001), 128, 64, 1),
        (column_softmax(8, 4224), 128, 8, 1),  # wider, half of the multiprocessors would have no block
        (column_softmax(8, 16), 512, 8, 1),  # no blocks to spare
    ],
    ids=["many rows", "64 rows", "23 rows", "8 rows", "fewer columns", "few columns"],
)
def test_threads_above_each_other_have_several_rows_each(
    compile_cuda: Compile, nest: Nest, threads: int, lanes: int, ctas: int
) -> None:
    settings = CudaColumnReduction(H200).defaults(nest)
    assert (settings.threads, settings.lanes, settings.ctas) == (threads, lanes, ctas)
    assert (
        spilled_bytes(compile_cuda(CudaColumnReduction(H200).emit(nest, CudaColumnReduction(H200).defaults(nest)))) == 0
    )


def test_settings_without_effect_are_no_alternatives() -> None:
    schedule = CudaRowReduction(H200)
    nest = layer_norm(4096, 16384)
    default = schedule.defaults(nest)
    found = schedule.alternatives(nest, default)
    assert {candidate.exp for candidate in found} == {"accurate"}
    sizes = {(c.threads, c.vectors) for c in found if c.reduce == "block"}
    assert {(256, 16), (1024, 4)} <= sizes, "a team of another size holds the same row"
    assert all(threads * vectors <= 512 * 8 or c.vector_width < 4 for c in found for threads, vectors in
               [(c.threads, c.vectors)] if c.reduce == "block")  # fmt: skip


@pytest.mark.parametrize(
    "nest",
    [softmax(16, 262144), layer_norm(4096, 1024), softmax(5, 1003), gelu(1 << 20), column_sum(4096, 4096)],
    ids=lambda n: n.name,
)
def test_alternatives_are_legal_and_differ(nest: Nest) -> None:
    schedule = first_schedule(nest)
    default = schedule.defaults(nest)
    alternatives = schedule.alternatives(nest, default)
    assert len(alternatives) >= 5
    assert default not in alternatives
    for candidate in alternatives:
        schedule.emit(nest, candidate)


def test_schedules_are_registered_for_the_target() -> None:
    assert first_schedule(gelu(64)).name == "cuda_pointwise"
    assert first_schedule(column_sum(64, 64)).name == "cuda_column_reduction"
    assert first_schedule(softmax(64, 64)).name == "cuda_row_reduction"


def test_emission_does_not_depend_on_what_was_emitted_before() -> None:
    assert emitted(softmax(16, 262144)) == emitted(softmax(16, 262144))


def test_a_running_pair_of_reductions_is_one_stage() -> None:
    assert [stage.kind for stage in stages.plan(softmax(4, 64), merge=True)] == ["shifted"]
    assert [stage.kind for stage in stages.plan(layer_norm(4, 64), merge=True)] == ["moments"]
    assert [stage.kind for stage in stages.plan(softmax(4, 64), merge=False)] == ["folds", "folds"]


def test_a_weighted_sum_of_exponentials_merges_with_its_maximum() -> None:
    x = Load("x", at(i=64, j=1), F32)
    power = call("mul", call("exp", call("sub", x, Reduced("top", F32))), Load("w", at(j=1), F32))
    reductions = (Reduction("top", "max", x, F32), Reduction("total", "sum", power, F32))
    nest = rows_of("weighted", 4, 64, reductions, Reduced("total", F32), loads=("w",))
    assert [stage.kind for stage in stages.plan(nest, merge=True)] == ["shifted"]


def test_squares_about_something_else_than_the_mean_stay_apart() -> None:
    x = Load("x", at(i=64, j=1), F32)
    distance = call("sub", x, call("div", Reduced("total", F32), number(63.0)))
    reductions = (Reduction("total", "sum", x, F32), Reduction("squares", "sum", call("mul", distance, distance), F32))
    nest = rows_of("apart", 4, 64, reductions, Reduced("squares", F32))
    assert [stage.kind for stage in stages.plan(nest, merge=True)] == ["folds", "folds"]


def test_blocks_that_wait_for_each_other_launch_cooperatively_with_clean_mailboxes() -> None:
    emission = emitted(softmax(16, 262144))
    (launch,) = emission.launches
    (mailboxes,) = emission.workspaces
    assert launch.cooperative
    assert mailboxes.zero_between_calls
    assert list(launch.writes) == ["y", mailboxes.name]
    assert mailboxes.spec.shape[0] == 16 * 16 * 16 * 2


def test_the_second_pass_is_a_dependent_launch() -> None:
    first, second = emitted(softmax(1, 1048576)).launches
    assert second.programmatic_dependent
    assert [argument.buffer for argument in first.arguments] == ["x", "softmax_row_max_partials"]
    assert list(first.writes) == ["softmax_row_max_partials"]
    assert list(second.writes) == ["y"]


def test_large_buffers_get_64_bit_offsets() -> None:
    assert "using Index = ws::int64;" in emitted(softmax(1 << 17, 16384)).text
    assert "ws::int64" not in emitted(softmax(16, 16384)).text
    # Row 2^18 of 2^13 columns begins beyond 2^31: rows are counted in what their addresses are made of.
    assert "load(ws::ColumnVisit<0>, ws::int64 k, ws::int64 m_begin)" in emitted(column_sum(1 << 19, 1 << 13)).text
    assert "load(ws::ColumnVisit<0>, int k, int m_begin)" in emitted(column_sum(1 << 13, 1 << 13)).text


def test_rereading_rows_costs_their_bytes_only_beyond_the_second_level_cache() -> None:
    schedule = CudaRowReduction(H200)
    nest = softmax(4096, 16384)
    kept = schedule.defaults(nest)
    assert schedule.footprint(nest, kept).extra_bytes == 0
    reread = with_strategy(nest, "two_kernels", threads=256, lanes=256, ctas=4, vectors=2)
    assert schedule.footprint(nest, reread).extra_bytes >= 4096 * 16384 * 4


# ---- what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reduce", "changes", "reason"),
    [
        ("grid", {"ctas": 512, "min_blocks": 1}, "wait for each other"),
        ("cluster", {"ctas": 3}, "2, 4, 8 or 16"),
        ("cluster", {"threads": 512, "lanes": 512, "min_blocks": 2, "vectors": 16}, "registers"),
        ("block", {"threads": 2048, "lanes": 2048}, "1024 threads"),
        ("block", {"vector_width": 3}, "lie together"),
        ("warp", {"lanes": 5}, "part of a warp"),
    ],
)
def test_what_does_not_fit_is_refused(reduce: str, changes: dict[str, str | int], reason: str) -> None:
    nest = softmax(16, 262144)
    with pytest.raises(IllegalMove, match=reason):
        CudaRowReduction(H200).emit(nest, with_strategy(nest, reduce, **changes))


@pytest.mark.parametrize(
    ("nest", "changes", "reason"),
    [
        (softmax(999, 16384), {"merge": "no"}, "one exchange"),
        (softmax(999, 1003), {}, "16 bytes"),
        (softmax(999, 16384), {"stages": 2}, "reach ahead"),
        (softmax(999, 16384), {"stages": 20}, "shared memory"),
        (softmax(999, 16384), {"lag": 5, "stages": 8}, "1 to 4 rows"),
        (softmax(999, 262144), {"ctas": 140, "stages": 3}, "more than fit"),
    ],
)
def test_rows_that_cannot_be_pipelined_are_refused(nest: Nest, changes: dict[str, str | int], reason: str) -> None:
    with pytest.raises(IllegalMove, match=reason):
        CudaRowReduction(H200).emit(nest, pipelined(nest, **changes))


def test_rows_overwritten_in_place_are_not_pipelined() -> None:
    nest = softmax(999, 16384)
    place = at(i=16384, j=1)
    x = Load("y", place, F32)
    doubled = call("mul", x, Reduced("row_sum", F32))
    own = Nest(
        "in_place", nest.parallel, nest.reduced, (Reduction("row_sum", "sum", x, F32),),
        (Store("y", place, doubled),), (BufferRef("y", F32, 999 * 16384, True),),
    )  # fmt: skip
    with pytest.raises(IllegalMove, match="in place"):
        CudaRowReduction(H200).emit(verify(own), pipelined(own))


# ---- how vectors are read ------------------------------------------------------------------------------


def test_neighbours_are_read_together_only_where_every_pack_is_aligned() -> None:
    assert memory_access.access(at(i=64, j=1), "j", 4) == "vector"
    assert memory_access.access(at(2, i=64, j=1), "j", 4) == "each"
    assert memory_access.access(at(i=63, j=1), "j", 4) == "each"
    assert memory_access.access(at(i=64), "j", 4) == "same"
    assert memory_access.access(at(j=2), "j", 4) == "each"


def test_one_axis_of_any_length_has_vectors_of_which_the_last_is_predicated(compile_cuda: Compile) -> None:
    nest, schedule = gelu(2102787), CudaPointwise(H200)
    emission = schedule.emit(nest, schedule.defaults(nest))
    compile_cuda(emission)
    assert emission.launches[0].grid.x == -(-2102787 // (4 * 256))
    assert "ws::load_inside<4, ws::kShared, kColumns>(x + i_begin, i_begin)" in emission.text
    assert "ws::store_inside<kColumns>(y + i_begin, y_pack, i_begin);" in emission.text


def test_what_begins_between_two_vectors_goes_element_by_element() -> None:
    nest = gelu(2102787)
    (store,) = nest.stores
    load = next(iter(memory_access.loads(nest)))
    shifted = Load(load.buffer, at(1, i=1), load.type)
    buffers = tuple(replace(buffer, element_count=buffer.element_count + 1) for buffer in nest.buffers)
    moved = replace(nest, stores=(replace(store, index=at(1, i=1), value=call("neg", shifted)),), buffers=buffers)
    assert CudaPointwise(H200).defaults(moved).vector_width == 1


def test_an_axis_split_by_a_quotient_still_has_vectors() -> None:
    channel = Index(0, ((Quotient(at(j=1), 16), 1),))
    assert memory_access.access(channel, "j", 4) == "same"
    assert memory_access.access(Index(0, ((Quotient(at(j=1), 6), 1),)), "j", 4) == "each"
    nest = iteration_space.canonical(batch_norm(8, 64, 784))
    assert memory_access.widest_vector(nest, nest.reduced[0]) == 4
    odd = iteration_space.canonical(batch_norm(8, 64, 49))
    assert memory_access.widest_vector(odd, odd.reduced[0]) == 1


# ---- how it reads ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "nest",
    [softmax(4096, 16384), layer_norm(16, 262144), row_dot(1, 1048576), column_sum(8192, 8192), gelu(1 << 20),
     replace(layer_norm(4096, 393216), name="layer_norm_pipelined"),
     replace(layer_norm(16, 1 << 22), name="layer_norm_ring")],
    ids=lambda n: n.name,
)  # fmt: skip
def test_emitted_source_is_the_golden_one(nest: Nest) -> None:
    text = emitted(nest).text
    golden = GOLDEN / f"{nest.name}.cu"
    assert golden.exists(), f"write it with: {golden.name}\n{text}"
    assert text == golden.read_text()
