"""Has a language model propose inputs that a kernel may get wrong, as data under a schema. Off by default.

The one idea: a proposal can only make judging stricter. It adds comparisons to those that are always made, from tables
of the kit; where there is none (no model, no answer, no sense), judging is what it always is. Finalists only: a
question takes seconds.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from importlib import resources
from string import Template
from typing import Any, Final

from prometheus_client import Counter

from agent_correctness.checks.check import Case, seed_from
from warpsmith.errors import ModelFault
from warpsmith.models import server
from warpsmith.models.json_answer import last_object, whole_items, without_thoughts
from warpsmith.models.language_model import LanguageModel, Message
from warpsmith.models.model_turn import ASIDE_SECONDS, Turn
from warpsmith.models.proposed_values import BASES, OFFSETS, SCALES, SHARES, SPECIALS, Recipe, seed_of
from warpsmith.models.untrusted import quoted
from warpsmith.settings import Settings
from warpsmith.v1 import correctness_service_pb2, timing_pb2, verdict_pb2

log = logging.getLogger("warpsmith")

VERSION = "adversary_v1"
"""Name of the prompt files."""
AGENT = "correctness"
"""What WARPSMITH_MODEL_ASSISTS calls this agent."""
MOST = 3
"""Inputs of one answer that are used."""
MODULE_CHARACTERS = 3000
KERNEL_CHARACTERS = 8000
TABLES: Final[Mapping[str, Sequence[object]]] = {
    "base": BASES, "scale": SCALES, "offset": OFFSETS, "special": SPECIALS, "share": SHARES,
}  # fmt: skip

_proposals = Counter("warpsmith_model_inputs_total", "Inputs that a model proposed, by what they were.", ["kind"])
for _kind in ("used", "dropped", "none"):
    _proposals.labels(_kind)

Request = correctness_service_pb2.VerifyArtifactRequest


class Adversary:
    """Proposes cases for one kernel at a time."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model

    @staticmethod
    def of(settings: Settings) -> Adversary | None:
        """One with the model of the settings, where they allow this agent one.

        Raises:
            BadInput: the model's library is not installed, or the server refuses the settings.
        """
        return Adversary(server.connect(settings.model)) if AGENT in settings.model_assists else None

    def cases(self, request: Request, draw: random.Random) -> list[Case]:
        """At most `MOST` cases for a finalist's kernel; none for others, or where the model has nothing to say."""
        sources = request.program.sources
        if request.tier != timing_pb2.TIER_FINAL or not sources:
            return []
        try:
            answer = Turn(self._model, ASIDE_SECONDS).answer(messages(request), schema())
        except ModelFault as fault:
            log.warning("no inputs are proposed: %s", fault)
            _proposals.labels("none").inc()
            return []
        recipes = read(without_thoughts(answer))
        _proposals.labels("used" if recipes else "none").inc(max(1, len(recipes)))
        return [(verdict_pb2.VALUE_FAMILY_PROPOSED, seed_of(recipe, seed_from(draw))) for recipe in recipes]


def read(text: str) -> list[Recipe]:
    """The recipes of an answer that are from the tables, each once; never raises."""
    listed = (last_object(text, "inputs") or {"inputs": whole_items(text, "inputs")}).get("inputs")
    if not isinstance(listed, list):
        return []
    found: dict[Recipe, None] = {}
    for item in listed[: 2 * MOST]:
        recipe = _recipe(item) if isinstance(item, dict) else None
        if recipe is None:
            _proposals.labels("dropped").inc()
        else:
            found[recipe] = None
    return list(found)[:MOST]


def _recipe(item: Mapping[Any, Any]) -> Recipe | None:
    places: dict[str, int] = {}
    for name, table in TABLES.items():
        value = item.get(name, table[0])
        if isinstance(value, bool) or not isinstance(value, str | int | float) or value not in table:
            return None
        places[name] = table.index(value)
    return Recipe(**places)


def messages(request: Request) -> list[Message]:
    """The question."""
    task = request.task
    module = next((each.content for each in task.sources if each.path == task.entry_path), b"")
    system = _file("system").substitute(
        count=MOST, **{f"{name}s": ", ".join(map(str, table)) for name, table in TABLES.items()}
    )
    user = _file("user").substitute(
        module=quoted("module", module.decode("utf-8", errors="replace"), MODULE_CHARACTERS),
        kernel=quoted("kernel", request.program.sources[0].text, KERNEL_CHARACTERS),
    )
    return [Message("system", system.strip()), Message("user", user.strip())]


def schema() -> dict[str, Any]:
    """What an answer must be."""
    properties = {name: {"enum": list(table)} for name, table in TABLES.items()}
    item = {"type": "object", "properties": properties, "required": list(TABLES), "additionalProperties": False}
    return {
        "type": "object",
        "properties": {"inputs": {"type": "array", "minItems": 1, "maxItems": MOST, "items": item}},
        "required": ["inputs"],
        "additionalProperties": False,
    }


def _file(part: str) -> Template:
    place = resources.files("agent_correctness") / "prompts" / f"{VERSION}.{part}.txt"
    return Template(place.read_text(encoding="utf-8"))
