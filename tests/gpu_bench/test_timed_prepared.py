"""Timing on the prepared track: calls leave out what parameters give, which follows them and nothing else."""

from __future__ import annotations

import pytest
import torch

from gpu_bench.judging.loaded import LoadedTask
from gpu_bench.pytorch.baselines import Baselines
from gpu_bench.running.bench_worker import Bench
from gpu_bench.running.executor import ProgramFault
from gpu_bench.timing.timed_memory import KeptContent
from gpu_bench.timing.timed_task import TimedTask
from warpsmith import digest
from warpsmith.contract import words
from warpsmith.v1 import candidate_pb2, graph_pb2, judging_pb2, task_pb2, timing_pb2, verdict_pb2

ROWS, COLUMNS = 64, 256
MODULE = f"""
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.rand({COLUMNS}))

    def forward(self, x):
        return x * torch.exp(self.w)

def get_inputs():
    return [torch.rand({ROWS}, {COLUMNS})]

def get_init_inputs():
    return []
"""
POWER = "for (long j = 0; j < COLUMNS; ++j) w[j] = std::exp(p[j]);"
SCALE = "for (long i = 0; i < ROWS * COLUMNS; ++i) y[i] = x[i] * w[i % COLUMNS];"
# An answer that is kept beside the parameters' power, of inputs that a prepared step has found in memory.
SPOILED = SCALE + "w[0] = y[0];"


def a_task(small, *, prepared: bool = True) -> task_pb2.Task:
    made = small.task(MODULE)
    made.prepared = prepared
    made.digest = digest.of_task(made)
    return made


def a_program(small, scale: str = SCALE) -> candidate_pb2.Program:
    """`power` makes w of the parameter, prepared; `scale` makes y of x and w."""
    head = f"#include <cmath>\nconstexpr long ROWS = {ROWS}, COLUMNS = {COLUMNS};\n"
    lines = [head]
    for entry, names, body in (("power", ("p", "w"), POWER), ("scale", ("x", "w", "y"), scale)):
        given = "".join(f"float* {name} = static_cast<float*>(arguments[{n}]);" for n, name in enumerate(names))
        lines.append(f'extern "C" void {entry}(void* const* arguments) {{ {given} {body} }}\n')
    parameter = graph_pb2.Source(
        name="p", origin=graph_pb2.ORIGIN_PARAMETER, qualified_name="w", spec=small.spec(COLUMNS)
    )
    program = candidate_pb2.Program(target=task_pb2.TARGET_CPU, outputs=["y"])
    program.sources.add(name="kernel.cpp", text="".join(lines))
    program.buffers.add().CopyFrom(small.source_buffer("x", small.spec(ROWS, COLUMNS)))
    program.buffers.add(name="p", role=candidate_pb2.ROLE_SOURCE, source=parameter, spec=small.spec(COLUMNS))
    program.buffers.add(name="w", role=candidate_pb2.ROLE_WORKSPACE, spec=small.spec(COLUMNS))
    program.buffers.add(name="y", role=candidate_pb2.ROLE_OUTPUT, spec=small.spec(ROWS, COLUMNS))
    for entry, names, made in (("power", ("p", "w"), "w"), ("scale", ("x", "w", "y"), "y")):
        step = program.steps.add(group=entry, prepared=entry == "power")
        step.launch.entry = entry
        for name in names:
            step.launch.arguments.add(buffer=name)
        step.launch.writes.append(made)
    program.digest = digest.of_program(program)
    return program


@pytest.fixture
def timed(small, monkeypatch) -> TimedTask:
    monkeypatch.setattr(torch, "compile", lambda module, **_options: module)
    return TimedTask.of(LoadedTask.load(a_task(small)))


def measured(timed, small, program, tier):
    artifact = small.compiled(program)
    return timed.measure(timed.loaded.load_program(program, artifact), artifact, tier)


@pytest.mark.usefixtures("short_finals")
def test_a_final_times_the_other_steps_beside_frozen_parameters(timed, small):
    timing = measured(timed, small, a_program(small), timing_pb2.TIER_FINAL).timing
    kinds = [words.arm(arm.kind) for arm in timing.arms]
    assert kinds == ["candidate", "eager", "compile", "compile_frozen", "aa_copy"]
    assert [step.name for step in timing.steps] == ["scale"]


