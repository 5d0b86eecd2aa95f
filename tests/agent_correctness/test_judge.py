"""Verdicts from comparisons: which kind a finding has, in which order, and in what words."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from agent_correctness import closer_look
from agent_correctness.checks.check import FAMILIES, Case, Finding, Judgement, Passed
from agent_correctness.checks.limits import Size, size_of
from agent_correctness.checks.precision import PrecisionCheck
from agent_correctness.checks.values import ValueCheck
from agent_correctness.judge import Judge
from warpsmith.errors import BadInput, ServiceFault
from warpsmith.v1 import (
    artifact_pb2,
    benchmark_service_pb2,
    candidate_pb2,
    correctness_service_pb2,
    task_pb2,
    timing_pb2,
    verdict_pb2,
)

TASK, NORMAL = verdict_pb2.VALUE_FAMILY_TASK, verdict_pb2.VALUE_FAMILY_NORMAL
LARGE = verdict_pb2.VALUE_FAMILY_LARGE


def fine(**fields: Any) -> verdict_pb2.OutputError:
    """An output as good as eager's, with `fields` changed."""
    error = verdict_pb2.OutputError(
        rms_ratio=1.0, max_ratio=1.0, block_ratio=1.0, rms_error=1e-8, eager_rms_error=1e-8, kernelbench_close=True
    )
    for name, value in fields.items():
        setattr(error, name, value)
    return error


def untouched(comparison: verdict_pb2.Comparison) -> None:
    """Leaves a comparison as it is."""
    del comparison


class Bench:
    """A benchmark service that answers each case by a function."""

    def __init__(self, spoil: Callable[[verdict_pb2.Comparison], None] = untouched) -> None:
        self.asked: list[tuple[int, int]] = []
        self._spoil = spoil

    def compare(
        self, request: benchmark_service_pb2.CompareOutputsRequest
    ) -> benchmark_service_pb2.CompareOutputsResponse:
        self.asked = [(case.family, case.seed) for case in request.cases]
        response = benchmark_service_pb2.CompareOutputsResponse(jail_rung="bubblewrap")
        for family, seed in self.asked:
            comparison = response.comparisons.add(family=family, seed=seed, outputs=[fine()])
            self._spoil(comparison)
        return response


def request(tier: timing_pb2.Tier.ValueType = timing_pb2.TIER_FINAL) -> correctness_service_pb2.VerifyArtifactRequest:
    return correctness_service_pb2.VerifyArtifactRequest(
        program=candidate_pb2.Program(digest="p"), artifact=artifact_pb2.Artifact(program_digest="p"), tier=tier
    )


def verdict_of(spoil: Callable[[verdict_pb2.Comparison], None]) -> verdict_pb2.Verdict:
    return Judge(Bench(spoil), randomness=lambda: random.Random(1)).verify(request())


def spoil_with(**fields: Any) -> Callable[[verdict_pb2.Comparison], None]:
    def spoil(comparison: verdict_pb2.Comparison) -> None:
        comparison.outputs[0].CopyFrom(fine(**fields))

    return spoil


class Inspected(Bench):
    """One whose compute-sanitizer finds a race, where it is asked."""

    def compare(
        self, request: benchmark_service_pb2.CompareOutputsRequest
    ) -> benchmark_service_pb2.CompareOutputsResponse:
        response = super().compare(request)
        if request.inspect:
            response.inspections.add(tool="compute-sanitizer memcheck", skipped="it is not installed")
            response.inspections.add(tool="compute-sanitizer racecheck", finding="a race")
            response.fault.kind, response.fault.detail = verdict_pb2.FAILURE_KIND_WRONG_RACE, "racecheck: a race"
        return response


@pytest.mark.parametrize(
    ("tier", "kind"),
    [(timing_pb2.TIER_FINAL, verdict_pb2.FAILURE_KIND_WRONG_RACE), (timing_pb2.TIER_SCREENING, 0)],
)
def test_the_kernels_of_a_finalist_are_inspected_and_a_finding_fails_it(
    tier: timing_pb2.Tier.ValueType, kind: int
) -> None:
    verdict = Judge(Inspected()).verify(request(tier))
    assert verdict.kind == kind
    assert [each.tool for each in verdict.inspections] == (
        ["compute-sanitizer memcheck", "compute-sanitizer racecheck"] if kind else []
    )


