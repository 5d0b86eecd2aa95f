"""`make docs-check` names a dead link, a missing anchor, a request to another host, and what only one form reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def check(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("docs_check")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Two pages that are good."""
    (tmp_path / "rooms").mkdir()
    (tmp_path / "index.html").write_text('<a href="rooms/a.html#door">a</a><a href="https://example.org">b</a>')
    (tmp_path / "rooms" / "a.html").write_text('<h2 id="door">x</h2><a href="../index.html">i</a><a href="#door">d</a>')
    return tmp_path


def test_good_pages_are_not_named(check: ModuleType, site: Path) -> None:
    assert not list(check.of_site(site))


@pytest.mark.parametrize(
    ("added", "said"),
    [
        ('<a href="rooms/b.html">b</a>', "index.html: rooms/b.html is not there"),
        ('<a href="rooms/a.html#window">a</a>', "index.html: rooms/a.html#window has no such anchor"),
        ('<img src="gone.png">', "index.html: gone.png is not there"),
        ('<script src="https://cdn.example/x.js">', "index.html: asks another host for https://cdn.example/x.js"),
        ('<link rel="stylesheet" href="//fonts.example/x">', "index.html: asks another host for //fonts.example/x"),
        ("<style>@import 'https://a.example/x';</style>", "index.html: asks another host for https://a.example/x"),
        ('<p style="background: url(https://a.example/y)">', "index.html: asks another host for https://a.example/y"),
    ],
)
def test_a_fault_of_the_site_is_named(check: ModuleType, site: Path, added: str, said: str) -> None:
    page = site / "index.html"
    page.write_text(page.read_text() + added)
    assert list(check.of_site(site)) == [said]


def test_a_style_sheet_that_asks_another_host_is_named(check: ModuleType, site: Path) -> None:
    (site / "a.css").write_text("@font-face{src:url(https://fonts.example/f.woff2)}")
    assert list(check.of_site(site)) == ["a.css: asks another host for https://fonts.example/f.woff2"]


def test_a_site_without_pages_is_not_good(check: ModuleType, tmp_path: Path) -> None:
    assert list(check.of_site(tmp_path))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("See [b](b.md#two-words) and [c](#c), `[d](d.md)`.\n\n# C\n", ""),
        ("```\n[d](d.md)\n```\n", ""),
        ("See [d](d.md).", "docs/a.md: d.md is not there"),
        ("See [b](b.md#three).", "docs/a.md: b.md#three has no such anchor"),
        ("Things:\n- one\n", "docs/a.md: an empty line is missing before: - one"),
        ("Things:\n| a |\n|---|\n", "docs/a.md: an empty line is missing before: | a |"),
        ("- one\n  - inner\n", "docs/a.md: an inner list has to begin four columns in:   - inner"),
    ],
)
def test_a_fault_of_a_source_is_named(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("docs").mkdir()
    Path("docs/a.md").write_text(text)
    Path("docs/b.md").write_text("# `Two` words\n\n## It's\n\n## It's\n")
    assert list(check.of_sources([Path("docs/a.md")])) == ([said] if said else [])
    assert check.anchors(Path("docs/b.md")) == {"two-words", "its", "its-1"}
