"""The live page without a browser: who may ask, what is refused, what is shown, that no watcher delays another."""

from __future__ import annotations

import asyncio
import contextlib
import html as html_module
import json
import re
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from orchestrator import testing
from orchestrator.commands import client
from orchestrator.web import guard, overview, run_parts, serving, submission
from orchestrator.web.guard import Access, ours
from orchestrator.web.testing import ToldOrchestrator, told_orchestrator, web_page
from warpsmith.v1 import optimization_service_pb2 as messages
from warpsmith.v1 import run_pb2, task_pb2, trial_pb2

HOSTILE = "</script></title><img src=x onerror=alert(1)>\x1b[2K\u202e\"'{{ 7 * 7 }}"
MODULE = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return torch.softmax(x, dim=-1)

def get_inputs():
    return [torch.rand(4, 8)]
"""
PAGES = (
    "/login%3Fa",
    "/login/",
    "//login",
    "/",
    "/events",
    "/compare",
    "/submit",
    "/runs/last",
    "/runs/last/events",
    "/static/live.js",
    "/nothing",
)


@pytest.fixture(scope="module")
def told() -> Iterator[ToldOrchestrator]:
    with told_orchestrator() as made:
        yield made


@pytest.fixture(scope="module")
def access() -> Access:
    return Access.new()


@pytest.fixture(scope="module")
def page(told: ToldOrchestrator, access: Access) -> Iterator[serving.WebServer]:
    with web_page(told.orchestrator, access) as shown:
        yield shown


@pytest.fixture
def anyone(page: serving.WebServer) -> Iterator[httpx.Client]:
    """Who has no token."""
    with httpx.Client(base_url=page.url, timeout=30) as made:
        yield made


@pytest.fixture
def owner(page: serving.WebServer, access: Access) -> Iterator[httpx.Client]:
    """A program with the token."""
    with httpx.Client(base_url=page.url, timeout=60, headers={"Authorization": f"Bearer {access.token}"}) as made:
        yield made


@pytest.fixture
def browser(anyone: httpx.Client, page: serving.WebServer) -> httpx.Client:
    """A browser that has shown the token once."""
    answer = anyone.get(page.login_url)
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    (set_cookie,) = answer.headers.get_list("set-cookie")
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= set(set_cookie.split("; "))
    return anyone


# ---- who may ask -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PAGES)
@pytest.mark.parametrize("shown", [{}, {"Authorization": "Bearer wrong"}, {"Cookie": "warpsmith_00000000=1"}])
def test_nothing_is_told_without_the_token(anyone: httpx.Client, path: str, shown: dict[str, str]) -> None:
    answer = anyone.get(path, headers=shown)
    assert answer.status_code == 401
    assert "runs" not in answer.text.replace(ours(path), "").lower()


def test_the_token_or_the_cookie_made_of_it_opens_the_page(
    owner: httpx.Client, browser: httpx.Client, access: Access
) -> None:
    assert owner.get("/").status_code == browser.get("/").status_code == 200
    assert access.token not in "".join(browser.cookies.values())
    assert access.token not in browser.get("/").text


@pytest.mark.parametrize("given", ["", "wrong", "\u00e9", "x" * 5000])
def test_a_wrong_token_is_refused(anyone: httpx.Client, given: str) -> None:
    answer = anyone.get("/login", params={"token": given})
    assert answer.status_code == 401
    assert "set-cookie" not in answer.headers


def test_a_link_of_another_site_is_led_on_once_and_only_to_this_page(
    anyone: httpx.Client, page: serving.WebServer
) -> None:
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    for path, leads_to in (
        ("/runs/last", "/runs/last"),
        ("//evil.example/%22%3E%3Cimg%20src=x%3E", "/evil.example/%22%3E%3Cimg%20src%3Dx%3E"),
        ("/%5Cevil.example", "/evil.example"),
    ):
        answer = anyone.get(f"{page.url}{path}", headers=link)
        assert answer.status_code == 401
        assert f'content="0; url={leads_to}"' in answer.text
    for site in ("same-origin", "none"):
        assert "refresh" not in anyone.get("/runs/last", headers=link | {"Sec-Fetch-Site": site}).text


def test_the_token_can_be_typed_in(page: serving.WebServer, anyone: httpx.Client, access: Access) -> None:
    form = {"data": {"token": access.token}, "headers": {"Origin": page.url, "Sec-Fetch-Site": "same-origin"}}
    assert anyone.post("/login", **form).status_code == 303  # type: ignore[arg-type]
    assert anyone.get("/").status_code == 200


def test_who_has_shown_the_token_comes_to_the_page_that_was_asked_for(
    page: serving.WebServer, anyone: httpx.Client, access: Access
) -> None:
    assert 'name="to" value="/runs/last"' in anyone.get("/runs/last").text
    for to, leads_to in (
        ("/runs/last", "/runs/last"),
        ("//evil.example/x", "/evil.example/x"),
        ("http://a", "/http%3A//a"),
    ):
        assert (
            f'name="to" value="{leads_to}"'
            in anyone.post("/login", data={"token": "wrong", "to": to}, headers={"Origin": page.url}).text
        )
        given = {"token": access.token, "to": to}
        typed = anyone.post("/login", data=given, headers={"Origin": page.url})
        for answer in (typed, anyone.get("/login", params=given)):
            assert (answer.status_code, answer.headers["location"]) == (303, leads_to)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8470", "127.0.0.1.evil.example", "", "[::1", "169.254.1.1"]
)
def test_a_name_that_is_not_the_pages_is_refused(owner: httpx.Client, host: str) -> None:
    assert owner.get("/", headers={"Host": host}).status_code in (400, 421)


@pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1", "[::1]:80"])
def test_names_of_loopback_are_the_pages(owner: httpx.Client, host: str) -> None:
    assert owner.get("/submit", headers={"Host": host}).status_code == 200


def test_behind_a_proxy_the_cookie_is_for_tls_alone(told: ToldOrchestrator) -> None:
    access = Access("t" * 40, ("warpsmith.example",))
    with web_page(told.orchestrator, access) as shown:
        answer = httpx.get(shown.login_url, headers={"Host": "warpsmith.example"})
        assert "Secure" in answer.headers["set-cookie"]
        assert httpx.get(shown.login_url, headers={"Host": "other.example"}).status_code == 421


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "none"},
        {"Sec-Fetch-Site": "same-origin", "Origin": "http://evil.example"},
    ],
)
@pytest.mark.parametrize("path", ["/submit", "/runs/last/cancel", "/runs/last/resume"])
def test_a_form_of_another_page_is_refused(browser: httpx.Client, path: str, said: dict[str, str]) -> None:
    assert browser.post(path, headers=said, data={"text": MODULE}).status_code == 403


def test_every_answer_says_what_a_browser_may_do(anyone: httpx.Client, owner: httpx.Client) -> None:
    for answer in (anyone.get("/"), owner.get("/"), owner.get("/static/live.js"), owner.get("/nothing")):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"


def test_no_page_has_a_script_or_a_handler_in_itself(owner: httpx.Client) -> None:
    for path in ("/", "/compare", "/submit", "/nothing"):
        text = owner.get(path).text
        assert re.findall(r"<script[^>]*>[^<]*</script>", text) == ['<script src="/static/live.js" defer></script>']
        assert not re.search(r"<[^>]+\s(on\w+|style)=", text)


@pytest.mark.parametrize("path", ["/static/../web_command.py", "/static/%2e%2e/guard.py", "/static//etc/passwd"])
def test_no_file_beside_the_pages_own_is_served(owner: httpx.Client, path: str) -> None:
    assert owner.get(path).status_code == 404


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "TRACE"])
def test_other_methods_change_nothing(owner: httpx.Client, method: str) -> None:
    assert owner.request(method, "/").status_code == 405


# ---- what is shown ---------------------------------------------------------------------------------------


def test_words_of_others_are_shown_as_words(owner: httpx.Client, told: ToldOrchestrator) -> None:
    run = told.begin()
    run.run.task.name = HOSTILE
    run.pattern = [trial_pb2.Trial.FromString(each.SerializeToString()) for each in run.pattern]
    for each in run.pattern:
        each.hypothesis.rationale = each.verdict.detail = each.hypothesis.source = HOSTILE
    run.trial()
    run.end(run_pb2.RUN_STATE_FAILED, HOSTILE)
    client.follow(told.orchestrator, run.run.id, lambda _: None)
    for path in ("/", f"/runs/{run.run.id}", f"/compare?a={run.run.id}&b={run.run.id}"):
        text = owner.get(path).text
        assert "<img" not in text
        assert "\x1b" not in text
        assert html_module.escape("<img src=x")[:6] in text


@pytest.mark.parametrize("words", [HOSTILE, "a" * 5000], ids=["hostile", "long"])
def test_what_is_asked_for_is_shown_as_words(owner: httpx.Client, words: str) -> None:
    for path, values in (("/compare", {"a": words, "b": words}), ("/", {"before": words})):
        answer = owner.get(path, params=values)
        assert answer.status_code == 200
        assert "<img" not in answer.text
        assert len(answer.text) < 100_000
    assert "<img" not in owner.get(f"/runs/{quote(words, safe='')}").text


def test_a_run_that_is_not_there_is_not_found(owner: httpx.Client) -> None:
    for path in ("/runs/nope", "/runs/nope/events", "/runs/%25"):
        assert owner.get(path).status_code == 404
    assert owner.post("/runs/nope/cancel").status_code == 404
    assert "no run" in owner.get("/compare", params={"a": "nope", "b": "nope"}).text


def test_runs_are_shown_in_pages(owner: httpx.Client, told: ToldOrchestrator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "PAGE", 2)
    runs = [told.begin(f"module_{number}") for number in range(3)]
    for run in runs:
        run.end()
        client.follow(told.orchestrator, run.run.id, lambda _: None)
    first = owner.get("/").text
    assert [f'id="run-{run.run.id}"' in first for run in runs] == [False, True, True]
    older = re.search(r'href="(/\?before=[^"]+)"', first)
    assert older is not None
    second = owner.get(older[1]).text
    assert f'id="run-{runs[0].run.id}"' in second
    assert "data-events" not in second, "only the newest page grows"


def test_what_waits_and_what_devices_do_is_told(told: ToldOrchestrator, owner: httpx.Client) -> None:
    begun = [told.begin(f"module_{number}") for number in range(4)]
    waiting = [client.create(told.orchestrator, testing.task(name), run_pb2.Budget(wall_seconds=5)).id for name in "xy"]
    text = owner.get("/").text
    assert [f"{place} in the queue" in text for place in (1, 2, 3)] == [True, True, False]
    assert "Measurements that wait" in text
    for each in waiting:
        owner.post(f"/runs/{each}/cancel")
    for run in begun:
        run.end()
    for each in waiting:
        assert client.follow(told.orchestrator, each, lambda _: None).state == run_pb2.RUN_STATE_CANCELLED


def test_an_earlier_orchestrator_that_tells_no_queue_is_shown_all_the_same(told: ToldOrchestrator) -> None:
    parts = overview.parts(overview.runs_of(told.orchestrator), None)
    assert "does not say what its devices do" in parts["queue"]


def test_a_sentence_is_said_only_when_the_answer_changes(told: ToldOrchestrator) -> None:
    run = run_pb2.Run(state=run_pb2.RUN_STATE_SEARCHING)
    said = [run_parts.said(run, told.pattern[:count]) for count in range(len(told.pattern) + 1)]
    assert len(set(said)) < len(said) / 1.5
    run.state = run_pb2.RUN_STATE_CANCELLED
    assert run_parts.said(run, []).startswith("The run has ended: ")


# ---- modules ---------------------------------------------------------------------------------------------


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "choose a .py file, or paste its text"),
    "no Python": ({"data": {"text": "class"}}, "module.py:1: syntax error"),
    "no class": ({"data": {"text": "x = 1"}}, "module.py: defines no class Model"),
    "another name": ({"data": {"text": "x = 1", "name": "../../etc/passwd"}}, "etc_passwd.py: defines no class"),
    "a name of a file": ({"files": {"file": ("../../x/../evil.py", b"x = 1")}}, "evil.py: defines no class"),
    "no text": ({"files": {"file": ("a.py", b"\xff\xfe")}}, "is not UTF-8"),
    "a target": ({"data": {"text": MODULE, "target": "tpu"}}, "--target tpu: choose one of"),
    "a budget": ({"data": {"text": MODULE, "budget": "soon"}}, "Search time: soon: write a time"),
    "too long": ({"data": {"text": MODULE, "budget": "9999h"}}, "at most 24h"),
    "trials": ({"data": {"text": MODULE, "trials": "-1"}}, "write a whole number"),
    "a strategy": ({"data": {"text": MODULE, "search": "magic"}}, "no search is called"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_a_module_is_refused_with_its_cause(owner: httpx.Client, name: str) -> None:
    given, why = REFUSED[name]
    answer = owner.post("/submit", **given)
    assert answer.status_code == 422
    assert html_module.escape(why) in answer.text
    assert 'role="alert"' in answer.text


def test_what_was_filled_in_stays_filled_in(owner: httpx.Client) -> None:
    text = owner.post("/submit", data={"text": "</textarea><b>", "budget": "7m", "prepared": "1"}).text
    assert "&lt;/textarea&gt;&lt;b&gt;" in text
    assert 'value="7m"' in text
    assert 'name="prepared" value="1" checked' in text


def test_more_than_a_module_is_not_taken(owner: httpx.Client) -> None:
    assert owner.post("/submit", data={"text": "x" * (guard.BODY_BYTES + 1)}).status_code == 413

    def endless() -> Iterator[bytes]:
        for _ in range(2 * guard.BODY_BYTES // 65536):
            yield b"x" * 65536

    kind = {"Content-Type": "application/x-www-form-urlencoded"}
    with contextlib.suppress(httpx.TransportError):  # the server reads no further, which a client may see first
        assert owner.post("/submit", content=endless(), headers=kind).status_code == 413


def test_a_module_becomes_a_run(owner: httpx.Client, told: ToldOrchestrator, monkeypatch: pytest.MonkeyPatch) -> None:
    def inspected(task: task_pb2.Task) -> task_pb2.Task:
        known = testing.task()
        return submission.intake.described(task, known.inputs, known.outputs, [])

    monkeypatch.setattr(submission.intake, "inspect", inspected)
    answer = owner.post(
        "/submit",
        files={"file": ("soft max.py", MODULE.encode())},
        data={"budget": "2m", "target": "cpu", "trials": "9"},
    )
    run = told.next()
    assert (answer.status_code, answer.headers["location"]) == (303, f"/runs/{run.run.id}")
    assert (run.run.task.name, run.run.task.sources[0].content.decode()) == ("soft_max", MODULE)
    assert (run.run.budget.wall_seconds, run.run.budget.trial_count) == (120, 9)
    answer = owner.post(f"/runs/{run.run.id}/cancel")
    assert run.was_asked_to_stop.is_set()
    assert answer.headers["location"] == f"/runs/{run.run.id}"


def test_a_run_that_waits_for_its_user_has_a_button_to_go_on_with_it(access: Access) -> None:
    left = run_pb2.Run(id="left", task=testing.task(), state=run_pb2.RUN_STATE_SEARCHING)

    class Resuming:
        asked: list[str] = []  # noqa: RUF012 (one orchestrator)

        def ResumeRun(self, request: messages.ResumeRunRequest, timeout: float) -> messages.ResumeRunResponse:
            del timeout
            self.asked.append(request.run_id)
            return messages.ResumeRunResponse(run=left)

    assert "resume" not in run_parts.light(left, [])["now"]
    left.awaits_resume = True
    now = run_parts.light(left, [])["now"]
    assert '<form method="post" action="/runs/left/resume">' in now
    assert 'action="/runs/left/cancel"' in now
    orchestrator: Any = Resuming()
    with web_page(orchestrator, access) as shown:
        answer = httpx.post(f"{shown.url}/runs/left/resume", headers={"Authorization": f"Bearer {access.token}"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/runs/left")
    assert orchestrator.asked == ["left"]


def test_only_a_few_modules_wait_to_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    desk, at_work, go_on = submission.Desk(), threading.Event(), threading.Event()

    def slow(task: task_pb2.Task) -> task_pb2.Task:
        at_work.set()
        go_on.wait(20)
        return task

    monkeypatch.setattr(submission.intake, "inspect", slow)
    form = submission.Form(text=MODULE)
    threads = [threading.Thread(target=desk.task, args=(form,)) for _ in range(submission.MOST_WAITING)]
    for thread in threads:
        thread.start()
    assert at_work.wait(10)
    while desk._places._value:  # the last thread is on its way to its place
        threading.Event().wait(0.001)
    with pytest.raises(submission.Busy):
        desk.task(form)
    go_on.set()
    for thread in threads:
        thread.join()
    assert desk.task(form).name == "module"


# ---- news ------------------------------------------------------------------------------------------------


def news(owner: httpx.Client, path: str) -> Iterator[tuple[str, str]]:
    """Names of parts with their HTML, as they come, until the end."""
    with owner.stream("GET", path) as answer:
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        kind = ""
        for line in answer.iter_lines():
            if line.startswith("event: "):
                kind = line.removeprefix("event: ")
            elif line.startswith("data: ") and kind == "end":
                return
            elif line.startswith("data: "):
                part = json.loads(line.removeprefix("data: "))
                yield part["name"], part["html"]


def test_a_run_is_told_as_it_happens_and_in_the_end_whole(owner: httpx.Client, told: ToldOrchestrator) -> None:
    run = told.begin()
    run.state(run_pb2.RUN_STATE_SEARCHING)
    run.trial()
    seen: dict[str, str] = {}
    for name, html in news(owner, f"/runs/{run.run.id}/events"):
        seen[name] = html
        if name == "now" and 'id="newest-1"' in html and not run._count > 1:
            run.trial(parent=1)
        if name == "now" and 'id="newest-2"' in html and 'id="t2"' in seen.get("search", ""):
            run.end()
        if name == "search" and 'id="t2"' in html and 'id="newest-2"' in seen.get("now", ""):
            run.end()
    assert "The run has ended" in seen["said"]
    assert "Stop this run" not in seen["now"]
    assert "NO_FASTER" in seen["answer"]
    whole = owner.get(f"/runs/{run.run.id}").text
    assert seen["search"] in whole
    assert "data-events" not in whole


def test_the_list_of_runs_grows(owner: httpx.Client, told: ToldOrchestrator) -> None:
    run = None
    for name, html in news(owner, "/events"):
        if name == "runs" and run is None:
            run = told.begin("just_begun")
        elif run is not None and name == "runs" and run.run.id in html:
            break
    assert run is not None
    run.end()


def test_fifty_watchers_of_a_run_take_one_stream(told: ToldOrchestrator) -> None:
    asked: list[str] = []

    class Counting:
        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            return getattr(told.orchestrator, name)

    run = told.begin()

    async def watched() -> None:
        async with httpx.AsyncClient(base_url=shown.url, headers=headers, timeout=30, limits=wide) as reader:

            async def one() -> None:
                async with reader.stream("GET", f"/runs/{run.run.id}/events") as answer:
                    async for line in answer.aiter_lines():
                        if "newest-1" in line:
                            return

            readers = [asyncio.create_task(one()) for _ in range(50)]
            while asked.count("GetRun") < 50:
                await asyncio.sleep(0.01)
            run.trial()
            await asyncio.gather(*readers)

    access, wide = Access.new(), httpx.Limits(max_connections=60)
    headers = {"Authorization": f"Bearer {access.token}"}
    with web_page(Counting(), access) as shown:  # type: ignore[arg-type]
        asyncio.run(watched())
    assert asked.count("WatchRun") == 1
    run.end()