def test_an_honest_program_passes_with_its_worst_ratio() -> None:
    verdict = verdict_of(untouched)
    assert verdict.state == verdict_pb2.VERDICT_STATE_PASS
    assert verdict.kernelbench_pass
    assert verdict.worst_rms_ratio == 1.0
    assert verdict.jail_rung == "bubblewrap"


def test_a_final_covers_every_family_and_several_seeds() -> None:
    bench = Bench()
    Judge(bench).verify(request())
    families = [family for family, _ in bench.asked]
    assert set(families) == set(verdict_pb2.ValueFamily.values()) - {0, verdict_pb2.VALUE_FAMILY_PROPOSED}
    assert families.count(TASK) == families.count(NORMAL) == 3


def small(ratio: float, seed_yardstick: float = 1e-8) -> dict[str, Any]:
    """Fields of an output of one element that is `ratio` yardsticks off."""
    off = ratio * seed_yardstick
    return {
        "element_count": 1, "rms_ratio": ratio, "max_ratio": ratio, "block_ratio": ratio, "rms_error": off,
        "max_error": off,
    }  # fmt: skip


class Counted(Bench):
    """One that counts what it is asked, and of which one case in `every` is `ratio` yardsticks off."""

    def __init__(self, every: int, ratio: float) -> None:
        super().__init__(self._one_in)
        self.all: list[benchmark_service_pb2.ComparisonCase] = []
        self._every, self._ratio, self._number = every, ratio, 0

    def _one_in(self, comparison: verdict_pb2.Comparison) -> None:
        comparison.outputs[0].CopyFrom(fine(**small(self._ratio if self._number % self._every == 0 else 1.0)))
        self._number += 1

    def compare(
        self, request: benchmark_service_pb2.CompareOutputsRequest
    ) -> benchmark_service_pb2.CompareOutputsResponse:
        self.all.extend(request.cases)
        return super().compare(request)


def test_a_final_judges_an_output_of_few_elements_on_32_seeds() -> None:
    bench = Counted(every=1, ratio=1.0)
    verdict = Judge(bench).verify(request())
    assert verdict.state == verdict_pb2.VERDICT_STATE_PASS
    assert "seeds" not in verdict.detail
    for family in (TASK, NORMAL):
        of_family = [case for case in bench.all if case.family == family]
        assert len({case.seed for case in of_family}) == 32
        assert sum(case.once for case in of_family) == 29  # three look at memory and repeats too
    screened = Counted(every=1, ratio=1.0)
    Judge(screened).verify(request(timing_pb2.TIER_SCREENING))
    assert len(screened.all) == 3


@pytest.mark.parametrize(("every", "ratio", "passes"), [(16, 6.0, True), (1, 6.0, False), (16, 12.0, False)])
def test_one_unlucky_seed_of_an_output_of_few_elements_is_none_but_many_are(
    every: int, ratio: float, passes: bool
) -> None:
    """Within the limit of the largest error, that is: 8 yardsticks."""
    verdict = Judge(Counted(every, ratio), [Ordinary(), PrecisionCheck()]).verify(request())
    assert (verdict.state == verdict_pb2.VERDICT_STATE_PASS) is passes, verdict.detail
    assert passes or verdict.kind == verdict_pb2.FAILURE_KIND_WRONG_PRECISION


class Ordinary(ValueCheck):
    """The families of which there are pools."""

    def cases(self, task: task_pb2.Task, tier: timing_pb2.Tier.ValueType, draw: random.Random) -> Sequence[Case]:
        return [case for case in super().cases(task, tier, draw) if case[0] in (TASK, NORMAL)]


