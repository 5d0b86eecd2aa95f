"""A reasoner that lets a language model choose what to try, from the legal moves only.

The one idea: the model adds judgement, never risk. Its choices are numbers of options that the roofline reasoner
could have proposed too; an answer that cannot be used is asked for again, at most twice, with the reason; after that,
and whenever there is no answer, the roofline reasoner takes the turn, and says why the model had no say.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from prometheus_client import Counter

from agent_reasoning.model import language_model_answer, language_model_options, language_model_prompt
from agent_reasoning.model.language_model_answer import Choice, Chosen
from agent_reasoning.model.language_model_options import Option
from agent_reasoning.model.language_model_prompt import SIZES, Prompt
from agent_reasoning.roofline_reasoner import DEFAULT_LIMIT, RooflineReasoner
from warpsmith import digest, settings
from warpsmith.errors import MODEL_AWAY, ModelFault, ModelReason
from warpsmith.models import server
from warpsmith.models.language_model import LanguageModel
from warpsmith.models.model_turn import TURN_SECONDS, PromptSizes, Turn
from warpsmith.v1 import hypothesis_pb2, reasoning_service_pb2

log = logging.getLogger("warpsmith")

SOURCE = "vllm"
MOST_CHOICES = 4
"""Hypotheses asked for in one answer: later ones are better chosen after the first are measured."""
ASKED_AGAIN = 2
"""How often an answer that cannot be used is asked for again."""

_turns = Counter("warpsmith_model_turns_total", "Turns of the reasoner, by who took them and why.", ["by", "reason"])
_answers = Counter("warpsmith_model_answers_total", "Answers read, by what they were.", ["outcome"])
_choices = Counter("warpsmith_model_choices_total", "Hypotheses in answers that were read.", ["kind"])

Request = reasoning_service_pb2.ProposeHypothesesRequest
Response = reasoning_service_pb2.ProposeHypothesesResponse


@dataclass(frozen=True)
class Lost:
    """The model has no say in this turn."""

    reason: str
    """Of `ModelReason` or `language_model_answer.Fault`."""
    text: str


class LanguageModelReasoner:
    """Proposes what a language model chooses; see `Reasoner`. The model's choices come first, then roofline's."""

    def __init__(
        self,
        model: LanguageModel | None = None,
        *,
        asked_again: int = ASKED_AGAIN,
        turn_seconds: float = TURN_SECONDS,
    ) -> None:
        """Without a model, connects to the one that the environment names.

        Raises:
            BadInput: the model's library is not installed, or the server refuses address, model name or key.
        """
        self._model = model or server.connect(settings.read().model)
        self._asked_again, self._turn_seconds = asked_again, turn_seconds
        self._roofline = RooflineReasoner()
        self._sizes = PromptSizes(self._model, len(SIZES))

    def propose(self, request: Request) -> Response:
        """Asks the model, unless there is nothing to choose or nothing to win."""
        fallback = self._roofline.propose(request)
        if not fallback.hypotheses:
            return fallback
        options = language_model_options.of(request)
        match self.choose(request, options):
            case Lost(reason, text):
                _turns.labels("roofline", reason).inc()
                log.warning("the roofline reasoner takes the turn: %s", text)
                for hypothesis in fallback.hypotheses:
                    hypothesis.rationale += f" [the model had no say: {reason}]"
                fallback.model_away = text if reason in MODEL_AWAY else ""
                return fallback
            case choices:
                _turns.labels("model", "chosen").inc()
                return _merged(request, options, choices, fallback)

    def choose(self, request: Request, options: Sequence[Option]) -> tuple[Choice, ...] | Lost:
        """What the model chooses among the options that no trial has walked; never raises for what a model does."""
        open_options = language_model_options.untried(options, request)
        if not open_options:
            return Lost(language_model_answer.Fault.REPEATED, "every option has been tried")
        count = min(request.limit or DEFAULT_LIMIT, MOST_CHOICES)
        try:
            return self._ask(request, options, open_options, count)
        except ModelFault as fault:
            return Lost(fault.reason, str(fault))

    def _ask(
        self, request: Request, options: Sequence[Option], open_options: Sequence[int], count: int
    ) -> tuple[Choice, ...] | Lost:
        def first(size: int) -> Prompt:
            return language_model_prompt.first(request, options, open_options, count, SIZES[size])

        turn = Turn(self._model, self._turn_seconds)
        task = digest.of_task(request.task)
        size = self._sizes.fitting(task, lambda size: first(size).token_estimate)
        prompt = first(size)
        asked_again = 0
        while True:
            try:
                schema = language_model_answer.schema(prompt.open_options, min(count, len(prompt.open_options)))
                answer = turn.answer(prompt.messages, schema)
            except ModelFault as fault:
                if fault.reason is not ModelReason.CONTEXT_TOO_LONG:
                    raise
                shorter = self._sizes.refused(task, size)
                if shorter is None:
                    raise
                size = shorter
                log.warning("%s; the prompt is shortened to size %d of %d", fault, size + 1, len(SIZES))
                prompt = first(size)
                continue
            read = language_model_answer.read(answer, prompt.open_options, len(options), count)
            if isinstance(read, Chosen):
                _answers.labels("chosen").inc()
                _choices.labels("legal").inc(len(read.choices))
                _choices.labels("dropped").inc(read.dropped_count)
                return _noted(read.choices, options) if size else read.choices
            _answers.labels(read.fault).inc()
            if asked_again == self._asked_again or not turn.may_ask_again:
                return Lost(read.fault, f"{asked_again + 1} answers could not be used; of the last, {read.text}")
            asked_again += 1
            prompt = language_model_prompt.again(first(size), answer.text, read.text)


def _noted(choices: Sequence[Choice], options: Sequence[Option]) -> tuple[Choice, ...]:
    """The same, saying that the model did not see all."""
    note = "[the prompt was shortened]"
    return tuple(replace(each, reason=f"{each.reason or options[each.option].text} {note}") for each in choices)


def _merged(request: Request, options: Sequence[Option], choices: Sequence[Choice], fallback: Response) -> Response:
    """The model's choices, then what the roofline reasoner proposes beside them, up to the limit."""
    response = Response()
    known: set[str] = set()
    for choice in choices:
        option = options[choice.option]
        hypothesis = hypothesis_pb2.Hypothesis(
            moves=[*request.analysis.moves, *option.moves],
            new_move_count=len(option.moves),
            predicted_speedup=choice.gain or option.predicted_speedup or 1.0,
            rationale=choice.reason or option.text,
            source=SOURCE,
        )
        known.add(digest.of_moves(hypothesis.moves))
        response.hypotheses.append(hypothesis)
    rest = [each for each in fallback.hypotheses if digest.of_moves(each.moves) not in known]
    limit = request.limit or DEFAULT_LIMIT
    response.hypotheses.extend(rest[: max(0, limit - len(response.hypotheses))])
    return response
