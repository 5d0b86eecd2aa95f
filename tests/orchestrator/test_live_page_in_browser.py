"""The live page in a real Chromium: events soon on the screen, no error, nothing found by axe-core, no mouse needed."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import pytest

from orchestrator import testing
from orchestrator.commands import client
from orchestrator.web import serving, submission
from orchestrator.web.testing import ToldOrchestrator, told_orchestrator, web_page
from warpsmith.v1 import task_pb2

pytestmark = pytest.mark.web
SCREEN_MILLISECONDS = 300.0
"""From an event to the page: half of the events may take so long at most, also where others have the processors."""
EVENTS = 30
EXPECTED = ("422", "401")
"""Answers that a test asks for; Chromium says each."""
MODULE = "class Model: ...\ndef get_inputs(): ..."
DASHBOARD = "http://dashboard.example/"
ARRIVALS = """
() => {
  window.arrived = {};
  const look = () => {
    for (const each of document.querySelectorAll('[id^="newest-"]')) window.arrived[each.id] ??= Date.now();
  };
  new MutationObserver(look).observe(document.getElementById("part-now"), { childList: true, subtree: true });
}
"""


@pytest.fixture(scope="module")
def told() -> Iterator[ToldOrchestrator]:
    with told_orchestrator() as made:
        yield made


@pytest.fixture(scope="module")
def shown(told: ToldOrchestrator) -> Iterator[serving.WebServer]:
    with web_page(told.orchestrator) as made:
        yield made


@pytest.fixture
def options() -> dict[str, Any]:
    """Of the browser's context."""
    return {}


@pytest.fixture
def page(browser: Any, shown: serving.WebServer, options: dict[str, Any]) -> Iterator[Any]:
    """A page that has logged in; fails in the end where it said anything, or asked another place for something."""
    said: list[str] = []
    context = browser.new_context(**options)
    made = context.new_page()
    made.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    made.on("pageerror", lambda error: said.append(f"error: {error}"))
    made.on(
        "request",
        lambda request: said.append(request.url) if not request.url.startswith((shown.url, DASHBOARD)) else None,
    )
    made.goto(shown.login_url)
    assert made.url == f"{shown.url}/"
    yield made
    context.close()
    assert [each for each in said if not each.startswith("data:") and not any(code in each for code in EXPECTED)] == []


def ended(told: ToldOrchestrator, name: str = "softmax", trials: int = 6) -> str:
    """The identifier of a run that has ended."""
    run = told.begin(name)
    for number in range(trials):
        run.trial(parent=number // 2)
    run.end()
    client.follow(told.orchestrator, run.run.id, lambda _: None)
    return run.run.id


def press_to(page: Any, selector: str) -> None:
    """Goes there with the Tab key alone."""
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("selector => document.activeElement.matches(selector)", selector):
            return
    pytest.fail(f"{selector} cannot be reached")


def test_an_event_is_on_the_screen_soon(
    page: Any, shown: serving.WebServer, told: ToldOrchestrator, capsys: pytest.CaptureFixture[str]
) -> None:
    run = told.begin()
    page.goto(f"{shown.url}/runs/{run.run.id}")
    page.evaluate(ARRIVALS)
    took = []
    for _ in range(EVENTS):
        number = run.trial()
        page.wait_for_selector(f"#newest-{number}")
        happened = run.story.events[-1].at * 1000
        took.append(page.evaluate(f"window.arrived['newest-{number}']") - happened)
    run.end()
    page.locator("#part-said", has_text="has ended").wait_for()
    with capsys.disabled():
        print(f"event to screen: median {statistics.median(took):.0f} ms, longest {max(took):.0f} ms of {EVENTS}")
    assert statistics.median(took) < SCREEN_MILLISECONDS, took


def test_a_run_grows_and_keeps_what_the_reader_has_opened_and_focused(
    page: Any, shown: serving.WebServer, told: ToldOrchestrator
) -> None:
    run = told.begin()
    run.trial()
    page.goto(f"{shown.url}/runs/{run.run.id}")
    page.wait_for_selector("#t1")
    page.click("#t1 > details > summary")
    page.focus("#t1 > details > summary")
    for _ in range(12):
        run.trial(parent=1)
    page.wait_for_selector("#t13")
    assert page.evaluate("document.querySelector('#t1 > details').open")
    assert page.evaluate("document.activeElement.closest('li').id") == "t1"
    page.focus("#stop")
    run.end()
    page.wait_for_selector("#answer:focus")  # its button is gone: on with what came of it
    assert page.query_selector("#stop") is None


def test_the_answer_is_said_and_not_each_trial(page: Any, shown: serving.WebServer, told: ToldOrchestrator) -> None:
    run = told.begin()
    page.goto(f"{shown.url}/runs/{run.run.id}")
    page.evaluate(
        "() => { window.said = []; const said = document.getElementById('part-said'); new MutationObserver(() => "
        "window.said.push(said.textContent)).observe(said, {childList: true, subtree: true, characterData: true}); }"
    )
    for _ in range(20):
        number = run.trial()
        page.wait_for_selector(f"#newest-{number}")
    run.end()
    page.locator("#part-said", has_text="has ended").wait_for()
    assert len(page.evaluate("window.said")) <= 8
    live = page.evaluate("[...document.querySelectorAll('[aria-live], [role=status]')].map(each => each.id)")
    assert live == ["part-said", "part-connection"]


def test_the_list_grows_and_keeps_marks_and_focus(page: Any, told: ToldOrchestrator) -> None:
    first = ended(told)
    box = f"#run-{first} input"
    page.wait_for_selector(box)
    page.check(box)
    page.focus(box)
    run = told.begin("newer")
    page.wait_for_selector(f"#waits-{run.run.id}")
    page.wait_for_selector(f"#run-{run.run.id}")
    assert page.is_checked(box)
    assert page.evaluate("document.activeElement.closest('tr').id") == f"run-{first}"
    run.end()
    page.wait_for_selector(f"#waits-{run.run.id}", state="detached")
    page.locator(f"#run-{run.run.id}", has_text="NO_FASTER").wait_for()


def test_a_module_is_submitted_and_stopped_with_the_keyboard_alone(
    page: Any, told: ToldOrchestrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def inspected(task: task_pb2.Task) -> task_pb2.Task:
        known = testing.task()
        return submission.intake.described(task, known.inputs, known.outputs, [])

    monkeypatch.setattr(submission.intake, "inspect", inspected)
    press_to(page, "a[href='/submit']")
    page.keyboard.press("Enter")
    page.wait_for_url("**/submit")
    press_to(page, "#text")
    page.keyboard.insert_text("x = 1")
    press_to(page, "button[type=submit]")
    page.keyboard.press("Enter")
    page.wait_for_selector("#error:focus")
    assert "defines no class Model" in page.text_content("#error")
    press_to(page, "#text")
    page.keyboard.press("Control+A")
    page.keyboard.insert_text(MODULE)
    press_to(page, "button[type=submit]")
    page.keyboard.press("Enter")
    run = told.next()
    page.wait_for_url(f"**/runs/{run.run.id}")
    press_to(page, "#stop")
    page.keyboard.press("Enter")
    page.wait_for_selector("#stop", state="detached")
    assert run.was_asked_to_stop.is_set()
    page.locator("#part-said", has_text="stopped by the user").wait_for()


def test_two_runs_are_compared(page: Any, told: ToldOrchestrator) -> None:
    one, other = ended(told, "one"), ended(told, "other", trials=2)
    page.reload()
    page.check(f"#run-{one} input")
    page.check(f"#run-{other} input")
    page.click("button[type=submit]")
    page.wait_for_selector("tr.differs")
    row = page.locator("tr.differs", has_text="Module").first
    assert row.locator("th, td").all_inner_texts() == ["Module", "other", "one", "differs"]
    assert page.locator("h2", has_text="a: other").count() == 1
    page.fill("#a", one)
    page.keyboard.press("Enter")
    page.fill("#b", "nothing")
    page.keyboard.press("Enter")
    assert "no run" in page.text_content(".error")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1100, 400])
