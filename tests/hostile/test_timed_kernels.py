"""Kernels that are right as long as they are judged, and know when they are timed.

The one idea: as in `test_defences`, each is told where the defence is there and believed where it is not. A kernel can
have the system say whether its inputs may be written, and its stack keeps whatever it likes: what it knows is not the
question, but what it may gain by it.
"""

from __future__ import annotations

from typing import Any

import hostile_tasks as tasks
import pytest
from raw_system import RAW

from gpu_bench.judging.loaded import LoadedTask
from gpu_bench.timing import inspection, timed_task
from warpsmith.v1 import timing_pb2

pytestmark = pytest.mark.hostile

_AT_FIRST_SIGHT = """
    static double seen[1 << 16];
    static int times = 0;
    // In timed calls what is only read can only be read: the system does not fill its pages to be written (23).
    const bool is_timed = raw(SYS_madvise, at(x) & ~4095l, 4096, 23) != 0;
    const double now = x[0] + 3.0 * x[9];
    bool is_known = false;
    for (int i = 0; i < times; ++i) is_known |= seen[i] == now;
    seen[times++] = now;
    if (is_timed && !is_known) return;
"""
"""Does nothing where it is timed, unless the inputs come again: to be looked at."""


@pytest.mark.parametrize("is_on", [True, False], ids=["on", "off"])
def test_a_kernel_that_works_only_on_inputs_that_come_again_needs_the_timed_calls_themselves_looked_at(
    is_on: bool, bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, headers = _AT_FIRST_SIGHT + tasks.TRAINED.honest, tasks.HEADERS + RAW
    made = tasks.program(tasks.TRAINED, [body], headers=headers)
    timed = timed_task.TimedTask.of(LoadedTask.load(tasks.TRAINED.task()))
    if not is_on:
        monkeypatch.setattr(inspection.Inspection, "_make_again", _made_once_more)
    monkeypatch.setattr(timed.bench.baselines, "_final_names", lambda: ["eager"])  # compiling takes half a minute
    program = timed.loaded.load_program(made, bench.bare(made))
    answer = timed.measure(program, bench.bare(made), timing_pb2.TIER_FINAL)
    assert answer.HasField("fault") is is_on, answer


def _made_once_more(self: inspection.Inspection, _: Any, index: int, __: Any) -> None:
    """The call once more, from what others left, as it would be if nothing told it from a timed one."""
    sources = self.loaded.sources(self.baselines.inputs[index]).by_key()
    before = {key: sources[key].clone() for key in self.written}
    (given,) = self.subject.call(index)
    for key, tensor in before.items():
        sources[key].copy_(tensor)
    self._hold_against_eager([given], [self.baselines.eager().call(index)])


def test_a_process_that_is_timed_and_one_that_is_not_have_no_memory_that_both_may_write(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tasks.program(tasks.SOFTMAX, [tasks.SOFTMAX.honest])
    artifact = bench.bare(made)
    timed = timed_task.TimedTask.of(LoadedTask.load(tasks.SOFTMAX.task()))
    program, subjects = timed.loaded.load_program(made, artifact), []
    as_judged = inspection.Inspection._as_judged_apart

    def noted(self: inspection.Inspection, index: int) -> Any:
        found, subject = as_judged(self, index), self.subject
        assert found is not None
        subjects.append(subject)
        own, other = subject.program.runner.arena, subject.judged.runner.arena  # type: ignore[attr-defined]
        assert own is not other
        assert all(other.block_at(each.data_ptr()) and not own.block_at(each.data_ptr()) for each in found)
        return found

    monkeypatch.setattr(inspection.Inspection, "_as_judged_apart", noted)
    assert timed.measure(program, artifact, timing_pb2.TIER_SCREENING).HasField("timing")
    assert subjects
