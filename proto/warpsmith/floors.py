"""What kind of floor a task has: the one question of it that both a search and a reasoner ask."""

from __future__ import annotations

from warpsmith.v1 import analysis_pb2, timing_pb2


def is_of_products(minimum: analysis_pb2.Cost, device: timing_pb2.Device, floor_ns: float) -> bool:
    """Whether matrix products make a floor, and not memory: they are counted at the library's own rate, no ceiling.

    On an H200 the search for a bf16 product with its GELU ended at 93 % of such a floor, and 96 % is there.
    """
    moved, rate = minimum.read_bytes + minimum.write_bytes, device.copy_bytes_per_second
    return minimum.product_flop_count > 0 and rate > 0 and 1e9 * moved / rate < 0.5 * floor_ns
