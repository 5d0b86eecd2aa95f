"""The state that a stage's threads exchange on CUDA: its type, how elements make one, and what results are called."""

from __future__ import annotations

from collections.abc import Sequence

from agent_synthesis.emit.accumulation import functor
from agent_synthesis.emit.spelling import Dialect, accumulator
from agent_synthesis.nests.analysis.stages import Stage
from agent_synthesis.nests.ir import ARG_REDUCTIONS


def state_type(stage: Stage, dialect: Dialect) -> str:
    """The state of `ws` that it exchanges."""
    kinds = [accumulator(reduction, dialect) for reduction in stage.reductions]
    if stage.kind == "shifted":
        return f"ws::ShiftedSum<{kinds[0]}, {'true' if dialect.functions.get('exp') else 'false'}>"
    if stage.kind == "moments":
        mean = f", {kinds[0]}" if kinds[0] != kinds[1] else ""
        return f"ws::Moments<{kinds[1]}{', true' if stage.even else (', false' if mean else '')}{mean}>"
    folds = [f"ws::Fold<{functor(r.operation)}, {kind}>" for r, kind in zip(stage.reductions, kinds, strict=True)]
    text = folds[-1]
    for fold in reversed(folds[:-1]):
        text = f"ws::Both<{fold}, {text}>"
    return text


def state_of(values: Sequence[str]) -> str:
    """Braces around the parts of a state of folds, in order."""
    text = f"{{{values[-1]}}}"
    for value in reversed(values[:-1]):
        text = f"{{{{{value}}}, {text}}}"
    return text


def results(stage: Stage, state: str) -> dict[str, str]:
    """Reduction → text of its value, from the row's state."""
    names = [reduction.name for reduction in stage.reductions]
    if stage.kind == "shifted":
        return {names[0]: f"{state}.greatest", names[1]: f"{state}.total()"}
    if stage.kind == "moments":
        return {names[0]: f"{state}.mean * {state}.count", names[1]: f"{state}.squares"}
    found, path = {}, state
    for number, reduction in enumerate(stage.reductions):
        last = number == len(names) - 1
        position = ".position" if reduction.operation in ARG_REDUCTIONS else ""
        found[reduction.name] = f"{path}.value{position}" if last else f"{path}.first.value{position}"
        path = f"{path}.second"
    return found


def slot_words(stage: Stage) -> int:
    """64-bit words of one state's slot in a mailbox: one for each 32-bit word, in pairs."""
    words = -(-stage.state_bytes() // 4)
    return words + words % 2
