"""Measures how well a search finds its way: replays strategies on recorded landscapes, many seeds, in seconds.

    python -m benchmarks.search.skill landscapes_cuda.jsonl [FILE …] [--strategy beam random] [--reasoner NAME|ADDRESS]
    python -m benchmarks.search.skill landscapes_cpu.jsonl landscapes_cuda.jsonl --record

Orchestrator, strategy, reasoner and the legality of moves are the real ones; only verdicts and times come from what
`landscapes.py` has recorded, so a replay needs no device and no compiler. A strategy that you have installed is called
by its name, as is a reasoner; a reasoner that is a server, by its address. A proposal that leads to a plan which was
not recorded is refused and counted as *outside*: it costs no trial. --record writes skill.md and the pictures.
"""

# ruff: noqa: ARG002 (the protocols fix the signatures)

from __future__ import annotations

import argparse
import inspect
import math
import shelve
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_synthesis import generator
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.plans import analysis, moves, plan
from agent_synthesis.synthesizer import BuiltInSynthesizer
from benchmarks.search.landscape_file import DIGITS, Landscape, Plan, digits, read, verdict_of
from benchmarks.search.skill_picture import Curve, picture
from orchestrator.agents import Agents, Reasoning
from orchestrator.pipeline import passed
from orchestrator.search import Search, score
from orchestrator.search_run import SearchRun
from orchestrator.serving.device_gate import DeviceGate
from orchestrator.walks import Effort
from warpsmith import plugins
from warpsmith.digest import digest, of_moves
from warpsmith.errors import BadInput, Infrastructure
from warpsmith.service import dial
from warpsmith.v1 import (
    analysis_pb2,
    artifact_pb2,
    benchmark_service_pb2,
    candidate_pb2,
    compile_service_pb2,
    correctness_service_pb2,
    reasoning_service_pb2,
    reasoning_service_pb2_grpc,
    run_pb2,
    synthesis_service_pb2,
    task_pb2,
    timing_pb2,
    trial_pb2,
)

TRIALS, SEEDS, WITHIN = 24, 5, 0.05
GAP_BAR, TRIALS_BAR = 1.5, 16
"""Random's gap over beam's at `TRIALS`; median trials of beam to come within `WITHIN` of the landscape's best."""
RESULTS = Path(__file__).parents[2] / "docs" / "results"
PROCESSORS = {task_pb2.TARGET_CPU: 2, task_pb2.TARGET_CUDA: 16}
"""Of the machine that a run is taken to have: they decide how many trials it begins at once."""
HELD_OUT = 3
"""Every so-manieth task was looked at only when the search was finished: see `--part`."""
DEFAULT_REASONER = "roofline"

_Moves = Sequence[analysis_pb2.Move]


