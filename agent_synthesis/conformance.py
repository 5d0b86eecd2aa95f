"""Tells the author of a schedule or of a lowering whether it fits its role.

`python -m warpsmith.testing schedule NAME`, or `lowering NAME`, asks an installed one. In a test of the author's,
`check_schedule(MySchedule)` gives the findings, and `check_lowering(handlers, module, *args)` lowers a module that uses
the operation to one kernel's nest and compares what that means with PyTorch. Neither compiles or runs a kernel:
`warpsmith optimize` judges what comes of one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from agent_synthesis import testing
from agent_synthesis.emit import registry
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.lowering import groups
from agent_synthesis.lowering.forms import renamed
from agent_synthesis.nests import interpreter
from agent_synthesis.nests.ir import Nest
from agent_synthesis.nests.symbolic import HANDLERS, Handler
from agent_synthesis.schedule import Emission, Footprint, Offered, S, Schedule
from agent_synthesis.settings import Settings
from warpsmith.errors import IllegalMove
from warpsmith.graphs.capture import capture
from warpsmith.hardware import H200, Hardware
from warpsmith.testing import asking

MOST_ALTERNATIVES = 200
"""Of one nest: each is a move that a search has to look at."""


def nests() -> dict[str, Nest]:
    """What a schedule is asked about, by name: even and ragged sizes of each kind."""
    return {
        "gelu": testing.gelu(4096),
        "gelu, odd": testing.gelu(1023),
        "softmax": testing.softmax(64, 512),
        "softmax, odd": testing.softmax(3, 127),
        "layer norm": testing.layer_norm(16, 1024),
        "row dot": testing.row_dot(32, 256),
        "column sum": testing.column_sum(300, 70),
        "column softmax": testing.column_softmax(50, 33),
        "batch norm": testing.batch_norm(2, 3, 40),
        "group norm": testing.group_norm(2, 2, 4, 30),
        "running sum": testing.running_sum(5, 200),
        "running sum of columns": testing.column_scan(2, 60, 9),
        "max pool": _lowered(lambda x: torch.nn.functional.max_pool2d(x, 3, 2), (2, 3, 17, 19)),
        "convolution by channel": _lowered(
            lambda x, weight: torch.nn.functional.conv2d(x, weight, padding=1, groups=3), (2, 3, 17, 19), (3, 1, 3, 3)
        ),
        "convolution": _lowered(
            lambda x, weight: torch.nn.functional.conv2d(x, weight, padding=1), (2, 40, 17, 19), (48, 40, 3, 3)
        ),
        "transposed sum": _lowered(lambda x, y: x + y.T, (48, 40), (40, 48)),
        "matrix product": _lowered(lambda x, y: torch.relu(x @ y.T), (256, 128), (512, 128)),
    }


def _lowered(function: Callable[..., torch.Tensor], *shapes: tuple[int, ...]) -> Nest:
    index = GraphIndex(capture(testing.Applied(function), tuple(torch.zeros(shape) for shape in shapes)))
    nest = groups.lower(index, [node.name for node in index.graph.nodes], list(index.graph.outputs))
    assert isinstance(nest, Nest), nest
    return nest


def check_schedule(
    make: Callable[[Hardware], Schedule[S]], card: Hardware = H200, asked: Mapping[str, Nest] | None = None
) -> list[str]:
    """Findings about the schedule that `make` gives for a card; empty when it fits.

    `asked`: nests by name; those of `nests()` where there are none.
    """

    def questions() -> Iterator[str]:
        given = asked or nests()
        schedule = asking.made(make, card)
        _require_members(schedule, given)
        yield from _of_schedule(Offered(schedule), Offered(make(card)), given)

    return asking.findings(questions())


def _require_members(schedule: Schedule[Settings], asked: Mapping[str, Nest]) -> None:
    """Raises Unfit where a member is missing, or gives something of another type for a nest that is accepted."""
    asking.member(schedule, "name", str)
    asking.member(schedule, "target", int)
    settings = asking.member(schedule, "settings", type)
    if not issubclass(settings, Settings):
        raise asking.Unfit(f"settings is {settings.__name__}, no subclass of agent_synthesis.settings.Settings")
    for nest in asked.values():
        if asking.method(schedule, "accepts", nest, gives=bool):
            defaults = asking.method(schedule, "defaults", nest, gives=settings)
            others: Sequence[object] = asking.method(schedule, "alternatives", nest, defaults, gives=(list, tuple))
            if strange := [each for each in others if not isinstance(each, settings)]:
                raise asking.Unfit(f"alternatives gives {type(strange[0]).__name__}, not {settings.__name__}")
            asking.method(schedule, "footprint", nest, defaults, gives=Footprint)
            with contextlib.suppress(IllegalMove):  # which settings it refuses is asked below
                asking.method(schedule, "emit", nest, defaults, gives=Emission)


def _of_schedule(schedule: Offered, again: Offered, asked: Mapping[str, Nest]) -> Iterator[str]:
    if any(schedule.name == each.name and type(each.made) is not type(schedule.made) for each in _built_in(schedule)):
        yield f"{schedule.name!r} is the name of a schedule of Warpsmith's own"
    accepted = {name: nest for name, nest in asked.items() if schedule.accepts(nest)}
    if not accepted:
        yield f"it accepts none of {len(asked)} nests: {', '.join(asked)}"
    for name, nest in accepted.items():
        for finding in _of_nest(schedule, again, nest):
            yield f"{name}: {finding}"


def _built_in(schedule: Offered) -> tuple[Offered, ...]:
    return registry.every_schedule(schedule.target)


def _of_nest(schedule: Offered, again: Offered, nest: Nest) -> Iterator[str]:
    defaults = schedule.defaults(nest)
    others = list(schedule.alternatives(nest, defaults))
    other = renamed(nest, "another", {buffer.name: f"another_{buffer.name}" for buffer in nest.buffers})
    other.memo.clear()  # so that it is asked itself
    if not again.accepts(other) or again.defaults(other) != defaults:
        yield "what it answers depends on what the nest or its buffers are called"
    if len(others) > MOST_ALTERNATIVES:
        yield f"{len(others)} alternatives; {MOST_ALTERNATIVES} at most"
    if defaults in others:
        yield "the settings to begin with are among their own alternatives"
    for settings in (defaults, *others[:MOST_ALTERNATIVES]):
        if schedule.settings.from_wire(*settings.to_wire()) != settings:
            yield f"settings that it names are others once they were archived: {settings}"
        try:
            emission = schedule.emit(nest, settings)
        except IllegalMove as refused:
            yield f"settings that it names are refused: {refused}"
            continue
        if emission != again.emit(nest, settings):
            yield "equal settings give different sources"
        if not emission.launches:
            yield "nothing is launched"
        if any(launch.entry not in emission.text for launch in emission.launches):
            yield "a launch names a kernel that is not in the source"
        if missing := [each for each in emission.headers if not (registry.INCLUDE_DIRECTORY / each).is_file()]:
            yield f"there is no header {missing[0]}"
        cost = schedule.footprint(nest, settings)
        if cost.extra_bytes < 0 or cost.parallel_count < 1 or cost.launch_count < 1:
            yield f"a cost that cannot be: {cost}"


def check_lowering(handlers: Mapping[str, Handler], module: torch.nn.Module, *args: torch.Tensor) -> list[str]:
    """Findings about handlers, by what becomes of a module that uses their operations; empty when they fit.

    The module's forward takes tensors and gives one. Where a plugin of the operation is chosen, that one is asked.
    """
    groups.install_plugins()
    findings = _of_handlers(handlers)
    if findings:
        return findings
    added = {name: handler for name, handler in handlers.items() if name not in HANDLERS}
    HANDLERS.update(added)
    try:
        return list(_of_module(module, args))
    finally:
        for name in added:
            del HANDLERS[name]


def check_handlers(make: Callable[[], Mapping[str, Handler]]) -> list[str]:
    """Findings about the handlers that `make` gives, by themselves; empty when they fit."""

    def questions() -> Iterator[str]:
        handlers = asking.made(make)
        findings = _of_handlers(handlers)
        yield from findings
        if not findings and (known := sorted(set(handlers) & HANDLERS.keys())):
            yield f"it has handlers of {', '.join(known)}, which have one"

    return asking.findings(questions())


def _of_handlers(handlers: Mapping[str, Handler]) -> list[str]:
    if not isinstance(handlers, Mapping) or not handlers:
        return ["it has to give a mapping: an operation's name, such as 'hypot', to what lowers it"]
    return [f"{name!r} is not an operation's name with something to call" for name, handler in handlers.items()
            if not (isinstance(name, str) and name.isidentifier() and callable(handler))]  # fmt: skip


def _of_module(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> Iterator[str]:
    index = GraphIndex(capture(module, args))
    calls = [node.name for node in index.graph.nodes]
    nest = groups.lower(index, calls, list(index.graph.outputs))
    if isinstance(nest, groups.Refusal):
        yield f"the module is not one kernel: {nest.reason}"
        return
    wanted = module(*args)
    made = torch.empty(wanted.numel(), dtype=wanted.dtype)
    names = [source.name for source in index.graph.sources]
    memory = {name: tensor.detach().clone().flatten() for name, tensor in zip(names, args, strict=False)}
    interpreter.run(nest, {**memory, index.graph.outputs[0]: made})
    try:
        torch.testing.assert_close(made.reshape(wanted.shape), wanted)
    except AssertionError as error:
        yield f"it computes something else than PyTorch: {' '.join(str(error).split())[:200]}"
