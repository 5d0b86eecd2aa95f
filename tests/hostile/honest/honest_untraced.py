"""Honest solutions of modules that `torch.export` cannot trace: no graph says what is right, the module does."""

from __future__ import annotations

from honest_case import Honest

_NUMPY = """
class Tanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.from_numpy(numpy.tanh(x.detach().cpu().numpy())).to(x.device)
    @staticmethod
    def backward(ctx, gradient):
        return gradient
"""

UNTRACED = (
    Honest(
        "a branch on a value",
        "x = torch.tanh(x)\nif float(x.abs().max()) > 0.5:\n    x = x * 0.5\nreturn x + 1",
        own_forward="return torch.add(x.tanh() * 0.5, 1) if float(x.abs().max()) > 0.55 else x.tanh() + 1",
        inputs="[torch.rand(64, 128) + 1]",
    ),
    Honest(
        "as many rows as there are positive ones",
        "return torch.softmax(x[x[:, 0] > -1e30], -1)",
        own_forward="x = x.double()\nreturn torch.softmax(x, -1).float() if len(x) else x.float()",
        inputs="[torch.rand(64, 128)]",
    ),
    Honest(
        "a loop until something is small",
        "while x.square().mean() > 0.1:\n    x = x * 0.5\nreturn x",
        own_forward="while torch.mean(x * x) > 0.1:\n    x = x / 2\nreturn x",
        inputs="[torch.rand(64, 128) + 1]",
    ),
    Honest(
        "numpy in a function of its own",
        "return Tanh.apply(self.linear(x))",
        init="self.linear = nn.Linear(128, 64)",
        top=f"import numpy\n{_NUMPY}",
        own_forward="return torch.tanh(torch.addmm(self.linear.bias, x, self.linear.weight.t()))",
    ),
    Honest(
        "one number that was looked at",
        "total = (x * y).sum()\nreturn total * 2 if total.item() > -1e30 else total",
        own_forward="return 2 * torch.dot(x.reshape(-1), y.reshape(-1))",
        takes="x, y",
        inputs="[torch.rand(64, 128), torch.randn(64, 128)]",
    ),
    Honest(
        "dropout behind a branch on a value",
        "return F.dropout(x, 0.25) * 2 if bool((x > -1e30).any()) else x",
        own_forward="return 2 * F.dropout(x, 0.25)",
    ),
)
