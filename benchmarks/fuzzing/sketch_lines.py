"""The lines that random modules are made of: tables of PyTorch calls with places to fill.

The one idea: a table a class of operations, so that a new operation joins by one line. `{0}` is a value of the module,
`{1}` and on are others, by default ones that broadcast against it; `<name>` is drawn by `draw_token` to fit `{0}`. A
line need not suit every value: `random_modules` drops what PyTorch refuses.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Final

import torch

Line = tuple[str, ...]
"""The text, then the kinds of the operands after the first: mate, condition, first, last, channels or statistics."""


def _lines(*lines: str | Line) -> list[Line]:
    return [(line,) if isinstance(line, str) else line for line in lines]


_UNARY = _lines(
    "-{0}", "{0}.abs()", "torch.sign({0})", "torch.square({0})", "torch.floor({0})", "torch.ceil({0})",
    "torch.round({0})", "torch.trunc({0})", "torch.reciprocal({0})", "torch.exp({0})", "torch.exp2({0})",
    "torch.expm1({0})", "torch.log({0}.abs() + 0.5)", "torch.log2({0}.abs() + 0.25)", "torch.log10({0}.abs() + 0.5)",
    "torch.log1p({0}.abs())", "torch.sqrt({0}.abs())", "torch.rsqrt({0}.abs() + 0.5)", "torch.sin({0})",
    "torch.cos({0})", "torch.tan({0})", "torch.atan({0})", "torch.asin({0}.clamp(-1, 1))",
    "torch.acos({0}.clamp(-0.9, 0.9))", "torch.sinh({0})", "torch.cosh({0})", "torch.tanh({0})", "torch.erf({0})",
    "torch.erfc({0})", "torch.sigmoid({0})", "~{0}", "torch.logical_not({0})", "torch.isnan({0})", "torch.frac({0})",
    "torch.logit({0}.sigmoid() * 0.8 + 0.1)", "torch.nan_to_num({0})", "torch.sgn({0})", "torch.deg2rad({0})",
)  # fmt: skip
_ACTIVATIONS = _lines(
    "F.relu({0})", "F.relu6({0})", "F.gelu({0})", 'F.gelu({0}, approximate="tanh")', "F.silu({0})", "F.mish({0})",
    "F.hardswish({0})", "F.hardsigmoid({0})", "F.softplus({0})", "F.softplus({0}, 2.0, 3.0)", "F.elu({0}, <real>)",
    "F.selu({0})", "F.celu({0}, 0.7)", "F.leaky_relu({0}, 0.1)", "{0}.clamp(-1, 2)", "{0}.clamp(min=<real>)",
    "{0}.clamp(max=<integer>)", "F.hardtanh({0})", "F.softsign({0})", "F.logsigmoid({0})", "F.tanhshrink({0})",
    "F.hardshrink({0})", "F.softshrink({0}, 0.3)", "F.threshold({0}, 0.1, 20.0)", "F.glu({0}, <dim>)",
    ("F.prelu({0}, {1})", "channels"),
)  # fmt: skip
_SCALARS = _lines(
    "{0} + <real>", "{0} - <integer>", "<real> - {0}", "{0} * <real>", "{0} * <integer>", "{0} / <integer>",
    "{0} / <real>", "<real> / ({0}.abs() + 0.5)", "{0} ** 2", "{0} ** 3", "{0}.abs() ** 0.5", "({0}.abs() + 0.5) ** -1",
    "({0}.abs() + 0.5) ** 1.5", "1.5 ** {0}", "{0} // <integer>", "{0} % <integer>", "torch.fmod({0}, <integer>)",
    "{0} % -3", 'torch.div({0}, <integer>, rounding_mode="trunc")', "{0} > <real>", "{0} <= <integer>",
    "{0} == <integer>", "{0} != 0", "torch.add({0}, <integer>, alpha=2)", "{0} & 3", "{0} | 4", "{0} ^ 5",
    "{0} << 1", "{0}.masked_fill({0} > <real>, <real>)", "torch.where({0} > 0, {0}, <real>)",
    "torch.maximum({0}, {0}.new_full((), <real>))", "torch.rsub({0}, <real>)",
)  # fmt: skip
_BINARY = _lines(
    "{0} + {1}", "{0} - {1}", "{1} - {0}", "{0} * {1}", "{0} / ({1}.abs() + 1)", "{1} / ({0}.abs() + 1)",
    "torch.maximum({0}, {1})", "torch.minimum({0}, {1})", "torch.fmax({0}, {1})", "torch.fmin({0}, {1})",
    "torch.add({0}, {1}, alpha=<integer>)", "torch.sub({0}, {1}, alpha=<integer>)", "torch.atan2({0}, {1})",
    "({0}.abs() + 0.5) ** ({1}.clamp(-2, 2))", 'torch.div({0}, {1}.abs() + 1, rounding_mode="floor")',
    'torch.div({0}, {1}.abs() + 1, rounding_mode="trunc")', "torch.remainder({0}, {1}.abs() + 1)",
    "torch.fmod({0}, {1}.abs() + 1)", "{0} // ({1}.abs() + 1)", "{0} < {1}", "{0} >= {1}", "{0} == {1}",
    "{0} != {1}", "torch.logical_and({0}, {1})", "torch.logical_or({0}, {1})", "torch.logical_xor({0}, {1})",
    "{0} & {1}", "{0} | {1}", "{0} ^ {1}", "torch.lerp({0}, {1}, 0.3)", "torch.addcmul({0}, {1}, {2}, value=0.5)",
    "torch.addcdiv({0}, {1}, {2}.abs() + 1, value=0.5)", "torch.where({0} > {1}, {0}, {1})",
    "{0} * torch.sigmoid({1})", "torch.hypot({0}, {1})", "torch.logaddexp({0}, {1})", "torch.clamp({0}, max={1})",
    "torch.copysign({0}, {1})", "({0} - {1}) ** 2",
    ("torch.where({1}, {0}, {2})", "condition", "mate"),
    ("torch.where({1}, {0}, <real>)", "condition"),
    ("{0}.masked_fill({1}, <real>)", "condition"),
)  # fmt: skip
_REDUCTIONS = _lines(
    "{0}.sum()", "{0}.sum(<dims>, keepdim=<flag>)", "{0}.sum(<dim>)", "{0}.mean(<dims>, keepdim=<flag>)", "{0}.mean()",
    "{0}.amax(<dims>, keepdim=<flag>)", "{0}.amin(<dims>, keepdim=<flag>)", "{0}.max()", "{0}.min(<dim>).values",
    "{0}.max(<dim>, keepdim=<flag>).values", "({0}.clamp(-1, 1) * 0.5 + 1).prod(<dim>, keepdim=<flag>)",
    "{0}.var(<dims>, keepdim=<flag>)", "{0}.var(<dim>, correction=0)", "{0}.std(<dims>, keepdim=<flag>)",
    "{0}.var(<dims>, unbiased=False, keepdim=True)", "({0} > <real>).any(<dim>)",
    "({0} > <real>).all(<dim>, keepdim=<flag>)",
    "({0} > <real>).sum(<dims>)", "{0}.any()", "torch.logsumexp({0}, <dims>, keepdim=<flag>)", "{0}.norm()",
    "torch.linalg.vector_norm({0}, 2, <dims>, <flag>)", "torch.linalg.vector_norm({0}, 1, <dims>, <flag>)",
    "torch.linalg.vector_norm({0}, float('inf'), <dims>, <flag>)", "{0}.sum(<dims>, dtype=torch.float64)",
    "{0}.sum(<dims>, dtype=torch.float32)", "torch.count_nonzero({0}, <dim>)", "{0}.aminmax(dim=<dim>)[1]",
    "torch.var_mean({0}, <dims>, keepdim=<flag>)[1]", "{0} - {0}.mean(<dims>, keepdim=True)",
    "{0} / (1 + {0}.abs().amax(<dims>, keepdim=True))", "{0} * {0}.sum(<dims>, keepdim=True).sigmoid()",
    ("F.mse_loss({0}, {1})", "mate"),
    ("F.l1_loss({0}, {1}, reduction='sum')", "mate"),
    ("F.smooth_l1_loss({0}, {1})", "mate"),
    ("F.kl_div(F.log_softmax({0}, -1), F.softmax({1}, -1), reduction='batchmean')", "mate"),
    ("F.cosine_similarity({0}, {1}, <dim>)", "mate"),
    ("({0} * {1}).sum(<dim>)", "mate"),
    ("{0} @ {1}", "last"),
)  # fmt: skip
_NORMS = _lines(
    "F.softmax({0}, <dim>)", "F.log_softmax({0}, <dim>)", "F.softmin({0}, <dim>)", "F.layer_norm({0}, {0}.shape[-1:])",
    "F.layer_norm({0}, {0}.shape[-2:])", "F.rms_norm({0}, {0}.shape[-1:])", "F.normalize({0}, dim=<dim>)",
    "F.normalize({0}, p=1, dim=<dim>)", "F.instance_norm({0})", "F.group_norm({0}, 1)", "F.group_norm({0}, 2)",
    "F.batch_norm({0}, None, None, training=True)",
    ("F.layer_norm({0}, {0}.shape[-1:], {1}, {2})", "last", "last"),
    ("F.rms_norm({0}, {0}.shape[-1:], {1})", "last"),
    ("F.group_norm({0}, 1, {1}, {2})", "channels", "channels"),
    ("F.batch_norm({0}, {1}, {2}.abs() + 0.5)", "statistics", "statistics"),
    ("F.batch_norm({0}, None, None, {1}, {2}, training=True)", "channels", "channels"),
)  # fmt: skip
_VIEWS = _lines(
    "{0}.permute(<order>)", "{0}.transpose(<dim>, <dim>)", "{0}.reshape(<shape>)", "{0}.flatten()",
    "{0}.unsqueeze(<dim>)",
    "{0}.squeeze()", "{0}[<slices>]", "{0}.select(<dim>, 0)", "{0}.select(<dim>, -1)", "{0}.flip(<dims>)",
    "{0}.chunk(2, <dim>)[0]", "{0}.chunk(2, <dim>)[1]", "{0}.unbind(<dim>)[-1]", "{0}.expand(2, *{0}.shape)",
    "{0}.t()", "torch.tril({0})", "torch.triu({0}, 1)", "{0}.contiguous()", "{0}.narrow(<dim>, 0, 1)",
    "{0}.movedim(0, -1)", "{0}.unflatten(-1, (1, -1))", "torch.stack([{0}, {0} * 2], <dim>)",
    "torch.cat([{0}, {0} + 1], <dim>)", "F.pad({0}, (1, 2))", "F.pad({0}, (-1, 1), value=1.5)",
    "{0}.repeat(2, *[1] * {0}.dim())",
    "torch.roll({0}, 1, <dim>)", "{0}.diagonal()", "{0}.clone()", "torch.zeros_like({0}) + {0}",
    ("torch.cat([{0}, {1}], <dim>)", "mate"),
)  # fmt: skip
_CASTS = _lines(
    "{0}.to(torch.<type>)", "{0}.float()", "{0}.double()", "({0} > 0).to(torch.<type>)", "{0}.half().float()"
)
_WRITES = _lines(
    "{0}.add_(<real>)", "{0}.add_(<integer>)", "{0}.mul_(<real>)", "{0}.relu_()", "F.relu({0}, inplace=True)",
    "{0}.sigmoid_()", "{0}.clamp_(min=<real>)", "{0}[<slices>].mul_(2)", "{0}.select(<dim>, 0).add_(1)", "{0}.neg_()",
    "{0}.masked_fill_({0} > 0, <integer>)", "{0}.exp_()", "{0}.t().add_(1)",
    ("{0}.add_({1})", "mate"),
    ("{0}.mul_({1})", "mate"),
    ("{0}.copy_({1})", "mate"),
    ("{0}.add_({1}, alpha=2)", "mate"),
)  # fmt: skip
_INDICES = _lines(
    "{0} + torch.arange({0}.shape[-1])", "{0} * (torch.arange({0}.shape[-1]) % 3 - 1)",
    "{0} + torch.ones({0}.shape[-1:], dtype=torch.<type>)", "{0} * torch.linspace(0, 1, {0}.shape[-1])",
)  # fmt: skip
_LOOKUPS = _lines(
    "{0}[..., [0, -1, 0]]", "{0}.index_select(<dim>, torch.arange({0}.shape[<dim>]).flip(0) // 2)",
    "{0}[torch.arange({0}.shape[0]) // 2]", "torch.roll({0}, (2, -1), (0, -1))", "F.pad({0}, (2, 0, 1, 1))",
    "F.pad({0}, (1, 2), value=float('-inf')).softmax(-1)",
    "torch.stack([{0}, {0}.exp(), {0}[..., :]], <dim>).sum(<dim>)", "torch.norm({0}, p=3, dim=<dim>)",
    "torch.linalg.vector_norm({0}, 1.5)", "{0}.clamp({0} * 0.5, {0}.abs())",
    ("torch.take_along_dim({0}, (({1} > 0).long() + ({1} > 1).long()) % {0}.shape[-1], -1)", "mate"),
    ("torch.take_along_dim({0}.exp(), ({1} > 0).long() % {0}.shape[-1], -1)", "mate"),
    ("{0}[..., ({1} > 0).long() % {0}.shape[-1]]", "last"),
    ("F.embedding(({1} > 0).long() % {0}.shape[0], {0})", "last"),
    ("torch.cat([{0}[..., :1], {1}, {0}], -1)", "mate"),
    ("F.cross_entropy({0}, ({1} > 0).long(), reduction='none')", "first"),
    ("F.cross_entropy({0}, ({1} > 0).long(), label_smoothing=0.1)", "first"),
    ("F.nll_loss({0}, ({1} > 0).long(), ignore_index=1)", "first"),
    ("F.triplet_margin_loss({0}, {1}, {0} * {1})", "mate"),
    ("F.hinge_embedding_loss({0}, torch.where({1} > 0, 1.0, -1.0))", "mate"),
)  # fmt: skip
_SCANS = _lines(
    "{0}.cumsum(<dim>)", "{0}.flip(<dim>).cumsum(<dim>)", "({0}.clamp(-1, 1) * 0.5 + 1).cumprod(<dim>)",
    "{0}.argmax(<dim>, keepdim=<flag>)", "{0}.argmin(<dim>)", "{0}.max(<dim>).indices",
    "{0} * ({0}.argmax(-1, keepdim=True) == torch.arange({0}.shape[-1]))", "{0}.flip(-1).cumsum(-1).flip(-1)",
    "torch.cat([torch.zeros_like({0}[..., :1]), {0}[..., :-1].cumsum(-1)], -1)", "({0} > <real>).cumsum(<dim>)",
    "{0}.cumsum(<dim>) - {0}", "torch.argmin({0})",
)  # fmt: skip
_WINDOWS = _lines(
    "F.avg_pool1d({0}, 2)", "F.avg_pool1d({0}, 3, 2, 1)", "F.max_pool1d({0}, 3, 1)", "F.avg_pool2d({0}, 2)",
    "F.max_pool2d({0}, 3, 2, 1)", "F.adaptive_avg_pool2d({0}, 1)", "F.max_pool2d({0}, 2).relu()",
    "F.max_pool2d({0}, 2, 1, 1, return_indices=True)[1]", "F.lp_pool1d({0}, 2.0, 2)",
    "F.avg_pool2d({0}, 3, 2, 1, ceil_mode=True, count_include_pad=False)",
)  # fmt: skip

FAMILIES: Final[list[tuple[int, list[Line]]]] = [
    (16, _UNARY), (14, _ACTIVATIONS), (14, _SCALARS), (22, _BINARY), (14, _REDUCTIONS), (10, _NORMS), (18, _VIEWS),
    (5, _CASTS), (6, _WRITES), (2, _INDICES), (8, _LOOKUPS), (5, _SCANS), (5, _WINDOWS),
]  # fmt: skip
"""(weight, lines) of each class of operations."""


def draw_token(name: str, value: torch.Tensor, draw: random.Random) -> str:
    """What stands for `<name>` in a line whose first operand is `value`."""
    return _TOKENS[name](value, draw)


def _dims(value: torch.Tensor, draw: random.Random) -> str:
    rank = max(1, value.dim())
    return repr(tuple(sorted(draw.sample(range(rank), draw.randint(1, rank)))))


def _order(value: torch.Tensor, draw: random.Random) -> str:
    return repr(tuple(draw.sample(range(value.dim()), value.dim())))


def _shape(value: torch.Tensor, draw: random.Random) -> str:
    """Two neighbouring dimensions merged, or one split."""
    shape = list(value.shape)
    if len(shape) > 1 and draw.random() < 0.5:
        at = draw.randrange(len(shape) - 1)
        shape[at : at + 2] = [shape[at] * shape[at + 1]]
    elif shape:
        at = draw.randrange(len(shape))
        factor = draw.choice([f for f in range(1, 9) if shape[at] % f == 0])
        shape[at : at + 1] = [factor, shape[at] // factor]
    return repr(tuple(shape))


def _slices(value: torch.Tensor, draw: random.Random) -> str:
    """One slice a dimension, at most two of them not whole."""
    parts = [":"] * max(1, value.dim())
    for _ in range(draw.randint(1, 2)):
        at = draw.randrange(len(parts))
        parts[at] = draw.choice(("1:", ":-1", "::2", "1::2", "::3", "1:3", "-2:", "2::5"))
    return ", ".join(parts)


_TOKENS: Mapping[str, Callable[[torch.Tensor, random.Random], str]] = {
    "real": lambda _, draw: repr(draw.choice((0.5, 1.5, -0.7, 2.0, 0.1, -1.25, 3.0))),
    "integer": lambda _, draw: repr(draw.choice((1, 2, 3, 5, 7))),
    "flag": lambda _, draw: repr(draw.random() < 0.5),
    "dim": lambda value, draw: repr(draw.randrange(-max(1, value.dim()), max(1, value.dim()))),
    "type": lambda _, draw: draw.choice(("float32", "float64", "float16", "bfloat16", "int64", "int32", "bool")),
    "dims": _dims,
    "order": _order,
    "shape": _shape,
    "slices": _slices,
}
