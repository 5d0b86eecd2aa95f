"""The cases of a reference: drawn as its inputs allow, and with more restraint where it refuses them all the same.

The one idea: a value that the reference refuses counts against no candidate. What is learned of the inputs goes to
every process that draws the same cases, so that all draw the same tensors. It computes no truth.
"""

from __future__ import annotations

import contextlib
import functools
import math
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Sequence

import torch

from gpu_bench.judging import dependence, resolution
from gpu_bench.judging.loaded import Args, LoadedTask
from gpu_bench.timing import headline
from gpu_bench.values import inputs, learning, members
from gpu_bench.values.keys import Key
from gpu_bench.workers.shortage import is_want_of_memory
from warpsmith.errors import BadInput
from warpsmith.v1 import graph_pb2, judging_pb2, verdict_pb2

Eager = tuple[list[torch.Tensor], dict[Key, torch.Tensor]]
"""Outputs of eager, and what every source that it changed holds afterwards."""

Taken = tuple[Args, Eager]
"""The arguments of a case, and what eager makes of them."""

_SIGNED_SECONDS = 2.0
"""For finding which parameters have to keep their signs."""
_DRAWS = 2
"""Of the task's own values, beside the first, that say what all have in common."""


class Cases:
    """Of one reference. `run` is eager, seeded; it raises BadInput for what the reference refuses."""

    def __init__(self, loaded: LoadedTask, graph: graph_pb2.Graph, run: Callable[[Args, int], Eager]) -> None:
        self._loaded, self._graph, self._run = loaded, graph, run
        self._rehearsal: learning.Rehearsal | None = None
        self._tried_signs = set[int]()
        """Families of which it is known whether parameters may have other signs."""
        self.report = judging_pb2.Preparation()
        """What was found out: `learned`, which is kept up to date, `flags` and `unused`."""

    @staticmethod
    def learned(
        loaded: LoadedTask,
        graph: graph_pb2.Graph,
        run: Callable[[Args, int], Eager],
        args: Args,
        written: Collection[Key] = (),
    ) -> Cases:
        """Finds out what values the inputs may have, which are as in `args`, and state, part of which is `written`."""
        made = Cases(loaded, graph, run)
        made._learn(args, sorted(key.name for key in written if key.kind == judging_pb2.REGION_KIND_STATE))
        return made

    def _learn(self, args: Args, written: Sequence[str]) -> None:
        user, device = self._loaded.user, self._loaded.device
        leaves = user.tensor_leaves(args)
        if device.type == "cuda":
            state = self._loaded.sources(args).state
            positions = [state[name] for name in self._loaded.positions(written)]
            self._rehearsal = learning.Rehearsal.of(user, self._graph, [*leaves, *positions])
        seeds = [secrets.randbits(63) for _ in range(_DRAWS)]
        draws = [[learning.seen(leaf) for leaf in user.tensor_leaves(user.inputs(seed, device))] for seed in seeds]
        specs = [source.spec for source in self._graph.sources]
        specs += [result.spec for node in self._graph.nodes for result in node.results]
        may_try = self._rehearsal is not None or device.type == "cpu"
        tries = learning.Tries(functools.partial(self._lost_on, args) if may_try else None)
        extents = [extent for spec in specs for extent in spec.shape]
        may_go_beyond = learning.may_go_beyond(self._graph)
        learned = learning.learn(leaves, draws, tries, extents, may_go_beyond=may_go_beyond)
        learned.written_state.extend(written)
        learned.state_seed = self._loaded.state_seed
        learned.drawn_state.extend(self._loaded.drawn_state())
        self.report.learned.CopyFrom(learned if may_try else learning.held_back(learned))
        self.report.flags.extend(learning.flags(learned))
        self._loaded.learned = self.report.learned

    def taken(self, family: verdict_pb2.ValueFamily.ValueType, seed: int) -> Taken:
        """The arguments of a case and what eager makes of them. Raises BadInput where it takes none of the family.

        Parameters keep their signs where others leave much less that is finite, as the logarithm of a scale does; rare
        floats stay within what the task draws where most of a result would be lost, as sums of logarithms are.
        """
        if family in inputs.UNUSUAL and verdict_pb2.VALUE_FAMILY_RARE not in self._tried_signs:
            with contextlib.suppress(BadInput):  # it tells which parameters the module takes
                self.taken(verdict_pb2.VALUE_FAMILY_RARE, seed)
        found = self._as_restrained(family, seed)
        if family not in members.AS_TRAINED or family in self._tried_signs:
            return found
        self._tried_signs.add(family)
        found = self._with_floats_held(found, family, seed)
        learned = self._loaded.learned
        was_refused = inputs.restraint_of(learned, family).own_signs
        lost = math.inf if was_refused else _lost(found)
        if not lost:
            return found
        restraint = learning.restraint_in(learned, family)
        restraint.own_signs = True
        least = 2 * self._lost_by(family, seed)
        restraint.own_signs = False
        if least < lost:
            self._find_signed(restraint, family, seed, least)
        return self._as_restrained(family, seed)

    def _with_floats_held(self, found: Taken, family: verdict_pb2.ValueFamily.ValueType, seed: int) -> Taken:
        count = sum(each.numel() for each in found[1][0])
        restraint = learning.restraint_in(self._loaded.learned, family)
        if family != verdict_pb2.VALUE_FAMILY_RARE or restraint.floats_within or 2 * _lost(found) <= count:
            return found
        restraint.floats_within = True
        restraint.floats_within = 2 * self._lost_by(family, seed) < _lost(found)
        return self._as_restrained(family, seed)

    def _find_signed(
        self, restraint: judging_pb2.Restraint, family: verdict_pb2.ValueFamily.ValueType, seed: int, most: float
    ) -> None:
        """Restrains the parameters without whose own signs more than `most` elements are lost, found by halves; all of
        them where that does not do. What there is no time for is restrained."""
        own = sorted(name for name in self._loaded.trainable if members.has_signs(self._loaded.pristine(name)))
        until, needed = time.monotonic() + _SIGNED_SECONDS, list[str]()
        groups = [own] if own else []
        while groups:
            group = groups.pop()
            restraint.signed_parameters[:] = sorted({*own} - {*group})
            is_late = time.monotonic() > until
            if not is_late and self._lost_by(family, seed) <= most:
                continue
            if is_late or len(group) == 1:
                needed += group
            else:
                groups += [group[: len(group) // 2], group[len(group) // 2 :]]
        restraint.signed_parameters[:] = sorted(needed)
        restraint.own_signs = self._lost_by(family, seed) > most

    def _lost_by(self, family: verdict_pb2.ValueFamily.ValueType, seed: int) -> float:
        """How many elements of outputs are not finite, as the family is restrained; infinity where it is refused."""
        try:
            return _lost(self._drawn(family, seed))
        except BadInput:
            return math.inf

    def _as_restrained(self, family: verdict_pb2.ValueFamily.ValueType, seed: int) -> Taken:
        while True:
            try:
                return self._drawn(family, seed)
            except BadInput:
                if not learning.restrain(self._loaded.learned, family):
                    raise

    def _drawn(self, family: verdict_pb2.ValueFamily.ValueType, seed: int) -> Taken:
        args = self._loaded.case(family, seed)
        if self._rehearsal is not None and family != verdict_pb2.VALUE_FAMILY_TASK:
            self._rehearsal.take(args, family, self._loaded.sources(args).state)
        return args, self._run(args, seed)

    def _takes(self, args: Args, leaves: Sequence[torch.Tensor]) -> bool:
        """Whether the reference takes these inputs in the place of those of `args`."""
        return self._lost_on(args, leaves) < math.inf

    def _lost_on(self, args: Args, leaves: Sequence[torch.Tensor]) -> float:
        """As `learning.Lost`, for these inputs in the place of those of `args`."""
        tried = self._loaded.user.with_leaves(args, leaves)
        try:
            if self._rehearsal is not None:
                return self._rehearsal.take(tried, verdict_pb2.VALUE_FAMILY_UNSPECIFIED)
            return learning.lost(self._run(tried, 0)[0])
        except BadInput:
            return math.inf

    def try_sources(
        self,
        args: Args,
        written: Sequence[Key],
        base: dependence.Base,
        *,
        may_read_less: bool = False,
    ) -> None:
        """Finds out what the results on `args`, which are those of `base`, depend on, if memory allows.

        `may_read_less`: also whether they show that all was read.
        """
        loaded, seed = self._loaded, secrets.randbits(62)
        user = loaded.user
        leaves = user.tensor_leaves(args)

        def draw(family: verdict_pb2.ValueFamily.ValueType, number: int) -> Sequence[torch.Tensor]:
            own = user.tensor_leaves(user.inputs(seed + number, loaded.device))
            return inputs.replaced(own, family, seed + number, loaded.learned)

        def run(tried: Sequence[torch.Tensor]) -> dependence.Outputs | None:
            changed = user.with_leaves(args, tried)
            if self._rehearsal is not None and not self._takes(args, tried):
                return None
            try:
                outputs, after = self._run(changed, 0)
            except BadInput:
                return None
            held = loaded.sources(changed).by_key()
            return [*outputs, *(after.get(key, held[key]) for key in written)]

        def with_other(member: Key, tensor: torch.Tensor) -> dependence.Outputs | None:
            loaded.restore()  # what a call made of the member before as well
            members.vary({str(member): tensor}, verdict_pb2.VALUE_FAMILY_NORMAL, seed)
            return run(leaves)

        held = loaded.sources(args).by_key()
        floats = {k: t for k, t in held.items() if not k.is_input and t.is_floating_point() and t.numel()}
        changes = [(key, functools.partial(with_other, key, tensor)) for key, tensor in floats.items()]
        found: dependence.Dependence | None = None
        with _where_memory_allows(loaded):
            with contextlib.suppress(BadInput):
                self.taken(verdict_pb2.VALUE_FAMILY_FRESH, seed)  # learns whether it has to be held back
            loaded.restore()
            found = dependence.find(base, leaves, draw, run, changes)
        if found is None:
            return
        kept = [flag for flag in self.report.flags if flag not in headline.NEVER_FASTER]
        self.report.flags[:] = [*kept, *found.flags]
        self.report.unused[:] = map(str, found.unused)
        with _where_memory_allows(loaded):
            if may_read_less and resolution.is_unresolved(base, leaves, draw, run):
                self.report.flags.append(headline.INPUT_UNRESOLVED)


@contextlib.contextmanager
def _where_memory_allows(loaded: LoadedTask) -> Iterator[None]:
    """Around what is left undone for want of memory; leaves the module as it was made."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_want_of_memory(error):
            raise
    finally:
        loaded.restore()


def _lost(taken: Taken) -> int:
    return learning.lost(taken[1][0])
