"""Honest solutions with state, randomness and modes."""

from __future__ import annotations

from honest_case import Honest

_TIED = """
self.one = nn.Linear(64, 64)
self.two = nn.Sequential(nn.ReLU(), nn.Linear(64, 64))
self.two[1].weight = self.one.weight
"""

STATE = (
    Honest(
        "a running mean in a buffer",
        """
self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
return x - self.mean
""",
        init="self.register_buffer('mean', torch.zeros(128))",
    ),
    Honest(
        "a running mean, updated by another formula",
        """
self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
return x - self.mean
""",
        own_forward="""
self.mean.lerp_(x.mean(0), 0.1)
return x - self.mean
""",
        init="self.register_buffer('mean', torch.zeros(128))",
    ),
    Honest(
        "a count of calls in a buffer of integers",
        """
self.calls.add_(1)
return x / self.calls
""",
        init="self.register_buffer('calls', torch.zeros((), dtype=torch.int64))",
    ),
    Honest(
        "a ring buffer of means",
        """
self.ring.copy_(torch.cat([x.mean(0, keepdim=True), self.ring[:-1]]))
return x + self.ring.mean(0)
""",
        init="self.register_buffer('ring', torch.zeros(4, 128))",
    ),
    Honest(
        "a buffer that is not persistent",
        "return x * self.scale",
        init="self.register_buffer('scale', torch.rand(128) + 1, persistent=False)",
    ),
    Honest(
        "a constant that is no buffer in the solution",
        "return x * self.scale",
        init="self.register_buffer('scale', torch.arange(128) / 64.0, persistent=False)",
        own_init="self.scale = torch.arange(128) / 64.0",
    ),
    Honest(
        "batch norm with a cumulative average",
        "return self.norm(x)",
        init="self.norm = nn.BatchNorm1d(128, momentum=None)",
    ),
    Honest(
        "batch norm, by hand, statistics too",
        "return self.norm(x)",
        init="self.norm = nn.BatchNorm1d(128)",
        own_forward="""
norm = self.norm
mean = x.mean(0)  # of minus infinity the module's is that, and `var_mean`'s is NaN
variance = (x - mean).square().mean(0)
with torch.no_grad():
    norm.running_mean.mul_(0.9).add_(mean, alpha=0.1)
    norm.running_var.mul_(0.9).add_(variance, alpha=0.1 * len(x) / (len(x) - 1))
    norm.num_batches_tracked.add_(1)
return (x - mean) * torch.rsqrt(variance + norm.eps) * norm.weight + norm.bias
""",
    ),
    Honest(
        "instance norm that tracks statistics",
        "return self.norm(x)",
        "[torch.rand(8, 16, 64)]",
        init="self.norm = nn.InstanceNorm1d(16, track_running_stats=True)",
    ),
    Honest(
        "an observer of the largest value",
        """
self.largest.copy_(torch.maximum(self.largest, x.abs().amax()))
return torch.round(x / self.largest * 127)
""",
        init="self.register_buffer('largest', torch.tensor(1e-3))",
    ),
    Honest(
        "spectral norm, whose power iteration is state",
        "return self.linear(x)",
        init="self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(128, 64))",
    ),
    Honest("dropout in training", "return F.dropout(x, 0.5, training=True) + 1"),
    Honest("dropout modules", "return self.drop(torch.relu(x))", init="self.drop = nn.Dropout(0.3)"),
    Honest(
        "dropout of channels", "return self.drop(x)", "[torch.rand(8, 16, 8, 8)]", init="self.drop = nn.Dropout2d(0.5)"
    ),
    Honest("noise from PyTorch's generator", "return x + 0.1 * torch.randn_like(x)"),
    Honest(
        "a generator of its own",
        "return x * self.mask",
        init="""
mask = torch.rand(128, generator=torch.Generator().manual_seed(7)) > 0.5
self.register_buffer('mask', mask.float())
""",
        own_init="""
generator = torch.Generator()
generator.manual_seed(7)
self.register_buffer('mask', (torch.rand(128, generator=generator) > 0.5).float())
""",
    ),
    Honest(
        "in eval()",
        "return self.drop(self.norm(x))",
        init="""
self.norm = nn.BatchNorm1d(128)
self.drop = nn.Dropout(0.5)
self.eval()
""",
    ),
    Honest(
        "eval() within forward",
        """
self.eval()
return self.drop(self.norm(x))
""",
        init="""
self.norm = nn.BatchNorm1d(128)
self.drop = nn.Dropout(0.5)
""",
    ),
    Honest("parameters that modules share", "return self.two(self.one(x))", "[torch.rand(32, 64)]", init=_TIED),
    Honest(
        "parameters without gradient",
        "return self.linear(x)",
        init="self.linear = nn.Linear(128, 64).requires_grad_(False)",
    ),
    Honest(
        "a list of what it has seen",
        "return torch.tanh(x) * 2",
        own_init="self.shapes = []",
        own_forward="""
self.shapes.append(tuple(x.shape))
return torch.tanh(x) * 2
""",
    ),
    Honest(
        "weight norm",
        "return self.linear(x)",
        init="self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(128, 64))",
    ),
    Honest(
        "the old weight norm, whose weight is made by a hook",
        "return self.linear(x)",
        top="""
import warnings
warnings.simplefilter('ignore')
""",
        init="self.linear = torch.nn.utils.weight_norm(nn.Linear(128, 64))",
    ),
    Honest(
        "a parametrization of its own",
        "return self.linear(x)",
        top="""
class Positive(nn.Module):
    def forward(self, w):
        return F.softplus(w)
""",
        init="""
self.linear = nn.Linear(128, 64)
nn.utils.parametrize.register_parametrization(self.linear, 'weight', Positive())
""",
    ),
)
