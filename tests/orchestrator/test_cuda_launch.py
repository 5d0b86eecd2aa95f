"""What an exported CUDA launch gives the driver, which is one of the test's own."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

pytest.importorskip("cuda.bindings")  # what an exported CUDA file needs, and a machine without a GPU may lack


class Driver:
    """Reads the arguments of a launch as the driver does, while it runs; `within` is called first."""

    def __init__(self, count: int) -> None:
        self.count, self.launches = count, list[list[int]]()
        self.within: Any = lambda: None

    def __call__(self, config: int, function: int, pointers: Any, extra: None) -> int:
        del config, function, extra
        self.within()
        self.launches.append([ctypes.c_uint64.from_address(pointers[place]).value for place in range(self.count)])
        return 0


def launching(driver: Driver, monkeypatch: pytest.MonkeyPatch, maps: Any = None) -> Any:
    from orchestrator.exports.carried.cuda_runtime import _WsLaunch

    monkeypatch.setattr(_WsLaunch, "_prepare", lambda *_: (driver, 0, 0, None))
    return _WsLaunch(None, "scaled", (1, 1, 1), (32, 1, 1), (1, 1, 1), 0, False, False, driver.count, maps)


def test_each_launch_gives_its_own_arguments_also_while_another_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(3)
    launch = launching(driver, monkeypatch)
    launch(0, 0, 1, 2, 3)
    driver.within = lambda: setattr(driver, "within", lambda: None) or launch(0, 0, 7, 8, 9)
    launch(0, 0, 4, 5, 6)
    launch(0, 0, 1 << 63, 0, 1)
    assert driver.launches == [[1, 2, 3], [7, 8, 9], [4, 5, 6], [1 << 63, 0, 1]]


def test_a_tensor_map_is_given_in_place_of_its_tensor_in_each_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Map:
        def at(self, address: int) -> int:
            self.held = ctypes.c_uint64(address * 10)
            return ctypes.addressof(self.held)

    driver = Driver(2)
    launch = launching(driver, monkeypatch, {1: Map()})
    launch(0, 0, 1, 2)
    launch(0, 0, 3, 4)
    assert driver.launches == [[1, 20], [3, 40]]
