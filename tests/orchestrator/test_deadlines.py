"""Those who wait for an agent wait longer than it may take, whatever a language model does in it."""

from __future__ import annotations

from agent_compile.compiler import PARTS_SECONDS
from agent_compile.toolchains.toolchain import Limits
from agent_synthesis.synthesizer import CAPTURE_DEADLINE_S
from orchestrator import agents
from warpsmith.models.model_turn import ASIDE_SECONDS, TURN_SECONDS
from warpsmith.service import Patience

ON_THE_WAY = 20.0
"""For all that is neither: messages, plans, prompts."""


def test_every_deadline_is_longer_than_the_sum_of_what_it_waits_for() -> None:
    assert agents.PROPOSE_SECONDS >= TURN_SECONDS + ON_THE_WAY
    assert agents.SYNTHESIZE_SECONDS >= CAPTURE_DEADLINE_S + ON_THE_WAY
    assert agents.WRITE_SECONDS >= CAPTURE_DEADLINE_S + TURN_SECONDS + ON_THE_WAY
    assert PARTS_SECONDS + Limits().wall_seconds + ASIDE_SECONDS + ON_THE_WAY <= agents.COMPILE_SECONDS
    # What the correctness agent waits for is what its client of the benchmark service allows.
    assert Patience().deadline_seconds == agents.COMPARE_SECONDS
    assert agents.VERIFY_SECONDS >= agents.COMPARE_SECONDS + ASIDE_SECONDS + ON_THE_WAY
