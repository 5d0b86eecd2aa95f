"""What this machine can do, measured on it.

One idea: every ceiling is the best of a few short runs of a plain library operation, so that "percent of floor" is
relative to what PyTorch itself reaches here. Measured once a process; changes no setting of the machine.
"""

from __future__ import annotations

import functools
import math
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from gpu_bench.nvml import gpu_state
from gpu_bench.timing.clocks import new_event, spin
from warpsmith import hardware
from warpsmith.errors import BadInput
from warpsmith.v1 import judging_pb2, task_pb2, timing_pb2

_OWN_FEATURES = 9
"""Major number from which an architecture has features of its own, which compilers give for its name with an "a"."""
_SPLIT_PRODUCTS = 3
"""Half-precision products that an fp32-accurate product needs (Ootomo and Yokota 2022)."""
_CPU_GUARD_MARGIN = 1.5
"""Physical over measured bandwidth of a processor: what a measurement on a shared machine may have missed."""


@dataclass(frozen=True)
class Ceilings:
    """A device and the rates that floors are made of, in operations a second."""

    device: timing_pb2.Device
    fp32_product_rate: float
    """fp32-accurate matrix products: through the library, or as three half-precision products, the faster."""
    convolution_rate: float
    """Convolutions at the precision that PyTorch gives them: TF32 on CUDA."""
    physical_product_rate: float
    """What no fp32-accurate product can exceed; 0 when unknown."""
    physical_convolution_rate: float
    """What no convolution can exceed; 0 when unknown."""
    reduced_product_rate: float = 0.0
    """Matrix products of 16-bit operands, or of fp32 ones where TF32 is allowed; 0 when unknown."""
    physical_reduced_product_rate: float = 0.0
    """What none of those can exceed; 0 when unknown."""

    def message(self) -> judging_pb2.Ceilings:
        """For another process."""
        rates = {rate.name: getattr(self, rate.name) for rate in fields(self) if rate.name != "device"}
        return judging_pb2.Ceilings(device=self.device, **rates)

    @staticmethod
    def of(message: judging_pb2.Ceilings) -> Ceilings:
        """The inverse of `message`."""
        return Ceilings(**{each.name: getattr(message, each.name) for each in fields(Ceilings)})


def resolve_target(target: task_pb2.Target.ValueType) -> task_pb2.Target.ValueType:
    """The target itself, or for an unspecified one CUDA where present, else the CPU.

    Raises:
        BadInput: CUDA was asked for and no GPU answers.
    """
    has_cuda = torch.cuda.is_available()
    if target == task_pb2.TARGET_CUDA and not has_cuda:
        raise BadInput("target cuda was asked for, but torch sees no GPU here; use target cpu")
    if target == task_pb2.TARGET_UNSPECIFIED:
        return task_pb2.TARGET_CUDA if has_cuda else task_pb2.TARGET_CPU
    return target


@functools.cache
def describe(target: task_pb2.Target.ValueType) -> Ceilings:
    """Ceilings of the machine: under 2 s on a CPU, about 1 s on a GPU. Remembered for the process."""
    return _describe_cuda() if resolve_target(target) == task_pb2.TARGET_CUDA else _describe_cpu()


def best_of(earlier: Ceilings, later: Ceilings) -> Ceilings:
    """The higher of two measurements of one machine, rate by rate: load can only lower a ceiling."""
    device = timing_pb2.Device()
    device.CopyFrom(earlier.device)
    for rate in _RATES:
        setattr(device, rate, max(getattr(earlier.device, rate), getattr(later.device, rate)))
    device.launch_ns = min(earlier.device.launch_ns, later.device.launch_ns)
    return replace(
        earlier,
        device=device,
        fp32_product_rate=max(earlier.fp32_product_rate, later.fp32_product_rate),
        convolution_rate=max(earlier.convolution_rate, later.convolution_rate),
        reduced_product_rate=max(earlier.reduced_product_rate, later.reduced_product_rate),
    )


def measured_again(ceilings: Ceilings) -> Ceilings:
    """The ceilings, raised to what a second measurement finds."""
    describe_afresh = _describe_cuda if ceilings.device.target == task_pb2.TARGET_CUDA else _describe_cpu
    return best_of(ceilings, describe_afresh())


