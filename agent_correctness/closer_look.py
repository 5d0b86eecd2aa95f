"""What only a finalist is asked, and only once it passes all else: its groups alone, and more seeds of small outputs.

The one idea: a right whole can hide a group that is not, behind one of which PyTorch itself is as far off; and of an
output of few elements one draw says little. Asked until all is asked or the time is up. Judges nothing.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence

from agent_correctness.checks import pooling
from agent_correctness.checks.check import Case, Comparer, family_name, seed_from
from warpsmith.v1 import benchmark_service_pb2, candidate_pb2, verdict_pb2
from warpsmith.v1.benchmark_service_pb2 import ComparisonCase

SECONDS = 5.0
"""For the groups, and once more for the seeds: ten of the twenty seconds that a finalist may take."""
FIRST = 4
"""Cases that are asked for at first; then as many as they say that there is time for, for each question may meet
another replica of the service, which has to open the task."""
_OWN = {verdict_pb2.VALUE_FAMILY_TASK, verdict_pb2.VALUE_FAMILY_FRESH, verdict_pb2.VALUE_FAMILY_RARE}
"""Families that are the task's own values, but for a few elements."""
NO_TIME = f"{SECONDS:.0f} s were over before its turn"


def look_closer(
    comparer: Comparer,
    asked: benchmark_service_pb2.CompareOutputsRequest,
    answer: benchmark_service_pb2.CompareOutputsResponse,
    draw: random.Random,
    now_s: Callable[[], float] = time.monotonic,
) -> list[Case]:
    """Extends the answer to a request that found nothing; returns the cases of what it added, in order.

    Raises what `Comparer.compare` raises.
    """
    added: list[Case] = []
    for ask in (_of_groups(asked.program, draw), _of_seeds(answer.comparisons, draw)):
        left, until, size = ask, now_s() + SECONDS, FIRST
        while left and not answer.HasField("fault"):
            portion, left = left[:size], left[size:]
            begin = now_s()
            if begin > until:
                answer.comparisons.extend(map(_left_out, portion))
            else:
                request = benchmark_service_pb2.CompareOutputsRequest(
                    task=asked.task, program=asked.program, artifact=asked.artifact, cases=portion, lease=asked.lease
                )
                reply = comparer.compare(request)
                answer.comparisons.extend(reply.comparisons)
                answer.waited_seconds += reply.waited_seconds
                if reply.HasField("fault"):
                    answer.fault.CopyFrom(reply.fault)
                seconds_each = max((now_s() - begin) / len(portion), 1e-3)
                size = max(1, int((until - now_s()) / seconds_each))
            added += [(case.family, case.seed) for case in portion]
    return added


def authored_groups(program: candidate_pb2.Program) -> list[str]:
    """Groups with a kernel, in order; none where one group is all that the program has: it is the whole."""
    every = dict.fromkeys(step.group for step in program.steps)
    authored = dict.fromkeys(step.group for step in program.steps if step.HasField("launch"))
    return list(authored) if len(every) > 1 else []


def said(comparisons: Sequence[verdict_pb2.Comparison]) -> list[verdict_pb2.Inspection]:
    """Of a program that passed: groups judged alone, or why not; a truth by slices, convolutions without TF32; values
    that were not judged on, and whether the task's own are all that the module took."""
    found = {f"group {each.group}": each.unjudged for each in comparisons if each.group}
    if any(each.by_slices for each in comparisons):
        found["truth by slices"] = ""
    if any(each.without_tf32 for each in comparisons):
        found["convolutions without TF32"] = ""
    for each in comparisons:
        if each.unjudged and not each.group:
            found[f"values {family_name(each)}"] = each.unjudged
    judged = {each.family for each in comparisons if each.outputs and not each.near_task}
    refused = {family_name(each) for each in comparisons if each.family not in judged and not each.group}
    if refused and judged <= _OWN:
        near = " values farther from those," if any(each.near_task for each in comparisons) else ""
        reason = f"the module defines no result on{near} {', '.join(sorted(refused))}"
        found["values beside the task's own"] = reason
    return [verdict_pb2.Inspection(tool=name, skipped=reason) for name, reason in found.items()]


def seeds_said(comparisons: Sequence[verdict_pb2.Comparison]) -> str:
    """How many seeds small outputs were judged on where the time did not do for all, to end a sentence; else empty."""
    lacking = max(pooling.missing(comparisons).values(), default=0)
    return f"; small outputs were judged on {pooling.SEEDS - lacking} of {pooling.SEEDS} seeds" if lacking else ""


def _of_groups(program: candidate_pb2.Program, draw: random.Random) -> list[ComparisonCase]:
    return [
        ComparisonCase(family=family, seed=seed_from(draw), group=group)
        for group in authored_groups(program)
        for family in pooling.FAMILIES
    ]


def _of_seeds(comparisons: Sequence[verdict_pb2.Comparison], draw: random.Random) -> list[ComparisonCase]:
    in_turn = itertools.zip_longest(*([family] * count for family, count in pooling.missing(comparisons).items()))
    families = [family for each in in_turn for family in each if family is not None]
    return [ComparisonCase(family=family, seed=seed_from(draw), once=True) for family in families]


def _left_out(case: ComparisonCase) -> verdict_pb2.Comparison:
    return verdict_pb2.Comparison(
        family=case.family, seed=case.seed, group=case.group, unjudged=NO_TIME if case.group else ""
    )
