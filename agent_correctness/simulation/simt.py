"""Runs a CUDA program on a CPU: its very source, compiled by g++ against a small SIMT header, under sanitizers.

The one idea: each CUDA thread is a fiber on one host thread, so a run is deterministic, and what the hardware leaves
open (the order of threads, what memory holds at first) is what two runs differ in. AddressSanitizer sees stray
accesses; ThreadSanitizer, to which every fiber is a thread of its own, sees what no barrier orders. Nothing is timed,
and nothing needs a GPU. What it cannot run it says (`Kind.UNSUPPORTED`), so that silence is no proof.

`include/simt/` is the header and the machine. A program's `ws_ptx.cuh`, its instructions in assembly, is replaced by
what they do on a CPU; all other text is compiled as it is.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agent_correctness.simulation.simt_findings import Finding, Kind, read
from agent_correctness.simulation.simt_job import FILLS, Memory, job_text
from warpsmith import digest
from warpsmith.errors import BadInput, Infrastructure, WorkerCrashed, WorkerRaised, WorkerTimeout
from warpsmith.sandbox import jail, private_files
from warpsmith.sandbox.worker import Worker
from warpsmith.v1 import candidate_pb2, simulation_pb2, task_pb2

INCLUDE_DIRECTORY = Path(__file__).parent.parent / "include"
_PTX = "ws_ptx.cuh"
_DYNAMIC_SHARED = re.compile(r"extern\s+__shared__\s+(?:__align__\(\d+\)\s+)?([\w:\s]+?)\s+(\w+)\[\];")
_TAIL = """\
extern "C" char __start_simt_shared[] __attribute__((weak, visibility("hidden")));
extern "C" char __stop_simt_shared[] __attribute__((weak, visibility("hidden")));
extern "C" simt::Unit simt_unit() {{
  return {{entries, {count}, __start_simt_shared, __stop_simt_shared}};
}}
"""


class Sanitizer(enum.Enum):
    """Which sanitizers watch a run."""

    ADDRESS = "address"
    """AddressSanitizer and UndefinedBehaviorSanitizer; two runs that differ in what CUDA leaves open."""
    THREAD = "thread"
    """ThreadSanitizer; one run."""


@dataclass(frozen=True)
class Limits:
    """What one command may take."""

    build_seconds: float = 300.0
    run_seconds: float = 60.0
    memory_mebibytes: int = 3072
    """Resident memory of a run."""


@dataclass(frozen=True)
class Simulation:
    """A program to run: its launches on given memory."""

    program: candidate_pb2.Program
    """Of the CUDA target; every step a launch."""
    sources: Mapping[str, bytes]
    """Name of a buffer that is no workspace or output → its bytes."""
    seed: int = 1
    """Chooses the order of threads and blocks; 0 is their numbers' order."""


@dataclass(frozen=True)
class Execution:
    """What came of a run."""

    outputs: Mapping[str, bytes]
    """Every buffer after the last launch, by name; empty when the run did not end."""
    findings: Sequence[Finding]
    """What is wrong, nothing for an honest kernel."""


FLAGS = ("-std=c++20", "-O1", "-g1", "-fPIC", "-fno-strict-aliasing", "-fno-gnu-unique", "-w", "-fmax-errors=20",
         # A register array that is read before it is written holds a pattern, not what the last call left.
         "-ftrivial-auto-var-init=pattern")  # fmt: skip
_SANITIZE = {
    Sanitizer.ADDRESS: ("-fsanitize=address,undefined", "-fsanitize-sections=simt_shared"),
    Sanitizer.THREAD: ("-fsanitize=thread",),
}
_DIGEST_BYTES = hashlib.sha256().digest_size
_LINK = {Sanitizer.ADDRESS: "-fsanitize=address,undefined", Sanitizer.THREAD: "-fsanitize=thread"}