_RATES = (
    "copy_bytes_per_second",
    "read_bytes_per_second",
    "write_bytes_per_second",
    "product_flops",
    "tensor_flops",
    "operation_flops",
    "physical_bytes_per_second",
)


def environment(
    target: task_pb2.Target.ValueType, *, toolkit: str = "", jail_rung: str = "", seed: int = 0
) -> timing_pb2.Environment:
    """The machine as it is now, with one clock reading; `finished` adds the second."""
    result = timing_pb2.Environment(
        torch=str(torch.__version__),
        toolkit=toolkit,
        python=platform.python_version(),
        jail_rung=jail_rung,
        seed=seed,
    )
    if target == task_pb2.TARGET_CUDA:
        state = gpu_state()
        result.device = torch.cuda.get_device_name()
        result.driver = state.driver
        result.toolkit = toolkit or f"CUDA {torch.version.cuda}"
        result.clock_mhz.append(state.sm_clock_mhz)
        result.throttle_reasons.extend(state.throttle_reasons)
    else:
        result.device = cpu_name()
        result.thread_count = torch.get_num_threads()
        result.clock_mhz.append(_cpu_clock_mhz())
    return result


def finished(before: timing_pb2.Environment, target: task_pb2.Target.ValueType) -> timing_pb2.Environment:
    """The environment with clock and throttle reasons read again after the measurement."""
    after = timing_pb2.Environment()
    after.CopyFrom(before)
    if target == task_pb2.TARGET_CUDA:
        state = gpu_state()
        after.clock_mhz.append(state.sm_clock_mhz)
        after.throttle_reasons.extend(r for r in state.throttle_reasons if r not in before.throttle_reasons)
    else:
        after.clock_mhz.append(_cpu_clock_mhz())
    return after


