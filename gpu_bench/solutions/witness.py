"""What a judge does for calls that are made elsewhere: places values, and looks at what came of them.

The one idea: the process that makes a call cannot tell it from another, because all calls have new values, which are
placed, taken away and looked at in the same way. Before a result is looked at the inputs are gone, so that nothing can
be computed by then that was not computed in the call. All findings are from memory that this process reads itself; it
asks no solution.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import time
from collections.abc import Mapping, Sequence

import torch

from gpu_bench import device
from gpu_bench.judging import guard, judge_worker, looks
from gpu_bench.judging.judge_worker import Judge
from gpu_bench.judging.loaded import CONSTRUCTORS, Args
from gpu_bench.judging.looks import Looks, Yardstick, yardstick
from gpu_bench.running.straight_line import row
from gpu_bench.solutions import structure, structure_text
from gpu_bench.solutions.signature import described_call, signature_of
from gpu_bench.solutions.untraced import REFERENCE_UNTRACED, SolutionReference, UntracedReference
from gpu_bench.timing import floor
from gpu_bench.timing.clocks import persisting_reset
from gpu_bench.truth.answers import Answer
from gpu_bench.values import inputs, learning, seeds
from gpu_bench.values.keys import Key
from gpu_bench.workers.sharing import SharedMemory
from gpu_bench.workers.shortage import TruthTooLarge, with_room
from warpsmith.errors import BadInput
from warpsmith.graphs import dtypes
from warpsmith.sandbox.worker import Methods
from warpsmith.v1 import graph_pb2, judging_pb2, tensor_pb2, verdict_pb2

GAP_BYTES = 4096
"""Of random bytes between inputs: who writes there is found out, who reads there gives other results."""
ALIGNMENT = 256
Members = tuple[verdict_pb2.ValueFamily.ValueType, int]
"""Family and seed of parameters and state."""
PROBE_CYCLES = 100_000
"""Of a GPU, 50 us: the piece of work that takes longer while other work runs there."""


class Witness:
    """The judge of a task as the called processes' values and results see it."""

    def __init__(self, judge: Judge, shared: SharedMemory) -> None:
        self._judge, self._shared = judge, shared
        self._loaded = judge.loaded
        self._loaded.fresh_members, self._shapes = CONSTRUCTORS, list[list[int]]()
        args = self._loaded.case(verdict_pb2.VALUE_FAMILY_TASK, secrets.randbits(63))
        self._sources, self._gaps, total = lay_out(self._loaded.sources(args).by_key(), judge.total_bytes)
        self._introduction = judging_pb2.Introduction(
            signature=self._signature(args), sources=self._sources, total_bytes=total
        )
        self._family, self._seed = verdict_pb2.VALUE_FAMILY_TASK, -1
        self._args: Args = args
        self._is_spoiled = True
        """Whether the inputs that lie in the shared memory are not those of the case."""
        self._canaries = torch.empty(0, dtype=torch.uint8)
        self._after: dict[Key, torch.Tensor] = {}
        """Inputs that the module changes, as the last call left them."""
        self._kept: list[torch.Tensor] = []
        """Results, region by region, that were kept last, and those before."""
        self._earlier: list[torch.Tensor] = []
        self._views_then: list[set[Key]] = [set(), set()]
        """Outputs that lay in an input's memory in the calls of both, the last first."""
        self._eager: tuple[tuple[int, int], list[torch.Tensor]] | None = None
        self._yardsticks: dict[Members | None, list[Yardstick]] = {}
        """By the parameters that go with FRESH values."""
        self._looks = Looks()
        self._sweep = torch.empty(0, dtype=torch.uint8)

    def introduce(self) -> judging_pb2.Introduction:
        """What a solution is told of the reference: literals, shapes and layouts."""
        return self._introduction

    def _signature(self, args: Args) -> judging_pb2.Signature:
        signature = signature_of(self._loaded, args)
        leaves = self._loaded.user.tensor_leaves(args)
        signature.same_as.extend(next(i for i, other in enumerate(leaves) if other is leaf) for leaf in leaves)
        signature.result = self._described(args, 0)
        signature.is_random = self._judge.reference.is_random
        constants = (name for name in self._loaded.constants if Key.state(name) not in self._judge.reference.written)
        signature.constants.extend(sorted(constants))
        sources = self._loaded.sources(args).by_key()
        signature.has_state = any(key.kind == judging_pb2.REGION_KIND_STATE for key in sources)
        signature.result_varies = not self._judge.reference.is_traced  # a graph has no number of Python's, and one way
        return signature

    def _described(self, args: Args, seed: int) -> str:
        """The structure of what the reference returns, from which on it is known what lies in an input's memory.

        Empty where results have other shapes than on the task's own values, of which nothing is judged.
        """
        described = described_call(self._loaded, args, seed)
        shapes = [node["shape"] for node in structure_text.tensors_of(described)]
        self._shapes = self._shapes or shapes
        if shapes != self._shapes:
            return ""
        shares = [node["shares"] for node in structure_text.tensors_of(described)]
        of_sources = set(map(str, self._loaded.sources(args).by_key()))
        self._returned = set(shares)
        self._views = {Key.output(position) for position, word in enumerate(shares) if word in of_sources}
        return structure.written(described)

    def yardstick(self, request: judging_pb2.YardstickRequest) -> judging_pb2.Yardstick:
        """The reference's least work, what is to be said of it, and what the machine can do."""
        loaded = self._loaded
        target, precision = loaded.task.target, loaded.task.precision
        known = request.HasField("ceilings")
        ceilings = device.Ceilings.of(request.ceilings) if known else device.describe(target)
        graph = (
            self._judge.graph if self._judge.reference.is_traced else graph_pb2.Graph()
        )  # of which no work can be counted
        flags = floor.reference_flags(floor.work_of(graph, precision), ceilings)
        machine = device.environment(target)
        return judging_pb2.Yardstick(flags=flags, environment=machine, graph=graph, ceilings=ceilings.message())

    # ---- before a call -------------------------------------------------------------------------------------

    def place_members(self, request: judging_pb2.PlaceMembersRequest) -> None:
        """Puts parameters and state of a case into the shared memory."""
        self._eager, self._looks, self._loaded.fresh_members = None, Looks(), CONSTRUCTORS
        if request.timed:
            self._yardsticks |= find_timed_members(self._judge, request.family, request.seed)
        self._turn_to(verdict_pb2.VALUE_FAMILY_FRESH if request.timed else request.family, request.seed)
        self._put([each for each in self._sources if not Key.of(each).is_input])
        if self._loaded.device.type == "cuda":
            torch.cuda.synchronize()  # another process reads them in the next call

    def place_inputs(self, request: judging_pb2.PlaceInputsRequest) -> judging_pb2.PlacedInputs:
        """Puts the inputs of a case into the shared memory, and other bytes beside them."""
        if request.if_judged:
            self._family = verdict_pb2.VALUE_FAMILY_UNSPECIFIED  # the module will be of the case that is tried
            if not has_truth(self._judge, request.family, request.seed):
                return judging_pb2.PlacedInputs(unjudged=True)
        self._turn_to(request.family, request.seed)
        if self._is_spoiled:
            self._put([each for each in self._sources if Key.of(each).is_input])
        self._is_spoiled = False
        if not request.same_beside:
            self._draw_canaries()
        if request.sweep_bytes:
            self._evict(request.sweep_bytes)
        return judging_pb2.PlacedInputs(probe_ns=_probe_ns(self._loaded.device))

    def _turn_to(self, family: verdict_pb2.ValueFamily.ValueType, seed: int) -> None:
        """From here on it is this case whose values are placed."""
        if (family, seed) != (self._family, self._seed):
            self._family, self._seed, self._is_spoiled = family, seed, True
            self._args = self._loaded.case(family, seed)

    def _put(self, regions: Sequence[judging_pb2.Region]) -> None:
        held = self._loaded.sources(self._args).by_key()
        for region, place in zip(regions, self._shared.tensors(regions), strict=True):
            _fill(place, held[Key.of(region)])

    def _draw_canaries(self) -> None:
        """Other random bytes beside every input."""
        gaps = self._shared.tensors(self._gaps)
        size = sum(gap.numel() for gap in gaps)
        drawn = torch.frombuffer(bytearray(secrets.token_bytes(max(size, 1))), dtype=torch.uint8)[:size]
        self._canaries = drawn.to(self._loaded.device)
        for gap, part in zip(gaps, torch.split(self._canaries, GAP_BYTES), strict=True):
            gap.copy_(part)

    def _evict(self, size: int) -> None:
        """Leaves nothing of the inputs in a cache, nor what a process asked the L2 to keep."""
        if self._loaded.device.type == "cuda" and (reset := persisting_reset()) is not None:
            reset()
        if self._sweep.numel() != size:
            self._sweep = torch.ones(size, dtype=torch.uint8, device=self._loaded.device)
        self._sweep.view(torch.int64 if size % 8 == 0 else torch.uint8).add_(1)

    def probe(self) -> judging_pb2.Probed:
        """A small piece of work of the device, and when it was done."""
        torch.cuda._sleep(1)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        return judging_pb2.Probed(ended=time.perf_counter())

    # ---- after a call --------------------------------------------------------------------------------------

    def take(self) -> judging_pb2.Taken:
        """Says what became of inputs and of the memory beside them, and takes the inputs away before results are put
        where they are looked at: what is still to be computed then has lost them."""
        held = self._loaded.sources(self._args).by_key()
        given = [each for each in self._sources if Key.of(each).is_input]
        written = self._judge.reference.written
        taken = judging_pb2.Taken()
        if self._introduction.signature.result_varies:
            with contextlib.suppress(Exception):  # what the reference refuses is not judged
                taken.result = self._described(self._args, seeds.of_generators(self._seed))
        self._after = {}
        for region, place in zip(given, self._shared.tensors(given), strict=True):
            if (key := Key.of(region)) in written:
                self._after[key] = place.clone()
            elif not guard.same_bits(place, held[key]):
                taken.mutated.append(str(key))
        gaps = self._shared.tensors(self._gaps)
        for region, gap, part in zip(self._gaps, gaps, torch.split(self._canaries, GAP_BYTES), strict=True):
            if not torch.equal(gap, part):
                taken.broken.append(str(Key.of(region)))
        self._is_spoiled = True
        # Not those that are results too: views of an input, or one that is changed and given back.
        gone = [region for region in given if str(Key.of(region)) not in self._returned]
        for place in (*self._shared.tensors(gone), *self._shared.tensors(self._judge.regions)):
            row(place).zero_()
        return taken

    def look(self, request: judging_pb2.LookRequest) -> judging_pb2.Look:
        """Compares the delivered results with eager's, element by element, or with the truth of their own values."""
        regions, delivered = self._judge.regions, self._delivered()
        if not request.by_truth:
            return judging_pb2.Look(wrong=self._wrong(regions, delivered))
        found = looks.plainly_wrong([str(Key.of(region)) for region in regions], self._as_judged())
        on = f" (family {inputs.family_name(self._family)})"
        return judging_pb2.Look(wrong=found and f"{found} between timed ones{on}")

    def keep(self) -> None:
        """Keeps the delivered results, and those that were kept last as the ones before."""
        self._earlier, self._kept = self._kept, [place.clone() for place in self._delivered()]
        self._views_then = [self._views, self._views_then[0]]

    def compare_with_kept(self, kept: judging_pb2.Kept.ValueType) -> judging_pb2.ComparedWithKept:
        """Compares the delivered results with kept ones, bit by bit."""
        is_before = kept == judging_pb2.KEPT_BEFORE
        kept_then = self._earlier if is_before else self._kept
        pairs = zip(map(Key.of, self._judge.regions), self._delivered(), kept_then, strict=True)
        # What the reference returns of an input's memory changes with the input, in eager too.
        may_differ = self._views_then[1] if is_before else set()
        return judging_pb2.ComparedWithKept(
            different=(
                str(key)
                for key, now, then in pairs
                if key.is_output and key not in may_differ
                if not guard.same_numbers(now, then)
            )
        )

    def _delivered(self) -> list[torch.Tensor]:
        """The results, region by region, with inputs that the module changes as the last call left them."""
        regions = self._judge.regions
        places = self._shared.tensors(regions)
        for region, place in zip(regions, places, strict=True):
            if (key := Key.of(region)) in self._after:
                place.copy_(self._after[key])
        return places

    def _wrong(self, regions: Sequence[judging_pb2.Region], places: Sequence[torch.Tensor]) -> str:
        yardsticks, eager = self._measures(), self._eagerly()
        given = [place.to(own.device) for place, own in zip(places, eager, strict=True)]
        pairs = list(zip(given, eager, strict=True))
        names = [str(Key.of(region)) for region in regions]
        return self._looks.wrong(names, pairs, yardsticks, self._as_judged)

    def _as_judged(self) -> Sequence[verdict_pb2.OutputError]:
        """What a judged call would be told of each region; nothing where there is no truth: such cases are few."""
        observed = judging_pb2.Observation(family=self._family, seed=self._seed)
        try:
            return with_room(
                lambda: self._judge.judge(observed).outputs,
                "eager and the truth in float64 of a timed call",
                self._judge.answers.give_back,
            )
        except (BadInput, TruthTooLarge):
            return ()
        finally:
            self._judge.answers.give_back()  # others are timed beside this process
            self._args = self._loaded.case(self._family, self._seed)  # parameters as they were

    def _measures(self) -> list[Yardstick]:
        """How far eager is off the truth in each region, found out once for the parameters that timed calls have."""
        members = self._loaded.fresh_members
        if members not in self._yardsticks:
            self._yardsticks[members] = yardsticks_of(self._answer_of_timed_calls())
            self._args = self._loaded.case(self._family, self._seed)  # parameters as they were
        return self._yardsticks[members]

    def _answer_of_timed_calls(self) -> Answer:
        if self._loaded.fresh_members != CONSTRUCTORS:
            with contextlib.suppress(BadInput):  # where float64 is no truth, the task's own values have another
                return self._judge.answers.of(verdict_pb2.VALUE_FAMILY_FRESH, secrets.randbits(63))
        return self._judge.answers.of(verdict_pb2.VALUE_FAMILY_TASK, 0)

    def _eagerly(self) -> list[torch.Tensor]:
        """What eager gives on the case, region by region."""
        key = (int(self._family), self._seed)
        if self._eager is None or self._eager[0] != key:
            self._eager = key, self._judge.reference.eager(self._args, self._seed)
        return self._eager[1]


