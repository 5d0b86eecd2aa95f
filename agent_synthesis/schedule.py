"""What a schedule is: a way to run a `Nest` on a target, with the settings that moves may change.

Emitter families are schedules, not operators. The built-ins live in `emit/`, one file a schedule and target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from agent_synthesis.nests.ir import Nest
from agent_synthesis.settings import Settings
from warpsmith.contract import earlier
from warpsmith.errors import BadInput, IllegalMove
from warpsmith.v1 import candidate_pb2, task_pb2

S = TypeVar("S", bound=Settings)
T = TypeVar("T")


@dataclass(frozen=True)
class Footprint:
    """What a schedule costs beyond the nest's own bytes.

    `extra_bytes`: second sweeps that leave the chip, and workspaces, in bytes.
    `parallel_count`: blocks (CUDA) or threads (CPU) that can be busy at once.
    """

    extra_bytes: int
    parallel_count: int
    launch_count: int
    tensor_flop_count: int = 0
    """Floating-point operations that tensor cores make on 16-bit operands in place of the nest's matrix products."""


@dataclass(frozen=True)
class Emission:
    """Device source of one nest: function definitions, without the includes that every program has.

    `headers`: names of files in `include/` that the text needs.
    `launches`: in order; buffers are named as in the nest, workspaces as in `workspaces`.
    """

    text: str
    headers: tuple[str, ...]
    launches: tuple[candidate_pb2.Launch, ...]
    workspaces: tuple[candidate_pb2.Buffer, ...] = ()


class Schedule(Protocol[S]):
    """A way to run nests on one target, set by settings of its own type.

    What it answers does not depend on what a nest and its buffers are called: it is asked once of all nests that are
    otherwise equal. Only `emit` writes names.
    """

    @property
    def name(self) -> str:
        """What moves call it."""
        ...

    @property
    def target(self) -> task_pb2.Target.ValueType:
        """What it writes for."""
        ...

    @property
    def settings(self) -> type[S]:
        """What can be set."""
        ...

    def accepts(self, nest: Nest) -> bool:
        """Whether it can run this nest."""
        ...

    def defaults(self, nest: Nest) -> S:
        """The settings to begin with: a heuristic's best guess, always legal."""
        ...

    def alternatives(self, nest: Nest, current: S) -> Sequence[S]:
        """Other legal settings, one change away from the current ones."""
        ...

    def footprint(self, nest: Nest, settings: S) -> Footprint:
        """What it would cost, for the roofline."""
        ...

    def emit(self, nest: Nest, settings: S) -> Emission:
        """The source and launches.

        Raises:
            IllegalMove: the settings cannot run this nest (too many registers, too much shared memory).
        """
        ...


class Offered:
    """A schedule among others: who asks it holds settings of a type that only it knows.

    Settings of another schedule raise IllegalMove.

    Raises:
        BadInput: a setting is called what one of ours was called: archives could not tell them apart.
    """

    def __init__(self, schedule: Schedule[S]) -> None:
        def own(settings: Settings) -> S:
            if not isinstance(settings, schedule.settings):
                raise IllegalMove(f"schedule {schedule.name} has settings of its own, no {type(settings).__name__}")
            return settings

        for name, declared in schedule.settings.declared().items():
            if earlier.is_taken(name, map(str, declared.values)):
                raise BadInput(f"schedule {schedule.name}: {name!r}, or what it may be, was a name of another setting")
        self.made: object = schedule
        """The schedule itself."""
        self.name = schedule.name
        self.target = schedule.target
        self.settings: type[Settings] = schedule.settings
        self.accepts: Callable[[Nest], bool] = lambda nest: self._known(nest, schedule.accepts)
        self.defaults: Callable[[Nest], Settings] = lambda nest: self._known(nest, schedule.defaults)
        self.alternatives: Callable[[Nest, Settings], Sequence[Settings]] = lambda nest, current: self._known(
            nest, schedule.alternatives, own(current)
        )
        self.footprint: Callable[[Nest, Settings], Footprint] = lambda nest, given: self._known(
            nest, schedule.footprint, own(given)
        )
        leads = getattr(schedule, "leads", None)
        self.leads: Callable[[Nest], bool] = lambda nest: leads is not None and self._known(nest, leads)
        """Whether it is preferred to those before it for this nest; no schedule has to say."""
        self.emit: Callable[[Nest, Settings], Emission] = lambda nest, given: schedule.emit(nest, own(given))

    def _known(self, nest: Nest, question: Callable[..., T], *settings: Settings) -> T:
        """What the schedule answers, asked once of all nests that differ in names alone."""
        shape, key = nest.shape, (self, question.__name__, *settings)
        if key not in shape.memo:
            shape.memo[key] = question(shape, *settings)
        found: T = shape.memo[key]
        return found
