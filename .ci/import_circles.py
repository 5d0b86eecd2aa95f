"""Fails where modules of the services or the kit import each other in a circle, or a folder outgrows 15 files."""

from __future__ import annotations

import graphlib
import subprocess
import sys
from collections import Counter
from pathlib import Path

import grimp

SERVICES = ("orchestrator", "agent_synthesis", "agent_compile", "agent_correctness", "agent_reasoning", "gpu_bench")
FOLDERS = (*SERVICES, "proto/warpsmith", "benchmarks")
MOST_FILES = 15


def main() -> int:
    """Prints the first circle and every folder above the limit; 1 when there is one."""
    graph = grimp.build_graph("warpsmith", *SERVICES)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    failed = False
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        failed = True
        print("a circle of imports: " + " <- ".join(error.args[1]))
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *FOLDERS]
    paths = map(Path, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    counts = Counter(path.parent for path in paths if path.suffix == ".py" and path.exists())
    for folder, count in counts.items():
        if count > MOST_FILES:
            failed = True
            print(f"{folder}: {count} modules; {MOST_FILES} at most: give those that belong together a room")
    print(f"imports: {len(imports)} modules in {len(counts)} folders, {'not ' * failed}as they should be")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
