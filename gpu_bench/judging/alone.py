"""One group of a program judged alone: by what it was given in a run of the whole, and what it made of that.

The one idea: a whole is measured by eager's error, and where one call of it is inexact (a TF32 convolution), so may
everything else be. A group is measured by the error that eager makes on the same values, between the same two places
of the captured graph. Programs name their buffers as the graph names its tensors; what has no such name cannot be
judged alone, and that is said. Never raises for a program: it answers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from gpu_bench.judging import comparison, undecided
from gpu_bench.truth import plausible
from gpu_bench.truth.conditioning import Moved
from gpu_bench.truth.terms import terms_floor
from gpu_bench.values.keys import Key
from gpu_bench.workers.sharing import lay_out
from gpu_bench.workers.shortage import is_want_of_memory
from warpsmith.graphs import aten, dtypes
from warpsmith.program_steps import buffers_of, made_by, tensor_names
from warpsmith.v1 import candidate_pb2, graph_pb2, judging_pb2, tensor_pb2, verdict_pb2

MOST_BYTES = 8 << 30
"""What a group is given and makes may take in the memory that both workers share."""


@dataclass(frozen=True)
class Boundary:
    """Between which tensors of the captured graph a group lies."""

    graph: graph_pb2.Graph
    """The part of the module's graph between them; its sources are the module's own and what is given."""
    regions: Sequence[judging_pb2.Region]
    """What the candidate's process delivers: everything given, then everything made."""
    total_bytes: int


@dataclass(frozen=True)
class Refusal:
    """The group cannot be judged alone."""

    reason: str


def span_of(program: candidate_pb2.Program, group: str) -> tuple[int, int]:
    """Positions of the group's first and last step; (-1, -1) where it has none."""
    positions = [position for position, step in enumerate(program.steps) if step.group == group]
    return (positions[0], positions[-1]) if positions else (-1, -1)


def boundary_of(program: candidate_pb2.Program, group: str, graph: graph_pb2.Graph) -> Boundary | Refusal:
    """What lies between a group and the rest of its program."""
    first, last = span_of(program, group)
    if first < 0:
        return Refusal("the program has no such group")
    specs = {result.name: result.spec for node in graph.nodes for result in node.results if result.name}
    before = {name for step in program.steps[:first] for name in made_by(step)}
    after = {name for step in program.steps[last + 1 :] for name in buffers_of(step)} | {*program.outputs}
    touched = dict.fromkeys(name for step in program.steps[first : last + 1] for name in buffers_of(step))
    written = {name for step in program.steps[first : last + 1] for name in made_by(step)}
    given = [name for name in touched if name in before and name in specs and name not in written]
    made = [name for name in touched if name in written and name in after and name in specs]
    if not made:
        return Refusal("what it makes has no name in the module's graph, as after a change of the algebra")
    part = _part(graph, given, made, specs, _Around(before, written))
    if isinstance(part, Refusal):
        return part
    read = {source.name for source in part.sources}
    tensors = [(Key.given(name), _meta(specs[name])) for name in given if name in read]
    regions, total = lay_out(tensors + [(Key.made(name), _meta(specs[name])) for name in made])
    if total > MOST_BYTES:
        return Refusal(f"what it is given and makes takes {total / 2**30:.1f} GiB, more than {MOST_BYTES >> 30} GiB")
    return Boundary(part, regions, total)


def _meta(spec: tensor_pb2.TensorSpec) -> torch.Tensor:
    return torch.empty(tuple(spec.shape), dtype=dtypes.to_torch(spec.dtype), device="meta")


def _part(
    graph: graph_pb2.Graph,
    given: Sequence[str],
    made: Sequence[str],
    specs: Mapping[str, tensor_pb2.TensorSpec],
    around: _Around,
) -> graph_pb2.Graph | Refusal:
    """The nodes that make `made` out of `given` and the module's own tensors."""
    maker = {result.name: node for node in graph.nodes for result in node.results if result.name}
    wanted, pending = set(made), list(made)
    needed: set[str] = set()
    while pending:
        node = maker[pending.pop()]
        needed.add(node.name)
        for name in tensor_names(aten.arguments_of(node)):
            if name not in wanted:
                wanted.add(name)
                if name not in given and name in maker:
                    pending.append(name)
    nodes = [node for node in graph.nodes if node.name in needed]
    if any(node.random for node in nodes):
        return Refusal("it draws at random")
    own = {source.name for source in graph.sources}
    if not _InPlace(graph, needed, [name for name in given if name in wanted], made, around).leaves(wanted, own):
        return Refusal("what it is given, reads or makes is written in place")
    part = graph_pb2.Graph(outputs=made, nodes=nodes)
    part.sources.extend(source for source in graph.sources if source.name in wanted & own)
    for name in given:
        if name in wanted:
            part.sources.add(name=name, spec=specs[name], origin=graph_pb2.ORIGIN_INPUT)
    return part


@dataclass(frozen=True)
class _Around:
    """What a program does about a group."""

    before: Collection[str]
    """Tensors that steps ahead of it write."""
    within: Collection[str]
    """Those that its own steps write, or a library's that lie between them."""


