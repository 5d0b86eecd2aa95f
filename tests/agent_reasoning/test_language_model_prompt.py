"""The prompt as text: equal to the golden one, and never longer than its size says."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_reasoning.model import language_model_options, language_model_prompt
from agent_reasoning.model.language_model_prompt import SIZES, VERSION
from warpsmith import testing
from warpsmith.v1 import analysis_pb2, reasoning_service_pb2, timing_pb2, trial_pb2, verdict_pb2

GOLDEN = Path(__file__).parents[1] / "golden" / f"{VERSION}.txt"


def request_with_history() -> reasoning_service_pb2.ProposeHypothesesRequest:
    request = testing.reasoning_request()
    cost = request.analysis.groups[0].cost
    for kind, choice, effect in (
        (analysis_pb2.MOVE_KIND_REWRITE, "online", "reads each row once"),
        (analysis_pb2.MOVE_KIND_SET, "vector=4", ""),
    ):
        move = analysis_pb2.Move(kind=kind, group="softmax", choice=choice)
        request.analysis.legal_moves.add(move=move, before=cost, after=cost, effect=effect)
    zero = trial_pb2.Trial(number=1)
    zero.verdict.state = verdict_pb2.VERDICT_STATE_PASS
    zero.timing.arms.append(timing_pb2.Arm(kind=timing_pb2.ARM_KIND_CANDIDATE, median_ns=101_000.0))
    zero.timing.speedup_fastest.median = 0.99
    zero.timing.steps.append(
        timing_pb2.StepTime(group="softmax", computed_by=analysis_pb2.ENGINE_LIBRARY, median_ns=100_000.0)
    )
    failed = trial_pb2.Trial(number=2)
    failed.hypothesis.moves.append(
        analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_REWRITE, group="softmax", choice="online")
    )
    failed.hypothesis.new_move_count = 1
    failed.verdict.state = verdict_pb2.VERDICT_STATE_FAIL
    failed.verdict.kind = verdict_pb2.FAILURE_KIND_COMPILE_ERROR
    failed.verdict.detail = "kernel.cpp:7: error: \x1b[1mexpected ';'\x1b[0m before '}' token"
    request.history.extend([zero, failed])
    return request


def test_the_prompt_of_a_version_does_not_change() -> None:
    request = request_with_history()
    options = language_model_options.of(request)
    open_options = language_model_options.untried(options, request)
    prompt = language_model_prompt.first(request, options, open_options, 4, SIZES[0])
    asked_again = language_model_prompt.again(prompt, "no", "it was no JSON")
    text = "\n\n".join(f"== {message.role}\n{message.content}" for message in asked_again.messages) + "\n"
    assert text == GOLDEN.read_text()


@pytest.mark.parametrize("size", range(len(SIZES)))
def test_a_prompt_is_bounded_whatever_is_put_into_it(size: int) -> None:
    request = testing.reasoning_request()
    request.task.sources[0].content = b"x = 1\n" * 1_000_000
    cost = request.analysis.groups[0].cost
    for number in range(300):
        name = f"group_{number}_" + "n" * 3000
        request.analysis.groups.add(
            name=name, computed_by=analysis_pb2.ENGINE_LIBRARY, operations=["aten.mul.Tensor"] * 50, cost=cost
        )
        move = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group=name)
        request.analysis.legal_moves.add(move=move, before=cost, after=cost, effect="e" * 5000)
        trial = request.history.add(number=number + 1)
        trial.verdict.state = verdict_pb2.VERDICT_STATE_FAIL
        trial.verdict.detail = "d" * 100_000
    options = language_model_options.of(request)
    prompt = language_model_prompt.first(request, options, range(len(options)), 4, SIZES[size])
    assert len(prompt.open_options) <= SIZES[size].option_count
    assert prompt.token_estimate <= (13_000, 5_000, 2_400, 1_500)[size]
    assert "options shown)" in prompt.messages[1].content
