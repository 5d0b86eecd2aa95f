"""A turn with a model: it ends in its time whatever the server does, and what it cost is known."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import model_replies as replies
import pytest
from scripted_model import DONE, STREAM, USAGE, Asked, Reply, Says, ScriptedModel, event, streamed

from agent_reasoning.model.language_model import LanguageModelReasoner
from agent_reasoning.servicer import ReasoningServicer
from warpsmith import testing
from warpsmith.errors import ModelFault, ModelReason, NotFound
from warpsmith.models import model_turn
from warpsmith.models.language_model import Answer, Message
from warpsmith.models.model_turn import PromptSizes, Turn, counting, took
from warpsmith.models.openai_client import OpenAiClient, Patience
from warpsmith.settings import ModelSettings

SCHEMA = {"properties": {"hypotheses": {"items": {"properties": {"option": {"enum": [3, 4, 5]}}}}}}
QUESTION = [Message("user", "which? " * 30)]
ASKED_TOKENS = 70
"""Of the question, at three characters each."""
SLOW_SETTINGS = {"first_token_seconds": 60.0, "total_seconds": 600.0}
PATIENT = Patience(attempts=9, budget_seconds=60.0, wait_seconds=0.2, rest_seconds=0.0)


@contextmanager
def client_of(*script: Says, **other: Any) -> Iterator[OpenAiClient]:
    with ScriptedModel(*script) as server:
        client = OpenAiClient(ModelSettings(url=server.url, **{**SLOW_SETTINGS, **other}), PATIENT)
        try:
            yield client
        finally:
            client.close()


def later(reply: Says, seconds: float) -> Says:
    """The reply after a while."""

    def says(asked: Asked) -> Reply:
        time.sleep(seconds)
        return reply(asked)

    return says


def silent(_: Asked) -> Reply:
    """Begins, and says nothing for longer than any test waits."""

    def parts() -> Iterator[bytes]:
        time.sleep(30.0)
        yield DONE

    return Reply(200, STREAM, parts())


# ---- time ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reply",
    [replies.slow_drip, replies.slow_tokens, silent, replies.BUSY, replies.FAILED, replies.BUSY_FOR_LONG,
     later(replies.good, 30.0)],
)  # fmt: skip
def test_a_question_ends_in_the_time_that_its_caller_has_whatever_the_settings_say(reply: Says) -> None:
    with client_of(reply) as client:
        begin = time.monotonic()
        with pytest.raises(ModelFault):
            client.answer(QUESTION, SCHEMA, 1.0)
        assert time.monotonic() - begin < 20.0


def test_waiting_for_a_slot_is_part_of_the_time() -> None:
    with client_of(later(replies.good, 2.0), concurrency=1) as client:
        client._slots.acquire()
        begin = time.monotonic()
        with pytest.raises(ModelFault, match="under way"):
            client.answer(QUESTION, SCHEMA, 0.5)
        assert time.monotonic() - begin < 20.0
        client._slots.release()


def test_a_question_for_which_no_time_is_left_is_not_asked() -> None:
    with ScriptedModel(replies.good) as server:
        client = OpenAiClient(ModelSettings(url=server.url), PATIENT)
        with pytest.raises(ModelFault) as caught:
            client.answer(QUESTION, SCHEMA, -1.0)
        client.close()
        assert caught.value.reason is ModelReason.ANSWER_LATE
        assert not server.asked


def test_a_turn_gives_every_question_what_is_left_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []
    now = [1000.0]
    monkeypatch.setattr(model_turn, "time", SimpleNamespace(monotonic=lambda: now[0]))

    class Noting:
        def context_tokens(self) -> int:
            return 0

        def answer(self, messages: Sequence[Message], schema: Mapping[str, Any] | None, seconds: float = 0.0) -> Answer:
            del messages, schema
            given.append(seconds)
            now[0] += 0.3
            return Answer("", is_cut_off=False)

    turn = Turn(Noting(), 1.0)
    assert turn.may_ask_again
    turn.answer(QUESTION, None)
    assert turn.may_ask_again
    turn.answer(QUESTION, None)
    assert not turn.may_ask_again, "half of the turn is gone"
    assert given == pytest.approx([1.0, 0.7])


def test_a_reasoners_turn_ends_in_time_and_roofline_takes_it() -> None:
    with client_of(replies.slow_tokens) as client:
        begin = time.monotonic()
        response = LanguageModelReasoner(client, turn_seconds=1.0).propose(testing.reasoning_request())
        assert time.monotonic() - begin < 20.0
    assert "the model had no say: answer_late" in response.hypotheses[0].rationale


# ---- tokens ----------------------------------------------------------------------------------------------


def tokens(*script: Says) -> int:
    with client_of(*script) as client, counting() as spent, contextlib.suppress(ModelFault):
        client.answer(QUESTION, SCHEMA, 5.0)
    return spent.tokens


def uncounted(text: str) -> Says:
    """An answer of a server that counts no tokens."""
    return lambda _: Reply(200, STREAM, [event(text), event(None, "stop"), b"data: [DONE]\n\n"])


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ((replies.good,), 120),
        ((lambda _: Reply(200, STREAM, [*[event("x"), USAGE] * 9, event(None, "stop"), USAGE]),), 120),
        ((uncounted("x" * 300),), ASKED_TOKENS + 100),
        ((replies.unended,), ASKED_TOKENS),
        ((replies.error_event, replies.good), ASKED_TOKENS + 120),
        ((replies.FAILED, replies.good), 120),
        ((replies.REFUSED,), 0),
        ((replies.not_events,), 0),
    ],
    ids=[
        "counted",
        "counted_often",
        "guessed",
        "broken_off",
        "tried_again",
        "refused_once",
        "refused",
        "another_service",
    ],
)
def test_tokens_of_every_attempt_count_and_are_guessed_where_the_server_does_not_say(
    script: tuple[Says, ...], expected: int
) -> None:
    assert tokens(*script) == expected


def test_a_server_cannot_say_more_tokens_than_there_can_be() -> None:
    usage = b'data: {"id":"x","choices":[],"usage":{"prompt_tokens":1e30,"completion_tokens":-5,"total_tokens":1}}\n\n'
    boasting = lambda _: Reply(200, STREAM, [event("x", "stop"), usage])  # noqa: E731
    assert 0 < tokens(boasting) < 1 << 32


def _in_vain() -> None:
    with counting():
        took(5)
        raise NotFound("nothing")


def test_an_error_carries_what_its_turn_cost_and_accounts_do_not_mix() -> None:
    with counting() as outer:
        took(1)
        with pytest.raises(NotFound) as caught:
            _in_vain()
        took(2)
    assert caught.value.model_tokens == 5
    assert outer.tokens == 3
    took(7)  # outside `counting`, so not counted


def test_the_reasoning_service_says_what_its_answers_cost_those_that_could_not_be_used_too() -> None:
    with client_of(replies.garbage, replies.good) as client:
        servicer = ReasoningServicer(LanguageModelReasoner(client))
        assert servicer.ProposeHypotheses(testing.reasoning_request(), None).model_tokens == 240  # type: ignore[arg-type]
    with client_of(lambda _: streamed("no")) as client:
        servicer = ReasoningServicer(LanguageModelReasoner(client))
        lost = servicer.ProposeHypotheses(testing.reasoning_request(), None)  # type: ignore[arg-type]
    assert "the model had no say" in lost.hypotheses[0].rationale
    assert lost.model_tokens == 360


# ---- sizes -----------------------------------------------------------------------------------------------


class Room:
    """A model of which only the context is asked."""

    def __init__(self, context: int = 0) -> None:
        self.context = context

    def context_tokens(self) -> int:
        return self.context

    answer: Callable[..., Answer]


def test_a_prompt_that_was_too_long_for_one_task_shortens_no_others() -> None:
    sizes = PromptSizes(Room(), 3)
    assert sizes.fitting("long", lambda _: 10**9) == 0
    assert sizes.refused("long", 0) == 1
    assert sizes.fitting("long", lambda _: 10**9) == 1
    assert sizes.fitting("short", lambda _: 10**9) == 0
    assert sizes.refused("long", 2) is None


def test_what_is_learnt_of_one_server_does_not_outlive_it() -> None:
    room = Room(2048)
    sizes = PromptSizes(room, 3)
    sizes.refused("a", 0)
    assert sizes.fitting("a", lambda _: 10) == 1
    room.context = 32768  # it was started again, with more room
    assert sizes.fitting("a", lambda _: 10) == 0
    assert sizes.fitting("a", lambda size: (30_000, 20_000, 10)[size]) == 1
