"""What solutions are judged by; of a module that `torch.export` cannot trace: the module itself, run in float64.

The one idea: a solution is judged by what the reference computes, and for that no graph is needed. What only a graph
could say stays unsaid: how much work there is at least (no floor), and which element a near tie decides. A candidate
of ours is made from a graph, so for candidates such a module stays bad input.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from gpu_bench.judging.loaded import Args
from gpu_bench.solutions import structure
from gpu_bench.truth.reference import Reference
from gpu_bench.truth.terms import floor_of, is_small
from gpu_bench.values import seeds
from gpu_bench.values.cases import Eager
from gpu_bench.values.keys import Key
from warpsmith.errors import BadInput
from warpsmith.graphs import aten, dtypes
from warpsmith.graphs.task_module import seed_generators
from warpsmith.v1 import graph_pb2, judging_pb2, timing_pb2, verdict_pb2

REFERENCE_UNTRACED = timing_pb2.FLAG_REFERENCE_UNTRACED
"""`torch.export` cannot trace the reference: the truth is the module in float64, and no floor is known."""

_ORIGINS = {
    judging_pb2.REGION_KIND_INPUT: graph_pb2.ORIGIN_INPUT,
    judging_pb2.REGION_KIND_PARAMETER: graph_pb2.ORIGIN_PARAMETER,
    judging_pb2.REGION_KIND_STATE: graph_pb2.ORIGIN_STATE,
}


class SolutionReference(Reference):
    """Of a solution, which may set what it likes: its calls are judged as they are timed."""

    may_forbid_tf32 = False
    may_read_less = True


class UntracedReference(SolutionReference):
    """A module that is its own truth."""

    shaken = frozenset(verdict_pb2.ValueFamily.values())
    is_traced = False
    _shapes: Sequence[torch.Size] = ()
    """Of outputs on the task's own values."""

    def run(self, args: Args, seed: int) -> Eager:
        """As `Reference.run`; refuses values on which results have other shapes."""
        outputs, written = super().run(args, seed)
        shapes = [each.shape for each in outputs]
        self._shapes = self._shapes or shapes
        if shapes != self._shapes:
            raise BadInput(f"{self._loaded.user.entry_path}: the forward returns other shapes on these values")
        return outputs, written

    def _captured(self, args: Args) -> graph_pb2.Graph:
        """A graph without nodes: sources under the names that comparisons use, and names of the outputs."""
        # Numpy arrays are results too; what can be traced returns none.
        self._loaded.output_leaves = structure.opened_leaves  # type: ignore[method-assign]
        user = self._loaded.user
        leaves = user.tensor_leaves(args)
        self._form = user.with_leaves(args, [torch.empty(0)] * len(leaves))
        self._leaf_count = len(leaves)
        self._unused = copy.deepcopy(self._loaded.module)
        self.is_random = self._draws(args)
        outputs, _ = self.run(args, seed=0)
        self._loaded.restore()
        graph = graph_pb2.Graph(outputs=[str(Key.output(position)) for position in range(len(outputs))])
        for key, tensor in self._loaded.sources(args).by_key().items():
            source = graph.sources.add(name=str(key), origin=_ORIGINS[key.kind], spec=dtypes.spec_of(tensor))
            source.input_index, source.qualified_name = key.position, key.name
        return graph

    def _draws(self, args: Args) -> bool:
        """Whether a call moves PyTorch's generator on."""
        self.run(args, seed=0)
        after = self._generator()
        seed_generators(seeds.of_generators(0))
        return not torch.equal(after, self._generator())

    def _generator(self) -> torch.Tensor:
        return torch.cuda.get_rng_state() if self._loaded.device.type == "cuda" else torch.get_rng_state()

    def terms_floors(
        self, sources: Mapping[str, torch.Tensor], truth: Sequence[torch.Tensor], followed: Collection[int] = ()
    ) -> list[float]:
        """4u·Σ|terms| of each region, of the terms that sources are: without a graph no others are known."""
        del followed
        if self.is_random:
            return [0.0] * len(truth)
        names = [str(Key.of(region)) for region in self.regions]
        return [
            floor_of(lambda name=name: self._followed(sources, name), sources) if is_small(each) else 0.0  # type: ignore[misc]
            for name, each in zip(names, truth, strict=True)
        ]

    def repeats(
        self, eager: Sequence[torch.Tensor], args: Args, written: Mapping[Key, torch.Tensor], seed: int
    ) -> bool:
        """Whether the module is the module."""
        del eager, args, written, seed
        return True

    def widened(self, sources: Mapping[str, torch.Tensor], read: aten.Read = aten.as_it_is) -> dict[str, torch.Tensor]:
        """Outputs, and every source as the call leaves it, by their names in the graph; floats in float64.

        Neither `sources` nor the module change. Raises what the module raises.
        """
        del read  # there are no nodes
        with torch.no_grad():
            return self._called({name: aten.widened_copy(tensor) for name, tensor in sources.items()})

    def _followed(
        self, sources: Mapping[str, torch.Tensor], region: str
    ) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        """A region in float64 for autograd, and the float sources."""
        values, rounded = {}, []
        parameters = {source.name for source in self.graph.sources if source.origin == graph_pb2.ORIGIN_PARAMETER}
        for name, source in sources.items():
            value = aten.widened_copy(source)
            if value.is_floating_point():
                value = torch.nn.Parameter(value) if name in parameters else value.requires_grad_()
                rounded.append(value)
            values[name] = value if name in parameters else value.clone()  # a call may write it in place
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a look at a value that is differentiated
            try:
                return self._called(values).get(region), rounded
            except RuntimeError:
                raise
            except Exception as error:  # the module's own code, which may not expect what is differentiated
                raise RuntimeError(str(error)) from error

    def _called(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What a call makes of these sources, as `widened`."""
        module = copy.deepcopy(self._unused)  # what calls leave in the other is of its own types
        for key, holder, own in _members(module):
            value = values[str(key)]
            is_bare = key.kind == judging_pb2.REGION_KIND_PARAMETER and not isinstance(value, torch.nn.Parameter)
            holder[own] = torch.nn.Parameter(value, requires_grad=False) if is_bare else value
        args = self._loaded.user.with_leaves(self._form, [values[str(Key.input(n))] for n in range(self._leaf_count)])
        with _default_is_float64():
            returned = module(*args)
        results = {str(Key.output(n)): leaf.clone() for n, leaf in enumerate(self._loaded.output_leaves(returned))}
        return {**values, **{str(key): holder[own] for key, holder, own in _members(module)}, **results}


def _members(module: torch.nn.Module) -> Iterator[tuple[Key, dict[str, Any], str]]:
    """(key, where it is kept, its name there) of each parameter and state."""
    for prefix, each in module.named_modules(remove_duplicate=False):
        for key_of, held in ((Key.parameter, each._parameters), (Key.state, each._buffers)):
            for own, tensor in list(held.items()):
                if tensor is not None:
                    yield key_of(f"{prefix}.{own}" if prefix else own), held, own


@contextmanager
def _default_is_float64() -> Iterator[None]:
    """What the module makes without saying of which type is as wide as its inputs."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