class Plans:
    """The synthesis agent of a replay: real plans, legal moves and digests, remembered."""

    def __init__(self, landscape: Landscape, cache: Path) -> None:
        self._landscape = landscape
        self._zero = plan.plan_zero(GraphIndex(landscape.graph), landscape.task.target)
        self._made: dict[str, plan.Plan] = {}
        emitters, task = generator.emitter_digest(), landscape.graph.digest
        file = cache / digest(emitters, task, landscape.task.target)[:DIGITS]
        self._known = shelve.open(str(file))  # noqa: SIM115 (closed by `close`)
        self._repairer = BuiltInSynthesizer(lambda _: landscape.graph)
        self.outside: set[str] = set()
        # By what the recorded moves mean today: a schedule that has a new parameter since is no other plan for that.
        self.recorded: dict[str, Plan] = {}
        for name, found in landscape.plans.items():
            try:
                self.recorded.setdefault(self._light(landscape.path(name)).plan_digest, found)
            except BadInput:
                continue  # no longer legal

    def close(self) -> None:
        """Keeps what was learnt."""
        self._known.close()

    def AnalyzePlan(
        self, request: synthesis_service_pb2.AnalyzePlanRequest, /, timeout: float | None = None
    ) -> synthesis_service_pb2.AnalyzePlanResponse:
        """The plan that moves give, as the agent describes it."""
        light = self._light(request.moves)
        if light.plan_digest not in self._known:
            full = analysis.describe(self._plan(request.moves), with_legal_moves=True)
            self._known[light.plan_digest] = full.SerializeToString()
        found = analysis_pb2.Analysis.FromString(self._known[light.plan_digest])
        del found.moves[:]
        found.moves.extend(request.moves)
        return synthesis_service_pb2.AnalyzePlanResponse(analysis=found)

    def SynthesizeCandidate(
        self, request: synthesis_service_pb2.SynthesizeCandidateRequest, /, timeout: float | None = None
    ) -> synthesis_service_pb2.SynthesizeCandidateResponse:
        """A candidate whose program is a name for the recorded one."""
        made = self._candidate(request.hypothesis.moves)
        return synthesis_service_pb2.SynthesizeCandidateResponse(candidate=made)

    def RepairCandidate(
        self, request: synthesis_service_pb2.RepairCandidateRequest, /, timeout: float | None = None
    ) -> synthesis_service_pb2.RepairCandidateResponse:
        """What the built-in synthesizer would try instead."""
        hypothesis, _ = self._repairer.repair(self._landscape.task, request.failed, request.diagnostics)
        made = self._candidate(hypothesis.moves)
        return synthesis_service_pb2.RepairCandidateResponse(hypothesis=hypothesis, candidate=made)

    def _candidate(self, wanted: _Moves) -> candidate_pb2.Candidate:
        light = self._light(wanted)
        found = self.recorded.get(light.plan_digest)
        if found is None:
            self.outside.add(light.plan_digest)
            raise BadInput("the landscape does not know this plan")
        program = candidate_pb2.Program(target=self._landscape.task.target, digest=found.program)
        rewrites = [move.choice for move in wanted if move.kind == analysis_pb2.MOVE_KIND_REWRITE]
        return candidate_pb2.Candidate(
            digest=of_moves(wanted), moves=wanted, program=program, analysis=light, rewrites=rewrites
        )

    def _light(self, wanted: _Moves) -> analysis_pb2.Analysis:
        key = of_moves(wanted)
        if key not in self._known:
            self._known[key] = analysis.describe(self._plan(wanted), with_legal_moves=False).SerializeToString()
        return analysis_pb2.Analysis.FromString(self._known[key])

    def _plan(self, wanted: _Moves) -> plan.Plan:
        if not wanted:
            return self._zero
        key = of_moves(wanted)
        if key not in self._made:
            self._made[key] = moves.apply(self._plan(wanted[:-1]), wanted[-1])
        return self._made[key]


class Recorded:
    """Compiler, judge and device of a replay: they answer from the landscape, by the program."""

    def __init__(self, landscape: Landscape, plans: Iterable[Plan]) -> None:
        self._landscape = landscape
        self._plans = {found.program: found for found in plans}

    def CompileCandidate(
        self, request: compile_service_pb2.CompileCandidateRequest, /, timeout: float | None = None
    ) -> compile_service_pb2.CompileCandidateResponse:
        """An empty artifact, or the rejection that was recorded."""
        found = self._plans.get(request.program.digest)
        if found is not None and found.verdict.startswith("COMPILE"):
            rejection = compile_service_pb2.CompileRejection(kind=verdict_of(found).kind, diagnostics="recorded")
            return compile_service_pb2.CompileCandidateResponse(rejection=rejection)
        artifact = artifact_pb2.Artifact(digest=request.program.digest, program_digest=request.program.digest)
        return compile_service_pb2.CompileCandidateResponse(artifact=artifact)

    def VerifyArtifact(
        self, request: correctness_service_pb2.VerifyArtifactRequest, /, timeout: float | None = None
    ) -> correctness_service_pb2.VerifyArtifactResponse:
        """The recorded verdict."""
        return correctness_service_pb2.VerifyArtifactResponse(verdict=verdict_of(self._plans[request.program.digest]))

    def DescribeDevice(
        self, request: benchmark_service_pb2.DescribeDeviceRequest, /, timeout: float | None = None
    ) -> benchmark_service_pb2.DescribeDeviceResponse:
        """The device that the landscape was recorded on."""
        return benchmark_service_pb2.DescribeDeviceResponse(device=self._landscape.device)

    def OpenTask(
        self, request: benchmark_service_pb2.OpenTaskRequest, /, timeout: float | None = None
    ) -> benchmark_service_pb2.OpenTaskResponse:
        """At once."""
        return benchmark_service_pb2.OpenTaskResponse()

    def RunReference(
        self, request: benchmark_service_pb2.RunReferenceRequest, /, timeout: float | None = None
    ) -> benchmark_service_pb2.RunReferenceResponse:
        """Eager only: all that a landscape knows."""
        arms = [timing_pb2.Arm(kind=timing_pb2.ARM_KIND_EAGER, median_ns=self._landscape.eager_ns)]
        report = timing_pb2.ReferenceReport(
            arms=arms, fastest_arm=timing_pb2.ARM_KIND_EAGER, floor_ns=self._landscape.floor_ns
        )
        return benchmark_service_pb2.RunReferenceResponse(report=report)

    def MeasureArtifact(
        self, request: benchmark_service_pb2.MeasureArtifactRequest, /, timeout: float | None = None
    ) -> benchmark_service_pb2.MeasureArtifactResponse:
        """The recorded time."""
        return benchmark_service_pb2.MeasureArtifactResponse(timing=self._timing(self._plans[request.program.digest]))

    def _timing(self, found: Plan) -> timing_pb2.Timing:
        speedup = timing_pb2.Speedup(median=found.speedup, low=found.speedup, high=found.speedup)
        arms = [
            timing_pb2.Arm(kind=timing_pb2.ARM_KIND_CANDIDATE, median_ns=found.candidate_ns),
            timing_pb2.Arm(kind=timing_pb2.ARM_KIND_EAGER, median_ns=self._landscape.eager_ns),
        ]
        return timing_pb2.Timing(
            tier=timing_pb2.TIER_SCREENING,
            arms=arms,
            fastest_arm=timing_pb2.ARM_KIND_EAGER,
            speedup_fastest=speedup,
            speedup_eager=speedup,
            floor_ns=self._landscape.floor_ns,
            faster=found.speedup > 1.03,
        )


