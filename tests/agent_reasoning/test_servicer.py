"""The service around a reasoner."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import pytest

from agent_reasoning import wording
from agent_reasoning.roofline_reasoner import RooflineReasoner
from agent_reasoning.servicer import ReasoningServicer, make_servicer
from warpsmith import plugins, testing
from warpsmith.errors import UnknownPlugin
from warpsmith.settings import Settings, read
from warpsmith.v1 import analysis_pb2, reasoning_service_pb2

Move = analysis_pb2.Move


def test_the_service_answers_what_its_reasoner_says() -> None:
    context: Any = None
    request = testing.reasoning_request()
    answer = ReasoningServicer(RooflineReasoner()).ProposeHypotheses(request, context)
    assert answer == RooflineReasoner().propose(request)


class Oracle:
    """A reasoner of another package."""

    def propose(
        self, request: reasoning_service_pb2.ProposeHypothesesRequest
    ) -> reasoning_service_pb2.ProposeHypothesesResponse:
        return reasoning_service_pb2.ProposeHypothesesResponse(at_floor=f"{request.limit} are written")


def test_the_environment_names_the_reasoner(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = [EntryPoint("oracle", f"{__name__}:Oracle", "warpsmith.reasoner")]
    monkeypatch.setattr(plugins, "entry_points", lambda group: [each for each in installed if each.group == group])
    context: Any = None
    servicer = make_servicer(read({"WARPSMITH_REASONER": "oracle"}))
    assert servicer.ProposeHypotheses(testing.reasoning_request(), context).at_floor == "4 are written"
    with pytest.raises(UnknownPlugin, match="no reasoner is called 'roofline'; installed: oracle"):
        make_servicer(Settings())


@pytest.mark.parametrize(
    ("move", "words"),
    [
        (Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group="a", choice="row"), "a as a kernel of its own (row)"),
        (Move(kind=analysis_pb2.MOVE_KIND_FUSE, group="b", choice="a"), "a and b in one kernel"),
        (Move(kind=analysis_pb2.MOVE_KIND_LIBRARY, group="a"), "a back to the library"),
        (Move(kind=analysis_pb2.MOVE_KIND_REWRITE, group="a", choice="rule"), "a rewritten by rule"),
        (
            Move(kind=analysis_pb2.MOVE_KIND_SET, group="a", choice="", arguments={"threads": 256}),
            "a with threads = 256",
        ),
        (Move(kind=analysis_pb2.MoveKind.ValueType(99), group="a", choice="channels_last"), "99 a channels_last"),
    ],
)
def test_every_move_can_be_said(move: Move, words: str) -> None:
    assert wording.effect(analysis_pb2.LegalMove(move=move)) == words


def test_what_saves_nothing_is_said_to_be_measured() -> None:
    sentence = wording.reason("a with\nthreads", saved_bytes=0, saved_launches=0, speedup=1.0)
    assert sentence == "a with threads: no change predicted, to be measured"


@pytest.mark.parametrize(("ns", "text"), [(350, "350 ns"), (8400, "8.4 µs"), (1.23e6, "1.23 ms"), (2e9, "2 s")])
def test_times_read_well(ns: float, text: str) -> None:
    assert wording.duration(ns) == text
