"""What the reference gives on cases: eager's results and the truth in float64, kept as long as there is room.

The one idea: the two are only believed of each other where they agree to within rounding, whose size each answer says.
It compares no candidate.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from gpu_bench.judging import comparison, dependence, spared
from gpu_bench.judging.loaded import Args, LoadedTask
from gpu_bench.timing import headline
from gpu_bench.truth import conditioning, plausible
from gpu_bench.truth.reference import Reference
from gpu_bench.values.cases import Cases, Taken
from gpu_bench.values.inputs import family_name
from gpu_bench.values.keys import Key
from gpu_bench.workers.shortage import Shortages, TruthTooLarge, with_room
from warpsmith.errors import BadInput
from warpsmith.graphs import aten
from warpsmith.v1 import graph_pb2, judging_pb2, verdict_pb2

_KEPT_BYTES = 4 << 30
"""Truths kept for later comparisons, the one about to be made included."""
_MANY = 1 << 26
"""Elements of all inputs from which on Σ|terms| of ordinary values is taken to be the same for every seed."""


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
    """rms of eager's error where it may round to TF32, else 0."""
    most_errors: Sequence[float] = ()
    """What PyTorch's rms error counts as at most: what it might be without TF32. Four times more would let pass what
    leaves out a bias. 0 where the truth is eager's."""
    learned: judging_pb2.Learned = field(default_factory=judging_pb2.Learned)
    """By what was known when its case was drawn."""
    rounded: list[torch.Tensor] = field(default_factory=list)
    """The truth of factors that are rounded to TF32, in eager's types, once it was asked for."""

    @property
    def size_bytes(self) -> int:
        """Memory that it holds."""
        return sum(t.numel() * t.element_size() for t in [*self.eager, *self.truth, *self.rounded])


