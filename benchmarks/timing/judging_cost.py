"""What judging costs, and whether another tree's costs less.

    python -m benchmarks.timing.judging_cost screening [--against DIR] [--rounds 3]     on a GPU
    python -m benchmarks.timing.judging_cost judge [--against DIR] [--rounds 3]
    python -m benchmarks.timing.judging_cost start [--rounds 3]

*screening*: one honest kernel of the hostile suite (softmax of 4096 x 16384) is compared and timed, 40 times in a warm
session. *judge*: `warpsmith judge` of an honest softmax of 256 x 4096 on a processor, as a user runs it. *start*: a
worker of a judge, forked and as a new process, until it has answered once.

Trees take turns, each in a process of its own, so that what the machine does meanwhile is shared fairly; the other tree
is a checkout of an earlier commit with an environment of its own (`make setup`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SCREENING = """
import json, time
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
        for _ in range(45):
            begin = time.monotonic()
            assert judged(session, program, artifact, SCREENING).state == PASS
            compared = time.monotonic()
            measured(session, program, artifact, SCREENING)
            taken.append((compared - begin, time.monotonic() - compared))
    finally:
        bench.end()
print("taken", json.dumps({"comparison": [each[0] for each in taken[5:]], "timing": [each[1] for each in taken[5:]]}))
"""
"""Its first five are warm-up."""
JUDGE = """
import json, sys, time
try:
    from orchestrator.commands.cli import main
except ImportError:  # an earlier tree
    from orchestrator.cli import main
begin = time.monotonic()
sys.argv = ["warpsmith", "judge", "solution.py", "reference.py", "--target", "cpu"]
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
print("taken", json.dumps({"judge": [time.monotonic() - begin]}))
"""
START = """
import json, time
from gpu_bench.machine import JUDGE, worker_environment, worker_policy
from warpsmith.sandbox.worker import Worker
from warpsmith.v1 import judging_pb2, task_pb2

def seconds():
    begin = time.monotonic()
    worker = Worker(JUDGE, worker_policy(task_pb2.TARGET_CPU), env=worker_environment(-1))
    started = time.monotonic()
    worker.call("warm_up", judging_pb2.WarmUpRequest(), judging_pb2.Done, 60)
    answered = time.monotonic()
    worker.close()
    return started - begin, answered - started

taken = [seconds() for _ in range(6)]  # the first has the server started
if NEW:
    from warpsmith.sandbox import fork_server
    fork_server.forking = lambda *_: None
    taken = [seconds() for _ in range(6)]
print("taken", json.dumps({"start": [each[0] for each in taken[1:]], "first answer": [each[1] for each in taken[1:]]}))
"""
_REFERENCE = """
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return torch.softmax(x, dim=1)
def get_inputs():
    return [torch.randn(256, 4096)]
def get_init_inputs():
    return []
"""
_SOLUTION = """
import torch
class ModelNew(torch.nn.Module):
    def forward(self, x):
        e = torch.exp(x - x.max(dim=1, keepdim=True).values)
        return e / e.sum(dim=1, keepdim=True)
"""


def measured(tree: Path, script: str) -> dict[str, float]:
    """Runs a script in a tree: by part, the median of the seconds that it says. Raises CalledProcessError."""
    own = tree / ".venv" / "bin" / "python"  # its plugins are those of its own distribution
    paths = [tree, tree / "proto", tree / "tests" / "hostile", os.environ.get("PYTHONPATH", "")]
    with tempfile.TemporaryDirectory(prefix="judging-cost-") as place:
        for name, text in (("reference.py", _REFERENCE), ("solution.py", _SOLUTION)):
            (Path(place) / name).write_text(text)
        ran = subprocess.run(
            [str(own) if own.exists() else sys.executable, "-c", script],
            cwd=place,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, filter(None, paths)))},
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
    line = next(line for line in ran.stdout.splitlines() if line.startswith("taken "))
    return {part: statistics.median(taken) for part, taken in json.loads(line.removeprefix("taken ")).items()}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("screening", "judge", "start"))
    parser.add_argument("--against", type=Path, help="another tree, measured in turn with this one")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    here, script = Path.cwd(), {"screening": SCREENING, "judge": JUDGE, "start": f"NEW = False\n{START}"}[options.what]
    ways = {"this tree": (here, script)}
    if options.what == "start":
        ways = {"forked": (here, script), "a new process": (here, f"NEW = True\n{START}")}
    elif options.against:
        ways["the other"] = (options.against.resolve(), script)
    sums: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(options.rounds):
        for name in list(ways)[:: -1 if number % 2 else 1]:
            parts = measured(*ways[name])
            if not any(sums.values()):
                print(f"| round | | s | {' | '.join(parts)} |\n| ---: | --- | ---: |{' ---: |' * len(parts)}")
            sums[name].append(sum(parts.values()))
            told = " | ".join(f"{seconds:.4f}" for seconds in (sums[name][-1], *parts.values()))
            print(f"| {number + 1} | {name} | {told} |", flush=True)
    if len(ways) == 2:
        one, other = (statistics.median(each) for each in sums.values())
        first, second = ways
        print(f"\n{first} takes {one / other:.3f} times what {second} takes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
