"""The judge's process: holds truth and eager results, which the candidate's process never sees.

The one idea: what a candidate gave is compared with answers that stay here: eager's, and the truth in float64, which
are only believed of each other where they agree. It never loads a candidate; how answers come to be is `answers`'s.
Served by `warpsmith.sandbox.worker`; user code runs here.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gpu_bench.judging import alone, comparison, masks, near_ties, undecided
from gpu_bench.judging.loaded import LoadedTask, release_surplus
from gpu_bench.truth import conditioning, plausible
from gpu_bench.truth.answers import Answer, Answers
from gpu_bench.truth.reference import Reference
from gpu_bench.values import inputs, seeds
from gpu_bench.values.inputs import family_name
from gpu_bench.workers.sharing import SharedMemory, move
from gpu_bench.workers.shortage import TruthTooLarge, is_want_of_memory, with_room
from warpsmith.errors import BadInput
from warpsmith.graphs import aten, capture
from warpsmith.graphs.task_module import cause_of, seed_generators
from warpsmith.sandbox.worker import Methods
from warpsmith.v1 import candidate_pb2, graph_pb2, judging_pb2, verdict_pb2


class Judge:
    """A prepared reference: made once for a task."""

    def __init__(self, loaded: LoadedTask, shared: SharedMemory, kind: type[Reference] = Reference) -> None:
        self._loaded = loaded
        self._shared = shared
        self._boundaries: dict[str, alone.Boundary] = {}
        """Of the group that is judged alone now."""
        self.answers = Answers(loaded, kind)
        self.reference, self.cases = self.answers.reference, self.answers.cases
        self.graph, self.regions = self.reference.graph, self.reference.regions
        self.total_bytes = self.reference.total_bytes

    @property
    def loaded(self) -> LoadedTask:
        """The task."""
        return self._loaded

    def boundary(self, program: candidate_pb2.Program, group: str) -> judging_pb2.Boundary:
        """What has to be delivered so that a group can be judged alone; remembered for the comparison."""
        found = alone.boundary_of(program, group, self.graph)
        if isinstance(found, alone.Boundary) and self.reference.convolves_in_tf32(found.graph):
            found = alone.Refusal("a convolution ahead of it, which may round to TF32, has another name in the program")
        if isinstance(found, alone.Refusal):
            return judging_pb2.Boundary(unjudged=found.reason)
        self._boundaries = {group: found}
        return judging_pb2.Boundary(regions=found.regions, total_bytes=found.total_bytes)

    def judge_alone(self, observed: judging_pb2.Observation, learned: judging_pb2.Learned) -> verdict_pb2.Comparison:
        """What was seen of a group alone, on a case that was drawn by what is `learned`."""
        boundary = self._boundaries[observed.group]
        sources = self.reference.graph_sources(self._loaded.case(observed.family, observed.seed, learned))
        delivered = self._shared.tensors(boundary.regions)
        try:
            return with_room(
                lambda: alone.judge(boundary, observed, delivered, sources, self._loaded.device),
                f"eager and the truth in float64 of group {observed.group}",
                self.answers.give_back,
            )
        except TruthTooLarge as error:
            family, seed, group = observed.family, observed.seed, observed.group
            return verdict_pb2.Comparison(family=family, seed=seed, group=group, unjudged=str(error))

    def judge(self, observed: judging_pb2.Observation) -> verdict_pb2.Comparison:
        """What was seen of a candidate's runs, with the errors of every region in the shared memory."""
        answer = self.answers.of(observed.family, observed.seed)
        complete = comparison.of(observed)
        complete.by_slices = answer.by_slices
        complete.near_task = inputs.restraint_of(answer.learned, observed.family).floats_near
        complete.without_tf32 = self.answers.cases.report.learned.without_tf32
        unwritten = dict(enumerate(observed.unwritten_counts))
        candidates = self._shared.tensors(self.regions)
        for position, candidate in enumerate(candidates):
            error = self._compare(candidate, position, answer, observed)
            is_own = position < len(self.graph.outputs)
            if is_own and self._may_be_open(error, candidate, answer.truth[position], observed):
                error = self._second_look(error, position, candidate, answer, observed)
            error.output = position
            error.unwritten_count = unwritten.get(position, 0)
            complete.outputs.append(error)
        return complete

    def _may_be_open(
        self,
        error: verdict_pb2.OutputError,
        candidate: torch.Tensor,
        truth: torch.Tensor,
        observed: judging_pb2.Observation,
    ) -> bool:
        """Whether what is far off is worth a second look; on ordinary values where a few elements are, by a little."""
        if error.unequal_count:
            return True
        if comparison.is_ordinary(observed.family):
            return undecided.is_far_by_luck(error, candidate, truth)
        is_far = max(error.max_ratio, error.block_ratio) > undecided.FAR or error.non_finite_mismatch_count > 0
        return is_far and candidate.is_floating_point()

    def _compare(
        self, candidate: torch.Tensor, position: int, answer: Answer, observed: judging_pb2.Observation
    ) -> verdict_pb2.OutputError:
        """Of one region. Measured by eager's error, and where that does not do, by what TF32 makes of the truth."""

        def against(own: torch.Tensor, sparse_floor: float = 0.0) -> verdict_pb2.OutputError:
            return comparison.compare(
                candidate,
                own,
                answer.truth[position],
                terms_floor=answer.floors[position],
                most_error=answer.most_errors[position],
                sparse_floor=sparse_floor,
                forgiveness=comparison.Forgiveness.of(observed.family),
            )

        error = against(answer.eager[position])
        is_far = max(error.rms_ratio, error.max_ratio, error.block_ratio, error.small_ratio) > undecided.FAR
        if not is_far or not (rounded := self.answers.rounded(observed.family, observed.seed)):
            return error
        # What a ReLU leaves of a block may be one element.
        off, _ = plausible.off_and_size(rounded[position], answer.truth[position])
        by_tf32 = against(rounded[position], min(off, answer.most_errors[position]))
        for ratio in ("rms_ratio", "max_ratio", "block_ratio", "small_ratio"):
            if getattr(by_tf32, ratio) < getattr(error, ratio):
                setattr(error, ratio, getattr(by_tf32, ratio))
                error.by_tf32 = True
        return error

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
        sources = self.reference.graph_sources(self._loaded.case(observed.family, observed.seed, answer.learned))
        candidate = candidate.to(truth.device, copy=True)  # what lies in an outbox may change meanwhile

        def compute(name: str, widen: bool) -> torch.Tensor:
            part = graph_pb2.Graph()
            part.CopyFrom(self.graph)
            part.outputs[:] = [name]
            seed_generators(seeds.of_generators(observed.seed))
            with self._loaded.as_judged():
                return aten.interpret(part, {each: tensor.clone() for each, tensor in sources.items()}, widen)[name]

        def moved() -> Iterator[torch.Tensor]:
            for seed, reach in undecided.moves(observed.seed):
                seed_generators(seeds.of_generators(observed.seed))
                yield self.reference.widened(conditioning.Moved(sources, seed, reach))[name]

        if not eager.is_floating_point():
            near_ties.excuse(error, self.graph, name, candidate, eager, truth, compute)
            return error
        try:
            if error.non_finite_mismatch_count and self.reference.is_traced:
                with masks.Skipped():
                    skipped = compute(name, True)
                with masks.Added():  # type: ignore[no-untyped-call]
                    added = compute(name, True)
                candidate = masks.excused(candidate, truth, skipped, added)
            judged = undecided.excused(candidate, truth, moved(), if_many=comparison.is_ordinary(observed.family))
        except Exception as problem:  # the user's code, on values that nobody drew
            is_first = self.answers.shortages.is_first("look", observed.family, observed.seed)
            if is_want_of_memory(problem) and is_first:
                raise
            return error
        again = self._compare(judged, position, answer, observed)
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
    loaded = LoadedTask.load(request.task)
    loaded.state_seed = request.state_seed or loaded.state_seed
    _judges.append(Judge(loaded, SharedMemory.inherited(), kind))
    judge = _judges[0]
    judge.release_surplus()
    prepared = judging_pb2.Preparation(
        regions=judge.regions,
        total_bytes=judge.total_bytes,
        eager_seconds=judge.reference.eager_seconds,
        output_tree=judge.graph.output_tree,
        output_leaves=judge.graph.output_leaves,
    )
    prepared.MergeFrom(judge.cases.report)
    return prepared


