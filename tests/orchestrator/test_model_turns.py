"""A language model in a run: its kernels are tried, and its absence is shown, waited out and no reason to stop."""

from __future__ import annotations

import dataclasses
import io
import threading
from collections.abc import Mapping, Sequence

from prometheus_client import REGISTRY
from rich.console import Console

from orchestrator import testing
from orchestrator.commands.progress import Progress
from orchestrator.model_turns import Absence, asks_model, was_answered, with_write
from orchestrator.search import Search
from orchestrator.search.beam import Beam
from orchestrator.search_run import SearchRun
from orchestrator.serving.device_gate import DeviceGate
from orchestrator.walks import Effort
from warpsmith.errors import ModelFault, ModelReason, NotFound
from warpsmith.v1 import (
    analysis_pb2,
    hypothesis_pb2,
    reasoning_service_pb2,
    run_pb2,
    synthesis_service_pb2,
    timing_pb2,
    trial_pb2,
    verdict_pb2,
)

EFFORT = Effort(parallel_trials=2, retry_pause_seconds=0.0, settle_seconds=5.0, model_rest_seconds=0.05)
AWAY = "the model server at http://127.0.0.1:8000/v1: nothing answers there"
WAITING, SEARCHING = run_pb2.RUN_STATE_WAITING_LLM, run_pb2.RUN_STATE_SEARCHING


@dataclasses.dataclass
class WritingWorld(testing.World):
    """A fake world whose synthesizer writes kernels when its model's server is up."""

    gains: Mapping[str, float] = dataclasses.field(
        default_factory=lambda: {"author": 2.0, "vector": 1.2, "tile": 0.9, "write": 1.3}
    )
    is_up: threading.Event = dataclasses.field(default_factory=threading.Event)
    asked: list[synthesis_service_pb2.SynthesizeCandidateRequest] = dataclasses.field(default_factory=list)
    repaired: list[str] = dataclasses.field(default_factory=list)
    text: str = "source"
    nothing: bool = False
    reasoner_misses: bool = False

    def SynthesizeCandidate(
        self, request: synthesis_service_pb2.SynthesizeCandidateRequest, /, timeout: float | None = None
    ) -> synthesis_service_pb2.SynthesizeCandidateResponse:
        moves = request.hypothesis.moves
        if asks_model(moves):
            self.asked.append(request)
            self._need_model()
            moves[-1].text, moves[-1].choice = self.text, f"{self.text}{len(moves)}"
        return super().SynthesizeCandidate(request, timeout)

    def RepairCandidate(
        self, request: synthesis_service_pb2.RepairCandidateRequest, /, timeout: float | None = None
    ) -> synthesis_service_pb2.RepairCandidateResponse:
        del timeout
        moves = list(request.failed.candidate.moves)
        if not moves or moves[-1].kind != analysis_pb2.MOVE_KIND_WRITE:
            raise NotFound("no remedy")
        self.repaired.append(request.failed.verdict.detail)
        self._need_model()
        moves[-1].text = moves[-1].choice = "mended"
        hypothesis = hypothesis_pb2.Hypothesis(moves=moves, new_move_count=1, source="vllm")
        return synthesis_service_pb2.RepairCandidateResponse(hypothesis=hypothesis, candidate=self._candidate(moves))

    def ProposeHypotheses(
        self, request: reasoning_service_pb2.ProposeHypothesesRequest, /, timeout: float | None = None
    ) -> reasoning_service_pb2.ProposeHypothesesResponse:
        reply = super().ProposeHypotheses(request, timeout)
        reply.model_away = AWAY if self.reasoner_misses and not self.is_up.is_set() else ""
        return reply

    def _need_model(self) -> None:
        if self.nothing:
            raise NotFound("no kernel of out [no_code]: 3 answers could not be used")
        if not self.is_up.is_set():
            raise ModelFault(ModelReason.SERVER_DOWN, AWAY)


