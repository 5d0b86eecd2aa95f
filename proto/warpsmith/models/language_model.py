"""What a language model is to an agent: messages and a JSON schema in, text out, or a typed fault.

The one idea: agents see this Protocol only. `connect` gives the client of an OpenAI-compatible server, whose library
is an extra: a system that uses no model does not need it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True)
class Answer:
    """What a model said."""

    text: str
    is_cut_off: bool
    """Whether it ran into the limit of tokens."""


class LanguageModel(Protocol):
    """Answers questions; safe to use from several threads."""

    def context_tokens(self) -> int:
        """Most tokens of a prompt and its answer together; 0 where the server does not say, or is down."""
        ...

    def answer(
        self, messages: Sequence[Message], schema: Mapping[str, Any] | None, seconds: float = math.inf
    ) -> Answer:
        """What the model says, under a JSON schema or (None) as it likes; nothing of that is checked here.

        `seconds`: how long the caller can wait, for a free slot and attempts after a fault too.

        Raises:
            ModelFault: there is no answer; says why.
        """
        ...