def _truth(request: judging_pb2.TruthRequest) -> judging_pb2.Truth:
    """Says where the reference is undefined instead of failing: some functions refuse some values."""
    truth, learned = judging_pb2.Truth(), None
    try:
        learned = _judges[0].answers.of(request.family, request.seed, once=request.once).learned
    except BadInput as error:
        if request.family == verdict_pb2.VALUE_FAMILY_TASK:
            raise
        truth.undefined = f"on values of family {family_name(request.family)}: {cause_of(error)}"
    except TruthTooLarge as error:
        is_first = _judges[0].answers.shortages.is_first("truth", request.family, request.seed)
        if is_first or request.family != verdict_pb2.VALUE_FAMILY_CONSTANT_ROWS:
            raise
        truth.unjudged = str(error)  # they take most, for they need the truth twice
    finally:
        _judges[0].release_surplus()
    truth.learned.CopyFrom(learned or _judges[0].cases.report.learned)
    return truth


def _judge(request: judging_pb2.JudgeRequest) -> judging_pb2.Judgement:
    judge, observed = _judges[0], request.observed
    if observed.group:
        return judging_pb2.Judgement(comparison=judge.judge_alone(observed, request.learned))
    return judging_pb2.Judgement(comparison=judge.judge(observed))


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
    "give_back": (judging_pb2.GiveBackRequest, lambda _: _judges[0].answers.give_back()),
}
