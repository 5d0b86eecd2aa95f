"""What kind of floor a task has, by its least work and the device."""

from __future__ import annotations

import pytest

from warpsmith.floors import is_of_products
from warpsmith.v1 import analysis_pb2, timing_pb2


@pytest.mark.parametrize(
    ("flops", "moved", "rate", "of_products"),
    [
        (10**12, 400_000, 4e12, True),  # memory takes 0.1 µs of 1 ms
        (10**12, 2_400_000_000, 4e12, False),  # memory takes 0.6 ms of it
        (0, 400_000, 4e12, False),
        (10**12, 400_000, 0.0, False),  # a device whose memory was not measured
    ],
)
def test_a_floor_is_of_products_where_there_are_some_and_memory_takes_less_than_half(
    flops: int, moved: int, rate: float, of_products: bool
) -> None:
    minimum = analysis_pb2.Cost(product_flop_count=flops, read_bytes=moved // 2, write_bytes=moved // 2)
    assert is_of_products(minimum, timing_pb2.Device(copy_bytes_per_second=rate), 1e6) == of_products
