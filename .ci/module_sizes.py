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
TO_BE_SPLIT = {
    ("agent_synthesis/emit/", "ProductText"),
}
"""Classes that are still longer, by the folder that they lie under: each is to be split. Nothing is added here."""


def main() -> int:
    """Prints what is too long in each tracked or new Python module; 1 when there is something."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    too_long: list[str] = []
    waiting = set(TO_BE_SPLIT)
    for path in listing:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        for said, name in outgrown(path, text):
            listed = {each for each in TO_BE_SPLIT if path.startswith(each[0]) and name == each[1]}
            waiting -= listed
            if not listed:
                too_long.append(said)
    too_long += [f".ci/module_sizes.py: {name} is split, so take it off the list" for _, name in sorted(waiting)]
    for said in too_long:
        print(said)
    print(f"sizes: {len(listing)} modules, {len(too_long)} things to split by meaning")
    return 1 if too_long else 0


def outgrown(path: str, text: str) -> Iterator[tuple[str, str]]:
    """What is too long in a module: what to say of it, and the name of the class, or an empty one."""
    if (count := len(text.splitlines())) > MODULE_LINES:
        yield f"{path}: {count} lines; {MODULE_LINES} at most", ""
    if path.startswith(TESTS):
        return
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        is_class = isinstance(node, ast.ClassDef)
        kind, most = ("class", CLASS_LINES) if is_class else ("function", FUNCTION_LINES)
        if (count := (node.end_lineno or node.lineno) - node.lineno + 1) > most:
            said = f"{path}:{node.lineno}: {kind} {node.name} has {count} lines; {most} at most"
            yield said, node.name if is_class else ""


if __name__ == "__main__":
    sys.exit(main())