@dataclass
class Simulator:
    """Builds and runs programs in one jailed worker, which starts with the first call."""

    limits: Limits = field(default_factory=Limits)
    cache: Path | None = None
    """Directory of built objects, by digest; None for WARPSMITH_CACHE_DIR/simt, else ~/.cache/warpsmith/simt."""
    _worker: Worker | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def missing(self) -> str:
        """What it lacks on this machine; empty when it can run."""
        if os.uname().machine != "x86_64":
            return "the SIMT machine switches fibers on x86-64 only"
        if _compiler() is None:
            return "no g++: install it (Debian: apt-get install g++)"
        absent = [name for name in ("libasan.so", "libtsan.so", "libubsan.so") if not _has_library(name)]
        return f"g++ has no {', '.join(absent)}: install its sanitizers' libraries" if absent else ""

    def execute(self, simulation: Simulation, sanitizer: Sanitizer) -> Execution:
        """Runs one program.

        Raises:
            BadInput: the program is not for CUDA, has a step that is no launch, or lacks a source.
            Infrastructure: no compiler, or no jail.
        """
        return self.execute_all([simulation], sanitizer)[0]

    def execute_all(self, simulations: Sequence[Simulation], sanitizer: Sanitizer) -> list[Execution]:
        """Runs programs, compiled together where their headers agree and their entries differ."""
        if lack := self.missing():
            raise Infrastructure(lack)
        for simulation in simulations:
            _require(simulation)
        runner = self._runner(sanitizer)
        results: dict[int, Execution] = {}
        for batch in _batches(simulations):
            unit, log = self._unit([simulations[number].program for number in batch], sanitizer)
            for number in batch:
                results[number] = (
                    self._run(simulations[number], sanitizer, runner, unit)
                    if unit
                    else Execution({}, (Finding(Kind.UNSUPPORTED, "", f"g++ does not compile it: {log}"),))
                )
        return [results[number] for number in range(len(simulations))]

    def close(self) -> None:
        """Ends the worker."""
        with self._lock:
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    # -- running

    def _run(self, simulation: Simulation, sanitizer: Sanitizer, runner: bytes, unit: bytes) -> Execution:
        def once(seed: int, fills: Mapping[str, int]) -> tuple[Memory | None, list[Finding]]:
            return self._run_once(simulation, runner, unit, seed, fills)

        program = simulation.program
        if sanitizer is Sanitizer.THREAD:
            memory, findings = once(simulation.seed, {})
            return Execution(memory.contents if memory else {}, tuple(findings))
        first, findings = once(0, {})
        if first is None or findings:
            return Execution(first.contents if first else {}, tuple(findings))
        everything = dict.fromkeys(("", *_filled(program)), FILLS[1])
        second, findings = once(simulation.seed, everything)
        if second is None or findings:
            return Execution(first.contents, tuple(findings))
        findings += _unwritten(program, first, second) or _dirty(program, first)
        if not findings and first.outputs(program) != second.outputs(program):
            findings.append(self._difference(simulation, first, once))
        return Execution(first.contents, tuple(findings))

    @staticmethod
    def _difference(simulation: Simulation, first: Memory, once: object) -> Finding:
        """Why two runs differ: which memory's first content makes the difference, else the order of threads."""
        assert callable(once)
        program = simulation.program
        for name in ("", *_filled(program)):
            again, _ = once(0, {name: FILLS[1]})
            if again is None or again.outputs(program) != first.outputs(program):
                what = f"workspace or output {name}" if name else "shared memory"
                return Finding(Kind.UNINITIALIZED, "", f"an output depends on what {what} held before the launch")
        return Finding(Kind.ORDER, "", "an output depends on the order in which threads ran")

    def _run_once(
        self,
        simulation: Simulation,
        runner: bytes,
        unit: bytes,
        seed: int,
        fills: Mapping[str, int],
    ) -> tuple[Memory | None, list[Finding]]:
        text, data = job_text(simulation.program, simulation.sources, seed, fills)
        files = {"runner": runner, "unit.so": unit, "job": text.encode(), "input": data}
        memory = self.limits.memory_mebibytes
        reply = self._call(
            files,
            ["./runner", "./unit.so", "job", "input", "output"],
            ["output"],
            self.limits.run_seconds,
            {
                "ASAN_OPTIONS": f"detect_leaks=0:exitcode=1:redzone=256:hard_rss_limit_mb={memory}",
                "UBSAN_OPTIONS": "print_stacktrace=0",
                "TSAN_OPTIONS": f"exitcode=66:memory_limit_mb={memory}",
            },
        )
        if reply.timed_out:
            detail = f"the run took more than {self.limits.run_seconds:g} s"
            return None, [Finding(Kind.TIMEOUT, "", detail)]
        output = next((file.content for file in reply.results if file.name == "output"), None)
        memory_after = Memory.of(simulation.program, output, fills) if output is not None else None
        return memory_after, read(reply.log, reply.exit_code)

    # -- building

    def _unit(self, programs: Sequence[candidate_pb2.Program], sanitizer: Sanitizer) -> tuple[bytes, str]:
        """The shared object of the programs' kernels; empty, with the messages, where g++ refuses them."""
        files = {name: text.encode() for name, text in _files(programs).items()}
        command = [*FLAGS, *_SANITIZE[sanitizer], "-I.", "-shared", "-o", "unit.so", "unit.cpp"]
        return self._built(files, command, "unit.so")

    def _runner(self, sanitizer: Sanitizer) -> bytes:
        # The machine itself is not instrumented: to a sanitizer, what it does between threads does not happen.
        compile_only = ["-std=c++20", "-O1", "-g1", f"-DSIMT_{sanitizer.name}", "-I.", "-c", "-o", "runner.o",
                        "simt/runner.cpp"]  # fmt: skip
        made, log = self._built(_header_files(), compile_only, "runner.o")
        if made:
            link = [_LINK[sanitizer], "-rdynamic", "-o", "runner", "runner.o", "-ldl"]
            made, log = self._built({"runner.o": made}, link, "runner")
        if not made:
            raise Infrastructure(f"the SIMT machine does not compile: {log}")
        return made

    def _built(self, files: Mapping[str, bytes], arguments: Sequence[str], result: str) -> tuple[bytes, str]:
        """What g++ makes of the files, from the cache where it is known; empty with messages where it refuses."""
        compiler = _compiler()
        assert compiler is not None
        parts: list[str | bytes] = ["simt", _version(compiler), *arguments]
        for name, content in sorted(files.items()):
            parts += [name, content]
        cache = private_files.directory(self.cache or _default_cache(), remedy="set WARPSMITH_CACHE_DIR to another")
        path = cache / digest.digest(*parts)
        if known := _undamaged(path):
            return known, ""
        reply = self._call(files, [compiler, *arguments], [result], self.limits.build_seconds, {})
        made = next((file.content for file in reply.results), b"")
        if reply.exit_code or reply.timed_out or not made:
            return b"", "it took too long" if reply.timed_out else reply.log[:4000]
        private_files.replace(path, hashlib.sha256(made).digest() + made)
        return made, ""

    # -- the worker

    def _call(
        self,
        files: Mapping[str, bytes],
        command: Sequence[str],
        results: Sequence[str],
        seconds: float,
        environment: Mapping[str, str],
    ) -> simulation_pb2.SimulationReply:
        request = simulation_pb2.SimulationRequest(
            files=[simulation_pb2.SimulationFile(name=name, content=content) for name, content in files.items()],
            command=command,
            results=results,
            limit_seconds=seconds,
            environment=dict(environment),
        )
        with self._lock:
            if self._worker is None or not self._worker.alive:
                # A sanitizer maps more addresses than any machine has memory: it limits what is resident instead.
                policy = jail.Policy(memory_bytes=None, processes=64, file_bytes=1 << 30)
                self._worker = Worker("agent_correctness.simulation.simt_worker:METHODS", policy)
            try:
                return self._worker.call("run", request, simulation_pb2.SimulationReply, seconds + 10.0)
            except (WorkerTimeout, WorkerCrashed) as error:
                return simulation_pb2.SimulationReply(timed_out=True, log=str(error))
            except WorkerRaised as error:
                raise Infrastructure(f"{error}\n{error.trace}") from error


