"""Judges the best candidates of a search again, from nothing and with all care. Only they are ever called faster.

The one idea: a screening result is a reason to look, never a claim, and the best of many is partly luck. So the
best are timed once more, and in the order of that, each is compiled (from the cache), verified and timed against
every arm in a fresh process, until one is right and faster beyond the noise. What no final could make faster is told
as it was screened. It does not search.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Sequence

from orchestrator.agents import SetAsideError
from orchestrator.pipeline import Judged, Outcome, Pipeline, passed, without_bulk
from orchestrator.prepare import analyze
from orchestrator.search import score
from warpsmith import printable
from warpsmith.contract import words
from warpsmith.errors import Infrastructure, WarpsmithError
from warpsmith.v1 import (
    analysis_pb2,
    candidate_pb2,
    hypothesis_pb2,
    run_pb2,
    task_pb2,
    timing_pb2,
    trial_pb2,
)

COUNT = 3
"""Finalists of an undisturbed run."""
BASELINE_WAS_FASTER = timing_pb2.FLAG_BASELINE_WAS_FASTER
STEADY = 0.9
"""Part of its time in a final that a baseline took before, from which on the two are one on a GPU."""
HOPELESS = 0.95
"""Upper end of a screening's interval below which, on a GPU, no final is made: it has these baselines and more. Where
they are an earlier run's, scaled, one is made, which reads them."""
_NOT_COMPUTED = {
    timing_pb2.FLAG_OUTPUT_ZERO: "the module gives nothing but zeros on such values",
    timing_pb2.FLAG_OUTPUT_CONSTANT: "the module gives the same on all such values",
    timing_pb2.FLAG_INPUT_UNUSED: "an input of the module does not influence what it gives",
}
"""Labels of a reference that nothing is faster than."""
_FINAL_WORDS = frozenset({timing_pb2.FLAG_FLOOR_SUSPECT, timing_pb2.FLAG_FLOOR_REJECT, *_NOT_COMPUTED})
"""Labels that a second look takes nothing from."""
DOUBTFUL_FROM = 1.05
"""Least median of a speedup whose final is made once more where it was not beyond doubt."""
_NOT_BASELINES = frozenset({timing_pb2.ARM_KIND_CANDIDATE, timing_pb2.ARM_KIND_REWRITTEN, timing_pb2.ARM_KIND_AA_COPY})


def promising(trials: Sequence[trial_pb2.Trial], count: int = COUNT) -> list[trial_pb2.Trial]:
    """Trials that may become finalists, best first: passing ones that changed something.

    Those whose time is too good to be true come last: they keep no other from a final.
    """
    changed = [trial for trial in trials if passed(trial) and trial.candidate.moves]
    return sorted(changed, key=lambda trial: (is_credible(trial), score(trial)), reverse=True)[:count]


def select(trials: Sequence[trial_pb2.Trial], count: int = COUNT) -> list[trial_pb2.Trial]:
    """Of `promising` trials, which carry their programs, those worth the care: of those not faster only the best."""
    return [trial for place, trial in enumerate(promising(trials, count)) if place == 0 or score(trial) > 1.0]


def judge(
    pipeline: Pipeline,
    finalists: Sequence[trial_pb2.Trial],
    *,
    has_kept_baselines: bool = False,
    waits_for: Callable[[str], None] = lambda _: None,
) -> list[trial_pb2.Trial]:
    """Finalists as judged again, up to the first that is right and faster; those that a fault kept from judgement
    are left out. Where none can be faster any more, the best as it was screened. `waits_for` hears what is under way.

    Raises:
        Infrastructure: there were finalists and none could be judged.
    """
    if finalists and pipeline.task.target == task_pb2.TARGET_CUDA:
        best = finalists[0].timing
        if (_is_hopeless(best) and not has_kept_baselines) or not _NOT_COMPUTED.keys().isdisjoint(best.raised):
            return [finalists[0]]
    judged: list[trial_pb2.Trial] = []
    faults: list[str] = []
    if len(finalists) > 1:
        waits_for(f"timing the best {len(finalists)} once more")
    for finalist, promised_ns in _ranked_again(pipeline, finalists):
        if promised_ns >= _beaten_ns(judged, pipeline.task.target):
            break
        before = f"{refusals(judged)}; " if refusals(judged) else ""
        waits_for(
            f"{before}judging #{finalist.number} again from nothing: on many more values, timed against every baseline"
        )
        # One second look a run: on a machine so busy that all are in doubt, finals would be all that it does.
        outcome = final(pipeline, finalist, may_repeat=not any(map(is_doubtful, judged)))
        if isinstance(outcome, Judged):
            judged.append(outcome.trial)
            if passed(outcome.trial) and outcome.trial.timing.faster:
                break
        else:
            faults.append(getattr(outcome, "reason", "interrupted"))
    if finalists and not judged:
        raise Infrastructure(f"no finalist could be judged: {faults[0]}")
    return judged


