"""The user's module, run in two ways: as it is, and as it was captured, in float64.

The one idea: the judge captures the module by itself and computes that graph in float64, so that neither the
synthesis agent's idea of the module nor eager's rounding is taken for the truth. It keeps no results and compares none.
User code runs here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from gpu_bench.judging import guard
from gpu_bench.judging.loaded import Args, LoadedTask
from gpu_bench.truth import plausible, slices
from gpu_bench.truth.terms import statistics_floors, terms_floor
from gpu_bench.values import seeds
from gpu_bench.values.cases import Eager
from gpu_bench.values.keys import Key
from gpu_bench.workers.sharing import lay_out
from gpu_bench.workers.shortage import is_want_of_memory
from warpsmith.errors import BadInput
from warpsmith.graphs import aten, dtypes
from warpsmith.graphs.task_module import cause_of, seed_generators
from warpsmith.v1 import graph_pb2, verdict_pb2


class Reference:
    """A task's module and its graph. Results are region by region: outputs, then what the module may write.

    `args`: a first case. `give_back`: gives memory back where it does not do for a truth. Raises BadInput for a module
    that cannot be captured or is not deterministic.
    """

    shaken = frozenset({verdict_pb2.VALUE_FAMILY_CONSTANT_ROWS})
    """Families of which the yardstick is also how far a rounding of the sources moves the truth."""
    is_traced = True
    """Whether `graph` has the module's nodes."""
    may_forbid_tf32 = True
    """Whether what is judged can be run without TF32, where this process has it so."""
    may_read_less = False
    """Whether what is judged is anybody's code, which may leave out what no result shows."""

    def __init__(self, loaded: LoadedTask, args: Args, give_back: Callable[[], object]) -> None:
        self._loaded = loaded
        self._give_back = give_back
        self.slice_count = 0
        """How many truths were computed some rows at a time, for want of memory."""
        self.is_random = False
        """Whether a call draws from PyTorch's generator."""
        self.graph = self._captured(args)  # before any call: what the first one makes of the module is no part of it
        specs = [source.spec for source in self.graph.sources]
        specs += [result.spec for node in self.graph.nodes for result in node.results if result.name]
        self.types = {dtypes.to_torch(spec.dtype) for spec in specs}
        """Types on the way: an output of float64 that went through fp16 is as exact as fp16."""
        self.rounds_to_tf32 = plausible.may_round_to_tf32(self.graph, self.types, loaded.device)
        """Whether PyTorch may round factors to TF32 on the way, and to nothing coarser."""
        begin = time.perf_counter()
        outputs, written = self.run(args, seed=0)
        self.eager_seconds = time.perf_counter() - begin
        self._written = self._may_be_written(args) | written
        self._refuse_random(args, outputs, written)
        named = [(Key.output(position), tensor) for position, tensor in enumerate(outputs)]
        self.regions, self.total_bytes = lay_out([*named, *self._written.items()])

    @property
    def written(self) -> Collection[Key]:
        """The sources that the module may change."""
        return self._written

    @property
    def may_do_without_tf32(self) -> bool:
        """Whether what rounds to TF32 convolves, and neither the user nor the module has asked for it."""
        is_open = self.may_forbid_tf32 and self.rounds_to_tf32 and not torch.backends.cuda.matmul.allow_tf32
        return is_open and not plausible.sets_precision(self._loaded.task)

    def forbid_tf32(self) -> bool:
        """Has judged calls convolve without TF32 from now on, here and in other processes; whether that is possible."""
        if not self.may_do_without_tf32:
            return False
        self._loaded.learned.without_tf32 = True
        self.rounds_to_tf32 = False
        return True

    def convolves_in_tf32(self, part: graph_pb2.Graph) -> bool:
        """Whether a part of the graph, run as it is timed, may round to TF32 where it convolves."""
        may_round = self.rounds_to_tf32 or self._loaded.learned.without_tf32
        return may_round and any("conv" in aten.operation(node.target) for node in part.nodes)

    def allow_tf32(self) -> None:
        """Takes that back."""
        self._loaded.learned.without_tf32 = False
        self.rounds_to_tf32 = True

    # ---- as it is ------------------------------------------------------------------------------------------

    def eager(self, args: Args, seed: int) -> list[torch.Tensor]:
        """What eager gives on these arguments, region by region."""
        return self.by_region(args, *self.run(args, seed))

    def by_region(
        self, args: Args, outputs: Sequence[torch.Tensor], written: Mapping[Key, torch.Tensor]
    ) -> list[torch.Tensor]:
        """What `run` gave on these arguments, region by region."""
        return [*outputs, *(self._after(key, args, written) for key in self._written)]

    def run(self, args: Args, seed: int) -> Eager:
        """Runs the module; sources are put back."""
        held = self._loaded.sources(args).by_key()
        before = {key: tensor.clone() for key, tensor in held.items()}
        seed_generators(seeds.of_generators(seed))
        with torch.no_grad(), self._loaded.as_judged(), self._loaded.user.explaining("the forward failed"):
            returned = self._loaded.module(*args)
        self._loaded.keep_places()
        outputs = [leaf.clone() for leaf in self._loaded.output_leaves(returned)]
        if not outputs:
            raise BadInput(f"{self._loaded.user.entry_path}: the forward returns no tensor")
        written: dict[Key, torch.Tensor] = {}
        for key, tensor in held.items():
            if not guard.same_bits(tensor, before[key]):
                written[key] = tensor.clone()
                tensor.copy_(before[key])
        return outputs, written

    def _after(self, key: Key, args: Args, written: Mapping[Key, torch.Tensor]) -> torch.Tensor:
        """A source as eager leaves it."""
        return written.get(key, self._loaded.sources(args).by_key()[key])

    def _captured(self, args: Args) -> graph_pb2.Graph:
        """What the truth is computed by, as `args` go through it; says whether it is random. Raises BadInput."""
        graph = self._loaded.capture(args)
        self.is_random = any(node.random for node in graph.nodes)
        return graph

    def _may_be_written(self, args: Args) -> dict[Key, torch.Tensor]:
        """Sources that the graph writes: what a clamp leaves as it was on these values it may change on others."""
        held, written = self._loaded.sources(args).by_key(), set(aten.written_sources(self.graph))
        keys = [Key.of_source(source) for source in self.graph.sources if source.name in written]
        return {key: held[key].clone() for key in keys if key is not None and key in held}

    def _refuse_random(self, args: Args, outputs: Sequence[torch.Tensor], written: Mapping[Key, torch.Tensor]) -> None:
        again, written_again = self.run(args, seed=0)
        pairs = [*zip(outputs, again, strict=False), *((t, written_again.get(n)) for n, t in written.items())]
        for position, (first, second) in enumerate(pairs):
            if second is None or first.shape != second.shape or not guard.same_bits(first, second):
                raise BadInput(
                    f"{self._loaded.user.entry_path}: the module is not deterministic: tensor {position} of its "
                    "results differs between two runs from one generator state; draw with torch's own generator"
                )

    # ---- as it was captured --------------------------------------------------------------------------------

    def truth(
        self,
        args: Args,
        written: Mapping[Key, torch.Tensor],
        seed: int,
        sources: Mapping[str, torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """Every region in float64, where it is float. `sources`: others than those of `args`.

        Raises BadInput where the graph cannot be computed so.
        """
        return self._interpret(args, written, seed, widen=True, sources=sources)

    def rounded_to_tf32(self, args: Args, written: Mapping[Key, torch.Tensor], seed: int) -> list[torch.Tensor]:
        """Every region as `truth`, of factors that are rounded to TF32 wherever PyTorch's settings allow it."""
        return self._interpret(args, written, seed, widen=True, read=plausible.rounded_factor)

    def repeats(
        self, eager: Sequence[torch.Tensor], args: Args, written: Mapping[Key, torch.Tensor], seed: int
    ) -> bool:
        """Whether the captured graph, in the module's own types, gives eager's bits."""
        plain = self._interpret(args, written, seed, widen=False)
        return all(
            given.shape == own.shape and guard.same_bits(given, own) for given, own in zip(plain, eager, strict=True)
        )

    def terms_floors(
        self, sources: Mapping[str, torch.Tensor], truth: Sequence[torch.Tensor], followed: Collection[int] = ()
    ) -> list[float]:
        """4u·Σ|terms| of each region (`terms`). `followed`: regions whose terms are looked for throughout the graph,
        where those of a norm's statistics are else those at the norm."""
        in_graph = {Key.of_source(source): source.name for source in self.graph.sources}
        named = [*self.graph.outputs, *(in_graph.get(key, "") for key in self._written)]
        known = statistics_floors(self.graph, sources)
        for position in followed:
            known.pop(named[position], None)
        return [
            known[name] if name in known else terms_floor(self.graph, sources, name, each)
            for name, each in zip(named, truth, strict=True)
        ]

    def widened(self, sources: Mapping[str, torch.Tensor], read: aten.Read = aten.as_it_is) -> dict[str, torch.Tensor]:
        """The graph in float64: at once, or else some rows at a time where its rows are apart. `read`: what nodes read
        in the place of what there is."""
        try:
            return aten.interpret(self.graph, sources, widen=True, read=read)
        except (RuntimeError, MemoryError) as error:
            if not is_want_of_memory(error) or not slices.row_count(self.graph):
                raise
        self._give_back()  # not in the handler, which keeps alive what was made
        self.slice_count += 1
        return slices.interpret(self.graph, sources, read=read)

    def _interpret(
        self,
        args: Args,
        written: Mapping[Key, torch.Tensor],
        seed: int,
        *,
        widen: bool,
        sources: Mapping[str, torch.Tensor] | None = None,
        read: aten.Read | None = None,
    ) -> list[torch.Tensor]:
        """Every region as the captured graph gives it, in float64 or as eager computes; sources are left alone.

        `sources`: others than those of `args`. `read`: what nodes read in float64, if not what there is.
        """
        sources = sources or self.graph_sources(args)
        seed_generators(seeds.of_generators(seed))
        try:
            with self._loaded.as_judged():
                if widen:
                    results = self.widened(sources) if read is None else self.widened(sources, read)
                else:
                    results = aten.interpret(self.graph, {name: tensor.clone() for name, tensor in sources.items()})
        except (RuntimeError, NotImplementedError, TypeError) as error:
            raise BadInput(f"the module cannot be computed in float64: {cause_of(error)}") from error
        outputs = [results[name] for name in self.graph.outputs]
        if len(outputs) != (count := sum(Key.of(region).is_output for region in self.regions)):
            raise BadInput(f"the module gives {count} tensors, but its captured graph {len(outputs)}")
        by_key = {Key.of_source(source): source.name for source in self.graph.sources}
        for key in self._written:
            # A source that eager leaves alone on these values is its own truth.
            now = self._after(key, args, written)
            unchanged = now.to(aten.widened(now.dtype)) if widen else now
            outputs.append(results.get(by_key.get(key, ""), unchanged))
        return outputs

    def graph_sources(self, args: Args) -> dict[str, torch.Tensor]:
        """The tensors that the graph reads, by their names in it."""
        held = self._loaded.sources(args).by_key()
        wanted = {source.name: Key.of_source(source) for source in self.graph.sources}
        if missing := [key for key in wanted.values() if key and key not in held]:
            raise BadInput(f"the captured graph reads {missing[0]}, which the module does not have")
        return {name: held[key] for name, key in wanted.items() if key}
