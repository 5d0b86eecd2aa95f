"""A GPU as a value: the limits of its compute capability, the sizes of the card, the engines that it has.

The one idea: code that decides for a GPU is handed one of these, so that no number of a machine stands in a module.
Limits are those of the CUDA programming guide's table of compute capabilities; sizes of a card are its own.
"""

from __future__ import annotations

import enum
from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Final

from warpsmith.errors import BadInput
from warpsmith.v1 import candidate_pb2, task_pb2, timing_pb2

STATIC_SHARED_BYTES: Final = 48 << 10
"""Shared memory that a block has without asking for more, on any card: what may be declared with a constant size."""
TENSOR_MAP_DIMENSIONS: Final = 5
"""At most (CUDA driver API, cuTensorMapEncodeTiled)."""
TENSOR_MAP_BOX: Final = 256
"""Elements of a box in a dimension, at most (as above)."""


class Feature(enum.Enum):
    """What not every card has; the value says it in words."""

    CLUSTERS = "thread block clusters"
    BULK_COPIES = "bulk asynchronous copies (TMA)"
    WARPGROUP_PRODUCTS = "warpgroup matrix products (wgmma)"
    DEPENDENT_LAUNCH = "programmatic dependent launch"


@dataclass(frozen=True)
class Costs:
    """What parts of our kernels cost on a card, to choose between schedules by; never reported. Measured on an H200."""

    bytes_per_ns: float = 4000.0
    """That memory moves."""
    tile_flops_per_ns: float = 6100.0
    """Of an SM in products of 16-bit operands (8192 of everything in bf16, 4096 as halves of f32)."""
    tile_end_ns: float = 1500.0
    """From a tile's last product to the next tile's first."""
    converted_step_ns: float = 1800.0
    """Of a step whose operands are split in shared memory (249 steps in 466 us; 63 tiles of 16 steps in 1805)."""
    float_flops_per_ns: float = 200.0
    """Of an SM in batches of small products of plain floats (H100)."""
    slices_ns: float = 4000.0
    """Of the launch that adds slices up."""
    agreement_bytes: int = 24 << 20
    """What memory could have moved while all blocks of the GPU agree once, about 6 us."""
    overlapped_agreement_bytes: int = 6 << 20
    """The same where it moves on meanwhile: what is lost all the same, about 1.5 us."""


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

    half_flops_per_cycle: int = 1024
    """Operations a cycle of an SM in dense matrix products of 16-bit operands, at most."""
    boost_khz: int = 2_000_000
    """Its highest clock, where the card does not tell."""

    costs: Costs = Costs()
    """What parts of kernels cost on it."""

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability: (9, 0) of "sm_90a"."""
        number = int(self.architecture.removeprefix("sm_").rstrip("a"))
        return number // 10, number % 10

    def message(self) -> task_pb2.Hardware:
        """For the contract."""
        return task_pb2.Hardware(
            architecture=self.architecture, sm_count=self.sm_count, l2_bytes=self.l2_bytes,
            shared_bytes=self.shared_bytes, sm_threads=self.sm_threads,
        )  # fmt: skip

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
    """Clusters of a card on which they were never counted: three quarters of what its SMs would make."""
    return tuple((size, 3 * sm_count // (4 * size)) for size in (2, 4, 8))


H200: Final = Hardware(
    "sm_90a", sm_count=132, l2_bytes=50 << 20, shared_bytes=227 << 10, sm_threads=2048,
    features=frozenset(Feature), clusters=((2, 66), (4, 30), (8, 15), (16, 7)), half_flops_per_cycle=4096,
    boost_khz=1_980_000,
)  # fmt: skip
"""An H100 SXM or H200: clusters as counted on an H200, the cache of an H100, the smaller of the two."""
_UNTRIED = (
    Hardware(
        "sm_80", sm_count=108, l2_bytes=40 << 20, shared_bytes=163 << 10, sm_threads=2048, half_flops_per_cycle=2048
    ),  # A100
    Hardware("sm_86", sm_count=82, l2_bytes=6 << 20, shared_bytes=99 << 10, sm_threads=1536),  # GeForce RTX 3090
    Hardware("sm_89", sm_count=128, l2_bytes=72 << 20, shared_bytes=99 << 10, sm_threads=1536),  # GeForce RTX 4090
    Hardware(
        "sm_100a", sm_count=148, l2_bytes=126 << 20, shared_bytes=227 << 10, sm_threads=2048,
        features=_BLACKWELL, clusters=_cautious(148), half_flops_per_cycle=8192,
    ),  # B200
    Hardware(
        "sm_120a", sm_count=170, l2_bytes=96 << 20, shared_bytes=99 << 10, sm_threads=1536,
        features=_BLACKWELL, clusters=_cautious(170),
    ),  # GeForce RTX 5090
)  # fmt: skip
"""A card of each architecture that kernels compile for and that none was run on."""

H200_MEASURED: Final = timing_pb2.Device(
    target=task_pb2.TARGET_CUDA, name="NVIDIA H200", copy_bytes_per_second=4.28e12, product_flops=51e12,
    operation_flops=20e12, tensor_flops=600e12, launch_ns=3.3e3, unit_count=H200.sm_count, cache_bytes=H200.l2_bytes,
)  # fmt: skip
"""An H200 as it measures itself (device copy, cuBLAS fp32, fp16 under load): stands in for what was not measured."""

CARDS: Final = {each.architecture: each for each in (H200, *_UNTRIED)}
"""A card of each architecture: what is taken where no device was measured."""
TRIED: Final = frozenset({H200.architecture})
"""Architectures on which kernels have run; for the others they are compiled, and run as threads of a processor."""

_BYTES_PER_SECOND: Final = (
    ("GH200 144G", 4.9e12), ("GH200", 4.0e12), ("H200", 4.8e12), ("H100 NVL", 3.9e12), ("H100 PCIe", 2.04e12),
    ("H100", 3.35e12), ("H800", 3.35e12), ("H20", 4.0e12), ("B200", 8.0e12), ("B100", 8.0e12),
    ("A100-SXM4-80GB", 2.04e12), ("A100 80GB", 1.94e12), ("A100", 1.56e12), ("RTX 3090 Ti", 1.01e12),
    ("RTX 3090", 0.94e12), ("RTX 4090", 1.01e12), ("RTX 5090", 1.79e12),
)  # fmt: skip
"""Memory bandwidth by data sheet, by the first name that matches."""


def memory_bandwidth(name: str) -> float:
    """Bytes a second of a GPU's memory by its data sheet, by the card's name; 0 when it is not known."""
    return next((rate for part, rate in _BYTES_PER_SECOND if part in name), 0.0)


def of(message: task_pb2.Hardware) -> Hardware:
    """The card of a message; an H200 for one that is not set.

    A card with as many SMs as the one that is known here is taken for that one. Of any other, fewer clusters are
    counted on than its SMs could make.

    Raises BadInput: no kernels are made for its architecture.
    """
    if not message.architecture:
        return H200
    known = of_architecture(message.architecture)
    if message.sm_count == known.sm_count:
        return known
    return replace(
        known, sm_count=message.sm_count, l2_bytes=message.l2_bytes, shared_bytes=message.shared_bytes,
        sm_threads=message.sm_threads, clusters=_cautious(message.sm_count) if known.clusters else (),
    )  # fmt: skip


def of_architecture(architecture: str) -> Hardware:
    """The known card of an architecture. Raises BadInput: no kernels are made for it."""
    if architecture not in CARDS:
        raise BadInput(f"no kernels are made for {architecture}: only for {', '.join(CARDS)}")
    return CARDS[architecture]


def architecture(program: candidate_pb2.Program) -> str:
    """What a program's CUDA sources are compiled for."""
    return program.architecture or H200.architecture
