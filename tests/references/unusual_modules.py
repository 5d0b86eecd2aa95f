"""References of unusual kinds, and a desk at which judge and candidate's side meet in one process."""

from __future__ import annotations

import os
from typing import Any

import torch

from gpu_bench.judging.judge_worker import Judge
from gpu_bench.judging.loaded import LoadedTask
from gpu_bench.running.bench_worker import Bench
from gpu_bench.workers.sharing import SharedMemory
from warpsmith.v1 import judging_pb2, verdict_pb2

TASK, FRESH = verdict_pb2.VALUE_FAMILY_TASK, verdict_pb2.VALUE_FAMILY_FRESH
FAMILIES = [family for family in verdict_pb2.ValueFamily.values() if family]
SEED = (1 << 62) + 8
"""Of rare values many, scattered."""
MATRIX = "[torch.rand(16, 32)]"


def source(setup: str, body: str, inputs: str = MATRIX, before: str = "") -> str:
    """A module of one file; `body` and `setup` are lines."""
    lines = ["import torch", before, "class Model(torch.nn.Module):"]
    if setup:
        lines += ["    def __init__(self):", "        super().__init__()", f"        {setup}"]
    lines += ["    def forward(self, x, *rest):", *(f"        {line}" for line in body.splitlines())]
    return "\n".join([*lines, "def get_inputs():", f"    return {inputs}", ""])


_OWN = """
if not hasattr(torch, 'unusual'):  # loaded again in one process, it would take the operations of the first away from it
    @torch.library.custom_op('unusual::sum', mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2
    @doubled.register_fake
    def _(x):
        return torch.empty_like(x)
    @torch.library.custom_op('unusual::count_', mutates_args=('hits',))
    def count(x: torch.Tensor, hits: torch.Tensor) -> None:
        hits.add_(x.shape[0])
    torch.unusual = doubled, count
doubled, count = torch.unusual
"""

_E4M3, _E5M2 = "torch.float8_e4m3fn", "torch.float8_e5m2"

