"""Shows, without a GPU, the plan that a search tries first on each matrix product of KernelBench's level 2.

    python -m benchmarks.kernelbench.level2_plans --kernelbench KernelBench/KernelBench [--only norm 12 …]

Each task is captured at its own size for the target cuda; of the reasoner's proposals without algebra the first that is
legal is made into a program. Algebra, where some is proposed, stands beside it. Nothing is compiled or run. Four of the
modules hold 4 GB of weights.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from agent_reasoning.roofline_reasoner import RooflineReasoner
from agent_synthesis import generator
from agent_synthesis.plans.plan import Plan
from agent_synthesis.synthesizer import BuiltInSynthesizer
from benchmarks.kernelbench.level2 import tasks
from orchestrator.tasks import intake
from warpsmith.errors import IllegalMove
from warpsmith.v1 import analysis_pb2, reasoning_service_pb2


def first_plan(synthesizer: BuiltInSynthesizer, file: Path) -> tuple[Plan | None, list[str]]:
    """The first legal plan without algebra, its program made; and the rules that are proposed."""
    task = intake.read(intake.Request(str(file), target="cuda"))
    request = reasoning_service_pb2.ProposeHypothesesRequest(task=task, analysis=synthesizer.analyze(task, []))
    found, rules = None, dict[str, None]()
    for hypothesis in RooflineReasoner().propose(request).hypotheses:
        used = [move.choice for move in hypothesis.moves if move.kind == analysis_pb2.MOVE_KIND_REWRITE]
        rules |= dict.fromkeys(used)
        if found is None and not used:
            try:
                found = synthesizer.plan(task, hypothesis.moves)
                generator.generate(found)
            except IllegalMove:
                found = None
    return found, list(rules)


def main() -> int:
    """Prints the table; exit code 0 when every task's first plan makes its product in a kernel of ours."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernelbench", type=Path, required=True, help="the directory that holds level2/")
    parser.add_argument("--only", nargs="*", default=[], help="classes or numbers of the tasks wanted")
    options = parser.parse_args()
    synthesizer = BuiltInSynthesizer()
    print("| task | kernels of ours, in order | left to the library | algebra proposed |\n| --- | --- | --- | --- |")
    chosen, made = tasks(options.kernelbench, options.only), Counter[str]()
    for file in chosen:
        plan, rules = first_plan(synthesizer, file)
        groups = plan.groups if plan is not None else ()
        ours = [group.schedule for group in groups if group.engine == "authored"]
        left = [group.name for group in groups if group.engine == "library"]
        made["product"] += any(name.startswith("cuda_product") for name in ours)
        made["all"] += bool(ours) and not left
        print(f"| {file.stem} | {', '.join(ours)} | {', '.join(left) or '-'} | {', '.join(rules) or '-'} |", flush=True)
    print(f"\nThe product is ours in {made['product']} of {len(chosen)} first plans, everything in {made['all']}.")
    return 0 if made["product"] == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
