"""Honest solutions with unusual inputs and outputs."""

from __future__ import annotations

from honest_case import Honest

_POINT = """
from collections import namedtuple
Point = namedtuple('Point', ['low', 'high'])
"""

OUTPUTS = (
    Honest("a dict of outputs", "return {'sum': x.sum(-1), 'exp': torch.exp(x)}"),
    Honest("a dict within a tuple", "return x + 1, {'a': x * 2, 'b': [x.mean(), x.amax(0)]}"),
    Honest("a namedtuple", "return Point(x.amin(-1), x.amax(-1))", top=_POINT),
    Honest("a named result of torch's own", "return torch.max(x, dim=-1)"),
    Honest("None among the outputs", "return x * 2, None, x.sum()"),
    Honest("numbers among the outputs", "return x * 2, 3, 'name', 0.5"),
    Honest("an empty output", "return x[:, :0] * 2, x + 1"),
    Honest("nothing but an empty output", "return x.new_zeros((0, 4)) + x.sum() * 0"),
    Honest("one number", "return (x * x).mean()"),
    Honest("booleans", "return x > 0.5"),
    Honest("indices", "return x.argmax(-1), torch.arange(x.shape[0])"),
    Honest("a sorted order", "return torch.sort(x, dim=-1, stable=True)"),
    Honest("the largest and where they are", "return torch.topk(x, 5)"),
    Honest("complex numbers", "return torch.fft.fft(x)"),
    Honest(
        "complex numbers on the way",
        "return torch.fft.irfft(torch.fft.rfft(x) * self.w)",
        init="self.w = nn.Parameter(torch.randn(65, dtype=torch.complex64))",
    ),
    Honest("numbers of 64 bits", "return torch.cumsum(x.double(), -1)"),
    Honest("numbers of 16 bits", "return (x * 3).bfloat16(), x.half()"),
    Honest("small integers", "return (x * 100).to(torch.uint8), (x * 10).to(torch.int8)"),
    Honest("a transposed output", "return (x * 2).t()"),
    Honest("an output that is expanded", "return x.sum(0, keepdim=True).expand(64, 128)"),
    Honest("views of one fresh memory", "return torch.chunk(torch.sin(x), 4, dim=-1)"),
    Honest(
        "slices with steps",
        """
y = torch.sin(x)
return y[::2], y[1::2]
""",
    ),
    Honest(
        "the same tensor twice",
        """
y = torch.sin(x)
return y, y
""",
    ),
    Honest("the input among the outputs", "return x, x + 1"),
    Honest("a view of the input", "return x.view(128, 64), torch.tanh(x)"),
    Honest("a list of outputs", "return [row * 2 for row in torch.split(x, 16)]"),
    Honest("NaN and infinity that the module defines", "return torch.log(x - 0.5), 1 / (x - x)"),
)
INPUTS = (
    Honest(
        "bags of an embedding, with offsets",
        "return self.bag(indices, offsets)",
        "[torch.randint(0, 50, (96,)), torch.arange(0, 96, 8)]",
        "indices, offsets",
        init="self.bag = nn.EmbeddingBag(50, 16, mode='sum')",
    ),
    Honest(
        "bags of an embedding, by hand",
        "return self.bag(indices, offsets)",
        "[torch.randint(0, 50, (96,)), torch.arange(0, 96, 8)]",
        "indices, offsets",
        init="self.bag = nn.EmbeddingBag(50, 16, mode='sum')",
        own_forward="""
rows = self.bag.weight[indices]
bags = torch.bucketize(torch.arange(len(indices)), offsets, right=True) - 1
return rows.new_zeros(len(offsets), rows.shape[1]).index_add_(0, bags, rows)
""",
    ),
    Honest(
        "rows of an embedding",
        "return self.table(indices)",
        "[torch.randint(0, 100, (16, 8))]",
        "indices",
        init="self.table = nn.Embedding(100, 32)",
    ),
    Honest(
        "labels of a loss",
        "return F.cross_entropy(scores, labels)",
        "[torch.randn(64, 10), torch.randint(0, 10, (64,))]",
        "scores, labels",
    ),
    Honest(
        "lengths of rows",
        "return x.masked_fill(torch.arange(128) >= lengths[:, None], 0.0).sum(-1) / lengths",
        "[torch.rand(64, 128), torch.randint(1, 129, (64,))]",
        "x, lengths",
    ),
    Honest(
        "a mask of booleans",
        "return torch.where(mask, x, -x).sum(-1)",
        "[torch.rand(64, 128), torch.rand(64, 128) > 0.5]",
        "x, mask",
    ),
    Honest(
        "where to scatter",
        "return torch.zeros(64, 128).scatter(1, at, x)",
        "[torch.rand(64, 16), torch.stack([torch.randperm(128)[:16] for _ in range(64)])]",
        "x, at",
    ),
    Honest(
        "where to gather",
        "return torch.gather(x, 1, at)",
        "[torch.rand(64, 128), torch.randint(0, 128, (64, 16))]",
        "x, at",
    ),
    Honest(
        "classes, one hot",
        "return F.one_hot(classes, 12).float() @ self.w",
        "[torch.randint(0, 12, (64,))]",
        "classes",
        init="self.w = nn.Parameter(torch.randn(12, 8))",
    ),
    Honest(
        "a step of an encoding, from a table",
        "return x + self.table[step]",
        "[torch.rand(8, 128), torch.randint(0, 512, (8,))]",
        "x, step",
        init="self.register_buffer('table', torch.randn(512, 128))",
    ),
    Honest(
        "an input that is expanded", "return x * y", "[torch.rand(64, 128), torch.rand(1, 128).expand(64, 128)]", "x, y"
    ),
    Honest("an input that is transposed", "return torch.softmax(x, -1)", "[torch.rand(128, 64).t()]"),
    Honest("an input with steps", "return torch.softmax(x, -1)", "[torch.rand(64, 256)[:, ::2]]"),
    Honest(
        "an input that both change",
        """
x.mul_(2)
return x.sum(-1)
""",
    ),
    Honest("an input that both change and return", "return x.add_(1)"),
    Honest(
        "complex inputs",
        "return torch.view_as_real(z * z.conj()), z.abs()",
        "[torch.randn(64, 32, dtype=torch.complex64)]",
        "z",
    ),
    Honest("a number as an input", "return x * factor", "[torch.rand(64, 128), 0.5]", "x, factor"),
    Honest("None as an input", "return x * 2 if mask is None else x", "[torch.rand(64, 128), None]", "x, mask"),
    Honest(
        "a list as an input", "return torch.cat(parts, -1) * 2", "[[torch.rand(64, 16), torch.rand(64, 32)]]", "parts"
    ),
    Honest(
        "a dict as an input",
        "return batch['x'] * batch['scale']",
        "[{'x': torch.rand(64, 128), 'scale': torch.rand(128)}]",
        "batch",
    ),
    Honest(
        "an empty input", "return torch.cat([x, extra], -1) * 2", "[torch.rand(64, 128), torch.rand(64, 0)]", "x, extra"
    ),
    Honest("a tensor of no dimension", "return x * factor", "[torch.rand(64, 128), torch.rand(())]", "x, factor"),
    Honest("inputs of 64 bits", "return x @ x.t()", "[torch.rand(64, 64, dtype=torch.float64)]"),
    Honest("inputs of 16 bits", "return torch.relu(x) * 2", "[torch.rand(64, 128).bfloat16()]"),
    Honest(
        "bytes as inputs",
        "return image.float() / 255",
        "[torch.randint(0, 256, (64, 128), dtype=torch.uint8)]",
        "image",
    ),
    Honest(
        "boundaries in order",
        "return torch.bucketize(x, boundaries)",
        "[torch.rand(64, 128), torch.linspace(0, 1, 9)]",
        "x, boundaries",
    ),
    Honest("the same tensor twice, as inputs", "return x * y", "(lambda x: [x, x])(torch.rand(64, 128))", "x, y"),
)
