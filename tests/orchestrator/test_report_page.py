"""A report as HTML: what it says of every state, that words of others stay words, that it is sound and light."""

from __future__ import annotations

import base64
import json
import random
import re
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import pytest

from orchestrator import testing
from orchestrator.commands import report
from orchestrator.pages import explained, rendering, report_page, roofline, scales, searched, source, steps
from warpsmith.contract import words
from warpsmith.v1 import analysis_pb2, run_pb2, timing_pb2, trial_pb2, verdict_pb2

STRANGE = (-1.0, float("nan"), float("inf"), float("-inf"), 5e-324, 1e308)
VOID = frozenset({"meta", "input", "br", "link", "img"})
HOSTILE = "</script></title><img src=x onerror=alert(1)>\x1b[2K\u202e\"'{{ 7 * 7 }}"
ALONE = frozenset({"script", "img", "link", "iframe", "object", "embed", "form", "base"})
"""Elements that a page of ours never has: each would run or ask for something."""


class Read(HTMLParser):
    """A page as a reader's program takes it in. Elements that are not closed in order fail at once."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.pieces: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "td":
            self.pieces.append(" ")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.pieces.append(data)

    @property
    def text(self) -> str:
        """What is read, on one line."""
        return " ".join("".join(self.pieces).split())

    def attributes(self, name: str) -> list[str]:
        """Every value of an attribute."""
        return [given[name] for _, given in self.tags if name in given]


def filled(message: Any, text: str, depth: int = 0) -> Any:
    """The message with the text in every string, and an element in every list that has none."""
    for field in message.DESCRIPTOR.fields:
        if field.message_type is not None:
            if field.message_type.GetOptions().map_entry:
                continue
            held = getattr(message, field.name)
            if field.is_repeated:
                for each in held if len(held) or depth > 4 else [held.add()]:
                    filled(each, text, depth + 1)
            elif depth < 5:
                filled(held, text, depth + 1)
        elif field.type == field.TYPE_STRING and not field.has_options:
            if field.is_repeated:
                getattr(message, field.name).append(text)
            else:
                setattr(message, field.name, text)
    return message


def test_the_answer_comes_first_with_its_interval_and_what_was_checked(
    ended: tuple[run_pb2.Run, list[trial_pb2.Trial]],
) -> None:
    read = Read(report_page.html(*ended))
    text = read.text
    told = [
        "PASS 1.92x as fast as the fastest baseline, compile",
        "1.92x [1.90, 1.94]",
        "What was checked",
        "Every arm",
    ]
    told += ["Roofline", "Steps of eager and of ours", "Best over time", "The search", "Its moves", "Raw data"]
    places = [text.index(each) for each in told]
    assert places == sorted(places)
    assert "out becomes a kernel of ours" in text
    assert "KernelBench's own check holds" in text
    assert "--record" in text


@pytest.mark.parametrize("state", [value for value in run_pb2.RunState.values() if value])
@pytest.mark.parametrize("known", ["nothing", "baselines"])
def test_a_run_of_every_state_has_its_page(state: run_pb2.RunState.ValueType, known: str) -> None:
    run = run_pb2.Run(id="r1", task=testing.task("softmax"), state=state, message="as it <is>")
    if known == "baselines":
        run.reference.arms.add(kind=timing_pb2.ARM_KIND_EAGER, median_ns=1500)
        run.reference.arms.add(kind=timing_pb2.ARM_KIND_COMPILE, failure="no compiler")
    text = Read(report_page.html(run, [])).text
    assert f"{words.run_state(state)} " in text
    assert "as it <is>" in text
    assert "No trial has ended." in text
    assert ("What would help" in text) is (state != run_pb2.RUN_STATE_FASTER)
    assert "--record" not in text, "there is none"
    assert ("no compiler" in text) is (known == "baselines")


def test_a_busy_machine_is_named_where_nothing_faster_was_found(
    ended: tuple[run_pb2.Run, list[trial_pb2.Trial]],
) -> None:
    run, trials = ended
    run.state, run.best.timing.faster, run.best.timing.noise_floor = run_pb2.RUN_STATE_NO_FASTER, False, 0.2
    text = Read(report_page.html(run, trials)).text
    assert "NO_FASTER No faster kernel was found." in text
    assert "even equal programs differ by 20.0%" in text
    run.best.timing.noise_floor = float("inf")
    text = Read(report_page.html(run, trials)).text
    assert "even equal programs" not in text
    assert "inf" not in text


def test_a_run_that_ended_at_the_floor_says_how_near_its_baseline_is() -> None:
    run = run_pb2.Run(id="r1", task=testing.task("softmax"), state=run_pb2.RUN_STATE_AT_FLOOR)
    run.reference.MergeFrom(timing_pb2.ReferenceReport(floor_ns=970, fastest_arm=timing_pb2.ARM_KIND_EAGER))
    run.reference.arms.add(kind=timing_pb2.ARM_KIND_EAGER, median_ns=1000)
    text = Read(report_page.html(run, [])).text
    assert "AT_FLOOR The module is already about as fast as this machine allows." in text
    assert "Of the floor 97 %" in text


def test_every_word_of_the_contract_that_a_report_may_show_is_explained() -> None:
    for flag in filter(None, timing_pb2.Flag.values()):
        assert explained.label(words.flag(timing_pb2.Flag.ValueType(flag))), flag
    for kind in filter(None, timing_pb2.ArmKind.values()):
        assert kind in explained.ARMS
    for state in filter(None, run_pb2.RunState.values()):
        assert state == run_pb2.RUN_STATE_FASTER or words.run_state(state) in explained.VERDICTS
    for kind in filter(None, analysis_pb2.MoveKind.values()):
        move = analysis_pb2.Move(kind=analysis_pb2.MoveKind.ValueType(kind), group="softmax", choice="row")
        assert explained.move(move) != words.move(move)
    launched = (
        explained.move(analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_LAUNCH, group="*", choice=choice))
        for choice in ("cuda_graph", "together", "apart")
    )
    assert len({*launched}) == 3


@pytest.mark.parametrize(
    "label", ["algebra:linear_row_sum", "tf32", "prepared", report.KEPT, "kernelbench_check_fails"]
)
def test_every_label_is_told_in_plain_words(label: str) -> None:
    assert explained.label(label)


def test_words_of_others_stay_words(ended: tuple[run_pb2.Run, list[trial_pb2.Trial]]) -> None:
    run, trials = ended
    filled(run, HOSTILE)
    run.plugins[HOSTILE] = run.plugins["reasoner"] = HOSTILE
    run.stage_seconds[HOSTILE] = 1.0
    for trial in trials:
        filled(trial, HOSTILE)
        trial.hypothesis.new_move_count = 1
        move = trial.candidate.moves.add(kind=analysis_pb2.MOVE_KIND_SET, group=HOSTILE, choice=HOSTILE)
        move.arguments[HOSTILE] = 1
    trials[-1].ended_at = trial_pb2.STAGE_VERIFY
    html = report_page.html(run, trials)
    read = Read(html)
    assert not ALONE & {tag for tag, _ in read.tags}
    assert not [name for _, given in read.tags for name in given if name.startswith("on")]
    assert not {"\x1b", "\u202e"} & set(html)
    assert read.text.count("<img src=x onerror=alert(1)>") > 30
    assert "49" not in re.findall(r"\b49\b", read.text)


def strange(message: Any, chance: random.Random) -> None:
    """Sets some of the numbers of a message to ones that no measurement gives."""
    for field, held in message.ListFields():
        if field.message_type is not None:
            if not field.message_type.GetOptions().map_entry:
                for each in held if field.is_repeated else [held]:
                    strange(each, chance)
        elif field.type == field.TYPE_DOUBLE and not field.is_repeated and chance.random() < 0.2:
            setattr(message, field.name, chance.choice(STRANGE))


def test_numbers_that_no_measurement_gives_have_their_page(
    ended: tuple[run_pb2.Run, list[trial_pb2.Trial]],
) -> None:
    for seed in range(40):
        chance, run = random.Random(seed), run_pb2.Run.FromString(ended[0].SerializeToString())
        trials = [trial_pb2.Trial.FromString(trial.SerializeToString()) for trial in ended[1]]
        for message in (run, *trials):
            strange(message, chance)
        run.created_at = 1.0  # the archive keeps no other
        read = Read(report_page.html(run, trials))
        names = ("x", "y", "cx", "cy", "width", "points", "x1", "y1")
        places = [value for name in names for value in read.attributes(name)]
        assert places
        assert not re.findall("nan|inf", " ".join(places)), seed


def test_a_page_asks_for_nothing_and_runs_nothing(ended: tuple[run_pb2.Run, list[trial_pb2.Trial]]) -> None:
    html = report_page.html(*ended)
    read = Read(html)
    assert not ALONE & {tag for tag, _ in read.tags}
    assert not read.attributes("src") + read.attributes("style")
    assert all(place.startswith(("#", "data:application/json;base64,")) for place in read.attributes("href"))
    assert not re.findall(r"https?://|url\(|@import", html)
    (policy,) = (given["content"] for tag, given in read.tags if "http-equiv" in given)
    assert policy.startswith("default-src 'none'; style-src 'sha256-")


def test_headings_are_in_order_and_tables_and_pictures_have_names(
    ended: tuple[run_pb2.Run, list[trial_pb2.Trial]],
) -> None:
    read = Read(report_page.html(*ended))
    levels = [int(tag[1]) for tag, _ in read.tags if re.fullmatch("h[1-6]", tag)]
    assert levels.count(1) == 1
    assert all(later - earlier <= 1 for earlier, later in pairwise(levels))
    tags = [tag for tag, _ in read.tags]
    assert tags.count("table") == tags.count("caption") > 3
    assert all("scope" in given for tag, given in read.tags if tag == "th")
    identifiers = read.attributes("id")
    assert len(identifiers) == len(set(identifiers))
    pictures = [given for tag, given in read.tags if tag == "svg"]
    assert len(pictures) == 4
    for given in pictures:
        assert given["role"] == "img"
        assert set(given["aria-labelledby"].split()) <= set(identifiers)
    assert {place[1:] for place in read.attributes("href") if place.startswith("#")} <= set(identifiers)


def test_a_report_of_500_trials_is_light(long_search: tuple[run_pb2.Run, list[trial_pb2.Trial]]) -> None:
    run, trials = long_search
    run.best.candidate.program.sources[0].text = "float row[4] = {1.0f, 2.0f}; // of a row\n" * 10_000
    html = report_page.html(run, trials)
    read = Read(html)
    assert read.text.count("It grew from #") == 499
    assert len(html.encode()) < 2_000_000
    assert "characters are left out" in read.text


def test_the_raw_data_is_what_the_command_prints_and_every_trial(
    ended: tuple[run_pb2.Run, list[trial_pb2.Trial]],
) -> None:
    run, trials = ended
    (link,) = (place for place in Read(report_page.html(run, trials)).attributes("href") if place.startswith("data:"))
    held = json.loads(base64.b64decode(link.partition(",")[2]))
    assert held["tasks"] == [report.as_json(run)]
    assert [each["number"] for each in held["trials"]] == [trial.number for trial in trials]


# ---- parts ---------------------------------------------------------------------------------------------------------


def test_a_tree_of_any_depth_is_shown_and_no_trial_is_lost() -> None:
    chain = [trial_pb2.Trial(number=number, parent=number - 1) for number in range(1, 2001)]
    chain.append(trial_pb2.Trial(number=2001, parent=2001))
    chain[1999].ended_at = trial_pb2.STAGE_TIMED
    roots = searched.tree(chain, best=2000)
    assert [node.number for node in roots] == [1, 2001]
    assert roots[0].leads_to_timed
    assert not roots[1].leads_to_timed
    level, found = roots, 0
    for depth in range(searched.MOST_LEVELS):
        found += len(level)
        level = [child for node in level for child in node.children]
        assert bool(level) is (depth + 1 < searched.MOST_LEVELS)
    assert found == 2001


def test_a_branch_that_ended_says_why_in_the_line_that_is_always_seen() -> None:
    verdict = verdict_pb2.Verdict(kind=verdict_pb2.FAILURE_KIND_WRONG_VALUE, detail="5 times as far off as PyTorch.")
    trial = trial_pb2.Trial(number=2, parent=1, verdict=verdict, ended_at=trial_pb2.STAGE_VERIFY)
    (node,) = searched.tree([trial], best=0)
    assert node.ended == "was not right (WRONG_VALUE)"
    assert node.told == "It ended because of this: 5 times as far off as PyTorch. It grew from #1."


def test_the_best_so_far_never_falls() -> None:
    trials = [trial_pb2.Trial(number=number, ended_at=trial_pb2.STAGE_TIMED) for number in range(1, 5)]
    for trial, speedup in zip(trials, (0.5, 2.0, 1.0, 3.0), strict=True):
        trial.timing.speedup_fastest.median = speedup
    picture = searched.progress([*trials, trial_pb2.Trial(number=9, ended_at=trial_pb2.STAGE_COMPILE)])
    assert picture is not None
    assert picture.rows == [(1, "0.50x"), (2, "2.00x"), (4, "3.00x")]
    heights = [float(point.partition(",")[2]) for point in picture.steps.split()]
    assert heights == sorted(heights, reverse=True), "pixels count from the top"
    assert searched.progress([trial_pb2.Trial(number=1)]) is None


def test_eager_is_shared_out_by_the_work_of_its_calls_and_said_to_be_so(
    ended: tuple[run_pb2.Run, list[trial_pb2.Trial]],
) -> None:
    run, trials = ended
    run.device.launch_ns = 0
    groups = trials[0].candidate.analysis.groups
    groups.add(name="mul", operations=["aten.mul.Tensor"], cost=analysis_pb2.Cost(read_bytes=6 * 10**6))
    line = steps.of(run, trials)
    assert line is not None
    eager, ours = line.lanes
    assert [part.time for part in eager.parts] == ["250 us", "750 us"]
    assert (eager.is_measured, ours.is_measured) == (False, True)
    small, large = eager.segments
    assert small.width * 3 == pytest.approx(large.width, abs=3)
    assert (small.text, large.text) == ("aten.softmax: 250 us", "aten.mul.Tensor: 750 us")


def test_steps_too_short_to_be_seen_are_drawn_together_and_all_counted(
    ended: tuple[run_pb2.Run, list[trial_pb2.Trial]],
) -> None:
    run, trials = ended
    del run.best.timing.steps[:]
    for number in range(3000):
        engine = analysis_pb2.ENGINE_AUTHORED if number % 5 else analysis_pb2.ENGINE_LIBRARY
        run.best.timing.steps.add(name=f"k{number}", computed_by=engine, median_ns=100 + number % 5)
    line = steps.of(run, trials)
    assert line is not None
    ours = line.lanes[-1]
    assert len(ours.parts) == steps.MOST_STEPS
    assert ours.left_out == 3000 - steps.MOST_STEPS
    assert 100 < len(ours.segments) < 600
    assert sum(int(each.text.split()[0]) for each in ours.segments) == 3000
    assert {each.by for each in ours.segments} == {"authored"}, "four of five steps are"


def test_marks_stand_under_the_roof_where_their_rates_are(
    ended: tuple[run_pb2.Run, list[trial_pb2.Trial]],
) -> None:
    run, trials = ended
    roof = roofline.of(run, trials)
    assert roof is not None
    assert roof.bound == "memory"
    # 2 MB at 20 GB/s take 100 us; eager takes 1 ms.
    assert {mark.name: mark.of_roof for mark in roof.marks}["eager"] == "10 %"
    assert roof.marks[0].name == "ours"
    assert roof.marks[0].y < roof.marks[-1].y, "pixels count from the top"
    for strange_rate in (float("inf"), 1.5e-12, 0.0):
        run.device.copy_bytes_per_second = strange_rate
        assert roofline.of(run, trials) is None


def test_an_axis_has_round_ticks_and_holds_what_is_outside_at_its_edge() -> None:
    axis = scales.Axis(0, 10, 100, 200)
    assert [tick.at for tick in axis.ticks(str)] == [100, 120, 140, 160, 180, 200]
    assert (axis.at(-5), axis.at(50), axis.at(float("nan"))) == (100, 200, 100)
    logarithmic = scales.Axis(1, 1000, 0, 300, is_log=True)
    assert [logarithmic.at(value) for value in (1, 10, 100, 1000)] == [0, 100, 200, 300]
    assert scales.from_zero(float("inf"), 0, 1).high == 1.0


def test_a_source_has_colours_and_every_character() -> None:
    text = '#include <x>\n__global__ void k(float* a) { a[0] = 1.5e-3f; /* "no" */ auto s = "<b>\\""; } // end\n'
    run = run_pb2.Run()
    run.best.candidate.program.sources.add(name="kernel.cu", text=text)
    program = source.program(run)
    assert program is not None
    read = Read(f"<pre>{program.sources[0].html}</pre>")
    assert "".join(read.pieces) == text
    assert {"k", "kt", "nf", "m", "mi", "c1", "cm", "cp", "s"} & set(read.attributes("class")) >= {"k", "kt", "nf", "s"}


@pytest.mark.parametrize(
    "text", ["int f(a)" + " " * 60_000 + "x", "/*" * 30_000, '"\\' * 30_000, "a::" * 20_000, "'" * 60_000]
)
def test_no_source_is_gone_over_again_and_again(text: str) -> None:
    """Pygments' own lexer needs a minute and more for the first, so the suite's limit would end it."""
    assert "".join(value for _, value in source.DeviceLexer(stripnl=False).get_tokens(text)).strip() == text


def test_every_colour_of_text_stands_out_from_its_ground_in_light_and_in_dark() -> None:
    style = (rendering.TEMPLATES / rendering.STYLESHEET).read_text()
    pairs = {
        name: (light, dark) for name, light, dark in re.findall(r"--(\w+): light-dark\((#\w{6}), (#\w{6})\);", style)
    }
    assert len(pairs) == style.count("light-dark(")
    marks = {"ours": 3.0, "baseline": 3.0, "line": 1.0}
    """Of what is no text, for which 3:1 is asked; a line of a table carries nothing."""
    for theme in (0, 1):
        for ground in ("ground", "panel"):
            for name in pairs.keys() - {"ground", "panel"}:
                ratio = contrast(pairs[name][theme], pairs[ground][theme])
                assert ratio >= marks.get(name, 4.5), (name, ground, theme, ratio)
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


def contrast(left: str, right: str) -> float:
    """Of two colours, as WCAG 2 has it."""
    dark, light = sorted((luminance(left), luminance(right)))
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    shares = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
