"""The same in place, its means summed in another order."""

import torch
from torch import nn


class ModelNew(nn.Module):
    def forward(self, x):
        y, step = x.clone(), torch.empty_like(x)
        for _ in range(8):
            torch.mul(y, 3, out=step)
            y.add_(step.sin_(), alpha=0.02)
        rows = y[:, ::2].sum(dim=1).add_(y[:, 1::2].sum(dim=1)).div_(y.shape[1])
        told = {"largest": rows.max().item(), "rows": len(rows), "none": None}
        return y * 2.0, y.numpy(), rows.tolist(), "a row each " * 30, {"max", "mean"}, told
