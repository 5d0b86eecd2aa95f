"""The judge's process: holds truth and eager results, which the candidate's process never sees.

The one idea: what a candidate gave is compared with answers that stay here: eager's, and the truth in float64, which
are only believed of each other where they agree. It never loads a candidate; how answers come to be is `reference`'s.
Served by `warpsmith.sandbox.worker`; user code runs here.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from gpu_bench.judging import alone, comparison, conditioning, near_ties, plausible, undecided
from gpu_bench.judging.loaded import LoadedTask, release_surplus
from gpu_bench.judging.reference import Reference
from gpu_bench.values import seeds
from gpu_bench.values.cases import Cases, Taken
from gpu_bench.values.inputs import family_name
from gpu_bench.values.keys import Key
from gpu_bench.workers.sharing import SharedMemory, move
from gpu_bench.workers.shortage import Shortages, TruthTooLarge, is_want_of_memory, with_room
from warpsmith.errors import BadInput
from warpsmith.graphs import aten, capture
from warpsmith.graphs.task_module import cause_of, seed_generators
from warpsmith.sandbox.worker import Methods
from warpsmith.v1 import candidate_pb2, graph_pb2, judging_pb2, verdict_pb2

_KEPT_BYTES = 4 << 30
"""Truths kept for later comparisons, the one about to be made included."""
_MANY = 1 << 26
"""Elements of all inputs from which on Σ|terms| of ordinary values is taken to be the same for every seed."""
_FAR = 4.0
"""Times its yardstick that an element or a block has to be off to be asked whether anything decides there."""


@dataclass(frozen=True)
class Answer:
    """What the reference gives on one case, region by region."""

    eager: Sequence[torch.Tensor]
    truth: Sequence[torch.Tensor]
    """float64 where the region is float."""
    floors: Sequence[float]
    """What the yardstick never falls below: 4u·Σ|terms| of small outputs, how far constant rows move them; else 0."""
    by_slices: bool = False
    """Whether the truth was computed some rows at a time, for want of memory."""
    coarse_errors: Sequence[float] = ()
    """rms of eager's error where only TF32 explains it, else 0."""
    most_errors: Sequence[float] = ()
    """What eager's rms error counts as at most: where only TF32 explains it, what it might be without. Four times the
    whole would let pass what leaves out a bias."""

    @property
    def size_bytes(self) -> int:
        """Memory that it holds."""
        return sum(t.numel() * t.element_size() for t in [*self.eager, *self.truth])


