"""How far an output is from the truth, in units of what PyTorch's own result is: the error-ratio rule.

The one idea: the yardstick D is the largest of eager's own error, the rounding of the truth in the output's type,
2 ulp of the output's rms (1/4 of 16 bits) and, for small outputs, 4u·Σ|terms|. A candidate is judged by its error over
D, over all elements, at the worst one, over every 4,096, and over what is small beside the rest. A tolerance cannot see
a precision cut; this can. Pure functions of tensors: limits and verdicts are the correctness agent's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from gpu_bench.judging.comparison_kernel import Seen, compare_blocks, compile_ahead, is_for
from gpu_bench.judging.magnitudes import Magnitudes
from gpu_bench.truth.floats_of_8_bits import AS_IF_OF, before_rounding
from warpsmith.graphs import dtypes
from warpsmith.v1 import judging_pb2, verdict_pb2

BLOCK = 4096
"""Elements of a block of the local criterion."""
SMALL_OUTPUT = 1024
"""Outputs with fewer elements get the floor of 4u·Σ|terms|: their eager error may be zero by luck."""
_CHUNK = BLOCK << 13
"""Elements compared at once: bounds the float64 temporaries to about 1 GiB."""
_KERNEL_CHUNK = BLOCK << 16
"""The same where a kernel makes none and what it looks at is on its device."""

ORDINARY = frozenset({
    verdict_pb2.VALUE_FAMILY_TASK, verdict_pb2.VALUE_FAMILY_NORMAL, verdict_pb2.VALUE_FAMILY_UNIFORM,
})  # fmt: skip
"""Families on which the reference has to define its result."""
_FRESH = verdict_pb2.VALUE_FAMILY_FRESH
_FEW = 64
"""Elements that may all be right by luck."""
_ORDERS = 8.0
"""Times as many units in the last place: by an early term of 300 among 512 a sum in order is 15 off."""
_FORGIVING = frozenset({
    verdict_pb2.VALUE_FAMILY_NON_FINITE, verdict_pb2.VALUE_FAMILY_MASKED, verdict_pb2.VALUE_FAMILY_PROPOSED,
})  # fmt: skip

KERNELBENCH_TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 1e-2}
"""atol = rtol of KernelBench's harness; 1e-4 for every other type."""


@dataclass(frozen=True)
class Forgiveness:
    """What a value family allows beyond the rule."""

    nan_stands_for_any_non_finite: bool = False
    """Where the reference is NaN, an infinity will do: infinities that cancel in one order overflow in another."""
    worst_block_for_all: bool = False
    """Every 4,096 elements are measured by those that are eager's worst: where nearly all of an output is cut off at a
    bound, as values of 1e4 are, what is left in a block are one or two, and eager's error of those is small by luck."""
    order_is_luck: bool = False
    """Where one term rules a sum, everything that is added after it is rounded to its last place: how far off a result
    is hangs on where the term stands, and eager's may be right. In 32 bits and more the last places count `_ORDERS`."""

    @staticmethod
    def of(family: verdict_pb2.ValueFamily.ValueType) -> Forgiveness:
        """What it allows."""
        is_unusual = not is_ordinary(family)
        return Forgiveness(family in _FORGIVING, worst_block_for_all=is_unusual, order_is_luck=is_unusual)


def is_ordinary(family: verdict_pb2.ValueFamily.ValueType) -> bool:
    """Whether values are such as the task has, or simpler ones: those of timed calls are, too."""
    return family in ORDINARY or family == _FRESH


def unit_roundoff(dtype: torch.dtype) -> float:
    """u of the type that sums are made in: fp32 for 16-bit floats."""
    return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps / 2


def ulp(value: float, dtype: torch.dtype) -> float:
    """Distance between neighbouring numbers of the type at `value`; never below the smallest normal's."""
    info = torch.finfo(dtype)
    return info.eps * 2.0 ** math.floor(math.log2(min(max(abs(value), info.tiny), info.max / 2)))