class _InPlace:
    """What a graph writes in place, seen from some of its nodes: whether what those read and make is what a group finds
    at its start and leaves at its end, where every tensor holds one thing."""

    def __init__(
        self,
        graph: graph_pb2.Graph,
        needed: Collection[str],
        given: Sequence[str],
        made: Sequence[str],
        around: _Around,
    ) -> None:
        self._owner, self._given, self._made, self._around = aten.roots(graph), given, made, around
        self._nodes = graph.nodes
        self._place = {each.name: place for place, node in enumerate(graph.nodes) for each in node.results if each.name}
        self._inside = {place for place, node in enumerate(graph.nodes) if node.name in needed}
        self._writers: dict[str, list[int]] = {}
        """By root, in order."""
        self._touching: dict[str, list[int]] = {}
        """The same of needed nodes that read, make or write any of its tensors."""
        for place, node in enumerate(graph.nodes):
            for root in {self._owner[name] for name in node.mutates}:
                self._writers.setdefault(root, []).append(place)
            for root in {self._owner[name] for name in self._names(node)} if place in self._inside else ():
                self._touching.setdefault(root, []).append(place)

    def leaves(self, wanted: Collection[str], own: Collection[str]) -> bool:
        """Whether that holds of all `wanted` tensors; `own`: the module's, which are known as they were before."""
        return all(self._holds(root, root in own) for root in {self._owner[name] for name in wanted})

    def _holds(self, root: str, is_own: bool) -> bool:
        writers = self._writers.get(root, [])
        outside = [place for place in writers if place not in self._inside]
        given = [name for name in self._given if self._owner[name] == root]
        if not writers or is_own:
            return not outside and not (writers and given)
        touching = self._touching[root]
        if any(touching[0] < place < touching[-1] or self._is_in(place, self._around.within) for place in outside):
            return False
        if given:  # as its last writer ahead of the group left it
            ahead = max((place for place in outside if place < touching[0]), default=-1)
            is_early = any(self._is_in(place, self._around.before) for place in writers if place in self._inside)
            if len(given) > 1 or is_early or self._place[given[0]] < ahead:
                return False
        last = max((place for place in writers if place in self._inside), default=-1)
        return all(self._place[name] >= last for name in self._made if self._owner[name] == root)

    def _is_in(self, place: int, written: Collection[str]) -> bool:
        """Whether some step that writes these makes what a node of the graph does."""
        return any(each.name in written for each in self._nodes[place].results)

    @staticmethod
    def _names(node: graph_pb2.Node) -> list[str]:
        return [*tensor_names(aten.arguments_of(node)), *(each.name for each in node.results if each.name)]


def judge(
    boundary: Boundary,
    observed: judging_pb2.Observation,
    delivered: Sequence[torch.Tensor],
    sources: Mapping[str, torch.Tensor],
    device: torch.device,
) -> verdict_pb2.Comparison:
    """Compares what a group made with the truth of what it was given.

    `delivered` are the tensors of `boundary.regions`, `sources` the module's by their names in the graph.
    """
    complete = verdict_pb2.Comparison(family=observed.family, seed=observed.seed, group=observed.group)
    values, results = dict(sources), {}
    for region, tensor in zip(boundary.regions, delivered, strict=True):
        name = region.name
        if region.kind == judging_pb2.REGION_KIND_GIVEN:
            spec = next(source.spec for source in boundary.graph.sources if source.name == name)
            laid = torch.empty_strided(tuple(spec.shape), tuple(spec.strides), dtype=tensor.dtype, device=device)
            values[name] = laid.copy_(tensor)
        else:
            results[name] = tensor
    used = {source.name: values[source.name] for source in boundary.graph.sources if source.name in values}
    truth = aten.interpret(boundary.graph, used, widen=True)
    eager = aten.interpret(boundary.graph, {name: tensor.clone() for name, tensor in used.items()})

    def moved(name: str) -> Iterator[torch.Tensor]:
        for seed, reach in undecided.moves(observed.seed):
            yield aten.interpret(boundary.graph, Moved(used, seed, reach), widen=True)[name]

    specs = [result.spec for node in boundary.graph.nodes for result in node.results if result.name]
    coarsest = plausible.share(dtypes.to_torch(spec.dtype) for spec in specs)
    for position, (name, candidate) in enumerate(results.items()):
        own, wide = eager[name], truth[name]
        if own.is_floating_point():
            off, size = plausible.off_and_size(own, wide)
            if off > max(coarsest, plausible.share([own.dtype])) * size:
                complete.unjudged = f"rounding is all that is left of {name}"
                del complete.outputs[:]
                return complete
        floor = terms_floor(boundary.graph, used, name, wide)
        error = comparison.compare(candidate, own, wide, terms_floor=floor)
        if undecided.is_far_by_luck(error, candidate, wide):
            try:
                # What lies in an outbox may change meanwhile.
                judged = undecided.excused(candidate.to(device, copy=True), wide, moved(name), if_many=True)
                error = comparison.compare(judged, own, wide, terms_floor=floor)
            except RuntimeError as problem:  # of a matrix that is moved, there may be no factors
                if is_want_of_memory(problem):
                    raise
        error.output = position
        complete.outputs.append(error)
    return complete


def watching(
    program: candidate_pb2.Program,
    request: judging_pb2.ExecuteGroupRequest,
    found: Callable[[str], torch.Tensor | None],
) -> tuple[Callable[[], None], dict[Key, torch.Tensor]]:
    """What to call after every step of a run, and once before the first; and what it fills: copies, by region."""
    first, last = span_of(program, request.group)
    seen: dict[Key, torch.Tensor] = {}
    step = -1

    def after_step() -> None:
        nonlocal step
        step += 1
        for position, kind in ((first, judging_pb2.REGION_KIND_GIVEN), (last + 1, judging_pb2.REGION_KIND_MADE)):
            if step != position:
                continue
            for region in request.regions:
                tensor = found(region.name) if region.kind == kind else None
                if tensor is not None:
                    seen[Key.of(region)] = tensor.clone()

    return after_step, seen
