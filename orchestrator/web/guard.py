"""Who may ask the page for anything: the one that has its token, by the name of this page, from this page.

The one idea: it stands before every route, the stylesheet's too, so that none can be forgotten. A browser shows the
token once and gets a cookie that is made of it; a program sends it as `Authorization: Bearer`. A name that is not ours
(DNS rebinding) and a form of another origin (cross-site requests) are refused before that. It knows no run.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOGIN = "/login"
BODY_BYTES = (1 << 20) + (16 << 10)
"""Most that a request may bring: a module of a mebibyte, and the rest of its form."""
TOKEN_CHARACTERS = 32
"""Fewest of a token that somebody else has made."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Names by which a browser on the same machine, or at the end of a tunnel, finds the page."""
SAFE = frozenset({"GET", "HEAD"})


class TooLarge(Exception):
    """A request brings more than `BODY_BYTES`: raised where it is read, and answered with `too_large`."""


@dataclass(frozen=True)
class Access:
    """The token, and the names of the page."""

    token: str
    names: Sequence[str] = ()
    """Beyond `LOOPBACK`: names under which a proxy that speaks TLS gives the page to others."""

    @classmethod
    def new(cls) -> Access:
        """With a token that nobody knows yet."""
        return cls(secrets.token_urlsafe(TOKEN_CHARACTERS))

    @property
    def cookie_name(self) -> str:
        """Of this token: cookies know no port, and two pages of one machine are to leave each other's alone."""
        return f"warpsmith_{hashlib.sha256(self.token.encode()).hexdigest()[:8]}"

    @property
    def cookie(self) -> str:
        """What a browser shows after it has shown the token; the token cannot be found from it."""
        return hmac.new(self.token.encode(), b"cookie of the live page", hashlib.sha256).hexdigest()

    def is_token(self, text: str) -> bool:
        """Whether it is the token; takes as long for every text."""
        return hmac.compare_digest(text.encode(errors="surrogateescape"), self.token.encode())

    def is_cookie(self, text: str) -> bool:
        """Whether it is the cookie; takes as long for every text."""
        return hmac.compare_digest(text.encode(errors="surrogateescape"), self.cookie.encode())

    def logged_in(self, request: Request, to: str) -> Response:
        """The answer to the token: the cookie, and the way to a page of ours."""
        answer = RedirectResponse(ours(to), status_code=303)
        is_tls = request.url.scheme == "https" or _host(request.headers) in self.names
        answer.set_cookie(self.cookie_name, self.cookie, httponly=True, samesite="strict", secure=is_tls, path="/")
        return answer


class Guard:
    """Lets through what has the token; an ASGI application around another."""

    def __init__(
        self,
        inner: ASGIApp,
        access: Access,
        headers: Mapping[str, str],
        refused: Callable[[str, bool], str],
        close: Callable[[], None],
    ) -> None:
        """`headers`: of every answer. `close`: ends what is open.

        `refused`: the page for who has no token and asked for a path; it leads there once a token is
        shown, and before that once by itself where it is told to.
        """
        self._inner, self._access, self._headers, self._refused, self.close = inner, access, headers, refused, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._inner(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # a WebSocket: closed by not being accepted

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self._headers)
            await send(message)

        answer = self._refusal(Request(scope))
        if answer is not None:
            await answer(scope, receive, sending)
            return
        await self._inner(scope, _limited(receive), sending)

    def _refusal(self, request: Request) -> Response | None:
        """Why a request is not let through; None where it is."""
        headers = request.headers
        if _host(headers) not in (*LOOPBACK, *self._access.names):
            return PlainTextResponse("this page has no such name", status_code=421)
        if request.method not in SAFE and not self._is_from_here(headers):
            return PlainTextResponse("a form of another page is not taken", status_code=403)
        if not headers.get("content-length", "0").isdecimal() or int(headers.get("content-length", "0")) > BODY_BYTES:
            return too_large()
        if request.scope["path"] == LOGIN or self._has_token(request):
            return None
        page = self._refused(request.scope["path"], _is_link_from_elsewhere(request))
        return Response(page, status_code=401, media_type="text/html")

    def _is_from_here(self, headers: Headers) -> bool:
        """Whether a form is of a page of ours, as far as the browser says; a program says nothing and has the token."""
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        if site is None and origin is None:
            return self._is_bearer(headers)
        if site not in (None, "same-origin"):
            return False
        return origin is None or _netloc(origin) == headers.get("host")

    def _has_token(self, request: Request) -> bool:
        if self._is_bearer(request.headers):
            return True
        return self._access.is_cookie(request.cookies.get(self._access.cookie_name, ""))

    def _is_bearer(self, headers: Headers) -> bool:
        kind, _, token = headers.get("authorization", "").partition(" ")
        return kind.lower() == "bearer" and self._access.is_token(token.strip())


def too_large() -> Response:
    """The answer to a request that brings too much; the rest of it is not read."""
    return PlainTextResponse(f"at most {BODY_BYTES} bytes can be sent", status_code=413)


def ours(path: str) -> str:
    """The path as an address that is of this page, whatever it holds."""
    return quote("/" + path.lstrip("/\\"), safe="/-._~")


def _is_link_from_elsewhere(request: Request) -> bool:
    """Whether a link of another site was followed, a dashboard's for example.

    A browser shows the cookie only to what this page itself leads to, so the page that refuses leads there, once.
    """
    headers = request.headers
    is_link = (
        headers.get("sec-fetch-site") in ("cross-site", "same-site") and headers.get("sec-fetch-mode") == "navigate"
    )
    return is_link and request.method == "GET" and headers.get("sec-fetch-dest") == "document"


def _netloc(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _host(headers: Headers) -> str:
    """The name in the Host header without its port; empty where there is none or more than one."""
    named = headers.getlist("host")
    try:
        return urlsplit(f"//{named[0]}").hostname or "" if len(named) == 1 else ""
    except ValueError:
        return ""


def _limited(receive: Receive) -> Callable[[], Awaitable[Message]]:
    """Counts what a request brings, whatever its header has said."""
    count = 0

    async def receiving() -> Message:
        nonlocal count
        message = await receive()
        count += len(message.get("body", b""))
        if count > BODY_BYTES:
            raise TooLarge
        return message

    return receiving