def last_level_cache_bytes(root: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Size of the processor's largest cache; 32 MiB where the system does not tell."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes = []
    for file in root.glob("index*/size"):
        text = file.read_text().strip()
        if text[:-1].isdigit() and text[-1] in units:
            sizes.append(int(text[:-1]) * units[text[-1]])
    return max(sizes, default=32 << 20)


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Model name of the processor."""
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _cpu_clock_mhz() -> int:
    file = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq")
    return int(file.read_text()) // 1000 if file.exists() else 0


def _describe_cpu() -> Ceilings:
    cache = last_level_cache_bytes()
    count = min(max(2 * cache, 64 << 20), 256 << 20) // 4
    with torch.no_grad():
        source, target = torch.rand(count), torch.ones(count)
        read = 4 * count / _host_best_s([source.sum, source.amax], 0.25)
        copy = 8 * count / _host_best_s([lambda: target.copy_(source)], 0.25)
        write = 4 * count / _host_best_s([lambda: target.fill_(0.5)], 0.2)
        left, right = torch.rand(768, 768), torch.rand(768, 768)
        product = 2 * 768**3 / _host_best_s([lambda: left @ right], 0.3)
        tiny = torch.rand(1)
        launch_s = _host_best_s([lambda: [torch.neg(tiny) for _ in range(50)]], 0.05) / 50
    device = timing_pb2.Device(
        target=task_pb2.TARGET_CPU,
        name=cpu_name(),
        copy_bytes_per_second=copy,
        read_bytes_per_second=read,
        write_bytes_per_second=write,
        product_flops=product,
        operation_flops=product / 2,  # an operation takes the place of one multiply-add
        launch_ns=launch_s * 1e9,
        unit_count=torch.get_num_threads(),
        cache_bytes=cache,
        physical_bytes_per_second=_CPU_GUARD_MARGIN * max(read, copy),
        environment=environment(task_pb2.TARGET_CPU),
    )
    return Ceilings(device, product, product, 0.0, 0.0)


def _describe_cuda() -> Ceilings:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    card = hardware_of(properties)
    peak = half_tensor_peak(card, getattr(properties, "clock_rate", 0))  # older releases of torch do not tell
    free, _ = torch.cuda.mem_get_info()
    count = max(min(1 << 30, free // 4) // 4, 1 << 20)
    with torch.no_grad():
        read, copy, write = _cuda_bandwidths(count)
        single = _product_rate(4096, torch.float32, tf32=False)
        tf32 = _product_rate(4096, torch.float32, tf32=True)
        half = _product_rate(8192, torch.float16, tf32=False)
        tiny = torch.rand(1, device="cuda")
        launch_s = _cuda_best_s([lambda: [tiny.neg_() for _ in range(100)]]) / 100
    torch.cuda.empty_cache()
    name = properties.name
    shared = getattr(properties, "shared_memory_per_block_optin", 0)
    device = timing_pb2.Device(
        target=task_pb2.TARGET_CUDA,
        name=name,
        copy_bytes_per_second=copy,
        read_bytes_per_second=read,
        write_bytes_per_second=write,
        product_flops=single,
        tensor_flops=half,
        operation_flops=single / 2,
        launch_ns=launch_s * 1e9,
        unit_count=properties.multi_processor_count,
        cache_bytes=properties.L2_cache_size,
        shared_bytes=shared,
        physical_bytes_per_second=hardware.memory_bandwidth(name) or 1.2 * max(read, copy),
        environment=environment(task_pb2.TARGET_CUDA),
        hardware=card.message(),
    )
    return Ceilings(
        device,
        fp32_product_rate=max(single, half / _SPLIT_PRODUCTS),
        convolution_rate=max(tf32, half),
        physical_product_rate=peak / _SPLIT_PRODUCTS,
        physical_convolution_rate=peak,
        reduced_product_rate=half,
        physical_reduced_product_rate=peak,
    )


def hardware_of(properties: Any) -> hardware.Hardware:
    """The card that kernels are made for, by what torch tells of a device. Raises BadInput: none are made for it."""
    own = "a" if properties.major >= _OWN_FEATURES else ""
    return hardware.of(
        task_pb2.Hardware(
            architecture=f"sm_{properties.major}{properties.minor}{own}",
            sm_count=properties.multi_processor_count,
            l2_bytes=properties.L2_cache_size,
            shared_bytes=getattr(properties, "shared_memory_per_block_optin", 0),
            sm_threads=properties.max_threads_per_multi_processor,
        )
    )


def half_tensor_peak(card: hardware.Hardware, clock_khz: int) -> float:
    """Flops a second of 16-bit products that it cannot exceed at that clock, or at the highest that is known of it."""
    return card.half_flops_per_cycle * card.sm_count * max(clock_khz, card.boost_khz) * 1e3


def _cuda_bandwidths(count: int) -> tuple[float, float, float]:
    """Bytes a second read, copied (both directions) and written, over that many floats."""
    source, target = torch.rand(count, device="cuda"), torch.empty(count, device="cuda")
    read = 4 * count / _cuda_best_s([source.sum, source.amax])
    copy = 8 * count / _cuda_best_s([lambda: target.copy_(source)])
    write = 4 * count / _cuda_best_s([lambda: target.fill_(0.5)])
    return read, copy, write


def _product_rate(extent: int, dtype: torch.dtype, *, tf32: bool) -> float:
    """Operations a second of a square product through the library."""
    left = torch.rand(extent, extent, device="cuda").to(dtype)
    right = torch.rand(extent, extent, device="cuda").to(dtype)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        return float(2 * extent**3 / _cuda_best_s([lambda: left @ right]))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _host_best_s(calls: Sequence[Callable[[], object]], budget_s: float) -> float:
    """Shortest of repeated calls, at least three each, within about `budget_s`."""
    best, begin = math.inf, time.perf_counter()
    for call in calls:
        call()
    rounds = 0
    while rounds < 3 or time.perf_counter() - begin < budget_s:
        for call in calls:
            before = time.perf_counter()
            call()
            best = min(best, time.perf_counter() - before)
        rounds += 1
        if rounds >= 3 and time.perf_counter() - begin > 4 * budget_s:
            break
    return best


def _cuda_best_s(calls: Sequence[Callable[[], object]], repeats: int = 8) -> float:
    """Shortest of repeated calls by events, each behind a spin that hides the host."""
    best = math.inf
    for call in calls:
        call()
        for _ in range(repeats):
            before, after = new_event(), new_event()
            spin(2_000_000)
            before.record()
            call()
            after.record()
            after.synchronize()
            best = min(best, before.elapsed_time(after) / 1e3)
    return best
