"""Networks name their tensors by where they lie, in a hundred characters and more: every kernel still compiles."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from subjects import every_subject

from agent_synthesis.generator import generate
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.lowering.forms import renamed
from agent_synthesis.plans import moves
from agent_synthesis.plans.plan import plan_zero
from agent_synthesis.schedule import Emission
from warpsmith.graphs.capture import capture
from warpsmith.v1 import analysis_pb2, task_pb2

LONG = "p_features_denseblock1_denselayer1_conv2_weight_of_a_module_that_lies_in_other_modules_and_they_in_others_"
ONE_OF_EACH = list({subject.strategy: subject for subject in every_subject()}.values())
ALL_AUTHORED = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group="*", choice="")


def test_every_strategy_of_memory_bound_kernels(build_cubin: Callable[[Emission], tuple[str, bytes]]) -> None:
    emissions = []
    for number, subject in enumerate(ONE_OF_EACH):
        names = {buffer.name: f"{LONG}{buffer.name}" for buffer in subject.nest.buffers}
        nest = renamed(subject.nest, f"{LONG}{number}", names)
        emissions.append(subject.schedule.emit(nest, subject.parameters or subject.schedule.defaults(nest)))
    headers = tuple(dict.fromkeys(header for emission in emissions for header in emission.headers))
    launches = tuple(launch for emission in emissions for launch in emission.launches)
    build_cubin(Emission("\n".join(emission.text for emission in emissions), headers, launches))


class Network(torch.nn.Module):
    """Products, attention, a recurrent network and a convolution, each in a module of a long name."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        parts: dict[str, torch.nn.Module] = {
            "first": torch.nn.Linear(256, 512),
            "second": torch.nn.Linear(512, 256),
            "recurrent": torch.nn.LSTM(256, 256, batch_first=True),
        }
        for name, part in parts.items():
            self.add_module(f"{LONG}{name}", part.to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, recurrent = (each for name, each in self.named_children())
        y = second(torch.relu(first(x))) + x
        heads = y.view(4, 128, 4, 64).transpose(1, 2)
        y = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(4, 128, 256)
        return torch.softmax(recurrent(y)[0] @ y.transpose(1, 2), dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_attention_and_recurrent_networks(
    dtype: torch.dtype, build_cubin: Callable[[Emission], tuple[str, bytes]]
) -> None:
    graph = capture(Network(dtype), (torch.randn(4, 128, 256, dtype=dtype),))
    plan = moves.apply(plan_zero(GraphIndex(graph), task_pb2.TARGET_CUDA), ALL_AUTHORED)
    program = generate(plan)
    launches = tuple(step.launch for step in program.steps if step.HasField("launch"))
    names = [source.name for source in program.sources]
    assert len(launches) > 3
    build_cubin(Emission(program.sources[0].text, tuple(name for name in names if name.endswith(".cuh")), launches))
