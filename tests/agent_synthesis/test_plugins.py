"""Schedules and operations from outside: offered with ours, judged by their suites, and refused in one sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint

import pytest
import recurrent_forms as forms
import torch
from lowered_hypot import handlers, hypot
from one_thread_an_element import OneThreadAnElement
from torch import nn
from torch.nn.functional import conv2d, instance_norm, max_pool2d, scaled_dot_product_attention
from training_steps import Tried, of

from agent_synthesis import conformance, generator
from agent_synthesis.bundle import Member, bundle
from agent_synthesis.emit import registry
from agent_synthesis.emit.cuda.pointwise import CudaPointwise
from agent_synthesis.graphs.graph_index import GraphIndex
from agent_synthesis.lowering import groups
from agent_synthesis.lowering.forms import renamed
from agent_synthesis.lowering.handlers.pointwise import elementwise
from agent_synthesis.nests.ir import Nest, Type
from agent_synthesis.nests.symbolic import HANDLERS, Handler
from agent_synthesis.plans.plan import schedule_named, schedules_for
from agent_synthesis.rewrite.calls import replaced
from agent_synthesis.rewrite.loops.unrolled import replacements_by_steps
from agent_synthesis.schedule import Offered
from agent_synthesis.settings import Settings
from agent_synthesis.synthesizer import BuiltInSynthesizer
from agent_synthesis.testing import Applied, Recurrent, bags, concatenation, gelu, norm_backward, softmax
from warpsmith import plugins, testing
from warpsmith.errors import BadInput, UnknownPlugin
from warpsmith.graphs.capture import capture
from warpsmith.graphs.library.attention import BACKWARD
from warpsmith.hardware import H200
from warpsmith.program_steps import LOOP
from warpsmith.v1 import task_pb2

CUDA = task_pb2.TARGET_CUDA
Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs entry points, given as (role, name, object), and chooses them, where not told otherwise."""
    caches = (registry.schedules, registry.every_schedule, registry._chosen, groups.install_plugins,
              generator.emitter_digest)  # fmt: skip
    known = dict(HANDLERS)

    def forget() -> None:
        for cache in caches:
            cache.cache_clear()

    def installed(*points: tuple[str, str, str], chosen: bool = True) -> None:
        made = [EntryPoint(name, value, f"warpsmith.{role}") for role, name, value in points]
        monkeypatch.setattr(plugins, "entry_points", lambda group: [each for each in made if each.group == group])
        for role, name, _ in points if chosen else ():
            monkeypatch.setenv(plugins.variable(role), name)
        forget()

    yield installed
    monkeypatch.undo()
    HANDLERS.clear()
    HANDLERS.update(known)
    forget()


def test_what_is_only_installed_changes_nothing(install: Install) -> None:
    before = generator.emitter_digest(), [each.name for each in registry.every_schedule(CUDA)]
    points = (
        ("schedule", "one_thread", "one_thread_an_element:OneThreadAnElement"),
        ("lowering", "hypot", "lowered_hypot:handlers"),
        ("lowering", "absent", "no_such_package:Thing"),
    )
    install(*points, chosen=False)
    BuiltInSynthesizer()
    assert (generator.emitter_digest(), [each.name for each in registry.every_schedule(CUDA)]) == before
    assert "hypot" not in HANDLERS


def test_a_chosen_schedule_is_offered_after_ours(install: Install) -> None:
    before = generator.emitter_digest()
    install(("schedule", "one_thread", "one_thread_an_element:OneThreadAnElement"))
    offered = [each.name for each in schedules_for(CUDA, gelu(4096))]
    assert offered == ["cuda_pointwise", "one_thread_an_element"]
    assert "one_thread_an_element" not in [each.name for each in schedules_for(CUDA, softmax(8, 64))]
    assert schedule_named(CUDA, "one_thread_an_element").made == OneThreadAnElement(H200)
    assert registry.schedules(task_pb2.TARGET_CPU) == registry._CPU
    assert generator.emitter_digest() != before


def test_a_chosen_lowering_makes_a_kernel_of_its_operation(install: Install) -> None:
    args = (torch.randn(8, 16), torch.randn(16))
    assert conformance.check_lowering(handlers(), Applied(torch.hypot), *args) == []
    assert "hypot" not in HANDLERS
    install(("lowering", "hypot", "lowered_hypot:handlers"))
    assert conformance.check_lowering(handlers(), Applied(torch.hypot), *args) == []
    assert "hypot" in HANDLERS


