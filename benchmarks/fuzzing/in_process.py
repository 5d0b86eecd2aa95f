"""A verdict without the benchmark service's processes: judge and candidate share this one.

Where PyTorch itself comes out as far off when its roundings are moved, rounding decides what a module computes, and no
kernel is wrong.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from agent_correctness.checks.limits import Size, size_of
from gpu_bench.judging import comparison
from gpu_bench.judging.judge_worker import Judge
from gpu_bench.judging.loaded import LoadedTask
from gpu_bench.running.bench_worker import Bench
from gpu_bench.running.executor import ProgramFault
from gpu_bench.running.host import HostProgram
from gpu_bench.truth.reference import Reference
from gpu_bench.workers.sharing import SharedMemory
from warpsmith.errors import BadInput
from warpsmith.graphs import aten
from warpsmith.v1 import (
    benchmark_service_pb2,
    graph_pb2,
    judging_pb2,
    verdict_pb2,
)

NUDGES = 6
"""Runs of PyTorch with moved roundings before a failure is held to be one."""
FLOAT64_RATIO = 100.0
"""Units of 2 ulp of an output's rms up to which a float64 result may differ from PyTorch's float64 result."""


class NearReference(Reference):
    """Notes where eager had to be taken for the truth, because its result is nothing but rounding."""

    rounding_only = False

    def repeats(self, *args: Any, **kwargs: Any) -> bool:
        """As `Reference.repeats`."""
        self.rounding_only = True
        return super().repeats(*args, **kwargs)


class NearJudge(Judge):
    """Knows how far PyTorch itself comes out."""

    def __init__(self, loaded: LoadedTask, shared: SharedMemory) -> None:
        super().__init__(loaded, shared, NearReference)

    @property
    def rounding_only(self) -> bool:
        """Whether eager had to be taken for the truth."""
        return isinstance(self.reference, NearReference) and self.reference.rounding_only

    def has_no_wider_truth(self, observed: verdict_pb2.Comparison) -> bool:
        """Whether all that is off are roundings of float64, whose truth is PyTorch's own result to the last bit."""
        eager = self.answers.of(observed.family, observed.seed).eager
        return all(
            eager[error.output].dtype == torch.float64
            and not error.non_finite_mismatch_count
            and max(error.rms_ratio, error.max_ratio, error.block_ratio) < FLOAT64_RATIO
            for error in observed.outputs
            if is_off(error)
        )

    def rounding_decides(self, observed: verdict_pb2.Comparison) -> bool:
        """Whether PyTorch itself fails the comparison when each of its results is up to one ulp off."""
        answer = self.answers.of(observed.family, observed.seed)
        sources = self.reference.graph_sources(self._loaded.case(observed.family, observed.seed))
        of_family = comparison.Forgiveness.of(observed.family)
        forgiveness = comparison.Forgiveness(of_family.nan_stands_for_any_non_finite)
        for draw in range(NUDGES):
            moved = nudged(self.graph, sources, torch.Generator().manual_seed(draw))
            parts = zip(moved, answer.eager, answer.truth, answer.floors, strict=False)
            for mine, eager, truth, floor in parts:
                if is_off(comparison.compare(mine, eager, truth, terms_floor=floor, forgiveness=forgiveness)):
                    return True
        return False


def is_off(error: verdict_pb2.OutputError) -> bool:
    """Whether an output breaks a limit."""
    return bool(error.non_finite_mismatch_count or error.unequal_count or size_of(error) is not Size.FINE)


def nudged(
    graph: graph_pb2.Graph, sources: Mapping[str, torch.Tensor], generator: torch.Generator
) -> list[torch.Tensor]:
    """The graph's outputs when every float result of a call is moved by up to one ulp: Monte Carlo arithmetic.

    Parker, "Monte Carlo arithmetic: exploiting randomness in floating-point arithmetic", 1997.
    """
    values = {name: tensor.clone() for name, tensor in sources.items()}
    for source in graph.sources:
        if source.name not in values:
            values[source.name] = aten.constant(source, torch.device("cpu"))
    with torch.no_grad():
        for node in graph.nodes:
            results = aten.call(node.target, node.args, node.kwargs, values.__getitem__)
            for result, tensor in zip(node.results, results, strict=False):
                if not result.name or tensor is None:
                    continue
                values[result.name] = tensor
                if tensor.is_floating_point() and (node.mutates or not result.alias_of):
                    step = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) * 2 - 1
                    tensor.copy_(tensor.double() * (1 + torch.finfo(tensor.dtype).eps * step))
    return [values[name] for name in graph.outputs]


@dataclass
class InProcess:
    """The benchmark service's part of a verdict, without its processes: judge and candidate share this one."""

    loaded: LoadedTask
    program: HostProgram
    descriptor: int
    judges: list[NearJudge] = field(default_factory=list)

    def compare(
        self, request: benchmark_service_pb2.CompareOutputsRequest
    ) -> benchmark_service_pb2.CompareOutputsResponse:
        """As `Comparer.compare`."""
        shared = SharedMemory(self.descriptor)
        judge = NearJudge(self.loaded, shared)
        self.judges.append(judge)
        os.ftruncate(self.descriptor, judge.total_bytes)
        response = benchmark_service_pb2.CompareOutputsResponse()
        bench = Bench(self.loaded, program=self.program)
        for case in request.cases:
            try:
                judge.answers.of(case.family, case.seed)
            except BadInput:
                if case.family == verdict_pb2.VALUE_FAMILY_TASK:
                    raise
                response.comparisons.add(family=case.family, seed=case.seed)
                continue
            asked = judging_pb2.ExecuteRequest(family=case.family, seed=case.seed, regions=judge.regions)
            try:
                observed = bench.execute(asked, shared)
            except ProgramFault as fault:
                response.fault.kind, response.fault.detail = fault.kind, fault.detail
                return response
            response.comparisons.append(judge.judge(observed))
        return response

    def rounding_decides(self, verdict: verdict_pb2.Verdict) -> bool:
        """Whether all that the verdict found is what PyTorch itself does when it rounds otherwise."""
        if any(judge.rounding_only for judge in self.judges):
            return True
        judge = self.judges[-1]
        found = [case for case in verdict.comparisons if any(map(is_off, case.outputs))]
        return bool(found) and all(judge.has_no_wider_truth(case) or judge.rounding_decides(case) for case in found)
