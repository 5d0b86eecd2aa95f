"""Estimates what one optimised kernel costs on a GPU, from measured runs and the reader's prices.

    python -m benchmarks.search.cost_estimate [RESULTS.jsonl …] [--gpu-hour 4.0] [--processor-hour 0.05]
                                              [--processors 16]

A line of a result file says how long the GPU's machine was held for one module: preparation, search, final measurement.
The GPU and its processors are paid for that time; agents on other machines are `--processors` too. Prices are examples.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def main() -> None:
    """Prints a table with a row for each file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, default=[RESULTS / "h200.jsonl", RESULTS / "level1_h200.jsonl"])
    parser.add_argument("--gpu-hour", type=float, default=4.0, help="price of a GPU for an hour")
    parser.add_argument("--processor-hour", type=float, default=0.05, help="price of a processor for an hour")
    parser.add_argument("--processors", type=int, default=16, help="held as long as the GPU is")
    chosen = parser.parse_args()
    hour = chosen.gpu_hour + chosen.processors * chosen.processor_hour
    print(
        f"{chosen.gpu_hour:g} an hour for a GPU, {chosen.processor_hour:g} for each of {chosen.processors} processors\n"
    )
    print(
        "| results | modules | faster | seconds a module, p50 | p90 | cost a module, p50 | p90 | cost a faster kernel |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for file in chosen.files:
        lines = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
        seconds = sorted(line["seconds"] for line in lines if line.get("seconds"))
        faster = sum(line.get("state") == "FASTER" for line in lines)
        half, most = statistics.median(seconds), seconds[len(seconds) * 9 // 10]
        costs = [each / 3600 * hour for each in (half, most, sum(seconds) / max(1, faster))]
        print(
            f"| {file.name} | {len(lines)} | {faster} | {half:.0f} | {most:.0f} | "
            + " | ".join(f"{cost:.2f}" for cost in costs)
            + " |"
        )


if __name__ == "__main__":
    main()
