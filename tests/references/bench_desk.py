"""Judge and bench of one module beside each other, in the process of a test."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from gpu_bench.judging.judge_worker import Judge
from gpu_bench.judging.loaded import LoadedTask
from gpu_bench.running.bench_worker import Bench
from gpu_bench.workers.sharing import SharedMemory
from warpsmith.v1 import candidate_pb2, judging_pb2, verdict_pb2


class BenchDesk:
    """Judge and bench of one module, without processes."""

    def __init__(self, small: Any, expression: str, inputs: str, setup: str = "pass") -> None:
        source = (
            "import torch\nclass Model(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            f"        {setup}\n    def forward(self, x, *rest):\n        return {expression}\n\n"
            f"def get_inputs():\n    return {inputs}\n"
        )
        self.task = small.task(source)
        self.descriptor = os.memfd_create("test")
        shared = SharedMemory(self.descriptor)
        self.judge = Judge(LoadedTask.load(self.task), shared)
        os.ftruncate(self.descriptor, self.judge.total_bytes)
        self.bench = Bench(LoadedTask.load(self.task))
        self.shared = shared
        self.small = small

    def compare(self, program: candidate_pb2.Program, family: Any, seed: int = 3) -> verdict_pb2.Comparison:
        artifact = self.small.compiled(program)
        self.judge.answers.of(family, seed)  # as a session does: some references refuse some values
        self.bench.load(judging_pb2.LoadRequest(program=program, artifact=artifact))
        request = judging_pb2.ExecuteRequest(
            family=family, seed=seed, regions=self.judge.regions, learned=self.judge.cases.report.learned
        )
        return self.judge.judge(self.bench.execute(request, self.shared))

    def plan_zero(self) -> candidate_pb2.Program:
        program: candidate_pb2.Program = self.small.plan_zero(self.judge.graph)
        return program


MakeDesk = Callable[..., BenchDesk]
"""Of an expression of `x` and `rest`, inputs, and what the constructor does."""
