"""What people call: a live module in, the same module with faster kernels out."""

from __future__ import annotations

import copy
import fnmatch
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from orchestrator.commands import budgets, report
from orchestrator.commands.options import DEFAULT_RUNS
from orchestrator.live import profiled
from orchestrator.live.calls import Call, captured, with_tensors
from orchestrator.live.grafted import answered_by, grafted, shallow, trains, tried
from orchestrator.live.results import Result, Results
from orchestrator.live.written import member, task_of
from warpsmith.errors import BadInput
from warpsmith.graphs import task_module
from warpsmith.v1 import run_pb2, task_pb2

Match = type[torch.nn.Module] | str | Callable[[str, torch.nn.Module], bool]
"""Which inner modules: a class; a class's name or a pattern of qualified names, such as "layers.*.mlp"; a predicate of
qualified name and module."""

_TOLERANCE = 0.05
"""Share of a result that a right one may be off on the example arguments, in any precision."""

_Arguments = Sequence[Any] | torch.Tensor
_Budget = str | float
_Given = tuple[tuple[Any, ...], Mapping[str, Any]]


@dataclass(frozen=True)
class Outcome:
    """What became of a module."""

    run: str
    """Identifier of its run, for `warpsmith report`, `show` and `export`."""
    verdict: str
    """PASS, or why there is no faster kernel: NO_FASTER, AT_FLOOR and so on; DIFFERS where it is not used,
    NOT_KNOWN where there was no search."""
    speedup: float
    """Over the fastest baseline; 1.0 where the module is left as it was."""
    message: str
    """How the run ended, in a sentence."""
    labels: tuple[str, ...]
    """What a reader of the speedup has to know."""
    share: float = 0.0
    """Share of the model's time that was this part's, 0 to 1; 0 where nothing measured it."""


def optimize(
    module: torch.nn.Module,
    args: _Arguments,
    kwargs: Mapping[str, Any] = MappingProxyType({}),
    *,
    budget: _Budget = "60s",
    precision: str = "auto",
    prepared: bool = False,
    gradients: bool = False,
    fresh: bool = False,
    server: str = "",
    runs: str | Path = DEFAULT_RUNS,
    progress: bool = True,
) -> torch.nn.Module:
    """The module, made faster for calls like `module(*args, **kwargs)`; all other calls are its own.

    What is returned shares parameters, buffers and inner modules with `module`, which is left as it was, and has the
    same class name and `state_dict`; its `warpsmith` attribute is an `Outcome`. Where nothing faster is found it is
    a plain copy. Where gradients are wanted the module's own forward runs, unless `gradients` has asked for kernels.
    What an earlier search in `runs` found for the same calls is taken at once.

    Args:
        module: on the CPU or a GPU, in the mode (`train()` or `eval()`) in which it will be called.
        args: example arguments of its forward, whose shapes, types and device are optimized for; or one tensor.
        kwargs: example arguments by name.
        budget: search time, such as "60s", "5m" or seconds; "" for none, where only what is known is to be taken.
        precision: "auto" goes by the floating-point inputs; or "fp32", "tf32", "fp16", "bf16".
        prepared: whether what depends on parameters alone may be computed once and kept while they are unchanged.
        gradients: whether to optimize the training step: the forward, and gradients of all parameters and example
            arguments that require them. Calls whose gradients are others' are the module's own.
        fresh: whether to search again although a result is known.
        server: an orchestrator elsewhere, "HOST:PORT"; without it the services run here for as long as the search.
        runs: directory where runs are kept.
        progress: whether to show the search as it goes, on stderr.

    Raises:
        BadInput: the module cannot be captured, or an argument is wrong; says which.
        Infrastructure: a service failed.
    """
    given = _given(module, args, kwargs)
    results = _results(budget, fresh, server, runs, progress)
    call, task = _written(module, given, _Track(precision, prepared, gradients))
    _require_result(module, given, call)
    (result,) = results.of(task)
    return _served(module, given, call, result)


