"""A folder of cases that somebody dropped: NAME.solution.py, NAME.reference.py and, if wanted, NAME.expect.

The one idea: whoever finds an attack needs three files and no word of ours to see it judged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from judging_bench import PASS, Told
from workers import Job

EXPECTATIONS = ("NO GAIN", "FAIL", "PASS", "AT MOST")


@dataclass(frozen=True)
class Case:
    """A case, and what has to become of it."""

    name: str
    solution: str
    reference: str
    expect: str = EXPECTATIONS[0]
    """NO GAIN: anything but a speedup. FAIL KIND ...: one of these failures, or any. PASS: honest. AT MOST 1.5: PASS,
    told no more."""

    @property
    def must_fail(self) -> bool:
        """Whether it may not be called right."""
        return self.expect.startswith("FAIL")

    @property
    def job(self) -> Job:
        """As a worker takes it."""
        honest = self.expect == PASS
        return Job(self.name, self.solution, self.reference, is_wrong=self.must_fail, is_honest=honest)

    def complaint(self, told: Told, *, believed: bool) -> str:
        """What is not as expected; empty where all is."""
        said = f"{told.verdict} {told.kind} {told.speedup:.2f}x: {told.detail}"
        match self.expect.split():
            case ["PASS"]:
                return "" if told.verdict == PASS else f"refused: {said}"
            case ["FAIL", *kinds]:
                is_right = told.verdict == "FAIL" and (not kinds or told.kind in kinds)
                return "" if is_right else f"expected {self.expect}: {said}"
            case ["AT", "MOST", most]:
                return "" if told.verdict != PASS or told.speedup <= float(most) else f"believed: {said}"
            case _:
                return f"believed: {said}" if believed else ""


def cases(folder: Path) -> Iterator[Case]:
    """The cases of a folder. Raises FileNotFoundError for a solution without reference, ValueError for an expectation
    that nobody knows."""
    for solution in sorted(folder.glob("*.solution.py")):
        name = solution.name.removesuffix(".solution.py")
        expected = folder / f"{name}.expect"
        expect = " ".join(expected.read_text().split()) if expected.exists() else EXPECTATIONS[0]
        if not expect.startswith(EXPECTATIONS):
            raise ValueError(f"{expected}: {expect!r} is none of {', '.join(EXPECTATIONS)}")
        yield Case(name, solution.read_text(), (folder / f"{name}.reference.py").read_text(), expect)
