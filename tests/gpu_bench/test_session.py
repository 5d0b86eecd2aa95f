"""The whole CPU path: workers, guarded runs, truth. One task for all programs, so that workers stay warm."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gpu_bench.limits import Limits
from gpu_bench.session import Session
from gpu_bench.sessions import Sessions
from gpu_bench.solutions.solution_session import SolutionSession
from warpsmith.errors import BadInput, Infrastructure, WorkerFault
from warpsmith.sandbox.worker import Worker
from warpsmith.v1 import benchmark_service_pb2, candidate_pb2, judging_pb2, task_pb2, timing_pb2, verdict_pb2

TASK = benchmark_service_pb2.ComparisonCase(family=verdict_pb2.VALUE_FAMILY_TASK, seed=11)
NORMAL = benchmark_service_pb2.ComparisonCase(family=verdict_pb2.VALUE_FAMILY_NORMAL, seed=12)
ALL = [benchmark_service_pb2.ComparisonCase(family=f, seed=13) for f in verdict_pb2.ValueFamily.values() if f]


@pytest.fixture(scope="module")
def session(small: Any) -> Iterator[Session]:
    made = Session(small.task(), limits=Limits(hang_seconds=30.0))
    yield made
    made.close()


Compare = Callable[..., benchmark_service_pb2.CompareOutputsResponse]


@pytest.fixture
def compare(small: Any, session: Session) -> Compare:
    def run(body: str, *cases: benchmark_service_pb2.ComparisonCase) -> benchmark_service_pb2.CompareOutputsResponse:
        program = small.kernel_program(body)
        return session.compare(program, small.compiled(program), cases or [TASK])

    return run


def assert_honest(response: benchmark_service_pb2.CompareOutputsResponse) -> None:
    assert not response.HasField("fault"), response.fault
    for comparison in response.comparisons:
        noticed = [
            *comparison.broken_canaries, *comparison.mutated_sources, *comparison.unrepeatable_outputs,
            *comparison.stray_read_outputs, *comparison.uninitialized_read_outputs,
        ]  # fmt: skip
        assert noticed == []
        assert len(comparison.outputs) == 1
        error = comparison.outputs[0]
        assert (error.unwritten_count, error.non_finite_mismatch_count, error.unequal_count) == (0, 0, 0)
        assert error.rms_ratio <= 4
        assert error.max_ratio <= 8
        assert error.block_ratio <= 16


def test_a_right_kernel_stays_within_the_limits_on_every_family(compare: Compare, small: Any) -> None:
    response = compare(small.softmax, *ALL)
    assert_honest(response)
    assert len(response.comparisons) == len(ALL)
    assert response.jail_rung


def test_plan_zero_stays_within_the_limits_on_every_family(small: Any, session: Session) -> None:
    program = small.library_program()
    assert_honest(session.compare(program, small.compiled(program), ALL))


def test_an_output_that_is_given_in_another_structure_is_none_of_the_modules(small: Any, session: Session) -> None:
    program = small.kernel_program(small.softmax)
    leaf, artifact = '[1, {"type": null, "context": null, "children_spec": []}]', small.compiled(program)
    a_list = f'[1, {{"type": "builtins.list", "context": "null", "children_spec": [{leaf[4:-1]}]}}]'
    for tree, leaves in ((a_list, []), (leaf, ["1.0"]), ("[]", [])):
        program.output_tree, program.output_leaves[:] = tree, leaves
        response = session.compare(program, artifact, [TASK])
        assert "structure" in response.fault.detail
        assert not response.comparisons
    for tree in (f" {leaf}", ""):  # the same, written otherwise, and what goes without saying
        program.output_tree, program.output_leaves[:] = tree, []
        assert_honest(session.compare(program, artifact, [TASK]))


def test_a_wrong_value_has_a_large_ratio_at_its_element(compare: Compare, small: Any) -> None:
    error = compare(small.softmax + "y[40] += 0.01f;").comparisons[0].outputs[0]
    assert error.max_ratio > 1000
    assert error.worst_index == 40
    assert error.worst_value - error.worst_truth == pytest.approx(0.01, rel=1e-3)


def test_a_program_under_anothers_digest_is_not_taken_for_it(small: Any, session: Session) -> None:
    right, wrong = small.kernel_program(small.softmax), small.kernel_program(small.softmax + "y[40] += 0.01f;")
    assert_honest(session.compare(right, small.compiled(right), [TASK]))
    wrong.digest = right.digest
    assert session.compare(wrong, small.compiled(wrong), [TASK]).comparisons[0].outputs[0].worst_index == 40


def test_one_unwritten_element_is_counted(compare: Compare, small: Any) -> None:
    body = f"float spared = y[7];\n{small.softmax}\ny[7] = spared;"
    assert compare(body).comparisons[0].outputs[0].unwritten_count == 1


def test_an_unwritten_output_is_counted_whole(compare: Compare, small: Any) -> None:
    error = compare("return;").comparisons[0].outputs[0]
    assert error.unwritten_count == small.rows * small.columns


@pytest.mark.parametrize("where", ["y[ROWS * COLUMNS]", "y[-1]", "x[-1]", "w[COLUMNS + 100]"])
def test_a_write_outside_a_buffer_breaks_its_canary(compare: Compare, small: Any, where: str) -> None:
    comparison = compare(f"{small.softmax}\n{where} = 0.5f;").comparisons[0]
    expected = {"y": "y", "x": "input 0", "w": "w"}[where[0]]
    assert list(comparison.broken_canaries) == [expected]


def test_a_read_past_the_end_shows_when_only_the_canaries_change(compare: Compare, small: Any) -> None:
    body = f"{small.softmax}\ny[0] = x[ROWS * COLUMNS] > 0 ? y[0] : y[0] * 1.0000001f;"
    comparison = compare(body).comparisons[0]
    assert list(comparison.stray_read_outputs) == ["output 0"]
    assert list(comparison.uninitialized_read_outputs) == []


def test_a_read_of_an_unwritten_workspace_shows_when_only_the_poison_changes(compare: Compare, small: Any) -> None:
    comparison = compare(f"{small.softmax}\ny[0] += w[3];").comparisons[0]
    assert list(comparison.uninitialized_read_outputs) == ["output 0"]
    assert list(comparison.stray_read_outputs) == []


def test_a_changed_input_is_named(compare: Compare, small: Any) -> None:
    comparison = compare(f"{small.softmax}\nx[5] = 1.5f;").comparisons[0]
    assert list(comparison.mutated_sources) == ["input 0"]


def test_nan_in_place_of_numbers_is_counted(compare: Compare, small: Any) -> None:
    error = compare(f"{small.softmax}\ny[3] = NAN;").comparisons[0].outputs[0]
    assert error.non_finite_mismatch_count == 1
    assert error.worst_index == 3


def test_results_that_change_from_call_to_call_are_named(compare: Compare, small: Any) -> None:
    body = f"static int calls = 0;\n{small.softmax}\ny[0] *= 1.0f + 1e-6f * (calls++ % 2);"
    assert list(compare(body).comparisons[0].unrepeatable_outputs) == ["output 0"]


def test_a_rare_difference_is_not_put_down_to_what_was_changed_in_that_run(compare: Compare, small: Any) -> None:
    """The third run has other poison and canaries, the fifth other canaries; the seventh is a plain repeat."""
    body = f"static int calls = 0;\n{small.softmax}\ny[0] *= 1.0f + 1e-6f * (calls % 2 == 0 && calls > 0);\n++calls;"
    comparison = compare(body).comparisons[0]
    assert list(comparison.stray_read_outputs) == ["output 0"]
    assert list(comparison.unrepeatable_outputs) == ["output 0"]


def test_a_crash_is_the_programs_fault_and_the_next_program_finds_a_clean_process(compare: Compare, small: Any) -> None:
    response = compare("*reinterpret_cast<volatile int*>(8) = 1;")
    assert response.fault.kind == verdict_pb2.FAILURE_KIND_CRASH
    assert "segmentation fault" in response.fault.detail
    assert_honest(compare(small.softmax))


def test_the_first_truth_of_a_family_is_not_made_while_a_candidate_runs(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_gpu = task_pb2.Task(target=task_pb2.TARGET_CUDA)
    truths = session._truths
    monkeypatch.setattr(truths, "_task", on_a_gpu)
    monkeypatch.setattr(truths, "_known", {})
    was_ahead: list[bool] = []

    def made(case: benchmark_service_pb2.ComparisonCase) -> str | None:
        was_ahead.append(threading.current_thread() is not threading.main_thread())
        truths._known[case.family] = None
        return None

    monkeypatch.setattr(truths, "of", made)
    families = [verdict_pb2.VALUE_FAMILY_TASK] * 2 + [verdict_pb2.VALUE_FAMILY_MIXED] * 2
    cases = [benchmark_service_pb2.ComparisonCase(family=family, seed=seed) for seed, family in enumerate(families)]
    assert list(truths.ahead(cases, judging_pb2.Preparation(total_bytes=64))) == [None] * 4
    assert was_ahead == [False, True, False, True]


def test_of_whole_cases_the_judge_alone_says_that_they_are_not_judged(
    compare: Compare, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = session._candidate.run

    def forging(method: str, *arguments: Any) -> Any:
        answer = run(method, *arguments)
        if method == "execute":
            answer.observed.unjudged = "no memory"
        return answer

    monkeypatch.setattr(session._candidate, "run", forging)
    comparison = compare("for (long i = 0; i < ROWS * COLUMNS; ++i) y[i] = 0.03f;").comparisons[0]
    assert (comparison.unjudged, len(comparison.outputs)) == ("", 1)
    assert comparison.outputs[0].rms_ratio > 4


def test_an_endless_loop_is_a_timeout(
    compare: Compare, small: Any, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_limits", Limits(hang_seconds=3.0))
    begin = time.monotonic()
    response = compare("volatile bool on = true; while (on) {}")
    assert response.fault.kind == verdict_pb2.FAILURE_KIND_TIMEOUT
    assert time.monotonic() - begin < 30
    monkeypatch.undo()
    assert_honest(compare(small.softmax))


def test_an_exit_is_a_crash(compare: Compare) -> None:
    leave = '__asm__ volatile("syscall" : : "a"(231L), "D"(0L));'
    assert compare(leave).fault.kind == verdict_pb2.FAILURE_KIND_CRASH


def test_the_comparisons_before_a_fault_come_back_with_it(compare: Compare, small: Any) -> None:
    body = f"{small.softmax}\nif (x[0] < 0 || x[1] < 0 || x[2] < 0 || x[3] < 0) std::abort();"
    negative = [benchmark_service_pb2.ComparisonCase(family=verdict_pb2.VALUE_FAMILY_NORMAL, seed=s) for s in range(4)]
    response = compare(body, TASK, *negative)
    assert len(response.comparisons) >= 1
    assert response.fault.kind == verdict_pb2.FAILURE_KIND_CRASH


def test_an_entry_that_the_binary_lacks_is_a_launch_error(small: Any, session: Session) -> None:
    program = small.kernel_program(small.softmax)
    artifact = small.compiled(program)
    program.steps[0].launch.entry = "absent"
    response = session.compare(program, artifact, [TASK])
    assert response.fault.kind == verdict_pb2.FAILURE_KIND_LAUNCH_ERROR
    assert "absent" in response.fault.detail


def test_bytes_that_are_no_object_are_a_launch_error(small: Any, session: Session) -> None:
    program = small.kernel_program("return; // never built")
    artifact = small.compiled(program)
    artifact.content = b"not an object"
    assert session.compare(program, artifact, [TASK]).fault.kind == verdict_pb2.FAILURE_KIND_LAUNCH_ERROR


@pytest.mark.parametrize("target", ["aten.from_file.default", "prims.sin.default", "no_such.operation.default"])
def test_an_operation_that_is_forbidden_or_none_of_the_modules_own_is_rejected(
    small: Any, session: Session, target: str
) -> None:
    program = small.library_program(target=target)
    response = session.compare(program, small.compiled(program), [TASK])
    assert response.fault.kind == verdict_pb2.FAILURE_KIND_POLICY_REJECT


def test_an_output_of_another_shape_is_a_fault(small: Any, session: Session) -> None:
    program = small.library_program(target="aten.sum.dim_IntList")
    program.steps[0].library.args[1].list.values.add(integer=-1)
    response = session.compare(program, small.compiled(program), [TASK])
    assert response.fault.kind == verdict_pb2.FAILURE_KIND_WRONG_SHAPE


def test_a_library_step_that_raises_is_a_launch_error(small: Any, session: Session) -> None:
    program = small.library_program()
    program.steps[0].library.args[1].integer = 9
    response = session.compare(program, small.compiled(program), [TASK])
    assert response.fault.kind == verdict_pb2.FAILURE_KIND_LAUNCH_ERROR


def test_more_memory_than_there_is_is_a_resource_fault(small: Any, session: Session) -> None:
    program = small.kernel_program(small.softmax)
    huge = candidate_pb2.Buffer(name="h", role=candidate_pb2.ROLE_WORKSPACE, spec=small.spec(1 << 36))
    program.buffers.append(huge)
    program.digest = "another"
    artifact = small.compiled(program)
    assert session.compare(program, artifact, [TASK]).fault.kind == verdict_pb2.FAILURE_KIND_RESOURCE


@pytest.fixture
def refusal(small: Any) -> Callable[[str], str]:
    def refuse(source: str) -> str:
        refused = Session(small.task(source))
        try:
            with pytest.raises(BadInput) as raised:
                refused.compare(small.library_program(), small.compiled(small.library_program()), [TASK])
        finally:
            refused.close()
        return str(raised.value)

    return refuse


def test_a_reference_that_is_not_deterministic_is_bad_input(small: Any, refusal: Callable[[str], str]) -> None:
    source = small.module.replace(
        "return torch.softmax(x, dim=-1)", "self.n = getattr(self, 'n', 0) + 1; return x * self.n"
    )
    assert "deterministic" in refusal(source)


def test_a_task_goes_when_others_come_and_its_workers_with_it(small: Any) -> None:
    sessions = Sessions(most=1)
    with sessions.using(small.task()) as first:
        pass
    with sessions.using(small.task(small.module + "# another")) as second:
        assert second is not first
    with sessions.using(small.task()) as again:
        assert again is not first
    sessions.close()


def test_a_large_task_shares_the_machine_with_no_idle_one(small: Any) -> None:
    large = small.task(small.module + "# large")
    large.inputs.add(shape=[1 << 15, 1 << 15])
    sessions = Sessions(most=2)
    with sessions.using(small.task()) as first, sessions.using(large) as second:
        pass
    with sessions.using(small.task()) as again:
        assert again is first
    with sessions.using(large) as other:
        assert other is not second
    sessions.close()


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spares compile nothing: that takes half a minute, and whole runs show it."""
    call = Worker.call

    def called(worker: Worker, method: str, request: Any, response: Any, deadline_s: float) -> Any:
        return response() if method == "prepare_baselines" else call(worker, method, request, response, deadline_s)

    monkeypatch.setattr(Worker, "call", called)