@pytest.mark.usefixtures("short_finals")
def test_what_is_kept_follows_parameters_that_are_moved_before_inputs_are_drawn(timed, small, monkeypatch):
    """A final moves them ahead of its cold readings, whose outputs are looked at: stale ones would be wrong. What a
    prepared step can see then are inputs that no timed call gets."""
    renew, sets, module = timed.inputs.renew, timed.bench.baselines.inputs, timed.loaded.module
    times = []

    def renewing(indices, prepare):
        before, seen = module.w.detach().clone(), []

        def preparing() -> None:
            seen.extend([module.w.detach().clone(), *(sets[index][0].clone() for index in indices)])
            prepare()

        done = renew(indices, preparing)
        assert torch.equal(seen[0], module.w)
        assert not torch.equal(before, module.w)
        assert not any(torch.equal(one, sets[index][0]) for one, index in zip(seen[1:], indices, strict=True))
        times.append(done)
        return done

    monkeypatch.setattr(timed.inputs, "renew", renewing)
    answer = measured(timed, small, a_program(small), timing_pb2.TIER_FINAL)
    assert answer.HasField("timing"), answer.fault
    assert times
    assert all(times)


def test_what_would_not_follow_them_is_wrong(timed, small, monkeypatch):
    monkeypatch.setattr(KeptContent, "renew", lambda _: None)
    assert (
        measured(timed, small, a_program(small), timing_pb2.TIER_FINAL).fault.kind
        == verdict_pb2.FAILURE_KIND_WRONG_VALUE
    )


@pytest.mark.parametrize("tier", [timing_pb2.TIER_SCREENING, timing_pb2.TIER_FINAL])
def test_a_timed_call_that_writes_it_is_found_out(timed, small, tier):
    program = a_program(small, SPOILED.replace("w[0]", "for (long j = 0; j < COLUMNS; ++j) w[j]"))
    kinds = (verdict_pb2.FAILURE_KIND_WRONG_INPUT_MUTATED, verdict_pb2.FAILURE_KIND_WRONG_VALUE)
    assert measured(timed, small, program, tier).fault.kind in kinds


def test_a_judged_call_that_writes_it_is_found_out(small):
    """One element, of which a timed call would make a memory."""
    bench = Bench(LoadedTask.load(a_task(small)))
    program = a_program(small, SCALE + "w[7] += 0.0f; w[7] = std::nextafter(w[7], 9.0f);")
    bench.load(judging_pb2.LoadRequest(program=program, artifact=small.compiled(program)))
    request = judging_pb2.ExecuteRequest(family=verdict_pb2.VALUE_FAMILY_TASK, seed=3)
    args = bench.loaded.case(request.family, request.seed)
    with pytest.raises(ProgramFault, match="wrote to what prepared steps had made") as caught:
        bench._guarded(args, request, 3, 4)
    assert caught.value.kind == verdict_pb2.FAILURE_KIND_WRONG_INPUT_MUTATED


def test_steps_are_prepared_on_that_track_alone(small):
    program = a_program(small)
    request = judging_pb2.LoadRequest(program=program, artifact=small.compiled(program))
    Bench(LoadedTask.load(a_task(small))).load(request)
    with pytest.raises(ProgramFault, match="is prepared and reads an input, a parameter or state"):
        Bench(LoadedTask.load(a_task(small, prepared=False))).load(request)


def test_the_tracks_are_two_tasks_of_two_shapes(small):
    assert a_task(small).digest != a_task(small, prepared=False).digest


def test_frozen_parameters_are_compiled_on_their_own(small, monkeypatch):
    """PyTorch takes the code of one compiler for another's where their options are equal."""
    given = []
    monkeypatch.setattr(torch, "compile", lambda module, **options: given.append(options) or module)
    timed = TimedTask.of(LoadedTask.load(a_task(small)))
    timed.bench.baselines.prepare(timing_pb2.TIER_FINAL)
    assert given == [{"dynamic": False, "mode": None}, {"dynamic": False, "options": {"freezing": True}}]


def test_only_that_track_has_frozen_parameters_for_a_baseline(timed):
    plain = Baselines(timed.loaded.module, timed.bench.baselines.inputs, task_pb2.TARGET_CPU)
    assert {*timed.bench.baselines._final_names()} - {*plain._final_names()} == {"compile_frozen"}
    assert "compile_frozen" not in timed.bench.baselines.reference_names()