def rounding_floor(rms: float, dtype: torch.dtype, count: int) -> float:
    """What the yardstick of so many elements of this rms is at least: eager's error may be small by luck.

    Two units in the last place. Of 16 bits, where that is a hundredth and leaves room for half of the terms of many a
    sum, what a right result's own rounding comes to at least; half a unit where few may all be right by luck.
    """
    share = 2.0 if dtype.itemsize >= 4 else 0.25 if count >= _FEW else 0.5
    return share * ulp(rms, dtype)


def count_of_large(parts: Iterable[torch.Tensor]) -> float:
    """How many of all finite numbers make up their sum of squares, as (Σx²)²/Σx⁴ counts; 0 of zeros. Spoils no part."""
    second = fourth = 0.0
    for part in parts:
        squares = part.square().nan_to_num_(0.0, 0.0, 0.0)
        second += float(squares.sum())
        fourth += float(squares.square_().sum())
    return second / fourth * second if fourth else 0.0


def least_yardstick(dtype: torch.dtype) -> float:
    """What D never falls below: results may be flushed to zero below the normal range of fp32 and bf16."""
    info = torch.finfo(dtype)
    return info.smallest_normal * info.eps if dtype == torch.float16 else info.tiny


def compare(
    candidate: torch.Tensor,
    eager: torch.Tensor,
    truth: torch.Tensor,
    *,
    terms_floor: float = 0.0,
    most_error: float = math.inf,
    sparse_floor: float = 0.0,
    forgiveness: Forgiveness = Forgiveness(),
) -> verdict_pb2.OutputError:
    """Compares one output.

    `candidate` and `eager` have the output's type, `truth` is float64 for float outputs (elements of complex ones are
    counted as two, those in 8 bits stand for what rounds to them); all of one shape. `eager` and
    `truth` are on one device, which the candidate may still have to travel to. `terms_floor` is 4u·Σ|terms| of a
    small output, else 0. Eager's rms error counts as no more than `most_error`, and as no less than `sparse_floor` in
    blocks where few elements have any: the error of one is small by luck. `output` is the caller's
    to set.
    """
    is_of_8_bits = candidate.dtype in dtypes.FLOATS_OF_8_BITS
    if not is_of_8_bits:
        candidate, eager, truth = map(parts_of, (candidate, eager, truth))
    shape, dtype = candidate.shape, AS_IF_OF if is_of_8_bits else candidate.dtype
    candidate, eager, truth = (tensor.reshape(-1) for tensor in (candidate, eager, truth))
    if not eager.is_floating_point():
        return _compare_exact(candidate.to(eager.device), eager, truth)
    if candidate.numel() == 0:
        return verdict_pb2.OutputError(kernelbench_close=True)
    sums = _Sums(dtype, forgiveness)
    # Values of unusual families leave few elements of a kind, whose errors are small by luck.
    magnitudes = None if forgiveness.worst_block_for_all else Magnitudes(candidate.numel(), BLOCK, shape, dtype)
    tolerance = KERNELBENCH_TOLERANCE.get(dtype, 1e-4)
    close = True
    for start, arrived in _arriving(candidate, eager.device):
        part = slice(start, start + arrived.numel())
        known = truth[part]
        given = before_rounding(arrived, known), before_rounding(eager[part], known), known
        seen = compare_blocks(*given, BLOCK, forgiving=forgiveness.nan_stands_for_any_non_finite)
        if seen is not None:
            is_close = sums.add_seen(seen, start)
        else:
            sums.add(*given, start)
            is_close = torch.allclose(given[0], given[1], rtol=tolerance, atol=tolerance)
        if magnitudes is not None:
            magnitudes.add(*given, start)
        close = close and is_close
    least = None
    if sparse_floor:
        parts = zip(*(torch.split(each, _CHUNK) for each in (eager, truth)), strict=True)
        errors = (before_rounding(own, known) - known for own, known in parts)
        least = torch.cat([torch.where(_is_of_few(each), sparse_floor, 0.0) for each in errors])
    error = sums.finish(terms_floor, most_error, truth, least, magnitudes)
    if error.worst_index >= 0:
        error.worst_value = float(candidate[error.worst_index])
        error.worst_truth = float(truth[error.worst_index])
    error.kernelbench_close = close
    error.element_count = candidate.numel()
    return error


