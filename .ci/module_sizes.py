"""Fails when a module, a class or a function outgrows what one person holds in mind. Split by meaning, not by size."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator

MODULE_LINES = 500
CLASS_LINES = 250
FUNCTION_LINES = 60
TESTS = "tests/"
"""Classes and functions there may be as long as what they tell."""


def main() -> int:
    """Prints what is too long in each tracked or new Python module; 1 when there is something."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    too_long: list[str] = []
    for path in listing:
        with open(path, encoding="utf-8") as file:
            too_long += outgrown(path, file.read())
    for said in too_long:
        print(said)
    print(f"sizes: {len(listing)} modules, {len(too_long)} things to split by meaning")
    return 1 if too_long else 0


def outgrown(path: str, text: str) -> Iterator[str]:
    """What is too long in a module."""
    if (count := len(text.splitlines())) > MODULE_LINES:
        yield f"{path}: {count} lines; {MODULE_LINES} at most"
    if path.startswith(TESTS):
        return
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        kind, most = ("class", CLASS_LINES) if isinstance(node, ast.ClassDef) else ("function", FUNCTION_LINES)
        if (count := (node.end_lineno or node.lineno) - node.lineno + 1) > most:
            yield f"{path}:{node.lineno}: {kind} {node.name} has {count} lines; {most} at most"


if __name__ == "__main__":
    sys.exit(main())
