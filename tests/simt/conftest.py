"""The simulated machine, one for each module of tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from agent_correctness.simulation.simt import Simulator


@pytest.fixture(scope="module")
def simulator() -> Iterator[Simulator]:
    made = Simulator()
    if made.missing():
        pytest.skip(made.missing())
    yield made
    made.close()
