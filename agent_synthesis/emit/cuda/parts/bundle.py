"""CUDA schedule of bundles: many small nests in one launch, a range of blocks for each.

The one idea: a kernel that fills a part of the card takes as long as one that fills it, so those that need nothing of
each other run beside each other. A block does what it would do in the kernel of its nest alone. Nests that differ in
names alone share a range and its code: a switch says whose pointers a block works with.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agent_synthesis.bundle import Bundle, Member
from agent_synthesis.emit import function_text
from agent_synthesis.emit.cuda import geometry, kernel_text
from agent_synthesis.emit.cuda.block_work import BlockWork
from agent_synthesis.emit.cuda.pointwise import CudaPointwise, PointwiseSettings
from agent_synthesis.emit.cuda.schedule import CudaSchedule
from agent_synthesis.emit.cuda.transposes.transpose import CudaTranspose
from agent_synthesis.emit.cuda.transposes.transpose_text import TransposeSettings
from agent_synthesis.emit.expression import Names
from agent_synthesis.emit.generated_struct import wrapped
from agent_synthesis.nests.analysis.words import described
from agent_synthesis.nests.ir import Nest
from agent_synthesis.schedule import Emission, Footprint, Offered
from agent_synthesis.settings import Settings
from warpsmith.errors import IllegalMove

LEAST_MEMBERS = 2
MOST_TENSORS = 128
"""Of a bundle: each is an argument of the kernel, which 4 KB are for."""
HEADER = "ws_bundle.cuh"


@dataclass(frozen=True)
class BundleSettings(Settings):
    """Of `cuda_bundle`: none, for each member has its own schedule's."""


@dataclass(frozen=True)
class _Share:
    """Members of one form, and what their blocks do."""

    members: Sequence[Member]
    work: BlockWork

    @property
    def blocks(self) -> int:
        return len(self.members) * self.work.blocks

    @property
    def points_of_a_block(self) -> float:
        nest = self.members[0].nest
        return nest.row_count * nest.column_count / self.work.blocks


class CudaBundle(CudaSchedule):
    """Ranges of blocks."""

    name = "cuda_bundle"
    settings = BundleSettings

    def accepts(self, nest: Nest) -> bool:
        """Bundles of nests that would each be elements or tiles, none of which reads what another writes."""
        if not isinstance(nest, Bundle) or len(nest.members) < LEAST_MEMBERS or len(nest.buffers) > MOST_TENSORS:
            return False
        touched = [buffer for member in nest.members for buffer in member.nest.buffers]
        written = [buffer.name for buffer in touched if buffer.written]
        if any(sum(buffer.name == name for buffer in touched) > 1 for name in written):
            return False
        works = [self._work(member) for member in {each.form: each for each in nest.members}.values()]
        return None not in works and len({work.dependent for work in works if work is not None}) == 1

    def defaults(self, _nest: Nest) -> BundleSettings:
        """There is nothing to set."""
        return BundleSettings()

    def alternatives(self, _nest: Nest, _current: BundleSettings) -> Sequence[BundleSettings]:
        """None."""
        return ()

    def footprint(self, nest: Nest, _settings: BundleSettings) -> Footprint:
        """Those of all members, in one launch."""
        found = [self._offered[each.schedule].footprint(each.nest, each.settings) for each in _members(nest)]
        return Footprint(sum(each.extra_bytes for each in found), sum(each.parallel_count for each in found), 1)

    def emit(self, nest: Nest, _settings: BundleSettings) -> Emission:
        """One kernel."""
        shares = self._shares(nest)
        works = [share.work for share in shares]
        headers = dict.fromkeys(header for work in works for header in (*work.headers, HEADER))
        threads = max(work.threads for work in works)
        held = max(work.held_registers for work in works)
        kernel = _kernel(nest, shares, threads, geometry.blocks_beside(self.hardware, threads, held))
        lines = [*_header(nest, shares), *(line for work in works for line in work.struct), *kernel]
        return geometry.one_kernel(
            nest, lines, headers, grid=sum(share.blocks for share in shares), threads=threads,
            dependent=works[0].dependent,
        )  # fmt: skip

    @functools.cached_property
    def _offered(self) -> Mapping[str, Offered]:
        """Schedules of members, by name."""
        both = Offered(CudaTranspose(self.hardware)), Offered(CudaPointwise(self.hardware))
        return {each.name: each for each in both}

    def _work(self, member: Member) -> BlockWork | None:
        """What blocks do for a member; None where its schedule cannot or is another."""
        offered, settings = self._offered.get(member.schedule), member.settings
        schedule = offered.made if offered is not None else None
        with contextlib.suppress(IllegalMove):
            if isinstance(schedule, CudaTranspose) and isinstance(settings, TransposeSettings):
                return schedule.work(member.nest, settings)
            if isinstance(schedule, CudaPointwise) and isinstance(settings, PointwiseSettings):
                return schedule.work(member.nest, settings)
        return None

    def _shares(self, nest: Nest) -> list[_Share]:
        forms: dict[int, list[Member]] = {}
        for member in _members(nest):
            forms.setdefault(member.form, []).append(member)
        shares = []
        for members in forms.values():
            if (work := self._work(members[0])) is None:
                raise IllegalMove(f"{nest.name}: {members[0].nest.name} is not elements or tiles")
            shares.append(_Share(members, work))
        return sorted(shares, key=lambda share: -share.points_of_a_block)  # short blocks fill what long ones leave


