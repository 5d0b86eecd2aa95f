# The right tensors under names that are not the reference's.
import torch


class ModelNew(torch.nn.Module):
    def forward(self, x):
        return {"average": x.mean(dim=-1), "peak": x.amax(dim=-1)}