def test_values_that_the_machine_does_not_allow_to_judge_on_are_named_in_the_verdict() -> None:
    def left_out(comparison: verdict_pb2.Comparison) -> None:
        if comparison.family == verdict_pb2.VALUE_FAMILY_CONSTANT_ROWS:
            del comparison.outputs[:]
            comparison.unjudged = "not judged: no memory"

    verdict = verdict_of(left_out)
    assert verdict.state == verdict_pb2.VERDICT_STATE_PASS
    assert [(each.tool, each.skipped) for each in verdict.inspections] == [
        ("values constant_rows", "not judged: no memory")
    ]


def test_seeds_for_which_there_was_no_time_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closer_look, "SECONDS", -1.0)
    verdict = Judge(Counted(every=1, ratio=1.0)).verify(request())
    assert verdict.state == verdict_pb2.VERDICT_STATE_PASS
    assert "3 of 32 seeds" in verdict.detail


def test_screening_makes_three_comparisons_with_fresh_seeds_each_time() -> None:
    bench = Bench()
    judge = Judge(bench)
    judge.verify(request(timing_pb2.TIER_SCREENING))
    first = bench.asked
    judge.verify(request(timing_pb2.TIER_SCREENING))
    assert [family for family, _ in first][:2] == [TASK, NORMAL]
    assert len(first) == 3
    assert {seed for _, seed in first}.isdisjoint({seed for _, seed in bench.asked})


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"max_ratio": 1e5, "rms_ratio": 113.0, "worst_index": 40961}, verdict_pb2.FAILURE_KIND_WRONG_VALUE),
        ({"unequal_count": 2}, verdict_pb2.FAILURE_KIND_WRONG_VALUE),
        ({"non_finite_mismatch_count": 1}, verdict_pb2.FAILURE_KIND_WRONG_NAN),
        ({"unwritten_count": 1}, verdict_pb2.FAILURE_KIND_WRONG_UNINITIALIZED),
        ({"rms_ratio": 75, "max_ratio": 90, "block_ratio": 80}, verdict_pb2.FAILURE_KIND_WRONG_PRECISION),
        ({"block_ratio": 17.0}, verdict_pb2.FAILURE_KIND_WRONG_VALUE),
    ],
)
def test_each_kind_of_error_has_its_name(fields: dict[str, Any], kind: int) -> None:
    verdict = verdict_of(spoil_with(**fields))
    assert verdict.state == verdict_pb2.VERDICT_STATE_FAIL
    assert verdict.kind == kind


@pytest.mark.parametrize(
    ("field", "kind"),
    [
        ("broken_canaries", verdict_pb2.FAILURE_KIND_WRONG_OUT_OF_BOUNDS),
        ("stray_read_outputs", verdict_pb2.FAILURE_KIND_WRONG_OUT_OF_BOUNDS),
        ("mutated_sources", verdict_pb2.FAILURE_KIND_WRONG_INPUT_MUTATED),
        ("uninitialized_read_outputs", verdict_pb2.FAILURE_KIND_WRONG_UNINITIALIZED),
        ("dirty_workspaces", verdict_pb2.FAILURE_KIND_WRONG_UNINITIALIZED),
        ("unrepeatable_outputs", verdict_pb2.FAILURE_KIND_WRONG_NONDETERMINISTIC),
    ],
)
def test_memory_is_told_before_the_values_that_it_spoiled(field: str, kind: int) -> None:
    def spoil(comparison: verdict_pb2.Comparison) -> None:
        getattr(comparison, field).append("y")
        comparison.outputs[0].max_ratio = 1e9

    verdict = verdict_of(spoil)
    assert verdict.kind == kind
    assert "y" in verdict.detail


def test_a_race_is_not_mistaken_for_a_stray_read() -> None:
    def spoil(comparison: verdict_pb2.Comparison) -> None:
        comparison.stray_read_outputs.append("output 0")
        comparison.unrepeatable_outputs.append("output 0")

    assert verdict_of(spoil).kind == verdict_pb2.FAILURE_KIND_WRONG_NONDETERMINISTIC


