"""A linear layer whose weight is kept in int4, eight in a word of 32 bits as GPTQ has them, for 16 tokens in bf16."""

import torch
from torch import nn

TOKENS, INPUTS, OUTPUTS, GROUP = 16, 4096, 14336, 128


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        groups = INPUTS // GROUP
        words = torch.randint(-(2**31), 2**31, (INPUTS // 8, OUTPUTS), dtype=torch.int64)
        self.weight = nn.Buffer(words.to(torch.int32))
        self.scale = nn.Buffer(torch.rand(groups, OUTPUTS).to(torch.bfloat16) / 16)
        self.zero = nn.Buffer(torch.randint(0, 16, (groups, OUTPUTS), dtype=torch.int32))
        self.shifts = nn.Buffer(torch.arange(0, 32, 4, dtype=torch.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        numbers = ((self.weight.unsqueeze(1) >> self.shifts.view(1, -1, 1)) & 15).reshape(INPUTS, OUTPUTS)
        zero, scale = (each.repeat_interleave(GROUP, 0) for each in (self.zero, self.scale))
        return x @ ((numbers - zero).to(torch.bfloat16) * scale)


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(TOKENS, INPUTS).to(torch.bfloat16)]


def get_init_inputs() -> list[object]:
    return []
