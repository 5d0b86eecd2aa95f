"""The struct of a loop's step, for `ws_loop.cuh`: where tensors lie, and what a step computes for one unit.

The one idea: the step's expressions are placed as in any kernel; only what they load is looked up elsewhere, in states,
sums and what was read ahead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from agent_synthesis.emit import generated_struct
from agent_synthesis.emit.cuda.kernel_text import wrapped
from agent_synthesis.emit.expression import Function, Names, Scope
from agent_synthesis.emit.spelling import CUDA
from agent_synthesis.nests.calls.recurrence import Loop, Read, Tensor
from agent_synthesis.nests.ir import Load, Nest, Store, Type, needs_int64

_OWN_NAMES = (
    "T", "begin", "weight", "Given", "Fixed", "given", "fixed", "operand", "next", "keep", "step", "row", "unit",
    "column", "gate", "value", "state", "sum", "words", "kState", "kStage",
)  # fmt: skip
"""What nothing of a nest may be called."""

_GATES = replace(CUDA, functions={"sigmoid": "gate_of"})
"""A gate by a reciprocal of one unit in the last place, as in `ws_recurrent.cuh`."""


class _StepFunction(Function):
    """What a function of a step loads."""

    def __init__(self, loop: Loop, names: Names, fields: dict[Read, str]) -> None:
        super().__init__(_GATES, loop.body, names)
        self._loop, self._fields = loop, fields
        self.buffers = {buffer.name: names.take(buffer.name) for buffer in loop.body.buffers}

    def load(self, load: Load) -> str:
        """An element, as a float."""
        read = self._loop.reads[load]
        return f"{read.kind}[{read.number}]" if read.kind in ("sum", "state") else self._fields[read]


class LoopText:
    """The struct, and the kernel that hands it to the skeleton."""

    def __init__(self, nest: Nest, loop: Loop) -> None:
        names = Names(_OWN_NAMES)
        self._nest, self._loop = nest, loop
        self.entry = names.take(nest.name)
        self._names = [names.take(buffer.name) for buffer in nest.buffers]
        self._element = CUDA.storage[loop.type]
        self._taken = (*_OWN_NAMES, self.entry, *self._names)
        read = dict.fromkeys(each for each in loop.reads.values() if each.kind in ("element", "other"))
        self._given = {each: f"x{n}" for n, each in enumerate(e for e in read if e.kind == "element")}
        self._fixed = {each: f"k{n}" for n, each in enumerate(e for e in read if e.kind == "other")}

    def struct(self) -> list[str]:
        """The struct's lines."""
        return [
            f"struct {self.entry}_net {{",
            f"  using T = {self._element};",
            *(f"  {each};" for each in self._pointers()),
            *self._of_state("begin", "T", "", [self._returned(each, "row", "unit") for each in self._loop.begin]),
            *self._weights(),
            *self._read_ahead("Given", "given", "int step, int row, int unit", self._given),
            *self._read_ahead("Fixed", "fixed", "int row, int unit", self._fixed),
            *self._operands(),
            *self._next(),
            *self._of_state("keep", "void", ", T value", [*map(self._kept, self._loop.results)], "int step, "),
            "};",
            "",
        ]

    def kernel(self, tiles: Mapping[str, int], stages: Sequence[tuple[int, int]]) -> list[str]:
        """The kernel's lines. `tiles`: fields of the tiling; `stages`: of each its gates and its chunk."""
        loop, entry = self._loop, self.entry
        sizes = {"steps": loop.steps, "batch": loop.batch, "hidden": loop.units, "states": len(loop.begin)}
        units, threads = tiles["units"], tiles["threads"]
        fields = {**tiles, "first_state": loop.stages[0].state == 0}
        names = [f"{entry}_stage{n}" for n in range(len(stages))]
        uses = [
            f"using {name} = ws::LoopStage<{units}, {threads}, {loop.batch}, {gates}, {chunk}>;"
            for name, (gates, chunk) in zip(names, stages, strict=True)
        ]
        call = (
            f"ws::loop<{entry}_loop, {entry}_net, {', '.join(names)}>({entry}_net{{{', '.join(self._names)}}}, words);"
        )
        return [
            *uses,
            f"using {entry}_loop = ws::Loop<{self._element}, {generated_struct.value('ws::LoopSizes', sizes)},",
            f"    {generated_struct.value('ws::LoopTiling', fields)}, {', '.join(names)}>;",
            "",
            f'extern "C" __global__ void __launch_bounds__({threads}, 1) {entry}(',
            *wrapped([*self._pointers(), "ws::uint64* words"]),
            *generated_struct.wrapped(call),
            "}",
            "",
        ]

    def _pointers(self) -> list[str]:
        return [
            f"{'' if buffer.written else 'const '}{self._element}*{'' if buffer.written else ' __restrict__'} {name}"
            for buffer, name in zip(self._nest.buffers, self._names, strict=True)
        ]

    def _of_state(self, name: str, kind: str, last: str, bodies: Sequence[str], first: str = "") -> list[str]:
        """A function of each state."""
        cases = [f"    if constexpr (kState == {n}) {{ {body} }}" for n, body in enumerate(bodies) if body]
        head = f"  template <int kState> WS_INLINE {kind} {name}({first}int row, int unit{last}) const {{"
        return [head, *cases, "  }"]

    def _returned(self, tensor: Tensor, *names: str) -> str:
        return f"return {self._element_at(tensor, *names)};"

    def _kept(self, tensor: Tensor | None) -> str:
        return "" if tensor is None else f"{self._element_at(tensor, 'step', 'row', 'unit')} = value;"

    def _weights(self) -> list[str]:
        lines = ["  template <int kStage> WS_INLINE T weight(int gate, int unit, int column) const {"]
        for place, stage in enumerate(self._loop.stages):
            lines += [f"    if constexpr (kStage == {place}) {{", "      switch (gate) {"]
            for number, gate in enumerate(stage.gates):
                label = f"case {number}" if number + 1 < len(stage.gates) else "default"
                row = f"({gate.first} + unit * {gate.stride})"
                lines.append(f"        {label}: {self._returned(gate.weight, row, 'column')}")
            lines += ["      }", "    }"]
        return [*lines, "  }"]

    def _read_ahead(self, kind: str, name: str, arguments: str, fields: dict[Read, str]) -> list[str]:
        texts = []
        for read in fields:
            tensors = self._loop.sequences if read.kind == "element" else self._loop.others
            column = f"({read.first} + unit * {read.stride})"
            places = ("step", "row", column) if read.kind == "element" else ("row", column)
            texts.append(f"ws::as_float({self._element_at(tensors[read.number], *places)})")
        declared = f" float {', '.join(fields.values())}; " if fields else ""
        return [
            f"  struct {kind} {{{declared}}};",
            f"  WS_INLINE {kind} {name}({arguments}) const {{",
            f"    return {{{', '.join(texts)}}};",
            "  }",
        ]

    def _scope(self) -> Scope:
        fields = {read: f"given.{own}" for read, own in self._given.items()}
        fields |= {read: f"fixed.{own}" for read, own in self._fixed.items()}
        function = _StepFunction(self._loop, Names(self._taken), fields)
        return Scope(function, None, [axis.name for axis in self._loop.body.parallel], depth=2)

    def _operands(self) -> list[str]:
        arguments = "const Given& given, const Fixed& fixed, const float* state, const float* sum"
        lines = [f"  template <int kStage> WS_INLINE float operand({arguments}) const {{"]
        for place, stage in enumerate(self._loop.stages):
            scope, text = self._scope(), f"state[{stage.state}]"
            if stage.state < 0:
                store = self._store(stage.operand)
                scope.expect([store.value])
                text = scope.converted(store.value, Type.F32)
            lines += [
                f"    if constexpr (kStage == {place}) {{", *(f"  {line}" for line in scope.lines),
                f"      return {text};", "    }",
            ]  # fmt: skip
        return [*lines, "  }"]

    def _next(self) -> list[str]:
        scope, stores = self._scope(), [self._store(name) for name in self._loop.made]
        scope.expect(store.value for store in stores)
        made = [scope.declare("float", "made", scope.converted(store.value, Type.F32)) for store in stores]
        for place, name in enumerate(made):
            scope.line(f"state[{place}] = {name};")
        head = "  WS_INLINE void next(const Given& given, const Fixed& fixed, float* state, const float* sum) const {"
        return [head, *scope.lines, "  }"]

    def _store(self, name: str) -> Store:
        return next(store for store in self._loop.body.stores if store.buffer == name)

    def _element_at(self, tensor: Tensor, *names: str) -> str:
        is_far = needs_int64(self._nest.buffers[tensor.buffer])
        places = [
            (f"ws::int64({name})" if is_far else name, stride)
            for name, stride in zip(names, tensor.strides, strict=True)
            if stride
        ]
        terms = [name if stride == 1 else f"{name} * {stride}" for name, stride in places]
        return f"{self._names[tensor.buffer]}[{' + '.join(terms) or '0'}]"
