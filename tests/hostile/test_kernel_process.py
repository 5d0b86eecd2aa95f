"""The process of kernels tests itself: without its lock a file is read, and without being stopped a thread works on.

The one idea: as in `test_defences`, a defence that can be taken away without anything changing defends nothing.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import hostile_tasks as tasks
import pytest
import torch
from raw_system import RAW, THREAD

from gpu_bench.running import runner
from gpu_bench.running.executor import ProgramFault, Sources
from gpu_bench.running.host import HostExecutor, HostProgram

pytestmark = pytest.mark.hostile


def loaded(body: str, bench: Any, ahead: str = "") -> HostProgram:
    program = tasks.program(tasks.SOFTMAX, [body], ahead=ahead, headers=tasks.HEADERS + RAW)
    return HostExecutor().load(program, bench.bare(program), torch.device("cpu"))


@pytest.mark.parametrize("is_on", [True, False], ids=["on", "off"])
def test_a_kernel_that_reads_a_file_needs_the_lock_of_its_process(
    is_on: bool, bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not is_on:
        source = runner._SOURCE.read_text().replace("if (!lock()) return NO_FILTER;", "")
        (tmp_path / "runner.cpp").write_text(source)
        monkeypatch.setattr(runner, "_SOURCE", tmp_path / "runner.cpp")
    runner._built.cache_clear()
    try:
        body = 'char first = 0; raw(SYS_read, opened("/proc/self/maps"), at(&first), 1); y[0] = first;'
        call = loaded(body, bench).bind(Sources([torch.rand(16, 33)]))
        if not is_on:
            assert call()[0][0, 0] > 0
            return
        with pytest.raises(ProgramFault, match="asked the system"):
            call()
    finally:
        runner._built.cache_clear()


@pytest.mark.parametrize("is_on", [True, False], ids=["on", "off"])
def test_a_thread_that_works_between_calls_needs_its_process_to_be_stopped(is_on: bool, bench: Any) -> None:
    body = "static bool is_on = false; if (!is_on) start_counting(reinterpret_cast<volatile long*>(y)); is_on = true;"
    program = loaded(body, bench, THREAD)
    (output,) = program.bind(Sources([torch.rand(16, 33)]))()
    assert program.runner is not None
    number = output.view(-1).view(torch.int64)[:1]
    first, moved, end = int(number), False, time.monotonic() + (0.5 if is_on else 20.0)
    while not moved and time.monotonic() < end:
        if not is_on:
            os.kill(program.runner._process, signal.SIGCONT)  # it stops itself again, once its call has ended
        moved = int(number) != first
    assert moved is not is_on
