"""Puts reasons into one sentence that a person can read: "softmax and mul in one kernel: 402 MB less traffic"."""

from __future__ import annotations

from collections.abc import Sequence

from warpsmith.contract import words
from warpsmith.v1 import analysis_pb2

_BOUND = {
    "memory": "memory bandwidth",
    "arithmetic": "arithmetic",
    "launches": "launches",
    "few blocks": "too few busy blocks",
}


def size(count: float) -> str:
    """Bytes: "402 MB", "1.6 GB", "12 bytes"."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{_three_digits(count / scale)} {unit}"
    return f"{count:.0f} bytes"


def duration(nanoseconds: float) -> str:
    """Time: "1.23 ms", "8.4 µs", "350 ns"."""
    for unit, scale in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if nanoseconds >= scale:
            return (
                f"{nanoseconds / scale:.3g} {unit}"
                if nanoseconds < 999.5 * scale
                else f"{nanoseconds / scale:.0f} {unit}"
            )
    return f"{nanoseconds:.0f} ns"


def _three_digits(value: float) -> str:
    return f"{value:.3g}" if value < 999.5 else f"{value:.0f}"


def names(items: Sequence[str], most: int = 4) -> str:
    """ "a", "a and b", "a, b and c", "a, b, c and 5 more"."""
    if not items:
        return "the plan"
    if len(items) > most:
        return f"{', '.join(items[: most - 1])} and {len(items) - most + 1} more"
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def reason(what: str, *, saved_bytes: float, saved_launches: int, speedup: float, bound: str = "") -> str:
    """One sentence: what is done, what it saves, what is predicted."""
    savings = []
    if saved_bytes > 0:
        savings.append(f"{size(saved_bytes)} less traffic")
    if saved_launches > 0:
        savings.append("1 launch less" if saved_launches == 1 else f"{saved_launches} launches less")
    if not savings and bound:
        savings.append(f"it is held back by {_BOUND[bound]}")
    gain = f"predicted {speedup:.3g}x" if abs(speedup - 1.0) >= 0.005 else "no change predicted, to be measured"
    sentence = f"{what}: {', '.join([*savings, gain])}"
    return " ".join(sentence.split())  # whatever names hold, it stays one line


def effect(legal: analysis_pb2.LegalMove) -> str:
    """What a legal move does, in synthesis's words or else in ours."""
    move = legal.move
    if legal.effect.strip():
        told = legal.effect.strip().rstrip(".")
        return f"{told} in {move.group}" if move.kind == analysis_pb2.MOVE_KIND_SET and move.group not in told else told
    arguments = ", ".join(f"{name} = {value}" for name, value in sorted(move.arguments.items()))
    match move.kind:
        case analysis_pb2.MOVE_KIND_AUTHOR:
            return f"{move.group} as a kernel of its own" + (f" ({move.choice})" if move.choice else "")
        case analysis_pb2.MOVE_KIND_FUSE:
            return f"{move.choice} and {move.group} in one kernel"
        case analysis_pb2.MOVE_KIND_LIBRARY:
            return f"{move.group} back to the library"
        case analysis_pb2.MOVE_KIND_REWRITE:
            return f"{move.group} rewritten by {move.choice}"
        case analysis_pb2.MOVE_KIND_SET:
            return f"{move.group} with {', '.join(filter(None, (move.choice, arguments)))}"
        case other:
            return f"{words.move_kind(other)} {move.group} {move.choice} {arguments}".strip()
