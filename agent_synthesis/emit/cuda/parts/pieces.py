"""CUDA schedule of concatenations: a kernel for each part, by whatever schedule suits it.

The one idea: one kernel for all parts works out for each element which tensor it is of and where it lies there; parts
by themselves have vectors, and tiles where they turn (`nests.analysis.pieces`). It pays where parts are large, or are
one kernel, for they read the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agent_synthesis.emit.cuda.schedule import CudaSchedule
from agent_synthesis.nests import passes
from agent_synthesis.nests.analysis.pieces import pieces
from agent_synthesis.nests.ir import Nest
from agent_synthesis.nests.product import multiplies_matrices
from agent_synthesis.schedule import Emission, Footprint, Offered
from agent_synthesis.settings import Settings
from warpsmith.errors import IllegalMove


@dataclass(frozen=True)
class PiecesSettings(Settings):
    """Of `cuda_pieces`: none, for each part has its own schedule's defaults."""


@dataclass(frozen=True)
class CudaPieces(CudaSchedule):
    """Each part by the first of `others` that takes it."""

    others: tuple[Offered, ...]
    large_bytes: int = 8 << 20
    """Data of a nest from which on more launches take less than what they spare."""
    name = "cuda_pieces"
    settings = PiecesSettings

    def accepts(self, nest: Nest) -> bool:
        """Nests that choose by the place along a parallel axis: large ones, or those whose parts are one nest."""
        if nest.reductions and (not passes.is_reduction(nest) or multiplies_matrices(nest)):
            return False
        found = pieces(nest)
        size = sum(buffer.element_count * buffer.type.size_bytes for buffer in nest.buffers)
        if len(found) > 1 and size < self.large_bytes:
            return False
        return bool(found) and all(self._takes(piece) is not None for piece in found)

    def defaults(self, _nest: Nest) -> PiecesSettings:
        """There is nothing to set."""
        return PiecesSettings()

    def alternatives(self, _nest: Nest, _current: PiecesSettings) -> Sequence[PiecesSettings]:
        """None."""
        return ()

    def footprint(self, nest: Nest, _settings: PiecesSettings) -> Footprint:
        """Those of all parts."""
        found = [taken.footprint(piece, taken.defaults(piece)) for piece, taken in self._parts(nest)]
        return Footprint(
            sum(each.extra_bytes for each in found),
            max(each.parallel_count for each in found),
            sum(each.launch_count for each in found),
        )

    def emit(self, nest: Nest, _settings: PiecesSettings) -> Emission:
        """The kernels of all parts."""
        made = [taken.emit(piece, taken.defaults(piece)) for piece, taken in self._parts(nest)]
        return Emission(
            "\n".join(each.text for each in made),
            tuple(dict.fromkeys(header for each in made for header in each.headers)),
            tuple(launch for each in made for launch in each.launches),
            tuple(space for each in made for space in each.workspaces),
        )

    def _takes(self, piece: Nest) -> Offered | None:
        return next((other for other in self.others if other.accepts(piece)), None)

    def _parts(self, nest: Nest) -> list[tuple[Nest, Offered]]:
        found = []
        for piece in pieces(nest):
            if (taken := self._takes(piece)) is None:
                raise IllegalMove(f"{nest.name}: no schedule takes {piece.name}")
            found.append((piece, taken))
        if not found:
            raise IllegalMove(f"{nest.name} does not choose among tensors along an axis")
        return found
