"""The example agent fits its role; what docs/plugins.md shows is tried in `tests/tutorials/test_plugin_page.py`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from warpsmith.testing import check_reasoner

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
    assert check_reasoner(plugin.LeastTraffic) == []
