"""Checks the fused plans of random modules against the truth, and keeps what fails, shrunk.

    python -m benchmarks.fuzzing.random_modules [--count 1000] [--seed 0] [--keep tests/agent_synthesis/kept]

Each module of `benchmarks.fuzzing.sketches` is captured, authored and fused as far as moves allow, some schedules
are set otherwise, and what comes out is compiled (many modules a compilation), run in guarded memory and judged by the
checks of the correctness agent, all in this process: no services, no jail. Only a module with a kernel of two or more
operations counts as fused.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import types
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from agent_compile import policy
from agent_correctness.judge import Judge as Verifier
from agent_synthesis import generator
from agent_synthesis.emit.registry import INCLUDE_DIRECTORY
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.nests.ir import Nest
from agent_synthesis.plans import fusion, moves
from agent_synthesis.plans.partition import Group
from agent_synthesis.plans.plan import Plan, plan_zero
from benchmarks.fuzzing import sketches
from benchmarks.fuzzing.in_process import InProcess
from benchmarks.fuzzing.sketches import Sketch
from gpu_bench.judging.loaded import LoadedTask
from gpu_bench.running.host import HostExecutor, HostProgram
from warpsmith.contract import words
from warpsmith.errors import BadInput, IllegalMove
from warpsmith.graphs.refusals import CaptureRefused
from warpsmith.graphs.task_module import TaskModule
from warpsmith.processor_flags import FLAGS
from warpsmith.v1 import (
    analysis_pb2,
    artifact_pb2,
    candidate_pb2,
    correctness_service_pb2,
    graph_pb2,
    task_pb2,
    timing_pb2,
    verdict_pb2,
)

KEPT = Path(__file__).parents[2] / "tests" / "agent_synthesis" / "kept"
BATCH = 24
"""Modules of one compilation: half of a compilation is headers."""
_Move = moves.Move


@dataclass
class Made:
    """A module on its way: loaded, planned, generated."""

    text: str
    loaded: LoadedTask
    plan: Plan
    program: candidate_pb2.Program

    @property
    def fused_groups(self) -> list[Group]:
        """Kernels of two or more operations."""
        return [g for g in self.plan.groups if g.engine == "authored" and len(self.plan.all_nodes(g)) > 1]


@dataclass(frozen=True)
class Outcome:
    """What became of a module."""

    kind: str
    """refused, undefined, unfused, fused (these two passed), compile, wrong."""
    detail: str = ""

    @property
    def failed(self) -> bool:
        """Whether it is a fault of ours."""
        return self.kind in ("compile", "wrong", "broken")


# ---- from text to a program ------------------------------------------------------------------------------


def make(
    text: str, settings: random.Random | None = None, target: task_pb2.Target.ValueType = task_pb2.TARGET_CPU
) -> Made:
    """Loads, captures, fuses and generates; `settings` draws how schedules are set, None leaves the defaults.

    Raises BadInput for a module that does not capture.
    """
    namespace = types.ModuleType("random_module")
    exec(compile(text, "<random module>", "exec"), namespace.__dict__)
    user = TaskModule("module.py", Path("/nonexistent"), "Model", namespace)
    task = task_pb2.Task(name="random", entry_path="module.py", class_name="Model", target=task_pb2.TARGET_CPU)
    loaded = _Loaded(task, torch.device("cpu"), user, user.build(), _Unused())
    loaded._pristine = {name: tensor.clone() for name, tensor in loaded._own_tensors().items()}
    plan = fused_as_far_as_legal(plan_zero(GraphIndex(loaded.capture(user.inputs(0))), target))
    if settings is not None:
        plan = with_drawn_settings(plan, settings)
    return Made(text, loaded, plan, generator.generate(plan))


class _Unused:
    target: task_pb2.Target.ValueType = task_pb2.TARGET_CPU

    def load(self, *_: object) -> HostProgram:
        raise AssertionError("programs are loaded from a batch")

    def synchronize(self) -> None:
        """Calls return when they have ended."""


class _Loaded(LoadedTask):
    """Captures once: the judge's capture and the synthesis agent's are one function of one module."""

    _graph: graph_pb2.Graph | None = None

    def capture(self, args: tuple[Any, ...]) -> graph_pb2.Graph:
        if self._graph is None:
            self._graph = super().capture(args)
        return self._graph


def fused_as_far_as_legal(plan: Plan) -> Plan:
    """Every group that lowers as a kernel of ours, with all that fuses before it; then siblings that read the same."""
    for name in reversed([group.name for group in plan.groups]):
        if all(group.name != name for group in plan.groups):
            continue  # a later group took it in
        for move in (
            _Move(kind=analysis_pb2.MOVE_KIND_FUSE, group=name, choice="*"),
            _Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group=name),
        ):
            try:
                plan = moves.apply(plan, move)
                break
            except IllegalMove:
                continue
    for name in reversed([group.name for group in plan.groups]):
        for sibling in plan.siblings(plan.group(name)) if any(group.name == name for group in plan.groups) else ():
            with contextlib.suppress(IllegalMove):
                plan = moves.apply(plan, _Move(kind=analysis_pb2.MOVE_KIND_FUSE, group=name, choice=sibling))
    return plan


def with_drawn_settings(plan: Plan, draw: random.Random) -> Plan:
    """About half of the kernels set otherwise, one legal change away from the defaults."""
    for group in plan.groups:
        nest = plan.nest(group)
        if group.engine != "authored" or not isinstance(nest, Nest) or draw.random() < 0.5:
            continue
        schedule = plan.schedule(group)
        others = list(schedule.alternatives(nest, group.settings))
        if not others:
            continue
        settings = draw.choice(others)
        try:
            schedule.emit(nest, settings)
        except IllegalMove:
            continue
        plan = fusion.with_settings(plan, group.name, settings)
    return plan


# ---- compiling many at once ------------------------------------------------------------------------------


Built = tuple[int, bytes]
"""Number of a program in a shared object of many, and that object."""


def loaded_from(built: Built, program: candidate_pb2.Program) -> HostProgram:
    renamed = candidate_pb2.Program.FromString(program.SerializeToString())
    for step in (step for step in renamed.steps if step.HasField("launch")):
        step.launch.entry = f"m{built[0]}_{step.launch.entry}"
    artifact = artifact_pb2.Artifact(format=artifact_pb2.BINARY_FORMAT_SHARED_OBJECT, content=built[1])
    return HostExecutor().load(renamed, artifact, torch.device("cpu"))


def compile_batch(programs: Sequence[candidate_pb2.Program], folder: Path) -> list[Built | str]:
    """For each program where it is, or the compiler's complaint; one compilation unless one of them has a fault."""
    try:
        return list(_compiled(programs, folder))
    except subprocess.CalledProcessError as error:
        if len(programs) == 1:
            return [error.stderr[:2000]]
        return [compile_batch([program], folder)[0] for program in programs]


