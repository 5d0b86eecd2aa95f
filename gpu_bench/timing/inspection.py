"""Calls that were just timed, looked at: against eager's, and against the same call made as it is judged.

The one idea: what is timed has to be what was judged, so some outputs of timed calls are compared, to the bit where
they can be, with a call that is not timed, in memory of its own. It finds work left out; precision is judged elsewhere.
Times nothing.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from gpu_bench.judging import guard
from gpu_bench.judging.comparison import parts_of
from gpu_bench.judging.loaded import LoadedTask
from gpu_bench.pytorch.baselines import Baselines
from gpu_bench.running.arena import Arena, using
from gpu_bench.running.executor import LoadedProgram, ProgramFault, Sources
from gpu_bench.running.watchdog import Watchdog
from gpu_bench.timing.arms import CANDIDATE
from gpu_bench.timing.replay import Before, Generators
from gpu_bench.values.keys import Key
from warpsmith.graphs.task_module import seed_generators
from warpsmith.v1 import verdict_pb2

_VERIFY_WITHIN, _VERIFY_ROUNDINGS, _VERIFY_ERRORS = 1e-2, 16, 8
"""Tolerance of the check of timed outputs against eager; how many roundings of the type it is at least, as two right
results of bf16 differ by more than a hundredth; and how many of eager's own rms errors come to it, where factors that
are rounded to TF32 make it coarse. It finds work left out, precision is judged elsewhere."""
_CHOICE_ROUNDINGS, _CHOICE_ERRORS = 64, 4
"""The same for two calls of a library that may have chosen other algorithms."""
_RMS_ERRORS = 2
"""How many such errors two results may be apart as root mean squares: independent ones are 1.4 apart."""
_ON_AVERAGE, _CHUNK = 64, 1 << 26
"""Elements from which on their root mean square is held to that, and those looked at at once."""
_ADDED_UP = 10
"""Errors of so many calls at most come together in state: a running mean keeps a tenth of each batch's."""


@dataclass(frozen=True)
class Subject:
    """A program that is timed."""

    program: LoadedProgram
    judged: LoadedProgram
    """The same program where it was never timed."""
    apart: Arena
    """Where all lies that this one may write."""
    call: Callable[[int], Any]
    """On a buffer set; what a step raises becomes a fault of the program."""
    forget: Callable[[Sequence[int]], object]
    """Takes the answers of earlier calls on these buffer sets out of reach."""
    watchdog: Watchdog


@dataclass
class Inspection:
    """Of the calls of one program."""

    loaded: LoadedTask
    baselines: Baselines
    is_pure: bool
    """Whether outputs depend on the inputs alone. Of other modules it is noted what stood before each reading."""
    written: Sequence[Key]
    """Tensors of `loaded.sources` that the module writes."""
    subject: Subject
    _before: Before | None = None
    """What stood before the last reading, where its calls change something."""

    def get_ready(self, sets: Sequence[int]) -> None:
        """Ahead of a reading of the program's calls on these buffer sets."""
        self.subject.forget(sets)
        if not self.is_pure:
            self.loaded.keep_places()  # what eager set anew is elsewhere than what the program is given
            given = [self.loaded.sources(self.baselines.inputs[index]).by_key() for index in sets]
            self._before = Before.of(sets, given, self.written)

    def look(self, name: str, index: int, outputs: Any) -> None:
        """Compares a call that was just timed with eager's and with itself as it is judged. Raises ProgramFault."""
        if name != CANDIDATE:
            return
        given = pytree.tree_leaves(outputs)
        if self.is_pure:
            seed_generators(secrets.randbelow(1 << 30))
            self._hold_against_eager(given, self.loaded.output_leaves(self.baselines.eager().call(index)))
            self._hold_against_judged(given, self._as_judged(index), is_exact=True)
        elif self._before is not None:
            self._make_again(self._before, index, given)

    def _make_again(self, before: Before, index: int, outputs: Sequence[torch.Tensor]) -> None:
        """Has eager make the calls of a reading from what stood before it, and holds against that what the program gave
        on one buffer set and what it left in the end. As it is judged, too: later ones from eager's state.

        An output that is state shows what all calls left.
        """
        given, left, place = [output.clone() for output in outputs], before.now(), before.sets.index(index)
        shown = before.shown_by(outputs)
        before.put_back()
        judged: Sequence[torch.Tensor] | None = None
        try:
            for number, each in enumerate(before.sets):
                if number == place:
                    judged = self._as_judged(index)
                made = self.loaded.output_leaves(self.baselines.eager().call(each))
                self.loaded.keep_places()
                if number == place:
                    wanted, eager = [output.clone() for output in made], made
            for position in shown & before.shown_by(eager):
                wanted[position] = eager[position].clone()
            self._hold_against_eager([*given, *left], [*wanted, *before.now()], before.keys, len(before.sets))
        finally:
            before.leave(left)
        if judged is not None:
            judged = [given[n] if n in shown else output for n, output in enumerate(judged)]
        self._hold_against_judged(given, judged, is_exact=not place)

    def _hold_against_eager(
        self,
        given: Sequence[torch.Tensor],
        eager: Sequence[torch.Tensor],
        written: Sequence[Key] = (),
        call_count: int = 1,
    ) -> None:
        """Outputs, and after them what so many calls have `written`, whose errors add up."""
        keys = [*map(Key.output, range(len(given) - len(written))), *written]
        coarse = self._coarse_errors()
        for position, (key, got, wanted) in enumerate(zip(keys, given, eager, strict=True)):
            within = max(_VERIFY_WITHIN, _rounding(got.dtype, _VERIFY_ROUNDINGS))
            calls = min(call_count, _ADDED_UP) if position >= len(given) - len(written) else 1
            error = calls * coarse.get(key, 0.0)
            if not agree(got, wanted, within, _VERIFY_ERRORS * error, _RMS_ERRORS * error):
                raise ProgramFault(
                    verdict_pb2.FAILURE_KIND_WRONG_VALUE,
                    f"{key} of a timed call differs from eager's beyond any rounding",
                )

    def _hold_against_judged(
        self, given: Sequence[torch.Tensor], judged: Sequence[torch.Tensor] | None, *, is_exact: bool
    ) -> None:
        """`judged` is None where there was no memory for it."""
        # A library may choose another algorithm where less memory is free.
        is_exact = is_exact and not any(step.HasField("library") for step in self.subject.program.program.steps)
        errors = self._coarse_errors()
        for position, (got, wanted) in enumerate(zip(given, judged or given, strict=True)):
            within, coarse = _rounding(got.dtype, _CHOICE_ROUNDINGS), errors.get(Key.output(position), 0.0)
            if guard.same_numbers(got, wanted) or (
                not is_exact and agree(got, wanted, within, _CHOICE_ERRORS * coarse, _RMS_ERRORS * coarse)
            ):
                continue
            raise ProgramFault(
                verdict_pb2.FAILURE_KIND_CHEAT,
                f"{Key.output(position)} of a timed call has other bits than the same call made as it is judged",
            )

    def _coarse_errors(self) -> dict[Key, float]:
        """rms of what TF32 was found to do to results, where PyTorch may round to it."""
        return {Key(each.kind, each.position, each.name): each.rms for each in self.loaded.learned.coarse_errors}

    def _as_judged(self, index: int) -> Sequence[torch.Tensor] | None:
        """What the program returns where it is run as it was judged, from all as it is now; poison differs. Leaves all
        as it was. None where there is no memory for it."""
        with using(self.subject.apart):
            return self._as_judged_apart(index)

    def _as_judged_apart(self, index: int) -> Sequence[torch.Tensor] | None:
        drawn = Generators.now(self.loaded.device)
        poison, canary = secrets.randbelow(1 << 30), secrets.randbelow(1 << 30)
        memory = guard.GuardedMemory(self.loaded.device, poison, canary)
        args = self.baselines.inputs[index]
        try:
            copies = {key: memory.copy_of(str(key), t) for key, t in self.loaded.sources(args).by_key().items()}
            call = self.subject.judged.bind(Sources.from_keys(copies), memory)
            with self.subject.watchdog.expecting():
                outputs = call()
                self.loaded.executor.synchronize()
        except torch.OutOfMemoryError:
            return None
        finally:
            drawn.put_back()
        return list(pytree.tree_leaves(outputs))


