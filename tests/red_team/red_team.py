"""A standing red team against our own judge: draws attacks by combining parts, judges them, keeps a table by kind.

    python tests/red_team/red_team.py --count 5000 --seed 1 --jobs 8 [--only stack] [--target cuda] [--minutes 60]
    python tests/red_team/red_team.py --table FILE          the table of what was judged before
    python tests/red_team/red_team.py --show 17 --seed 1    the text of one attack
    python tests/red_team/red_team.py --cases DIR           judges the cases of a folder instead

It goes on where a run with the same file ended. It ends with 1 where an attack was believed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "proto"))
sys.path.insert(0, str(Path(__file__).parent))

import dropped_cases
import ledger
from drawn_attacks import Attack, drawn, version
from judging_bench import TARGETS, Told
from workers import Job, Setting, judged

AXES = ("knows", "gives", "hides", "slows", "module")


def line_of(attack: Attack, seed: int, target: str, told: Told, *, believed: bool) -> ledger.Line:
    """What is written of an attack."""
    return {
        "name": name_of(attack, seed),
        "seed": seed,
        "number": attack.number,
        "version": version(),
        "target": target,
        "module": [attack.reference.name, attack.reference.name],
        **{axis: getattr(attack, axis) for axis in ("knows", "gives", "hides", "slows")},
        "is_wrong": attack.is_wrong,
        "believed": believed,
        **told.__dict__,
    }


def name_of(attack: Attack, seed: int) -> str:
    """Of an attack, by seed and number."""
    return f"attack-{seed}-{attack.number}"


def wanted(attack: Attack, only: str) -> bool:
    """Whether a kind, a part or the module has `only` in its name."""
    return any(only in name for axis in ("knows", "gives", "hides", "slows") for name in getattr(attack, axis)) or (
        only in attack.reference.name
    )


def run(options: argparse.Namespace) -> int:
    """Judges what the file lacks and prints the table; 1 where something was believed."""
    file: Path = options.file
    this_version, named = version(), (options.seed, options.target)
    known = [line for line in ledger.read(file) if line["version"] == this_version]
    done = {line["number"] for line in known if (line["seed"], line["target"]) == named and line["verdict"] != "BROKEN"}
    attacks = {}
    number = 0
    while len(attacks) < options.count and number < 400 * options.count:
        attack = drawn(options.seed, number, options.target)
        if wanted(attack, options.only):
            attacks[name_of(attack, options.seed)] = attack
        number += 1
    jobs = [
        Job(name, attack.text, attack.reference.text(options.target), is_wrong=attack.is_wrong)
        for name, attack in attacks.items()
        if attack.number not in done
    ]
    print(
        f"{len(attacks)} attacks, {len(attacks) - len(jobs)} of them judged before, {options.jobs} at once", flush=True
    )
    begin, setting = time.monotonic(), Setting(options.target, options.final, rung=options.rung)
    for position, (job, believed, told) in enumerate(judged(jobs, setting, options.jobs), 1):
        line = line_of(attacks[job.name], options.seed, options.target, told, believed=believed)
        ledger.append(file, line)
        if believed:
            texts = file.parent / "believed"
            texts.mkdir(exist_ok=True)
            (texts / f"{job.name}.solution.py").write_text(job.solution)
            (texts / f"{job.name}.reference.py").write_text(job.reference)
            print(ledger.said(line), flush=True)
        if position % 100 == 0:
            print(f"{position} of {len(jobs)} in {time.monotonic() - begin:.0f} s", flush=True)
        if options.minutes and time.monotonic() - begin > 60 * options.minutes:
            print("the time is over; the rest is judged when this is run again", flush=True)
            break
    lines = [each for each in ledger.read(file) if each["name"] in attacks and each["version"] == this_version]
    last = {(each["target"], each["name"]): each for each in lines if each["target"] == options.target}
    print(f"{len(jobs)} in {time.monotonic() - begin:.0f} s\n\n{ledger.table(last.values(), AXES)}")
    return any(each["believed"] for each in last.values())


def run_cases(options: argparse.Namespace) -> int:
    """Judges a folder's cases as finals; 1 where one is not as expected."""
    found = {case.name: case for case in dropped_cases.cases(options.cases)}
    bad = 0
    setting = Setting(options.target, final=True, rung=options.rung)
    for job, believed, told in judged([case.job for case in found.values()], setting, options.jobs):
        complaint = found[job.name].complaint(told, believed=believed)
        bad += bool(complaint)
        print(
            f"{job.name}: {complaint or f'as expected: {told.verdict} {told.kind} {told.speedup:.2f}x {told.detail}'}"
        )
    print(f"{len(found)} cases, {bad} not as expected")
    return bad > 0


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=max(1, len(os.sched_getaffinity(0)) // 2))
    parser.add_argument("--only", default="", help="a word in the name of a kind, a part or a module")
    parser.add_argument("--target", choices=sorted(TARGETS), default="cpu")
    parser.add_argument("--final", action="store_true", help="judge as finals, as `warpsmith judge` and --cases do")
    parser.add_argument("--minutes", type=float, default=0.0, help="stop after so many")
    parser.add_argument("--rung", default="", help="of the jail: bubblewrap, unshare, landlock")
    parser.add_argument("--file", type=Path, default=Path("runs/red_team/judged.jsonl"))
    parser.add_argument("--table", type=Path, help="print the table of this file and end")
    parser.add_argument("--show", type=int, metavar="NUMBER", help="print an attack's text and end")
    parser.add_argument("--cases", type=Path, metavar="DIR", help="judge the cases of a folder instead")
    options = parser.parse_args()
    if options.table:
        last = {(each["target"], each["name"], each["version"]): each for each in ledger.read(options.table)}
        print(ledger.table(last.values(), AXES))
        return any(each["believed"] for each in last.values())
    if options.show is not None:
        attack = drawn(options.seed, options.show, options.target)
        print(f"# {attack.parts}\n{attack.text}")
        return 0
    return run_cases(options) if options.cases else run(options)


if __name__ == "__main__":
    sys.exit(main())