def _members(nest: Nest) -> Sequence[Member]:
    """Raises IllegalMove where a nest is no bundle."""
    if not isinstance(nest, Bundle):
        raise IllegalMove(f"{nest.name} is one nest")
    return nest.members


def _header(nest: Nest, shares: Sequence[_Share]) -> list[str]:
    lines = [f"{function_text.entry_name(nest)}: {nest.comment}"]
    for share in shares:
        first, count = share.members[0], len(share.members)
        of = f" and {count - 1} like it" if count > 1 else ""
        lines.append(f"{function_text.entry_name(first.nest)}{of}: {first.nest.comment or 'one fused group'}")
        lines += [f"  {line}" for line in described(first.nest)]
        lines.append(f"  {first.schedule}: {first.settings}")
    return [f"// {line}" for line in lines]


def _kernel(nest: Nest, shares: Sequence[_Share], threads: int, min_blocks: int) -> list[str]:
    """The kernel: shared memory for the largest, then a range of blocks for each form."""
    names = Names(["block", "memory", "work"])
    entry = names.take(nest.name)
    called = {buffer.name: names.take(buffer.name) for buffer in nest.buffers}
    arguments: dict[str, str] = {}
    for share in shares:
        for member in share.members:
            own = zip(member.nest.buffers, share.work.text.nest.buffers, strict=True)
            arguments |= {each.name: share.work.text.argument(like, called[each.name]) for each, like in own}
    lines = [f'extern "C" __global__ void __launch_bounds__({threads}, {min_blocks}) {entry}(']
    lines += kernel_text.wrapped([arguments[buffer.name] for buffer in nest.buffers])
    tiles = [kind.replace("%", share.work.name) for share in shares for kind in share.work.shared.values()]
    if tiles:
        lines += wrapped(f"alignas(16) __shared__ ws::OneOf<{', '.join(tiles)}> memory;")
    first = shared = 0
    for share in shares:
        work, end = share.work, first + share.blocks
        block = f"blockIdx.x - {first}" if first else "blockIdx.x"
        is_last = share is shares[-1]
        lines.append("  {" if is_last else f"  if (blockIdx.x < {end}) {{")
        if work.threads < threads:
            lines.append(f"    if (threadIdx.x >= {work.threads}) return;")
        lines.append(f"    const unsigned block = {block};")
        lines += _pointers(share, called)
        memory = [f"memory.get<{shared + k}>()" for k in range(len(work.shared))]
        shared += len(memory)
        number = f"block % {work.blocks}" if len(share.members) > 1 else "block"
        lines.append(f"    return ws::{work.skeleton}({', '.join(['work', *memory, number])});")
        lines.append("  }")
        first = end
    return [*lines, "}", ""]


def _pointers(share: _Share, called: Mapping[str, str]) -> list[str]:
    """The struct of a block's member. Arguments stay where the launch has put them: a table of them would be copied."""
    work = share.work
    texts = ["{" + ", ".join(called[buffer.name] for buffer in each.nest.buffers) + "}" for each in share.members]
    if len(texts) == 1:
        return wrapped(f"  const {work.name} work{texts[0]};")
    labels = [f"case {number}" for number in range(len(texts) - 1)] + ["default"]
    cases = (f"{label}: work = {text}; break;" for label, text in zip(labels, texts, strict=True))
    return [
        f"    {work.name} work;",
        f"    switch (block / {work.blocks}) {{  // {work.blocks} blocks each",
        *(line for case in cases for line in wrapped(f"    {case}")),
        "    }",
    ]
