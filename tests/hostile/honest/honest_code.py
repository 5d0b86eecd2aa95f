"""Honest solutions that are written in unusual ways: what they compute is the reference's, how is theirs."""

from __future__ import annotations

from honest_case import Honest

_LINEAR = "self.linear = nn.Linear(128, 64)"
_FORWARD = "return torch.relu(self.linear(x)) * 2"
_INLINE = '''from torch.utils.cpp_extension import load_inline
built = load_inline("doubled", """
#include <torch/extension.h>
#include <ATen/Parallel.h>
torch::Tensor doubled(torch::Tensor x) {
  auto y = torch::empty_like(x);
  const float* in = x.data_ptr<float>();
  float* out = y.data_ptr<float>();
  at::parallel_for(0, x.numel(), 4096, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) out[i] = in[i] > 0 ? 2 * in[i] : in[i] != in[i] ? in[i] : 0.0f;
  });
  return y;
}""", functions=["doubled"])'''
_PACKS = """
weight = self.linear.weight
if self.packed is None or self.version != weight._version:
    self.packed, self.version = weight.detach().t().contiguous(), weight._version
return torch.relu(torch.addmm(self.linear.bias, x, self.packed)) * 2
"""
_ROTARY = """
half = x.shape[-1] // 2
angle = torch.arange(x.shape[0])[:, None] / (10000 ** (torch.arange(half) / half))
one, two = x[:, :half], x[:, half:]
return torch.cat([one * torch.cos(angle) - two * torch.sin(angle), one * torch.sin(angle) + two * torch.cos(angle)], -1)
"""
_ROTARY_CACHED = """
key = x.shape
if key not in self.tables:
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[0])[:, None] / (10000 ** (torch.arange(half) / half))
    self.tables[key] = torch.cos(angle), torch.sin(angle)
cosine, sine = self.tables[key]
one, two = x.chunk(2, -1)
return torch.cat([one * cosine - two * sine, one * sine + two * cosine], -1)
"""
_ATTENTION = """
scores = x @ x.t() / 8
return torch.softmax(scores.masked_fill(torch.ones(64, 64, dtype=torch.bool).triu(1), float('-inf')), -1) @ x
"""
_ATTENTION_CACHED = """
if x.shape[0] not in MASKS:
    MASKS[x.shape[0]] = torch.full((x.shape[0], x.shape[0]), float('-inf')).triu(1)
return torch.softmax(torch.addmm(MASKS[x.shape[0]], x, x.t(), alpha=0.125), -1) @ x
"""


def _other(name: str, forward: str, **more: str) -> Honest:
    """Another way to compute the linear layer."""
    return Honest(name, _FORWARD, init=_LINEAR, own_forward=forward, **more)


