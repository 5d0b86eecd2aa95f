"""`make check` finds what a service knows of a GPU by itself."""

from __future__ import annotations

import ast
from collections.abc import Callable
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def check(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("machine_constants")


@pytest.mark.parametrize(
    "text",
    [
        "blocks = min(tiles, 132)", "shared = 227 << 10", "rest = (227 << 10) - 4096", "shared = 232448",
        "rate = 4.28e12", "options = ['--gpu-architecture=sm_90a']", "flag = f'arch=compute_{x},code=sm_80'",
        "if 'H100' in name: pass", "peak = 989e12",
    ],
)  # fmt: skip
def test_a_constant_of_a_gpu_is_found(check: ModuleType, text: str) -> None:
    assert check.constants(ast.parse(text), check.sizes())


@pytest.mark.parametrize(
    "text",
    [
        '"""On an H200 it took 132 us."""', "threads = 1024", "tile = 1 << 16", "is_on = True",
        "name = 'H20 and sma'", "x = 1e12",
    ],
)  # fmt: skip
def test_what_is_nobodys_is_not(check: ModuleType, text: str) -> None:
    assert not check.constants(ast.parse(text), check.sizes())