class Judge:
    """A prepared reference: made once for a task."""

    def __init__(self, loaded: LoadedTask, shared: SharedMemory, kind: type[Reference] = Reference) -> None:
        self._loaded = loaded
        self._shared = shared
        self._answers: OrderedDict[tuple[int, int], Answer] = OrderedDict()
        self._boundaries: dict[str, alone.Boundary] = {}
        """Of the group that is judged alone now."""
        self.shortages = Shortages()
        self._known_floors: dict[int, list[float]] = {}
        """By family the least that was seen."""
        args = loaded.case(verdict_pb2.VALUE_FAMILY_TASK, 0)
        self.reference = kind(loaded, args, self.give_back)
        self.graph = self.reference.graph
        given = [source.spec for source in self.graph.sources if source.origin == graph_pb2.ORIGIN_INPUT]
        self._has_many_terms = sum(math.prod(spec.shape) for spec in given) >= _MANY
        self.cases = Cases.learned(loaded, self.graph, self.reference.run, args)
        self.regions, self.total_bytes = self.reference.regions, self.reference.total_bytes
        answer = self.answer(verdict_pb2.VALUE_FAMILY_TASK, 0)
        self.cases.report.learned.coarse_errors[:] = answer.coarse_errors[: len(self.graph.outputs)]
        self.cases.try_sources(args, list(self.reference.written), answer.eager, answer.truth, answer.floors)

    @property
    def loaded(self) -> LoadedTask:
        """The task."""
        return self._loaded

    # ---- answers -------------------------------------------------------------------------------------------

    def answer(self, family: verdict_pb2.ValueFamily.ValueType, seed: int, *, once: bool = False) -> Answer:
        """The reference's results, from memory where they are kept.

        `once`: one of many seeds. Σ|terms| takes longer than all else, so that of other seeds of the family has to do;
        so it has for ordinary values in large tensors: on an H200 it took 0.42 of the 0.6 s of a batch norm's case.

        Raises:
            BadInput: the forward raises on these values, or gives what its captured graph does not.
        """
        key = (int(family), seed)
        if key not in self._answers:
            self._make_room()
            is_alike = once or (self._has_many_terms and family in comparison.ORDINARY)
            floors = self._known_floors.get(family) if is_alike else None
            self._answers[key] = with_room(
                lambda: self._compute(self.cases.taken(family, seed), family, seed, floors),
                f"eager and the truth in float64 on values of family {family_name(family)}",
                self.give_back,
            )
        self._answers.move_to_end(key)
        return self._answers[key]

    def give_back(self) -> judging_pb2.Done:
        """Gives back all memory that can be."""
        self._answers.clear()
        if self._loaded.device.type == "cuda":
            torch.cuda.empty_cache()
        return judging_pb2.Done()

    def _make_room(self) -> None:
        """Forgets old answers before another of their size is computed, which itself takes several times its size."""
        while self._answers:
            sizes = [answer.size_bytes for answer in self._answers.values()]
            if sum(sizes) + max(sizes) <= _KEPT_BYTES:
                return
            self._answers.popitem(last=False)

    def _compute(
        self,
        case: Taken,
        family: verdict_pb2.ValueFamily.ValueType,
        seed: int,
        known: Sequence[float] | None,
    ) -> Answer:
        sliced = self.reference.slice_count
        args, (outputs, written) = case
        sources = self.reference.graph_sources(args)
        truth = self.reference.truth(args, written, seed)
        floors = list(known or self._terms_floors(sources, truth, family))
        if family in self.reference.shaken:
            after = self.reference.truth(args, written, seed, conditioning.Moved(sources, seed))
            floors = list(map(max, floors, map(conditioning.shift, truth, after)))
        eager = self.reference.by_region(args, outputs, written)
        answer = Answer(eager, truth, floors, self.reference.slice_count > sliced)
        names = [str(Key.of(region)) for region in self.regions]
        if family not in comparison.ORDINARY and (chaotic := plausible.disagreement(names, answer.eager, answer.truth)):
            raise BadInput(chaotic)
        answer, doubts = self._doubted(answer, family)
        if doubts and any(answer.floors[at] > 0.0 for at in doubts):
            floors = self._terms_floors(sources, truth, family, followed=doubts)
            answer, doubts = self._doubted(replace(answer, floors=list(map(max, floors, answer.floors))), family)
        if not doubts:
            return answer
        if family != verdict_pb2.VALUE_FAMILY_TASK or not self.reference.repeats(eager, args, written, seed):
            raise BadInput(next(iter(doubts.values())))
        # The module amplifies rounding until nothing of float64 is left (batch norm over two values, five times in a
        # row). Its graph is right, bit by bit, so eager is the only truth: a candidate may differ by a few ulp.
        return replace(
            answer,
            truth=[
                eager[at].to(aten.widened(eager[at].dtype)) if at in doubts else each for at, each in enumerate(truth)
            ],
            floors=[0.0 if at in doubts else each for at, each in enumerate(answer.floors)],
        )

    def _terms_floors(
        self,
        sources: Mapping[str, torch.Tensor],
        truth: Sequence[torch.Tensor],
        family: int,
        followed: Collection[int] = (),
    ) -> list[float]:
        try:
            floors = self.reference.terms_floors(sources, truth, followed)
        except (RuntimeError, MemoryError) as error:
            self.shortages.ask(error, "terms", family)  # once more with all the room that there is
            return [0.0] * len(truth)
        self._known_floors[family] = list(map(min, floors, self._known_floors.get(family, floors)))
        return floors

    def _doubted(self, answer: Answer, family: verdict_pb2.ValueFamily.ValueType) -> tuple[Answer, dict[int, str]]:
        """The answer with what eager's errors count as; and region → why its float64 value is no truth: a yardstick as
        long as the output itself would measure nothing.

        On the task's own values an output may also be nothing but rounding: x − mean(x) of one element.
        Raises BadInput for another shape than eager's.
        """
        nothing = 1e-3 if family == verdict_pb2.VALUE_FAMILY_TASK else 0.0
        found: dict[int, str] = {}
        coarse, most = [0.0] * len(answer.eager), [math.inf] * len(answer.eager)
        regions = zip(self.regions, answer.eager, answer.truth, answer.floors, strict=True)
        for position, (region, eager, truth, floor) in enumerate(regions):
            if eager.shape != truth.shape:
                raise BadInput(f"{Key.of(region)}: eager gives {list(eager.shape)}, its graph {list(truth.shape)}")
            if not (eager.is_floating_point() or eager.is_complex()):
                continue
            off, size = plausible.off_and_size(eager, truth)
            least = 1e3 * torch.finfo(eager.dtype).smallest_normal
            types, size = [*self.reference.types, eager.dtype], max(size, nothing)
            without = max(plausible.share(types) * size, 16.0 * floor, least)
            allowed = max(plausible.share(types, rounds_to_tf32=self.reference.rounds_to_tf32) * size, without)
            if without < off <= allowed:
                coarse[position], most[position] = off, without
            if off > allowed:
                found[position] = (
                    f"{Key.of(region)}: what was captured is not what the module computes: eager differs from the "
                    f"graph in float64 by {off:.3g} rms, more than {allowed:.3g}"
                )
        return replace(answer, coarse_errors=coarse, most_errors=most), found

    # ---- judging -------------------------------------------------------------------------------------------

    def boundary(self, program: candidate_pb2.Program, group: str) -> judging_pb2.Boundary:
        """What has to be delivered so that a group can be judged alone; remembered for the comparison."""
        found = alone.boundary_of(program, group, self.graph)
        if isinstance(found, alone.Refusal):
            return judging_pb2.Boundary(unjudged=found.reason)
        self._boundaries = {group: found}
        return judging_pb2.Boundary(regions=found.regions, total_bytes=found.total_bytes)

    def _judge_alone(self, observed: judging_pb2.Observation) -> verdict_pb2.Comparison:
        boundary = self._boundaries[observed.group]
        sources = self.reference.graph_sources(self._loaded.case(observed.family, observed.seed))
        delivered = self._shared.tensors(boundary.regions)
        try:
            return with_room(
                lambda: alone.judge(boundary, observed, delivered, sources, self._loaded.device),
                f"eager and the truth in float64 of group {observed.group}",
                self.give_back,
            )
        except TruthTooLarge as error:
            family, seed, group = observed.family, observed.seed, observed.group
            return verdict_pb2.Comparison(family=family, seed=seed, group=group, unjudged=str(error))

    def judge(self, observed: judging_pb2.Observation) -> verdict_pb2.Comparison:
        """What was seen of a candidate's runs, with the errors of every region in the shared memory."""
        if observed.group:
            return self._judge_alone(observed)
        answer = self.answer(observed.family, observed.seed)
        complete = comparison.of(observed)
        complete.by_slices = answer.by_slices
        unwritten = dict(enumerate(observed.unwritten_counts))
        candidates = self._shared.tensors(self.regions)
        for position, candidate in enumerate(candidates):
            error = comparison.compare(
                candidate,
                answer.eager[position],
                answer.truth[position],
                terms_floor=answer.floors[position],
                most_error=answer.most_errors[position],
                forgiveness=comparison.Forgiveness.of(observed.family),
            )
            may_be_open = observed.family not in comparison.ORDINARY and not candidate.is_complex()
            is_far = may_be_open and max(error.max_ratio, error.block_ratio) > _FAR
            if (error.unequal_count or is_far) and position < len(self.graph.outputs):
                error = self._second_look(error, position, candidate, answer, observed)
            error.output = position
            error.unwritten_count = unwritten.get(position, 0)
            complete.outputs.append(error)
        return complete

    def _second_look(
        self,
        error: verdict_pb2.OutputError,
        position: int,
        candidate: torch.Tensor,
        answer: Answer,
        observed: judging_pb2.Observation,
    ) -> verdict_pb2.OutputError:
        """The comparison without what nothing decides: indices of near ties, elements that any rounding moves."""
        name, eager, truth = self.graph.outputs[position], answer.eager[position], answer.truth[position]
        sources = self.reference.graph_sources(self._loaded.case(observed.family, observed.seed))
        candidate = candidate.to(truth.device)

        def compute(name: str, widen: bool) -> torch.Tensor:
            part = graph_pb2.Graph()
            part.CopyFrom(self.graph)
            part.outputs[:] = [name]
            seed_generators(seeds.of_generators(observed.seed))
            return aten.interpret(part, {each: tensor.clone() for each, tensor in sources.items()}, widen)[name]

        def moved() -> Iterator[torch.Tensor]:
            for seed, reach in undecided.moves(observed.seed):
                seed_generators(seeds.of_generators(observed.seed))
                yield self.reference.widened(conditioning.Moved(sources, seed, reach))[name]

        if not eager.is_floating_point():
            near_ties.excuse(error, self.graph, name, candidate, eager, truth, compute)
            return error
        try:
            judged = undecided.excused(candidate, truth, moved())
        except (RuntimeError, MemoryError) as problem:
            if not is_want_of_memory(problem) or self.shortages.is_first("look", observed.family, observed.seed):
                raise
            return error
        forgiveness = comparison.Forgiveness.of(observed.family)
        again = comparison.compare(
            judged,
            eager,
            truth,
            terms_floor=answer.floors[position],
            most_error=answer.most_errors[position],
            forgiveness=forgiveness,
        )
        again.kernelbench_close = error.kernelbench_close
        return again

    def release_surplus(self) -> None:
        """Gives cached device memory back for the candidate's process."""
        release_surplus(self._loaded.device, self._loaded.task)