def refusals(judged: Sequence[trial_pb2.Trial]) -> str:
    """Which finalists were not right after all, and why; empty where all were."""
    wrong = [(trial.number, trial.verdict) for trial in judged if not passed(trial)]
    return "; ".join(
        f"#{number} was refused: {words.failure_kind(verdict.kind)}, {printable.line(verdict.detail, 160)}"
        for number, verdict in wrong
    )


def final(pipeline: Pipeline, finalist: trial_pb2.Trial, *, may_repeat: bool = True) -> Outcome:
    """The finalist verified and timed against every arm; if it `may_repeat`, once more where it is left in doubt."""
    rewritten = rewritten_reference(pipeline, finalist.candidate)
    outcome = _once(pipeline, finalist, rewritten)
    if may_repeat and isinstance(outcome, Judged) and is_doubtful(outcome.trial):
        again = _once(pipeline, finalist, rewritten)
        if isinstance(again, Judged) and passed(again.trial) and again.trial.timing.faster:
            again.trial.timing.raised.append(timing_pb2.FLAG_LOOKED_AT_TWICE)
            return again
    return outcome


def _once(pipeline: Pipeline, finalist: trial_pb2.Trial, rewritten: candidate_pb2.Program | None) -> Outcome:
    outcome = pipeline.walk(_bare(finalist), timing_pb2.TIER_FINAL, rewritten)
    is_timed = isinstance(outcome, Judged) and outcome.trial.HasField("timing")
    if isinstance(outcome, Judged) and is_timed and pipeline.task.target == task_pb2.TARGET_CUDA:
        hold_to(outcome.trial.timing, finalist.timing)
    return outcome


def is_doubtful(trial: trial_pb2.Trial) -> bool:
    """Whether it may be faster all the same: by its median it is, but first calls on new values did not show it, or too
    wide an interval. On a busy machine both happen to kernels that are; they are looked at once more."""
    timing = trial.timing
    if not passed(trial) or timing.faster or timing.speedup_fastest.median < DOUBTFUL_FROM:
        return False
    if not _FINAL_WORDS.isdisjoint(timing.raised):
        return False
    is_wide = timing.speedup_fastest.low <= least_low(timing)
    return is_wide or timing_pb2.FLAG_SLOWER_ON_FRESH_VALUES in timing.raised


def _is_hopeless(timing: timing_pb2.Timing) -> bool:
    return 0.0 < timing.speedup_fastest.high < HOPELESS


def hold_to(timing: timing_pb2.Timing, before: timing_pb2.Timing) -> None:
    """Takes back what a final gained by a slow baseline alone.

    In another process a library may choose another algorithm for the same call: eager at 8205x2949x5921 in fp32 took
    6.4 and 14.0 ms on one H200, on the same day. A user has the better one.
    """
    known = {arm.kind: arm.median_ns for arm in before.arms if arm.kind not in _NOT_BASELINES and arm.median_ns}
    now = {arm.kind: arm.median_ns for arm in timing.arms}
    pairs = [(timing.speedup_fastest, min(known.values(), default=0.0), now.get(timing.fastest_arm, 0.0))]
    eager = timing_pb2.ARM_KIND_EAGER
    pairs.append((timing.speedup_eager, known.get(eager, 0.0), now.get(eager, 0.0)))
    for speedup, known_ns, now_ns in pairs:
        if known_ns and known_ns < STEADY * now_ns:
            share = known_ns / now_ns
            speedup.median, speedup.low, speedup.high = (
                share * each for each in (speedup.median, speedup.low, speedup.high)
            )
            if BASELINE_WAS_FASTER not in timing.raised:
                timing.raised.append(BASELINE_WAS_FASTER)
    if BASELINE_WAS_FASTER in timing.raised:
        timing.faster = timing.faster and timing.speedup_fastest.low > least_low(timing)


def least_low(timing: timing_pb2.Timing) -> float:
    """What the lower end of a speedup's interval has to be above (measurement, "Faster", 1)."""
    return max(1.01, 1.0 + 3.0 * timing.noise_floor)


def _ranked_again(pipeline: Pipeline, finalists: Sequence[trial_pb2.Trial]) -> list[tuple[trial_pb2.Trial, float]]:
    """The finalists, best first by a timing of their own, each with its time in ns; 0 where it could not be taken."""
    if len(finalists) < 2:
        return [(finalist, _time_ns(finalist)) for finalist in finalists]
    timed = [(finalist, pipeline.time_again(_bare(finalist))) for finalist in finalists]
    timed.sort(key=lambda each: score(each[1]), reverse=True)
    return [(finalist, _time_ns(again)) for finalist, again in timed]