MODULES = {
    "a value that is read": source("", "return x * x.sum().item()"),
    "an operation of its own": source("", "return torch.relu(doubled(torch.sin(x)))", before=_OWN),
    "an operation of its own that writes": source(
        "self.register_buffer('n', torch.zeros(32))", "count(x, self.n)\nreturn x + self.n", before=_OWN
    ),
    "a large table in an attribute": source("self.t = torch.randn(16384, 32)", "return x * self.t[: x.shape[0]]"),
    "a large attribute that is written and set anew": source(
        "self.h = torch.zeros(16384, 32)",
        "self.h.copy_(x[:1])\nself.h = torch.relu(self.h * 0.5)\nreturn x + self.h[: x.shape[0]]",
    ),
    "vmap": source(
        "self.l = torch.nn.Linear(32, 8)", "return torch.vmap(lambda one, two: self.l(one) * two.sum())(x, x.relu())"
    ),
    "autocast": source(
        "self.l = torch.nn.Linear(32, 8)",
        "with torch.autocast(x.device.type, torch.bfloat16):\n    return self.l(x).float().softmax(-1), x @ x.t()",
    ),
    "autocast that is off": source(
        "", "with torch.autocast('cuda', enabled=False):\n    return torch.relu(torch.outer(x[0], x[1]))"
    ),
    "a dict": source("", "return {'b': x * 2, 'a': x.sum(1)}"),
    "a named tuple": source(
        "",
        "return Pair(x * 2, x.sum(1))",
        before="import collections\nPair = collections.namedtuple('Pair', 'one two')",
    ),
    "a dataclass": source(
        "",
        "return Out(x * 2, x.sum(1))",
        before="import dataclasses\n@dataclasses.dataclass\nclass Out:\n    one: torch.Tensor\n    two: torch.Tensor",
    ),
    "None among outputs": source("", "return x * 2, None"),
    "numbers among outputs": source("", "return x * 2, 3, 0.5, True, 'mean'"),
    "an empty output": source("", "return x * 2, x[:0]"),
    "a scalar": source("", "return x.sum()"),
    "an index and a mask": source("", "return x.argmax(1), x > 0.5"),
    "complex inputs": source(
        "", "return x * rest[0].conj(), x.abs()", "[torch.randn(8, 4, dtype=torch.complex64) for _ in range(2)]"
    ),
    "complex outputs": source("", "return torch.fft.rfft(x)"),
    "complex numbers on the way": source("", "return torch.fft.irfft(torch.fft.rfft(x) * 2)"),
    "a complex factor": source("", "return (torch.fft.fft(x) * (0.5 + 2j)).abs()"),
    "weights of 8-bit floats": source(
        "self.register_buffer('w', torch.randn(32, 8).to(torch.float8_e4m3fn))",
        "return x @ (self.w.to(x.dtype) * 0.5)",
    ),
    "floats of 8 bits that come in": source("", "return x.to(torch.bfloat16) * 2", f"[torch.randn(8, 32).to({_E5M2})]"),
    "rows in floats of 8 bits": source(
        "",
        "return (x.to(torch.bfloat16) * rest[1]) @ (rest[0].to(torch.bfloat16) * rest[2]).t()",
        f"[torch.randn(32, 64).to({_E4M3}), torch.randn(48, 64).to({_E4M3}), torch.rand(32, 1).bfloat16(), "
        "torch.rand(48, 1).bfloat16()]",
    ),
    "a scaled product": source(
        "self.w = torch.nn.Buffer(torch.randn(48, 64).to(torch.float8_e4m3fn))",
        "return torch._scaled_mm(x, self.w.t(), rest[0], rest[1], out_dtype=torch.bfloat16)",
        f"[torch.randn(32, 64).to({_E4M3}), torch.rand(32, 1), torch.rand(1, 48)]",
    ),
    "a scaled product of whole tensors": source(
        "self.w = torch.nn.Buffer(torch.randn(48, 64).to(torch.float8_e4m3fn))",
        "return torch._scaled_mm(x, self.w.t(), rest[0], rest[1], out_dtype=torch.float32)",
        f"[torch.randn(32, 64).to({_E4M3}), torch.rand(()), torch.rand(())]",
    ),
    "rounded to floats of 8 bits": source(
        "", "scale = x.abs().amax(-1, keepdim=True) / 448\nreturn (x / scale).to(torch.float8_e4m3fn), scale"
    ),
    "a norm in floats of 8 bits": source(
        "self.n = torch.nn.LayerNorm(256).bfloat16()",
        "return self.n(x).to(torch.float8_e5m2)",
        "[torch.randn(64, 256).bfloat16()]",
    ),
    "a product of what is rounded to floats of 8 bits": source(
        "self.w = torch.nn.Buffer(torch.randn(48, 64).to(torch.float8_e4m3fn))",
        "scale = x.abs().amax(-1, keepdim=True) / 448\nshort = (x / scale).to(torch.float8_e4m3fn)\n"
        "return (short.float() * scale) @ self.w.float().t()",
        "[torch.randn(32, 64)]",
    ),
    "arguments by name only": source("", "return x * 2", MATRIX)
    .replace("*rest):", "*, scale, negate=True):")
    .replace("return x * 2", "return (-x if negate else x) * scale")
    .replace(f"return {MATRIX}", "return {'x': torch.rand(16, 32), 'scale': torch.rand(32)}"),
    "what a mask picks": source("", "return x[x > 0.5].sum() * x"),
    "what a mask picks, written in place": source("", "y = x.clone()\ny[x > 0.5] = y[x > 0.5] * 0.1\nreturn y + x"),
    "rows to two experts": source(
        "self.a, self.b = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)",
        "chosen = x[:, 0] > x[:, 1]\ny = torch.zeros_like(x)\n"
        "for rows, expert in ((torch.where(chosen)[0], self.a), (torch.where(~chosen)[0], self.b)):\n"
        "    y.index_add_(0, rows, expert(x[rows]))\nreturn y",
    ),
    "a number that a call has to know": source(
        "", "return x.roll(rest[0].item(), 1) * x[:, : rest[0].item()].amax()", "[torch.rand(16, 32), torch.tensor(5)]"
    ),
    "complex parameters": source(
        "self.w = torch.nn.Parameter(torch.randn(32, dtype=torch.complex128))", "return x * self.w"
    ),
    "a running mean": source(
        "self.register_buffer('mean', torch.zeros(32))",
        "self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)\nreturn x - self.mean",
    ),
    "a running mean that is set anew": source(
        "self.register_buffer('mean', torch.zeros(32))",
        "self.mean = 0.9 * self.mean + 0.1 * x.mean(0)\nreturn x - self.mean",
    ),
    "a counter": source("self.register_buffer('n', torch.zeros((), dtype=torch.int64))", "self.n += 1\nreturn x * 2"),
    "dropout": source("self.d = torch.nn.Dropout(0.3)", "return self.d(x) * 2"),
    "a norm that is put in eval by the constructor": source(
        "self.n = torch.nn.BatchNorm1d(32); self.eval()", "return self.n(x)"
    ),
    "a norm that is put in eval by forward": source(
        "self.n = torch.nn.BatchNorm1d(32)", "self.n.eval()\nreturn self.n(x)"
    ),
    "an embedding bag": source(
        "self.e = torch.nn.EmbeddingBag(50, 8, mode='mean')",
        "return self.e(x, rest[0])",
        "[torch.randint(0, 50, (40,)), torch.tensor([0, 5, 9, 20])]",
    ),
    "positions": source("self.e = torch.nn.Embedding(64, 8)", "return self.e(x)", "[torch.arange(32)]"),
    "classes": source(
        "", "return torch.nn.functional.cross_entropy(x, rest[0])", "[torch.randn(16, 10), torch.randint(0, 10, (16,))]"
    ),
    "a gather": source("", "return x.gather(1, rest[0])", "[torch.randn(16, 10), torch.randint(0, 10, (16, 4))]"),
    "a scatter": source(
        "", "return torch.zeros(16, 4).index_copy(0, rest[0], x)", "[torch.rand(16, 4), torch.randperm(16)]"
    ),
    "a divisor": source("", "return x // rest[0]", "[torch.randint(0, 100, (16,)), torch.randint(1, 8, (16,))]"),
    "a mask": source(
        "",
        "return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=rest[0])",
        "[torch.rand(2, 4, 16, 8), torch.ones(16, 16, dtype=torch.bool).tril()]",
    ),
    "probabilities": source(
        "",
        "return torch.nn.functional.binary_cross_entropy(x, rest[0])",
        "[torch.rand(16, 4), torch.rand(16, 4).round()]",
    ),
    "a lazy layer": source("self.l = torch.nn.LazyLinear(8)", "return self.l(x)"),
    "weights packed by the first call": source(
        "self.l = torch.nn.Linear(32, 8); self.packed = None",
        "if self.packed is None:\n    self.packed = self.l.weight.detach().t().contiguous()\nreturn x @ self.packed",
    ),
    "a constructor's argument that is a module": (
        "import torch\nclass Model(torch.nn.Module):\n    def __init__(self, block):\n        super().__init__()\n"
        "        self.block = block\n    def forward(self, x):\n        return self.block(x)\n"
        "def get_init_inputs():\n    return [torch.nn.Linear(32, 4).eval()]\n"
        f"def get_inputs():\n    return {MATRIX}\n"
    ),
    "inputs in a dict": source("", "return x['a'] * x['b']", "[{'a': torch.rand(4, 4), 'b': torch.rand(4, 4)}]"),
    "inputs that are no tensors": source(
        "", "return x * rest[0] if rest[1] is None else x", "[torch.rand(4, 4), 2.5, None]"
    ),
    "inputs without dimensions": source(
        "", "return x * rest[0] + rest[1]", "[torch.rand(4), torch.tensor(2.0), torch.tensor(3)]"
    ),
    "an empty input": source("", "return torch.cat([x, rest[0]])", "[torch.rand(4, 4), torch.rand(0, 4)]"),
    "expanded inputs": source(
        "self.e = torch.nn.Embedding(9, 8)",
        "return self.e(x) * rest[0]",
        "[torch.randint(0, 9, (4, 1)).expand(4, 6), torch.rand(4, 1, 1).expand(4, 6, 8)]",
    ),
    "transposed and strided inputs": source(
        "", "return x @ rest[0]", "[torch.rand(4, 6).t(), torch.rand(8, 24)[::2, 1::3]]"
    ),
    "an input that is changed": source("", "x += 1\nreturn x * 2"),
    "halves and doubles": source(
        "",
        "return x.softmax(1), rest[0].softmax(1)",
        "[torch.rand(8, 8).half(), torch.rand(8, 8, dtype=torch.float64)]",
    ),
    "a parametrization": source(
        "self.l = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(32, 8))", "return self.l(x)"
    ),
}


