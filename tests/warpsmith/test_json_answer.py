"""What counts in an answer: not thoughts, not drafts, and no more time than its length allows."""

from __future__ import annotations

import json
import time

import pytest

from warpsmith.models.json_answer import last_object, whole_items, without_thoughts
from warpsmith.models.language_model import Answer

KERNEL = "for (int i = 0; i < n; ++i) { if (x[i] > 0) { y[i] = { x[i] }; } }\n"


@pytest.mark.parametrize("mark", ["</think>", "</thinking>", "[/THINK]"])
def test_what_stands_before_the_last_thoughts_end_is_not_read(mark: str) -> None:
    assert without_thoughts(Answer(f"a {mark} b {mark} c", is_cut_off=False)) == " c"


def test_an_answer_cut_off_in_its_thoughts_has_said_nothing_and_a_whole_one_all_of_it() -> None:
    text = 'First. <think>{"a": 1}'
    assert without_thoughts(Answer(text, is_cut_off=True)) == "First. "
    assert without_thoughts(Answer(text, is_cut_off=False)) == text


def test_the_last_fitting_object_wins_over_drafts() -> None:
    text = 'Perhaps {"a": 1}, or {"b": 2}. No: {"a": {"a": 3}, "c": 4}. That is {"d": 5}.'
    assert last_object(text, "a") == {"a": {"a": 3}, "c": 4}
    assert last_object(text, "a", "b", "d") == {"d": 5}
    assert last_object(text, "e") is None


def test_any_count_of_braces_of_a_program_hides_no_answer() -> None:
    for text in (f'{KERNEL * 100}{{"a": 1}}', f'{{"a": 1}} because of\n{KERNEL * 100}'):
        assert last_object(text, "a") == {"a": 1}


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ('{"a": [{"b": [1]}, {"b": {"c": "}"}}, {"b": 3', [{"b": [1]}, {"b": {"c": "}"}}]),
        ('{"a": [{"b": 1}]} or {"a" : [ {"b": 2} , ', [{"b": 2}]),
        ('{"a": [{"b": 1}], "c": [{"b": 2}, {', [{"b": 1}]),
        ('{"a": [1, {"b": 1}, [2], {"b": 3}, 4', [{"b": 1}, {"b": 3}]),
        ('{"a": [{"b": 1', []),
        ('{"a": {"b": 1}', []),
        ("a", []),
    ],
)
def test_of_a_list_that_was_cut_off_whole_objects_are_read(text: str, items: list[object]) -> None:
    assert whole_items(text, "a") == items


@pytest.mark.parametrize(
    "unit", ["{", '{"', '{"a":', '{"a": [0, ', '{"a": "', "[", '{"a": 1}', '{"b": 1} ', '{"a": {}, "b": ', "\\", "9"]
)
def test_reading_takes_time_that_grows_with_the_length_and_no_faster(unit: str) -> None:
    begin = time.thread_time()
    last_object(unit * ((256 << 10) // len(unit)), "a")
    whole_items('{"a": [' + '{"b": 1} ' * 30_000 + unit * ((256 << 10) // len(unit)), "a")
    last_object('{"a":' * 100 + json.dumps([0] * 80_000), "a")
    assert time.thread_time() - begin < 2.0