class InProcess:
    """A reasoner plugin as the service that it is."""

    def __init__(self, reasoner: Any) -> None:
        self._reasoner = reasoner

    def ProposeHypotheses(
        self, request: reasoning_service_pb2.ProposeHypothesesRequest, /, timeout: float | None = None
    ) -> reasoning_service_pb2.ProposeHypothesesResponse:
        """Its answer."""
        answer: reasoning_service_pb2.ProposeHypothesesResponse = self._reasoner.propose(request)
        return answer


class _Listener:
    """Keeps the best speedup after each trial."""

    def __init__(self) -> None:
        self.best: list[float] = []

    def run_changed(self, run: run_pb2.Run) -> None:
        """Nothing to keep."""

    def trial_ended(self, trial: trial_pb2.Trial) -> None:
        """A trial, timed or not."""
        so_far = self.best[-1] if self.best else 0.0
        self.best.append(max(so_far, score(trial)) if passed(trial) else so_far)


@dataclass(frozen=True)
class Replay:
    """One search on one landscape."""

    task: str
    strategy: str
    shares: Sequence[float]
    """Best speedup after each trial, over the best of the landscape; a search that ends early stays where it was."""
    outside: int
    """Plans that it wanted and the landscape does not know."""

    @property
    def gap(self) -> float:
        """How much faster the landscape's best is than what was found."""
        return 1 / max(self.shares[-1], 1e-9) - 1

    @property
    def trials(self) -> float:
        """Trials to within 5 % of the landscape's best; infinite where they did not suffice."""
        wanted = 1 / (1 + WITHIN)
        return next((n for n, share in enumerate(self.shares, 1) if share >= wanted), math.inf)

    @property
    def area(self) -> float:
        """Mean share over the trials: the area under the curve."""
        return statistics.fmean(self.shares)


def reasoning(name: str) -> Reasoning:
    """A reasoner by its plugin's name, or by its server's address."""
    if ":" in name:
        return dial(reasoning_service_pb2_grpc.ReasoningServiceStub, name, role="reasoning")
    return InProcess(plugins.load("reasoner", name))


def seeded(strategy: str, seeds: int) -> list[Search]:
    """A strategy once for each seed; once alone where it takes none."""
    made = plugins.load("search", strategy)
    if "seed" not in inspect.signature(type(made)).parameters:
        return [made]
    return [type(made)(seed=seed) for seed in range(seeds)]


def replay(
    landscape: Landscape, plans: Plans, reasoner: Reasoning, search: Search, trials: int, at_once: int
) -> tuple[list[float], int]:
    """Shares of the best after each trial, and how many plans were outside."""
    recorded, heard = Recorded(landscape, plans.recorded.values()), _Listener()
    agents = Agents(reasoner, plans, recorded, recorded, [recorded])
    budget = run_pb2.Budget(wall_seconds=3600, trial_count=trials)
    run = run_pb2.Run(id="replay", task=landscape.task, budget=budget)
    # One walks at a time, so that a replay can be repeated; a strategy is asked for as many as a real run asks for.
    effort = Effort(parallel_trials=1, refill_at=0, proposal_count=at_once, retry_pause_seconds=0.0)
    plans.outside.clear()
    ended = SearchRun(run, agents, DeviceGate(agents.benchmarks), search, heard, effort=effort).execute()
    if ended.state == run_pb2.RUN_STATE_FAILED:
        raise Infrastructure(f"{landscape.task.name}: {ended.message}")
    best = [*heard.best, *[heard.best[-1] if heard.best else 1.0] * (trials - len(heard.best))]
    most = max(found.speedup for found in plans.recorded.values())
    return [value / most for value in best[:trials]], len(plans.outside)


