"""The picture of measured modules under a machine's ceilings."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from benchmarks.timing import roofline


def test_a_picture_has_a_pair_of_marks_for_each_module_and_ours_is_higher_where_it_is_faster() -> None:
    faster = roofline.Mark("a product", flops=10**12, bytes=10**9, ours_s=0.005, baseline_s=0.02)
    slower = roofline.Mark("a copy", flops=0, bytes=10**9, ours_s=0.002, baseline_s=0.001)
    drawn = roofline.picture([faster, slower])
    ElementTree.fromstring(drawn)
    heights = {}
    for name, marks in re.findall(r"<g><title>(.*?): .*?</title>(.*?)</g>", drawn, re.DOTALL):
        heights[name] = [float(found) for found in re.findall(r'cy="([\d.]+)"', marks)]
    (before, after), (copied_before, copied_after) = heights["a product"], heights["a copy"]
    assert after < before  # y grows downwards
    assert copied_after > copied_before


def test_every_module_that_was_timed_and_whose_work_is_known_is_drawn() -> None:
    found = list(roofline.marks())
    assert {mark.name for mark in found} >= {"1_Square_matrix_multiplication_", "12_Gemm_Multiply_LeakyReLU"}
    assert all(mark.bytes > 0 and mark.ours_s > 0 for mark in found)
