"""Moves in words: one by one, or of many how often each."""

from __future__ import annotations

from warpsmith.contract import words
from warpsmith.v1 import analysis_pb2


def move(kind: analysis_pb2.MoveKind.ValueType, group: str, choice: str) -> analysis_pb2.Move:
    return analysis_pb2.Move(kind=kind, group=group, choice=choice)


def test_few_moves_are_told_one_by_one_and_many_by_how_often_each_is_made() -> None:
    author, fuse = analysis_pb2.MOVE_KIND_AUTHOR, analysis_pb2.MOVE_KIND_FUSE
    few = [move(author, "linear", "cuda_product"), move(fuse, "relu", "linear")]
    assert words.moves(few) == "author linear cuda_product, fuse relu linear"
    assert words.moves([]) == ""
    products = [move(author, f"linear_{number}", "cuda_product") for number in range(300)]
    fused = [move(fuse, f"relu_{number}", f"linear_{number}") for number in range(299)]
    graph = move(analysis_pb2.MOVE_KIND_LAUNCH, "*", "cuda_graph")
    assert words.moves([*products, *fused, graph]) == "300 times author cuda_product, 299 times fuse, launch cuda_graph"