class Desk:
    """Judge and candidate's side of one module, in this process; the candidate is plan zero."""

    def __init__(self, small: Any, text: str) -> None:
        self.task, self.small = small.task(text), small
        self._descriptor = os.memfd_create("test")
        self.shared = SharedMemory(self._descriptor)
        self.judge = Judge(LoadedTask.load(self.task), self.shared)
        os.ftruncate(self._descriptor, self.judge.total_bytes)
        self.bench = Bench(LoadedTask.load(self.task))

    @property
    def report(self) -> judging_pb2.Preparation:
        return self.judge.cases.report

    def compare(self, family: Any) -> verdict_pb2.Comparison:
        """Raises BadInput where the reference refuses the family."""
        self.judge.answers.of(family, SEED)
        program = self.small.plan_zero(self.judge.graph)
        self.bench.load(judging_pb2.LoadRequest(program=program, artifact=self.small.compiled(program)))
        request = judging_pb2.ExecuteRequest(
            family=family, seed=SEED, regions=self.judge.regions, learned=self.report.learned
        )
        return self.judge.judge(self.bench.execute(request, self.shared))

    def leaves(self, family: Any, seed: int = SEED) -> list[torch.Tensor]:
        """The inputs of a case that the reference takes."""
        args, _ = self.judge.cases.taken(family, seed)
        return self.judge._loaded.user.tensor_leaves(args)

    def close(self) -> None:
        os.close(self._descriptor)
