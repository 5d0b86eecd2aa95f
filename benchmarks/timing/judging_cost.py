"""What a screening of a candidate costs on a GPU, and whether another tree's costs less.

    python -m benchmarks.timing.screening_cost [--against DIR] [--rounds 3] [--count 40]

One honest kernel of the hostile suite (softmax of 4096 x 16384) is compared and timed again and again in a warm
session. Trees take turns, each in a process of its own, so that what the machine does meanwhile is shared fairly; the
other tree is a checkout of an earlier commit with its stubs made (`python proto/generate.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import json, sys, time
from pathlib import Path
import hostile_kernels as kernels
from hostile_gpu_bench import SCREENING, PASS, Bench, judged, measured
from hostile_traces import own_place

with own_place() as traces:
    bench = Bench(traces)
    try:
        wide = kernels.honest(kernels.WIDE)
        program, artifact = bench.compiled(wide)
        session = bench.session(wide.module)
        taken = []
        for _ in range(5 + int(sys.argv[1])):
            begin = time.monotonic()
            assert judged(session, program, artifact, SCREENING).state == PASS
            compared = time.monotonic()
            measured(session, program, artifact, SCREENING)
            taken.append((compared - begin, time.monotonic() - compared))
    finally:
        bench.end()
print("taken", json.dumps(taken[5:]))
"""
"""Runs in a tree; its first five are warm-up."""


def screenings(tree: Path, count: int) -> list[tuple[float, float]]:
    """Seconds of comparing and of timing, a screening each. Raises CalledProcessError."""
    paths = [tree, tree / "proto", tree / "tests" / "hostile", os.environ.get("PYTHONPATH", "")]
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(count)],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, filter(None, paths)))},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    line = next(line for line in ran.stdout.splitlines() if line.startswith("taken "))
    return [(compared, timed) for compared, timed in json.loads(line.removeprefix("taken "))]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another tree, measured in turn with this one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--count", type=int, default=40, help="screenings a round and tree")
    options = parser.parse_args()
    trees = {"this": Path.cwd()} | ({"other": options.against.resolve()} if options.against else {})
    print("| round | tree | screening, ms | comparison | timing |\n| ---: | --- | ---: | ---: | ---: |")
    medians: dict[str, list[float]] = {name: [] for name in trees}
    for number in range(options.rounds):
        for name in list(trees)[:: -1 if number % 2 else 1]:
            taken = screenings(trees[name], options.count)
            compared, timed = (1e3 * statistics.median(each[i] for each in taken) for i in (0, 1))
            medians[name].append(compared + timed)
            print(f"| {number + 1} | {name} | {compared + timed:.1f} | {compared:.1f} | {timed:.1f} |", flush=True)
    if options.against:
        ratio = statistics.median(medians["this"]) / statistics.median(medians["other"])
        print(f"\nthis tree takes {ratio:.3f} times the other's time")
    return 0


if __name__ == "__main__":
    sys.exit(main())