class Answers:
    """Of a prepared reference: made once for a task."""

    def __init__(self, loaded: LoadedTask, kind: type[Reference] = Reference) -> None:
        self._loaded = loaded
        self._kept: OrderedDict[tuple[int, int], Answer] = OrderedDict()
        self.shortages = Shortages()
        self._drawn_by: dict[tuple[int, int], judging_pb2.Learned] = {}
        """What was known when a case was drawn first: it is drawn by that again."""
        self._known_floors: dict[int, list[float]] = {}
        """By family the least that was seen."""
        self._is_first = True
        """Whether nothing has been computed yet."""
        args = loaded.case(verdict_pb2.VALUE_FAMILY_TASK, 0)
        self.reference = kind(loaded, args, self.give_back)
        graph = self.reference.graph
        given = [source.spec for source in graph.sources if source.origin == graph_pb2.ORIGIN_INPUT]
        self._has_many_terms = sum(math.prod(spec.shape) for spec in given) >= _MANY
        self.cases = Cases.learned(loaded, graph, self.reference.run, args, self.reference.written)
        self._try_sources(args)
        if self._is_constant and self.reference.forbid_tf32():
            self.give_back()  # what differs by less than TF32 rounds may differ by far more than fp32 does
            self._try_sources(args)
            if self._is_constant:
                self.reference.allow_tf32()
                self.give_back()

    @property
    def _is_constant(self) -> bool:
        return not {headline.OUTPUT_CONSTANT, headline.OUTPUT_ZERO}.isdisjoint(self.cases.report.flags)

    def _try_sources(self, args: Args) -> None:
        answer = self.of(verdict_pb2.VALUE_FAMILY_TASK, 0)
        written, may_read_less = list(self.reference.written), self.reference.may_read_less
        spares = functools.partial(spared.by_leaving_out, self.reference.graph)
        base = dependence.Base(answer.eager, answer.truth, answer.floors, len(answer.eager) - len(written), spares)
        self.cases.try_sources(args, written, base, may_read_less=may_read_less)

    def of(self, family: verdict_pb2.ValueFamily.ValueType, seed: int, *, once: bool = False) -> Answer:
        """The reference's results, from memory where they are kept.

        `once`: one of many seeds. Σ|terms| takes longer than all else, so that of other seeds of the family has to do;
        so it has for ordinary values in large tensors: on an H200 it took 0.42 of the 0.6 s of a batch norm's case.

        Raises:
            BadInput: the forward raises on these values, or gives what its captured graph does not.
        """
        key = (int(family), seed)
        if key not in self._kept:
            self._make_room()
            is_alike = once or (self._has_many_terms and family in comparison.ORDINARY)
            floors = self._known_floors.get(family) if is_alike else None
            self._kept[key] = with_room(
                lambda: self._compute(family, seed, floors),
                f"eager and the truth in float64 on values of family {family_name(family)}",
                self.give_back,
            )
        self._kept.move_to_end(key)
        answer = self._kept[key]
        self._drawn_by.setdefault(key, answer.learned)
        return answer

    def rounded(self, family: verdict_pb2.ValueFamily.ValueType, seed: int) -> Sequence[torch.Tensor]:
        """What TF32 makes of a case's truth; nothing where PyTorch's settings do not allow it, no graph is known, the
        module changes them or there is no memory for it. Raises OutOfMemoryError at the first want of it."""
        answer = self.of(family, seed)
        may_round = self.reference.rounds_to_tf32 and self.reference.is_traced
        if answer.rounded or not may_round or plausible.sets_precision(self._loaded.task):
            return answer.rounded
        try:
            args, (_, written) = self._case(family, seed)
            found = self.reference.rounded_to_tf32(args, written, seed)
            answer.rounded.extend([each.to(own.dtype) for each, own in zip(found, answer.eager, strict=True)])
        except (RuntimeError, MemoryError, BadInput) as error:
            self.shortages.ask(error, "tf32", family)
        return answer.rounded

    def give_back(self) -> judging_pb2.Done:
        """Gives back all memory that can be."""
        self._kept.clear()
        if self._loaded.device.type == "cuda":
            torch.cuda.empty_cache()
        return judging_pb2.Done()

    def _make_room(self) -> None:
        """Forgets old answers before another of their size is computed, which itself takes several times its size."""
        while self._kept:
            sizes = [answer.size_bytes for answer in self._kept.values()]
            if sum(sizes) + max(sizes) <= _KEPT_BYTES:
                return
            self._kept.popitem(last=False)

    def _case(self, family: verdict_pb2.ValueFamily.ValueType, seed: int) -> Taken:
        learned = self._drawn_by.get((int(family), seed))
        if learned is None:
            return self.cases.taken(family, seed)
        args = self._loaded.case(family, seed, learned)
        return args, self.reference.run(args, seed)

    def _compute(self, family: verdict_pb2.ValueFamily.ValueType, seed: int, known: Sequence[float] | None) -> Answer:
        case = self._case(family, seed)
        answer, doubts = self._measured(case, family, seed, known)
        args, (_, written) = case
        if self._is_first:
            is_coarse = self._tell_errors(answer, args, written, seed)
            self._is_first = False
            # What is four hundredths off measures little, and what is farther off nothing.
            if is_coarse and self.reference.forbid_tf32():
                del case, answer, args, written
                return self._compute(family, seed, None)
        if not doubts:
            return answer
        eager = answer.eager
        if family != verdict_pb2.VALUE_FAMILY_TASK or not self.reference.repeats(eager, args, written, seed):
            raise BadInput(next(iter(doubts.values())))
        told = self.cases.report.learned.coarse_errors
        doubted = {Key.of(self.reference.regions[at]) for at in doubts}
        kept = [each for each in told if Key(each.kind, each.position, each.name) not in doubted]
        del told[:]
        told.extend(kept)
        # The module amplifies rounding until nothing of float64 is left (batch norm over two values, five times in a
        # row). Its graph is right, bit by bit, so eager is the only truth: a candidate may differ by a few ulp.
        return replace(
            answer,
            truth=[
                eager[at].to(aten.widened(eager[at].dtype)) if at in doubts else each
                for at, each in enumerate(answer.truth)
            ],
            floors=[0.0 if at in doubts else each for at, each in enumerate(answer.floors)],
            most_errors=[0.0 if at in doubts else each for at, each in enumerate(answer.most_errors)],
        )

    def _tell_errors(self, answer: Answer, args: Args, written: Mapping[Key, torch.Tensor], seed: int) -> bool:
        """How far TF32 leaves results from the truth, for those who look at timed calls: eager's error, or that of
        rounded factors where a library rounds in one layout and not in eager's. Whether it is more than fp32 explains.
        """
        errors = list(answer.coarse_errors)
        if self.reference.may_do_without_tf32:
            with contextlib.suppress(TruthTooLarge, BadInput):
                found = with_room(lambda: self._errors_of_tf32(answer, args, written, seed), "", self.give_back)
                errors = list(map(max, errors, found))
        told = self.cases.report.learned.coarse_errors
        del told[:]
        for region, rms in zip(self.reference.regions, errors, strict=True):
            if rms:
                told.add(kind=region.kind, position=region.position, name=region.name, rms=rms)
        return any(error > most for error, most in zip(errors, answer.most_errors, strict=True))

    def _errors_of_tf32(
        self, answer: Answer, args: Args, written: Mapping[Key, torch.Tensor], seed: int
    ) -> list[float]:
        rounded = self.reference.rounded_to_tf32(args, written, seed)
        return [
            plausible.off_and_size(each.to(own.dtype), truth)[0] if own.is_floating_point() else 0.0
            for each, own, truth in zip(rounded, answer.eager, answer.truth, strict=True)
        ]

    def _measured(
        self,
        case: Taken,
        family: verdict_pb2.ValueFamily.ValueType,
        seed: int,
        known: Sequence[float] | None,
    ) -> tuple[Answer, dict[int, str]]:
        """As `_doubted`."""
        sliced = self.reference.slice_count
        args, (outputs, written) = case
        sources = self.reference.graph_sources(args)
        truth = self.reference.truth(args, written, seed)
        floors = list(known or self._terms_floors(sources, truth, family))
        if family in self.reference.shaken:
            after = self.reference.truth(args, written, seed, conditioning.Moved(sources, seed))
            floors = list(map(max, floors, map(conditioning.shift, truth, after)))
        eager = self.reference.by_region(args, outputs, written)
        learned = judging_pb2.Learned()
        learned.CopyFrom(self._drawn_by.get((int(family), seed), self._loaded.learned))
        answer = Answer(eager, truth, floors, self.reference.slice_count > sliced, learned=learned)
        names = [str(Key.of(region)) for region in self.reference.regions]
        if family not in comparison.ORDINARY and (chaotic := plausible.disagreement(names, answer.eager, answer.truth)):
            raise BadInput(chaotic)
        answer, doubts = self._doubted(answer, family)
        if doubts and any(answer.floors[at] > 0.0 for at in doubts):
            floors = self._terms_floors(sources, truth, family, followed=doubts)
            answer, doubts = self._doubted(replace(answer, floors=list(map(max, floors, answer.floors))), family)
        return answer, doubts

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
        regions = zip(self.reference.regions, answer.eager, answer.truth, answer.floors, strict=True)
        for position, (region, eager, truth, floor) in enumerate(regions):
            if eager.shape != truth.shape:
                raise BadInput(f"{Key.of(region)}: eager gives {list(eager.shape)}, its graph {list(truth.shape)}")
            if not (eager.is_floating_point() or eager.is_complex()):
                continue
            off, size = plausible.off_and_size(eager, truth)
            least = 1e3 * torch.finfo(comparison.parts_of(eager).dtype).smallest_normal
            types, size = [*self.reference.types, eager.dtype], max(size, nothing)
            without = max(plausible.share(types) * size, 16.0 * floor, least)
            allowed = max(plausible.share(types, rounds_to_tf32=self.reference.rounds_to_tf32) * size, without)
            most[position] = without
            if self.reference.rounds_to_tf32:
                coarse[position] = off
            if off > allowed:
                found[position] = (
                    f"{Key.of(region)}: what was captured is not what the module computes: eager differs from the "
                    f"graph in float64 by {off:.3g} rms, more than {allowed:.3g}"
                )
        return replace(answer, coarse_errors=coarse, most_errors=most), found
