"""A column of scores of up to 1.7e9, and 63 of a long computation whose results are below one."""

import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(63, 63) / 4)

    def forward(self, x):
        y = x[:, 1:]
        for _ in range(8):
            y = torch.tanh(y @ self.weight)
        return torch.cat([x[:, :1] * 1.7e9, y], dim=1)


def get_inputs():
    return [torch.rand(2048, 64)]


def get_init_inputs():
    return []
