"""Crossings of two plans."""

from __future__ import annotations

from orchestrator import testing
from orchestrator.search.evolution import _crossed
from warpsmith.v1 import analysis_pb2, trial_pb2


def test_evolution_crosses_plans_that_decided_different_things() -> None:
    first, second = trial_pb2.Trial(number=1), trial_pb2.Trial(number=2)
    first.hypothesis.moves.extend([testing.move("author"), testing.move("set", "reduce=cluster")])
    second.hypothesis.moves.extend([testing.move("set", "reduce=warp"), testing.move("set", "vectors=4")])
    crossed = _crossed(first, second)
    assert crossed is not None
    choices = [move.choice for move in crossed.hypothesis.moves]
    assert choices == ["", "reduce=cluster", "vectors=4"]
    assert _crossed(first, first) is None


def test_a_crossing_decides_nothing_twice_and_lays_nothing_out_too_late() -> None:
    """Also of groups that a move names beside its first."""
    author, layout = analysis_pb2.MOVE_KIND_AUTHOR, analysis_pb2.MOVE_KIND_LAYOUT
    first, second = trial_pb2.Trial(number=1), trial_pb2.Trial(number=2)
    first.candidate.moves.add(kind=author, group="a", also=["b", "c"])
    second.candidate.moves.add(kind=layout, group="*", choice="channels_last")
    second.candidate.moves.add(kind=author, group="b", choice="other")
    assert _crossed(first, second) is None
    second.candidate.moves.add(kind=author, group="d")
    crossed = _crossed(first, second)
    assert crossed is not None
    assert [move.group for move in crossed.hypothesis.moves] == ["a", "d"]
