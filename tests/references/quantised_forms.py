"""Forms in which modules multiply by a weight that is kept in few bits: how it lies, is scaled, and packed."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.nn.functional import linear

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
Form = tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]
M, N, K = 16, 80, 256
"""Rows of the left, outputs, depth."""
GROUP = 64
NIBBLES = torch.arange(0, 32, 4, dtype=torch.int32)
ORDER = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7]) * 4
"""Of AWQ: where the nibble of each of eight neighbours begins."""
NF4 = torch.tensor([
    -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0, 0.0795803, 0.1609302,
    0.24611230, 0.33791524, 0.44070983, 0.5626170, 0.72295684, 1.0,
])  # fmt: skip
"""Dettmers et al. 2023, *QLoRA*, appendix E."""


def short(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def scales(*shape: int) -> torch.Tensor:
    return torch.rand(shape).to(BF16)


def whole(*shape: int) -> torch.Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def packed(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)


def scaled(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return linear(x, w.to(BF16) * s)


def across(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return x @ (w.to(BF16) * s)


def at_the_end(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return linear(x, w.to(BF16)) * s


def both_scaled(x: torch.Tensor, w: torch.Tensor, sx: torch.Tensor, sw: torch.Tensor) -> torch.Tensor:
    return (x.to(BF16) * sx) @ (w.to(BF16) * sw).T


def in_groups(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
    """Of [N, K] in groups along K; zero points, of integers or floats, ahead of the scale."""
    groups = w.reshape(w.shape[0], s.shape[1], -1).to(BF16)
    groups = groups if z is None else groups - z.to(BF16)
    return linear(x, (groups * s).reshape(w.shape[0], -1))


def zeros_of_integers(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    groups = w.reshape(w.shape[0], s.shape[1], -1).to(torch.int32) - z.to(torch.int32)
    return linear(x, (groups.to(BF16) * s).reshape(w.shape[0], -1))


def groups_across(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """Of [K, N] in groups along K."""
    groups = w.reshape(s.shape[0], -1, w.shape[1]).to(BF16)
    return x @ (groups * s.unsqueeze(1)).reshape(w.shape)


def low_first(w: torch.Tensor) -> torch.Tensor:
    return torch.stack([w & 15, w >> 4], -1).flatten(-2)


def high_first(w: torch.Tensor) -> torch.Tensor:
    return torch.stack([w >> 4, w & 15], -1).flatten(-2)


def by_halves(w: torch.Tensor) -> torch.Tensor:
    return torch.cat([w & 15, w >> 4], 1)


def less_eight(w: torch.Tensor) -> torch.Tensor:
    return low_first(w).to(torch.int8) - 8


def by_sign(w: torch.Tensor) -> torch.Tensor:
    """Two nibbles of an int8 with their signs."""
    return torch.stack([(w << 4) >> 4, w >> 4], -1).flatten(-2)


def of_words(w: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
    """[N, K / 8] of eight nibbles each as [N, K]."""
    return ((w.unsqueeze(-1) >> shifts) & 15).flatten(-2)


def unpacked(
    unpack: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, w: torch.Tensor, s: torch.Tensor
) -> torch.Tensor:
    numbers = unpack(w).to(BF16)
    return linear(x, (numbers.reshape(w.shape[0], s.shape[1], -1) * s).reshape(w.shape[0], -1))


def gptq(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor, z: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
    """Words of [K / 8, N], zeros in words of [groups, N / 8], scales of [groups, N]."""
    numbers = ((w.unsqueeze(1) >> shifts.view(1, -1, 1)) & 15).reshape(-1, w.shape[1])
    zeros = (((z.unsqueeze(2) >> shifts) & 15) + 1).reshape(s.shape)
    repeats = numbers.shape[0] // s.shape[0]
    zeros, each = (part.repeat_interleave(repeats, 0) for part in (zeros, s))
    return x @ ((numbers - zeros).to(BF16) * each)


def awq(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor, z: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
    """Words of [K, N / 8], zeros in words of [groups, N / 8], scales of [groups, N]."""
    numbers, zeros = (((part.unsqueeze(-1) >> shifts) & 15).reshape(part.shape[0], -1) for part in (w, z))
    repeats = numbers.shape[0] // s.shape[0]
    zeros, each = (part.repeat_interleave(repeats, 0) for part in (zeros, s))
    return x @ ((numbers - zeros).to(BF16) * each)


def looked_up(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    numbers = table[low_first(w).to(torch.int32)]
    return linear(x, (numbers.reshape(w.shape[0], s.shape[1], -1) * s).reshape(w.shape[0], -1).to(BF16))


def in_blocks(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    rows, columns = (extent // count for extent, count in zip(w.shape, s.shape, strict=True))
    return linear(x, w.to(BF16) * s.repeat_interleave(rows, 0).repeat_interleave(columns, 1))


def in_viewed_blocks(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    blocks = w.view(s.shape[0], -1, s.shape[1], w.shape[1] // s.shape[1]).to(BF16)
    return linear(x, (blocks * s[:, None, :, None]).view(w.shape))


def in_floats(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """Scaled in fp32, then rounded."""
    return linear(x, (w.float() * s.float()).to(x.dtype))


def stepped(x: torch.Tensor, w: torch.Tensor, sx: torch.Tensor, sw: torch.Tensor) -> torch.Tensor:
    """Of DeepSeek-V3: a scale of each token and 128 of depth, and of each block of 128 outputs by 128."""
    tokens = (x.view(x.shape[0], sx.shape[1], -1).float() * sx.unsqueeze(-1)).view(x.shape)
    blocks = w.view(sw.shape[0], -1, sw.shape[1], w.shape[1] // sw.shape[1]).float() * sw[:, None, :, None]
    return tokens.to(BF16) @ blocks.view(w.shape).to(BF16).T


def with_bias(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(linear(x, w.to(BF16) * s, b))


def of(unpack: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    return functools.partial(unpacked, unpack)


def forms(m: int = M, n: int = N, k: int = K) -> dict[str, Form]:
    """Every form, of so many rows, outputs and numbers along the depth."""
    x, groups = short(m, k), k // GROUP
    return {
        "int8, a scale of rows [N, 1]": (scaled, (x, whole(n, k), scales(n, 1))),
        "int8, a scale of the depth [1, K]": (scaled, (x, whole(n, k), scales(1, k))),
        "int8, one scale": (scaled, (x, whole(n, k), scales())),
        "int8, a scale after the product [N]": (at_the_end, (x, whole(n, k), scales(n))),
        "int8, a scale after the product [1, N]": (at_the_end, (x, whole(n, k), scales(1, n))),
        "int8 in [K, N], scales [N]": (across, (x, whole(k, n), scales(n))),
        "int8 in [K, N], scales [1, N]": (across, (x, whole(k, n), scales(1, n))),
        "int8 in [K, N], scales [K, 1]": (across, (x, whole(k, n), scales(k, 1))),
        "int8 in [K, N], after the product": (lambda x, w, s: (x @ w.to(BF16)) * s, (x, whole(k, n), scales(n))),
        "int8 in [K, N], in groups": (groups_across, (x, whole(k, n), scales(groups, n))),
        "int8, scaled in fp32": (in_floats, (x, whole(n, k), torch.rand(n, 1))),
        "int8, a bias and a SiLU": (with_bias, (x, whole(n, k), scales(n, 1), short(n))),
        "int8 in groups": (in_groups, (x, whole(n, k), scales(n, groups, 1))),
        "int8 in groups of 32": (in_groups, (x, whole(n, k), scales(n, k // 32, 1))),
        "int8 in groups of 4": (in_groups, (x, whole(n, k), scales(n, k // 4, 1))),
        "zero points of floats": (in_groups, (x, packed(n, k), scales(n, groups, 1), scales(n, groups, 1))),
        "zero points of uint8": (in_groups, (x, packed(n, k), scales(n, groups, 1), packed(n, groups, 1))),
        "zero points taken away in int32": (
            zeros_of_integers, (x, packed(n, k), scales(n, groups, 1), packed(n, groups, 1)),
        ),
        "int4, low nibble first": (of(low_first), (x, packed(n, k // 2), scales(n, groups, 1))),
        "int4, high nibble first": (of(high_first), (x, packed(n, k // 2), scales(n, groups, 1))),
        "int4 by halves": (of(by_halves), (x, packed(n, k // 2), scales(n, groups, 1))),
        "int4 less eight": (of(less_eight), (x, packed(n, k // 2), scales(n, groups, 1))),
        "int4 by sign shifts": (of(by_sign), (x, whole(n, k // 2), scales(n, groups, 1))),
        "int4 in words of 32 bits": (
            lambda x, w, s, h: unpacked(lambda w: of_words(w, h), x, w, s),
            (x, words(n, k // 8), scales(n, groups, 1), NIBBLES),
        ),
        "int4 in words, shifts in another order": (
            lambda x, w, s, h: unpacked(lambda w: of_words(w, h), x, w, s),
            (x, words(n, k // 8), scales(n, groups, 1), ORDER),
        ),
        "GPTQ": (gptq, (x, words(k // 8, n), scales(groups, n), words(groups, n // 8), NIBBLES)),
        "AWQ": (awq, (x, words(k, n // 8), scales(groups, n), words(groups, n // 8), ORDER)),
        "NF4": (looked_up, (x, packed(n, k // 2), torch.rand(n, groups, 1), NF4)),
        "fp8, scales of blocks repeated": (in_blocks, (x, short(n, k, dtype=E4M3), scales(n // 8, k // GROUP))),
        "fp8, scales of blocks in a view": (
            in_viewed_blocks, (x, short(n, k, dtype=E4M3), scales(n // 8, k // GROUP)),
        ),
        "fp8, a scale of rows": (scaled, (x, short(n, k, dtype=E4M3), scales(n, 1))),
        "fp8 in [K, N]": (across, (x, short(k, n, dtype=E4M3), scales(n))),
        "fp8 twice, scales of rows": (
            both_scaled, (x.to(E4M3), short(n, k, dtype=E4M3), scales(m, 1), scales(n, 1)),
        ),
        "fp8 twice, one scale each": (both_scaled, (x.to(E4M3), short(n, k, dtype=E4M3), scales(), scales())),
        "fp8 twice, scales of 128 along the depth": (
            stepped,
            (x.to(E4M3), short(n, k, dtype=E4M3), torch.rand(m, k // 128), torch.rand(n // 16, k // 128)),
        ),
        "fp8 twice, scales of each output and 128": (
            stepped, (x.to(E4M3), short(n, k, dtype=E4M3), torch.rand(m, k // 128), torch.rand(n, k // 128)),
        ),
        "fp8 twice, scales of 128 repeated": (
            lambda x, w, sw: x.to(BF16) @ (w.to(BF16) * sw.repeat_interleave(16, 0).repeat_interleave(128, 1)).T,
            (x.to(E4M3), short(n, k, dtype=E4M3), scales(n // 16, k // 128)),
        ),
        "fp8 twice, by `_scaled_mm`, rows": (
            lambda x, w, sx, sw: torch._scaled_mm(x, w.t(), sx, sw, out_dtype=BF16),
            (x.to(E4M3), short(n, k, dtype=E4M3), torch.rand(m, 1), torch.rand(1, n)),
        ),
        "fp8 twice, by `_scaled_mm`, one scale": (
            lambda x, w, sx, sw: torch._scaled_mm(x, w.t(), sx, sw, out_dtype=BF16),
            (x.to(E4M3), short(n, k, dtype=E4M3), torch.rand(()), torch.rand(())),
        ),
    }  # fmt: skip
