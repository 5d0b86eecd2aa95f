"""What a solution's process is asked for, and what the judge says of it: structure, members, results of timed calls."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch

from gpu_bench.judging.looks import Yardstick, far, yardstick
from gpu_bench.running.executor import ProgramFault
from gpu_bench.solutions import integrity, solution_worker, structure, structure_text
from gpu_bench.solutions.called_solution import CalledSolution, SolutionFault
from gpu_bench.solutions.solution_worker import Solution, counterparts, glimpses, refuse_promises
from gpu_bench.solutions.witness import GAP_BYTES, lay_out
from gpu_bench.values.keys import Key
from warpsmith.v1 import verdict_pb2


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclasses.dataclass
class Loss:
    value: torch.Tensor
    count: int


X = torch.arange(12.0).reshape(3, 4)
MANY = [1.0, -1.0] * 8


def difference(returned: Any, wanted: Any) -> str:
    """What is said of a result beside the reference's, both made of X."""
    described, _ = structure.describe(returned, {Key.input(0): X})
    reference, _ = structure.describe(wanted, {Key.input(0): X})
    return structure_text.difference(structure_text.read(structure.written(described)), reference)


@pytest.mark.parametrize(
    ("returned", "wanted", "told"),
    [
        ({"a": X + 1, "b": X + 2}, {"a": X + 3, "b": X + 4}, ""),
        ({"b": X + 1, "a": X + 2}, {"a": X + 3, "b": X + 4}, "the result has ['b'], ['a'] instead of ['a'], ['b']"),
        ({"a": X + 1}, {"a": X + 3, "b": X + 4}, "the result has ['a'] instead of ['a'], ['b']"),
        ([X + 1], (X + 1,), "the result is a list instead of a tuple"),
        (OrderedDict(a=X + 1), {"a": X + 1}, ""),
        (Pair(X + 1, X + 2), (X + 1, X + 2), "the result is a named tuple instead of a tuple"),
        (
            Pair(X + 1, (X + 2).double()),
            Pair(X + 1, X + 2),
            "output.second is float64 [3, 4] instead of float32 [3, 4]",
        ),
        (Loss(X + 1, 2), Loss(X + 1, 3), "output.count is 2 instead of 3"),
        ((X + 1, None), (X + 1, X), "output[1] is None instead of float32 [3, 4]"),
        (X.t().contiguous().t(), X + 1, "the result has strides [1, 3] instead of [4, 1]"),
        (X[:1], (X + 1)[:1], "the result is the memory of input 0"),
        (X + 1, X[:], ""),
        ((X + 1,) * 2, (X + 1, X + 2), "output[1] is the memory of output[0]"),
        ((X + 1)[:, :0], (X + 2)[:, :0], ""),
        (1.0000001, 1.0, ""),
        (2.0, 1.0, "the result is 2.0 instead of 1.0"),
        (2.0, np.float64(2.0), "the result is a float instead of a float64: 2.0"),
        (np.float32(1.00001), np.float32(1.0), ""),
        ((1 + 2.00001j), 1 + 2j, ""),
        ([1, 2, 3], [1, 2, 4], "output[2] is 3 instead of 4"),
        ([1, 2], [1.0, 2.0], "the result is a list of int instead of a list of float"),
        ([1.0], [1.0, 2.0], "the result has 1 numbers instead of 2"),
        ([], [1.0], "the result is a list instead of a list of float"),
        ([True, False], [True, True], "output[1] is 0 instead of 1"),
        ([1 << 80, 2], [1 << 80, 2], ""),
        ([math.nan, math.inf, 1.0], [math.nan, math.inf, 1.0], ""),
        ([*MANY, 1e-4 + 2e-6], [*MANY, 1e-4], ""),
        ([*MANY, 1.0], [*MANY, 1.0 + 2e-5], "output[16] is 1.0 instead of 1.00002"),
        ({3, 1, 2}, {1, 2, 3}, ""),
        ({3, 1, 2}, {1, 2, 4}, "output{2} is 3 instead of 4"),
        (["a" * 300 + "b"], ["a" * 300 + "b"], ""),
        (X.numpy() + 1, X.numpy() + 2, ""),
        (X.numpy() + 1, X + 1, "the result is numpy array float32 [3, 4] instead of float32 [3, 4]"),
        (X.numpy(), X.numpy() + 1, "the result is the memory of input 0"),
        (
            np.array(["a", "c"]),
            np.array(["a", "b"]),
            "the result is (dtype('<U1'), (2,), ['a', 'c']) instead of (dtype('<U1'), (2,), ['a', 'b'])",
        ),
        (np.array(["X", None], object), np.array(["X", 3], object), "output.flat[1] is None instead of 3"),
    ],
)
def test_a_result_of_another_structure_is_named(returned: Any, wanted: Any, told: str) -> None:
    assert difference(returned, wanted) == told


