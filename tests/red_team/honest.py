"""Judges the honest corpus, on a busy machine too: what is refused is a bug of the judge.

All are compared as in a final, and timed as in a screening.

    python tests/red_team/honest.py [--count 12] [--only dropout] [--load 4] [--repeat 3] [--jobs 2] [--file FILE]

Run again with the same FILE it goes on where it ended. It ends with 1 where more than one solution was refused.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "proto"))
sys.path.insert(0, str(Path(__file__).parents[1] / "hostile" / "honest"))
sys.path.insert(0, str(Path(__file__).parent))

import ledger
from honest_case import Honest
from honest_code import CODE
from honest_halves import HALVES
from honest_state import STATE
from honest_tensors import INPUTS, OUTPUTS
from honest_untraced import UNTRACED
from judging_bench import TARGETS
from workers import Job, Setting, judged

from gpu_bench.limits import Limits

CORPUS = {
    "state": STATE, "outputs": OUTPUTS, "inputs": INPUTS, "halves": HALVES, "code": CODE, "untraced": UNTRACED
}  # fmt: skip
MOST_REFUSED = 1
_SPIN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(1 << 16))"


def jobs_of(only: str = "", count: int = 0, repeat: int = 1) -> dict[str, tuple[str, Honest, Job]]:
    """By name: the kind, the case, and the job; spread over the corpus where `count` is less than all."""
    wanted = [(kind, case) for kind, cases in CORPUS.items() for case in cases if only in case.name or only == kind]
    if count and count < len(wanted):
        wanted = [wanted[number * len(wanted) // count] for number in range(count)]
    named = {}
    for turn in range(repeat):
        for kind, case in wanted:
            name = case.name + (f" ({turn + 1})" if turn else "")
            named[name] = (kind, case, Job(name, case.solution, case.reference, is_honest=True))
    return named


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=0, help="so many of them, spread over the corpus")
    parser.add_argument("--only", default="", help="a kind, or a word in the name")
    parser.add_argument("--load", type=int, default=0, help="processes that spin beside it")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=max(1, len(os.sched_getaffinity(0)) // 2))
    parser.add_argument("--target", choices=sorted(TARGETS), default="cpu")
    parser.add_argument("--final", action="store_true", help="time as finals too, as `warpsmith judge` does")
    parser.add_argument("--untimed", action="store_true", help="verify only: a third of the time")
    parser.add_argument("--rung", default="", help="of the jail: bubblewrap, unshare, landlock")
    parser.add_argument("--file", type=Path, default=Path("runs/red_team/honest.jsonl"))
    options = parser.parse_args()
    named = jobs_of(options.only, options.count, options.repeat)
    known = {line["name"] for line in ledger.read(options.file)}
    jobs = [job for name, (_, _, job) in named.items() if name not in known]
    print(f"{len(named)} to judge, {len(named) - len(jobs)} of them judged before", flush=True)
    spinning = [subprocess.Popen([sys.executable, "-S", "-c", _SPIN]) for _ in range(options.load)]
    begin = time.monotonic()
    try:
        timed = not options.untimed
        setting = Setting(options.target, options.final, verified=True, timed=timed, rung=options.rung, limits=Limits())
        for job, passed, told in judged(jobs, setting, options.jobs):
            kind = named[job.name][0]
            line = {"name": job.name, "kind": kind, "load": options.load, "passed": passed, "told": told.__dict__}
            ledger.append(options.file, line)
            if not passed:
                print(_refused(line), flush=True)
    finally:
        for process in spinning:
            process.kill()
            process.wait()
    print(f"\n{len(jobs)} in {time.monotonic() - begin:.0f} s beside {options.load} that spin\n")
    return told_of([line for line in ledger.read(options.file) if line["name"] in named])


def told_of(lines: Sequence[ledger.Line]) -> int:
    """Prints the tables; 1 where too many were refused."""
    counts = Counter((line["kind"], line["passed"]) for line in lines)
    print("| kind | let in | refused |\n| --- | ---: | ---: |")
    for kind in CORPUS:
        print(f"| {kind} | {counts[kind, True]} | {counts[kind, False]} |")
    refused = [_refused(line) for line in lines if not line["passed"]]
    print("\n| refused | as | because |\n| --- | --- | --- |\n" + "\n".join(sorted(refused)))
    return len(refused) > MOST_REFUSED


def _refused(line: ledger.Line) -> str:
    told = line["told"]
    return f"| {line['name']} | {told['verdict']} {told['kind']} | {told['detail'].replace(chr(10), ' ')} |"


if __name__ == "__main__":
    sys.exit(main())
