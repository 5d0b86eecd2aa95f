"""One typed key for a tensor of a task: through a message and back, and into the words that people read."""

from __future__ import annotations

import pytest

from gpu_bench.values.keys import Key
from warpsmith.contract import words
from warpsmith.v1 import graph_pb2, judging_pb2, tensor_pb2

KEYS = {
    "output 0": Key.output(0),
    "input 12": Key.input(12),
    "parameter a.weight": Key.parameter("a.weight"),
    "state bn.running_mean": Key.state("bn.running_mean"),
    "given mul": Key.given("mul"),
    "made add_1": Key.made("add_1"),
}


@pytest.mark.parametrize("word", KEYS)
def test_a_key_survives_its_region_and_has_the_words_that_comparisons_use(word: str) -> None:
    key = KEYS[word]
    region = key.region(tensor_pb2.TensorSpec(shape=[3]), 64)
    assert Key.of(judging_pb2.Region.FromString(region.SerializeToString())) == key
    assert (str(key), region.offset_bytes, list(region.spec.shape)) == (word, 64, [3])


def test_names_that_look_like_other_kinds_are_told_apart() -> None:
    odd = [Key.parameter("input 0"), Key.state("parameter w"), Key.parameter(""), Key.input(0), Key.state("0")]
    assert len(set(odd)) == len(odd)
    assert [key.is_input for key in odd] == [False, False, False, True, False]


@pytest.mark.parametrize(
    ("source", "key"),
    [
        (graph_pb2.Source(origin=graph_pb2.ORIGIN_INPUT, input_index=2), Key.input(2)),
        (graph_pb2.Source(origin=graph_pb2.ORIGIN_PARAMETER, qualified_name="w"), Key.parameter("w")),
        (graph_pb2.Source(origin=graph_pb2.ORIGIN_STATE, qualified_name="n.mean"), Key.state("n.mean")),
        (graph_pb2.Source(origin=graph_pb2.ORIGIN_CONSTANT), None),
    ],
)
def test_a_source_of_a_graph_has_the_key_of_the_modules_tensor(source: graph_pb2.Source, key: Key | None) -> None:
    assert Key.of_source(source) == key


def test_a_kind_that_nobody_knows_is_shown_by_its_number() -> None:
    assert words.region_kind(judging_pb2.Region.FromString(b"\x08\x2a").kind) == "42"
