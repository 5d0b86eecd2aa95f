"""Has a language model say in one line what a compiler's message means, to help repair the kernel. Off by default.

The one idea: an explanation stands beside the message and never in its place. It is one line of plain letters; where
there is none (no model, no answer, no sense) nothing is missing.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from importlib import resources
from string import Template

from warpsmith import digest
from warpsmith.errors import ModelFault
from warpsmith.models import server
from warpsmith.models.json_answer import last_object, without_thoughts
from warpsmith.models.language_model import LanguageModel, Message
from warpsmith.models.model_turn import ASIDE_SECONDS, Turn
from warpsmith.models.untrusted import one_line, quoted
from warpsmith.settings import Settings
from warpsmith.v1 import candidate_pb2

log = logging.getLogger("warpsmith")

VERSION = "explain_v1"
"""Name of the prompt files."""
AGENT = "compile"
"""What WARPSMITH_MODEL_ASSISTS calls this agent."""
SOURCE_CHARACTERS = 6000
SAID_CHARACTERS = 2000
LINE_CHARACTERS = 200
PATTERN = "^[A-Za-z0-9 ,.;:()%/+=_<>*'-]{1,120}$"
"""At most 128 times: see `agent_reasoning.model.language_model_answer`."""
_REMEMBERED = 256


class Explainer:
    """Explains messages; remembers what it said, so that equal requests have equal answers for as long as it lives."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._known: OrderedDict[str, str] = OrderedDict()

    @staticmethod
    def of(settings: Settings) -> Explainer | None:
        """One with the model of the settings, where they allow this agent one.

        Raises:
            BadInput: the model's library is not installed, or the server refuses the settings.
        """
        return Explainer(server.connect(settings.model)) if AGENT in settings.model_assists else None

    def explain(self, program: candidate_pb2.Program, diagnostics: str) -> str:
        """One line, or nothing; never raises for what a model does."""
        source = program.sources[0].text if program.sources else ""
        key = digest.digest("explanation", source, diagnostics)
        if key not in self._known:
            try:
                answer = Turn(self._model, ASIDE_SECONDS).answer(messages(source, diagnostics), schema())
            except ModelFault as fault:
                log.warning("no explanation: %s", fault)
                return ""
            found = (last_object(without_thoughts(answer), "explanation") or {}).get("explanation")
            self._known[key] = one_line(found, LINE_CHARACTERS) if isinstance(found, str) else ""
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return self._known[key]


def messages(source: str, diagnostics: str) -> list[Message]:
    """The question."""
    user = _file("user").substitute(
        source=quoted("source", source, SOURCE_CHARACTERS), said=quoted("said", diagnostics, SAID_CHARACTERS)
    )
    return [Message("system", _file("system").substitute().strip()), Message("user", user.strip())]


def schema() -> dict[str, object]:
    """What an answer must be."""
    return {
        "type": "object",
        "properties": {"explanation": {"type": "string", "pattern": PATTERN}},
        "required": ["explanation"],
        "additionalProperties": False,
    }


def _file(part: str) -> Template:
    place = resources.files("agent_compile") / "prompts" / f"{VERSION}.{part}.txt"
    return Template(place.read_text(encoding="utf-8"))
