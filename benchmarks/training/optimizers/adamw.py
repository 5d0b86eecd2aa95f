"""AdamW over the tensors of two layers of a transformer, as `torch.optim.AdamW(foreach=True)` computes it, in fp32."""

import torch
from torch import nn

RATE, DECAY, BETA1, BETA2, EPSILON = 1e-3, 0.01, 0.9, 0.999, 1e-8


def shapes(width: int, layers: int) -> list[tuple[int, ...]]:
    return [(width,), (3 * width, width), (width, width), (width,), (4 * width, width), (width, 4 * width)] * layers


class Model(nn.Module):
    steps: torch.Tensor

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.count = len(shapes(width, layers))
        self.register_buffer("steps", torch.tensor(10.0))
        for number, shape in enumerate(shapes(width, layers)):
            self.register_buffer(f"parameter{number}", torch.randn(shape) * 0.02)
            self.register_buffer(f"mean{number}", torch.randn(shape) * 1e-3)
            self.register_buffer(f"square{number}", torch.rand(shape) * 1e-5)

    def forward(self, *gradients: torch.Tensor) -> torch.Tensor:
        parameters, means, squares = (
            [getattr(self, f"{name}{number}") for number in range(self.count)]
            for name in ("parameter", "mean", "square")
        )
        taken = self.steps + 1
        torch._foreach_mul_(parameters, 1 - RATE * DECAY)
        torch._foreach_lerp_(means, list(gradients), 1 - BETA1)
        torch._foreach_mul_(squares, BETA2)
        torch._foreach_addcmul_(squares, list(gradients), list(gradients), 1 - BETA2)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, torch.sqrt(1 - BETA2**taken))
        torch._foreach_add_(roots, EPSILON)
        torch._foreach_mul_(roots, (1 - BETA1**taken) / -RATE)
        torch._foreach_addcdiv_(parameters, means, roots)
        return taken


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(shape) * 1e-2 for shape in shapes(2048, 2)]


def get_init_inputs() -> list[object]:
    return [2048, 2]