def optimize_submodules(
    model: torch.nn.Module,
    args: _Arguments,
    kwargs: Mapping[str, Any] = MappingProxyType({}),
    *,
    match: Match | None = None,
    most: int = 4,
    budget: _Budget = "60s",
    precision: str = "auto",
    prepared: bool = False,
    gradients: bool = False,
    fresh: bool = False,
    server: str = "",
    runs: str | Path = DEFAULT_RUNS,
    progress: bool = True,
) -> torch.nn.Module:
    """The model, of which chosen inner modules are made faster; equal ones are searched for once.

    Without `match` a profile of a few calls chooses: blocks that the model has several times, and what else takes the
    time; what cannot be captured is left for what is in it.

    What each of them is called with is taken from one run of `model(*args, **kwargs)` without gradients, which leaves
    parameters and buffers as they were. What is returned shares all of them with `model`, which keeps its own
    modules; its `warpsmith` attribute has the `Outcome` of each by qualified name. Of modules within each other the
    outermost is taken; of one that is called several times, the first call counts.

    Args, beside those of `optimize`:
        match: a class, a class's name, a pattern of qualified names such as "layers.*", or a predicate of name and
            module; None for what takes the most time.
        most: searches at most that a profile asks for; `budget` is for each.

    Raises:
        BadInput: nothing is matched or called, a part cannot be captured, or an argument is wrong; says which.
        Infrastructure: a service failed.
    """
    given = _given(model, args, kwargs)
    results = _results(budget, fresh, server, runs, progress)
    track = _Track(precision, prepared, gradients)
    if not (match is None or isinstance(match, type | str) or callable(match)) or not isinstance(most, int) or most < 1:
        wrong = f"most={most!r}" if match is None else f"match={match!r}"
        raise BadInput(f"{wrong}: match is a class, a text or a function of name and module, most a number from 1")
    if match is None:
        chosen, shares = _costly(model, given, track, most, progress)
    else:
        named = _outermost(model, match)
        if not named:
            raise BadInput(f"match={match!r}: names no inner module of {type(model).__name__}")
        chosen, shares = _asked(model, named, given, track), {}
    found = results.of(*(each.task for each in chosen))
    served = {
        each.name: _served(each.module, each.given, each.call, result)
        for each, result in zip(chosen, found, strict=True)
    }
    made = _with_parts(model, {id(each.module): served[each.name] for each in chosen})
    outcomes = {name: vars(part)["warpsmith"] for name, part in served.items()}
    vars(made)["warpsmith"] = {name: replace(told, share=shares.get(name, 0.0)) for name, told in outcomes.items()}
    return made


def _given(module: torch.nn.Module, args: _Arguments, kwargs: Mapping[str, Any]) -> _Given:
    """The example arguments. Raises BadInput for what is no module, or no arguments of one."""
    if not isinstance(module, torch.nn.Module):
        raise BadInput(f"{type(module).__name__}: give a torch.nn.Module; a function can be the forward of one")
    if isinstance(args, torch.Tensor):
        args = (args,)
    if isinstance(module, torch._dynamo.OptimizedModule):
        raise BadInput(
            f"{type(module._orig_mod).__name__} is compiled already: give the module that torch.compile was given "
            '(module._orig_mod), and compile what comes of it, or use torch.compile(module, backend="warpsmith")'
        )
    if not isinstance(args, tuple | list) or not isinstance(kwargs, Mapping):
        wrong = type(kwargs if isinstance(args, tuple | list) else args).__name__
        raise BadInput(f"example arguments are {wrong}: give a tuple, such as optimize(module, (x,), {{'scale': 2}})")
    return tuple(args), dict(kwargs)


def _results(budget: _Budget, fresh: bool, server: str, runs: str | Path, progress: bool) -> Results:
    if not isinstance(server, str) or not isinstance(runs, str | Path):
        name, wrong = ("runs", runs) if isinstance(server, str) else ("server", server)
        raise BadInput(f"{name}={wrong!r}: give a text, such as runs='runs' or server='HOST:PORT'")
    limits = run_pb2.Budget(wall_seconds=budgets.seconds(str(budget), "budget")) if budget else None
    return Results(server, Path(runs), limits, fresh, progress)


