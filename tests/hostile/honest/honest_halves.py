"""Honest solutions in 16 bits: rounded where eager does not round, or not where it does, or summed in another order."""

from __future__ import annotations

from honest_case import Honest

X = "[torch.rand(64, 512).bfloat16()]"
XW = "[torch.rand(64, 512).bfloat16(), torch.rand(32, 512).bfloat16()]"
XY = "[torch.rand(64, 512).bfloat16(), torch.rand(64, 512).bfloat16()]"
QKV = "[torch.randn(4, 64, 32).bfloat16() for _ in range(3)]"

HALVES = (
    Honest("a mean that is summed in floats", "return torch.tanh(x).mean(-1)", X,
           own_forward="return torch.tanh(x.float()).mean(-1).bfloat16()"),
    Honest("a mean of two means", "return torch.tanh(x).mean(-1)", X,
           own_forward="return (torch.tanh(x[:, :256]).mean(-1) + torch.tanh(x[:, 256:]).mean(-1)) / 2"),
    Honest("a softmax of halves in floats", "return F.softmax(x, -1)", X,
           own_forward="e = torch.exp(x.float() - x.float().amax(-1, True))\nreturn (e / e.sum(-1, True)).bfloat16()"),
    Honest("a softmax of halves step by step", "return F.softmax(x, -1)", X,
           own_forward="e = torch.exp(x - x.amax(-1, True))\nreturn e / e.sum(-1, True)"),
    Honest("an entropy of halves in one", "p = torch.log_softmax(x, -1)\nreturn -(p.exp() * p).sum(-1)", X,
           own_forward="p = torch.log_softmax(x.float(), -1)\nreturn -(p.exp() * p).sum(-1).bfloat16()"),
    Honest("a layer norm of halves in floats", "return F.layer_norm(x, (512,))", X,
           own_forward="v, m = torch.var_mean(x.float(), -1, False, keepdim=True)\n"
                       "return ((x - m) * torch.rsqrt(v + 1e-5)).bfloat16()"),
    Honest("an rms norm of halves in one", "return x * torch.rsqrt(x.pow(2).mean(-1, True) + 1e-6)", X,
           own_forward="return F.rms_norm(x, (512,), eps=1e-6)"),
    Honest("a product of halves in two", "return x @ w.t()", XW, "x, w",
           own_forward="return x[:, :256] @ w[:, :256].t() + x[:, 256:] @ w[:, 256:].t()"),
    Honest("a product of halves in floats", "return x @ w.t()", XW, "x, w",
           own_forward="return (x.float() @ w.float().t()).bfloat16()"),
    Honest("a product of float16", "return x @ w.t()", XW.replace("bfloat16", "half"), "x, w",
           own_forward="return (x.float() @ w.float().t()).half()"),
    Honest("a gelu of halves by its formula", "return F.gelu(x, approximate='tanh')", X,
           own_forward="y = x.float()\ny = y + 0.044715 * y * y * y\n"
                       "return (x * 0.5 * (1 + torch.tanh(0.7978845608 * y))).bfloat16()"),
    Honest("a gate that is rounded once", "return x * torch.sigmoid(x)", X, own_forward="return F.silu(x)"),
    Honest("a gate that is rounded twice", "return F.silu(x)", X, own_forward="return x * torch.sigmoid(x)"),
    Honest("attention of halves by hand", "return F.scaled_dot_product_attention(q, k, v)", QKV, "q, k, v",
           own_forward="p = torch.softmax(q.float() @ k.float().mT / 32 ** 0.5, -1)\n"
                       "return (p @ v.float()).bfloat16()"),
    Honest("attention of halves at once", "return torch.softmax(q @ k.mT / 32 ** 0.5, -1) @ v", QKV, "q, k, v",
           own_forward="return F.scaled_dot_product_attention(q, k, v)"),
    Honest("a difference of rounded halves", "return (torch.tanh(x.float()) - torch.tanh(y.float())).bfloat16()",
           "[torch.randn(512, 512).bfloat16(), torch.randn(512, 512).bfloat16()]", "x, y",
           own_forward="return torch.tanh(x) - torch.tanh(y)"),
    Honest("autocast by hand",
           "with torch.autocast(x.device.type, dtype=torch.bfloat16):\n    return F.gelu(self.linear(x))",
           "[torch.rand(64, 512)]", init="self.linear = nn.Linear(512, 128)",
           own_forward="w, b = self.linear.weight.bfloat16(), self.linear.bias.bfloat16()\n"
                       "return F.gelu(F.linear(x.bfloat16(), w, b))"),
    Honest("a loss of halves in floats", "return ((x - y) ** 2).mean()", XY, "x, y",
           own_forward="return F.mse_loss(x.float(), y.float()).bfloat16()"),
    Honest("a loss of halves step by step", "return F.mse_loss(x, y)", XY, "x, y",
           own_forward="return ((x - y) ** 2).mean()"),
    Honest("a logarithm of a sum of halves", "return torch.logsumexp(x, -1)", X,
           own_forward="return torch.logsumexp(x.float(), -1).bfloat16()"),
    Honest("running sums of halves in floats", "return torch.cumsum(x, -1)", X,
           own_forward="return torch.cumsum(x.float(), -1).bfloat16()"),
    Honest("halves that are mostly zeros", "return F.relu(x - 0.99) * 3", X,
           own_forward="return (F.relu(x.float() - 0.99) * 3).bfloat16()"),
    Honest("halves far from zero", "return x * 0.5 + 1000", X.replace("bfloat16", "half"),
           own_forward="return torch.addcmul(x.new_full((), 1000), x, x.new_full((), 0.5))"),
    Honest("halves of many magnitudes", "return torch.exp(12 * x)", X,
           own_forward="return torch.exp(12 * x.float()).bfloat16()"),
    Honest("a recurrence of halves in floats", "return self.rnn(x)[0]", "[torch.rand(4, 16, 32).bfloat16()]",
           init="self.rnn = nn.RNN(32, 32, batch_first=True).bfloat16()",
           own_forward="r, h, made = self.rnn, x.new_zeros(4, 32).float(), []\n"
                       "for step in x.float().unbind(1):\n"
                       "    h = torch.tanh(F.linear(step, r.weight_ih_l0.float(), r.bias_ih_l0.float())"
                       " + F.linear(h, r.weight_hh_l0.float(), r.bias_hh_l0.float()))\n"
                       "    made.append(h)\n"
                       "return torch.stack(made).bfloat16().transpose(0, 1)"),
)  # fmt: skip
