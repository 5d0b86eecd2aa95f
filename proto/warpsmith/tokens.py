"""Bearer tokens: what a server asks of a caller that has no certificate, and what a client sends.

The one idea: a token is a line of a mounted file that is read again when it changes, so that a new one needs no
restart: a server takes any line, a client sends the first. Behind a token stand, where they are wanted, its right, its
holder's name and the project that the runs count for; without, it may do everything. Health stays open, because a load
balancer asks it without one (`service.handlers`). The header is that of RFC 6750.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from warpsmith import local_sockets
from warpsmith.errors import BadInput, TokenRefused
from warpsmith.permissions import Caller, Right, right_named
from warpsmith.settings import Lines
from warpsmith.transport import HTTPS, Tls

VARIABLE = "WARPSMITH_TOKEN_FILE"
LEAST_CHARACTERS = 20
"""A shorter token could be guessed."""
REFUSED = f"this orchestrator asks for a token, and the call shows none or a wrong one: set {VARIABLE}"
_KEY, _SCHEME = "authorization", "Bearer "


@dataclass(frozen=True)
class Token:
    """A line of a file: `TOKEN [read|run|admin [NAME [PROJECT]]]`."""

    text: str
    holder: Caller

    @classmethod
    def read(cls, line: str) -> Token:
        """The token of a line.

        Raises:
            BadInput: says how a line is written.
        """
        text, right, name, project = (*line.split(), *[""] * 4)[:4]
        if len(line.split()) > 4 or len(text) < LEAST_CHARACTERS or not text.isprintable():
            raise BadInput(f"a line is TOKEN [RIGHT [NAME [PROJECT]]], and a token has {LEAST_CHARACTERS} characters")
        return cls(text, Caller(name, right_named(right) if right else Right.ADMIN, project))


class TokenFile:
    """The tokens that a file holds, one in a line."""

    def __init__(self, file: Path) -> None:
        self._lines = Lines(file, Token.read, "token", VARIABLE)

    def tokens(self) -> tuple[Token, ...]:
        """What the file holds now; the last where it is just being replaced.

        Raises:
            BadInput: it never held a token that can be used; names it.
        """
        return self._lines.now()

    def holder(self, token: str) -> Caller | None:
        """Whose token it is; None where it is none of the file."""
        text, found = token.encode(), None
        for each in self.tokens():  # all of them, so that the time tells nothing
            if hmac.compare_digest(text, each.text.encode()):
                found = each.holder
        return found


def shown(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """The token that a call shows.

    Raises:
        TokenRefused: it shows none, or several.
    """
    found = [str(value) for key, value in metadata if key == _KEY]
    if len(found) != 1 or not found[0].startswith(_SCHEME):
        raise TokenRefused(REFUSED)
    return found[0].removeprefix(_SCHEME)


class _Shown(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Puts the token on each call."""

    def __init__(self, file: TokenFile) -> None:
        self._file = file

    def intercept_unary_unary(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        return continuation(self._with_token(details), request)

    def intercept_unary_stream(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        return continuation(self._with_token(details), request)

    def _with_token(self, details: Any) -> Any:
        metadata = (*(details.metadata or ()), (_KEY, _SCHEME + self._file.tokens()[0].text))
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