@pytest.mark.parametrize("step", ["", "step 3 of 9, kernel ws_relu of relu"])
def test_of_a_race_the_step_is_named_where_it_was_found(step: str) -> None:
    def spoil(comparison: verdict_pb2.Comparison) -> None:
        comparison.unrepeatable_outputs.append("output 0")
        comparison.unlike_step = step

    detail = verdict_of(spoil).detail
    assert detail.startswith("output 0 differs between two runs on equal inputs (")
    assert ("the first to differ is what step 3 of 9, kernel ws_relu of relu makes. A race" in detail) == bool(step)


def test_where_the_module_takes_no_other_values_than_the_tasks_that_is_said() -> None:
    def refused(comparison: verdict_pb2.Comparison) -> None:
        if comparison.family != TASK:
            del comparison.outputs[:]

    verdict = verdict_of(refused)
    (told,) = [each for each in verdict.inspections if each.tool == "values beside the task's own"]
    assert verdict.state == verdict_pb2.VERDICT_STATE_PASS
    assert told.skipped.startswith("the module defines no result on ")
    assert "normal" in told.skipped
    assert not [each for each in verdict_of(untouched).inspections if each.tool == told.tool]


def test_where_the_module_takes_but_values_near_the_tasks_that_is_said() -> None:
    def near(comparison: verdict_pb2.Comparison) -> None:
        comparison.near_task = comparison.family == verdict_pb2.VALUE_FAMILY_NORMAL
        if comparison.family != TASK and not comparison.near_task:
            del comparison.outputs[:]

    (told,) = [each for each in verdict_of(near).inspections if each.tool == "values beside the task's own"]
    assert told.skipped.startswith("the module defines no result on values farther from those, ")
    assert "normal" in told.skipped


def test_a_final_has_several_cases_of_each_family_whose_values_lie_by_chance() -> None:
    rare, non_finite = verdict_pb2.VALUE_FAMILY_RARE, verdict_pb2.VALUE_FAMILY_NON_FINITE
    cases = ValueCheck().cases(task_pb2.Task(), timing_pb2.TIER_FINAL, random.Random(3))
    counts = Counter(family for family, _ in cases)
    several = {family: count for family, count in counts.items() if count > 1}
    assert several == {TASK: 3, NORMAL: 3, rare: 16, non_finite: 7}
    assert {*FAMILIES} == {*counts}
    assert [seed % 8 for family, seed in cases if family == rare] == [*range(8)] * 2
    assert [seed % 8 for family, seed in cases if family == non_finite] == [4, 5, 6, 7, 6, 7, 3]
    assert len({*cases}) == len(cases)


def test_of_small_elements_alone_it_is_said_that_they_are_off() -> None:
    def spoil(comparison: verdict_pb2.Comparison) -> None:
        comparison.outputs[0].small_ratio = 8192.0

    verdict = verdict_of(spoil)
    assert verdict.kind == verdict_pb2.FAILURE_KIND_WRONG_PRECISION
    assert verdict.detail.startswith("what is small in output 0 beside the rest is 8.19e+03x farther from the truth")


def test_wrong_on_ordinary_values_only_is_overfitting() -> None:
    def spoil(comparison: verdict_pb2.Comparison) -> None:
        if comparison.family != TASK:
            comparison.outputs[0].max_ratio = comparison.outputs[0].rms_ratio = 1e6

    assert verdict_of(spoil).kind == verdict_pb2.FAILURE_KIND_WRONG_OVERFIT


def test_wrong_on_large_values_only_is_a_wrong_value() -> None:
    def spoil(comparison: verdict_pb2.Comparison) -> None:
        if comparison.family == LARGE:
            comparison.outputs[0].max_ratio = comparison.outputs[0].rms_ratio = 1e6

    verdict = verdict_of(spoil)
    assert verdict.kind == verdict_pb2.FAILURE_KIND_WRONG_VALUE
    assert "family large" in verdict.detail


def test_the_sentence_says_where_how_far_and_on_which_values() -> None:
    verdict = verdict_of(
        spoil_with(max_ratio=904e3, rms_ratio=1.0, worst_index=40961, worst_value=0.131, worst_truth=0.127)
    )
    assert verdict.detail.startswith("output 0 is 9.04e+05x farther from the truth than PyTorch at element 40961 (")
    assert verdict.detail.endswith("): 0.131 instead of 0.127")


