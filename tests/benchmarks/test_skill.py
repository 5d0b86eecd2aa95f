"""Replays on a recorded landscape: all is real but the verdicts and times, which come from the file."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.search import landscape_file, landscapes, skill, skill_picture, skill_tasks
from warpsmith.v1 import analysis_pb2, graph_pb2, task_pb2, timing_pb2

TINY = Path(__file__).parent / "tiny_landscape.jsonl"


@pytest.fixture(scope="module")
def tiny() -> landscape_file.Landscape:
    """One task of the landscapes of an H200, with its first plans."""
    return landscape_file.read([TINY])[0]


@pytest.fixture(scope="module")
def plans(tiny: landscape_file.Landscape, tmp_path_factory: pytest.TempPathFactory) -> Iterator[skill.Plans]:
    made = skill.Plans(tiny, tmp_path_factory.mktemp("plans"))
    yield made
    made.close()


def walked(tiny: landscape_file.Landscape, plans: skill.Plans, strategy: str, trials: int = 12) -> list[float]:
    search = skill.seeded(strategy, 1)[0]
    return skill.replay(tiny, plans, skill.reasoning("roofline"), search, trials, at_once=4)[0]


@pytest.mark.parametrize("strategy", ["beam", "random"])
def test_a_search_replays_on_a_landscape_and_gives_the_same_curve_again(
    tiny: landscape_file.Landscape, plans: skill.Plans, strategy: str
) -> None:
    shares = walked(tiny, plans, strategy)
    assert len(shares) == 12
    assert shares == sorted(shares)
    assert 0 < shares[0] < shares[-1] <= 1
    assert walked(tiny, plans, strategy) == shares


def test_beam_comes_within_five_percent_of_the_best_in_a_few_trials(
    tiny: landscape_file.Landscape, plans: skill.Plans
) -> None:
    assert skill.Replay("tiny", "beam", walked(tiny, plans, "beam"), 0).trials <= 8


def test_a_plan_that_was_not_recorded_is_refused_and_counted(tiny: landscape_file.Landscape, tmp_path: Path) -> None:
    few = landscape_file.Landscape(tiny.task, tiny.graph, tiny.device, eager_ns=tiny.eager_ns, floor_ns=tiny.floor_ns)
    few.plans = dict(list(tiny.plans.items())[:3])
    plans = skill.Plans(few, tmp_path)
    shares, outside = skill.replay(few, plans, skill.reasoning("roofline"), skill.seeded("random", 1)[0], 6, 4)
    plans.close()
    assert outside > 0
    assert shares[-1] == 1.0


def test_a_landscape_survives_its_file(tmp_path: Path) -> None:
    file = tmp_path / "landscapes.jsonl"
    task = task_pb2.Task(name="t", target=task_pb2.TARGET_CPU)
    kept = landscape_file.Landscape(task, graph_pb2.Graph(output_tree="x"), timing_pb2.Device(name="d"))
    fuse = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_FUSE, group="a", choice="b")
    threads = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_SET, group="a", arguments={"threads": 4})
    landscape_file.append(file, landscape_file.task_line(kept))
    for plan in (
        landscape_file.Plan("p0", "q0", "", [], "PASS", 1.0, 900.0),
        landscape_file.Plan("p1", "q1", "p0", [fuse], "PASS", 2.0, 450.0),
        landscape_file.Plan("p2", "q2", "p1", [threads], "WRONG_VALUE"),
    ):
        landscape_file.append(file, landscape_file.plan_line("t", plan, 900.0, 100.0))
    with file.open("a") as output:
        output.write('{"task":"t","plan":"cut sh')
    (found,) = landscape_file.read([file])
    assert (found.task, found.graph, found.device) == (kept.task, kept.graph, kept.device)
    assert (found.eager_ns, found.floor_ns, found.best) == (900, 100, 2.0)
    assert found.path("p2") == [fuse, threads]
    assert [plan.passed for plan in found.plans.values()] == [True, True, False]
    assert landscape_file.verdict_of(found.plans["p2"]).detail == "recorded"


def test_a_survey_never_takes_the_same_step_twice_and_knows_the_fastest() -> None:
    task = task_pb2.Task(name="t", target=task_pb2.TARGET_CPU)
    landscape = landscape_file.Landscape(task, graph_pb2.Graph(), timing_pb2.Device())
    landscape.plans["zero"] = landscape_file.Plan("zero", "zero", "", [], "PASS", 1.0)
    author = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group="a")
    landscape.plans["fast"] = landscape_file.Plan("fast", "fast", "zero", [author], "PASS", 3.0)
    frontier = landscapes.Frontier(landscape, random.Random(0))
    moves = [analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_SET, group="a", arguments={"threads": n}) for n in range(3)]
    frontier.legal = {"zero": [author], "fast": moves}
    assert frontier.parents()[1] == "fast"
    assert frontier.step("zero") == []
    taken = [frontier.step("fast")[0].arguments["threads"] for _ in moves]
    assert sorted(taken) == [0, 1, 2]
    assert frontier.step("fast") == []


def test_numbers_of_a_replay_are_gap_area_and_trials() -> None:
    found = skill.Replay("t", "beam", [0.5, 0.5, 0.96, 1.0], 0)
    assert (found.gap, found.trials, found.area) == (0.0, 3, 0.74)
    lost = skill.Replay("t", "random", [0.5, 0.5, 0.5, 0.8], 2)
    assert lost.gap == pytest.approx(0.25)
    assert math.isinf(lost.trials)
    said = "\n".join(skill.bars([found, skill.Replay("u", "beam", [0.5, 0.5, 0.5, 0.8], 0), lost], 4))
    assert "over beam's: 2.0x (bar 1.5x)" in said


def test_every_task_is_for_tuning_or_held_out() -> None:
    made = []
    for name in skill_tasks.modules():
        task = task_pb2.Task(name=name, target=task_pb2.TARGET_CUDA)
        landscape = landscape_file.Landscape(task, graph_pb2.Graph(), timing_pb2.Device())
        landscape.plans["p"] = landscape_file.Plan("p", "p", "", [], "PASS", 2.0)
        made.append(landscape)
    parts = [{each.task.name for each in skill.chosen(made, part, [])} for part in ("tuning", "held-out")]
    assert [len(part) for part in parts] == [16, 8]
    assert not parts[0] & parts[1]


def test_the_picture_is_an_svg_with_every_curve_named() -> None:
    drawn = skill_picture.picture(
        [skill_picture.Curve("beam", [0.5, 1.0]), skill_picture.Curve("random", [0.4, 0.6])], "t"
    )
    root = ElementTree.fromstring(drawn)
    assert len(root.findall("{*}polyline")) == 2
    assert {"beam", "random", "t"} <= {text.text for text in root.findall("{*}text")}
