"""The process in which kernels run, its memory, and how a shared object is laid out for it."""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_bench.running import host, kernel_image, runner
from gpu_bench.running.arena import KEPT_BYTES, Arena, arena
from gpu_bench.running.arena import given as given_arena
from gpu_bench.running.executor import ProgramFault, Sources
from gpu_bench.running.host import HostExecutor, HostProgram
from gpu_bench.timing import standing
from gpu_bench.timing.clocks import Arm, HostClock, Reading
from warpsmith.sandbox import kernel_calls
from warpsmith.v1 import verdict_pb2

CPU = torch.device("cpu")


def loaded(small: Any, body: str) -> HostProgram:
    program = small.kernel_program(body)
    return HostExecutor().load(program, small.compiled(program), CPU)


def given(small: Any) -> Sources:
    return Sources([torch.rand(small.rows, small.columns)])


def asks(number: int) -> str:
    return (
        f'long got; __asm__ volatile("syscall" : "=a"(got) : "a"({number}L), "D"(0L), "S"(0L), "d"(0L) : "rcx", "r11");'
    )


@pytest.mark.parametrize("number", [2, 41, 56, 57, 59, 62, 101, 257, 310, 319, 424])
def test_a_kernel_that_asks_the_system_for_what_no_kernel_needs_is_ended_and_told(small: Any, number: int) -> None:
    program = loaded(small, asks(number))
    with pytest.raises(ProgramFault, match="asked the system") as caught:
        program.bind(given(small))()
    assert caught.value.kind == verdict_pb2.FAILURE_KIND_CHEAT
    honest = loaded(small, small.softmax).bind(given(small))
    assert honest()[0].sum() > 0


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("*reinterpret_cast<volatile int*>(8) = 1;", verdict_pb2.FAILURE_KIND_CRASH),
        ("std::abort();", verdict_pb2.FAILURE_KIND_CRASH),
        ("y[1 << 20] = 1;", verdict_pb2.FAILURE_KIND_CRASH),
        ("y[-(1 << 20)] = 1;", verdict_pb2.FAILURE_KIND_CRASH),
    ],
)
def test_the_end_of_the_process_is_a_fault_and_stays_one(
    small: Any, body: str, kind: verdict_pb2.FailureKind.ValueType
) -> None:
    call = loaded(small, body).bind(given(small))
    for _ in range(2):
        with pytest.raises(ProgramFault) as caught:
            call()
        assert caught.value.kind == kind


def test_who_ends_the_process_from_another_thread_makes_its_call_a_timeout(small: Any) -> None:
    program = loaded(small, "for (volatile int i = 0;; ++i) {}")
    assert program.runner is not None
    threading.Timer(0.2, program.runner.kill).start()
    with pytest.raises(ProgramFault, match="no end of a call") as caught:
        program.bind(given(small))()
    assert caught.value.kind == verdict_pb2.FAILURE_KIND_TIMEOUT


def test_calls_of_a_batch_are_made_when_it_ends(small: Any) -> None:
    program = loaded(small, "y[0] = x[0] + 1;")
    assert program.runner is not None
    call = program.bind(Sources([arena().copy_of(torch.ones(small.rows, small.columns))]))
    with program.runner.batch():
        first, second = call()[0], call()[0]
        first[0, 0] = second[0, 0] = 0
    assert (float(first[0, 0]), float(second[0, 0])) == (2, 2)


def test_what_only_the_bench_has_to_do_within_a_call_is_not_timed(small: Any, monkeypatch: Any) -> None:
    program, move, begin = loaded(small, small.softmax), ctypes.memmove, standing.begin
    copies: list[int] = []

    def slow_move(*arguments: Any) -> None:
        copies.append(arguments[2])
        time.sleep(0.5)
        move(*arguments)

    def slow_begin() -> int:
        time.sleep(0.5)
        return begin()

    monkeypatch.setattr(host.ctypes, "memmove", slow_move)
    monkeypatch.setattr(standing, "begin", slow_begin)
    call = program.bind(given(small))  # not in memory that the kernel sees: copied
    sample = HostClock(1 << 20).take(Arm("candidate", lambda _: call(), elsewhere=program.elsewhere), [0], Reading.CALL)
    assert set(copies) == {4 * small.rows * small.columns}
    assert sample.ns < 0.25e9


def test_what_a_kernel_may_call_it_is_given(small: Any) -> None:
    control = loaded(small, small.softmax).runner._control
    table = dict(zip(("trap", "empty", *kernel_calls.FUNCTIONS), control.functions, strict=False))
    missing = {name for name, address in table.items() if not address}
    newest = {"roundeven", "roundevenf", "roundevenl", "exp10l"}
    assert not {name for name in missing if not name.startswith("GOMP_loop")} - newest, missing
    assert {"GOMP_loop_nonmonotonic_dynamic_start", "GOMP_loop_dynamic_next"}.isdisjoint(missing)


def test_teams_of_changing_size_find_their_threads(small: Any) -> None:
    body = """
    for (int turn = 0; turn < 20; ++turn) {
        long sum = 0;
        #pragma omp parallel num_threads(turn % 4 + 1) reduction(+ : sum)
        sum += 1;
        y[turn] = sum == turn % 4 + 1;
    }"""
    assert loaded_openmp(small, body).bind(given(small))()[0].view(-1)[:20].sum() == 20


