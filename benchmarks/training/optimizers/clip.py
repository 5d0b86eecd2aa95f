"""Gradients of two layers of a transformer scaled to a norm of one, as `torch.nn.utils.clip_grad_norm_` does it."""

import torch
from torch import nn


class Model(nn.Module):
    def forward(self, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(gradients))))
        return torch._foreach_mul(list(gradients), (1.0 / (norm + 1e-6)).clamp(max=1.0))


def get_inputs() -> list[torch.Tensor]:
    width = 2048
    shapes = [(width,), (3 * width, width), (width, width), (width,), (4 * width, width), (width, 4 * width)] * 2
    return [torch.randn(shape) * 1e-2 for shape in shapes]


def get_init_inputs() -> list[object]:
    return []
