"""What runs of other tasks found for groups: what is kept, where, and what a new run makes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from orchestrator import testing
from orchestrator.archive import Archive
from orchestrator.search import memory
from orchestrator.search.beam import Beam
from orchestrator.search.memory import Memory
from orchestrator.search_run import SearchRun
from orchestrator.serving.device_gate import DeviceGate
from orchestrator.walks import Effort
from warpsmith.v1 import analysis_pb2, run_pb2, synthesis_service_pb2, task_pb2, trial_pb2

AUTHOR, SET, LAYOUT, LAUNCH = (
    analysis_pb2.MOVE_KIND_AUTHOR, analysis_pb2.MOVE_KIND_SET, analysis_pb2.MOVE_KIND_LAYOUT,
    analysis_pb2.MOVE_KIND_LAUNCH,
)  # fmt: skip
BLOCK = analysis_pb2.Move(kind=SET, choice="reduce=split", arguments={"block": 256})
LANES = analysis_pb2.Move(kind=SET, arguments={"lanes": 32})


def move(kind: analysis_pb2.MoveKind.ValueType, group: str, *also: str, choice: str = "") -> analysis_pb2.Move:
    return analysis_pb2.Move(kind=kind, group=group, also=also, choice=choice)


def on(setting: analysis_pb2.Move, group: str, *also: str) -> analysis_pb2.Move:
    made = move(SET, group, *also)
    made.MergeFrom(setting)
    return made


def group(name: str, form: str, schedule: str = "row_reduction") -> analysis_pb2.Group:
    return analysis_pb2.Group(name=name, form=form, schedule=schedule)


def known(form: str, *settings: analysis_pb2.Move, ns: float = 1000.0) -> analysis_pb2.KnownGroup:
    return analysis_pb2.KnownGroup(form=form, schedule="row_reduction", settings=settings, median_ns=ns)


def test_settings_of_a_winner_are_kept_by_what_its_groups_compute() -> None:
    best = trial_pb2.Trial()
    best.candidate.moves.extend([
        on(LANES, "norm"), move(AUTHOR, "norm"), on(BLOCK, "norm", "norm_1"), on(LANES, "norm"), move(AUTHOR, "plain"),
        on(LANES, "untimed"),
    ])  # fmt: skip
    for name, ns in (("norm", 500.0), ("norm", 40.0), ("norm_1", 600.0), ("plain", 100.0)):
        best.timing.steps.add(group=name, median_ns=ns)
    made = analysis_pb2.Analysis(
        groups=[group("norm", "a"), group("norm_1", "a"), group("plain", "b"), group("untimed", "c")]
    )
    assert memory.learned(best, made) == [known("a", BLOCK, LANES, ns=540.0)], (
        "since it was authored; the faster of two"
    )


def test_groups_of_known_forms_are_set_together_and_others_left_alone() -> None:
    groups = [group("x", "a"), group("y", "b"), group("z", "a"), group("w", "c", "column_reduction")]
    moves, count = memory.settings_for(groups, {"a": known("a", BLOCK, LANES), "c": known("c", LANES)})
    assert moves == [on(BLOCK, "x", "z"), on(LANES, "x", "z")]
    assert count == 2
    assert memory.settings_for(groups, {}) == ([], 0)


def test_a_whole_plan_is_made_of_the_first_move_of_each_kind_in_the_order_in_which_they_go_together() -> None:
    offered = [
        move(AUTHOR, "norm"), move(LAUNCH, "*"), move(AUTHOR, "*", choice="beside_products"), move(AUTHOR, "*"),
        move(LAYOUT, "*"),
    ]  # fmt: skip
    legal = [analysis_pb2.LegalMove(move=each) for each in offered]
    assert memory.whole_plan(legal) == [offered[4], offered[2], offered[1]]
    assert memory.whole_plan(legal[:2]) == []


def test_the_archive_gives_the_fastest_of_each_form_on_the_device_and_follows_what_a_run_says(
    database_url: str,
) -> None:
    archive = Archive(database_url)
    for number, device, ns in ((1, "H200", 900.0), (2, "H200", 500.0), (3, "H100", 100.0)):
        run = run_pb2.Run(id=f"r{number}", created_at=number)
        run.device.name = device
        archive.put_run(run)
        run.learned.append(known("a", BLOCK, ns=ns))
        archive.put_run(run)
        archive.put_run(run)
    assert archive.known_groups("H200", ["a", "b", "a"]) == {"a": known("a", BLOCK, ns=500.0)}
    assert archive.known_groups("H200", []) == {}
    assert archive.run("r2").learned[0].form == "a"
    archive.close()


class Network(testing.World):
    """A module whose whole plan has a group of a known form."""

    def AnalyzePlan(
        self, request: synthesis_service_pb2.AnalyzePlanRequest, /, timeout: float | None = None
    ) -> synthesis_service_pb2.AnalyzePlanResponse:
        """As the world's, with that."""
        response = super().AnalyzePlan(request, timeout)
        if not request.moves:
            response.analysis.legal_moves.add().move.CopyFrom(move(AUTHOR, "*"))
        if any(each.group == "*" for each in request.moves):
            response.analysis.groups.extend([group("norm", "a"), group("other", "b")])
        return response


def test_a_run_begins_with_what_other_tasks_found_for_its_groups_and_keeps_what_it_finds() -> None:
    asked: list[tuple[str, Sequence[str]]] = []

    def groups(device: str, forms: Sequence[str]) -> Mapping[str, analysis_pb2.KnownGroup]:
        asked.append((device, [form for form in forms if form]))
        return {"a": known("a", BLOCK)}

    seen: list[trial_pb2.Trial] = []

    class Notebook:
        def run_changed(self, run: run_pb2.Run) -> None:
            """Of no interest."""

        def trial_ended(self, trial: trial_pb2.Trial) -> None:
            seen.append(trial)

    world = Network(gains={"author": 2.0, "reduce": 1.5})
    agents = world.agents()
    run = run_pb2.Run(
        id="r", task=testing.task(target=task_pb2.TARGET_CPU), budget=run_pb2.Budget(wall_seconds=20, trial_count=4)
    )
    effort = Effort(parallel_trials=1, retry_pause_seconds=0.0, settle_seconds=5.0)
    SearchRun(run, agents, DeviceGate(agents.benchmarks), Beam(), Notebook(), Memory(groups=groups), effort).execute()
    assert asked
    assert asked[0][1] == ["a", "b"]
    (first,) = (trial for trial in seen if trial.hypothesis.source == "archive")
    assert list(first.candidate.moves) == [move(AUTHOR, "*"), on(BLOCK, "norm")]
    assert first.hypothesis.rationale == "settings that other tasks found best for 1 of 3 groups"
