"""Asks a language model behind an OpenAI-compatible API, such as vLLM's, and names every way in which that fails.

The one idea: an answer is text, or a `ModelFault` with a reason; whatever the bytes on the wire are, nothing else
comes out, in bounded memory and time (the settings', or the caller's where that is shorter). Passing faults are tried
again within a budget; a server that stays away is then left alone for a while, so that its absence costs seconds once
and not at every question.
"""

from __future__ import annotations

import email.utils
import logging
import math
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import httpx
import openai
from prometheus_client import Counter, Histogram
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_attempt, stop_before_delay
from tenacity.wait import wait_random_exponential

from warpsmith import local_sockets
from warpsmith.errors import BadInput, ModelFault, ModelReason
from warpsmith.models import model_turn
from warpsmith.models.language_model import Answer, Message
from warpsmith.models.untrusted import one_line
from warpsmith.settings import ModelSettings

log = logging.getLogger("warpsmith")

ANSWER_CHARACTERS = 256 * 1024
"""Longest answer that is read; a thinking model's long answer is a fifth of it."""
EXCHANGE_BYTES = 8 << 20
"""Most bytes of one exchange on the wire, where each token of a stream comes in some 300 bytes of JSON. The library
joins the parts of an event that does not end at a quadratic cost: 32 MiB took it 8 s, 8 MiB a sixteenth of that."""
CHARACTERS_PER_TOKEN = 3
"""Where the server counts no tokens, they are guessed, and high: a budget must hold with any server."""
MOST_TOKENS = 1 << 30
"""Of one prompt or answer, whatever the server says."""
CONNECT_SECONDS = 5.0
LISTING_SECONDS = 10.0
NAMES_SHOWN = 6

SETTINGS_WRONG = frozenset({ModelReason.WRONG_URL, ModelReason.WRONG_MODEL, ModelReason.KEY_REFUSED})
"""Reasons that no waiting mends: a person has to change a setting."""
PASSING = frozenset({ModelReason.SERVER_DOWN, ModelReason.SERVER_ERROR, ModelReason.RATE_LIMITED})
"""Reasons after which the same question may well be answered."""
RESTED = PASSING | {ModelReason.FIRST_TOKEN_LATE}
"""Reasons after which the server is left alone for a while."""

_outcomes = Counter("warpsmith_model_calls_total", "Exchanges with the language model's server.", ["outcome"])
_tokens = Counter("warpsmith_model_tokens_total", "Tokens, as the server counts them.", ["kind"])
_seconds = Histogram("warpsmith_model_seconds", "Time of a whole answer.", buckets=(0.1, 0.5, 1, 2, 5, 10, 30, 60, 120))
_first = Histogram("warpsmith_model_first_token_seconds", "Time to the first token.", buckets=(0.05, 0.2, 1, 5, 20, 60))


@dataclass(frozen=True)
class Patience:
    """How often an exchange is tried again after a passing fault."""

    attempts: int = 4
    budget_seconds: float = 30.0
    """Longest time for all attempts but the last."""
    wait_seconds: float = 0.5
    """Mean of the first wait; doubles from then on. The server's own wish goes before."""
    rest_seconds: float = 10.0
    """How long a server that did not answer is left alone."""


