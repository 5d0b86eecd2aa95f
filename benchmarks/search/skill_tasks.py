"""The 24 modules on which search is measured: some are one call, most are several, written out as people write them.

The one idea: where a module is one call, any search soon stumbles on its kernel; what to fuse with what is the question
that takes skill. So a third are single operations or pairs, two thirds are chains of three to ten.
"""

from __future__ import annotations

TEMPLATE = """import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        {constructor}

    def forward(self, {arguments}):
        {forward}


def get_inputs():
    return [{inputs}]


def get_init_inputs():
    return []
"""
_MATRIX = "torch.randn(2048, 1024)"
_IMAGES = "torch.randn(8, 64, 64, 64)"
_WEIGHTS = "self.weight = nn.Parameter(torch.rand(1024)); self.bias = nn.Parameter(torch.randn(1024))"

_TASKS: dict[str, tuple[str, str, str]] = {
    # name: constructor, forward (a line each), inputs (x, y, …)
    "argmax": ("pass", "return x.argmax(1)", _MATRIX),
    "average_of_columns": ("pass", "return x.mean(0)", _MATRIX),
    "bce_by_hand": (
        "pass",
        "p = torch.sigmoid(x)\nreturn -(y * torch.log(p + 1e-6) + (1 - y) * torch.log(1 - p + 1e-6)).mean()",
        f"{_MATRIX}, torch.rand(2048, 1024)"),
    "causal_scores": (
        "pass",
        "s = (x * 0.125).masked_fill(y, float('-inf'))\nreturn torch.softmax(s, -1)",
        "torch.randn(8, 512, 512), torch.ones(512, 512, dtype=torch.bool).triu(1)"),
    "channel_attention": (
        "pass", "return x * torch.sigmoid(x.mean((2, 3), keepdim=True)) + y", f"{_IMAGES}, {_IMAGES}"),
    "cosine_by_hand": (
        "pass",
        "a = x / torch.sqrt((x * x).sum(1, keepdim=True) + 1e-8)\n"
        "b = y / torch.sqrt((y * y).sum(1, keepdim=True) + 1e-8)\nreturn (a * b).sum(1)",
        f"{_MATRIX}, {_MATRIX}"),
    "cumulative_share": ("pass", "a = torch.abs(x)\nreturn a.cumsum(1) / (a.sum(1, keepdim=True) + 1e-6)", _MATRIX),
    "focal_loss": (
        "pass",
        "b = F.softplus(x) - x * y\nw = torch.exp(-b)\nreturn ((1 - w) ** 2 * b).mean()",
        f"{_MATRIX}, torch.rand(2048, 1024)"),
    "gelu_by_hand": (
        "pass", "return 0.5 * x * (1.0 + torch.tanh(0.79788456 * (x + 0.044715 * torch.pow(x, 3.0))))", _MATRIX),
    "group_norm_relu": ("self.norm = nn.GroupNorm(8, 64)", "return torch.relu(self.norm(x))", _IMAGES),
    "gated_unit": (
        _WEIGHTS,
        "a, b = (x + self.bias).chunk(2, 1)\nreturn F.silu(a) * b * 1.7 + y",
        f"{_MATRIX}, torch.randn(2048, 512)"),
    "layer_norm": ("self.norm = nn.LayerNorm(1024)", "return self.norm(x)", _MATRIX),
    "layer_norm_by_hand": (
        _WEIGHTS,
        "c = x - x.mean(1, keepdim=True)\nv = (c * c).mean(1, keepdim=True)\n"
        "return c * torch.rsqrt(v + 1e-5) * self.weight + self.bias",
        _MATRIX),
    "log_softmax_loss": (
        "pass",
        "s = x - x.amax(1, keepdim=True)\nl = s - torch.log(torch.exp(s).sum(1, keepdim=True))\n"
        "return -(y * l).sum(1).mean()",
        f"{_MATRIX}, torch.rand(2048, 1024)"),
    "max_pool_relu": ("self.pool = nn.MaxPool2d(3, 2, 1)", "return torch.relu(self.pool(x)) * 0.5", _IMAGES),
    "mish_by_hand": ("pass", "return torch.clamp(x * torch.tanh(torch.log(1 + torch.exp(x))), -2.0, 6.0) + y",
                     f"{_MATRIX}, {_MATRIX}"),
    "normalised_columns": (
        "pass", "m = x.mean(0, keepdim=True)\nv = x.var(0, keepdim=True)\nreturn (x - m) / torch.sqrt(v + 1e-5)",
        _MATRIX),
    "residual_norm_gelu": (
        "self.norm = nn.LayerNorm(1024)", "return F.gelu(self.norm(x + y)) * 0.5 + x", f"{_MATRIX}, {_MATRIX}"),
    "reverse_cumsum": ("pass", "return x.flip(1).cumsum(1).flip(1)", _MATRIX),
    "rms_norm_by_hand": (
        _WEIGHTS, "r = torch.rsqrt((x * x).mean(1, keepdim=True) + 1e-6)\nreturn x * r * self.weight", _MATRIX),
    "rotary": (
        "pass",
        "a, b = x.chunk(2, 1)\nc, s = torch.cos(y), torch.sin(y)\nreturn torch.cat([a * c - b * s, a * s + b * c], 1)",
        f"{_MATRIX}, torch.randn(2048, 512)"),
    "softmax": ("pass", "return torch.softmax(x, 1)", _MATRIX),
    "soft_threshold": (
        "pass", "return torch.sign(x) * torch.relu(torch.abs(x) - 0.5) + torch.where(y > 0, y, 0.1 * y)",
        f"{_MATRIX}, {_MATRIX}"),
    "temperature_entropy": (
        "pass", "p = torch.softmax(x / 0.7, 1)\nreturn -(p * torch.log(p + 1e-9)).sum(1)", _MATRIX),
}  # fmt: skip


def modules() -> dict[str, str]:
    """Name → source, in the order in which they are recorded: by name."""
    made = {}
    for name, (constructor, forward, inputs) in sorted(_TASKS.items()):
        arguments = "x, y" if "y" in compile(forward.replace("return", "_ ="), name, "exec").co_names else "x"
        lines = forward.replace("\n", "\n        ")
        made[name] = TEMPLATE.format(constructor=constructor, forward=lines, inputs=inputs, arguments=arguments)
    return made