@dataclasses.dataclass
class Notebook:
    """Remembers states with their messages, and brings the server up once it was missed long enough."""

    world: WritingWorld
    states: list[tuple[int, str]] = dataclasses.field(default_factory=list)
    trials: list[trial_pb2.Trial] = dataclasses.field(default_factory=list)
    missing: list[float] = dataclasses.field(default_factory=list)
    up_after: int = 1 << 30
    """Trials after which the server comes back."""

    def run_changed(self, run: run_pb2.Run) -> None:
        if not self.states or self.states[-1][0] != run.state:
            self.states.append((run.state, run.message))
            self.missing.append(REGISTRY.get_sample_value("warpsmith_runs_waiting_for_model") or 0.0)

    def trial_ended(self, trial: trial_pb2.Trial) -> None:
        self.trials.append(trial)
        if len(self.trials) >= self.up_after:
            self.world.is_up.set()


def execute(world: WritingWorld, notebook: Notebook, search: Search | None = None, **budget: float) -> run_pb2.Run:
    agents = world.agents()
    run = run_pb2.Run(id="r", task=testing.task(), budget=run_pb2.Budget(**{"wall_seconds": 10, **budget}))  # type: ignore[arg-type]
    return SearchRun(run, agents, DeviceGate(agents.benchmarks), search or Beam(), notebook, effort=EFFORT).execute()


def written(trials: Sequence[trial_pb2.Trial]) -> list[trial_pb2.Trial]:
    return [
        trial for trial in trials if any(move.kind == analysis_pb2.MOVE_KIND_WRITE for move in trial.candidate.moves)
    ]


def test_a_server_that_is_down_is_waited_for_while_other_work_goes_on() -> None:
    world = WritingWorld()
    notebook = Notebook(world, up_after=4)
    run = execute(world, notebook)
    states = [state for state, _ in notebook.states]
    place = states.index(WAITING)
    assert states[place - 1 : place + 2] == [SEARCHING, WAITING, SEARCHING]
    assert AWAY in notebook.states[place][1]
    assert notebook.states[place + 1][1] == ""
    assert notebook.missing[place] == notebook.missing[place - 1] + 1
    assert notebook.missing[-1] == notebook.missing[0]
    assert written(notebook.trials), "what was asked while the server was down is written when it is back"
    assert run.state == run_pb2.RUN_STATE_FASTER


def test_a_server_that_stays_away_costs_the_run_nothing_but_its_kernels() -> None:
    world = WritingWorld()
    notebook = Notebook(world)
    run = execute(world, notebook, trial_count=4)
    assert not written(notebook.trials)
    assert len(notebook.trials) >= 4
    assert run.state == run_pb2.RUN_STATE_FASTER
    assert notebook.missing[-1] == notebook.missing[0]


def test_where_only_the_model_has_work_left_the_run_waits_as_long_as_it_may() -> None:
    world = WritingWorld(gains={"author": 2.0, "write": 1.3})
    notebook = Notebook(world)
    run = execute(world, notebook, wall_seconds=1)
    assert run.state == run_pb2.RUN_STATE_FASTER
    assert run.phase_seconds[1] > 0.9
    assert len(world.asked) < 60, "it rests between two questions"


def test_a_reasoner_that_misses_its_model_shows_in_the_same_way() -> None:
    world = WritingWorld(reasoner_misses=True, nothing=True)
    notebook = Notebook(world, up_after=2)
    execute(world, notebook)
    states = [state for state, _ in notebook.states]
    assert states[states.index(WAITING) + 1] == SEARCHING


def test_a_model_that_writes_nothing_is_no_fault_of_the_services() -> None:
    world = WritingWorld(nothing=True)
    notebook = Notebook(world)
    run = execute(world, notebook)
    assert run.state == run_pb2.RUN_STATE_FASTER
    assert world.asked
    assert not written(notebook.trials)
    assert WAITING not in [state for state, _ in notebook.states]


def test_the_writer_is_told_how_fast_the_parent_is() -> None:
    world = WritingWorld()
    world.is_up.set()
    execute(world, Notebook(world))
    told = [request.parent for request in world.asked if request.HasField("parent")]
    assert told
    assert all(parent.timing.steps for parent in told)


class Breaking(Notebook):
    """The server goes for a while whenever a written kernel fails."""

    def trial_ended(self, trial: trial_pb2.Trial) -> None:
        super().trial_ended(trial)
        if written([trial]) and trial.verdict.state == verdict_pb2.VERDICT_STATE_FAIL:
            self.world.is_up.clear()
            threading.Timer(0.2, self.world.is_up.set).start()