def of(observed: judging_pb2.Observation) -> verdict_pb2.Comparison:
    """What was seen of a candidate's runs as a comparison, whose outputs are still to be compared."""
    return verdict_pb2.Comparison(
        family=observed.family,
        seed=observed.seed,
        group=observed.group,
        broken_canaries=observed.broken_canaries,
        mutated_sources=observed.mutated_sources,
        unrepeatable_outputs=observed.unrepeatable_outputs,
        stray_read_outputs=observed.stray_read_outputs,
        uninitialized_read_outputs=observed.uninitialized_read_outputs,
        dirty_workspaces=observed.dirty_workspaces,
        unlike_step=observed.unlike_step,
    )


def parts_of(tensor: torch.Tensor) -> torch.Tensor:
    """Complex numbers as real and imaginary parts, each of which is judged as a number; floats of 8 bits in 32; all
    else as it is."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else dtypes.computable(tensor)


def rehearse() -> None:
    """Compiles what a GPU compares with, without one."""
    compile_ahead()


def _arriving(values: torch.Tensor, device: torch.device) -> Iterator[tuple[int, torch.Tensor]]:
    """(first element, chunk on `device`) of a flat tensor; the next chunk travels while one is compared.

    On an H200, 6.4 GB take 116 ms to arrive from pinned memory, and about as long to be compared.
    """
    if values.device == device:  # a copy: what lies in an outbox may change between two looks
        size = _KERNEL_CHUNK if is_for(values) else _CHUNK
        yield from ((start, values[start : start + size].clone()) for start in range(0, values.numel(), size))
        return
    starts = range(0, values.numel(), _CHUNK)
    main, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    # Two buffers for all chunks: memory that is allocated on the way would make each stream wait for the other.
    buffers = torch.empty((2, min(_CHUNK, values.numel())), dtype=values.dtype, device=device)
    side.wait_stream(main)

    def send(number: int) -> torch.Tensor:
        part = values[starts[number] : starts[number] + _CHUNK]
        with torch.cuda.stream(side):
            return buffers[number % 2][: part.numel()].copy_(part, non_blocking=True)

    coming = send(0)
    for number, start in enumerate(starts):
        chunk = coming
        main.wait_stream(side)
        if number + 1 < len(starts):
            side.wait_stream(main)  # which is done with the other buffer, and has yet to begin with this one
            coming = send(number + 1)
        yield start, chunk


def _compare_exact(candidate: torch.Tensor, eager: torch.Tensor, truth: torch.Tensor) -> verdict_pb2.OutputError:
    """Integers and bools: equal to eager's, or to the truth's where eager's own rounding decided otherwise."""
    wrong = (candidate != eager) & (candidate != truth.to(candidate.dtype))
    count = int(wrong.sum())
    error = verdict_pb2.OutputError(unequal_count=count, kernelbench_close=bool(torch.equal(candidate, eager)))
    if count:
        index = int(wrong.to(torch.uint8).argmax())
        error.worst_index = index
        error.worst_value, error.worst_truth = float(candidate[index]), float(eager[index])
    return error