def _time_ns(trial: trial_pb2.Trial) -> float:
    """Median of the candidate; 0 where it was not timed."""
    return next((arm.median_ns for arm in trial.timing.arms if arm.kind == timing_pb2.ARM_KIND_CANDIDATE), 0.0)


def _beaten_ns(judged: Sequence[trial_pb2.Trial], target: task_pb2.Target.ValueType) -> float:
    """The time from which on a finalist can only lose: a right one that was not faster took no more, or a baseline
    did, on a GPU, where a time of one process is one of another too.
    """
    times = [_time_ns(trial) for trial in judged if passed(trial) and is_credible(trial)]
    if target == task_pb2.TARGET_CUDA:
        arms = [arm for trial in judged for arm in trial.timing.arms if arm.kind not in _NOT_BASELINES]
        times += [arm.median_ns for arm in arms if arm.median_ns]
    return min(times, default=math.inf)


def is_credible(trial: trial_pb2.Trial) -> bool:
    """Whether its time was not too good to be true."""
    return timing_pb2.FLAG_FLOOR_SUSPECT not in trial.timing.raised


def shortfall(trial: trial_pb2.Trial) -> str:
    """Why the best is not called faster, as the end of a sentence."""
    timing = trial.timing
    speedup, name = timing.speedup_fastest, words.arm(timing.fastest_arm)
    if not is_credible(trial):
        return "the best takes less time than the machine allows, as far as was measured"
    if timing_pb2.FLAG_SLOWER_ON_FRESH_VALUES in timing.raised:
        twice = ", looked at twice" if speedup.median >= DOUBTFUL_FROM else ""
        return (
            f"the best seems {speedup.median:.2f}x as fast as {name}, but first calls on new values do not show "
            f"it{twice}; where the machine was busy, run it again"
        )
    if speedup.median <= 1.0:
        return f"the best reaches {speedup.median:.2f}x"
    reached = f"the best reaches {speedup.median:.2f}x [{speedup.low:.2f}, {speedup.high:.2f}], "
    if (found := next(filter(_NOT_COMPUTED.__contains__, timing.raised), None)) is not None:
        return f"{reached}but {_NOT_COMPUTED[found]}: its answer can be had without computing all of it"
    asked = least_low(timing)
    return (
        f"{reached}of which the lower end has to be above {asked:.2f}x where equals differ by "
        f"{100 * timing.noise_floor:.1f} %; where the machine was busy, run it again"
    )


def _bare(trial: trial_pb2.Trial) -> trial_pb2.Trial:
    """A copy with nothing but what was proposed."""
    bare = trial_pb2.Trial()
    bare.CopyFrom(trial)
    for field in ("artifact", "verdict", "timing", "ended_at"):
        bare.ClearField(field)
    return bare


def winner(judged: Sequence[trial_pb2.Trial]) -> trial_pb2.Trial | None:
    """The best judged finalist: a faster one before any other, then by speedup. None when none passed."""
    right = [trial for trial in judged if passed(trial)]
    return max(right, key=lambda trial: (trial.timing.faster, is_credible(trial), score(trial)), default=None)


def keep_best(run: run_pb2.Run, trials: Sequence[trial_pb2.Trial]) -> None:
    """Gives a run that ends without finals the best of its trials as it was screened, which is never called faster."""
    if not run.HasField("best") and (best := select(trials, 1)):
        run.best_trial = best[0].number
        run.best.CopyFrom(without_bulk(best[0], keep_sources=True, keep_samples=True))
        run.best.timing.faster = False


def rewritten_reference(pipeline: Pipeline, candidate: candidate_pb2.Candidate) -> candidate_pb2.Program | None:
    """The candidate's algebra as library calls only, or None where it used none, or they cannot be had.

    It separates what the algebra gives from what the kernels give.
    """
    if not candidate.rewrites:
        return None
    moves: list[analysis_pb2.Move] = [move for move in candidate.moves if move.kind == analysis_pb2.MOVE_KIND_REWRITE]
    # A move on the whole plan may have used some: no move of the candidate's says where.
    implied = Counter(candidate.rewrites) - Counter(move.choice for move in moves)
    with contextlib.suppress(SetAsideError, WarpsmithError):
        while implied:
            legal = analyze(pipeline.agents, pipeline.gate, pipeline.task, moves, pipeline.go_on).legal_moves
            rewrites = (each.move for each in legal if each.move.kind == analysis_pb2.MOVE_KIND_REWRITE)
            if (found := next((move for move in rewrites if move.choice in implied), None)) is None:
                break
            moves.append(found)
            implied -= Counter([found.choice])
    hypothesis = hypothesis_pb2.Hypothesis(
        moves=moves,
        new_move_count=len(moves),
        predicted_speedup=1.0,
        rationale="the same algebra in plain PyTorch",
        source="rewritten reference",
    )
    return pipeline.program_of(hypothesis)