def has_truth(judge: Judge, family: verdict_pb2.ValueFamily.ValueType, seed: int) -> bool:
    """Whether the truth of a case can be told beside what is timed, without anything learned that would change the
    parameters of timed calls. It is kept."""
    answers, learned = judge.answers, judging_pb2.Learned()
    learned.CopyFrom(judge.loaded.learned)
    try:
        with_room(lambda: answers.of(family, seed), "the truth of a call between timed ones", answers.give_back)
    except (BadInput, TruthTooLarge):
        judge.loaded.learned.CopyFrom(learned)
        return False
    is_same = learned == judge.loaded.learned
    judge.loaded.learned.CopyFrom(learned)
    return is_same


def find_timed_members(
    judge: Judge, family: verdict_pb2.ValueFamily.ValueType, seed: int
) -> dict[Members | None, list[Yardstick]]:
    """Has the asked parameters and state go with FRESH values, or those of normal values where the reference has no
    truth with the asked ones, or less that is finite. Returns yardsticks of what was tried."""
    asked, plain = (family, seed), (verdict_pb2.VALUE_FAMILY_NORMAL, seed)
    with contextlib.suppress(BadInput):
        judge.cases.taken(*asked)  # finds out what has to be held back
    found, lost = dict[Members | None, list[Yardstick]](), dict.fromkeys((asked, plain), math.inf)
    for wanted in lost:
        judge.loaded.fresh_members = wanted
        learned = judging_pb2.Learned.FromString(judge.loaded.learned.SerializeToString())
        try:
            answer = judge.answers.of(verdict_pb2.VALUE_FAMILY_FRESH, secrets.randbits(63))
        except (BadInput, TruthTooLarge):
            judge.loaded.learned.CopyFrom(learned)  # FRESH is not to be held back for these
            continue
        found[wanted], lost[wanted] = yardsticks_of(answer), learning.lost(answer.eager)
        if not lost[wanted]:
            break
    is_plain = asked not in found or 2 * lost[plain] < lost[asked]
    judge.loaded.fresh_members = plain if is_plain else asked
    return found


