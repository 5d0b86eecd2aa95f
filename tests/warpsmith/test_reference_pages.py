"""The reference says what the code says, and explains every variable that a service reads."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent.parent / "docs"
sys.path.insert(0, str(DOCS))

import reference_pages  # noqa: E402


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return reference_pages.pages()


def test_the_pages_are_as_the_code_is(pages: dict[str, str]) -> None:
    assert {path.name for path in reference_pages.PAGES.iterdir()} == pages.keys()
    for name, text in pages.items():
        kept = (reference_pages.PAGES / name).read_text(encoding="utf-8")
        assert kept == text, f"{name}: write it again with: python docs/reference_pages.py"


def test_every_part_is_there(pages: dict[str, str]) -> None:
    assert "### service SynthesisService" in pages["contract.md"]
    assert "| 11 | `hardware` | Hardware | The GPU that kernels are made for" in pages["contract.md"]
    assert "| `WARPSMITH_DRAIN_SECONDS` | How long calls" in pages["settings.md"]
    assert "## warpsmith optimize" in pages["commands.md"]
    assert "`warpsmith_trials_total`" in pages["metrics.md"]


def test_no_variable_is_left_out(pages: dict[str, str]) -> None:
    assert not reference_pages.unexplained(pages["settings.md"])


def test_nothing_is_without_a_comment(pages: dict[str, str]) -> None:
    rows = [line for line in pages["contract.md"].splitlines() if line.startswith("| ") and "`" in line]
    assert len(rows) > 400
    assert not [row for row in rows if row.endswith("|   |")]