def test_its_suite_says_where_a_lowering_is_wrong() -> None:
    args = (torch.randn(8, 16), torch.randn(8, 16))
    wrong: dict[str, Handler] = {"hypot": elementwise(2, conformance_kind(), lambda a, _: a)}
    (found,) = conformance.check_lowering(wrong, Applied(torch.hypot), *args)
    assert found.startswith("it computes something else than PyTorch: ")
    (found,) = conformance.check_lowering(handlers(), Applied(torch.nextafter), *args)
    assert found == "the module is not one kernel: nextafter is not lowered"
    (found,) = conformance.check_lowering(handlers(), Applied(torch.hypot), *(each.double() for each in args))
    assert found == "the module is not one kernel: hypot in float64 would have to be scaled"
    assert conformance.check_lowering({"hypot": 3}, Applied(torch.hypot), *args)  # type: ignore[dict-item]
    assert conformance.check_lowering({}, Applied(torch.hypot), *args)


def conformance_kind() -> object:
    from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as Kind

    return Kind.DEFAULT


@dataclass(frozen=True)
class Careless(OneThreadAnElement):
    """Names settings that it refuses, and begins with one of its own alternatives."""

    def alternatives(self, nest: Nest, current: Settings) -> Sequence[Settings]:
        """One that is the same, and one that no block can have."""
        del nest
        return [current, replace(current, threads=4096)]


@dataclass(frozen=True)
class Naming(OneThreadAnElement):
    """Takes nests of some names only."""

    def accepts(self, nest: Nest) -> bool:
        """Of those that the suite makes."""
        return nest.name.startswith("ws_") and super().accepts(nest)


def networks() -> dict[str, Nest]:
    """Recurrent ones, which no schedule of another kind is asked about."""
    found = {}
    for network in (nn.LSTM(8, 16, 3), nn.GRU(7, 9, 2, bidirectional=True), nn.RNN(8, 130)):
        cells = network.num_layers * (1 + network.bidirectional)
        state = torch.zeros(cells, 4, network.hidden_size)
        states = (state, state) if isinstance(network, nn.LSTM) else (state,)
        index = GraphIndex(capture(Recurrent(network), (torch.zeros(5, 4, network.input_size), *states)))
        nest = groups.lower(index, [node.name for node in index.graph.nodes], list(index.graph.outputs))
        assert isinstance(nest, Nest), nest
        found[type(network).__name__] = nest
    return found


def loops() -> dict[str, Nest]:
    """Steps of cells that PyTorch has no call for."""
    found = {}
    for name, steps in forms.OTHERS.items():
        args = forms.args(5, 3, 7, 9, torch.float32)
        (made,) = replacements_by_steps(index := GraphIndex(capture(forms.Gates(steps, 7, 9), args))).values()
        index = GraphIndex(replaced(index.graph, made))
        (node,) = (each.name for each in index.graph.nodes if each.target == LOOP)
        nest = groups.lower(index, [node], index.results(node))
        assert isinstance(nest, Nest), nest
        found[name] = nest
    return found


def concatenations() -> dict[str, Nest]:
    """Of parts that are worth a kernel each."""
    return {
        "concatenation": concatenation(8, (40, 64), 4096),
        "concatenation, odd": concatenation(9, (33, 7, 65), 4091),
        "concatenation, centred": concatenation(8, (40, 64), 4096, normalised=True),
    }


def summed() -> dict[str, Nest]:
    """Nests that sum over their rows, which others are not asked about."""
    return {
        "norm": norm_backward(512, 1024), "norm, bfloat16": norm_backward(96, 4096, Type.BF16),
        "norm, odd": norm_backward(77, 333), "elements": norm_backward(300, 64, reduced=False),
    }  # fmt: skip


def parts() -> dict[str, Nest]:
    """Nests that reduce parts of rows, which others are not asked about."""
    return {"bags": bags(4096, 300, 64), "bags, odd": bags(77, 13, 35, Type.BF16), "elements": bags(500, 40, 1)}


def side_by_side() -> dict[str, Nest]:
    """Nests that are launched as one."""
    found: dict[str, Nest] = {}
    schedule = CudaPointwise(H200)
    for name, sizes in (("two", (4096, 4096)), ("odd", (77, 1023, 5))):
        members = []
        for number, size in enumerate(sizes):
            nest = gelu(size)
            own = {buffer.name: f"{buffer.name}{number}" for buffer in nest.buffers}
            nest = renamed(nest, f"gelu{number}", own)
            members.append(Member(nest, schedule.name, schedule.defaults(nest), sizes.index(size)))
        found[name] = bundle("bundle", members)
    return found


