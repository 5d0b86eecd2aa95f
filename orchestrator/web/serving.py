"""Serves the live page in a thread, from `__enter__` to `__exit__`.

The one idea: it listens before anybody is told where. On loopback any user of the machine can reach it, so the token
is what keeps others out; beyond loopback the token would be read by who stands between, so whoever does that has named
one on purpose, and puts TLS in front.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import uvicorn

from orchestrator.commands.client import Optimization
from orchestrator.web import application
from orchestrator.web.guard import LOGIN, TOKEN_CHARACTERS, Access
from warpsmith.errors import BadInput, Infrastructure

START_SECONDS = 10.0
END_SECONDS = 2
"""How long answers under way may take when the server ends."""


def access_of(token_file: Path | None, names: tuple[str, ...]) -> Access:
    """With the token of a file, or with a new one.

    Raises:
        BadInput: the file cannot be read, or holds no long token.
    """
    if token_file is None:
        return Access(Access.new().token, names)
    try:
        token = token_file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"--token-file {token_file}: cannot be read ({error})") from error
    if len(token) < TOKEN_CHARACTERS or not token.isprintable() or " " in token:
        raise BadInput(f"--token-file {token_file}: holds no token of {TOKEN_CHARACTERS} characters or more")
    return Access(token, names)


def listening(place: str, *, is_guarded: bool) -> socket.socket:
    """A socket at HOST:PORT, an address of loopback unless `is_guarded`: the token is one that was made on purpose.

    Raises:
        BadInput: it is none, it is no address of loopback, or it is taken.
    """
    host, _, port = place.rpartition(":")
    host = host.strip("[]")
    if not host or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise BadInput(f"{place}: write HOST:PORT for the page")
    if not is_guarded and not _is_loopback(host):
        raise BadInput(
            f"{place}: the page speaks no TLS, so it listens on 127.0.0.1; reach it through a tunnel (ssh -L), or name "
            "--token-file and put a proxy with TLS in front"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, int(port)), family=family, backlog=128)
    except OSError as error:
        raise BadInput(f"{place}: the page cannot listen there ({error.strerror}); name another place") from error


class WebServer:
    """The page of one orchestrator."""

    def __init__(self, orchestrator: Optimization, bound: socket.socket, access: Access) -> None:
        self._bound, self._access = bound, access
        self._application = application.make(orchestrator, access)
        config = uvicorn.Config(
            self._application,
            log_level="warning",
            access_log=False,  # an address may hold the token
            proxy_headers=False,
            server_header=False,
            ws="none",
            http="h11",
            lifespan="off",
            timeout_graceful_shutdown=END_SECONDS,
        )
        self._server = _Server(config, self._application.close)
        self._thread = threading.Thread(target=self._server.run, args=([bound],), name="live page", daemon=True)

    @property
    def url(self) -> str:
        """Where it is."""
        host, port = self._bound.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    @property
    def login_url(self) -> str:
        """Where it is for a browser that has not shown the token yet."""
        return f"{self.url}{LOGIN}?token={self._access.token}"

    def check(self) -> None:
        """Raises Infrastructure when it has ended."""
        if not self._thread.is_alive():
            raise Infrastructure("the live page has ended")

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._server.has_started.wait(START_SECONDS):
            raise Infrastructure("the live page does not start")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        self._thread.join(END_SECONDS + 3)
        self._bound.close()


class _Server(uvicorn.Server):
    """Says when it has started; leaves signals to the command that it is a part of."""

    def __init__(self, config: uvicorn.Config, close: Callable[[], None]) -> None:
        super().__init__(config)
        self._close = close
        self.has_started = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.has_started.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._close()
        await super().shutdown(sockets=sockets)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