def yardsticks_of(answer: Answer) -> list[Yardstick]:
    """Of each region."""
    return list(map(yardstick, answer.eager, answer.truth, answer.floors))


def lay_out(
    held: Mapping[Key, torch.Tensor], offset: int
) -> tuple[list[judging_pb2.Region], list[judging_pb2.Region], int]:
    """Regions of sources in their own layouts, those of the gaps around inputs, and where all end."""
    regions, gaps = [], []

    def gap(key: Key) -> None:
        nonlocal offset
        spec = tensor_pb2.TensorSpec(dtype=tensor_pb2.DTYPE_UINT8, shape=[GAP_BYTES], strides=[1])
        gaps.append(key.region(spec, offset))
        offset += GAP_BYTES

    offset = -(-offset // ALIGNMENT) * ALIGNMENT
    for key, tensor in held.items():
        spec = dtypes.spec_of(tensor)
        if key.is_input:
            gap(key)
        regions.append(key.region(spec, offset))
        size = dtypes.element_span(spec) * tensor.element_size()
        if key.is_input:  # the gap begins with the byte behind the last element
            offset += size
            gap(key)
        else:
            offset += size
        offset = -(-offset // ALIGNMENT) * ALIGNMENT
    return regions, gaps, offset


def _fill(place: torch.Tensor, value: torch.Tensor) -> None:
    """Copies a value of the same layout, overlapping ones included."""
    if value.numel():
        row(place).copy_(row(value))


def _probe_ns(place: torch.device) -> float:
    if place.type != "cuda":
        return 0.0
    torch.cuda.synchronize()
    begin = time.perf_counter_ns()
    torch.cuda._sleep(PROBE_CYCLES)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    return float(time.perf_counter_ns() - begin)


# ---- methods of the judge's worker ---------------------------------------------------------------------------

_witnesses: list[Witness] = []
"""Of the judge that is there."""


def _introduce(request: judging_pb2.IntroduceRequest) -> judging_pb2.Introduction:
    del request
    _witnesses[:] = [Witness(judge_worker.prepared(), SharedMemory.inherited())]
    return _witnesses[0].introduce()


def _yardstick(request: judging_pb2.YardstickRequest) -> judging_pb2.Yardstick:
    return _witnesses[0].yardstick(request)


def _place_inputs(request: judging_pb2.PlaceInputsRequest) -> judging_pb2.PlacedInputs:
    return _witnesses[0].place_inputs(request)


def _place_members(request: judging_pb2.PlaceMembersRequest) -> judging_pb2.Done:
    _witnesses[0].place_members(request)
    return judging_pb2.Done()


def _probe(request: judging_pb2.ProbeRequest) -> judging_pb2.Probed:
    del request
    return _witnesses[0].probe()


def _take(request: judging_pb2.TakeRequest) -> judging_pb2.Taken:
    del request
    return _witnesses[0].take()


def _look(request: judging_pb2.LookRequest) -> judging_pb2.Look:
    return _witnesses[0].look(request)


def _keep(request: judging_pb2.KeepRequest) -> judging_pb2.Done:
    del request
    _witnesses[0].keep()
    return judging_pb2.Done()


def _compare_with_kept(request: judging_pb2.CompareWithKeptRequest) -> judging_pb2.ComparedWithKept:
    return _witnesses[0].compare_with_kept(request.kept)


def _prepare(request: judging_pb2.PrepareJudgeRequest) -> judging_pb2.Preparation:
    """Judges by the module's graph, or else by the module itself: no solution needs the graph."""
    try:
        return judge_worker.prepare(request, SolutionReference)
    except BadInput:
        prepared = judge_worker.prepare(request, UntracedReference)
    prepared.flags.append(REFERENCE_UNTRACED)
    return prepared


preload = judge_worker.preload

METHODS: Methods = {
    **judge_worker.METHODS,
    "prepare": (judging_pb2.PrepareJudgeRequest, _prepare),
    "introduce": (judging_pb2.IntroduceRequest, _introduce),
    "yardstick": (judging_pb2.YardstickRequest, _yardstick),
    "place_inputs": (judging_pb2.PlaceInputsRequest, _place_inputs),
    "place_members": (judging_pb2.PlaceMembersRequest, _place_members),
    "probe": (judging_pb2.ProbeRequest, _probe),
    "take": (judging_pb2.TakeRequest, _take),
    "look": (judging_pb2.LookRequest, _look),
    "keep": (judging_pb2.KeepRequest, _keep),
    "compare_with_kept": (judging_pb2.CompareWithKeptRequest, _compare_with_kept),
}