# ---- what is compiled ----------------------------------------------------------------------------------


def _files(programs: Sequence[candidate_pb2.Program]) -> dict[str, str]:
    """Every file of a unit: each program's kernels under its first entry's name, headers once, and `unit.cpp`."""
    files = {name: content.decode() for name, content in _header_files().items()}
    lines = ['#include "simt/device.hpp"']
    entries: list[str] = []
    for program in programs:
        own = list(dict.fromkeys(launch.entry for launch in _launches(program)))
        kernel = f"{own[0]}.cu"
        texts = [_DYNAMIC_SHARED.sub(r"\1* const \2 = simt::dynamic_shared<\1>();", s.text) for s in program.sources]
        files[kernel] = texts[0]
        files.update({source.name: text for source, text in zip(program.sources[1:], texts[1:], strict=True)})
        lines.append(f'#include "{kernel}"')
        entries += own
    files[_PTX] = '#include "simt/ptx.hpp"\n'
    lines.append("namespace {")
    lines += [f"void call_{entry}(void* const* arguments) {{ simt::call({entry}, arguments); }}" for entry in entries]
    lines.append("const simt::Entry entries[] = {")
    lines += [f'    {{"{entry}", call_{entry}}},' for entry in entries]
    lines += ["};", "}  // namespace", _TAIL.format(count=len(entries))]
    files["unit.cpp"] = "\n".join(lines)
    return files