def loaded_openmp(small: Any, body: str) -> HostProgram:
    program = small.kernel_program(body)
    return HostExecutor().load(program, small.compiled(program, flags=("-fopenmp", "-nodefaultlibs")), CPU)


def test_the_process_has_no_loader_and_no_table_of_dynamic_symbols() -> None:
    data = Path(runner._built()).read_bytes()
    (offset,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    kinds = {struct.unpack_from("<I", data, offset + size * place)[0] for place in range(count)}
    assert not kinds & {2, 3}, "PT_DYNAMIC, PT_INTERP"
    assert b"PyRun_" not in data


# ---- what is loaded ------------------------------------------------------------------------------------------


def test_no_constructor_runs(small: Any) -> None:
    made = "static float was_made = 0;\n__attribute__((constructor)) static void make() { was_made = 1; }"
    program = small.kernel_program("y[0] = was_made;")
    program.sources[0].text = program.sources[0].text.replace('extern "C"', f'{made}\nextern "C"', 1)
    call = HostExecutor().load(program, small.compiled(program), CPU).bind(given(small))
    assert call()[0].view(-1)[0] == 0


@pytest.mark.parametrize(
    ("ahead", "body", "why"),
    [
        ("static thread_local volatile int kept;", "kept = kept + 1;", "thread-local"),
        ('extern "C" int fork();', "fork();", "calls 'fork'"),
    ],
)
def test_what_a_process_for_kernels_does_not_have_is_a_fault(small: Any, ahead: str, body: str, why: str) -> None:
    program = small.kernel_program(body)
    program.sources[0].text = program.sources[0].text.replace('extern "C"', f'{ahead}\nextern "C"', 1)
    with pytest.raises(ProgramFault, match=why):
        HostExecutor().load(program, small.compiled(program), CPU)


def test_a_damaged_object_is_a_fault_and_never_an_error(small: Any) -> None:
    program = small.kernel_program(small.softmax)
    whole = small.compiled(program).content
    functions = dict.fromkeys((kernel_image.TRAP, *kernel_calls.FUNCTIONS), 1 << 12)
    assert kernel_image.laid_out(whole, 1 << 30, functions).entries
    for place in range(0, len(whole), 97):
        for value in (0, 0xFF):
            changed = whole[:place] + bytes([value]) + whole[place + 1 :]
            try:
                kernel_image.laid_out(changed, 1 << 30, functions)
            except ProgramFault:
                continue
    for length in range(0, 4096, 61):
        with pytest.raises(ProgramFault):
            kernel_image.laid_out(whole[:length], 1 << 30, functions)


# ---- memory --------------------------------------------------------------------------------------------------


def test_a_block_comes_back_when_its_tensor_is_gone_and_large_ones_go_to_the_system() -> None:
    memory = Arena()
    first = memory.raw(10_000)
    place, block = first.data_ptr(), memory.block_at(first.data_ptr() + 9_999)
    assert block is not None
    assert block.size == 12_288
    view = first[5:6]
    del first
    assert memory.raw(10_000).data_ptr() != place, "the view is there"
    del view
    assert memory.block_at(place) is None
    assert memory.raw(10_000).data_ptr() == place
    large = memory.raw(KEPT_BYTES + 1)
    gone = large.data_ptr()
    del large
    assert [each.address for each in memory.dropped] == [gone]
    again = memory.raw(KEPT_BYTES + 1)
    assert memory.block_at(again.data_ptr()).offset == memory.dropped[0].offset
    del again


def test_memory_that_is_not_there_is_a_memory_error() -> None:
    for size in (1 << 60, 1 << 70):
        with pytest.raises(MemoryError):
            Arena().raw(size)


def test_what_is_given_to_be_read_cannot_be_written_whatever_a_kernel_asks_the_system_for(small: Any) -> None:
    x = given_arena().copy_of(torch.ones(small.rows, small.columns))
    writable = """
    const unsigned long page = reinterpret_cast<unsigned long>(x) & ~4095ul;
    long got;
    __asm__ volatile("syscall" : "=a"(got) : "a"(10L), "D"(page), "S"(4096L), "d"(3L) : "rcx", "r11", "memory");
    y[0] = static_cast<float>(got);
    if (got == 0) const_cast<float*>(x)[0] = 2;
    """
    answer = loaded(small, writable).bind(Sources([x]))()[0]
    assert (float(answer[0, 0]), float(x[0, 0])) == (-13, 1)  # EACCES
    own = arena().copy_of(x)
    assert float(loaded(small, writable).bind(Sources([own]))()[0][0, 0]) == 0
    assert float(own[0, 0]) == 2


def test_what_only_the_loader_writes_cannot_be_written_later_however_little_it_is(small: Any) -> None:
    body = """
    static const char* const names[] = {"a", "b"};
    volatile long i = 0;
    y[0] = names[i][0];
    const_cast<const char* volatile*>(names)[i] = names[1];
    """
    with pytest.raises(ProgramFault, match="segmentation fault") as caught:
        loaded(small, body).bind(given(small))()
    assert caught.value.kind == verdict_pb2.FAILURE_KIND_CRASH
