"""What compute-sanitizer is shown on a GPU can run there: without one, that each program finds all that it reads."""

from __future__ import annotations

import hostile_sanitizer
import pytest
import torch

from gpu_bench.running.straight_line import source_tensors
from gpu_bench.sanitizing.sanitized_run import kernels_alone, plausible_sources
from warpsmith.v1 import candidate_pb2

pytestmark = pytest.mark.hostile


def test_every_program_finds_what_it_reads() -> None:
    cpu = torch.device("cpu")
    for program in (*hostile_sanitizer.schedules(), *hostile_sanitizer.products()):
        alone = kernels_alone(program)
        found = source_tensors(alone, plausible_sources(alone, cpu), cpu)
        assert found.keys() == {each.name for each in alone.buffers if each.role == candidate_pb2.ROLE_SOURCE}
