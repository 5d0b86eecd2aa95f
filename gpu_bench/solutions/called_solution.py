"""A solution's process as it is called: whatever it does instead of answering is the solution's fault.

The one idea: answers and what they carry are untrusted text, and results lie in the memory of an untrusted process;
both are read here, while the process is stopped, and nothing else of it is read. It knows no values and no judge.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from gpu_bench import faults
from gpu_bench.solutions import left_memory, structure_text
from gpu_bench.solutions.caller import Answer, Called, CallFailed
from gpu_bench.values.keys import Key
from warpsmith.errors import BadInput, WorkerCrashed, WorkerRaised, WorkerTimeout
from warpsmith.v1 import judging_pb2, verdict_pb2


class SolutionFault(Exception):
    """The solution failed while it was called; `fault` says how."""

    def __init__(self, kind: verdict_pb2.FailureKind.ValueType, detail: str) -> None:
        super().__init__(detail)
        self.fault = faults.fault(kind, detail)


class CalledSolution:
    """The solution in a process.

    `regions`: of results, in the memory that all share; `shared`: that memory, where results are read from the stopped
    process: on a processor. None: it delivers them by itself. `result`: what the reference returns (`structure_text`).
    """

    def __init__(
        self, process: Called, regions: Sequence[judging_pb2.Region], shared: memoryview | None, result: str
    ) -> None:
        self.process = process
        self._regions, self._shared, self._result = regions, shared, result
        self._company = process.processes
        """Processes of its jail as it was opened."""
        self._left: tuple[bytes, bytes] = (b"", b"")
        """Where the results of the last two calls lie, as the process said at once."""
        self._values = b""
        """What the result of the last is beside tensors, as it said at once (`structure_text.digest`)."""

    @property
    def has_others(self) -> bool:
        """Whether processes live in its jail that were not there when it was opened."""
        return bool(self.process.processes - self._company)

    def word(self, verb: int, patience: float, number: int = 0, at_once: Callable[[], object] = lambda: None) -> Answer:
        """Asks it. Raises SolutionFault for whatever it does instead of answering."""
        try:
            return self.process.ask(verb, number=number, deadline_s=patience, at_once=at_once)
        except CallFailed as failed:
            kind = failed.calls.fault or verdict_pb2.FAILURE_KIND_CRASH
            raise SolutionFault(kind, failed.calls.detail) from None
        except WorkerTimeout:
            raise SolutionFault(verdict_pb2.FAILURE_KIND_TIMEOUT, f"no end within {patience:.3g} s") from None
        except WorkerCrashed as crash:
            fault = faults.crash(crash)
            raise SolutionFault(fault.kind, fault.detail) from None
        except (WorkerRaised, BadInput) as error:
            raise SolutionFault(verdict_pb2.FAILURE_KIND_CRASH, str(error)[:300]) from None

    def read_results(self, told: bytes) -> str:
        """Copies what a call left, from its stopped process to where the judge looks; names what is not there.

        `told`: in its answer.
        """
        size = len(structure_text.NO_VALUES)
        self._values = told[:size]
        if self._shared is None:
            return ""
        self._left = (self._left[1], told[size:])
        return self._copied(self._left[1])

    def read_earlier(self) -> str:
        """The same of the outputs of the call before the last, which are still to be there."""
        return self._copied(self._left[0], only_outputs=True) if self._shared is not None else ""

    def _copied(self, told: bytes, *, only_outputs: bool = False) -> str:
        assert self._shared is not None
        memory = self.process.memory
        try:
            places = left_memory.unpacked(told, self._regions)
        except ValueError:
            raise SolutionFault(
                verdict_pb2.FAILURE_KIND_CHEAT, "its process does not say where its results lie"
            ) from None
        unread = ""
        for region, place in zip(self._regions, places, strict=True):
            size = left_memory.item_bytes(region.spec) * math.prod(region.spec.shape)
            # What becomes of inputs, the judge sees by itself.
            key = Key.of(region)
            if size and not key.is_input and (key.is_output or not only_outputs):
                to = self._shared[region.offset_bytes : region.offset_bytes + size]
                if memory is None or not memory.read(place, region.spec, to):
                    unread = unread or str(key)
        return unread

    def look_at_structure(self, text: bytes, result: str = "") -> None:
        """Raises SolutionFault where what it says of its result is not as the reference's: `result`, where that is of
        these values."""
        try:
            described = structure_text.read(text)
        except ValueError:
            raise SolutionFault(verdict_pb2.FAILURE_KIND_CHEAT, "its process does not say what it returned") from None
        wanted = structure_text.read(result or self._result)
        wrong = structure_text.difference(described, wanted) or self._other_strides(wanted)
        if wrong:
            raise SolutionFault(verdict_pb2.FAILURE_KIND_WRONG_SHAPE, wrong[:300])
        if structure_text.digest(described) != self._values:
            raise SolutionFault(
                verdict_pb2.FAILURE_KIND_CHEAT,
                "what it returns beside tensors is not there yet when its call ends, or changes after it",
            )

    def _other_strides(self, wanted: structure_text.Node) -> str:
        """How the strides by which outputs were read are not those of the reference; empty where nothing was read.

        What a process says of its results may be a lie, but by strides that are one, other elements are read.
        """
        if self._shared is None:
            return ""
        places = left_memory.unpacked(self._left[1], self._regions)
        outputs = [(r.spec.shape, place) for r, place in zip(self._regions, places, strict=True) if Key.of(r).is_output]
        for (shape, (_, strides)), node in zip(outputs, structure_text.tensors_of(wanted), strict=False):
            read = [step if extent > 1 else 0 for step, extent in zip(strides, shape, strict=True)]
            is_told = math.prod(shape) and not node.get("layout") and not node["dtype"].startswith("complex")
            if is_told and read != node["stride"]:
                return f"a result that says otherwise has strides {read} instead of {node['stride']}"
        return ""
