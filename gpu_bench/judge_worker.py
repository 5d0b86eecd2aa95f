"""The judge's process: holds truth and eager results, which the candidate's process never sees.

The one idea: the judge captures the module by itself and computes that graph in float64, so that neither the
synthesis agent's idea of the module nor eager's rounding is taken for the truth. It never loads a candidate.
Served by `warpsmith.worker`; user code runs here.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from gpu_bench import comparison, executor, guard
from gpu_bench.inputs import family_name
from gpu_bench.loaded import Args, LoadedTask, release_surplus
from gpu_bench.sharing import SharedMemory, lay_out
from gpu_bench.terms import terms_floor
from warpsmith import aten
from warpsmith.errors import BadInput
from warpsmith.task_module import cause_of
from warpsmith.v1 import judging_pb2, verdict_pb2
from warpsmith.worker import Methods

_PLAUSIBLE = {torch.float64: 1e-6, torch.float32: 2e-2, torch.float16: 1e-1, torch.bfloat16: 3e-1}
"""Largest rms error of eager relative to the truth's rms before we doubt that the graph is the module. TF32 products
in a deep network stay below it; another graph does not."""
_KEPT_BYTES = 1 << 30
"""Truths kept for later comparisons."""
_FORGIVING = frozenset({verdict_pb2.VALUE_FAMILY_NON_FINITE, verdict_pb2.VALUE_FAMILY_MASKED})


@dataclass(frozen=True)
class Answer:
    """What the reference gives on one case, region by region."""

    eager: Sequence[torch.Tensor]
    truth: Sequence[torch.Tensor]
    """float64 where the region is float."""
    floors: Sequence[float]
    """4u·Σ|terms| of small outputs; 0 for others."""

    @property
    def size_bytes(self) -> int:
        """Memory that it holds."""
        return sum(t.numel() * t.element_size() for t in [*self.eager, *self.truth])


class Judge:
    """A prepared reference: made once for a task."""

    def __init__(self, loaded: LoadedTask, shared: SharedMemory) -> None:
        self._loaded = loaded
        self._shared = shared
        self._answers: OrderedDict[tuple[int, int], Answer] = OrderedDict()
        args = loaded.case(verdict_pb2.VALUE_FAMILY_TASK, 0)
        self.graph = loaded.capture(args)
        begin = time.perf_counter()
        outputs, written = self._run_eager(args, seed=0)
        self.eager_seconds = time.perf_counter() - begin
        self._written = written
        self._refuse_random_reference(args, outputs, written)
        named = [(f"output {position}", tensor) for position, tensor in enumerate(outputs)]
        self.regions, self.total_bytes = lay_out([*named, *written.items()])
        self.answer(verdict_pb2.VALUE_FAMILY_TASK, 0)

    # ---- answers -------------------------------------------------------------------------------------------

    def answer(self, family: verdict_pb2.ValueFamily.ValueType, seed: int) -> Answer:
        """The reference's results, from memory where they are kept.

        Raises:
            BadInput: the forward raises on these values, or gives what its captured graph does not.
        """
        key = (int(family), seed)
        if key not in self._answers:
            answer = self._compute(self._loaded.case(family, seed), seed)
            self._refuse_implausible(answer, family)
            self._answers[key] = answer
            while len(self._answers) > 1 and self._held_bytes() > _KEPT_BYTES:
                self._answers.popitem(last=False)
        self._answers.move_to_end(key)
        return self._answers[key]

    def _held_bytes(self) -> int:
        return sum(answer.size_bytes for answer in self._answers.values())

    def _compute(self, args: Args, seed: int) -> Answer:
        outputs, written = self._run_eager(args, seed)  # first: it says best what the module refuses
        sources = self._graph_sources(args)
        torch.manual_seed(seed)
        try:
            results = aten.interpret(self.graph, sources, widen=True)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            raise BadInput(f"the module cannot be computed in float64: {cause_of(error)}") from error
        truth = [results[name] for name in self.graph.outputs]
        by_name = {executor.name_of(source): source.name for source in self.graph.sources}
        floors = [terms_floor(self.graph, sources, position, t) for position, t in enumerate(truth)]
        if len(outputs) != len(truth):
            raise BadInput(f"the module gives {len(outputs)} tensors, but its captured graph {len(truth)}")
        eager = [*outputs]
        for name in self._written:
            # A source that eager leaves alone on these values is its own truth.
            now = written.get(name, self._loaded.sources(args).named()[name])
            eager.append(now)
            captured = by_name.get(name, "")
            truth.append(results.get(captured, now.double() if now.is_floating_point() else now))
        return Answer(eager, truth, [*floors, *([0.0] * len(self._written))])

    def _graph_sources(self, args: Args) -> dict[str, torch.Tensor]:
        named = self._loaded.sources(args).named()
        wanted = {source.name: executor.name_of(source) for source in self.graph.sources}
        missing = [name for name in wanted.values() if name and name not in named]
        if missing:
            raise BadInput(f"the captured graph reads {missing[0]}, which the module does not have")
        return {name: named[wanted[name]] for name in wanted if wanted[name]}

    def _run_eager(self, args: Args, seed: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """Output tensors of eager, and what every source that it changed holds afterwards; sources are put back."""
        named = self._loaded.sources(args).named()
        before = {name: tensor.clone() for name, tensor in named.items()}
        torch.manual_seed(seed)
        with torch.no_grad(), self._loaded.user.explaining("the forward failed"):
            returned = self._loaded.module(*args)
        outputs = [leaf.clone() for leaf in self._loaded.output_leaves(returned)]
        if not outputs:
            raise BadInput(f"{self._loaded.user.entry_path}: the forward returns no tensor")
        written: dict[str, torch.Tensor] = {}
        for name, tensor in named.items():
            if not guard.same_bits(tensor, before[name]):
                written[name] = tensor.clone()
                tensor.copy_(before[name])
        return outputs, written

    # ---- is the reference one ------------------------------------------------------------------------------

    def _refuse_random_reference(
        self, args: Args, outputs: Sequence[torch.Tensor], written: Mapping[str, torch.Tensor]
    ) -> None:
        again, written_again = self._run_eager(args, seed=0)
        pairs = [*zip(outputs, again, strict=False), *((t, written_again.get(n)) for n, t in written.items())]
        for position, (first, second) in enumerate(pairs):
            if second is None or first.shape != second.shape or not guard.same_bits(first, second):
                raise BadInput(
                    f"{self._loaded.user.entry_path}: the module is not deterministic: tensor {position} of its "
                    "results differs between two runs from one generator state"
                )

    def _refuse_implausible(self, answer: Answer, family: verdict_pb2.ValueFamily.ValueType) -> None:
        """A yardstick as long as the output itself would measure nothing: any candidate would pass.

        On the task's own values an output may also be nothing but rounding: x − mean(x) of one element.
        """
        nothing = 1e-3 if family == verdict_pb2.VALUE_FAMILY_TASK else 0.0
        for region, eager, truth, floor in zip(self.regions, answer.eager, answer.truth, answer.floors, strict=True):
            if eager.shape != truth.shape:
                raise BadInput(f"{region.name}: eager gives {list(eager.shape)}, its graph {list(truth.shape)}")
            if not eager.is_floating_point():
                continue
            valid = torch.isfinite(eager) & torch.isfinite(truth)
            off = _rms((eager.double() - truth)[valid])
            least = 1e3 * torch.finfo(eager.dtype).smallest_normal
            allowed = max(_PLAUSIBLE[eager.dtype] * max(_rms(truth[valid]), nothing), 16.0 * floor, least)
            if off > allowed:
                raise BadInput(
                    f"{region.name}: what was captured is not what the module computes: eager differs from the "
                    f"graph in float64 by {off:.3g} rms, more than {allowed:.3g}"
                )

    # ---- judging -------------------------------------------------------------------------------------------

    def judge(self, observed: verdict_pb2.Comparison) -> verdict_pb2.Comparison:
        """Completes what the candidate's process saw with the errors of every region in the shared memory."""
        answer = self.answer(observed.family, observed.seed)
        complete = verdict_pb2.Comparison()
        complete.CopyFrom(observed)
        unwritten = {error.output: error.unwritten_count for error in observed.outputs}
        del complete.outputs[:]
        forgiveness = comparison.Forgiveness(observed.family in _FORGIVING)
        candidates = self._shared.tensors(self.regions)
        for position, candidate in enumerate(candidates):
            error = comparison.compare(
                candidate.to(self._loaded.device),
                answer.eager[position],
                answer.truth[position],
                terms_floor=answer.floors[position],
                forgiveness=forgiveness,
            )
            error.output = position
            error.unwritten_count = unwritten.get(position, 0)
            complete.outputs.append(error)
        return complete

    def release_surplus(self) -> None:
        """Gives cached device memory back for the candidate's process."""
        release_surplus(self._loaded.device)


