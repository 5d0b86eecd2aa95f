"""Attention and its derivatives as products and a softmax, some rows at a time, in any type and on any device.

A row that sees nothing weighs nothing. Heads of queries that share those of keys are neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import torch

_MOST_SCORES: Final = 1 << 27
"""Scores that are in memory at a time."""


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _dropout: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, [batch, heads, rows, elements], and statistics, [batch, heads, rows]: -inf where nothing is seen."""
    wide, results, statistics = _wide(query.dtype), [], []
    _, values = _shared(key, wide), _shared(value, wide)
    for _, _, scores in _scores(query, key, is_causal, attn_mask, scale):
        sums = scores.logsumexp(-1, keepdim=True)
        weights = (scores - sums.masked_fill(sums == -math.inf, 0.0)).exp()
        results.append((weights @ values).flatten(1, 2))
        statistics.append(sums.squeeze(-1).flatten(1, 2))
    return torch.cat(results, 2).to(query.dtype), torch.cat(statistics, 2)


def backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    _dropout: float,
    is_causal: bool,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Derivatives of queries, keys and values, in their shapes; of `out` and `logsumexp`, as `forward` gave them."""
    wide = _wide(query.dtype)
    key_heads = key.shape[1]
    gradient, results, queries = (_apart(each.to(wide), key_heads) for each in (grad_out, out, query))
    statistics = _apart(logsumexp.to(wide), key_heads).unsqueeze(-1)
    keys, values = _shared(key, wide), _shared(value, wide)
    factor = scale if scale is not None else query.shape[-1] ** -0.5
    of_queries, of_keys, of_values = [], torch.zeros_like(keys), torch.zeros_like(values)
    for begin, end, scores in _scores(query, key, is_causal, attn_mask, scale):
        weights = (scores - statistics[..., begin:end, :].clamp_min(torch.finfo(wide).min)).exp()
        given = gradient[..., begin:end, :]
        inner = (given * results[..., begin:end, :]).sum(-1, keepdim=True)
        of_scores = weights * (given @ values.transpose(-1, -2) - inner) * factor
        of_values += (weights.transpose(-1, -2) @ given).sum(2, keepdim=True)
        of_keys += (of_scores.transpose(-1, -2) @ queries[..., begin:end, :]).sum(2, keepdim=True)
        of_queries.append((of_scores @ keys).flatten(1, 2))
    return (
        torch.cat(of_queries, 2).to(query.dtype), of_keys.squeeze(2).to(key.dtype), of_values.squeeze(2).to(value.dtype)
    )  # fmt: skip


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _apart(tensor: torch.Tensor, key_heads: int) -> torch.Tensor:
    """What is [batch, heads, …] as [batch, heads of keys, heads that share them, …]."""
    return tensor.reshape(tensor.shape[0], key_heads, -1, *tensor.shape[2:])


def _shared(operand: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """Keys or values as [batch, their heads, 1, rows, elements]: what neighbouring heads of queries share."""
    return operand.to(wide).unsqueeze(2)


def _scores(
    query: torch.Tensor, key: torch.Tensor, is_causal: bool, mask: torch.Tensor | None, scale: float | None
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """First and last row of some, and their scores, [batch, heads of keys, heads that share them, rows, keys]."""
    wide = _wide(query.dtype)
    (batch, heads, rows, depth), (_, key_heads, keys, _) = query.shape, key.shape
    queries = _apart(query.to(wide), key_heads)
    turned = _shared(key, wide).transpose(-1, -2)
    step = max(1, _MOST_SCORES // (batch * heads * keys))
    for begin in range(0, rows, step):
        end = min(rows, begin + step)
        scores = queries[..., begin:end, :] @ turned * (scale if scale is not None else depth**-0.5)
        if mask is not None:
            added = mask.expand(batch, heads, rows, keys)[:, :, begin:end].to(wide)
            scores = scores + _apart(added, key_heads)
        if is_causal:
            seen = torch.ones(end - begin, keys, dtype=torch.bool, device=query.device).tril(begin)
            scores = scores.masked_fill(~seen, -math.inf)
        yield begin, end, scores