@pytest.mark.parametrize(
    ("returned", "wanted"),
    [
        ("a" * 300 + "b", "a" * 300 + "c"),
        (b"a" * 300 + b"b", b"a" * 300 + b"c"),
        (np.ma.masked_array(np.arange(5000)), np.ma.masked_array(np.arange(5000) // 4000)),
        (np.array(["a"] * 5000), np.array((["a"] * 2500 + ["b"]) * 2)[:5000]),
        ({float(number) for number in range(5000)}, {number + 0.5 * (number == 2500) for number in range(5000)}),
    ],
)
def test_what_differs_only_where_it_is_not_printed_is_another_result(returned: Any, wanted: Any) -> None:
    assert difference(wanted, wanted) == ""
    assert difference(returned, wanted)


@pytest.mark.parametrize(
    "array",
    [np.arange(6.0), np.arange(6.0)[::-1], np.array(3.0), np.frombuffer(b"abcd", np.uint8), np.ones(0)],
)
def test_a_numpy_array_is_looked_at_as_a_tensor_is(array: Any) -> None:
    """Also one that goes backwards, has no dimension, cannot be written or is empty."""
    leaves = structure.leaves(([array], {"a": array}))
    assert all(torch.equal(leaf, torch.tensor(array.tolist(), dtype=leaf.dtype)) for leaf in leaves)
    assert len(leaves) == len(structure.opened_leaves(([array], {"a": array}))) == 2


def told(returned: Any) -> tuple[bytes, bytes]:
    """What is said of a result's values as a call ends, and what follows from its description."""
    described, _ = structure.describe(returned, {})
    return structure.digest(returned), structure_text.digest(structure_text.read(structure.written(described)))


@pytest.mark.parametrize("returned", [X, (X, [X]), Pair(X, X), X.numpy(), [X.numpy(), X]])
def test_of_tensors_alone_no_values_are_told(returned: Any) -> None:
    assert set(told(returned)) == {structure_text.NO_VALUES}


@pytest.mark.parametrize("late", [1.0, [1.0], {}, {0.5: X}, "text", None, {1}, np.float32(1), (X, 1), [[]] * 2 + [1]])
def test_values_that_come_after_a_call_are_not_those_that_it_told(late: Any) -> None:
    found: list[Any] = []
    before, _ = told((X, found))
    found.append(late)
    at_once, described = told((X, found))
    assert at_once == described != before


@pytest.mark.parametrize("children", [{}, 5])
@pytest.mark.parametrize("value", [1.0, "text", [1.0, 2.0], {}])
def test_no_value_is_left_out_of_what_a_call_tells_by_calling_it_a_container(value: Any, children: Any) -> None:
    described, _ = structure.describe((X, value), {})
    node = structure_text.read(structure.written(described))
    node["children"]["[1]"]["children"] = {} if value == {} else children
    assert structure_text.difference(node, described) == ""
    assert structure_text.digest(node) != structure_text.NO_VALUES
    if value:
        other, _ = structure.describe((X, type(value)([3.0, 4.0]) if isinstance(value, list) else value * 2), {})
        other["children"]["[1]"]["children"] = children
        assert structure_text.digest(other) != structure_text.digest(node)


def test_a_result_that_is_filled_after_its_call_is_a_cheat() -> None:
    described, _ = structure.describe((X, MANY), {})
    text = structure.written(described)
    solution = CalledSolution(cast(Any, SimpleNamespace(processes=frozenset())), [], None, text)
    solution.read_results(structure.digest((X, MANY)))
    solution.look_at_structure(text.encode())
    solution.read_results(structure.digest((X, [])))
    with pytest.raises(SolutionFault, match="not there yet") as refused:
        solution.look_at_structure(text.encode())
    assert refused.value.fault.kind == verdict_pb2.FAILURE_KIND_CHEAT


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "[" * 100_000])
def test_a_description_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        structure_text.read(text)


