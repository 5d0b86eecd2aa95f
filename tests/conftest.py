"""What all tests have: PyTorch's random numbers are the same in each run."""

from __future__ import annotations

import pytest
import torch


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Inputs that a module makes while it is imported do not depend on which modules came before."""
    if isinstance(collector, pytest.Module):
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    torch.manual_seed(0)
