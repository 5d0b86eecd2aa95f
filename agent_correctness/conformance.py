"""Tells the author of a check whether it fits its role; `python -m warpsmith.testing check NAME` asks it.

The one idea: a check runs nothing, so it is asked about comparisons that were never made: right ones, which it has to
let pass, and some that are wrong in every way. Whether it finds something in those is its own affair.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from agent_correctness.checks.check import FAMILIES, Case, Check, Finding, Judgement, Passed
from agent_correctness.judge import FIRST, built_in
from warpsmith.testing import asking, softmax_task
from warpsmith.v1 import timing_pb2, verdict_pb2

SEEDS = range(2**63)
"""What a seed can be."""


def check_check(make: Callable[[], Check]) -> list[str]:
    """Findings about the check that `make` gives; empty when it fits."""
    return asking.findings(_findings(make))


def _findings(make: Callable[[], Check]) -> Iterator[str]:
    check = asking.made(make)
    name = asking.member(check, "name", str)
    if not name or (name in FIRST and type(check) not in map(type, built_in())):
        yield f"its name is {name!r}: it has to have one of its own, other than {', '.join(FIRST)}"
    for tier in (timing_pb2.TIER_SCREENING, timing_pb2.TIER_FINAL):
        yield from _of_cases(check, tier)
    yield from _of_judgement(check)


def _of_cases(check: Check, tier: timing_pb2.Tier.ValueType) -> Iterator[str]:
    def drawn(seed: int) -> Sequence[Case]:
        return asking.method(check, "cases", softmax_task(), tier, random.Random(seed), gives=(list, tuple))

    first = drawn(1)
    for case in first:
        match case:
            case (int(family), int(seed)) if family in FAMILIES and seed in SEEDS:
                continue
            case _:
                yield f"cases gives {case!r}, which is no pair of a family and a seed of 63 bits"
                return
    if list(first) != list(drawn(1)):
        yield "cases does not draw its seeds from `draw` alone: equal draws give different cases"
    if first and list(first) == list(drawn(2)):
        yield "cases gives the same seeds at every judging: draw them from `draw`, or a kernel can know them"


def _of_judgement(check: Check) -> Iterator[str]:
    right, wrong, refused = _comparisons()
    for what, comparisons in (
        ("no comparisons", []),
        ("comparisons that are right", right),
        ("comparisons that the reference refuses, which have no outputs", refused),
    ):
        judgement = _judgement(check, comparisons)
        if isinstance(judgement, Finding):
            yield f"it finds fault with {what}: {judgement.detail}"
    judgement = _judgement(check, wrong)
    if judgement != _judgement(check, wrong):
        yield "equal comparisons are judged differently"
    if isinstance(judgement, Finding):
        if judgement.kind not in verdict_pb2.FailureKind.values()[1:]:
            yield f"the kind of a finding is {judgement.kind}: it has to be one of FailureKind"
        if not isinstance(judgement.detail, str) or not judgement.detail.strip() or "\n" in judgement.detail:
            yield "the detail of a finding is not one sentence"


def _judgement(check: Check, comparisons: Sequence[verdict_pb2.Comparison]) -> Judgement:
    return asking.method(check, "judge", comparisons, gives=(Finding, Passed))


def _comparisons() -> tuple[list[verdict_pb2.Comparison], list[verdict_pb2.Comparison], list[verdict_pb2.Comparison]]:
    """Of every family: right ones, ones that are wrong in every way, and ones that the reference refuses."""
    right, wrong, refused = [], [], []
    for family in FAMILIES:
        comparison = verdict_pb2.Comparison(family=family, seed=7)
        refused.append(comparison)
        good = verdict_pb2.OutputError(rms_ratio=1.0, max_ratio=1.0, block_ratio=1.0, small_ratio=1.0)
        good.kernelbench_close, good.element_count = True, 64 * 256
        bad = verdict_pb2.OutputError(rms_ratio=1e9, max_ratio=1e9, block_ratio=1e9, small_ratio=1e9)
        bad.non_finite_mismatch_count = bad.unequal_count = bad.unwritten_count = 3
        right.append(verdict_pb2.Comparison(family=family, seed=7, outputs=[good]))
        wrong.append(verdict_pb2.Comparison(family=family, seed=7, outputs=[bad], broken_canaries=["y"]))
        wrong[-1].mutated_sources.append("x")
        wrong[-1].unrepeatable_outputs.append("y")
    return right, wrong, refused
