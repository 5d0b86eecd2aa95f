"""A decay with distance: what PyTorch computes in three calls, one of which is `hypot`."""

import torch


class Model(torch.nn.Module):
    """exp(-hypot(x, y))."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.exp(-torch.hypot(x, y))


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(256, 4096), torch.randn(256, 4096)]


def get_init_inputs() -> list[object]:
    return []
