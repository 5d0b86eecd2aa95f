"""A GPU as a value: the limits of its compute capability, the sizes of the card, the engines that it has.

The one idea: whoever decides for a GPU is handed one of these, so that no number of a machine stands in a module.
Limits are those of the CUDA programming guide's table of compute capabilities; sizes of a card are its own.
"""

from __future__ import annotations

import enum
from collections.abc import Set
from dataclasses import dataclass
from typing import Final

STATIC_SHARED_BYTES: Final = 48 << 10
"""Shared memory that a block has without asking for more, on any card: what may be declared with a constant size."""


class Feature(enum.Enum):
    """What not every card has; the value says it in words."""

    CLUSTERS = "thread block clusters"
    BULK_COPIES = "bulk asynchronous copies (TMA)"
    WARPGROUP_PRODUCTS = "warpgroup matrix products (wgmma)"
    DEPENDENT_LAUNCH = "programmatic dependent launch"


@dataclass(frozen=True)
class Hardware:
    """A GPU that kernels are made for."""

    architecture: str
    """As compilers name it: "sm_90a"."""
    sm_count: int
    """Streaming multiprocessors."""
    l2_bytes: int
    """Second-level cache."""
    shared_bytes: int
    """Shared memory that one block may take."""
    sm_threads: int
    """Threads that an SM holds at once."""
    features: frozenset[Feature] = frozenset()
    """What it has of what not every card has."""
    clusters: tuple[tuple[int, int], ...] = ()
    """Blocks of a cluster, and the clusters at one block an SM that the card holds at once: GPCs differ in size."""
    sm_registers: int = 65536
    """Registers of 32 bits of an SM."""
    reserved_shared_bytes: int = 1 << 10
    """Shared memory of an SM that every resident block takes besides its own."""

    def refusal(self, needs: Set[Feature]) -> str:
        """ "needs …, which sm_80 does not have"; empty where the card has all."""
        lacking = ", ".join(sorted(need.value for need in needs - self.features))
        return f"needs {lacking}, which {self.architecture} does not have" if lacking else ""

    def has(self, feature: Feature) -> bool:
        """Whether the card has it."""
        return feature in self.features

    def register_limit(self, threads: int, min_blocks: int) -> int:
        """Registers a thread may have when that many blocks share an SM; they come in eights, 255 at most."""
        return min(255, self.sm_registers // (threads * min_blocks) // 8 * 8)

    def resident_blocks(self, min_blocks: int) -> int:
        """Blocks that are surely resident at once where that many share an SM."""
        return self.sm_count * min_blocks

    def resident_clusters(self, size: int) -> int:
        """Clusters of that many blocks that are surely resident at once, at one block an SM; 0 where none can be."""
        return self.sm_count if size == 1 else dict(self.clusters).get(size, 0)


_BLACKWELL = frozenset(Feature) - {Feature.WARPGROUP_PRODUCTS}


def _cautious(sm_count: int) -> tuple[tuple[int, int], ...]:
    """Clusters of a card on which nobody has counted them: three quarters of what its SMs would make."""
    return tuple((size, 3 * sm_count // (4 * size)) for size in (2, 4, 8))


H200: Final = Hardware(
    "sm_90a", sm_count=132, l2_bytes=50 << 20, shared_bytes=227 << 10, sm_threads=2048,
    features=frozenset(Feature), clusters=((2, 66), (4, 30), (8, 15), (16, 7)),
)  # fmt: skip
"""An H100 SXM or H200: clusters as counted on an H200, the cache of an H100, the smaller of the two."""
_UNTRIED = (
    Hardware("sm_80", sm_count=108, l2_bytes=40 << 20, shared_bytes=163 << 10, sm_threads=2048),  # A100
    Hardware("sm_86", sm_count=82, l2_bytes=6 << 20, shared_bytes=99 << 10, sm_threads=1536),  # GeForce RTX 3090
    Hardware("sm_89", sm_count=128, l2_bytes=72 << 20, shared_bytes=99 << 10, sm_threads=1536),  # GeForce RTX 4090
    Hardware(
        "sm_100a", sm_count=148, l2_bytes=126 << 20, shared_bytes=227 << 10, sm_threads=2048,
        features=_BLACKWELL, clusters=_cautious(148),
    ),  # B200
    Hardware(
        "sm_120a", sm_count=170, l2_bytes=96 << 20, shared_bytes=99 << 10, sm_threads=1536,
        features=_BLACKWELL, clusters=_cautious(170),
    ),  # GeForce RTX 5090
)  # fmt: skip
"""A card of each architecture that kernels compile for and that none was run on."""

CARDS: Final = {each.architecture: each for each in (H200, *_UNTRIED)}
"""A card of each architecture: what is taken where no device was measured."""
