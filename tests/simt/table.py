"""Runs every subject under both sanitizers, then every planted fault, and prints the tables. `make test-simt ALL=1`.

Exit code 1 where a kernel is wrong, where anything is found in one, or where a fault is not found.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from simulated import Subject, simulation, wrong_values
from subjects import every_subject
from test_planted import FAULTS, broken

from agent_correctness.simulation.simt import Execution, Sanitizer, Simulator

LEGEND = """\
A: right values, no stray access, nothing read unwritten, nothing undefined (two runs, AddressSanitizer and UBSan).
T: right values, no race (ThreadSanitizer). Small letters: something was found. Empty: the schedule refuses it.
"""


def main() -> int:
    """Prints the tables; the exit code."""
    simulator = Simulator()
    if lack := simulator.missing():
        print(lack, file=sys.stderr)
        return 2
    begin = time.monotonic()
    try:
        return _print(simulator, begin)
    finally:
        simulator.close()


def _print(simulator: Simulator, begin: float) -> int:
    subjects = every_subject()
    marks: dict[tuple[str, str], str] = {}
    problems: list[str] = []
    for sanitizer, letter in ((Sanitizer.ADDRESS, "A"), (Sanitizer.THREAD, "T")):
        executions = simulator.execute_all([simulation(subject) for subject in subjects], sanitizer)
        for subject, execution in zip(subjects, executions, strict=True):
            wrong = _problems(subject, execution)
            problems += [f"{subject.name}, {sanitizer.value}: {text}" for text in wrong]
            at = (subject.strategy, subject.shape_class)
            marks[at] = marks.get(at, "") + (letter.lower() if wrong else letter)
    for family in dict.fromkeys(subject.strategy.split()[0] for subject in subjects):
        _print_family(family, subjects, marks)
    print(LEGEND)
    print("| planted fault | found as |\n|---|---|")
    for fault in FAULTS:
        findings = simulator.execute(broken(fault), fault.sanitizer).findings
        hit = next((f for f in findings if f.kind is fault.kind and fault.words in f.detail), None)
        if hit is None:
            problems.append(f"{fault.name} was not found: {findings}")
        print(f"| {fault.name.replace('_', ' ')} | {f'{hit.kind.value}: {hit.detail}' if hit else 'not found'} |")
    seconds = time.monotonic() - begin
    print(f"\n{len(subjects)} kernels, {len(FAULTS)} planted faults, {len(problems)} problems, {seconds:.0f} s")
    print("\n".join(problems), file=sys.stderr)
    return 1 if problems else 0


def _problems(subject: Subject, execution: Execution) -> list[str]:
    found = [f"{finding.kind.value} {finding.place} {finding.detail}" for finding in execution.findings]
    return found + (list(wrong_values(subject.nest, execution.outputs)) if execution.outputs else ["no outputs"])


def _print_family(family: str, subjects: Sequence[Subject], marks: dict[tuple[str, str], str]) -> None:
    own = [subject for subject in subjects if subject.strategy.split()[0] == family]
    classes = list(dict.fromkeys(subject.shape_class for subject in own))
    print(f"| {own[0].schedule.name} | {' | '.join(name.replace('_', ' ') for name in classes)} |")
    print(f"|---|{'---|' * len(classes)}")
    for strategy in dict.fromkeys(subject.strategy for subject in own):
        cells = [marks.get((strategy, shape_class), "") for shape_class in classes]
        print(f"| {strategy.split()[1].replace('_', ' ')} | {' | '.join(cells)} |")
    print()


if __name__ == "__main__":
    sys.exit(main())