def _batches(simulations: Sequence[Simulation]) -> Iterable[list[int]]:
    """Numbers of simulations that compile together: headers agree, entries differ, or programs are equal."""
    batches: list[tuple[dict[str, str], dict[str, str], list[int]]] = []
    for number, simulation in enumerate(simulations):
        program = simulation.program
        headers = {source.name: source.text for source in program.sources[1:]}
        entries = {launch.entry: program.sources[0].text for launch in _launches(program)}
        for known, taken, numbers in batches:
            agree = all(known.get(name, text) == text for name, text in headers.items())
            if agree and not taken.keys() & entries.keys():
                known.update(headers)
                taken.update(entries)
                numbers.append(number)
                break
        else:
            batches.append((headers, entries, [number]))
    return [numbers for _, _, numbers in batches]


@functools.cache
def _header_files() -> dict[str, bytes]:
    """The header and the machine, by the names under which they are included."""
    paths = sorted((INCLUDE_DIRECTORY / "simt").iterdir())
    return {f"simt/{path.name}": path.read_bytes() for path in paths if path.suffix in (".hpp", ".cpp")}


def _launches(program: candidate_pb2.Program) -> list[candidate_pb2.Launch]:
    return [step.launch for step in program.steps]


def _require(simulation: Simulation) -> None:
    program = simulation.program
    if program.target != task_pb2.TARGET_CUDA or not program.sources:
        raise BadInput("only CUDA programs with a source run on the SIMT machine")
    other = next((step for step in program.steps if step.WhichOneof("kind") != "launch"), None)
    if other is not None or not program.steps:
        raise BadInput("every step must be a launch: library calls do not run on the SIMT machine")
    if any(argument.HasField("tensor_map") for step in program.steps for argument in step.launch.arguments):
        raise BadInput("the SIMT machine has no tensor cores and no bulk copies: it takes no tensor maps")


# ---- what memory shows -----------------------------------------------------------------------------------


def _filled(program: candidate_pb2.Program) -> list[str]:
    """Buffers that hold an arbitrary pattern before the first launch."""
    roles = (candidate_pb2.ROLE_WORKSPACE, candidate_pb2.ROLE_OUTPUT)
    return [buffer.name for buffer in program.buffers if buffer.role in roles and not buffer.zero_between_calls]


def _unwritten(program: candidate_pb2.Program, first: Memory, second: Memory) -> list[Finding]:
    found = []
    for buffer in program.buffers:
        if buffer.role != candidate_pb2.ROLE_OUTPUT:
            continue
        places = first.untouched(buffer, second)
        if places:
            at = f"element {places[0]}" + (f" and {len(places) - 1} more" if len(places) > 1 else "")
            found.append(Finding(Kind.UNWRITTEN, "", f"{at} of {buffer.name} was never written"))
    return found


def _dirty(program: candidate_pb2.Program, memory: Memory) -> list[Finding]:
    dirty = [b.name for b in program.buffers if b.zero_between_calls and any(memory.contents[b.name])]
    return [Finding(Kind.DIRTY, "", f"workspace {name} is not left zero, as the next call needs it") for name in dirty]


# ---- this machine ----------------------------------------------------------------------------------------


@functools.cache
def _compiler() -> str | None:
    return shutil.which("g++")


@functools.cache
def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=30).stdout


@functools.cache
def _has_library(name: str) -> bool:
    compiler = _compiler()
    assert compiler is not None
    asked = [compiler, f"-print-file-name={name}"]
    found = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    return Path(found).is_absolute() and Path(found).exists()


def _undamaged(path: Path) -> bytes:
    """What the cache holds there; empty where that is nothing, or not what was written."""
    with contextlib.suppress(FileNotFoundError):
        known = private_files.read(path)
        if hashlib.sha256(known[_DIGEST_BYTES:]).digest() == known[:_DIGEST_BYTES]:
            return known[_DIGEST_BYTES:]
    return b""


def _default_cache() -> Path:
    root = os.environ.get("WARPSMITH_CACHE_DIR")
    return (Path(root) if root else Path.home() / ".cache" / "warpsmith") / "simt"
