"""Others' kernels for training steps, timed as ours are: Liger's, and QuACK's where they install.

    python -m benchmarks.training.peers [MODULE.py …] [--seconds 1] [--out FILE]

MODULE.py are steps whose names `PEERS` knows, by default `benchmarks/training/modules`. A peer takes the place of the
step's forward, and the step asks it for gradients as it asks the module; caches are cold, arms alternate. What its
results are off by is told beside the time, since a peer that is wrong is no arm. Nothing of ours imports them.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from benchmarks.training.pieces import MODULES
from gpu_bench import device
from gpu_bench.judging.loaded import LoadedTask
from gpu_bench.timing import interleaving
from gpu_bench.timing.clocks import Arm, CudaClock, HostClock
from orchestrator.tasks import intake
from warpsmith.graphs import training_step
from warpsmith.v1 import task_pb2, timing_pb2

Forward = Callable[..., Any]
Peer = Callable[[Any, Any], Forward]
"""Of a package and a step's module, what takes the place of its forward."""

PEERS: Mapping[str, tuple[str, Mapping[str, Peer]]] = {
    "liger": ("liger_kernel.transformers.functional", {
        "cross_entropy": lambda liger, _: liger.liger_cross_entropy,
        "cross_entropy_smoothed": lambda liger, _: lambda x, words: liger.liger_cross_entropy(
            x, words, label_smoothing=0.1
        ),
        "group_norm_silu": lambda liger, module: lambda x: nn.functional.silu(liger.liger_group_norm(
            x, module.norm.weight, module.norm.bias, module.norm.num_channels, module.norm.num_groups, module.norm.eps
        )),
        "layer_norm": lambda liger, module: lambda x: liger.liger_layer_norm(
            x, module.norm.weight, module.norm.bias, module.norm.eps
        ),
        "residual_rms_norm": lambda liger, module: lambda x, residual: liger.liger_fused_add_rms_norm(
            x, residual, module.weight, 1e-6
        ),
        "rms_norm": lambda liger, module: lambda x: liger.liger_rms_norm(x, module.weight, 1e-6),
        "rotary_embedding": lambda liger, module: lambda queries, keys: liger.liger_rope(
            queries, keys, module.cosine[None], module.sine[None]
        ),
        "silu_gate": lambda liger, _: liger.liger_swiglu,
        "softmax": lambda liger, _: liger.liger_softmax,
    }),
    "quack": ("quack", {
        "cross_entropy": lambda quack, _: lambda x, words: quack.cross_entropy(x, words, reduction="mean"),
        "residual_rms_norm": lambda quack, module: lambda x, residual: quack.rmsnorm(
            x, module.weight, residual=residual, eps=1e-6, prenorm=True
        ),
        "rms_norm": lambda quack, module: lambda x: quack.rmsnorm(x, module.weight, eps=1e-6),
        "softmax": lambda quack, _: quack.softmax,
    }),
}  # fmt: skip
"""By peer its package, and by step its forward."""
HEAD = "| step | arm | µs | of eager | off by |"


def forwards(name: str, module: nn.Module) -> Iterator[tuple[str, Forward | str]]:
    """Each peer of a step with its forward, or with why there is none."""
    for peer, (package, steps) in PEERS.items():
        if name not in steps:
            continue
        try:
            yield peer, steps[name](importlib.import_module(package), module)
        except Exception as error:  # a package that is half there fails as it likes
            yield peer, interleaving.failure_text(error)


def rows(file: Path, target: str, seconds: float) -> Iterator[str]:
    """Rows of a step's arms: µs of a call, how often faster than eager, and the largest distance of its results from
    eager's, relative to the largest of them. Raises BadInput."""
    task = intake.inspect(intake.read(intake.Request(str(file), target=target, gradients=())))
    loaded = LoadedTask.load(task)
    cache_bytes = device.describe(task.target).device.cache_bytes
    clock = CudaClock(cache_bytes) if task.target == task_pb2.TARGET_CUDA else HostClock(cache_bytes)
    step, module = training_step.step_of(loaded.module), loaded.module
    assert step is not None
    found: dict[str, Forward] = {"eager": training_step.forward_of(module)}
    found["compile"] = torch.compile(training_step.forward_of(module), dynamic=False)
    for peer, forward in forwards(file.stem, module):
        if isinstance(forward, str):
            yield f"| {file.stem} | {peer} | - | - | {forward} |"
        else:
            found[peer] = forward

    def called(forward: Forward) -> Callable[[int], Any]:
        given = _copied(loaded)  # peers write their results where they found the inputs
        return lambda _: step.run(module, forward, given)

    truth = step.run(module, found["eager"], _copied(loaded))
    off = {name: _told(called(forward), truth) for name, forward in found.items()}
    plan = interleaving.plan_for(timing_pb2.TIER_FINAL, task.target, 1)
    arms = [Arm(name, called(forward)) for name, forward in found.items()]
    timed = interleaving.measure(arms, clock, replace(plan, budget_s=seconds)).arms
    for name, samples in timed.items():
        share = f"{timed['eager'].median_ns / samples.median_ns:.2f}x" if not samples.failure else "-"
        time = f"{samples.median_ns / 1e3:.1f}" if not samples.failure else "-"
        yield f"| {file.stem} | {name} | {time} | {share} | {samples.failure or off[name]} |"


def _copied(loaded: LoadedTask) -> list[Any]:
    return [each.clone() if isinstance(each, torch.Tensor) else each for each in loaded.user.inputs(0, loaded.device)]


def _told(call: Callable[[int], Any], truth: Any) -> str:
    """How far a call's results are from what they should be; why there are none."""
    try:
        got = call(0)
    except Exception as error:
        return interleaving.failure_text(error)
    pairs = zip(pytree.tree_leaves(got), pytree.tree_leaves(truth), strict=True)
    worst = max((float(_distance(a, b)) for a, b in pairs if isinstance(b, torch.Tensor)), default=0.0)
    return f"{worst:.1e}"


def _distance(got: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    return (got.float() - truth.float()).abs().max() / truth.float().abs().max().clamp_min(1e-30)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table as it comes, and adds it to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", type=Path, nargs="*", default=sorted(MODULES.glob("*.py")))
    parser.add_argument("--seconds", type=float, default=1.0, help="for a step's timing, once all of its arms are warm")
    parser.add_argument("--target", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--out", type=Path, help="a file that the table is added to")
    options = parser.parse_args(arguments)
    lines = [HEAD, "|---" * 5 + "|"]
    for module in options.modules:
        for line in [*lines, *rows(module, options.target, options.seconds)]:
            print(line, flush=True)
            if options.out:
                with options.out.open("a") as file:
                    file.write(line + "\n")
        lines = []


if __name__ == "__main__":
    main()