def test_what_is_no_description_is_no_result() -> None:
    wanted, _ = structure.describe({"a": (X, 1)}, {})
    for node in ({"kind": "dict"}, {"kind": "dict", "children": {"['a']": 7}}, {"kind": "dict", "children": [1]}, 5):
        assert structure_text.difference(node, wanted)


def test_members_are_found_by_name_and_else_by_their_values() -> None:
    ones = torch.ones(4)
    wanted = {Key.parameter("w"): X, Key.parameter("n.weight"): ones, Key.state("n.mean"): torch.zeros(4)}
    own = {
        Key.parameter("inner.w"): X.clone(),
        Key.parameter("n.weight"): ones.clone(),
        Key.state("n.mean"): torch.zeros(4),
    }
    assert counterparts(wanted, own)[Key.parameter("w")].key == Key.parameter("inner.w")


def test_a_parameter_with_its_dimensions_in_another_order_is_one() -> None:
    found = counterparts({Key.parameter("w"): X}, own := {Key.parameter("packed"): X.t().contiguous()})[
        Key.parameter("w")
    ]
    found.of(own).copy_(X + 1)
    assert torch.equal(own[Key.parameter("packed")], (X + 1).t())


@pytest.mark.parametrize("own", [{}, {Key.parameter("g"): torch.ones(5)}, {Key.parameter("g"): torch.zeros(4)}])
def test_a_parameter_that_is_nowhere_is_named(own: dict[Key, torch.Tensor]) -> None:
    with pytest.raises(ProgramFault, match=r"lacks parameter n\.weight, float32 \[4\]") as refused:
        counterparts({Key.parameter("n.weight"): torch.ones(4)}, own)
    assert refused.value.kind == verdict_pb2.FAILURE_KIND_WRONG_SHAPE


def test_two_parameters_of_equal_values_need_two_counterparts() -> None:
    wanted = {Key.parameter("a"): torch.ones(4), Key.parameter("b"): torch.ones(4)}
    with pytest.raises(ProgramFault, match="lacks parameter b"):
        counterparts(wanted, {Key.parameter("c"): torch.ones(4)})


class Later(torch.Tensor):
    """A tensor of a kind of its own."""


def test_only_plain_tensors_are_results() -> None:
    refuse_promises([X, torch.nn.Parameter(X)])
    with pytest.raises(ProgramFault, match="Later"):
        refuse_promises([X.as_subclass(Later)])


@pytest.mark.parametrize(
    "result",
    [
        torch.rand(33, 70), torch.rand(()), torch.rand(0, 3), torch.rand(8, 9).t(), torch.rand(3, 1).expand(3, 8),
        torch.rand(4, 4, dtype=torch.complex64).conj(), torch.full((9,), torch.nan), torch.arange(40) > 7,
        torch.rand(4, 9).to(torch.float8_e4m3fn), torch.rand(5, 5).to_sparse(),
    ],
)  # fmt: skip
def test_a_result_that_stays_as_it_was_glimpsed_at_is_there(result: torch.Tensor) -> None:
    """Of every dtype and layout, with values that are not equal to themselves too."""
    assert all(map(torch.equal, glimpses({"a": result, "b": (result,)}), glimpses([result, result])))


