"""The plugin that docs/plugins.md shows fits its role, and the page shows it as it is."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from warpsmith.testing import check_reasoning

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "examples" / "agents" / "python" / "least_traffic.py"


@pytest.fixture
def plugin() -> ModuleType:
    spec = importlib.util.spec_from_file_location("least_traffic", PLUGIN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_reasoner_fits_its_role(plugin: ModuleType) -> None:
    assert check_reasoning(plugin.LeastTraffic().propose) == []


def test_the_page_shows_the_code_of_the_example() -> None:
    page = (ROOT / "docs" / "plugins.md").read_text()
    shown = page.split("```python\n", 1)[1].split("```", 1)[0].splitlines()
    code = PLUGIN.read_text().splitlines()
    assert [line for line in shown[2:] if line not in code] == []
