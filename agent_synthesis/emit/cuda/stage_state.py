"""The state that a stage's threads exchange on CUDA: its type, how elements make one, and what results are called."""

from __future__ import annotations

from collections.abc import Sequence

from agent_synthesis.emit.accumulation import functor
from agent_synthesis.emit.spelling import Dialect, accumulator
from agent_synthesis.nests.analysis.stages import Stage
from agent_synthesis.nests.ir import ARG_REDUCTIONS, Reduction


def state_type(stage: Stage, dialect: Dialect) -> str:
    """The state of `ws` that it exchanges."""
    kinds = [accumulator(reduction, dialect) for reduction in stage.reductions]
    if stage.kind == "shifted":
        text = f"ws::ShiftedSum<{kinds[0]}, {'true' if dialect.functions.get('exp') else 'false'}>"
        return f"ws::Both<{text}, {folds_type(stage.reductions[2:], dialect)}>" if stage.reductions[2:] else text
    if stage.kind == "moments":
        mean = f", {kinds[0]}" if kinds[0] != kinds[1] else ""
        return f"ws::Moments<{kinds[1]}{', true' if stage.even else (', false' if mean else '')}{mean}>"
    return folds_type(stage.reductions, dialect)


def folds_type(reductions: Sequence[Reduction], dialect: Dialect) -> str:
    """The state of folds side by side."""
    folds = [f"ws::Fold<{functor(each.operation)}, {accumulator(each, dialect)}>" for each in reductions]
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
        others = stage.reductions[2:]
        pair = f"{state}.first" if others else state
        found = {names[0]: f"{pair}.greatest", names[1]: f"{pair}.total()"}
        return found | (_of_folds(others, f"{state}.second") if others else {})
    if stage.kind == "moments":
        return {names[0]: f"{state}.mean * {state}.count", names[1]: f"{state}.squares"}
    return _of_folds(stage.reductions, state)


def _of_folds(reductions: Sequence[Reduction], state: str) -> dict[str, str]:
    found, path = {}, state
    for number, reduction in enumerate(reductions):
        last = number == len(reductions) - 1
        position = ".position" if reduction.operation in ARG_REDUCTIONS else ""
        found[reduction.name] = f"{path}.value{position}" if last else f"{path}.first.value{position}"
        path = f"{path}.second"
    return found


def slot_words(stage: Stage) -> int:
    """64-bit words of one state's slot in a mailbox: one for each 32-bit word, in pairs."""
    words = -(-stage.state_bytes() // 4)
    return words + words % 2