@dataclass(frozen=True)
class _Track:
    """What a task is judged by."""

    precision: str
    prepared: bool
    gradients: bool


def _differentiable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _written(module: torch.nn.Module, given: _Given, track: _Track) -> tuple[Call, Any]:
    """The call, and the task of it."""
    target = _target(module, given)
    call = captured(module, *given, target)
    kept = {"prepared": track.prepared, "gradients": track.gradients}
    return call, task_of(call, module, target, track.precision, **kept)


def _target(module: torch.nn.Module, given: _Given) -> str:
    """The type of the one device that everything is on. Raises BadInput where there are several, or none."""
    args, kwargs = given
    leaves = [leaf for leaf in pytree.tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor)]
    if not leaves:
        raise BadInput("the example arguments hold no tensor: give those of one call, such as optimize(module, (x,))")
    kinds = {tensor.device.type for tensor in (*leaves, *module.parameters(), *module.buffers())}
    if len(kinds) > 1 or not kinds <= {"cpu", "cuda"}:
        named = " and ".join(sorted(kinds))
        made = "; what is on meta has no values: to_empty() and load_state_dict() first" if "meta" in kinds else ""
        raise BadInput(f"the module and its example arguments are on {named}: move all to one GPU, or to the CPU{made}")
    if torch.is_autocast_enabled(*kinds):
        raise BadInput(
            f"autocast is on for {', '.join(kinds)}, and under it no kernel answers: optimize outside of it, with a "
            "module and arguments of the type that is wanted, or a forward that turns autocast on itself"
        )
    return kinds.pop()


def _served(module: torch.nn.Module, given: _Given, call: Call, result: Result) -> torch.nn.Module:
    """The module with the kernel that was found, if it does on the example arguments what the module does."""
    run, made = result.run, shallow(module)
    verdict, message, speedup = report.verdict_of(run) if run.id else "NOT_KNOWN", run.message, 1.0
    if result.text:
        try:
            fast = grafted(module, call, result.text)
            difference = _difference(module, fast, given, call)
        except Exception as error:  # of a class that takes no other forward, say
            difference = f"it fails ({task_module.cause_of(error)})"
        if difference:
            verdict, message = "DIFFERS", f"the kernel is not used: on the example arguments and weights {difference}"
        else:
            made, speedup = fast, run.best.timing.speedup_fastest.median
    labels = tuple(report.labels_of(run))
    vars(made)["warpsmith"] = Outcome(run.id, verdict, speedup, message, labels)
    return made


def _difference(module: torch.nn.Module, fast: torch.nn.Module, given: _Given, call: Call) -> str:
    """How the result of a call is another than the module's, beyond any precision; empty where it is not.

    The kernel was judged on values of the kind that the module has. This is for what capture may have missed: it is no
    second judgement, and of random results it looks at the form alone.
    """
    before = answered_by(fast)
    with _kept(module, call), tried():
        theirs = _result(module, given)
    with _kept(module, call), tried():
        ours = _result(fast, given)
    if answered_by(fast) == before:
        return "it does not take the call: a hook, a layout or memory that begins anywhere is in its way"
    if pytree.tree_structure(theirs) != pytree.tree_structure(ours):
        return "its result has another structure"
    is_random = any(node.random for node in call.graph.nodes)
    for place, pair in enumerate(zip(pytree.tree_leaves(theirs), pytree.tree_leaves(ours), strict=True)):
        if said := _unlike(*pair, is_random=is_random):
            return f"result {place} is {said}"
    return "" if is_random or not trains(fast) else _other_gradients(module, fast, given, call)


