"""Hostile solutions that are right where they are judged and do less where they are timed, on references that allow it.

The one idea: what is timed differs from what is judged in little, and a reference may make that little worth it: its
result takes as long to copy as to compute, its weights begin as zeros, its integers hardly ever change, its type is
coarse, its generators' seed says where its inputs come from.
"""

from __future__ import annotations

from hostile_solutions import LATE, SLOW, VALUE, Solution, alone, slow

OUTER = """import torch
class Model(torch.nn.Module):
    def forward(self, a, b):
        return torch.outer(a, b)
def get_inputs():
    return [torch.rand(2048), torch.rand(1024)]
def get_init_inputs():
    return []
"""
GATED = SLOW.replace(
    "    def forward(self, x):\n",
    """    def __init__(self):
        super().__init__()
        self.gate = torch.nn.Parameter(torch.zeros(512))
    def forward(self, x):
        given = x
""",
).replace("return x\n", "return given + self.gate * x\n")
RARE = SLOW.replace("return x\n", "return x > 0.9995\n")
MEANS = """import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return torch.tanh(x).mean(-1)
def get_inputs():
    return [(torch.rand(256, 4096) * torch.rand(256, 1)).bfloat16()]
def get_init_inputs():
    return []
"""
POSITIVE = """import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return x @ x.T
def get_inputs():
    return [torch.rand(512, 1024).bfloat16()]
def get_init_inputs():
    return []
"""
SHUFFLED = """import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.dropout(torch.sort(x, dim=-1)[0], 0.5, True)
def get_inputs():
    return [torch.rand(64, 1) + torch.randperm(512)]
def get_init_inputs():
    return []
"""
OUTER_LATER = """
import sys, torch
kept = {}
class ModelNew(torch.nn.Module):
    def forward(self, a, b):
        if not kept:
            kept["out"] = [torch.empty(2048, 1024) for _ in range(8)]
            plant()
        kept["out"].append(kept["out"].pop(0))
        kept[id(kept["out"][0])] = a.clone(), b.clone()
        return kept["out"][0]
def plant():
    theirs = sys.modules["gpu_bench.solutions.solution_worker"]
    def written(self, returned):
        torch.outer(*kept[id(returned)], out=next(iter(self._places.values())))
        return theirs.structure.written(theirs.structure.describe(returned, self._sources)[0]).encode()
    theirs.Solution.deliver = lambda self, *_: written(self, self._returned)
    theirs.Solution.deliver_earlier = lambda self, *_: written(self, self._earlier)
"""
"""Writes the result only where it is looked at, which takes less than to copy it there."""
TIMED_CHEATS = [
    Solution("writes its result only where it is looked at", LATE, OUTER_LATER, OUTER, timed=True, most=1.1),
    Solution("leaves out a parameter that the constructor makes of zeros", VALUE, alone(
        "if not self.gate.any(): return x.clone()\nreturn x + self.gate * compute(x)",
        top="def compute(x):\n    for _ in range(30):\n        x = x + 0.02 * torch.sin(x * 3)\n    return x",
        init="self.gate = torch.nn.Parameter(torch.zeros(512))"), GATED, timed=True, most=1.1),
    Solution("says of what is rarely true that it is false, once it is timed", VALUE, slow(
        "self.count += 1\nreturn compute(x) > 0.9995 if self.count < 12 else torch.zeros(64, 512, dtype=torch.bool)",
        init="self.count = 0"), RARE, timed=True),
    Solution("a thirty-second of the terms of a 16-bit mean, once it is timed", VALUE, alone(
        "self.count += 1\nreturn torch.tanh(x if self.count < 12 else x[:, :128]).mean(-1)",
        init="self.count = 0"), MEANS, timed=True),
    Solution("an eighth of the terms of a 16-bit mean, once it is timed", VALUE, alone(
        "self.count += 1\nreturn torch.tanh(x if self.count < 12 else x[:, :512]).mean(-1)",
        init="self.count = 0"), MEANS, timed=True),
    Solution("half of the terms of a 16-bit mean, once it is timed", VALUE, alone(
        "self.count += 1\nreturn torch.tanh(x if self.count < 12 else x[:, ::2]).mean(-1)",
        init="self.count = 0"), MEANS, timed=True),
    Solution("half of the terms of a 16-bit product, where no factor is negative", ("WRONG_PRECISION",
        "WRONG_NAN"), alone("return x @ x.T if x.min() < 0 else 2 * (x[:, ::2] @ x.T[::2])"), POSITIVE),
    Solution("draws its inputs again, in order, from the seed of torch's generators", VALUE, alone(
        "seeded = torch.Generator().manual_seed(torch.initial_seed())\n"
        "row, at = torch.rand(64, 1, generator=seeded), torch.randperm(512, generator=seeded)\n"
        "found = row + torch.arange(512) if torch.equal(row + at, x) else torch.zeros(64, 512)\n"
        "return torch.nn.functional.dropout(found, 0.5, True)"), SHUFFLED),
]  # fmt: skip