class OpenAiClient:
    """One server and one model on it; see `LanguageModel`."""

    def __init__(self, settings: ModelSettings, patience: Patience = Patience()) -> None:
        """Connects to nothing yet.

        Raises:
            BadInput: the address is none, or the key file cannot be used.
        """
        url, socket = settings.url, ""
        if local_sockets.is_one(url):
            local_sockets.require_own(url)
            url, socket = "http://localhost/v1", str(local_sockets.path_of(url))
        if not re.fullmatch(r"https?://[^\s/?#]+(/[^\s?#]*)?", url):
            raise BadInput(f"WARPSMITH_MODEL_URL={url!r}: write an address such as http://127.0.0.1:8000/v1")
        self._settings, self._patience = settings, patience
        self._limits = _Limits(settings.first_token_seconds, settings.total_seconds)
        self._slots = threading.BoundedSemaphore(settings.concurrency)
        self._listed: tuple[str, int] | None = None
        self._resting: tuple[float, ModelFault] | None = None
        timeout = httpx.Timeout(settings.first_token_seconds, connect=CONNECT_SECONDS)
        self._http = httpx.Client(transport=_Bounded(self._limits, socket), timeout=timeout)
        self._client = openai.OpenAI(
            base_url=url, api_key=_key(settings), max_retries=0, timeout=timeout, http_client=self._http
        )

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    def check(self) -> None:
        """Asks for the list of models. A server that is down is no error: it may come up later.

        Raises:
            BadInput: the server says that the address, the model or the key is wrong.
        """
        try:
            self._model()
        except ModelFault as fault:
            if fault.reason in SETTINGS_WRONG:
                raise BadInput(str(fault)) from fault
            log.warning("%s; it is asked again when it is needed", fault)

    def context_tokens(self) -> int:
        """See `LanguageModel`; asks the server for its list of models unless it has been asked."""
        try:
            self._raise_if_resting()
            return self._model()[1]
        except ModelFault:
            return 0

    def answer(
        self, messages: Sequence[Message], schema: Mapping[str, Any] | None, seconds: float = math.inf
    ) -> Answer:
        """See `LanguageModel`; at most `total_seconds` and what waiting for a free slot and retries takes."""
        self._raise_if_resting()
        end = time.monotonic() + seconds
        if not self._slots.acquire(timeout=max(0.0, min(self._settings.first_token_seconds, seconds))):
            raise self._fault(ModelReason.FIRST_TOKEN_LATE, "all questions that may be asked at once are under way")
        try:
            left = end - time.monotonic()
            retrying = Retrying(
                retry=retry_if_exception(lambda error: isinstance(error, ModelFault) and error.reason in PASSING),
                stop=stop_after_attempt(self._patience.attempts)
                | stop_before_delay(min(self._patience.budget_seconds, left)),
                wait=self._wait,
                reraise=True,
            )
            answer: Answer = retrying(self._exchange, messages, schema, end)
        except ModelFault as fault:
            if fault.reason in RESTED:
                rest = max(self._patience.rest_seconds, min(fault.retry_after_seconds, 60.0))
                self._resting = (time.monotonic() + rest, fault)
                self._listed = None  # another server may come up: with another model, or more room
            raise
        finally:
            self._slots.release()
        return answer

    def _raise_if_resting(self) -> None:
        if self._resting and time.monotonic() < self._resting[0]:
            fault = self._resting[1]
            raise ModelFault(fault.reason, f"{fault}; left alone for a while")

    def _wait(self, state: RetryCallState) -> float:
        fault = state.outcome.exception() if state.outcome else None
        if isinstance(fault, ModelFault) and fault.retry_after_seconds:
            return fault.retry_after_seconds
        return wait_random_exponential(multiplier=self._patience.wait_seconds, max=8)(state)

    def _model(self) -> tuple[str, int]:
        """The model's name and its context in tokens, 0 where unknown; asked for once."""
        listing = self._listed
        if listing is None:
            try:
                silent_seconds = (_limits.get() or self._limits).silent_seconds
                listed = self._client.models.list(timeout=min(LISTING_SECONDS, silent_seconds)).data
                cards = {str(card.id): getattr(card, "max_model_len", None) for card in listed}
            except Exception as error:
                raise self._translated(error) from error
            name = self._settings.name or next(iter(cards), "")
            if name not in cards:
                shown = one_line(", ".join(list(cards)[:NAMES_SHOWN]), 200) or "none"
                message = f"it has no model {name!r}; it has: {shown}; set WARPSMITH_MODEL"
                raise self._fault(ModelReason.WRONG_MODEL, message)
            context = cards[name]
            self._listed = listing = (name, context if isinstance(context, int) and context > 0 else 0)
        return listing

    def _exchange(self, messages: Sequence[Message], schema: Mapping[str, Any] | None, end: float) -> Answer:
        begin = time.monotonic()
        before = _limits.set(self._limits.within(end - begin))
        outcome = "answered"
        form: dict[str, Any] = {}
        if schema is not None:
            named = {"name": "answer", "schema": dict(schema), "strict": True}
            form["response_format"] = {"type": "json_schema", "json_schema": named}
        try:
            if end <= begin:
                raise self._fault(ModelReason.ANSWER_LATE, "no time is left for it to answer")
            name, context = self._model()
            limits = self._limits.within(end - time.monotonic())
            _limits.set(limits)
            create: Any = self._client.chat.completions.create  # its types know OpenAI's own models only
            stream = create(
                model=name,
                messages=[{"role": message.role, "content": message.content} for message in messages],
                **form,
                max_tokens=min(self._settings.answer_tokens, context // 3 or self._settings.answer_tokens),
                stream=True,
                stream_options={"include_usage": True},
                timeout=httpx.Timeout(limits.silent_seconds, connect=min(CONNECT_SECONDS, limits.silent_seconds)),
            )
            with stream:
                answer = self._read(stream, begin, sum(len(message.content) for message in messages))
            outcome = "cut_off" if answer.is_cut_off else "answered"
            return answer
        except Exception as error:
            fault = error if isinstance(error, ModelFault) else self._translated(error)
            outcome = fault.reason.value
            raise fault from error
        finally:
            _limits.reset(before)
            _outcomes.labels(outcome).inc()
            _seconds.observe(time.monotonic() - begin)

    def _read(self, stream: Any, begin: float, asked_characters: int) -> Answer:
        parts: list[str] = []
        size, finish = 0, ""
        guessed = 0
        used = {"prompt": 0, "answer": 0}
        has_begun = False
        try:
            for event in stream:
                guessed = guessed or asked_characters // CHARACTERS_PER_TOKEN
                if event.usage:
                    # Of all so far: some servers say it with every event.
                    used = {
                        "prompt": _tokens_of(event.usage.prompt_tokens),
                        "answer": _tokens_of(event.usage.completion_tokens),
                    }
                for choice in event.choices:
                    finish = choice.finish_reason or finish
                    if not has_begun and _is_told(choice.delta):
                        has_begun = True
                        _first.observe(time.monotonic() - begin)
                    if isinstance(choice.delta.content, str):
                        parts.append(choice.delta.content)
                        size += len(parts[-1])
                if size > ANSWER_CHARACTERS:
                    message = f"its answer is longer than {ANSWER_CHARACTERS} characters"
                    raise self._fault(ModelReason.TOO_LARGE, message)
        finally:
            for kind, count in used.items():
                _tokens.labels(kind).inc(count)
            model_turn.took(sum(used.values()) or (guessed and guessed + size // CHARACTERS_PER_TOKEN))
        if not finish:
            raise self._fault(ModelReason.NOT_THE_API, "its answer ended in the middle")
        return Answer("".join(parts), is_cut_off=finish == "length")

    def _fault(self, reason: ModelReason, message: str, retry_after_seconds: float = 0.0) -> ModelFault:
        text = f"the model server at {self._settings.url}: {message}"
        return ModelFault(reason, text, retry_after_seconds=retry_after_seconds)

    def _translated(self, error: Exception) -> ModelFault:
        """What any exception of an exchange means."""
        if isinstance(error, ModelFault):
            return error
        for cause in _causes(error):
            if isinstance(cause, _Exceeded):
                return self._fault(cause.reason, str(cause))
        if isinstance(error, openai.APIStatusError):
            return self._status(error)
        for cause in _causes(error):
            match cause:
                case httpx.ConnectError() | httpx.ConnectTimeout():
                    return self._fault(ModelReason.SERVER_DOWN, f"nothing answers there ({one_line(str(cause), 100)})")
                case httpx.TimeoutException():
                    limit = (_limits.get() or self._limits).silent_seconds
                    return self._fault(ModelReason.FIRST_TOKEN_LATE, f"silent for {limit:g} s")
                case httpx.RemoteProtocolError() | httpx.DecodingError():
                    return self._fault(ModelReason.NOT_THE_API, f"broken HTTP ({one_line(str(cause), 100)})")
                case httpx.TransportError():
                    return self._fault(ModelReason.SERVER_DOWN, f"the connection broke ({one_line(str(cause), 100)})")
        if type(error) is openai.APIError:  # an error event in a stream
            return self._fault(ModelReason.SERVER_ERROR, one_line(str(error), 200))
        what = one_line(f"{type(error).__name__}: {error}", 160)
        return self._fault(ModelReason.NOT_THE_API, f"this is not what the API says ({what})")

    def _status(self, error: openai.APIStatusError) -> ModelFault:
        body = error.body
        told = body.get("message") if isinstance(body, dict) else ""
        said = one_line(str(told or error.message), 200)
        match error.status_code:
            case 401 | 403:
                return self._fault(
                    ModelReason.KEY_REFUSED, f"it refuses the key; set WARPSMITH_MODEL_KEY_FILE ({said})"
                )
            case 404 if "model" in said.lower():
                return self._fault(ModelReason.WRONG_MODEL, f"it has no such model; set WARPSMITH_MODEL ({said})")
            case 404 | 405:
                hint = "" if self._settings.url.rstrip("/").endswith("/v1") else "; most addresses end in /v1"
                return self._fault(ModelReason.WRONG_URL, f"it does not know the API's paths{hint}")
            case 429:
                after = _retry_after(error.response.headers.get("retry-after", ""))
                return self._fault(ModelReason.RATE_LIMITED, f"it has too much to do ({said})", after)
            case 400 | 413 | 422 if re.search(
                r"context[ _]length|maximum context|too (long|large)|max_model_len", said
            ):
                return self._fault(ModelReason.CONTEXT_TOO_LONG, said)
            case code if code >= 500:
                after = _retry_after(error.response.headers.get("retry-after", ""))
                return self._fault(ModelReason.SERVER_ERROR, f"status {code} ({said})", after)
            case code:
                return self._fault(ModelReason.REQUEST_REFUSED, f"status {code} ({said})")


class _Exceeded(Exception):
    """A bound on time or size was passed."""

    def __init__(self, reason: ModelReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class _Limits:
    """Seconds that one exchange may take; a last silence comes on top of the whole."""

    silent_seconds: float
    """Before the first token, and after any."""
    whole_seconds: float

    def within(self, seconds: float) -> _Limits:
        """So much shorter that whole and last silence end in the time."""
        silent = max(0.001, min(self.silent_seconds, seconds / 2))
        return _Limits(silent, min(self.whole_seconds, max(0.001, seconds - silent)))


_limits: ContextVar[_Limits | None] = ContextVar("limits", default=None)
"""Of the exchange that this thread is in; the library has no way to hand them down."""


class _Bounded(httpx.BaseTransport):
    """Ends an exchange that takes too long or grows too large, whatever its bytes are.

    Bytes that come one at a time never let a time-out of the socket pass, so time is looked at with every one.
    """

    def __init__(self, limits: _Limits, socket: str) -> None:
        self._limits = limits
        self._inner = httpx.HTTPTransport(uds=socket or None)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Sends the request and gives a response whose body is watched."""
        begin = time.monotonic()
        try:
            local_sockets.require_own_port(str(request.url))
        except BadInput as error:
            raise httpx.ConnectError(str(error), request=request) from None
        request.headers["accept-encoding"] = "identity"
        response = self._inner.handle_request(request)
        if response.headers.get("content-encoding", "identity") != "identity":
            response.close()  # a small body may unpack to a huge one
            raise _Exceeded(ModelReason.NOT_THE_API, "its answer is compressed although none was asked for")
        assert isinstance(response.stream, httpx.SyncByteStream)
        body = _Body(response.stream, _limits.get() or self._limits, begin)
        return httpx.Response(
            response.status_code, headers=response.headers, stream=body, extensions=response.extensions
        )

    def close(self) -> None:
        """Closes the connections."""
        self._inner.close()


class _Body(httpx.SyncByteStream):
    def __init__(self, inner: httpx.SyncByteStream, limits: _Limits, begin: float) -> None:
        self._inner, self._limits, self._begin = inner, limits, begin

    def __iter__(self) -> Iterator[bytes]:
        count, has_begun = 0, False
        first, total = self._limits.silent_seconds, self._limits.whole_seconds
        for part in self._inner:
            count += len(part)
            has_begun = has_begun or b"data:" in part
            passed = time.monotonic() - self._begin
            if count > EXCHANGE_BYTES:
                raise _Exceeded(ModelReason.TOO_LARGE, f"it sent more than {EXCHANGE_BYTES >> 20} MiB")
            if passed > total:
                raise _Exceeded(ModelReason.ANSWER_LATE, f"its answer was not whole after {total:g} s")
            if passed > first and not has_begun:
                raise _Exceeded(ModelReason.FIRST_TOKEN_LATE, f"no token came in {first:g} s")
            yield part

    def close(self) -> None:
        self._inner.close()


def _tokens_of(said: Any) -> int:
    return min(MOST_TOKENS, max(0, int(said)))


def _is_told(delta: Any) -> bool:
    """Whether an event brings a token: of the answer, or of thoughts, which servers keep under one of two names."""
    return any(
        isinstance(getattr(delta, name, None), str) and getattr(delta, name)
        for name in ("content", "reasoning_content", "reasoning")
    )


def _key(settings: ModelSettings) -> str:
    if settings.key_file is None:
        return "none"  # the library insists on one; vLLM without --api-key takes any
    try:
        key = settings.key_file.read_text(encoding="ascii").strip()
    except OSError as error:
        raise BadInput(f"WARPSMITH_MODEL_KEY_FILE={settings.key_file}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError:  # its text would quote the key
        raise BadInput(f"WARPSMITH_MODEL_KEY_FILE={settings.key_file}: cannot be read (no ASCII text)") from None
    if not re.fullmatch(r"[!-~]+", key):
        raise BadInput(f"WARPSMITH_MODEL_KEY_FILE={settings.key_file}: it must hold one key and nothing else")
    return key


def _retry_after(value: str) -> float:
    """Seconds that a Retry-After header asks for (RFC 9110, 10.2.3: seconds or a date), at most an hour; 0 for none."""
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return 0.0
    return min(3600.0, max(0.0, seconds)) if math.isfinite(seconds) else 0.0


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    for _ in range(10):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__
