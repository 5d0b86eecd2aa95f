"""`warpsmith web`: the live page of an orchestrator that runs elsewhere; `warpsmith up --web` has it beside its own.

The one idea: the page is an ordinary client. Its libraries are an extra, so nothing here imports them before they are
needed.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.commands import client
from orchestrator.commands.client import Optimization
from orchestrator.commands.options import DEFAULT_RUNS, Runs, Server, Trust
from orchestrator.commands.terminal import note, tell
from warpsmith.errors import BadInput
from warpsmith.sandbox import jail

if TYPE_CHECKING:
    from orchestrator.web.serving import WebServer

DEFAULT_PLACE = "127.0.0.1:8470"
LIBRARIES = ("starlette", "uvicorn", "python_multipart")
EXAMPLE = (
    "Example:\n\n  warpsmith web --server runs                    (beside a `warpsmith up` of yours)\n\n"
    "  ssh -L 8470:127.0.0.1:8470 gpu-machine         (then open the address that it prints)"
)

WebListen = Annotated[
    str,
    typer.Option("--web-listen", envvar="WARPSMITH_WEB_LISTEN", metavar="HOST:PORT", help="Where the page listens."),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        envvar="WARPSMITH_WEB_TOKEN_FILE",
        metavar="FILE",
        help="The page's token, 32 characters or more; without it a new one is made and printed in the page's address.",
    ),
]
WebNames = Annotated[
    list[str] | None,
    typer.Option(
        "--web-name",
        envvar="WARPSMITH_WEB_NAMES",
        metavar="NAME",
        help="A host name under which a proxy with TLS gives the page to others. May be given several times.",
    ),
]


def web(
    web_listen: WebListen = DEFAULT_PLACE,
    token_file: TokenFile = None,
    web_name: WebNames = None,
    trust_input: Trust = False,
    server: Server = "",
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Shows runs in a browser as they happen, and takes modules there, until Ctrl-C."""
    start = page(web_listen, token_file, web_name)
    if trust_input:
        jail.trust_input()
    with (
        client.ending_on_sigterm(),
        client.connected(server, runs) as orchestrator,
        start(orchestrator) as shown,
    ):
        tell(shown.url if token_file is not None else shown.login_url)
        try:
            while True:
                shown.check()
                time.sleep(1.0)
        except KeyboardInterrupt:
            note("stopping")


def page(
    place: str, token_file: Path | None, names: list[str] | None
) -> Callable[[Optimization], AbstractContextManager[WebServer]]:
    """What serves the page of an orchestrator for as long as a block. Its place is taken already.

    Raises:
        BadInput: its libraries are not installed, or the place or the token is none; says what to do.
    """
    require_libraries()
    from orchestrator.web import serving

    access = serving.access_of(token_file, tuple(names or ()))
    bound = serving.listening(place, is_guarded=token_file is not None)
    return lambda orchestrator: serving.WebServer(orchestrator, bound, access)


def require_libraries() -> None:
    """Raises BadInput where the page's libraries are not installed; says what to do."""
    if missing := [name for name in LIBRARIES if importlib.util.find_spec(name) is None]:
        raise BadInput(f"the live page needs {', '.join(missing)}: pip install 'warpsmith[web]'")
