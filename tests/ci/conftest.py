"""Scripts of CI, to be tested as modules."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

CI = Path(__file__).parent.parent.parent / ".ci"


@pytest.fixture(scope="session")
def script() -> Callable[[str], ModuleType]:
    """Loads a script by its name."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, CI / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
        return made

    return load