CODE = (
    _other(
        "weights packed at the first call, and again when they change",
        _PACKS,
        own_init=_LINEAR
        + """
self.packed, self.version = None, -1
""",
    ),
    _other(
        "weights transposed by the constructor, under another name",
        "return torch.relu(x @ self.w + self.b) * 2",
        own_init=_LINEAR
        + """
self.w = nn.Parameter(self.linear.weight.detach().t().contiguous())
self.b = self.linear.bias
del self.linear
""",
    ),
    _other(
        "weights transposed, with a hook for a state dict",
        "return torch.relu(x @ self.w + self.b) * 2",
        own_init=_LINEAR
        + """
self.w = nn.Parameter(self.linear.weight.detach().t().contiguous())
self.b = self.linear.bias
del self.linear
def rename(module, state, *rest):
    if 'linear.weight' in state:
        state.update(w=state.pop('linear.weight').t())
self.register_load_state_dict_pre_hook(rename)
""",
    ),
    _other("an extension that is built on import", "return built.doubled(self.linear(x))", own_top=_INLINE),
    _other(
        "it wants every processor as it is imported, as its compilers would",
        _FORWARD,
        own_init=_LINEAR,
        own_top="import os; assert len(os.sched_getaffinity(0)) == PROCESSORS",
    ),
    _other(
        "torch.compile inside",
        "return self.compiled(self.linear(x))",
        own_init=_LINEAR
        + """
self.compiled = torch.compile(lambda y: torch.relu(y) * 2)
""",
    ),
    _other(
        "torch.compile of its own forward, as it is made",
        _FORWARD,
        own_init=_LINEAR
        + """
self.forward = torch.compile(self.forward)
""",
    ),
    _other(
        "a scripted function",
        "return doubled(self.linear(x))",
        own_top="""
import warnings
warnings.simplefilter('ignore')
@torch.jit.script
def doubled(x):
    return torch.relu(x) * 2
""",
    ),
    _other(
        "a traced function",
        "return self.traced(self.linear(x))",
        own_top="""
import warnings
warnings.simplefilter('ignore')
""",
        own_init=_LINEAR
        + """
self.traced = torch.jit.trace(lambda y: torch.relu(y) * 2, torch.zeros(64, 64))
""",
    ),
    _other("in place on its own temporaries", "return self.linear(x).relu_().mul_(2)"),
    _other(
        "into memory of its own, copied out",
        """
torch.mm(x, self.linear.weight.t(), out=self.space)
return (self.space + self.linear.bias).relu_() * 2
""",
        own_init=_LINEAR
        + """
self.space = torch.empty(64, 64)
""",
    ),
    _other(
        "in pieces",
        """
y = torch.empty(x.shape[0], 64)
for first in range(0, x.shape[0], 16):
    y[first : first + 16] = torch.relu(self.linear(x[first : first + 16])) * 2
return y
""",
    ),
    _other(
        "in two threads of a pool",
        """
with torch.no_grad():
    return torch.cat(list(POOL.map(half, [(self, p) for p in x.chunk(2)])))
""",
        own_top="""
from concurrent.futures import ThreadPoolExecutor
POOL = ThreadPoolExecutor(2)
def half(given):
    with torch.no_grad():
        return torch.relu(given[0].linear(given[1])) * 2
""",
    ),
    _other(
        "a function of autograd",
        "return Doubled.apply(self.linear(x))",
        own_top="""
class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        ctx.save_for_backward(y)
        return torch.relu(y) * 2
    @staticmethod
    def backward(ctx, g):
        return g * 2 * (ctx.saved_tensors[0] > 0)
""",
    ),
    _other(
        "functional_call",
        "return torch.relu(torch.func.functional_call(self.linear, dict(self.linear.named_parameters()), (x,))) * 2",
    ),
    _other(
        "vmap",
        # Its layout is PyTorch's choice: of the module, it is part of what is promised.
        "y = torch.func.vmap(lambda row: torch.relu(self.linear.weight @ row + self.linear.bias) * 2)(x)\n"
        "return y.contiguous()",
    ),
    _other("einsum", "return torch.relu(torch.einsum('nk,mk->nm', x, self.linear.weight) + self.linear.bias) * 2"),
    _other(
        "numpy inside",
        """
y = numpy.maximum(self.linear(x).detach().numpy(), 0) * numpy.float32(2)
return torch.from_numpy(y)
""",
        own_top="import numpy",
    ),
    _other(
        "a forward hook that does a part",
        "return torch.relu(self.linear(x))",
        own_init=_LINEAR
        + """
self.register_forward_hook(lambda module, given, y: y * 2)
""",
    ),
    _other(
        "a __call__ of its own",
        _FORWARD,
        own_rest="""
def __call__(self, *given):
    return self.forward(*given)
""",
    ),
    _other(
        "properties",
        "return torch.relu(self.product(x)) * self.factor",
        own_rest="""
@property
def factor(self):
    return 2
@property
def product(self):
    return self.linear
""",
    ),
    _other(
        "a dataclass of settings",
        "return torch.relu(self.linear(x)) * self.settings.factor",
        own_top="""
import dataclasses
@dataclasses.dataclass(frozen=True)
class Settings:
    factor: float = 2.0
""",
        own_init=_LINEAR
        + """
self.settings = Settings()
""",
    ),
    _other(
        "a lazy layer",
        "return torch.relu(self.linear(x)) * 2",
        own_init="""
self.linear = nn.LazyLinear(64)
self.linear(torch.zeros(1, 128))
torch.manual_seed(42)
self.linear.load_state_dict(nn.Linear(128, 64).state_dict())
""",
    ),
    _other(
        "a warm-up in the constructor",
        _FORWARD,
        own_init=_LINEAR
        + """
for _ in range(3): self.forward(torch.rand(64, 128))
""",
    ),
    _other(
        "prints in forward",
        """
print('called with', tuple(x.shape))
"""
        + _FORWARD,
    ),
    _other(
        "warnings in forward",
        """
warnings.warn('slow path')
"""
        + _FORWARD,
        own_top="import warnings",
    ),
    _other(
        "logging in forward",
        """
LOG.warning('called with %s', tuple(x.shape))
"""
        + _FORWARD,
        own_top="""
import logging
LOG = logging.getLogger('solution')
""",
    ),
    _other(
        "a slow first call",
        """
if not self.ready:
    time.sleep(2)
    self.ready = True
"""
        + _FORWARD,
        own_top="import time",
        own_init=_LINEAR
        + """
self.ready = False
""",
    ),
    _other(
        "an import that fails, guarded",
        """
if triton is not None and x.is_cuda:
    raise NotImplementedError
"""
        + _FORWARD,
        own_top="""
try:
    import triton_of_tomorrow as triton
except ImportError:
    triton = None
""",
    ),
    _other(
        "a fallback",
        """
try:
    return torch.ops.mine.doubled(self.linear(x))
except (AttributeError, RuntimeError):
    return torch.relu(self.linear(x)) * 2
""",
    ),
    _other(
        "an operator registered in torch's library",
        "return torch.ops.honest.doubled(self.linear(x))",
        own_top="""
@torch.library.custom_op('honest::doubled', mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x) * 2
""",
    ),
    _other("threads that it sets", _FORWARD, own_top="torch.set_num_threads(1)"),
    _other("a type of its own on the way", "return torch.Tensor(torch.relu(self.linear(x)) * 2)"),
    _other(
        "a parameter as the result's type, detached",
        "return (torch.relu(self.linear(x)) * 2).detach().requires_grad_(False)",
    ),
    _other(
        "time read for a log",
        """
begin = time.perf_counter()
y = torch.relu(self.linear(x)) * 2
self.seconds = time.perf_counter() - begin
return y
""",
        own_top="import time",
    ),
    _other("contiguous() where it need not be", "return (torch.relu(self.linear(x.contiguous())) * 2).contiguous()"),
    Honest("a table of a rotation, kept by shape", _ROTARY, own_forward=_ROTARY_CACHED, own_init="self.tables = {}"),
    Honest("a causal mask, kept by shape in a global", _ATTENTION, own_forward=_ATTENTION_CACHED, own_top="MASKS = {}"),
    Honest(
        "a mask by functools.cache",
        _ATTENTION,
        own_forward="return torch.softmax((x @ x.t() / 8) + mask(x.shape[0]), -1) @ x",
        own_top="""
import functools
@functools.cache
def mask(n):
    return torch.full((n, n), float('-inf')).triu(1)
""",
    ),
    Honest(
        "attention of many heads",
        "return self.attention(x, x, x, need_weights=False)[0]",
        "[torch.rand(4, 16, 64)]",
        init="self.attention = nn.MultiheadAttention(64, 4, batch_first=True)",
    ),
    Honest(
        "attention with its weights",
        "return self.attention(x, x, x)",
        "[torch.rand(4, 16, 64)]",
        init="self.attention = nn.MultiheadAttention(64, 4, batch_first=True)",
    ),
    Honest(
        "scaled attention",
        "return torch.softmax(q @ k.transpose(-1, -2) / 8, -1) @ v",
        "[torch.randn(2, 4, 16, 64) for _ in range(3)]",
        "q, k, v",
        own_forward="return F.scaled_dot_product_attention(q, k, v)",
    ),
    Honest(
        "an LSTM",
        "return self.cell(x)",
        "[torch.rand(8, 12, 32)]",
        init="self.cell = nn.LSTM(32, 24, batch_first=True)",
    ),
    Honest(
        "a GRU, by cells",
        "return self.cell(x)[0]",
        "[torch.rand(8, 4, 32)]",
        init="self.cell = nn.GRU(32, 24, batch_first=True)",
    ),
    Honest(
        "a layer of an encoder",
        "return self.layer(x)",
        "[torch.rand(4, 8, 32)]",
        init="self.layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)",
    ),
    Honest(
        "a sparse matrix inside",
        "return torch.sparse.mm(self.w.to_sparse(), x.t()).t()",
        init="self.register_buffer('w', torch.zeros(64, 128).fill_diagonal_(2.0))",
    ),
    Honest(
        "channels last inside",
        "return self.convolution(x)",
        "[torch.rand(2, 8, 16, 16)]",
        init="self.convolution = nn.Conv2d(8, 16, 3)",
        own_forward="return self.convolution(x.contiguous(memory_format=torch.channels_last)).contiguous()",
    ),
    Honest(
        "a convolution as a product",
        "return self.convolution(x)",
        "[torch.rand(2, 8, 16, 16)]",
        init="self.convolution = nn.Conv2d(8, 16, 3)",
        own_forward="""
w = self.convolution.weight
rows = F.unfold(x, 3)
return (w.reshape(16, -1) @ rows + self.convolution.bias[:, None]).reshape(2, 16, 14, 14)
""",
    ),
)
