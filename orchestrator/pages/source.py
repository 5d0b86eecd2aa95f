"""The best program's sources in colour, and the moves that made them.

The one idea: every rule of the lexer goes over the text once. Pygments' own lexers of C go back again and again (11 s
for 20,000 spaces after a function's name), and a source may be a stranger's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup
from pygments import highlight
from pygments.formatters.html import HtmlFormatter
from pygments.lexer import RegexLexer, words
from pygments.token import Comment, Keyword, Name, Number, String, Text

from orchestrator.pages import explained, rendering
from orchestrator.search import moves_of
from warpsmith import printable
from warpsmith.contract import words as contract
from warpsmith.v1 import run_pb2

MOST_CHARACTERS = 100_000
"""Of all sources together that a page shows: a network's kernels are megabytes."""
MOST_MOVES = 100

_KEYWORDS = (
    *("alignas", "auto", "break", "case", "const", "constexpr", "continue", "default", "do", "else", "enum", "extern"),
    *(
        "for",
        "if",
        "inline",
        "namespace",
        "operator",
        "return",
        "sizeof",
        "static",
        "static_assert",
        "struct",
        "switch",
    ),
    *("template", "typename", "union", "using", "volatile", "while", "__global__", "__device__", "__host__"),
    *("__shared__", "__constant__", "__restrict__", "__forceinline__", "__launch_bounds__", "__cluster_dims__", "asm"),
)
_TYPES = (
    *("bool", "char", "double", "float", "half", "int", "long", "short", "signed", "unsigned", "void", "size_t"),
    *("int8_t", "int16_t", "int32_t", "int64_t", "uint8_t", "uint16_t", "uint32_t", "uint64_t", "uintptr_t"),
    *("float2", "float4", "int2", "int4", "uint2", "uint4", "dim3", "__half", "__half2", "__nv_bfloat16"),
)


class DeviceLexer(RegexLexer):
    """C++ and CUDA as far as a reader needs colours."""

    name = "device source"
    flags = re.ASCII
    tokens = {  # noqa: RUF012 (as Pygments has it)
        "root": [
            (r"//[^\n]*", Comment.Single),
            (r"/\*", Comment.Multiline, "comment"),
            (r"#[^\n]*", Comment.Preproc),
            (r'"(?:\\[^\n]|[^"\\\n])*+"?', String),
            (r"'(?:\\[^\n]|[^'\\\n])'", String.Char),
            (words(_KEYWORDS, suffix=r"\b"), Keyword),
            (words(_TYPES, suffix=r"\b"), Keyword.Type),
            (r"[A-Za-z_]\w*+(?=\()", Name.Function),
            (r"[A-Za-z_]\w*+", Name),
            (r"\.?\d(?:[eEpP][+-]|[\w.'])*+", Number),
            (r"\s+", Text),
            (r".", Text),
        ],
        "comment": [(r"[^*]+", Comment.Multiline), (r"\*/", Comment.Multiline, "#pop"), (r"\*", Comment.Multiline)],
    }


@dataclass(frozen=True)
class Source:
    """One file of the program."""

    name: str
    html: Markup
    line_count: int
    cut: str
    """How much of it is not here; empty for nothing."""


@dataclass(frozen=True)
class Move:
    """A move with its explanation."""

    text: str
    why: str


@dataclass(frozen=True)
class Program:
    """The best program."""

    trial: int
    rationale: str
    sources: Sequence[Source]
    moves: Sequence[Move]
    moves_left_out: int


def program(run: run_pb2.Run) -> Program | None:
    """Of the best trial; None where there is none."""
    if not run.HasField("best"):
        return None
    best, left = run.best, MOST_CHARACTERS
    shown = []
    for source in best.candidate.program.sources:
        shown.append(_source(source.name, source.text, left))
        left = max(0, left - len(source.text))
    moves = moves_of(best)
    told = [Move(rendering.words(contract.move(each)), explained.move(each)) for each in moves[:MOST_MOVES]]
    rationale = rendering.words(best.hypothesis.rationale)
    return Program(best.number, rationale, shown, told, len(moves) - len(told))


def _source(name: str, text: str, most_characters: int) -> Source:
    part = text[:most_characters]
    cut = f"{len(text) - len(part)} of {len(text)} characters are left out" if len(part) < len(text) else ""
    # Pygments escapes what it reads: this is the one place where HTML is not jinja2's.
    made = Markup(highlight(printable.lines(part, len(part)), DeviceLexer(), HtmlFormatter(nowrap=True)))
    return Source(rendering.words(name, 80), made, text.count("\n") + 1, cut)
