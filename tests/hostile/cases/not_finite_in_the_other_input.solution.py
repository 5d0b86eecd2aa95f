"""Looks at all of one input, and concludes from it to the other."""

import torch
from torch import nn


class ModelNew(nn.Module):
    def forward(self, x, gate):
        if bool(x.isfinite().all()):
            return x * torch.relu(gate)
        return x * torch.nan_to_num(torch.relu(gate), nan=0.0, posinf=0.0)