def _other_gradients(module: torch.nn.Module, fast: torch.nn.Module, given: _Given, call: Call) -> str:
    """How the gradients of a call are others than the module's; empty where they are not."""
    found = []
    for each in (module, fast):
        with _kept(module, call), tried():
            found.append(_gradients(each, given))
    for place, (own, mine) in enumerate(zip(*found, strict=True)):
        if said := _unlike(own, mine, is_random=False):
            return f"gradient {place} is {said}"
    return ""


def _gradients(module: torch.nn.Module, given: _Given) -> list[torch.Tensor | None]:
    """Of the arguments and parameters that require them, for the sum of all that a call gives."""
    args, kwargs = with_tensors(given, torch.clone)
    pairs = zip(_tensors(given), _tensors((args, kwargs)), strict=True)
    wanted = [mine.requires_grad_() for theirs, mine in pairs if theirs.requires_grad]
    wanted += [parameter for parameter in module.parameters() if parameter.requires_grad]
    with torch.enable_grad():
        made = [each for each in _tensors(module(*args, **kwargs)) if each.requires_grad]
        total = torch.stack([each.sum().double() for each in made]).sum()
    return list(torch.autograd.grad(total, wanted, allow_unused=True))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _unlike(own: Any, mine: Any, *, is_random: bool) -> str:
    if not isinstance(own, torch.Tensor):
        return "" if own == mine else f"{mine!r} instead of {own!r}"
    if (own.shape, own.dtype) != (mine.shape, mine.dtype):
        return f"{mine.dtype} {list(mine.shape)} instead of {own.dtype} {list(own.shape)}"
    share = 0.0 if is_random else _far(mine, own)
    return f"off by {share:.2g} of what it is" if share > _TOLERANCE else ""


def _require_result(module: torch.nn.Module, given: _Given, call: Call) -> None:
    """Raises BadInput where the call, which can be captured, fails on real tensors: before a search, not in it."""
    try:
        with _kept(module, call):
            _result(module, given)
    except Exception as error:
        kind, why = type(module).__name__, task_module.cause_of(error)
        raise BadInput(f"{kind}: the forward failed on the example arguments: {why}") from error


def _result(module: torch.nn.Module, given: _Given) -> Any:
    """What a call without gradients gives, on copies of the arguments."""
    args, kwargs = with_tensors(given, copy.deepcopy)
    with torch.no_grad():
        return module(*args, **kwargs)


@contextmanager
def _kept(module: torch.nn.Module, call: Call | None = None) -> Iterator[None]:
    """Around a call: afterwards attributes, buffers, and what the `call` writes in place are as they were."""
    written = {name for node in call.graph.nodes for name in node.mutates} if call else set[str]()
    names = [each.qualified_name for each in call.graph.sources if each.name in written] if call else []
    parts = [vars(part) for part in module.modules()]
    attributes = [(group, dict(group)) for part in parts for group in (part, part["_parameters"], part["_buffers"])]
    held = [*module.buffers(), *(member(module, name) for name in names if name)]
    before = [(tensor, tensor.detach().clone()) for tensor in held]
    try:
        yield
    finally:
        for group, known in attributes:
            for name in {*group} - {*known}:
                del group[name]
            group.update(known)
        for tensor, value in before:
            if not torch.equal(tensor, value):  # a write that is none spoils a backward that waits
                with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
                    tensor.copy_(value)


def _far(mine: torch.Tensor, own: torch.Tensor) -> float:
    """rms of the difference over that of what should be there, where that is finite; of integers the share that is
    another."""
    if not (own.is_floating_point() or own.is_complex()):
        return float((mine != own).double().mean()) if own.numel() else 0.0
    known = own.isfinite()
    off, size = (
        float(torch.linalg.vector_norm(each[known].to(torch.complex128 if each.is_complex() else torch.float64)))
        for each in (mine - own, own)
    )
    return off / max(size, 1e-30) if math.isfinite(off) else math.inf


# ---- inner modules -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Asked:
    """An inner module with one call of it as a task."""

    name: str
    module: torch.nn.Module
    given: _Given
    call: Call
    task: task_pb2.Task