def agree(got: torch.Tensor, wanted: torch.Tensor, within: float, beyond: float = 0.0, rms_beyond: float = 0.0) -> bool:
    """Whether two outputs are the same result: floats within a share of the element plus that of the rms, and so much
    `beyond`; as root mean squares the share and `rms_beyond`."""
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return False
    got, wanted = parts_of(got), parts_of(wanted)
    if not wanted.is_floating_point():
        return torch.equal(got, wanted) or int((got != wanted).sum()) <= wanted.numel() // 100
    if _is_within_rms(got, wanted, within) or torch.equal(got, wanted):
        return True
    if beyond and not _is_close_on_average(got, wanted, within, rms_beyond):
        return False
    finite = wanted.float().masked_fill(~wanted.isfinite(), 0.0)
    scale = float(finite.square().mean().sqrt()) if wanted.numel() else 0.0
    return torch.allclose(got, wanted, rtol=within, atol=within * scale + beyond, equal_nan=True)


def _is_close_on_average(got: torch.Tensor, wanted: torch.Tensor, within: float, beyond: float) -> bool:
    """Whether what is finite in both differs by so little as root mean squares; of few elements chance decides."""
    if wanted.numel() < _ON_AVERAGE:
        return True
    off = size = count = 0.0
    for own, other in zip(*(torch.split(each.reshape(-1), _CHUNK) for each in (got, wanted)), strict=True):
        valid = own.isfinite() & other.isfinite()
        difference, known = (each.masked_fill(~valid, 0.0) for each in (own - other, other))
        off += float(torch.linalg.vector_norm(difference, dtype=torch.float64)) ** 2
        size += float(torch.linalg.vector_norm(known, dtype=torch.float64)) ** 2
        count += int(valid.sum())
    return math.sqrt(off) <= within * math.sqrt(size) + beyond * math.sqrt(count)


def _is_within_rms(got: torch.Tensor, wanted: torch.Tensor, within: float) -> bool:
    """Whether every element is within a share of the rms alone, which says the same of nearly all that agrees in a
    fifth of the time: 6.4 GB took 67 ms on an H200. Never so where one of the two is not finite."""
    wide = torch.float32 if wanted.itemsize < 4 else None
    rms = float(torch.linalg.vector_norm(wanted, dtype=wide)) / math.sqrt(max(wanted.numel(), 1))
    if not math.isfinite(rms) or not wanted.numel():
        return False
    return float(torch.linalg.vector_norm(got - wanted, math.inf)) <= within * rms


def _rounding(dtype: torch.dtype, count: int) -> float:
    """So many roundings of a type, as a share; 0 of integers."""
    return count * torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
