"""A contributor's answer within 90 seconds: lint, types, and the tests that the change touches.

The one idea: a test file is touched when it was changed itself, or imports a module that was. Where nothing is, a fixed
core runs. What does not end in time is stopped and said to be open: `make check test` decides, this only warns early.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

SECONDS = 85.0
"""For everything: the rest of 90 is for starting and ending."""
CORE = (
    "tests/warpsmith/test_digest.py", "tests/warpsmith/test_private_files.py", "tests/agent_synthesis/test_lowering.py",
    "tests/agent_synthesis/test_plan.py", "tests/agent_correctness/test_judge.py", "tests/orchestrator/test_report.py",
    "tests/gpu_bench/test_statistics.py",
)  # fmt: skip
"""What runs where no test imports what was changed: a part of every room."""
OF_MAKE_TEST = (
    "not gpu and not vllm and not hostile and not postgres and not simt and not services and not web and not faults"
)
CHECKS = (("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",), ("lint-imports",))


def main() -> int:
    """Runs checks and tests beside each other; 1 when any has failed."""
    begin, binaries = time.monotonic(), Path(sys.executable).parent
    tests = touched(changed(), {path: path.read_text() for path in Path("tests").rglob("test_*.py")})
    print(f"{len(tests)} test files import what was changed" if tests else "no test imports what was changed: the core")
    command = ["pytest", "-q", "-x", "-n", "2", "--dist", "loadfile", "-m", OF_MAKE_TEST, *(tests or CORE)]
    running = {"tests": subprocess.Popen([binaries / command[0], *command[1:]])}
    for check in CHECKS:
        arguments = [binaries / check[0], *check[1:]]
        running[" ".join(check)] = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    failed = False
    for name, process in reversed(running.items()):
        try:
            output, _ = process.communicate(timeout=max(0.1, SECONDS - (time.monotonic() - begin)))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            process.communicate()
            print(f"{name}: stopped after {SECONDS:.0f} s, nothing failed so far")
            continue
        nothing_to_run = name == "tests" and process.returncode == 5
        failed |= bool(process.returncode) and not nothing_to_run
        print(f"{name}: {'failed' if process.returncode and not nothing_to_run else 'ok'}")
        if process.returncode and output:
            print(output.decode(errors="replace"))
    print(f"{time.monotonic() - begin:.0f} s; all of it: make check test")
    return int(failed)


def changed() -> list[Path]:
    """What differs from the main branch of `origin`, or else from the commit before the last; new files too."""
    for base in ("origin/main", "HEAD~1"):
        found = _git("diff", "--name-only", base)
        if found:
            break
    return [Path(name) for name in found + _git("ls-files", "--others", "--exclude-standard")]


def _git(*arguments: str) -> list[str]:
    """What it prints, line by line; nothing where it fails: `origin` or an earlier commit may not be there."""
    return subprocess.run(["git", *arguments], check=False, capture_output=True, text=True).stdout.splitlines()


def touched(paths: Iterable[Path], tests: Mapping[Path, str]) -> list[str]:
    """Those of the test files, given with their texts, that were changed or import a changed module; in order."""
    paths = set(paths)
    modules = [path.with_suffix("").parts for path in paths if path.suffix == ".py" and path.parts[0] != "tests"]
    patterns = [_imports(parts[1:] if parts[0] == "proto" else parts) for parts in modules]
    return sorted(
        str(path) for path, text in tests.items() if path in paths or any(pattern.search(text) for pattern in patterns)
    )


def _imports(parts: tuple[str, ...]) -> re.Pattern[str]:
    """Finds an import of a module: by its full name, or by its last part from its package."""
    package, name = ".".join(parts[:-1]), parts[-1]
    if name == "__init__":
        return re.compile(rf"^from {re.escape(package)} import|^import {re.escape(package)}\b", re.MULTILINE)
    full = re.escape(f"{package}.{name}" if package else name)
    inside = rf"|^from {re.escape(package)} import [^\n]*\b{name}\b" if package else ""
    return re.compile(rf"^from {full} import|^import {full}\b{inside}", re.MULTILINE)


if __name__ == "__main__":
    sys.exit(main())