def _rms(values: torch.Tensor) -> float:
    return float(values.double().square().mean().sqrt()) if values.numel() else 0.0


# ---- methods of the worker -----------------------------------------------------------------------------------

_judges: list[Judge] = []


def _prepare(request: judging_pb2.PrepareRequest) -> judging_pb2.Preparation:
    _judges.clear()
    _judges.append(Judge(LoadedTask.load(request.task), SharedMemory.inherited()))
    judge = _judges[0]
    judge.release_surplus()
    return judging_pb2.Preparation(
        regions=judge.regions, total_bytes=judge.total_bytes, eager_seconds=judge.eager_seconds
    )


def _truth(request: judging_pb2.TruthRequest) -> judging_pb2.Truth:
    """Says where the reference is undefined instead of failing: some functions refuse some values."""
    try:
        _judges[0].answer(request.family, request.seed)
    except BadInput as error:
        if request.family == verdict_pb2.VALUE_FAMILY_TASK:
            raise
        return judging_pb2.Truth(undefined=f"on values of family {family_name(request.family)}: {cause_of(error)}")
    finally:
        _judges[0].release_surplus()
    return judging_pb2.Truth()


def _judge(request: judging_pb2.JudgeRequest) -> judging_pb2.Judgement:
    return judging_pb2.Judgement(comparison=_judges[0].judge(request.observed))


METHODS: Methods = {
    "prepare": (judging_pb2.PrepareRequest, _prepare),
    "truth": (judging_pb2.TruthRequest, _truth),
    "judge": (judging_pb2.JudgeRequest, _judge),
}