def replays(
    landscape: Landscape, strategies: Sequence[str], reasoners: Sequence[str], trials: int, seeds: int, cache: Path
) -> list[Replay]:
    """All searches on one landscape. Only beam and its like ask a reasoner; the others are replayed with one."""
    at_once = Effort.of(landscape.task.target, PROCESSORS[landscape.task.target]).proposal_count
    plans, found = Plans(landscape, cache), []
    try:
        for strategy in strategies:
            for name in reasoners if strategy not in ("random", "evolution", "exhaustive") else reasoners[:1]:
                label = strategy if name == DEFAULT_REASONER or name == reasoners[0] else f"{strategy} with {name}"
                for search in seeded(strategy, seeds):
                    shares, outside = replay(landscape, plans, reasoning(name), search, trials, at_once)
                    found.append(Replay(landscape.task.name, label, shares, outside))
    finally:
        plans.close()
    return found


# ---- what is said of them ----------------------------------------------------------------------------------------


def table(landscapes: Sequence[Landscape], found: Sequence[Replay], trials: int) -> str:
    """Strategies, then tasks, as Markdown."""
    labels = list(dict.fromkeys(each.strategy for each in found))
    lines = [
        f"| strategy | gap at {trials} trials, mean | gap, median | area under the curve "
        "| trials to within 5 %, median | never within 5 % | plans outside, a search |",
        "|" + " --- |" * 7,
    ]
    for label in labels:
        own = [each for each in found if each.strategy == label]
        never = sum(math.isinf(each.trials) for each in own) / len(own)
        cells = [
            label,
            f"{mean_gap(found, label):.1%}",
            f"{statistics.median(each.gap for each in own):.1%}",
            f"{statistics.fmean(each.area for each in own):.1%}",
            _count(median_trials(found, label)),
            f"{never:.0%}",
            f"{statistics.fmean(each.outside for each in own):.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *bars(found, trials), ""]
    head = ["task", "plans", "best against eager", *(f"{label}: gap, trials" for label in labels)]
    lines += [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    for landscape in landscapes:
        cells = [landscape.task.name, str(len(landscape.plans)), f"{landscape.best:.2f}x"]
        for label in labels:
            own = [each for each in found if each.strategy == label and each.task == landscape.task.name]
            trials_needed = _count(statistics.median(each.trials for each in own))
            cells.append(f"{statistics.fmean(each.gap for each in own):.1%}, {trials_needed}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def bars(found: Sequence[Replay], trials: int) -> list[str]:
    """What beam is held to."""
    labels = {each.strategy for each in found}
    if not {"beam", "random"} <= labels:
        return []
    ratio = mean_gap(found, "random") / max(mean_gap(found, "beam"), 1e-6)
    return [
        f"- random's mean gap at {trials} trials over beam's: {ratio:.1f}x (bar {GAP_BAR}x)",
        f"- beam's median trials to within 5 % of the best: {_count(median_trials(found, 'beam'))} (bar {TRIALS_BAR})",
    ]


def mean_gap(found: Sequence[Replay], strategy: str) -> float:
    """Over tasks, each with the mean of its seeds."""
    return statistics.fmean(statistics.fmean(each) for each in _by_task(found, strategy, "gap"))


def median_trials(found: Sequence[Replay], strategy: str) -> float:
    """Over tasks, each with the median of its seeds."""
    return statistics.median(statistics.median(each) for each in _by_task(found, strategy, "trials"))


def _by_task(found: Sequence[Replay], strategy: str, name: str) -> list[list[float]]:
    tasks: dict[str, list[float]] = {}
    for each in found:
        if each.strategy == strategy:
            tasks.setdefault(each.task, []).append(getattr(each, name))
    return list(tasks.values())


def _count(trials: float) -> str:
    return "more" if math.isinf(trials) else f"{trials:g}"


def curves(found: Sequence[Replay]) -> list[Curve]:
    """The mean share after each trial, by strategy."""
    labels = dict.fromkeys(each.strategy for each in found)
    shares = {label: [each.shares for each in found if each.strategy == label] for label in labels}
    return [
        Curve(label, [statistics.fmean(column) for column in zip(*own, strict=True)]) for label, own in shares.items()
    ]


def chosen(landscapes: Iterable[Landscape], part: str, only: Sequence[str]) -> list[Landscape]:
    """The landscapes of a part of the tasks; those with less than 5 % to win against eager have nothing to measure."""
    kept = []
    for place, landscape in enumerate(sorted(landscapes, key=lambda each: each.task.name)):
        held_out = place % HELD_OUT == HELD_OUT - 1
        if part == "all" or (part == "held-out") == held_out:
            kept.append(landscape)
    wanted = [each for each in kept if not only or any(each.task.name.startswith(name) for name in only)]
    return [each for each in wanted if each.best > 1 + WITHIN]


def measure(landscapes: Sequence[Landscape], options: argparse.Namespace) -> list[Replay]:
    """All replays, two tasks at a time."""
    settings = (options.strategy, options.reasoner, options.trials, options.seeds)
    with tempfile.TemporaryDirectory() as directory, ProcessPoolExecutor(options.processes) as pool:
        cache = options.cache or Path(directory)
        cache.mkdir(parents=True, exist_ok=True)
        futures = [pool.submit(replays, each, *settings, cache) for each in landscapes]
        return [each for future in futures for each in future.result()]


def main() -> int:
    """Prints a table for each file; with --record writes them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="landscapes")
    parser.add_argument("--strategy", nargs="+", default=["beam", "evolution", "random", "exhaustive"], metavar="NAME")
    parser.add_argument("--reasoner", nargs="+", default=[DEFAULT_REASONER], metavar="NAME", help="plugin or address")
    parser.add_argument("--trials", type=int, default=TRIALS)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="of strategies that draw")
    parser.add_argument("--only", nargs="*", default=[], help="names, or beginnings of names, of the tasks wanted")
    parser.add_argument("--part", choices=("all", "tuning", "held-out"), default="all", help="of the tasks")
    parser.add_argument("--cache", type=Path, help="directory in which plans are remembered from call to call")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--record", action="store_true", help="write docs/results/skill.md and its pictures")
    options = parser.parse_args()
    texts = []
    for file in options.files:
        landscapes = chosen(read([file]), options.part, options.only)
        if not landscapes:
            parser.error(f"{file}: no landscape in it with anything to win")
        found = measure(landscapes, options)
        says = table(landscapes, found, options.trials)
        if options.part == "all" and not options.only:
            names = {each.task.name for each in chosen(read([file]), "held-out", [])}
            apart = bars([each for each in found if each.task in names], options.trials)
            says += "\n\n".join(["", f"On the {len(names)} tasks that the search was not tuned on:", "\n".join(apart)])
        if options.record:
            drawing = RESULTS / f"skill_{file.stem.rpartition('_')[2]}.svg"
            drawing.write_text(picture(curves(found), f"{len(landscapes)} tasks, {landscapes[0].device.name}"))
            says = f"![Share of the best plan's speed by trial]({drawing.name})\n\n{says}"
        texts.append(f"## {landscapes[0].device.name}\n\n{_origin(file, landscapes)}\n\n{says}")
    print("\n\n".join(texts))
    if options.record:
        (RESULTS / "skill.md").write_text(_HEAD + "\n\n".join(texts) + "\n")
    return 0


_HEAD = """# How well the search finds its way

Each strategy replayed on recorded landscapes (`python -m benchmarks.search.landscapes`): every plan was verified and
timed by the real services; a trial is a plan that was looked at, plan zero among them. *gap*: how much faster the
landscape's best plan is than the one found. *area*: mean share of the best over the trials. A landscape is a part of
all plans: a proposal outside of it is refused, costs no trial, and is counted, for every strategy alike. Made by
`python -m benchmarks.search.skill FILE … --record`; with `--reasoner` or `--strategy NAME` it says what yours does.

"""


def _origin(file: Path, landscapes: Sequence[Landscape]) -> str:
    made = landscapes[0].made
    plans = sum(len(each.plans) for each in landscapes)
    stale = made.get("emitters") != digits(generator.emitter_digest())
    note = " The emitters have changed since: some plans may no longer be reached." if stale else ""
    return (
        f"[{file.name}]({file.name}): {len(landscapes)} tasks, {plans} plans, recorded {made.get('date')} with torch "
        f"{made.get('torch')} on {made.get('machine')}.{note}"
    )


if __name__ == "__main__":
    sys.exit(main())