def test_a_result_that_another_stream_writes_after_the_call_is_refused() -> None:
    """As on a GPU: the caller's next operation has read what was there before."""
    solution = object.__new__(Solution)
    solution._returned = [X + 1, X.clone()]
    solution._glimpses = glimpses(solution._returned)
    solution._refuse_unwaited()
    solution._returned[1][2, 3] = 0.5
    with pytest.raises(ProgramFault, match="another stream"):
        solution._refuse_unwaited()


def test_a_part_of_the_cache_that_is_kept_is_a_cheat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solution_worker, "_whole", integrity.Snapshot.taken())
    solution_worker.look_at_process()
    monkeypatch.setattr(integrity, "set_aside_bytes", lambda: 1 << 25)
    monkeypatch.setattr(solution_worker, "_whole", integrity.Snapshot.taken())
    with pytest.raises(ProgramFault, match="L2"):
        solution_worker.look_at_process()


def test_a_replaced_function_is_a_cheat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solution_worker, "_whole", integrity.Snapshot.taken())
    monkeypatch.setattr("torch.allclose", lambda *_: True)
    with pytest.raises(ProgramFault, match=r"replaces torch\.allclose"):
        solution_worker.look_at_process()


# ---- what the judge sees of a timed call ---------------------------------------------------------------------

EAGER = torch.linspace(1.0, 2.0, 5000)
YARD = Yardstick(rms=3e-8, worst=2e-7, judged=3e-8)


def changed(index: int, value: float) -> torch.Tensor:
    other = EAGER.clone()
    other[index] = value
    return other


@pytest.mark.parametrize(
    ("result", "told"),
    [
        (EAGER * (1 + 1e-7), ""),
        (EAGER.bfloat16().float(), "beyond any rounding"),
        (EAGER.half().float(), "beyond any rounding"),
        (changed(4321, 1.5), "element 4321"),
        (changed(7, float("nan")), "1 elements in being NaN"),
        (EAGER.flip(0), "beyond any rounding"),
    ],
)
def test_each_element_of_a_timed_call_is_looked_at(result: torch.Tensor, told: str) -> None:
    found = far(result, EAGER, YARD)
    assert told in found if told else found == ""


def test_sums_do_not_stand_for_elements() -> None:
    rows = torch.softmax(torch.randn(64, 128), dim=-1)
    assert far(torch.full_like(rows, 1 / 128), rows, yardstick(rows, rows.double(), 0.0))


def test_integers_are_equal_but_for_near_ties() -> None:
    indices = torch.arange(1000)
    assert far(indices, indices, Yardstick(0, 0, 0)) == ""
    assert "500 elements" in far(torch.where(indices % 2 == 0, indices, 0 * indices), indices, Yardstick(0, 0, 0))


def test_inputs_lie_in_their_layouts_with_gaps_around_them() -> None:
    named = {
        Key.input(0): torch.zeros(6, 5).t(),
        Key.input(1): torch.zeros(3, 1).expand(3, 4),
        Key.parameter("w"): torch.zeros(7),
    }
    regions, gaps, total = lay_out(named, 10)
    assert [list(region.spec.strides) for region in regions] == [[1, 5], [1, 0], [1]]
    assert [Key.of(gap) for gap in gaps] == [Key.input(position) for position in (0, 0, 1, 1)]
    taken = sorted([(r.offset_bytes, 4 * s) for r, s in zip(regions, (30, 3, 7), strict=True)])
    taken += [(gap.offset_bytes, GAP_BYTES) for gap in gaps]
    taken.sort()
    assert all(start + size <= after for (start, size), (after, _) in itertools.pairwise(taken))
    assert taken[0][0] >= 10
    assert taken[-1][0] + taken[-1][1] <= total
    assert gaps[1].offset_bytes == regions[0].offset_bytes + 120  # with the byte behind the last element