def backwards() -> dict[str, Nest]:
    """Attention's backward."""
    found: dict[str, Nest] = {}
    for name, (rows, keys, depth) in {"attention": (70, 90, 64), "wide attention": (200, 100, 128)}.items():
        operands = [torch.zeros(1, 2, count, depth).bfloat16() for count in (rows, keys, keys)]
        index = Tried.of((of(scaled_dot_product_attention), lambda operands=operands: operands), CUDA).plan.index
        (call,) = (node.name for node in index.graph.nodes if node.target == BACKWARD)
        nest = groups.lower(index, (call,), tuple(index.results(call)))
        assert isinstance(nest, Nest), nest
        found[name] = nest
    return found


def with_tails() -> dict[str, Nest]:
    """Convolutions with what reduces them."""
    tails: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "softmax": lambda made: made.softmax(1), "pooled": lambda made: max_pool2d(made, 2),
        "normed": instance_norm, "mean": lambda made: made.mean((2, 3)),
    }  # fmt: skip
    found: dict[str, Nest] = {}
    for name, tail in tails.items():
        args = torch.empty(4, 32, 30, 30), torch.empty(48, 32, 3, 3)
        graph = capture(Applied(lambda x, weight, tail=tail: tail(conv2d(x, weight))), args)
        calls = [node.name for node in graph.nodes if node.results]
        nest = groups.lower(GraphIndex(graph), calls, graph.outputs)
        assert isinstance(nest, Nest), nest
        found[name] = nest
    return found


@pytest.mark.parametrize(
    "each", [*registry.every_schedule(task_pb2.TARGET_CPU), *registry.every_schedule(CUDA)], ids=lambda each: each.name
)
def test_our_own_schedules_fit(each: Offered) -> None:
    asked = {registry.PIECES: concatenations, "cuda_recurrent": networks, "cuda_loop": loops}
    asked |= {**dict.fromkeys(registry.SUMS_OVER_ROWS, summed), "cuda_segments": parts}
    asked |= {**dict.fromkeys(registry.BUNDLES, side_by_side), **dict.fromkeys(registry.BACKWARDS, backwards)}
    asked |= dict.fromkeys(registry.TAILED, with_tails)
    found = conformance.check_schedule(lambda _: each.made, asked=asked[each.name]() if each.name in asked else None)
    if each.name in registry.PRODUCTS - {"cuda_product", "cuda_product_simt"}:  # of sizes that gain by them
        assert all(finding.startswith("it accepts none of 17 nests: gelu, ") for finding in found)
    else:
        assert found == []


def test_the_suite_of_schedules_finds_what_is_careless() -> None:
    assert conformance.check_schedule(OneThreadAnElement) == []
    found = "\n".join(conformance.check_schedule(Careless))
    assert "the settings to begin with are among their own alternatives" in found
    assert "settings that it names are refused: " in found
    found = "\n".join(conformance.check_schedule(Naming))
    assert "what it answers depends on what the nest or its buffers are called" in found
    (found,) = conformance.check_schedule(lambda _: 1 / 0)  # type: ignore[arg-type,return-value]
    assert found.startswith("it raises ZeroDivisionError: division by zero (test_plugins.py, line ")


@pytest.mark.parametrize(
    ("points", "error", "says"),
    [
        ([("schedule", "twice", "agent_synthesis.emit.cuda.pointwise:CudaPointwise")], BadInput, "cuda_pointwise"),
        ([("schedule", "absent", "no_such_package:Thing")], UnknownPlugin, "no_such_package"),
        ([("lowering", "again", "tests_of_plugins:add")], UnknownPlugin, "tests_of_plugins"),
    ],
)
def test_a_plugin_that_does_not_fit_in_ends_the_start_with_its_cause(
    install: Install, points: list[tuple[str, str, str]], error: type[Exception], says: str
) -> None:
    install(*points)
    with pytest.raises(error, match=says):
        BuiltInSynthesizer()


def test_a_lowering_of_a_known_operation_is_refused(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(("lowering", "hypot", "lowered_hypot:handlers"))
    monkeypatch.setitem(HANDLERS, "hypot", lambda *_: hypot)
    with pytest.raises(BadInput, match="the lowering 'hypot' has handlers of hypot, which have one"):
        BuiltInSynthesizer()


def test_the_command_says_whether_an_installed_plugin_fits(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install(
        ("schedule", "one_thread", "one_thread_an_element:OneThreadAnElement"),
        ("lowering", "hypot", "lowered_hypot:handlers"),
    )
    assert testing.main(["lowering", "hypot"]) == testing.main(["schedule", "one_thread"]) == 0
    assert capsys.readouterr().out == "lowering hypot: fits\nschedule one_thread: fits\n"
    assert testing.main(["schedule", "wizard"]) == 2
