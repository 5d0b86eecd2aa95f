"""Routes of the live page: what is asked for is asked of the orchestrator, and told in HTML.

The one idea: a page is whole without any script, and its parts are told again, under their names, while it is open.
What changes something is a form that leads to a page. Who may ask is `guard`'s business.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

import warpsmith
from orchestrator.commands import client
from orchestrator.commands.client import Optimization
from orchestrator.pages import rendering, report_page
from orchestrator.tasks import intake
from orchestrator.web import comparison, overview, run_parts, submission
from orchestrator.web.guard import LOGIN, Access, Guard, TooLarge, ours, too_large
from orchestrator.web.hub import Full, Hub, Watcher
from orchestrator.web.run_channel import RunFeed
from orchestrator.web.submission import Busy, Desk, Form
from warpsmith import plugins, printable
from warpsmith.errors import BadInput, LimitReached, NotFound, WarpsmithError
from warpsmith.v1 import optimization_service_pb2 as messages
from warpsmith.v1 import run_pb2, trial_pb2

STATIC = Path(__file__).parent / "static"
HEARTBEAT_SECONDS = 15.0
SEND_SECONDS = 20.0
"""Longest that a watcher may take nothing of what it is sent."""
KNOWN = 30
"""Runs that the form of a comparison proposes."""
MOST_FIELDS = 20


def make(orchestrator: Optimization, access: Access) -> Guard:
    """The whole application, guarded."""
    site = Site(orchestrator, access)
    routes = [
        Route("/", site.runs),
        Route("/events", site.runs_events),
        Route("/runs/{run_id}", site.run),
        Route("/runs/{run_id}/events", site.run_events),
        Route("/runs/{run_id}/cancel", site.cancel, methods=["POST"]),
        Route("/runs/{run_id}/resume", site.resume, methods=["POST"]),
        Route("/compare", site.compare),
        Route("/submit", site.submit_form, methods=["GET"]),
        Route("/submit", site.submit, methods=["POST"]),
        Route(LOGIN, site.login, methods=["GET", "POST"]),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    failures: dict[Any, Callable[..., Any]] = {
        NotFound: partial(_failed, 404, "Not found"),
        BadInput: partial(_failed, 422, "Refused"),
        LimitReached: partial(_failed, 429, "Not now"),
        WarpsmithError: partial(_failed, 503, "The orchestrator cannot answer"),
        HTTPException: _refused,
        TooLarge: lambda *_: too_large(),
    }
    inner = Starlette(routes=routes, exception_handlers=failures)
    return Guard(inner, access, _headers(), lambda to, again: _login_page(to, again=again), site.hub.close)


def _headers() -> dict[str, str]:
    """Of every answer: no script but ours, no frame around us, nothing kept, nothing told to other places."""
    style = (rendering.TEMPLATES / rendering.STYLESHEET).read_bytes()
    digest = base64.b64encode(hashlib.sha256(style).digest()).decode()
    return {
        "content-security-policy": f"default-src 'none'; script-src 'self'; style-src 'self' 'sha256-{digest}'; "
        "img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
        "referrer-policy": "same-origin",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "no-store",
    }


class Site:
    """The routes, and what they share."""

    def __init__(self, orchestrator: Optimization, access: Access) -> None:
        self._orchestrator, self._access = orchestrator, access
        self._desk = Desk()
        self.hub = Hub()

    # ---- pages

    def runs(self, request: Request) -> Response:
        """All runs, what waits and what devices do."""
        before = _seconds(request.query_params.get("before", ""))
        runs = overview.runs_of(self._orchestrator, before)
        parts = overview.parts(runs, overview.queue_of(self._orchestrator), before)
        return _page("live/overview.html", here="/", parts=parts, events="" if before else "/events")

    def run(self, request: Request) -> Response:
        """One run: its report, and what is live around it."""
        run, trials = self._read(request.path_params["run_id"])
        parts = run_parts.whole(run, trials)
        events = "" if run_parts.has_ended(run) else f"/runs/{quote(run.id, safe='')}/events"
        values: dict[str, Any] = report_page.values(run, trials, [])
        return _page("live/run.html", **values, sections=report_page.SECTIONS, parts=parts, events=events)

    def compare(self, request: Request) -> Response:
        """Two runs side by side."""
        asked = request.query_params
        marked = [*asked.getlist("run"), "", ""]
        chosen = {"a": asked.get("a", marked[0]).strip()[:40], "b": asked.get("b", marked[1]).strip()[:40]}
        shown, error = "", ""
        if len(asked.getlist("run")) not in (0, 2):
            error = "Mark two runs to compare them."
        elif all(chosen.values()):
            try:
                sides = [comparison.Side(*self._read(each)) for each in chosen.values()]
                shown = comparison.html(*sides)
            except NotFound as missing:
                error = printable.line(str(missing))
        elif any(chosen.values()):
            error = "Name two runs."
        known = [
            {"id": printable.line(run.id, 40), "name": rendering.words(run.task.name, 60)}
            for run in overview.runs_of(self._orchestrator, limit=KNOWN)
        ]
        return _page("live/compare.html", here="/compare", chosen=chosen, known=known, error=error, comparison=shown)

    # ---- what changes something

    def cancel(self, request: Request) -> Response:
        """Asks a run to stop, and leads back to it."""
        run = client.cancel(self._orchestrator, request.path_params["run_id"])
        return RedirectResponse(f"/runs/{quote(run.id, safe='')}", status_code=303)

    def resume(self, request: Request) -> Response:
        """Goes on with a run that was left, and leads back to it."""
        run = client.resume(self._orchestrator, request.path_params["run_id"])
        return RedirectResponse(f"/runs/{quote(run.id, safe='')}", status_code=303)

    def submit_form(self, _: Request) -> Response:
        """The empty form."""
        return _form(Form(), "", 200)

    async def submit(self, request: Request) -> Response:
        """Starts a run of a module, and leads to it; what is refused is said beside what was filled in."""
        async with request.form(max_files=1, max_fields=MOST_FIELDS, max_part_size=submission.TEXT_BYTES) as fields:
            texts = {name: value for name, value in fields.items() if isinstance(value, str)}
            file = fields.get("file")
            content, name = b"", ""
            if isinstance(file, UploadFile) and file.filename:
                content, name = await file.read(), file.filename
        try:
            form = Form.of(texts, content.decode(), submission.file_name(name) if name else "")
        except UnicodeDecodeError:
            return _form(Form.of(texts, "", ""), "File: is not UTF-8", 422)
        try:
            run = await run_in_threadpool(self._begin, form)
        except BadInput as error:
            return await run_in_threadpool(_form, form, printable.line(str(error)), 422)
        except Busy:
            return await run_in_threadpool(
                _form, form, "Other modules are being looked at: try again in a minute.", 503
            )
        return RedirectResponse(f"/runs/{quote(run.id, safe='')}", status_code=303)

    def _begin(self, form: Form) -> run_pb2.Run:
        budget = submission.budget_of(form)
        if form.search:
            plugins.require("search", form.search)
        task = self._desk.task(form)
        return client.create(self._orchestrator, task, budget, form.search, fresh=form.fresh)

    async def login(self, request: Request) -> Response:
        """Takes the token, of the address that was printed or of the form, for a cookie."""
        if request.method == "GET":
            token, to = (request.query_params.get(name, "") for name in ("token", "to"))
        else:
            async with request.form(max_files=0, max_fields=2, max_part_size=1000) as fields:
                token, to = (str(fields.get(name, "")) for name in ("token", "to"))
        if self._access.is_token(token):
            return self._access.logged_in(request, to)
        return HTMLResponse(_login_page(to, is_wrong=bool(token)), status_code=401)

    # ---- news

    async def runs_events(self, _: Request) -> Response:
        """News of all runs."""
        return Events(self.hub, "runs", partial(overview.feed, self._orchestrator))

    async def run_events(self, request: Request) -> Response:
        """News of one run."""
        asked = messages.GetRunRequest(run_id=request.path_params["run_id"])
        found = await run_in_threadpool(lambda: self._orchestrator.GetRun(asked, timeout=30.0).run.id)
        return Events(self.hub, f"run {found}", RunFeed(self._orchestrator, found))

    def _read(self, run_id: str) -> tuple[run_pb2.Run, Sequence[trial_pb2.Trial]]:
        run = self._orchestrator.GetRun(messages.GetRunRequest(run_id=run_id), timeout=30.0).run
        return run, list(client.trials(self._orchestrator, run.id))


class Events(Response):
    """Server-sent events of one channel, until it ends, or its reader goes or takes nothing for too long."""

    def __init__(self, hub: Hub, name: str, feed: Any) -> None:
        super().__init__(media_type="text/event-stream")
        self._hub, self._name, self._feed = hub, name, feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._hub.watching(self._name, self._feed) as watcher:
                await self._tell(watcher, scope, receive, send)
        except Full:
            await Response("too many watch", status_code=503)(scope, receive, send)

    async def _tell(self, watcher: Watcher, _: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        gone = asyncio.create_task(_until_gone(receive))
        news = asyncio.create_task(watcher.take())
        text, is_last = b": \n\n", False
        try:
            while not gone.done():
                body = {"type": "http.response.body", "body": text, "more_body": not is_last}
                await asyncio.wait_for(send(body), SEND_SECONDS)
                if is_last:
                    return
                await asyncio.wait({gone, news}, timeout=HEARTBEAT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                text = b": \n\n"
                if news.done():
                    text, is_last = news.result()
                    news = asyncio.create_task(watcher.take())
        except TimeoutError:
            return  # uvicorn closes what has no end
        finally:
            gone.cancel()
            news.cancel()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _page(template: str, status: int = 200, **values: Any) -> Response:
    filled = {"here": "", "events": "", "parts": {}, "version": warpsmith.__version__, "now": time.strftime("%H:%M:%S")}
    return HTMLResponse(rendering.page(template, **(filled | values)), status_code=status)


def _form(form: Form, error: str, status: int) -> Response:
    return _page(
        "live/submit.html",
        status,
        here="/submit",
        form=form,
        error=error,
        targets=[*intake.TARGETS],
        precisions=[*intake.PRECISIONS],
        strategies=["", *plugins.names("search")],
        most_kilobytes=submission.TEXT_BYTES >> 10,
    )


def _login_page(to: str, *, is_wrong: bool = False, again: bool = False) -> str:
    return rendering.page("live/login.html", to=ours(to), is_wrong=is_wrong, again=again)


def _failed(status: int, heading: str, _: Request, error: Exception) -> Response:
    return _page("live/message.html", status, heading=heading, text=printable.line(str(error)) or heading)


def _refused(_: Request, error: HTTPException) -> Response:
    is_missing = error.status_code == 404
    heading, text = ("Not found", "There is no such page.") if is_missing else ("Refused", printable.line(error.detail))
    return _page("live/message.html", error.status_code, heading=heading, text=text)


def _seconds(text: str) -> float:
    """A time of an address; 0 for none."""
    try:
        found = float(text or 0)
    except ValueError:
        return 0.0
    return found if 0 < found < 1e12 else 0.0
