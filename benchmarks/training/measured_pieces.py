"""Writes what has been measured of the pieces of language models, of rows that are in docs/results, and what has not.

    python -m benchmarks.training.measured_pieces > docs/results/pieces_h200.md

One idea: a piece names the rows that there are of it and the command that makes the next ones, so the page says of each
what it rests on, and nothing is measured or rounded here.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.kernelbench.level1 import geomean, speedup
from benchmarks.module_tables import ROOT, Row, read

RESULTS = ROOT / "docs" / "results"
STEPS = "warpsmith bench benchmarks/training/modules --grad all"
QUANTISED = "warpsmith bench benchmarks/products/quantised --target cuda"
ATTENTION = "python -m benchmarks.products.attention"
FLOORS_US = {
    "cross_entropy": 1473, "cross_entropy_smoothed": 1473, "group_norm_silu": 98, "layer_norm": 157,
    "residual_rms_norm": 282, "rms_norm": 157, "rotary_embedding": 157, "silu_gate": 439, "softmax": 314,
}  # fmt: skip
"""Of the nine training steps that have a bar: bytes at 4.28 TB/s, each read and written as often as two halves must."""


@dataclass(frozen=True)
class Piece:
    """A part of a language model."""

    name: str
    rows: Sequence[tuple[str, str]] = ()
    """File in docs/results, without its ending, and name of a row that is the piece or has it in it."""
    open: Sequence[str] = field(default_factory=tuple)
    """What is not measured, and the command that measures it."""


def _steps(*names: str) -> list[tuple[str, str]]:
    return [("training_h200", name) for name in names]


PIECES = (
    Piece("RMSNorm and layer norm, a residual before them", (
        *_steps("rms_norm", "residual_rms_norm", "layer_norm"), ("level1_h200", "36_RMSNorm_"),
        ("level1_h200", "40_LayerNorm"),
    ), ("backward over hidden sizes of 1k to 16k, as finals",)),
    Piece("group norm and SiLU", (*_steps("group_norm_silu"), ("level1_h200", "35_GroupNorm_"))),
    Piece("rotary embedding", _steps("rotary_embedding"), ("the forward alone, in place",)),
    Piece("gated products", _steps("silu_gate"), ("both products and their gate in one epilogue",)),
    Piece("softmax and cross-entropy", (
        *_steps("softmax", "cross_entropy", "cross_entropy_smoothed"), ("level1_h200", "23_Softmax"),
        ("level1_h200", "95_CrossEntropyLoss"),
    )),
    Piece("linear layer and cross-entropy without logits", (),
          ("8192x4096 to 128256, both halves: `python -m benchmarks.training.chunks --time`",)),
    Piece("embedding and its gradient", _steps("embedding")),
    Piece("attention", (("products_h200", "111_bfloat16_attention_16384"),), (
        f"backward: `{ATTENTION} --backward`", "prefill and decode with a cache, variable lengths",
    )),
    Piece("decoder layers, forward", tuple(("models", f"{name}_layer_bfloat16") for name in ("llama", "qwen3", "gpt2")),
          ("training steps: `warpsmith bench benchmarks/training/transformer --grad all`",)),
    Piece("weights in few bits", (
        ("quantised_h200", "int8_rows"), ("quantised_h200", "int8_experts"), ("quantised_h200", "float_weights"),
    ), (f"int4, more than 64 rows: `{QUANTISED}`",)),
    Piece("products of floats of 8 bits", (), (f"fp8_rows, fp8_blocks, fp8_steps, fp8_scaled_mm: `{QUANTISED}`",)),
    Piece("experts: top-k gate and grouped products", (), ("`warpsmith bench examples/top_k_gate.py --target cuda`",)),
    Piece("optimizer steps and clipping", (), ("`warpsmith bench benchmarks/training/optimizers`",)),
)  # fmt: skip


def fastest_over_floors(rows: Sequence[Row]) -> tuple[float, float]:
    """Geometric means over `FLOORS_US`: of the fastest arm that is not ours, and of ours."""
    named = {row["name"]: row["arms_ns"] | {"fastest": row["arms_ns"][row["fastest_baseline"]]} for row in rows}
    both = [
        geomean([named[name][arm] / 1e3 / floor for name, floor in FLOORS_US.items()])
        for arm in ("fastest", "candidate")
    ]
    return both[0], both[1]


def table(rows: dict[str, list[Row]]) -> list[str]:
    """A line for each row of a piece: medians in µs."""
    lines = ["| piece | row | measured | eager | fastest | ours | against fastest | floor |", "|" + " --- |" * 8]
    for piece in PIECES:
        for file, name in piece.rows:
            (row,) = (each for each in rows[file] if each["name"] == name)
            arms, against = row["arms_ns"], speedup(row)
            step = ", step" if file == "training_h200" else ""
            day = re.sub(r"(\d{4})(\d\d)(\d\d)-.*", r"\1-\2-\3", row.get("run", "")) or "-"
            times = [_micro(arms.get(arm)) for arm in ("eager", row.get("fastest_baseline", ""), "candidate")]
            share = f"{row['floor_percent']:.0f} %" if row.get("floor_percent") else "-"
            ratio = "-" if math.isnan(against) else f"{against:.2f}x"
            cells = [piece.name, f"[{name}]({file}.md){step}", day, *times, ratio, share]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _micro(ns: float | None) -> str:
    return "-" if ns is None else f"{ns / 1e3:.1f}"


def page() -> str:
    """The page."""
    files = dict.fromkeys(file for piece in PIECES for file, _ in piece.rows)
    rows = {file: read(RESULTS / f"{file}.jsonl") for file in files}
    fastest, ours = fastest_over_floors(rows["training_h200"])
    links = ", ".join(f"[{file}]({file}.jsonl)" for file in files)
    return "\n".join([
        "# Pieces of language models on an NVIDIA H200", "",
        "What has been measured of each piece, and what has not. Medians in µs of one call, cold L2; a *step* is a",
        "forward with its backward, *fastest* the fastest baseline, *floor* the share of the least time that ours",
        "reaches. The page behind a line says with which command, PyTorch and card it was made.", "",
        f"- This page is what `python -m benchmarks.training.measured_pieces` prints, of the raw lines {links}.", "",
        *table(rows), "",
        "The nine steps that have a bar, over floors in which each half reads what it needs (`FLOORS_US`), as",
        f"geometric means: the fastest baseline {fastest:.2f}x, ours {ours:.2f}x. Kernels at those floors would be",
        f"{fastest:.2f}x ahead, so that a bar of 1.6x lies above them.", "",
        "## Not measured", "",
        *(f"- {piece.name}: {each}" for piece in PIECES for each in piece.open),
    ])  # fmt: skip


if __name__ == "__main__":
    sys.stdout.write(page() + "\n")