def unit_text(programs: Sequence[candidate_pb2.Program]) -> str:
    """One translation unit of many programs; entry `e` of program n is called `mn_e`."""
    headers: dict[str, None] = {}
    parts = []
    for number, program in enumerate(programs):
        if not program.sources:
            continue
        text = program.sources[0].text
        headers.update(dict.fromkeys(re.findall(r'^#include "(.+)"$', text, re.MULTILINE)))
        text = re.sub(r"^#include .*$", "", text, flags=re.MULTILINE)
        for entry in policy.entries(program):
            text = re.sub(rf"\b{entry}\b", f"m{number}_{entry}", text)
        parts.append(f"namespace m{number} {{\n{text}\n}}\n")
    return "".join(f'#include "{header}"\n' for header in headers) + "\n".join(parts)


def _compiled(programs: Sequence[candidate_pb2.Program], folder: Path) -> Iterator[Built]:
    unit = folder / f"unit_{os.getpid()}_{id(programs)}.cpp"
    library_path = unit.with_suffix(".so")
    unit.write_text(unit_text(programs))
    command = ["g++", *FLAGS, f"-I{INCLUDE_DIRECTORY}", "-shared", str(unit), "-o", str(library_path)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    yield from ((number, content) for content in [library_path.read_bytes()] for number in range(len(programs)))
    library_path.unlink()


# ---- judging ---------------------------------------------------------------------------------------------


def judged(made: Made, built: Built | str, seed: int) -> Outcome:
    """The correctness agent's verdict on a compiled module; `built` may be the compiler's complaint."""
    if isinstance(built, str):
        return Outcome("compile", built)
    program = loaded_from(built, made.program)
    descriptor = os.memfd_create("outputs")
    try:
        comparer = InProcess(made.loaded, program, descriptor)
        verifier = Verifier(comparer, randomness=lambda: random.Random(seed))
        request = correctness_service_pb2.VerifyArtifactRequest(
            task=made.loaded.task,
            program=made.program,
            artifact=artifact_pb2.Artifact(program_digest=made.program.digest),
            tier=timing_pb2.TIER_SCREENING,
        )
        verdict = verifier.verify(request)
    except BadInput as error:
        return Outcome("undefined", str(error))
    except Exception as error:  # a fault of ours, to be seen and kept
        return Outcome("broken", f"{type(error).__name__}: {error}")
    finally:
        os.close(descriptor)
    if verdict.state != verdict_pb2.VERDICT_STATE_PASS:
        if comparer.rounding_decides(verdict):
            return Outcome("undefined", "rounding decides what the module computes")
        kind = words.failure_kind(verdict.kind)
        return Outcome("wrong", f"{kind}: {verdict.detail}")
    return Outcome("fused" if made.fused_groups else "unfused")


# ---- many ------------------------------------------------------------------------------------------------


def check(texts: Iterable[tuple[int, str]], *, settings: bool = True) -> Iterator[tuple[int, Outcome]]:
    """The outcome of every (seed, module text); compilations run beside generation and judging."""
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(1) as compilers:
        waiting: list[tuple[list[tuple[int, Made]], Future[list[Built | str]]]] = []
        batch: list[tuple[int, Made]] = []

        def submit() -> None:
            programs = [made.program for _, made in batch]
            waiting.append((list(batch), compilers.submit(compile_batch, programs, Path(name))))
            batch.clear()

        def finished() -> Iterator[tuple[int, Outcome]]:
            modules, compiled = waiting.pop(0)
            for (seed, made), built in zip(modules, compiled.result(), strict=True):
                yield seed, judged(made, built, seed)

        for seed, text in texts:
            try:
                batch.append((seed, make(text, random.Random(seed) if settings else None)))
            except CaptureRefused as refused:
                yield seed, Outcome("refused", str(refused))
            except Exception as error:  # a fault of ours, to be seen and kept
                yield seed, Outcome("broken", f"{type(error).__name__}: {error}")
            if len(batch) == BATCH:
                submit()
                if len(waiting) > 1:
                    yield from finished()
        if batch:
            submit()
        while waiting:
            yield from finished()


def outcomes(variants: Sequence[Made], seed: int = 0) -> list[Outcome]:
    """The outcomes of several modules, or of several plans of one, from one compilation."""
    with tempfile.TemporaryDirectory() as name:
        compiled = compile_batch([made.program for made in variants], Path(name))
    return [judged(made, built, seed) for made, built in zip(variants, compiled, strict=True)]


def every_setting(text: str) -> list[Made]:
    """A module with its schedules at their defaults, then with every setting that is one change away."""
    plain = make(text)
    variants = [plain]
    for group in plain.plan.groups:
        nest = plain.plan.nest(group)
        if group.engine == "authored" and isinstance(nest, Nest):
            for settings in plain.plan.schedule(group).alternatives(nest, group.settings):
                plan = fusion.with_settings(plain.plan, group.name, settings)
                try:
                    variants.append(Made(text, plain.loaded, plan, generator.generate(plan)))
                except IllegalMove:
                    continue
    return variants


def shrunk(sketch: Sketch, seed: int) -> tuple[Sketch, Outcome]:
    """The sketch as small as it still fails, and how it then fails."""

    def first_failing(candidates: Sequence[Sketch]) -> Sketch | None:
        made, owners = [], []
        for candidate in candidates:
            try:
                text = candidate.module_text()
                variants = [make(text), make(text, random.Random(seed))] if by_default else every_setting(text)
            except CaptureRefused:
                continue
            except Exception:
                return candidate
            made += variants
            owners += [candidate] * len(variants)
        found = zip(owners, outcomes(made, seed), strict=True)
        return next((owner for owner, outcome in found if outcome.failed), None)

    by_default = True
    if first_failing([sketch]) is None:
        by_default = False
    small = sketches.shrunk(sketch, first_failing)
    try:
        failing = (outcome for outcome in outcomes(every_setting(small.module_text()), seed) if outcome.failed)
        return small, next(failing, Outcome("unfused", "fails no more"))
    except Exception as error:
        return small, Outcome("broken", f"{type(error).__name__}: {error}")


def main() -> int:
    """Prints counts and failures; 1 when something failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for shrunk failures, such as tests/agent_synthesis/kept")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    begin, counts = time.perf_counter(), Counter[str]()
    failures: list[tuple[int, Outcome]] = []
    seeds = range(options.seed, options.seed + options.count)
    drawn = ((seed, sketches.generate(seed).module_text()) for seed in seeds)
    for seed, outcome in check(drawn):
        counts[outcome.kind] += 1
        if outcome.failed:
            failures.append((seed, outcome))
        if outcome.failed or (options.verbose and outcome.kind not in ("fused", "unfused")):
            print(
                f"seed {seed}: {outcome.kind}: {outcome.detail.splitlines()[0] if outcome.detail else ''}", flush=True
            )
    print(
        f"{options.count} modules from seed {options.seed}: {options.count - counts['refused']} exported, "
        f"{counts['fused']} PASS fused, {counts['unfused']} PASS unfused, {counts['undefined']} without a reference, "
        f"{len(failures)} failed, in {time.perf_counter() - begin:.0f} s"
    )
    for seed, first in failures if options.keep else ():
        small, outcome = shrunk(sketches.generate(seed), seed)
        outcome = outcome if outcome.failed else first
        print(f"\n# seed {seed}: {outcome.kind}: {outcome.detail[:600]}\n{small.module_text()}", flush=True)
        options.keep.mkdir(parents=True, exist_ok=True)
        (options.keep / f"seed_{seed}.py").write_text(small.module_text())
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
