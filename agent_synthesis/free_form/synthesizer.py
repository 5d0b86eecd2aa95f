"""A synthesizer that lets a language model write the kernel of one group; all else is the built-in one's.

The one idea: the model proposes text and nothing more. What it wrote becomes a move with that text, so the candidate is
compiled, checked and timed like any other, and replays without the model. An answer that cannot be used is asked for
again, at most twice, with the reason; then there is no candidate, and the caller is told why. A server that is away is
the caller's to wait for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from prometheus_client import Counter

from agent_synthesis.free_form import answer, compose, definition, prompt
from agent_synthesis.free_form.kernel import Complaint, Fault, Kernel
from agent_synthesis.free_form.known import Known
from agent_synthesis.free_form.prompt import SIZES, Failure, Subject
from agent_synthesis.plans import cost
from agent_synthesis.plans.partition import Group
from agent_synthesis.plans.plan import Plan
from agent_synthesis.synthesizer import BuiltInSynthesizer, Capture
from warpsmith import digest, settings
from warpsmith.contract import words
from warpsmith.errors import MODEL_AWAY, BadInput, IllegalMove, ModelFault, ModelReason, NotFound
from warpsmith.models import server
from warpsmith.models.language_model import LanguageModel, Message
from warpsmith.models.model_turn import TURN_SECONDS, PromptSizes, Turn
from warpsmith.v1 import analysis_pb2, candidate_pb2, hypothesis_pb2, task_pb2, trial_pb2, verdict_pb2

log = logging.getLogger("warpsmith")

SOURCE = "vllm"
ASKED_AGAIN = 2
"""How often an answer that cannot be used is asked for again."""
_NO_REPAIR = frozenset({verdict_pb2.FAILURE_KIND_CHEAT, verdict_pb2.FAILURE_KIND_SUSPECT})

_kernels = Counter("warpsmith_model_kernels_total", "Questions for a kernel, by what came of them.", ["outcome"])
for _outcome in ("written", *Fault):
    _kernels.labels(str(_outcome))


class LanguageModelSynthesizer(BuiltInSynthesizer):
    """Offers the move `write`, and has a model write what such a move asks for; see `Synthesizer`."""

    def __init__(
        self,
        model: LanguageModel | None = None,
        capture: Capture | None = None,
        *,
        asked_again: int = ASKED_AGAIN,
        turn_seconds: float = TURN_SECONDS,
    ) -> None:
        """Without a model, connects to the one that the environment names.

        Raises:
            BadInput: the model's library is not installed, or the server refuses address, model name or key.
        """
        super().__init__(capture)
        self._model = model or server.connect(settings.read().model)
        self._asked_again, self._turn_seconds = asked_again, turn_seconds
        self._sizes = PromptSizes(self._model, len(SIZES))
        self._known = Known()

    def analyze(self, task: task_pb2.Task, moves: Sequence[analysis_pb2.Move]) -> analysis_pb2.Analysis:
        """As the built-in one's, with a `write` for every group that may be; one not yet written changes nothing."""
        given = [move for move in moves if not compose.is_asked(move)]
        made = analysis_pb2.Analysis()
        made.CopyFrom(super().analyze(task, given))
        plan = self.plan(task, given)
        made.legal_moves.extend(filter(None, (_legal(plan, group) for group in plan.groups)))
        return made

    def synthesize(
        self, task: task_pb2.Task, hypothesis: hypothesis_pb2.Hypothesis, parent: trial_pb2.Trial | None = None
    ) -> candidate_pb2.Candidate:
        """As the built-in one's; a last move that asks for a kernel is answered by the model.

        Raises:
            NotFound: the model wrote nothing that can be used. ModelFault: its server is away.
        """
        if not hypothesis.moves or not compose.is_asked(hypothesis.moves[-1]):
            return super().synthesize(task, hypothesis, parent)
        before = list(hypothesis.moves[:-1])
        if parent is not None:
            self._known.add(digest.of_task(task), self.plan(task, parent.candidate.moves), parent, before)
        subject = self._subject(task, before, hypothesis.moves[-1].group)
        kernel = self._ask(task, subject, lambda size: prompt.question(subject, SIZES[size]), known=subject.group.text)
        asked = hypothesis_pb2.Hypothesis(moves=[*before, compose.move_of(subject.group.name, kernel)])
        return super().synthesize(task, asked)

    def repair(
        self, task: task_pb2.Task, failed: trial_pb2.Trial, diagnostics: str
    ) -> tuple[hypothesis_pb2.Hypothesis, candidate_pb2.Candidate]:
        """Has the model mend the kernel that it wrote last; other failures are the built-in one's."""
        last = failed.candidate.moves[-1] if failed.candidate.moves else analysis_pb2.Move()
        if failed.verdict.state != verdict_pb2.VERDICT_STATE_FAIL or last.kind != analysis_pb2.MOVE_KIND_WRITE:
            return super().repair(task, failed, diagnostics)
        if failed.verdict.kind in _NO_REPAIR:
            raise NotFound("a kernel that deceives is not repaired")
        before = list(failed.candidate.moves[:-1])
        after = self.plan(task, failed.candidate.moves)
        broken = compose.kernel_of(after, after.group(last.group))
        subject = self._subject(task, before, last.group)
        failure = Failure(broken, failed.verdict, diagnostics)
        kernel = self._ask(task, subject, lambda size: prompt.repair(subject, failure, SIZES[size]), known=broken.text)
        kind = words.failure_kind(failed.verdict.kind)
        hypothesis = hypothesis_pb2.Hypothesis(
            moves=[*before, compose.move_of(last.group, kernel)],
            new_move_count=1,
            predicted_speedup=1.0,
            rationale=f"the model mends its kernel after {kind}",
            source=SOURCE,
        )
        return hypothesis, super().synthesize(task, hypothesis)

    def _subject(self, task: task_pb2.Task, before: Sequence[analysis_pb2.Move], name: str) -> Subject:
        plan, key = self.plan(task, before), digest.of_task(task)
        group = plan.group(name)
        parent, best = self._known.parent(key, before), self._known.best(key, plan.all_nodes(group))
        return Subject(plan, group, definition.signature(plan, group), task.precision, parent, best)

    def _ask(
        self, task: task_pb2.Task, subject: Subject, first: Callable[[int], tuple[Message, ...]], known: str
    ) -> Kernel:
        """The kernel that the model writes; `known` is the one that it must not repeat.

        Raises:
            NotFound: no answer could be used; says why. ModelFault: the server is away.
        """
        turn = Turn(self._model, self._turn_seconds)
        key = digest.of_task(task)
        size = self._sizes.fitting(key, lambda size: prompt.token_estimate(first(size)))
        asked = first(size)
        tries = 0
        while True:
            try:
                said = turn.answer(asked, None)
            except ModelFault as fault:
                is_too_long = fault.reason is ModelReason.CONTEXT_TOO_LONG
                if is_too_long and (shorter := self._sizes.refused(key, size)) is not None:
                    size = shorter
                    log.warning("%s; the prompt is shortened to size %d of %d", fault, size + 1, len(SIZES))
                    asked = first(size)
                    continue
                _kernels.labels(str(fault.reason)).inc()
                if fault.reason in MODEL_AWAY:
                    raise
                raise NotFound(f"no kernel of {subject.group.name} [{fault.reason}]: {fault}") from fault
            read = answer.read(said, subject.signature)
            if isinstance(read, Kernel) and read.text == known:
                read = Complaint(Fault.REPEATED, "it is the same kernel as before")
            if isinstance(read, Kernel):
                _kernels.labels("written").inc()
                return read
            _kernels.labels(str(read.fault)).inc()
            if tries == self._asked_again or not turn.may_ask_again:
                raise NotFound(
                    f"no kernel of {subject.group.name} [{read.fault}]: {tries + 1} answers could not be used; of the "
                    f"last, {read.text}"
                )
            tries += 1
            asked = prompt.again(first(size), said.text, read.text, subject.signature.entry)


def _legal(plan: Plan, group: Group) -> analysis_pb2.LegalMove | None:
    """The move that asks for a kernel of a group; None where there can be none."""
    try:
        definition.signature(plan, group)
    except (IllegalMove, BadInput):
        return None
    before = cost.of_group(plan, group)
    after = cost.at_once(plan, group)
    return analysis_pb2.LegalMove(
        move=analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_WRITE, group=group.name),
        before=before,
        after=after,
        effect="a language model writes its kernel",
    )
