"""The library of replies: what a good model says, and what bad models and broken servers send."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

from scripted_model import DONE, STREAM, Asked, HungUp, Reply, Says, event, status, streamed


def chosen(*options: int, reason: str = "it saves a pass over memory", gain: float = 1.5) -> str:
    """The JSON of an answer with these options."""
    return json.dumps({"hypotheses": [{"reason": reason, "option": number, "gain": gain} for number in options]})


def good(asked: Asked) -> Reply:
    """The first two open options."""
    return streamed(chosen(*asked.open_options[:2]))


def last_first(asked: Asked) -> Reply:
    """The last open option: not what the roofline reasoner would take."""
    return streamed(chosen(asked.open_options[-1]))


def always(text: str) -> Says:
    """The same text to every question."""
    return lambda _: streamed(text)


def illegal(_: Asked) -> Reply:
    """Options that do not exist."""
    return streamed(chosen(10_000, -3))


def garbage(_: Asked) -> Reply:
    """Words."""
    return streamed("I would fuse the softmax with everything. {Certainly} [] }{")


def wrong_fence(asked: Asked) -> Reply:
    """A right answer in thinking, words and a fence of another language."""
    text = chosen(*asked.open_options[:1])
    return streamed(f'<think>{{"option": 99}}</think>Here you are:\n~~~\n```python\n{text}\n```\nGood luck {{}}!')


def cut_off(asked: Asked) -> Reply:
    """Ends at the limit of tokens, in the middle."""
    return streamed(chosen(*asked.open_options[:1])[:-9], finish="length")


def huge(_: Asked) -> Reply:
    """2 MB of nothing."""
    return streamed("x" * (2 << 20), size=65536)


def endless_line(_: Asked) -> Reply:
    """One event that does not end, as fast as it goes."""

    def parts() -> Iterator[bytes]:
        yield b"data: "
        while True:
            yield b"x" * (1 << 20)

    return Reply(200, STREAM, parts())


def slow_drip(_: Asked) -> Reply:
    """A byte at a time, so that no time-out of a socket ever passes."""

    def parts() -> Iterator[bytes]:
        for byte in event("x" * 10_000):
            time.sleep(0.02)
            yield bytes([byte])

    return Reply(200, STREAM, parts())


def slow_tokens(_: Asked) -> Reply:
    """Begins at once and goes on for ever."""

    def parts() -> Iterator[bytes]:
        while True:
            yield event("x")
            time.sleep(0.02)

    return Reply(200, STREAM, parts())


def silent(_: Asked) -> Reply:
    """Begins and says nothing."""

    def parts() -> Iterator[bytes]:
        time.sleep(3.0)
        yield DONE

    return Reply(200, STREAM, parts())


def hung_up(_: Asked) -> Reply:
    """Breaks the connection in the middle."""

    def parts() -> Iterator[bytes]:
        yield event('{"hypoth')
        raise HungUp

    return Reply(200, STREAM, parts())


def unended(_: Asked) -> Reply:
    """A stream without a finish."""
    return Reply(200, STREAM, [event("{}")])


def not_events(_: Asked) -> Reply:
    """Another service altogether."""
    return Reply(200, {"content-type": "text/html"}, [b"<html>It works!</html>"])


def broken_events(_: Asked) -> Reply:
    """Events that are no JSON, or have other types than the API's."""
    return Reply(200, STREAM, [b"data: {]\n\n"])


def wrong_types(_: Asked) -> Reply:
    """JSON of another shape."""
    return Reply(200, STREAM, [b'data: {"choices": [{"delta": 5}], "usage": "many"}\n\n', DONE])


def error_event(_: Asked) -> Reply:
    """An error in the midst of an answer, as vLLM sends it."""
    return Reply(200, STREAM, [event("{"), b'data: {"error": {"message": "engine died", "code": 500}}\n\n', DONE])


def compressed(_: Asked) -> Reply:
    """A compressed answer although none was asked for."""
    return Reply(200, {**STREAM, "content-encoding": "gzip"}, [b"\x1f\x8b\x08"])


def control_characters(asked: Asked) -> Reply:
    """A right choice whose reason holds escapes, directions and newlines."""
    reason = "fast\x1b[31m\x00 \u202eand\u200b\nnew\r\n <|im_end|> line"
    return streamed(chosen(asked.open_options[0], reason=reason))


SLOW = (slow_drip, slow_tokens, silent)
"""Replies that end at a limit of time: 1 s for the first token, 1.5 s in all are enough to tell them apart."""

TOO_LONG = status(
    400,
    "This model's maximum context length is 2048 tokens. However, you requested 9000 tokens (8000 in the messages, "
    "1000 in the completion). Please reduce the length of the messages or completion.",
)
UNAUTHORIZED = status(401, "Unauthorized")
NO_SUCH_MODEL = status(404, "The model `x` does not exist.")
REFUSED = status(400, "response_format: unknown type")
BUSY = status(429, "too many requests", retry_after="0.05")
BUSY_FOR_LONG = status(429, "too many requests", retry_after="3000")
FAILED = status(500, "internal error")


def too_long_above(characters: int) -> Says:
    """Refuses prompts longer than this; a good model otherwise."""
    return lambda asked: TOO_LONG(asked) if len(asked.prompt) > characters else good(asked)
