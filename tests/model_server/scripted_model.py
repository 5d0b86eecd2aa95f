"""A model server that says what a test tells it to: real sockets, no model.

The one idea: a reply is a function of the request that writes bytes, so that a test can be as wrong as the wire
allows. The script's replies are used in order, the last one again and again.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

NAME = "scripted"


class HungUp(Exception):
    """Raised by a reply to break the connection."""


@dataclass(frozen=True)
class Asked:
    """A request as the server saw it."""

    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]

    @property
    def open_options(self) -> list[int]:
        """Options that the schema of the request allows."""
        listed = self.body["response_format"]["json_schema"]["schema"]["properties"]["hypotheses"]
        options: list[int] = listed["items"]["properties"]["option"]["enum"]
        return options

    @property
    def prompt(self) -> str:
        """All messages as one text."""
        return "\n".join(message["content"] for message in self.body["messages"])


@dataclass(frozen=True)
class Reply:
    """What the server sends; a body in parts is sent part by part, as it is made."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    parts: Iterator[bytes] | Sequence[bytes] = ()


Says = Callable[[Asked], Reply]


class ScriptedModel:
    """The server, from `__enter__` to `__exit__`; `asked` holds the questions that came (not the listings)."""

    def __init__(self, *script: Says, context_tokens: int | None = None, key: str = "", names: Sequence[str] = (NAME,)):
        self.script = list(script)
        self.asked: list[Asked] = []
        self._context_tokens, self._key, self._names = context_tokens, key, names
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                server._list(self)

            def do_POST(self) -> None:
                server._answer(self)

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    @property
    def url(self) -> str:
        """Base address of the API."""
        return f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    def __enter__(self) -> ScriptedModel:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def _list(self, handler: BaseHTTPRequestHandler) -> None:
        if self._key and handler.headers.get("authorization") != f"Bearer {self._key}":
            return self._send(handler, status(401, "no such key")(None))
        if handler.path != "/v1/models":
            return self._send(handler, Reply(404, parts=[b'{"detail":"Not Found"}']))
        cards = [{"id": name, "object": "model", "max_model_len": self._context_tokens} for name in self._names]
        return self._send(handler, Reply(parts=[json.dumps({"object": "list", "data": cards}).encode()]))

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["content-length"])))
        asked = Asked(handler.path, {name.lower(): value for name, value in handler.headers.items()}, body)
        with self._lock:
            self.asked.append(asked)
            says = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        self._send(handler, says(asked))

    def _send(self, handler: BaseHTTPRequestHandler, reply: Reply) -> None:
        handler.close_connection = True
        with contextlib.suppress(OSError):
            try:
                handler.send_response(reply.status)
                for name, value in reply.headers.items():
                    handler.send_header(name, value)
                handler.send_header("connection", "close")
                handler.end_headers()
                for part in reply.parts:
                    handler.wfile.write(part)
                    handler.wfile.flush()
            except HungUp:
                handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                handler.connection.close()


def status(code: int, message: str, **headers: str) -> Callable[[Asked | None], Reply]:
    """An error as vLLM words it."""
    body = {"error": {"message": message, "type": "error", "code": code}}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda _: Reply(code, {"content-type": "application/json", **named}, [json.dumps(body).encode()])


def event(text: str | None, finish: str | None = None) -> bytes:
    """One server-sent event of a streamed answer."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return f"data: {json.dumps({'id': 'x', 'object': 'chat.completion.chunk', 'choices': [choice]})}\n\n".encode()


USAGE = b'data: {"id":"x","choices":[],"usage":{"prompt_tokens":100,"completion_tokens":20,"total_tokens":120}}\n\n'
DONE = b"data: [DONE]\n\n"
STREAM = {"content-type": "text/event-stream"}


def streamed(text: str, finish: str | None = "stop", size: int = 4096) -> Reply:
    """A text as a stream of events, `size` characters each."""
    pieces = [text[start : start + size] for start in range(0, len(text), size)] or [""]
    return Reply(200, STREAM, [*map(event, pieces), event(None, finish), USAGE, DONE])
