"""Bearer tokens: what a server asks of a caller that has no certificate, and what a client sends.

The one idea: a token is a line of a mounted file that is read again when it changes, so that a new one needs no
restart: a server takes any line, a client sends the first. Health stays open, because a load balancer asks it without
one. What a caller may do is not decided here: every token may do everything. The header is that of RFC 6750.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from warpsmith import local_sockets
from warpsmith.errors import BadInput, TokenRefused
from warpsmith.transport import HTTPS, Tls

VARIABLE = "WARPSMITH_TOKEN_FILE"
LEAST_CHARACTERS = 20
"""A shorter token could be guessed."""
_KEY, _SCHEME = "authorization", "Bearer "
_OPEN = "/grpc.health."


class TokenFile:
    """The tokens that a file holds, one in a line."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._stamp: tuple[int, int, int] | None = None
        self._last: tuple[str, ...] = ()
        self._last = self.tokens()

    def tokens(self) -> tuple[str, ...]:
        """What the file holds now; the last where it is just being replaced.

        Raises:
            BadInput: it never held a token that can be used; names it.
        """
        try:
            found = self._file.stat()
            stamp = found.st_mtime_ns, found.st_ino, found.st_size
            if stamp != self._stamp:
                lines = tuple(line.strip() for line in self._file.read_text("ascii").splitlines() if line.strip())
                self._require(lines)
                self._last, self._stamp = lines, stamp
        except (OSError, UnicodeDecodeError, BadInput) as error:
            if not self._last:
                said = error if isinstance(error, BadInput) else f"{self._file}: cannot be read as a token ({error})"
                raise BadInput(f"{said}; see {VARIABLE}") from error
        return self._last

    def _require(self, lines: tuple[str, ...]) -> None:
        if not lines:
            raise BadInput(f"{self._file}: holds no token")
        for line in lines:
            if len(line) < LEAST_CHARACTERS or not line.isprintable() or " " in line:
                raise BadInput(f"{self._file}: a token is one word of {LEAST_CHARACTERS} characters at least")


def demanded(file: Path | None) -> tuple[grpc.aio.ServerInterceptor, ...]:
    """The interceptor that lets through who shows a token of the file; none where there is no file.

    Raises:
        BadInput: the file holds no token.
    """
    return () if file is None else (_Demanded(TokenFile(file)),)


class _Demanded(grpc.aio.ServerInterceptor):
    def __init__(self, file: TokenFile) -> None:
        self._file = file

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if handler is None or details.method.startswith(_OPEN) or self._lets(details):
            return handler
        return _refusing(handler, details.method)

    def _lets(self, details: grpc.HandlerCallDetails) -> bool:
        shown = [str(value) for key, value in details.invocation_metadata or () if key == _KEY]
        if len(shown) != 1 or not shown[0].startswith(_SCHEME):
            return False
        token = shown[0].removeprefix(_SCHEME).encode()
        return any(hmac.compare_digest(token, each.encode()) for each in self._file.tokens())


def _refusing(handler: Any, method: str) -> grpc.RpcMethodHandler[Any, Any]:
    said = f"this orchestrator asks for a token, and the call shows none or a wrong one: set {VARIABLE}"

    async def refuse(request: Any, context: Any) -> Any:
        del request
        if method.startswith("/grpc."):  # a service of gRPC's own, whose exceptions nobody translates
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, said)
        raise TokenRefused(said)

    async def refuse_stream(request: Any, context: Any) -> Any:
        yield await refuse(request, context)

    make: Any = {
        (False, False): lambda **how: grpc.unary_unary_rpc_method_handler(refuse, **how),
        (False, True): lambda **how: grpc.unary_stream_rpc_method_handler(refuse_stream, **how),
        (True, False): lambda **how: grpc.stream_unary_rpc_method_handler(refuse, **how),
        (True, True): lambda **how: grpc.stream_stream_rpc_method_handler(refuse_stream, **how),
    }[handler.request_streaming, handler.response_streaming]
    made: grpc.RpcMethodHandler[Any, Any] = make(
        request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer
    )
    return made


class _Shown(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Puts the token on each call."""

    def __init__(self, file: TokenFile) -> None:
        self._file = file

    def intercept_unary_unary(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        return continuation(self._with_token(details), request)

    def intercept_unary_stream(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        return continuation(self._with_token(details), request)

    def _with_token(self, details: Any) -> Any:
        metadata = (*(details.metadata or ()), (_KEY, _SCHEME + self._file.tokens()[0]))
        return details._replace(metadata=metadata)


def showing(channel: grpc.Channel, file: Path | None) -> grpc.Channel:
    """The channel, whose calls show the file's first token where there is a file.

    Raises:
        BadInput: the file holds no token.
    """
    return channel if file is None else grpc.intercept_channel(channel, _Shown(TokenFile(file)))


def require_secrecy(address: str, tls: Tls | None) -> None:
    """Refuses to send a token where others may read it: in plain text to another machine.

    Raises:
        BadInput: says how to write the address.
    """
    if address.startswith((HTTPS, "http://")) or tls is not None:
        return
    if local_sockets.is_one(address) or local_sockets.is_loopback(address):
        return
    raise BadInput(
        f"{address}: a token is not sent there in plain text: write https://{address}, or http://{address} where the "
        "network is your own"
    )
