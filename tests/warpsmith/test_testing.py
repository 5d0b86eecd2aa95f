"""The conformance suite finds what is wrong with an agent, and nothing where nothing is."""

from __future__ import annotations

import pytest

from warpsmith import testing
from warpsmith.errors import BadInput
from warpsmith.v1 import reasoning_service_pb2 as api


def _fitting(request: api.ProposeHypothesesRequest) -> api.ProposeHypothesesResponse:
    if not request.HasField("analysis"):
        raise BadInput("the request has no analysis")
    response = api.ProposeHypothesesResponse()
    for legal in request.analysis.legal_moves:
        hypothesis = response.hypotheses.add(new_move_count=1, predicted_speedup=2.0, source="test")
        hypothesis.rationale = "Because."
        hypothesis.moves.extend([*request.analysis.moves, legal.move])
    return response


def _careless(request: api.ProposeHypothesesRequest) -> api.ProposeHypothesesResponse:
    response = api.ProposeHypothesesResponse()
    for _ in range(request.limit + 1):
        response.hypotheses.add(new_move_count=1, predicted_speedup=float("nan")).moves.add(group="pray")
    return response


def test_a_fitting_reasoner_has_no_findings() -> None:
    assert testing.check_reasoning(_fitting) == []


def test_a_careless_reasoner_is_told_everything() -> None:
    findings = "\n".join(testing.check_reasoning(_careless))
    for expected in ("5 hypotheses where 4", "not among the legal", "not a positive", "not one sentence", "source is"):
        assert expected in findings
    assert "a request without an analysis is not refused" in findings


def test_an_unknown_role_has_no_suite(capsys: pytest.CaptureFixture[str]) -> None:
    assert testing.main(["wizard", "127.0.0.1:1"]) == testing.main(["wizard", "x"]) == 2
    said = capsys.readouterr().err
    assert "no server can be a 'wizard'; one can be a reasoner, a synthesizer, a toolchain" in said
    assert "no role is called 'wizard'; roles: reasoner, synthesizer, toolchain, check, " in said
    assert testing.main(["search", "wizard"]) == 2
    assert "no search is called 'wizard'; installed: beam, " in capsys.readouterr().err


def test_a_server_that_does_not_answer_is_no_finding(capsys: pytest.CaptureFixture[str]) -> None:
    assert testing.main(["reasoner", "127.0.0.1:1"]) == 3
    assert "reasoner at 127.0.0.1:1: " in capsys.readouterr().err


def test_a_wrong_command_line_says_what_it_wants(capsys: pytest.CaptureFixture[str]) -> None:
    assert testing.main([]) == 2
    assert "usage:" in capsys.readouterr().err