# ---- methods of the worker -----------------------------------------------------------------------------------

_judges: list[Judge] = []


def _warm_up(_: judging_pb2.WarmUpRequest) -> judging_pb2.Done:
    """Loads what capturing and comparing need."""
    capture.rehearse()
    comparison.rehearse()
    return judging_pb2.Done()


def prepare(request: judging_pb2.PrepareJudgeRequest, kind: type[Reference] = Reference) -> judging_pb2.Preparation:
    """Makes the judge of this process. Raises BadInput."""
    _judges.clear()
    _judges.append(Judge(LoadedTask.load(request.task), SharedMemory.inherited(), kind))
    judge = _judges[0]
    judge.release_surplus()
    prepared = judging_pb2.Preparation(
        regions=judge.regions,
        total_bytes=judge.total_bytes,
        eager_seconds=judge.reference.eager_seconds,
    )
    prepared.MergeFrom(judge.cases.report)
    return prepared


def _truth(request: judging_pb2.TruthRequest) -> judging_pb2.Truth:
    """Says where the reference is undefined instead of failing: some functions refuse some values."""
    truth = judging_pb2.Truth()
    try:
        _judges[0].answer(request.family, request.seed, once=request.once)
    except BadInput as error:
        if request.family == verdict_pb2.VALUE_FAMILY_TASK:
            raise
        truth.undefined = f"on values of family {family_name(request.family)}: {cause_of(error)}"
    except TruthTooLarge as error:
        is_first = _judges[0].shortages.is_first("truth", request.family, request.seed)
        if is_first or request.family != verdict_pb2.VALUE_FAMILY_CONSTANT_ROWS:
            raise
        truth.unjudged = str(error)  # they take most, for they need the truth twice
    finally:
        _judges[0].release_surplus()
    truth.learned.CopyFrom(_judges[0].cases.report.learned)
    return truth


def _judge(request: judging_pb2.JudgeRequest) -> judging_pb2.Judgement:
    return judging_pb2.Judgement(comparison=_judges[0].judge(request.observed))


def _boundary(request: judging_pb2.BoundaryRequest) -> judging_pb2.Boundary:
    return _judges[0].boundary(request.program, request.group)


def prepared() -> Judge:
    """The judge of this process, once it was prepared."""
    return _judges[0]


def preload() -> None:
    """As `fork_server.PRELOAD`."""
    capture.rehearse()


METHODS: Methods = {
    "warm_up": (judging_pb2.WarmUpRequest, _warm_up),
    "prepare": (judging_pb2.PrepareJudgeRequest, prepare),
    "truth": (judging_pb2.TruthRequest, _truth),
    "judge": (judging_pb2.JudgeRequest, _judge),
    "boundary": (judging_pb2.BoundaryRequest, _boundary),
    "move": (judging_pb2.MoveRequest, move),
    "give_back": (judging_pb2.GiveBackRequest, lambda _: _judges[0].give_back()),
}
