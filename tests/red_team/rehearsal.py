"""Runs every part once without a judge, with bland parts around it: an attack that only crashes attacks nothing.

The one idea: a part is worth its place if eighty calls with it end, cheated or not, where nothing but the jail stands
in its way. Never outside of that: parts do to a home directory what they say. What touches other processes is left out.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import how_it_knows
import torch
import what_it_gives
import where_it_hides
import whom_it_slows
from attacked_modules import REFERENCES, Reference
from drawn_attacks import composed
from part import Part

CALLS, SECONDS, ALL_SECONDS = 80, 60, 600
INSIDE = "--inside"
DONE = "all calls were made"
OUTLIVING = ("workers", "session", "interpreter")
"""In names of parts that touch other processes or leave the group that is killed."""
BLAND = Part("bland", "")
NEVER = Part("never", "def knows(self, inputs):\n    return False")
AFTER_TEN = Part("after ten", "def knows(self, inputs):\n    CALLS[0] += 1\n    return CALLS[0] > 10 and CALLS[0] % 3")
MEMO = next(part for part in what_it_gives.STORED if "address" in part.name)


def parts() -> Iterator[tuple[Part, Part, Part, Part]]:
    """How it knows, what it gives, where it hides, whom it slows: one of them as listed, the others bland."""
    for group in how_it_knows.GROUPS.values():
        yield from ((part, MEMO, BLAND, BLAND) for part in group)
    yield how_it_knows.NOTHING, MEMO, BLAND, BLAND
    for group in what_it_gives.GROUPS.values():
        yield from ((AFTER_TEN, part, BLAND, BLAND) for part in group)
    for group in where_it_hides.GROUPS.values():
        yield from ((AFTER_TEN, MEMO, part, BLAND) for part in group)
    for group in whom_it_slows.GROUPS.values():
        yield from ((NEVER, MEMO, BLAND, part) for part in group if not any(word in part.name for word in OUTLIVING))


def calls(text: str, reference: Reference) -> None:
    """Eighty calls of an attack, each twice on the same values."""
    file = "/tmp/attack.py"
    space: dict[str, object] = {"__name__": "attack", "__file__": file}
    exec(compile(text, file, "exec"), space)
    given: dict[str, object] = {}
    exec(reference.text("cpu"), given)
    sets = [given["get_inputs"]() for _ in range(3)]  # type: ignore[operator]
    module = space["ModelNew"]()  # type: ignore[operator]
    with torch.no_grad():
        for number in range(CALLS):
            module(*sets[number // 2 % 3])


@dataclass(frozen=True)
class Begun:
    """An attack whose calls are made in a process of its own."""

    name: str
    child: int
    out: int


def begun(name: str, text: str, reference: Reference) -> Begun:
    """Begins with the calls of an attack."""
    out, into = os.pipe()
    if (child := os.fork()) == 0:
        os.setsid()
        told = DONE
        try:
            signal.alarm(SECONDS)
            calls(text, reference)
        except BaseException:
            told = traceback.format_exc(limit=-3)
        os.write(into, told.encode()[:4000])
        os.kill(0, signal.SIGKILL)  # with what it started
    os.close(into)
    return Begun(name, child, out)


def fault(attack: Begun) -> str:
    """What went wrong, once it has ended; empty where nothing did."""
    _, status = os.waitpid(attack.child, 0)
    os.set_blocking(attack.out, False)
    try:
        told = os.read(attack.out, 4000).decode()
    except BlockingIOError:
        told = f"ended by itself: {status}"
    os.close(attack.out)
    return "" if DONE in told else told


def all_begun() -> Iterator[Begun]:
    """Each part on two references, with its numbers in turn."""
    references = (REFERENCES[4], REFERENCES[6])
    for chosen in parts():
        numbers = next((part.numbers for part in chosen if part.numbers), ()) or (None,)
        for number, reference in zip(islice(cycle(numbers), max(2, len(numbers))), cycle(references), strict=False):
            here = tuple(part if number is None else part.with_number(number) for part in chosen)
            name = next((part.name for part in here if part not in (BLAND, NEVER, AFTER_TEN, MEMO)), "the memo")
            yield begun(f"{name} on {reference.name}", composed(here, reference, "cpu"), reference)


def inside() -> int:
    """Prints each attack that fails; 1 where one does. For a process that is in the jail."""
    torch.set_num_threads(1)
    count, bad = 0, 0
    running: deque[Begun] = deque()
    attacks = all_begun()
    while True:
        running.extend(islice(attacks, len(os.sched_getaffinity(0)) - len(running)))
        if not running:
            break
        attack = running.popleft()
        count += 1
        if told := fault(attack):
            bad += 1
            print(f"{attack.name}: {told}", flush=True)
    print(f"{count} attacks of one part, {bad} that fail")
    return bad > 0


def main() -> int:
    """What `inside` prints and returns, in the jail."""
    from warpsmith.sandbox import jail

    policy = jail.Policy(readable=(Path(__file__).resolve().parent,))
    command = [sys.executable, "-s", "-P", os.path.realpath(__file__), INSIDE]
    ran = jail.run(command, policy, jail.choose(), deadline_s=ALL_SECONDS)
    print((ran.stdout + ran.stderr).decode(errors="replace"), end="", flush=True)
    return int(ran.timed_out or ran.exit.code != 0)


if __name__ == "__main__":
    sys.exit(inside() if INSIDE in sys.argv else main())