def test_values_that_the_reference_refuses_say_nothing() -> None:
    def spoil(comparison: verdict_pb2.Comparison) -> None:
        if comparison.family != TASK:
            del comparison.outputs[:]

    assert verdict_of(spoil).state == verdict_pb2.VERDICT_STATE_PASS


def test_without_a_comparison_on_the_tasks_values_nothing_passes() -> None:
    def spoil(comparison: verdict_pb2.Comparison) -> None:
        del comparison.outputs[:]

    assert verdict_of(spoil).state == verdict_pb2.VERDICT_STATE_INFRA


def test_an_allclose_that_fails_is_reported_beside_a_pass() -> None:
    verdict = verdict_of(spoil_with(kernelbench_close=False))
    assert verdict.state == verdict_pb2.VERDICT_STATE_PASS
    assert not verdict.kernelbench_pass


class Ending:
    """A service that answers with a fault after one comparison, or raises."""

    def __init__(self, raised: Exception | None = None) -> None:
        self._raised = raised

    def compare(
        self, request: benchmark_service_pb2.CompareOutputsRequest
    ) -> benchmark_service_pb2.CompareOutputsResponse:
        if self._raised is not None:
            raise self._raised
        first = verdict_pb2.Comparison(family=request.cases[0].family, seed=request.cases[0].seed, outputs=[fine()])
        fault = benchmark_service_pb2.ExecutionFault(kind=verdict_pb2.FAILURE_KIND_CRASH, detail="it crashed")
        return benchmark_service_pb2.CompareOutputsResponse(comparisons=[first], fault=fault)


def test_a_fault_is_a_failure_and_names_the_values_it_happened_on() -> None:
    verdict = Judge(Ending()).verify(request(timing_pb2.TIER_SCREENING))
    assert verdict.kind == verdict_pb2.FAILURE_KIND_CRASH
    assert "it crashed (family normal, seed " in verdict.detail


def test_a_service_that_fails_is_no_failure_of_the_program() -> None:
    verdict = Judge(Ending(ServiceFault("no answer"))).verify(request())
    assert verdict.state == verdict_pb2.VERDICT_STATE_INFRA
    assert verdict.kind == verdict_pb2.FAILURE_KIND_UNSPECIFIED


def test_a_bad_reference_stays_bad_input() -> None:
    with pytest.raises(BadInput, match="not deterministic"):
        Judge(Ending(BadInput("the module is not deterministic"))).verify(request())


def test_an_artifact_of_another_program_is_bad_input() -> None:
    asked = request()
    asked.artifact.program_digest = "q"
    with pytest.raises(BadInput, match="another program"):
        Judge(Bench()).verify(asked)


def test_a_check_of_another_package_is_asked_after_the_built_in_ones() -> None:
    class Never:
        name = "never"

        def cases(self, task: Any, tier: Any, draw: random.Random) -> Sequence[tuple[Any, int]]:
            del task, tier, draw
            return [(TASK, 5)]

        def judge(self, comparisons: Sequence[verdict_pb2.Comparison]) -> Judgement:
            del comparisons
            return Finding(verdict_pb2.FAILURE_KIND_CHEAT, "never")

    assert Judge(Bench(), [Never()]).verify(request()).detail == "never"


def test_small_outputs_are_pooled_over_seeds() -> None:
    def comparison(ratio: float) -> verdict_pb2.Comparison:
        error = fine(rms_ratio=ratio, max_ratio=ratio, block_ratio=ratio, rms_error=ratio * 1e-8)
        return verdict_pb2.Comparison(family=NORMAL, outputs=[error])

    check = PrecisionCheck()
    assert check.judge([comparison(3.9), comparison(0.1)]) == Passed()
    assert isinstance(check.judge([comparison(4.1), comparison(0.1)]), Finding)


def test_a_broken_limit_is_seen_when_all_ratios_are_equal() -> None:
    error = fine(rms_ratio=5.0, max_ratio=5.0, block_ratio=5.0)
    assert size_of(error) is Size.IMPRECISE
