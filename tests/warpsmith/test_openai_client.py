"""The client of model servers against a scripted one: every way in which a server can fail has its reason."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from email.utils import format_datetime, parsedate_to_datetime
from pathlib import Path

import model_replies as replies
import pytest
from prometheus_client import REGISTRY
from scripted_model import Says, ScriptedModel

from warpsmith import settings
from warpsmith.errors import BadInput, ModelFault, ModelReason
from warpsmith.models.language_model import Answer, Message
from warpsmith.models.openai_client import OpenAiClient, Patience, _retry_after
from warpsmith.models.server import connect
from warpsmith.settings import ModelSettings

SCHEMA = {
    "properties": {"hypotheses": {"items": {"properties": {"option": {"enum": [3, 4, 5]}}}}},
}
QUESTION = [Message("system", "rules"), Message("user", "which?")]
QUICK = Patience(attempts=3, budget_seconds=5.0, wait_seconds=0.01, rest_seconds=0.2)

FIRST_SOON: Mapping[str, object] = {"first_token_seconds": 1.0}
LIMITS: Mapping[Says, Mapping[str, object]] = {
    replies.silent: FIRST_SOON,
    replies.slow_drip: FIRST_SOON,
    replies.slow_tokens: {"total_seconds": 1.5},
}
"""The limit that a reply is to pass; the others are far off, so that a stall passes none of them first."""


@contextmanager
def client_of(server: ScriptedModel, patience: Patience = QUICK, **other: object) -> Iterator[OpenAiClient]:
    patient = {"first_token_seconds": 10.0, "total_seconds": 20.0, **other}
    client = OpenAiClient(ModelSettings(**{"url": server.url, **patient}), patience)  # type: ignore[arg-type]
    try:
        yield client
    finally:
        client.close()


def fault(*script: Says, **other: object) -> ModelFault:
    with ScriptedModel(*script) as server, client_of(server, **other) as client, pytest.raises(ModelFault) as caught:  # type: ignore[arg-type]
        client.answer(QUESTION, SCHEMA)
    return caught.value


def test_an_answer_comes_back_whole_under_the_schema() -> None:
    with ScriptedModel(replies.good, context_tokens=3000) as server, client_of(server) as client:
        assert client.answer(QUESTION, SCHEMA) == Answer(replies.chosen(3, 4), is_cut_off=False)
        assert client.context_tokens() == 3000
    body = server.asked[0].body
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    assert body["response_format"]["json_schema"]["schema"] == SCHEMA
    assert (body["model"], body["stream"], body["max_tokens"]) == ("scripted", True, 1000)


@pytest.mark.parametrize(
    ("reply", "reason", "says"),
    [
        (replies.UNAUTHORIZED, ModelReason.KEY_REFUSED, "WARPSMITH_MODEL_KEY_FILE"),
        (replies.NO_SUCH_MODEL, ModelReason.WRONG_MODEL, "WARPSMITH_MODEL"),
        (replies.REFUSED, ModelReason.REQUEST_REFUSED, "response_format"),
        (replies.TOO_LONG, ModelReason.CONTEXT_TOO_LONG, "2048"),
        (replies.FAILED, ModelReason.SERVER_ERROR, "500"),
        (replies.BUSY, ModelReason.RATE_LIMITED, "too many"),
        (replies.error_event, ModelReason.SERVER_ERROR, "engine died"),
        (replies.huge, ModelReason.TOO_LARGE, "262144 characters"),
        (replies.endless_line, ModelReason.TOO_LARGE, "8 MiB"),
        (replies.compressed, ModelReason.NOT_THE_API, "compressed"),
        (replies.unended, ModelReason.NOT_THE_API, "ended in the middle"),
        (replies.not_events, ModelReason.NOT_THE_API, "ended in the middle"),
        (replies.broken_events, ModelReason.NOT_THE_API, "not what the API says"),
        (replies.wrong_types, ModelReason.NOT_THE_API, "not what the API says"),
        (replies.silent, ModelReason.FIRST_TOKEN_LATE, " 1 s"),
        (replies.slow_drip, ModelReason.FIRST_TOKEN_LATE, " 1 s"),
        (replies.slow_tokens, ModelReason.ANSWER_LATE, "1.5 s"),
    ],
)
def test_every_failure_has_its_reason(reply: Says, reason: ModelReason, says: str) -> None:
    begin = time.monotonic()
    found = fault(reply, **LIMITS.get(reply, {}))
    assert found.reason is reason
    assert says in str(found)
    assert "\n" not in str(found)
    assert time.monotonic() - begin < 30


def test_a_connection_that_breaks_is_tried_again() -> None:
    with ScriptedModel(replies.hung_up, replies.BUSY, replies.FAILED, replies.good) as server:
        with client_of(server, Patience(attempts=4, wait_seconds=0.01)) as client:
            assert client.answer(QUESTION, SCHEMA).text == replies.chosen(3, 4)
        assert len(server.asked) == 4


def test_a_wish_to_wait_longer_than_the_budget_ends_the_attempts_at_once() -> None:
    with ScriptedModel(replies.BUSY_FOR_LONG) as server, client_of(server) as client:
        with pytest.raises(ModelFault) as caught:
            client.answer(QUESTION, SCHEMA)
        assert len(server.asked) == 1
    assert (caught.value.reason, caught.value.retry_after_seconds) == (ModelReason.RATE_LIMITED, 3000)


def test_faults_that_stay_are_not_tried_again() -> None:
    with ScriptedModel(replies.REFUSED) as server, client_of(server) as client:
        with pytest.raises(ModelFault):
            client.answer(QUESTION, SCHEMA)
        assert len(server.asked) == 1


def test_a_server_that_is_down_is_left_alone_for_a_while() -> None:
    with ScriptedModel(replies.good) as server:
        url = server.url
    client = OpenAiClient(ModelSettings(url=url), replace(QUICK, rest_seconds=60.0))
    client.check()  # no error: it may come up later
    with pytest.raises(ModelFault, match="nothing answers there") as first:
        client.answer(QUESTION, SCHEMA)
    assert first.value.reason is ModelReason.SERVER_DOWN
    with pytest.raises(ModelFault, match="left alone"):
        client.answer(QUESTION, SCHEMA)
    assert client.context_tokens() == 0
    client.close()


def test_the_key_comes_from_its_file_and_is_never_shown(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret-1234\n")
    (tmp_path / "wrong").write_text("wrong-5678\n")
    with ScriptedModel(replies.good, key="secret-1234") as server:
        with client_of(server, key_file=tmp_path / "key") as client:
            client.answer(QUESTION, SCHEMA)
        assert server.asked[0].headers["authorization"] == "Bearer secret-1234"
        with client_of(server, key_file=tmp_path / "wrong") as client:
            with pytest.raises(BadInput, match="refuses the key") as caught:
                client.check()
            assert "5678" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read"), (b"two keys\nhere", "one key and nothing else"), (b"\xff", "cannot be read")],
)
def test_a_key_file_that_cannot_be_used_is_bad_input(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BadInput, match=message):
        OpenAiClient(ModelSettings(key_file=path))


def test_wrong_settings_are_said_before_anything_runs() -> None:
    with ScriptedModel(replies.good, names=("qwen", "gemma")) as server:
        with client_of(server, name="llama") as client, pytest.raises(BadInput, match="it has: qwen, gemma"):
            client.check()
        other = server.url.removesuffix("/v1")
        with client_of(server, url=other) as client, pytest.raises(BadInput, match="most addresses end in /v1"):
            client.check()
    for url in ("localhost:8000", "ftp://here/v1", "http://", "http://a b/v1"):
        with pytest.raises(BadInput, match="write an address such as"):
            OpenAiClient(ModelSettings(url=url))


def test_no_more_questions_than_allowed_are_under_way_at_once() -> None:
    under_way, most, lock = 0, 0, threading.Lock()

    def counting(asked: replies.Asked) -> replies.Reply:
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        time.sleep(0.05)
        with lock:
            under_way -= 1
        return replies.good(asked)

    with ScriptedModel(counting) as server, client_of(server, concurrency=2) as client:
        threads = [threading.Thread(target=client.answer, args=(QUESTION, SCHEMA)) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert most == 2
    assert len(server.asked) == 6


def test_tokens_are_counted_as_the_server_counts_them() -> None:
    def count(kind: str) -> float:
        return REGISTRY.get_sample_value("warpsmith_model_tokens_total", {"kind": kind}) or 0.0

    before = count("prompt"), count("answer")
    with ScriptedModel(replies.good) as server, client_of(server) as client:
        client.answer(QUESTION, SCHEMA)
    assert (count("prompt") - before[0], count("answer") - before[1]) == (100, 20)


def test_the_first_token_is_timed_once_an_answer_whether_it_is_of_thoughts_or_not() -> None:
    def count() -> float:
        return REGISTRY.get_sample_value("warpsmith_model_first_token_seconds_count") or 0.0

    def thinking(_: replies.Asked) -> replies.Reply:
        thought = (
            b'data: {"id":"x","choices":[{"index":0,"delta":{"reasoning_content":"hm"},"finish_reason":null}]}\n\n'
        )
        role = b'data: {"id":"x","choices":[{"index":0,"delta":{"role":"assistant"},"finish_reason":null}]}\n\n'
        return replies.Reply(
            200, replies.STREAM, [role, *[thought] * 50, replies.event("{}"), replies.event(None, "stop")]
        )

    before = count()
    with ScriptedModel(thinking, replies.good) as server, client_of(server) as client:
        client.answer(QUESTION, SCHEMA)
        assert count() == before + 1
        client.answer(QUESTION, SCHEMA)
    assert count() == before + 2


def test_retry_after_is_seconds_or_a_date() -> None:
    assert _retry_after("2.5") == 2.5
    date = parsedate_to_datetime("Wed, 21 Oct 2150 07:28:00 GMT")
    assert _retry_after(format_datetime(date)) == 3600
    for nothing in ("", "soon", "-5", "nan", "inf", "Wed, 21 Oct 2015 07:28:00 GMT"):
        assert _retry_after(nothing) == 0


def test_the_environment_names_server_model_and_key() -> None:
    read = settings.read(
        {
            "WARPSMITH_MODEL_URL": "http://gpu:8000/v1",
            "WARPSMITH_MODEL": "qwen",
            "WARPSMITH_MODEL_KEY_FILE": "/run/key",
            "WARPSMITH_MODEL_TOTAL_SECONDS": "30",
        }
    ).model
    assert read == ModelSettings("http://gpu:8000/v1", "qwen", Path("/run/key"), total_seconds=30)
    with pytest.raises(BadInput, match="WARPSMITH_MODEL_CONCURRENCY='0' is not above zero"):
        settings.read({"WARPSMITH_MODEL_CONCURRENCY": "0"})


def test_without_the_library_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    monkeypatch.delitem(sys.modules, "warpsmith.models.openai_client")
    with pytest.raises(BadInput, match=r"pip install 'warpsmith\[model\]'"):
        connect(ModelSettings())