@pytest.mark.usefixtures("cold")
def test_a_final_takes_the_process_that_was_made_while_its_finalist_was_verified(
    small: Any, compare: Compare, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(small.softmax)
    workers = session._workers
    judged_in, its_cache = workers.current_bench, workers._cache
    session.expect_final()
    assert workers._spare is not None
    spare, cache = workers._spare.worker(), workers._spare.cache
    assert cache is not its_cache  # what a candidate's process can write no baseline reads
    timed_in = []

    def measured(*_: object) -> benchmark_service_pb2.MeasureArtifactResponse:
        timed_in.append(workers.current_bench)
        return benchmark_service_pb2.MeasureArtifactResponse(timing=timing_pb2.Timing())

    monkeypatch.setattr(session._candidate, "load", lambda *_: None)
    monkeypatch.setattr(session._candidate, "call", measured)
    workers.note_damage()  # of the process before it
    session.measure(benchmark_service_pb2.MeasureArtifactRequest(tier=timing_pb2.TIER_FINAL))
    assert timed_in == [spare]
    workers.drop_damaged()
    assert workers.current_bench is spare
    assert workers._cache is cache
    assert not workers.has_spare
    assert judged_in is not None
    assert not judged_in.alive
    assert its_cache is None or not its_cache.directory.exists()


def test_a_spare_that_fails_is_done_without(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise WorkerFault("no")

    failing = Session(small.task())
    workers = failing._workers
    monkeypatch.setattr(workers, "open_bench", broken)
    failing.expect_final()
    assert workers._spare is not None
    assert workers._spare.worker() is None
    workers.use_spare()
    monkeypatch.undo()
    assert workers.bench().alive
    failing.close()


@pytest.mark.usefixtures("cold")
def test_a_closed_session_ends_its_spare(small: Any) -> None:
    closed = Session(small.task())
    closed.expect_final()
    begun = closed._workers._spare
    assert begun is not None
    spare, cache = begun.worker(), begun.cache
    assert spare is not None
    closed.close()
    assert not spare.alive
    assert not cache.directory.exists()


def test_closing_does_not_wait_for_what_is_being_compiled(small: Any) -> None:
    sessions = Sessions()

    def open_it() -> None:
        with contextlib.suppress(WorkerFault), sessions.using(small.task()) as session:
            session.open()

    opening = threading.Thread(target=open_it)
    opening.start()
    while sessions._machine._compiling is None:
        time.sleep(0.05)
    directory = sessions._machine._compiled[task_pb2.TARGET_CPU].directory
    begin = time.monotonic()
    sessions.close()
    opening.join()
    assert time.monotonic() - begin < 30.0
    assert not directory.exists()


def test_a_contest_whose_memory_could_not_be_shared_is_made_anew(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    session = SolutionSession(small.task())
    shared: list[object] = []

    def share(worker: object, _: int) -> None:
        shared.append(worker)
        if len(shared) == 1:
            raise Infrastructure("no memory of the GPU")

    monkeypatch.setattr(session._processes, "share", share)
    try:
        with pytest.raises(Infrastructure):
            session._opened()
        assert session._opened() is session._opened()
        assert len(shared) == 2
    finally:
        session.close()