def test_a_repair_that_missed_its_model_is_made_when_it_is_back() -> None:
    world = WritingWorld(text="broken")

    world.is_up.set()
    notebook = Breaking(world)
    execute(world, notebook)
    assert any(trial.candidate.moves[-1].text == "mended" for trial in written(notebook.trials))
    assert len(world.repaired) > 1
    assert WAITING in [state for state, _ in notebook.states]


def test_a_repair_that_waited_takes_a_trial_of_the_budget() -> None:
    world = WritingWorld(text="broken")

    world.is_up.set()
    for count in (3, 4, 5):
        assert execute(world, Breaking(world), trial_count=count).trial_count <= count


def test_a_replayed_kernel_says_nothing_of_a_model() -> None:
    moves = [analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_WRITE, group="out", text="void out() {}")]
    assert not was_answered(hypothesis_pb2.Hypothesis(moves=moves, source="archive"))
    assert was_answered(hypothesis_pb2.Hypothesis(moves=moves, source="vllm"))
    moves[0].text = ""
    assert was_answered(hypothesis_pb2.Hypothesis(moves=moves, source="random"))


def test_the_slowest_of_our_kernels_is_written_second() -> None:
    analysis = analysis_pb2.Analysis(moves=[testing.move("author", group="a")])
    for name in ("a", "b", "c"):
        analysis.groups.add(
            name=name, computed_by=analysis_pb2.ENGINE_LIBRARY if name == "c" else analysis_pb2.ENGINE_AUTHORED
        )
        analysis.legal_moves.add(move=analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_WRITE, group=name))
    parent = trial_pb2.Trial(timing=timing_pb2.Timing(steps=[timing_pb2.StepTime(group="b", median_ns=5)]))
    proposed = [hypothesis_pb2.Hypothesis(rationale=text) for text in ("first", "second")]
    made = with_write(analysis, proposed, parent)
    assert [each.rationale for each in made] == ["first", "a language model writes the kernel of b", "second"]
    assert [(testing.name_of(move), move.group) for move in made[1].moves] == [("author", "a"), ("write", "b")]
    assert made[1].new_move_count == 1


def test_of_library_calls_the_kernel_that_the_best_proposal_ends_with_is_written() -> None:
    analysis = analysis_pb2.Analysis()
    analysis.groups.add(name="out", computed_by=analysis_pb2.ENGINE_LIBRARY)
    assert with_write(analysis, [], None) == []
    analysis.legal_moves.add(move=analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_WRITE, group="out"))
    best = hypothesis_pb2.Hypothesis(moves=[testing.move("author"), testing.move("fuse", "*")], new_move_count=2)
    made = with_write(analysis, [best], None)
    assert list(map(testing.name_of, made[1].moves)) == ["author", "fuse", "write"]
    assert made[1].new_move_count == 3
    assert with_write(analysis, [hypothesis_pb2.Hypothesis(moves=[testing.move("rewrite")])], None)[1:] == []


def test_an_answer_ends_the_rest_of_what_waits() -> None:
    heard: list[str] = []
    absence = Absence[int](heard.append, rest_seconds=100.0)
    absence.heard("synthesis", "down")
    absence.heard("reasoning", "down too")
    absence.postpone(7)
    assert absence.due() == []
    absence.heard("reasoning", "")
    assert (absence.due(), absence.due()) == ([7], [])
    absence.heard("synthesis", "")
    assert heard == ["down", ""]


def test_progress_says_that_a_run_waits_and_for_what() -> None:
    output = io.StringIO()
    progress = Progress(Console(file=output, force_terminal=False, width=200))
    run = run_pb2.Run(id="r", task=testing.task("chain"), state=WAITING, message=AWAY)
    progress.expect(run)
    progress.take("r", run_pb2.RunEvent(run=run))
    run.state, run.message = SEARCHING, ""
    progress.take("r", run_pb2.RunEvent(run=run))
    assert output.getvalue() == f"chain: waiting_llm: {AWAY}\nchain: searching, about 60 s\n"
