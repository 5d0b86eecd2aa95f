"""The defences of the GPU, each taken away once: something hostile has to get through then, or it defends nothing.

The one idea: programs that crash nothing are timed in this process, where a defence can be patched out; what a sentence
says first is with it, what it says second without.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import hostile_kernels as kernels
import hostile_tasks as tasks
import hostile_timed_kernels as timed
from hostile_gpu_bench import PASS, SCREENING, Bench, arm_ns, kind_of

from gpu_bench import device
from gpu_bench.judging.loaded import LoadedTask
from gpu_bench.running.gpu import cuda
from gpu_bench.sanitizing import sanitizer
from gpu_bench.timing import clocks, timed_task
from warpsmith.v1 import artifact_pb2, candidate_pb2, task_pb2, timing_pb2

GAINS = 0.9
"""A cheat takes less than this share of an honest kernel's time, or it gains nothing."""
_SET_ASIDE = 28 << 20
"""Bytes of the L2 that hostile host code may have set aside: of the input of 32 MiB, nearly all."""


class Here:
    """A task that is timed in this process."""

    def __init__(self, bench: Bench, module: tasks.Module, *, sets: int = 0) -> None:
        """`sets`: of buffers; 0 for as many as the product takes."""
        self._bench = bench
        ceilings = device.Ceilings.of(bench.machine.describe(task_pb2.TARGET_CUDA))
        with mock.patch.object(timed_task, "buffer_set_count", return_value=sets) if sets else nullcontext():
            self.task = timed_task.TimedTask.of(LoadedTask.load(kernels.task(module)), ceilings)

    def timing(self, kernel: kernels.Kernel) -> timing_pb2.Timing:
        """A screening of a right kernel."""
        program, artifact = self._bench.compiled(kernel)
        assert isinstance(artifact, artifact_pb2.Artifact)
        answer = self.task.measure(self.task.loaded.load_program(program, artifact), artifact, SCREENING)
        assert answer.HasField("timing"), answer.fault.detail
        return answer.timing

    def ns(self, kernel: kernels.Kernel) -> float:
        """Median of three screenings."""
        return statistics.median(arm_ns(self.timing(kernel), "candidate") for _ in range(3))


def told(usual: float, held: float, found: float) -> str:
    """Fails unless a cheat gains nothing over an honest kernel's time, and something where a defence is off."""
    sentence = f"{held / usual:.2f} of an honest kernel's time; without it {found / usual:.2f}"
    assert held > GAINS * usual > found, sentence
    return sentence


def emptied_cache(bench: Bench) -> str:
    """Without the sweep through the L2 a kernel finds its input there."""
    here = Here(bench, timed.SUMS, sets=1)
    usual, held = here.ns(timed.READING), here.ns(timed.KEEPING)
    with mock.patch.object(clocks.CudaClock, "_evict"):
        return told(usual, held, here.ns(timed.KEEPING))


def persisting_lines(bench: Bench) -> str:
    """Without their reset, lines that host code made persist outlive the sweep."""
    here = Here(bench, timed.SUMS, sets=1)
    usual = here.ns(timed.READING)
    with _persisting(here.task.bench.baselines.inputs[0][0].data_ptr()):
        held = here.ns(timed.READING)
        with mock.patch.object(here.task.bench.clock, "_reset_persisting"):
            return told(usual, held, here.ns(timed.READING))


@contextmanager
def _persisting(address: int) -> Iterator[None]:
    """Sets part of the L2 aside, and has kernels launched so that what lies at the address persists there."""
    driver, usual = importlib.import_module("cuda.bindings.driver"), cuda.configure
    window, attribute = driver.CUaccessPolicyWindow(), driver.CUlaunchAttribute()
    window.base_ptr, window.num_bytes, window.hitRatio = address, _SET_ASIDE, 1.0
    window.hitProp = driver.CUaccessProperty.CU_ACCESS_PROPERTY_PERSISTING
    window.missProp = driver.CUaccessProperty.CU_ACCESS_PROPERTY_NORMAL
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW
    attribute.value.accessPolicyWindow = window

    def configured(launch: candidate_pb2.Launch) -> Any:
        config = usual(launch)
        config.attrs = [*config.attrs, attribute]
        config.numAttrs = len(config.attrs)
        return config

    limit = driver.CUlimit.CU_LIMIT_PERSISTING_L2_CACHE_SIZE
    assert int(driver.cuCtxSetLimit(limit, _SET_ASIDE)[0]) == 0
    try:
        with mock.patch.object(cuda, "configure", configured):
            yield
    finally:
        driver.cuCtxResetPersistingL2Cache()
        driver.cuCtxSetLimit(limit, 0)


def first_launch(bench: Bench) -> str:
    """A kernel that need not wait for what precedes its program runs in the time of the call before."""
    here = Here(bench, tasks.SOFTMAX)
    usual, held = here.ns(timed.WAITING), here.ns(timed.OVERLAPPING)
    with mock.patch.object(cuda, "after_others", side_effect=lambda program: program):
        return told(usual, held, here.ns(timed.OVERLAPPING))


def host_time(bench: Bench) -> str:
    """Without the spin a program that saves time of the host only passes for a faster kernel."""
    here = Here(bench, timed.EIGHT)
    with_spin = here.timing(timed.AS_MANY).speedup_eager.median
    with (
        mock.patch.object(clocks.CudaClock, "_spin"),
        mock.patch.object(clocks.HostLead, "was_enough", return_value=True),
    ):
        without = here.timing(timed.AS_MANY).speedup_eager.median
    sentence = f"{with_spin:.2f}x eager; without it {without:.2f}x"
    assert without > 1.15 * with_spin, sentence
    return sentence


def kept_variables(bench: Bench) -> str:
    """Without the look at a cubin's variables a kernel that counts its calls is compiled, and passes."""
    case = next(each for each in kernels.CASES if each.name == "a variable that counts calls")
    assert kind_of(bench.verdict(case, SCREENING)) == "POLICY_REJECT"
    verdict = bench.verdict(replace(case, name="bare", bare=True, ahead=f"{case.ahead}\n"), SCREENING)
    assert verdict.state == PASS, f"{kind_of(verdict)}: {verdict.detail}"
    return f"POLICY_REJECT; without it PASS: {verdict.detail}"


def sanitizers(bench: Bench) -> str:
    """Without compute-sanitizer a race that happens to do no harm passes."""
    verdict = bench.verdict(timed.LUCKY, SCREENING)
    assert verdict.state == PASS, f"{kind_of(verdict)}: {verdict.detail}"
    program, artifact = bench.compiled(timed.LUCKY)
    assert isinstance(artifact, artifact_pb2.Artifact)
    with bench.session(timed.LUCKY.module).inspecting(program, artifact) as inspecting:
        said = inspecting.answer()
    if any(each.skipped for each in said):
        return f"skipped: {next(each.skipped for each in said if each.skipped)}"
    found = sanitizer.fault(said)
    assert found is not None, "no tool finds it"
    return f"{found.detail}; without it PASS: {verdict.detail}"


CHECKS: Mapping[str, Callable[[Bench], str]] = {
    "a look at the variables of a cubin": kept_variables,
    "compute-sanitizer": sanitizers,
    "a sweep through the L2 before each reading": emptied_cache,
    "a reset of lines that are to persist": persisting_lines,
    "no start of a call before the one ahead has ended": first_launch,
    "a spin of the device that hides the host's time": host_time,
}
"""Defence → its check."""
