"""The vocabulary of changes: what a move does to a plan, and which moves a plan allows.

    author(group, choice=schedule)     the group becomes a kernel of ours ("" takes the first schedule that
                                       fits)
    author("*", choice)                every library group that can be is in a kernel of ours, each as large as it goes;
                                       "beside_products": products and convolutions stay calls
    fuse(group, choice=other)          a producer is computed inside the group, or a sibling beside it, which reads what
                                       it reads; "*" takes in all producers that can be
    layout("*", choice=channels_last)  convolutions and what follows them are channels-last, see `layout`; before any
                                       kernel of ours
    library(group)                     the group's calls go back to the library
    rewrite(group, choice=rule)        algebra, see `rewrite`
    rewrite(group, choice=chunks)      a product and what uses it up in {"chunks": 8} chunks of its rows, see
                                       `chunking`; before any kernel of ours
    set(group, choice="reduce=split")  settings of the schedule change; integers such as {"threads": 1} as arguments
    write(group, choice=digest, text)  the group's kernel is the text's, see `free_form`; a model may have written it
    launch("*", "together")            small kernels that need nothing of each other are one launch, see `bundles`;
                                       "apart": each is one again
    launch("*", "cuda_graph")          a call launches all steps at once, as a CUDA graph

The first, third and fifth may be made on several groups at once (`also`), see `alike`.

A candidate is its task plus moves, so `apply` is pure and a move means the same wherever it applies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from agent_synthesis import rewrite
from agent_synthesis.emit.registry import PIECES
from agent_synthesis.free_form import compose
from agent_synthesis.graphs import biases, splits
from agent_synthesis.lowering.groups import Refusal
from agent_synthesis.nests.ir import Nest
from agent_synthesis.plans import alike, bundles, chunking, cost, fusion, launching, layout, whole
from agent_synthesis.plans.partition import Group, touched
from agent_synthesis.plans.plan import Plan, schedules_for
from warpsmith.contract import words
from warpsmith.errors import IllegalMove
from warpsmith.v1 import analysis_pb2

Move = analysis_pb2.Move
MOST_SIBLINGS = 4
"""Of a group, the last before it, that are offered: each step of a network that is written as a loop reads the same
weights, and those further away are siblings of what comes of the nearer ones."""


def apply(plan: Plan, move: Move) -> Plan:
    """The plan after a move.

    Raises:
        IllegalMove: the move does not apply; says why.
    """
    made = plan
    for single in alike.on_each(move):
        made = _applied(made, single)
    for group in touched(made.partition, plan.partition):  # what it reads from now on or no more, another stores or not
        if group.engine == "authored":
            nest = made.nest(group)
            if isinstance(nest, Refusal):
                raise IllegalMove(f"{group.name} could no longer be one kernel: {nest.reason}")
            if group.schedule == PIECES and not made.schedule(group).accepts(nest):
                made = fusion.rescheduled(made, group.name)  # it may be too small by now
            elif not made.schedule(group).accepts(nest):
                raise IllegalMove(f"{group.name} could no longer be a kernel of schedule {group.schedule}")
    return replace(made, moves=(*plan.moves, move))


def _applied(plan: Plan, move: Move) -> Plan:
    """The plan after a move on one group, which may leave others that can be no kernels."""
    match move.kind:
        case analysis_pb2.MOVE_KIND_AUTHOR:
            is_whole = move.group == whole.EVERY_GROUP
            return whole.authored(plan, move.choice) if is_whole else fusion.authored(plan, move.group, move.choice)
        case analysis_pb2.MOVE_KIND_FUSE:
            return fusion.fused(plan, move.group, move.choice)
        case analysis_pb2.MOVE_KIND_LAYOUT:
            return layout.laid_out(plan, move.group, move.choice)
        case analysis_pb2.MOVE_KIND_LIBRARY:
            return fusion.as_library(plan, move.group)
        case analysis_pb2.MOVE_KIND_REWRITE:
            is_chunks = move.choice == chunking.CHOICE
            return chunking.chunked(plan, move) if is_chunks else rewrite.rewritten(plan, move.group, move.choice)
        case analysis_pb2.MOVE_KIND_SET:
            return _set(plan, move)
        case analysis_pb2.MOVE_KIND_WRITE:
            return compose.written(plan, move)
        case analysis_pb2.MOVE_KIND_LAUNCH:
            is_of_kernels = move.choice in bundles.CHOICES
            return (bundles.launched if is_of_kernels else launching.at_once)(plan, move.group, move.choice)
    raise IllegalMove(f"no move is called {words.move_kind(move.kind)!r}")


def apply_all(plan: Plan, moves: Iterable[Move]) -> Plan:
    """The plan after moves in order."""
    for move in moves:
        plan = apply(plan, move)
    return plan


def legal(plan: Plan) -> list[analysis_pb2.LegalMove]:
    """Every move that the plan allows, with the work of the touched groups before and after.

    The compound fuse is listed where fusion can end: at groups that no reader of theirs takes in.
    """
    found = [made for move, effect in _candidates(plan) if (made := _tried(plan, move, effect)) is not None]
    fusing = [made.move for made in found if made.move.kind == analysis_pb2.MOVE_KIND_FUSE]
    taken = {move.choice for move in fusing if move.choice in plan.producers(plan.group(move.group))}
    for name in dict.fromkeys(move.group for move in fusing):
        if name in taken:
            continue
        effect = f"computes {_words(plan, plan.group(name))} and all that fuses before it in one kernel"
        made = _tried(plan, Move(kind=analysis_pb2.MOVE_KIND_FUSE, group=name, choice=fusion.ALL_PRODUCERS), effect)
        if made is not None and made.before.launch_count > 2:  # else a plain fuse says the same
            found.append(made)
    return found


def _tried(plan: Plan, move: Move, effect: str) -> analysis_pb2.LegalMove | None:
    """The move described by what it changes; None when it does not apply."""
    try:
        after = apply(plan, move)
    except IllegalMove:
        return None
    if move.kind == analysis_pb2.MOVE_KIND_LAUNCH and move.choice == launching.CUDA_GRAPH:
        one_by_one, at_once = launching.costs(plan)
        return analysis_pb2.LegalMove(move=move, before=one_by_one, after=at_once, effect=effect)
    return analysis_pb2.LegalMove(
        move=move,
        before=cost.total(cost.of_group(plan, group) for group in touched(plan.partition, after.partition)),
        after=cost.total(cost.of_group(after, group) for group in touched(after.partition, plan.partition)),
        effect=effect,
    )


def _candidates(plan: Plan) -> Iterator[tuple[Move, str]]:
    """Moves worth trying, with their effect in words; not all are legal."""
    for choice in whole.choices(plan):
        move = Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group=whole.EVERY_GROUP, choice=choice)
        yield move, whole.CHOICES[choice]
    if all(group.engine == "library" for group in plan.groups):
        move = Move(kind=analysis_pb2.MOVE_KIND_LAYOUT, group=layout.EVERY_GROUP, choice=layout.CHANNELS_LAST)
        yield move, layout.EFFECT
    for choice, effect in bundles.CHOICES.items():
        yield Move(kind=analysis_pb2.MOVE_KIND_LAUNCH, group=bundles.EVERY_GROUP, choice=choice), effect
    yield from chunking.candidates(plan)
    classes = alike.classes(plan)
    of_loops = rewrite.in_loops(plan)
    for group in plan.groups:
        what, same = _words(plan, group), classes[group.name]
        for rule in rewrite.matching(plan, group):
            yield Move(kind=analysis_pb2.MOVE_KIND_REWRITE, group=group.name, choice=rule.name), rule.effect
        if group.name in of_loops:
            continue  # of hundreds of equal steps one kernel more is worth little
        if any(not plan.index.is_pure(node) and not plan.index.writes_back(node) for node in group.nodes):
            continue
        yield from _for_all(_authoring(plan, group, what), same, group.name)
        for producer in plan.producers(group):
            effect = f"computes {_words(plan, plan.group(producer))} and {what} in one kernel"
            yield Move(kind=analysis_pb2.MOVE_KIND_FUSE, group=group.name, choice=producer), effect
        for sibling in plan.siblings(group)[-MOST_SIBLINGS:]:
            effect = f"computes {_words(plan, plan.group(sibling))} and {what} in one kernel, which reads once"
            yield Move(kind=analysis_pb2.MOVE_KIND_FUSE, group=group.name, choice=sibling), effect
        if group.engine != "library":
            back = Move(kind=analysis_pb2.MOVE_KIND_LIBRARY, group=group.name)
            yield from _for_all([(back, f"computes {what} by PyTorch's own calls")], same, group.name)
        if group.engine == "authored" and group.name == same[0]:  # what is alike is set alike
            yield from (alike.on_all(*each, same) if len(same) > 1 else each for each in _settings(plan, group))
    at_once = Move(kind=analysis_pb2.MOVE_KIND_LAUNCH, group=launching.WHOLE_PLAN, choice=launching.CUDA_GRAPH)
    yield at_once, launching.EFFECT


def _for_all(found: Iterable[tuple[Move, str]], same: Sequence[str], name: str) -> Iterator[tuple[Move, str]]:
    """Moves on a group, and with the first of several that are alike the same on all of them."""
    for move, effect in found:
        yield move, effect
        if len(same) > 1 and name == same[0]:
            yield alike.on_all(move, effect, same)


def _authoring(plan: Plan, group: Group, what: str) -> Iterator[tuple[Move, str]]:
    nest = plan.nest(group)
    taking = schedules_for(plan.target, nest, plan.hardware) if isinstance(nest, Nest) else ()
    if not taking:
        if group.engine == "library" and fusion.parts(plan, group) is not None:
            effect = f"computes {what} in kernels of our own, {splits.wording(plan.index, group.name)}"
            yield Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group=group.name), effect
        elif fusion.bias_apart(plan, group) is not None:
            yield Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group=group.name), biases.EFFECT
        return
    for schedule in taking:
        if (group.engine, group.schedule) != ("authored", schedule.name):
            effect = f"computes {what} in a kernel of our own, by schedule {schedule.name}"
            yield Move(kind=analysis_pb2.MOVE_KIND_AUTHOR, group=group.name, choice=schedule.name), effect


def _settings(plan: Plan, group: Group) -> Iterator[tuple[Move, str]]:
    old = group.settings.words()
    for settings in plan.alternatives(group):
        changed = {name: value for name, value in sorted(settings.words().items()) if old.get(name) != value}
        choice = ",".join(f"{name}={value}" for name, value in changed.items() if isinstance(value, str))
        integers = {name: value for name, value in changed.items() if isinstance(value, int)}
        told = ", ".join(f"{name} = {value}" for name, value in changed.items())
        yield Move(kind=analysis_pb2.MOVE_KIND_SET, group=group.name, choice=choice, arguments=integers), f"sets {told}"


def _set(plan: Plan, move: Move) -> Plan:
    group = plan.group(move.group)
    if group.engine != "authored":
        raise IllegalMove(f"{group.name} is a library call: author it before setting anything")
    wanted: dict[str, str | int] = {**move.arguments}
    for part in filter(None, move.choice.split(",")):
        name, _, wanted[name] = part.partition("=")
    settings = group.settings.changed(wanted)
    if settings not in plan.alternatives(group):
        raise IllegalMove(f"{group.name}: {move.choice or dict(move.arguments)} is not one legal change away")
    return fusion.with_settings(plan, group.name, settings)


def _words(plan: Plan, group: Group) -> str:
    """A group's operations for people: "softmax", "sub, exp and mul", "layer_norm and 5 others"."""
    names = [plan.index.nodes[node].target.split(".")[1].strip("_") for node in plan.all_nodes(group)]
    if len(names) > 4:
        return f"{names[-1]} and {len(names) - 1} others"
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
