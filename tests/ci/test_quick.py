"""`make quick` runs the tests that a change touches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def quick(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("quick")


TESTS = {
    Path("tests/a/test_full.py"): "from agent_synthesis.emit.shape import header\n",
    Path("tests/a/test_short.py"): "import torch\nfrom agent_synthesis.emit import expression, shape\n",
    Path("tests/a/test_kit.py"): "from warpsmith import digest\n",
    Path("tests/a/test_other.py"): "from agent_synthesis.emit import reshape\n# import shape\n",
}


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["agent_synthesis/emit/shape.py"], ["tests/a/test_full.py", "tests/a/test_short.py"]),
        (["proto/warpsmith/digest.py"], ["tests/a/test_kit.py"]),
        (["tests/a/test_other.py", "README.md"], ["tests/a/test_other.py"]),
        (["agent_synthesis/emit/__init__.py"], ["tests/a/test_other.py", "tests/a/test_short.py"]),
        (["README.md", "agent_synthesis/include/ws_ptx.cuh"], []),
    ],
)
def test_a_test_is_touched_that_was_changed_or_imports_what_was(
    quick: ModuleType, paths: list[str], expected: list[str]
) -> None:
    assert quick.touched(map(Path, paths), TESTS) == expected


def test_the_core_is_there(quick: ModuleType) -> None:
    assert all((ROOT / name).is_file() for name in quick.CORE)