def _asked(model: torch.nn.Module, parts: Mapping[str, torch.nn.Module], given: _Given, track: _Track) -> list[_Asked]:
    """The parts with what they are called with, in the order of their calls."""
    called = _called(model, parts, given)
    if track.gradients:  # it is called without; within a model that trains, all that come to it have gradients
        called = {name: with_tensors(each, _differentiable) for name, each in called.items()}
    if missing := sorted({*parts} - {*called}):
        raise BadInput(f"{missing[0]} is not called by {type(model).__name__} on the example arguments")
    return [_Asked(name, parts[name], each, *_written(parts[name], each, track)) for name, each in called.items()]


def _costly(
    model: torch.nn.Module, given: _Given, track: _Track, most: int, progress: bool
) -> tuple[list[_Asked], dict[str, float]]:
    """What takes the time and can be captured, and the share of each part in the model's time."""
    with _kept(model):
        whole = profiled.profile(model, lambda: _result(model, given))
    waiting = profiled.groups([whole], whole)
    chosen: list[_Asked] = []
    taken: list[profiled.Group] = []
    refused: list[str] = []
    while waiting and len(taken) < most:
        group = waiting.pop(0)
        modules = {part.name: model.get_submodule(part.name) for part in group.parts}
        try:
            chosen += _asked(model, modules, given, track)
        except BadInput as error:  # what is in it may do
            refused.append(str(error))
            waiting = sorted([*waiting, *profiled.groups(group.parts, whole)], key=lambda each: -each.seconds)
            continue
        taken.append(group)
        if progress:
            names = [part.name for part in group.parts]
            which = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more like it"
            kind, share = type(modules[names[0]]).__name__, group.seconds / whole.seconds
            print(f"{which} ({kind}): {share:.0%} of the model's time", file=sys.stderr)
    if not chosen:
        why = f": {refused[0]}" if refused else "; warpsmith.optimize(model, …) takes all of it"
        raise BadInput(f"no inner module of {type(model).__name__} is worth a search of its own{why}")
    return chosen, {part.name: part.seconds / whole.seconds for group in taken for part in group.parts}


def _outermost(model: torch.nn.Module, match: Match) -> dict[str, torch.nn.Module]:
    """Qualified name → inner module, none within another, each once."""
    found: dict[str, torch.nn.Module] = {}
    seen = {id(model)}

    def look(module: torch.nn.Module, path: str) -> None:
        for name, part in module.named_children():
            if id(part) in seen:
                continue
            seen.add(id(part))
            place = f"{path}{name}"
            if _is_matched(place, part, match):
                found[place] = part
            else:
                look(part, f"{place}.")

    look(model, "")
    return found


def _is_matched(name: str, part: torch.nn.Module, match: Match) -> bool:
    if isinstance(match, type):
        return isinstance(part, match)
    if isinstance(match, str):
        return type(part).__name__ == match or fnmatch.fnmatchcase(name, match)
    return match(name, part)


def _called(model: torch.nn.Module, parts: Mapping[str, torch.nn.Module], given: _Given) -> dict[str, _Given]:
    """What each part is first called with, in the order of their calls."""
    found: dict[str, _Given] = {}

    def remember(name: str) -> Callable[..., None]:
        def take(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found.setdefault(name, (args, kwargs))

        return take

    hooks = [part.register_forward_pre_hook(remember(name), with_kwargs=True) for name, part in parts.items()]
    try:
        with _kept(model):
            _result(model, given)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _with_parts(model: torch.nn.Module, served: Mapping[int, torch.nn.Module]) -> torch.nn.Module:
    """A copy of the model and of what leads to the parts, by their ids; others stand in their places."""
    made = dict(served)

    def copied(module: torch.nn.Module) -> torch.nn.Module:
        if id(module) not in made:
            leads = any(id(part) in served for part in module.modules())
            made[id(module)] = shallow(module) if leads else module
            if leads:
                children = {name: part and copied(part) for name, part in module._modules.items()}
                vars(made[id(module)])["_modules"] = children
        return made[id(module)]

    return copied(model)