@pytest.mark.parametrize(
    "options", [{"bypass_csp": True}]
)  # the page's policy lets axe's script in no more than others
def test_nothing_is_found_by_axe(
    page: Any, shown: serving.WebServer, told: ToldOrchestrator, scheme: str, width: int
) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 800})
    run, past = told.begin(), ended(told)
    for _ in range(3):
        run.trial()
    paths = ("/", f"/runs/{run.run.id}", f"/runs/{past}", f"/compare?a={past}&b={run.run.id}", "/submit", "/nothing")
    for path in paths:
        page.goto(f"{shown.url}{path}") if path != "/nothing" else page.goto(f"{shown.url}/compare?a=none&b=none")
        page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        found = Axe().run(page).response["violations"]
        assert [(path, each["id"], each["impact"], each["nodes"][0]["html"]) for each in found] == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{path} is wider than the screen"
    run.end()


@pytest.mark.parametrize("options", [{"java_script_enabled": False}])
def test_without_scripts_the_page_shows_the_present_state_and_says_so(
    page: Any, shown: serving.WebServer, told: ToldOrchestrator
) -> None:
    run = told.begin()
    page.goto(f"{shown.url}/runs/{run.run.id}")
    assert "reload it" in page.locator("noscript").inner_text()
    with page.expect_navigation():  # or it is under way still when the page is loaded again
        page.click("#stop")
    assert run.was_asked_to_stop.wait(10)
    client.follow(told.orchestrator, run.run.id, lambda _: None)
    page.reload()
    assert page.locator("#stop").count() == 0
    assert "CANCELLED" in page.locator("#answer").inner_text()


def test_a_link_on_a_dashboard_of_another_site_opens_the_run(
    page: Any, shown: serving.WebServer, told: ToldOrchestrator
) -> None:
    past = ended(told)
    page.route(DASHBOARD, lambda route: route.fulfill(body=f"<a href='{shown.url}/runs/{past}'>run</a>"))
    page.goto(DASHBOARD)
    page.click("a")
    page.wait_for_selector("#answer")
    assert page.url == f"{shown.url}/runs/{past}"


def test_a_page_whose_server_is_gone_says_so(browser: Any, told: ToldOrchestrator) -> None:
    context = browser.new_context()
    page = context.new_page()
    with web_page(told.orchestrator) as going:
        page.goto(going.login_url)
    page.locator("#part-connection", has_text="connection is lost").wait_for()
    context.close()
