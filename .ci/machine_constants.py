"""Fails where a service knows a GPU: its architecture or name in a string, or a size of its own as a number.

What a card is stands in `proto/warpsmith/hardware.py`; services are handed a `Hardware`. Docstrings may name cards.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

SERVICES = (
    "orchestrator",
    "agent_synthesis",
    "agent_compile",
    "agent_correctness",
    "agent_reasoning",
    "gpu_bench",
    "proto",
)
HARDWARE = "proto/warpsmith/hardware.py"
NO_GPU = frozenset({"proto/warpsmith/sandbox/lockdown.py"})
"""Modules whose numbers are something else: of system calls."""
NAMES = re.compile(r"\b(sm_\d+|compute_\d+|[AHBL]\d00|GH200|RTX)")

sys.path.insert(0, "proto")


def sizes() -> dict[float, str]:
    """Numbers that are one card's and hardly anything else: no powers of two."""
    from warpsmith.hardware import CARDS, H200_MEASURED

    found: dict[float, str] = {}
    for card in CARDS.values():
        named = {"sm_count": card.sm_count, "l2_bytes": card.l2_bytes, "shared_bytes": card.shared_bytes}
        named |= {name: value for name, value in vars(card.costs).items() if value >= 1 << 20}
        found |= {value: f"{name} of {card.architecture}" for name, value in named.items()}
    rates = (H200_MEASURED.copy_bytes_per_second, H200_MEASURED.tensor_flops, 989e12, 4.8e12, 3.35e12)
    found |= dict.fromkeys(rates, "a rate of an H200 or H100")
    return {value: name for value, name in found.items() if value == int(value) and int(value) & (int(value) - 1)}


def main() -> int:
    """Prints each constant of a machine with its place; 1 when there is one."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *SERVICES]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    modules = [Path(path) for path in listing if path.endswith(".py") and path not in NO_GPU | {HARDWARE}]
    known, count = sizes(), 0
    for module in modules:
        for line, said in constants(ast.parse(module.read_text(encoding="utf-8")), known):
            print(f"{module}:{line}: {said}; take it from a Hardware")
            count += 1
    print(f"machine constants: {len(modules)} modules, {count} constants of a GPU outside {HARDWARE}")
    return 1 if count else 0


def constants(tree: ast.Module, known: dict[float, str]) -> list[tuple[int, str]]:
    """Lines of a module with what they know of a GPU."""
    words = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings and the like
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in words:
            found += [(node.lineno, repr(name)) for name in NAMES.findall(node.value)]
        value = _value(node)
        if value in known:
            found.append((node.lineno, f"{value:.15g} is the {known[value]}"))
    return found


def _value(node: ast.AST) -> float | None:
    """The number that a literal is, or a shifted one such as 227 << 10."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.LShift):
        left, right = _value(node.left), _value(node.right)
        return None if left is None or right is None else float(int(left) << int(right))
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return float(node.value)
    return None


if __name__ == "__main__":
    sys.exit(main())
