"""What a run says while somebody waits for it."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from orchestrator import testing
from orchestrator.search.beam import Beam
from orchestrator.search_run import SearchRun
from orchestrator.serving.device_gate import DeviceGate
from orchestrator.walks import Effort
from warpsmith.v1 import benchmark_service_pb2, run_pb2, trial_pb2

EFFORT = Effort(parallel_trials=2, retry_pause_seconds=0.0, settle_seconds=5.0)


class Listener:
    """Remembers what a run said in each state, and calls `heard` with it."""

    def __init__(self, heard: Callable[[str], object]) -> None:
        self.said = defaultdict[int, list[str]](list)
        self._heard = heard

    def run_changed(self, run: run_pb2.Run) -> None:
        if run.message:
            self.said[run.state].append(run.message)
            self._heard(run.message)

    def trial_ended(self, trial: trial_pb2.Trial) -> None:
        del trial


def run_of(world: testing.World, listener: Listener, gate: DeviceGate) -> SearchRun:
    run = run_pb2.Run(id="r", task=testing.task(), budget=run_pb2.Budget(wall_seconds=20))
    return SearchRun(run, world.agents(), gate, Beam(), listener, effort=EFFORT)


def test_a_run_says_what_it_waits_for_while_it_prepares_and_finishes() -> None:
    class Slow(testing.World):
        """Whose reference takes until the run has said that it waits for it."""

        def RunReference(self, *args: Any, **kwargs: Any) -> benchmark_service_pb2.RunReferenceResponse:
            assert is_said.wait(timeout=30)
            return super().RunReference(*args, **kwargs)

    is_said, world = threading.Event(), Slow()
    listener = Listener(lambda what: is_said.set() if "timing eager" in what else None)
    run_of(world, listener, DeviceGate(world.agents().benchmarks)).execute()
    assert listener.said[run_pb2.RUN_STATE_PREPARING][-1] == "timing eager and what torch.compile makes of it"
    assert not listener.said[run_pb2.RUN_STATE_SEARCHING]
    again, final, *_ = listener.said[run_pb2.RUN_STATE_FINISHING]
    assert again == "timing the best 3 once more"
    assert final.startswith("judging #")


def test_a_run_says_that_another_one_has_the_device() -> None:
    is_said, world = threading.Event(), testing.World()
    gate = DeviceGate(world.agents().benchmarks)
    waiting = run_of(world, Listener(lambda what: is_said.set() if "another run" in what else None), gate)
    thread = threading.Thread(target=waiting.execute)
    with gate.turn():
        thread.start()
        assert is_said.wait(timeout=30)
    thread.join(timeout=30)
    assert waiting.run.state == run_pb2.RUN_STATE_FASTER