class _Sums:
    """What is gathered chunk by chunk: square sums and maxima of the errors, per block of 4,096 elements."""

    def __init__(self, dtype: torch.dtype, forgiveness: Forgiveness) -> None:
        self._dtype = dtype
        self._forgiveness = forgiveness
        self._mismatches = 0
        self._first_mismatch = -1
        self._worst = -1.0
        self._worst_index = 0
        self._blocks: list[torch.Tensor] = []
        """float64 [blocks, 8]: sums of squares and counts of candidate, eager; sums of rounding and truth; count."""
        self._largest = [0.0, 0.0, 0.0]

    def add_seen(self, seen: Seen, start: int) -> bool:
        """Takes over what the kernel saw of a chunk, and says whether KernelBench would call its elements close."""
        largest, blocks = seen.largest.max(dim=0)
        worst, unlike, first_unlike, far = seen.places.unbind(dim=1)
        offsets = BLOCK * torch.arange(len(unlike), device=unlike.device)
        first = torch.where(unlike > 0, offsets + first_unlike, offsets.numel() * BLOCK).min()
        whole = torch.stack([unlike.sum(), first, far.sum(), blocks[0] * BLOCK + worst[blocks[0]]])
        mismatches, first_mismatch, far_count, place = whole.tolist()
        off, own, rounding, truth, off_count, own_count, count = seen.sums.unbind(dim=1)
        self._blocks.append(torch.stack([off, off_count, own, own_count, rounding, truth, count], dim=1))
        self._take_largest(largest.tolist(), lambda: start + place)
        if mismatches and self._first_mismatch < 0:
            self._first_mismatch = start + first_mismatch
        self._mismatches += mismatches
        return not far_count

    def add(self, candidate: torch.Tensor, eager: torch.Tensor, truth: torch.Tensor, start: int) -> None:
        """Sums a chunk, whatever is in it."""
        rounded = truth.to(self._dtype)
        off, own, rounding = candidate - truth, eager - truth, rounded - truth
        squares = [_square_sums(values) for values in (off, own, rounding, truth)]
        count = _block_counts(truth)
        columns = [squares[0], count, squares[1], count, squares[2], squares[3], count]
        # An infinity or NaN of any of them never leaves these sums. One that overflows by itself only costs time.
        if not bool(torch.isfinite(torch.stack(squares)).all()):
            allowed = (_same_class(candidate, known, self._forgiveness) for known in (eager, rounded))
            wrong = ~torch.logical_or(*allowed)
            mismatches = int(wrong.sum())
            if mismatches and self._first_mismatch < 0:
                self._first_mismatch = start + int(wrong.to(torch.uint8).argmax())
            self._mismatches += mismatches
            defined = torch.isfinite(rounded)
            off, own, rounding = (_difference(value, truth, defined) for value in (candidate, eager, rounded))
            seen = [(defined & torch.isfinite(value)).double() for value in (candidate, eager)]
            size = torch.where(defined, truth, 0.0)
            counted = (off, seen[0], own, seen[1], rounding, size, defined.double())
            columns = [_square_sums(values) for values in counted]  # ones are their own squares
        self._blocks.append(torch.stack(columns, dim=1))
        largest = torch.stack([torch.linalg.vector_norm(values, math.inf) for values in (off, own, rounding)]).tolist()
        self._take_largest(largest, lambda: start + int(off.abs().argmax()))

    def _take_largest(self, largest: Sequence[float], element: Callable[[], int]) -> None:
        """Largest errors of candidate, eager and rounding in a chunk; `element` finds where the first one is."""
        if largest[0] > self._worst:
            self._worst, self._worst_index = largest[0], element()
        self._largest = [max(pair) for pair in zip(self._largest, largest, strict=True)]

    def finish(
        self,
        terms_floor: float,
        most_error: float,
        truth: torch.Tensor,
        least: torch.Tensor | None = None,
        magnitudes: Magnitudes | None = None,
    ) -> verdict_pb2.OutputError:
        """`least`: of each block's yardstick."""
        blocks = torch.cat(self._blocks)
        total = blocks.sum(dim=0)
        rms, rms_own, rms_rounding = _rms(total[0], total[1]), _rms(total[2], total[3]), _rms(total[4], total[6])
        output_rms = float(_rms(total[5], total[6]))
        rounding = rounding_floor(output_rms, self._dtype, int(total[6]))
        if self._dtype.itemsize < 4 and float(rms) > 3.0 * rounding:  # few that are large are few with any beside them
            held = (part.masked_fill(~part.to(self._dtype).isfinite(), 0.0) for part in torch.split(truth, _CHUNK))
            rounding = rounding_floor(output_rms, self._dtype, math.floor(count_of_large(held)))
        orders = _ORDERS if self._forgiveness.order_is_luck and self._dtype.itemsize >= 4 else 1.0
        floor = max(orders * rounding, terms_floor, least_yardstick(self._dtype))
        # Errors of eager count in this proportion.
        part = min(1.0, most_error / float(rms_own)) if rms_own else 1.0
        local = torch.maximum(part * _rms(blocks[:, 2], blocks[:, 3]), _rms(blocks[:, 4], blocks[:, 6]))
        local = local.clamp(min=floor)
        if least is not None:
            local = torch.maximum(local, least)
        if self._forgiveness.worst_block_for_all:
            local = local.max()
        mismatched = self._mismatches > 0
        # Where one element is far larger than the others, eager's error of that one may be small by luck.
        own = float(truth[self._worst_index])
        own_ulp = orders * ulp(own, self._dtype) if math.isfinite(own) else 0.0
        largest = max(part * self._largest[1], self._largest[2], floor, own_ulp)
        yardstick = max(part * float(rms_own), float(rms_rounding), floor)
        small = magnitudes.ratio(yardstick, part, least_yardstick(self._dtype)) if magnitudes is not None else 0.0
        return verdict_pb2.OutputError(
            rms_ratio=float(rms) / yardstick,
            small_ratio=small,
            max_ratio=self._largest[0] / largest,
            block_ratio=float((_rms(blocks[:, 0], blocks[:, 1]) / local).max()),
            rms_error=float(rms),
            max_error=self._largest[0],
            eager_rms_error=float(rms_own),
            non_finite_mismatch_count=self._mismatches,
            worst_index=self._first_mismatch if mismatched else self._worst_index,
        )


