"""What an earlier version wrote is read under the fields of today; what a later one says is shown by number."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from agent_synthesis.emit import registry
from agent_synthesis.settings import Declared
from benchmarks.search import landscape_file
from warpsmith import digest, service
from warpsmith.contract import earlier, words
from warpsmith.errors import IllegalMove
from warpsmith.settings import Settings
from warpsmith.v1 import (
    analysis_pb2,
    candidate_pb2,
    hypothesis_pb2,
    optimization_service_pb2,
    optimization_service_pb2_grpc,
    reasoning_service_pb2,
    run_pb2,
    synthesis_service_pb2,
    synthesis_service_pb2_grpc,
    task_pb2,
    timing_pb2,
    trial_pb2,
)


def written(number: int, value: bytes | str) -> bytes:
    """A field as it lies on the wire: its number, and text or a message, shorter than 128 bytes."""
    content = value.encode() if isinstance(value, str) else value
    return bytes([number << 3 | 2, len(content)]) + content


PASS, FAIL = bytes([1 << 3, 1]), bytes([1 << 3, 2])
"""Verdict.state."""
TOO_FAST = "9 us: faster than this machine can move the task's data or compute its products"


def test_an_engine_that_was_a_word_is_read_as_an_engine() -> None:
    groups = [
        written(3, written(1, name) + written(2, engine)) for name, engine in (("a", "library"), ("b", "authored"))
    ]
    step = written(10, written(1, "b") + written(2, "authored"))
    trial = written(5, written(5, b"".join(groups))) + written(8, step)
    read = earlier.translated(trial_pb2.Trial.FromString(trial))
    assert [(group.name, group.computed_by) for group in read.candidate.analysis.groups] == [
        ("a", analysis_pb2.ENGINE_LIBRARY),
        ("b", analysis_pb2.ENGINE_AUTHORED),
    ]
    assert read.timing.steps[0].computed_by == analysis_pb2.ENGINE_AUTHORED
    assert b"authored" not in read.SerializeToString(), "what is translated is not kept twice"


def test_what_nobody_can_translate_stays_where_it_is() -> None:
    group = earlier.translated(analysis_pb2.Group.FromString(written(2, "somebody's")))
    assert (group.computed_by, words.engine(group.computed_by)) == (analysis_pb2.ENGINE_UNSPECIFIED, "")
    assert group.SerializeToString() == written(2, "somebody's")


def test_what_is_of_today_is_read_as_it_is() -> None:
    analysis = analysis_pb2.Analysis(groups=[analysis_pb2.Group(name="a", computed_by=analysis_pb2.ENGINE_LIBRARY)])
    request = reasoning_service_pb2.ProposeHypothesesRequest(analysis=analysis)
    before = request.SerializeToString(deterministic=True)
    assert earlier.translated(request).SerializeToString(deterministic=True) == before


def test_messages_that_can_hold_nothing_old_are_not_walked() -> None:
    assert earlier._ways(analysis_pb2.Cost.DESCRIPTOR) == ()
    assert earlier._ways(timing_pb2.Environment.DESCRIPTOR) == ()


@pytest.mark.parametrize(("value", "word"), [(0, ""), (1, "library"), (2, "authored"), (99, "99")])
def test_an_engine_is_known_by_its_word_and_one_of_a_later_version_by_its_number(value: int, word: str) -> None:
    read = timing_pb2.StepTime.FromString(bytes([6 << 3, value]))
    assert words.engine(read.computed_by) == word
    assert words.engine_of(word) == (value if value < 99 else 0)


@pytest.mark.parametrize(
    ("value", "word"), list(enumerate(("", "author", "fuse", "library", "rewrite", "set", "write", "launch", "layout")))
)
def test_a_move_that_was_named_by_a_word_is_read_as_one_of_its_kind(value: int, word: str) -> None:
    read = earlier.translated(analysis_pb2.Move.FromString(written(1, word) + written(2, "y") + written(3, "*")))
    assert (read.kind, words.move_kind(read.kind)) == (value, word)
    assert read == analysis_pb2.Move(kind=read.kind, group="y", choice="*"), "what is translated is not kept twice"
    assert digest.of_moves([read]) == digest.digest("moves", word, "y", "*", "")


def test_a_move_of_another_version_is_not_taken_for_one_of_ours() -> None:
    old = earlier.translated(analysis_pb2.Move.FromString(written(1, "unroll")))
    assert (old.kind, old.SerializeToString()) == (analysis_pb2.MOVE_KIND_UNSPECIFIED, written(1, "unroll"))
    assert words.move_kind(analysis_pb2.Move.FromString(bytes([6 << 3, 99])).kind) == "99"


OLD_MOVE = written(1, "fuse") + written(2, "y")
"""A move of which the kind is a word."""
OLD_PLAN = analysis_pb2.Analysis.FromString(written(2, OLD_MOVE) + written(4, written(1, OLD_MOVE)))
"""Analysis.moves and Analysis.legal_moves, the same."""


@pytest.mark.parametrize(
    "message",
    [
        candidate_pb2.Candidate.FromString(written(3, OLD_MOVE)),
        hypothesis_pb2.Hypothesis.FromString(written(1, OLD_MOVE)),
        OLD_PLAN,
        trial_pb2.Trial(candidate=candidate_pb2.Candidate(analysis=OLD_PLAN)),
        run_pb2.RunEvent(run=run_pb2.Run(best=trial_pb2.Trial.FromString(written(4, written(1, OLD_MOVE))))),
        reasoning_service_pb2.ProposeHypothesesRequest(analysis=OLD_PLAN),
        synthesis_service_pb2.AnalyzePlanRequest.FromString(written(2, OLD_MOVE)),
    ],
    ids=lambda message: message.DESCRIPTOR.name,
)
def test_a_move_is_found_wherever_messages_hold_one(message: Message) -> None:
    assert b"fuse" in message.SerializeToString()
    assert b"fuse" not in earlier.translated(message).SerializeToString()


SETTINGS = {
    "ahead": "prefetch", "blocks": "min_blocks", "depth": "stages", "end": "epilogue", "group": "raster",
    "items": "vectors", "overlap": "dependent_launch", "pack": "vector_width", "packs": "vectors", "slices": "split_k",
    "splits": "ctas", "turns": "ping_pong",
}  # fmt: skip
"""What settings were called, and are."""
WORDS = [
    ("end=held", "epilogue=overlapped"),
    ("end=direct", "epilogue=direct"),
    ("loads=once", "loads=evict_first"),
    ("loads=shared", "loads=cached"),
    ("reduce=hold", "reduce=resident"),
    ("reduce=roll", "reduce=ring"),
    ("reduce=stream", "reduce=pipelined"),
    ("reduce=ahead", "reduce=prefetched"),
    ("reduce=two_pass", "reduce=two_kernels"),
]


def a_set(choice: str = "", **arguments: int) -> analysis_pb2.Move:
    return analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_SET, group="y", choice=choice, arguments=arguments)


@pytest.mark.parametrize(("old", "new"), SETTINGS.items())
def test_a_setting_that_had_another_name_is_read_under_that_of_today(old: str, new: str) -> None:
    assert earlier.translated(a_set(f"{old}=yes", **{old: 4})) == a_set(f"{new}=yes", **{new: 4})
    group = analysis_pb2.Group(name="y", parameters={old: 4, "lanes": 8}, choices={old: "yes"})
    renamed = analysis_pb2.Group(name="y", parameters={new: 4, "lanes": 8}, choices={new: "yes"})
    assert earlier.translated(group) == renamed


@pytest.mark.parametrize(("old", "new"), WORDS)
def test_what_a_setting_was_in_another_word_is_read_as_todays(old: str, new: str) -> None:
    assert earlier.translated(a_set(old)) == a_set(new)
    groups = [analysis_pb2.Group(choices=dict([text.split("=")])) for text in (old, new)]
    assert earlier.translated(groups[0]) == groups[1]


def test_a_move_of_old_settings_is_the_move_that_is_made_today() -> None:
    old = a_set("loads=shared,overlap=no,reduce=hold", packs=2, depth=8, lanes=64)
    new = a_set("dependent_launch=no,loads=cached,reduce=resident", lanes=64, stages=8, vectors=2)
    assert digest.of_moves([earlier.translated(old)]) == digest.of_moves([new]), "names are in the order of today's"


@pytest.mark.parametrize(
    "message",
    [
        a_set("stores=streaming,reduce=split", threads=1, held=4, stages=3),
        analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_FUSE, group="y", choice="overlap=no"),
        analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group="overlap", choice="pack"),
        analysis_pb2.Group(name="pack", schedule="depth", parameters={"stages": 2}, choices={"scan": "split"}),
        analysis_pb2.Group(choices={"sweeps": "cached", "scan": "ahead", "stores": "once"}),
    ],
)
def test_what_only_looks_like_an_old_setting_stays(message: Message) -> None:
    before = message.SerializeToString(deterministic=True)
    assert earlier.translated(message).SerializeToString(deterministic=True) == before


def test_every_setting_of_ours_is_read_as_itself() -> None:
    for target in (task_pb2.TARGET_CPU, task_pb2.TARGET_CUDA):
        for schedule in registry.every_schedule(target):
            for name, declared in schedule.settings.declared().items():
                assert not earlier.is_taken(name, declared.words.split(", ")), f"{schedule.name}: {name}"


def test_every_move_in_the_results_sets_what_a_schedule_of_today_declares() -> None:
    root = Path(__file__).parents[2]
    files = [*root.glob("docs/results/*landscapes*.jsonl"), root / "tests" / "benchmarks" / "tiny_landscape.jsonl"]
    count = 0
    for landscape in (each for file in files for each in landscape_file.read([file])):
        declared = [schedule.settings.declared() for schedule in registry.every_schedule(landscape.task.target)]
        for move in (move for plan in landscape.plans.values() for move in plan.moves):
            count += 1
            if move.kind == analysis_pb2.MOVE_KIND_SET:
                assert any(_declares(settings, move) for settings in declared), move
    assert count == 3238


def _declares(settings: Mapping[str, Declared], move: analysis_pb2.Move) -> bool:
    wanted: dict[str, str | int] = dict(move.arguments)
    wanted |= {name: word for name, _, word in (part.partition("=") for part in filter(None, move.choice.split(",")))}
    try:
        return all(name in settings and settings[name].read(name, word) is not None for name, word in wanted.items())
    except IllegalMove:
        return False


def test_arms_and_flags_that_were_words_are_read_as_arms_and_flags() -> None:
    arms = written(2, written(1, "aa_copy")) + written(2, written(1, "compile_max_autotune"))
    timing = arms + written(3, "channels_last") + written(12, "HOST_BOUND") + written(12, "FLOOR_AUDITED")
    read = earlier.translated(timing_pb2.Timing.FromString(timing))
    assert [arm.kind for arm in read.arms] == [
        timing_pb2.ARM_KIND_AA_COPY,
        timing_pb2.ARM_KIND_COMPILE_MAX_AUTOTUNE,
    ]
    assert read.fastest_arm == timing_pb2.ARM_KIND_CHANNELS_LAST
    assert list(read.raised) == [timing_pb2.FLAG_HOST_BOUND, timing_pb2.FLAG_FLOOR_AUDITED]
    report = written(1, written(1, "eager")) + written(2, "eager") + written(4, "INPUT_UNUSED")
    audited = earlier.translated(timing_pb2.ReferenceReport.FromString(report))
    assert (audited.arms[0].kind, audited.fastest_arm) == (timing_pb2.ARM_KIND_EAGER, timing_pb2.ARM_KIND_EAGER)
    assert list(audited.raised) == [timing_pb2.FLAG_INPUT_UNUSED]


def test_of_several_flags_only_those_that_nobody_knows_stay_words() -> None:
    flags = b"".join(written(12, word) for word in ("HOST_BOUND", "TIMED_ON_FRESH_VALUES", "FEW_BLOCKS"))
    read = earlier.translated(timing_pb2.Timing.FromString(flags))
    assert list(read.raised) == [timing_pb2.FLAG_HOST_BOUND, timing_pb2.FLAG_FEW_BLOCKS]
    assert written(12, "TIMED_ON_FRESH_VALUES") in read.SerializeToString()


@pytest.mark.parametrize(("value", "arm", "flag"), [(0, "", ""), (2, "eager", "FLOOR_SUSPECT"), (88, "88", "88")])
def test_an_arm_and_a_flag_of_a_later_version_are_known_by_their_numbers(value: int, arm: str, flag: str) -> None:
    assert words.arm(timing_pb2.Arm.FromString(bytes([7 << 3, value])).kind) == arm
    (raised,) = timing_pb2.Timing.FromString(bytes([16 << 3 & 0x7F | 0x80, 1, value])).raised
    assert words.flag(raised) == flag


def test_every_word_leads_back_to_its_value() -> None:
    for kind in timing_pb2.ArmKind.values():
        assert words.arm_of(words.arm(kind)) == kind
    for flag in timing_pb2.Flag.values():
        assert words.flag_of(words.flag(flag)) == flag


@pytest.mark.parametrize(
    ("fields", "stage"),
    [
        (written(7, PASS) + written(8, b""), trial_pb2.STAGE_TIMED),
        (written(7, FAIL + written(3, "kernel.cpp:1: error")), trial_pb2.STAGE_COMPILE),
        (written(6, b"") + written(7, FAIL + written(3, "output 0 is far off")), trial_pb2.STAGE_VERIFY),
        (written(6, b"") + written(7, FAIL + written(3, "while timed: it hangs")), trial_pb2.STAGE_MEASURE),
        (written(6, b"") + written(7, FAIL + written(3, TOO_FAST)), trial_pb2.STAGE_MEASURE),
        (written(4, b""), trial_pb2.STAGE_UNSPECIFIED),
    ],
)
def test_where_a_trial_ended_is_read_from_what_it_lacks(fields: bytes, stage: trial_pb2.Stage.ValueType) -> None:
    assert earlier.translated(trial_pb2.Trial.FromString(fields)).ended_at == stage


@pytest.mark.parametrize(("value", "word"), [(0, ""), (2, "compile"), (5, "timed"), (77, "77")])
def test_a_stage_of_a_later_version_is_known_by_its_number(value: int, word: str) -> None:
    assert words.stage(trial_pb2.Trial.FromString(bytes([10 << 3, value])).ended_at) == word


OLD_ANALYSIS = written(3, written(1, "a") + written(2, "library"))
"""Analysis.groups with an engine that is a word."""
OLD_TRIAL = written(8, written(10, written(2, "authored")))
"""Trial.timing.steps, the same."""


class EarlierSynthesis(synthesis_service_pb2_grpc.SynthesisServiceServicer):
    """Answers as an earlier version does, and is asked by one."""

    def AnalyzePlan(self, request: Any, context: object) -> synthesis_service_pb2.AnalyzePlanResponse:
        del request, context
        return synthesis_service_pb2.AnalyzePlanResponse(analysis=analysis_pb2.Analysis.FromString(OLD_ANALYSIS))

    def RepairCandidate(self, request: Any, context: object) -> synthesis_service_pb2.RepairCandidateResponse:
        del context
        assert request.failed.timing.steps[0].computed_by == analysis_pb2.ENGINE_AUTHORED
        return synthesis_service_pb2.RepairCandidateResponse()


class EarlierRuns(optimization_service_pb2_grpc.OptimizationServiceServicer):
    """Streams as an earlier version does."""

    async def WatchRun(self, request: Any, context: object) -> AsyncIterator[optimization_service_pb2.WatchRunResponse]:
        del request, context
        response = optimization_service_pb2.WatchRunResponse()
        response.event.trial.MergeFromString(OLD_TRIAL)
        yield response


@contextmanager
def served(
    add: Callable[[Any, grpc.Server], None], servicer: Any, stub: Callable[[grpc.Channel], Any]
) -> Iterator[Any]:
    """A stub for a server of our own."""
    running = service.start("test", add, servicer, Settings(port=0, drain_seconds=0.1))
    try:
        yield service.dial(stub, f"127.0.0.1:{running.port}")
    finally:
        running.stop()


def test_services_of_two_versions_understand_each_other_while_one_is_replaced() -> None:
    grpc_of = synthesis_service_pb2_grpc
    add = grpc_of.add_SynthesisServiceServicer_to_server
    with served(add, EarlierSynthesis(), grpc_of.SynthesisServiceStub) as synthesis:
        analysis = synthesis.AnalyzePlan(synthesis_service_pb2.AnalyzePlanRequest()).analysis
        assert analysis.groups[0].computed_by == analysis_pb2.ENGINE_LIBRARY
        failed = trial_pb2.Trial.FromString(OLD_TRIAL)
        synthesis.RepairCandidate(synthesis_service_pb2.RepairCandidateRequest(failed=failed))


def test_what_an_earlier_version_streams_is_read_too() -> None:
    grpc_of = optimization_service_pb2_grpc
    add = grpc_of.add_OptimizationServiceServicer_to_server
    with served(add, EarlierRuns(), grpc_of.OptimizationServiceStub) as orchestrator:
        (response,) = orchestrator.WatchRun(optimization_service_pb2.WatchRunRequest())
    assert response.event.trial.timing.steps[0].computed_by == analysis_pb2.ENGINE_AUTHORED