def _same_class(left: torch.Tensor, right: torch.Tensor, forgiveness: Forgiveness) -> torch.Tensor:
    """Whether two elements are both finite, both NaN, or the same infinity."""
    both_finite = torch.isfinite(left) & torch.isfinite(right)
    same = both_finite | (torch.isnan(left) & torch.isnan(right)) | (left == right)
    if forgiveness.nan_stands_for_any_non_finite:
        same = same | (torch.isnan(right) & ~torch.isfinite(left))
    return same


def _difference(value: torch.Tensor, truth: torch.Tensor, defined: torch.Tensor) -> torch.Tensor:
    """value − truth in float64 where both are finite, else 0."""
    return torch.where(defined & torch.isfinite(value), value - truth, 0.0)


def _square_sums(column: torch.Tensor) -> torch.Tensor:
    """Sums of squares of a [n] float64 column over blocks of 4,096: [ceil(n / 4096)]."""
    whole = column.numel() // BLOCK * BLOCK
    sums = torch.linalg.vector_norm(column[:whole].view(-1, BLOCK), dim=1).square()
    rest = torch.linalg.vector_norm(column[whole:]).square().reshape(1)
    return sums if whole == column.numel() else torch.cat([sums, rest])


def _is_of_few(error: torch.Tensor) -> torch.Tensor:
    """Of which blocks of a [n] float64 column a few elements make up the sum of squares, as (Σe²)²/Σe⁴ counts them:
    [ceil(n / 4096)]. None that is not zero counts as few."""
    squares = error.square()
    first, second = _square_sums(error), _square_sums(squares)
    few = torch.clamp(_block_counts(error) / BLOCK * _FEW, min=1.0)
    return ~(first.square() >= few * second) | (second == 0.0)


def _block_counts(column: torch.Tensor) -> torch.Tensor:
    """Elements of each block, float64."""
    counts = torch.full((-(-column.numel() // BLOCK),), float(BLOCK), dtype=torch.float64, device=column.device)
    counts[-1] -= -column.numel() % BLOCK
    return counts


def _rms(squares: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    return (squares / count.clamp(min=1.0)).sqrt()
