"""The struct and the function of a CPU kernel, whose loops are a skeleton's in `include/ws_*.hpp`.

The one idea: a struct has levels, functions that the skeleton calls as more axes are known (`start`, `locate`, …); a
value becomes a member at the outermost level that can compute it. Nothing here knows loops or threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from agent_synthesis.emit import function_text, generated_struct
from agent_synthesis.emit.cpu import cpu_function
from agent_synthesis.emit.expression import Function, Names, Scope
from agent_synthesis.emit.generated_struct import Members
from agent_synthesis.emit.spelling import CPP
from agent_synthesis.nests.element_types import CONTRACT
from agent_synthesis.nests.ir import Axis, BufferRef, Expression, Nest, Store, Type
from agent_synthesis.schedule import Emission
from warpsmith.v1 import candidate_pb2, tensor_pb2

_MEMBERS = ("Held", "held", "Outer", "Rows", "kTiling", "at", "e", "found", "start", "locate", "store", "stream")
"""What structs call things of their own."""


class CpuStruct:
    """The struct of one kernel; used once."""

    def __init__(self, nest: Nest, kind: str, outer: Sequence[Axis], reserved: Iterable[str] = ()) -> None:
        """`kind` ends its name; `outer` are the axes whose coordinates `locate` gets."""
        self.nest = nest
        self.function = Function(CPP, nest, Names((*_MEMBERS, *reserved)))
        function_text.name_everything(self.function)
        self.entry = function_text.entry_name(nest)
        self._name = f"{self.entry}_{kind}"
        self._levels: list[tuple[str, Members]] = []
        self._constants: list[str] = []
        self._functions: list[str] = []
        self.held: list[str] = []
        """Declarations of what each thread has for itself."""
        self._workspaces: list[tuple[str, Type, int]] = []
        self.level("void start()", {})
        self.located = self.level("void locate(const long* at)", {a.name: f"at[{n}]" for n, a in enumerate(outer)})

    def level(self, head: str, axes: Mapping[str, str], known: Iterable[str] = ()) -> Members:
        """A function that is called inside the last level, from where on some axes have values and more is known."""
        around = self._levels[-1][1] if self._levels else None
        members = Members(self.function, [*axes, *known], around)
        for axis, text in axes.items():
            members.member("long", self.function.axes[axis], text)
        self._levels.append((head, members))
        return members

    def constant(self, type_: str, fields: Mapping[str, int | bool], name: str = "kTiling") -> None:
        """Sizes that the skeleton asks for."""
        self._constants += generated_struct.constant(type_, name, fields)

    def space(self, name: str, axes: Iterable[Axis]) -> None:
        """Axes over which the skeleton loops."""
        self.using(name, f"ws::Space<{', '.join(str(axis.extent) for axis in axes)}>")

    def using(self, name: str, type_: str) -> None:
        """A type."""
        self._constants += generated_struct.wrapped(f"using {name} = {type_};")

    def add(self, head: str, lines: Sequence[str]) -> None:
        """A function, whose lines are a body's."""
        self._functions += generated_struct.function(head, lines)

    def hold(self, kind: str, stem: str, count: int | str) -> str:
        """An array that each thread has for itself; returns how it is written."""
        name = self.function.names.take(stem)
        self.held.append(f"alignas(64) {kind} {name}[{count}];")
        return f"held->{name}"

    def workspace(self, stem: str, type_: Type, count: int) -> str:
        """Memory that all threads share, whose pointer is a member; returns its name."""
        self._workspaces.append((self.function.names.take(stem), type_, count))
        return self._workspaces[-1][0]

    def stores(
        self, around: Scope, known: Iterable[str], stores: Sequence[Store], axis: Axis, streamed: int,
        computed: Iterable[tuple[Expression, str]] = (),
    ) -> None:  # fmt: skip
        """The function `store` of an element along an axis, and `stream`.

        `streamed`: elements of a block that goes around the cache; 0: none. `computed`: what is held by a text.
        """
        function, body, writes = self.function, around.child([axis.name, *known]), list[str]()
        body.expect(store.value for store in stores)
        for part, text in computed:
            body.define(part, text)
        blocks: dict[str, str] = {}
        for store in stores:
            pointer = function.buffers[store.buffer]
            if streamed and store.index.coefficient(axis.name) == 1 and store.buffer not in blocks:
                kind = CPP.storage[self.nest.buffer(store.buffer).type]
                blocks[store.buffer] = self.hold(kind, f"{pointer}_block", streamed)
                held = blocks[store.buffer]
                writes.append(f"    ws::stream({pointer} + ({function.index(store.index)}), {held}, count);")
            held = blocks.get(store.buffer, "")
            body.store(store, held and f"{held}[e]")
        place = function.axes[axis.name]
        self.add(f"void store(long {place}, long e) const", body.lines)
        if writes:
            self.add(f"void stream(long {place}, long count) const", writes)

    def emission(self, original: Nest, header: Sequence[str], skeleton: str, source: str) -> Emission:
        """The kernel, which hands its arguments to a function of the skeleton in the file `source`."""
        pointers = [f"{self._pointee(buffer)} {self.function.buffers[buffer.name]}" for buffer in self.nest.buffers]
        pointers += [f"{CPP.storage[type_]}* __restrict {name}" for name, type_, _ in self._workspaces]
        fields = [field for _, level in self._levels for field in level.fields()]
        held = [f"  struct Held {{ {' '.join(self.held)} }};", "  Held* held;"] if self.held else []
        levels = [
            line
            for head, level in self._levels
            if level.statements()
            for line in generated_struct.function(head, level.statements())
        ]
        lines = [
            *header, f"struct {self._name} {{", *self._constants, *(f"  {pointer};" for pointer in pointers), *fields,
            *held, *levels, *self._functions, "};", "",
            f'extern "C" void {self.entry}(void* const* arguments) {{',
            f"  ws::{skeleton}(ws::bind<{self._name}, {len(pointers)}>(arguments));", "}", "",
        ]  # fmt: skip
        spaces = tuple(
            candidate_pb2.Buffer(
                name=f"{self.nest.name}_{name}",
                role=candidate_pb2.ROLE_WORKSPACE,
                spec=tensor_pb2.TensorSpec(dtype=CONTRACT[type_], shape=[count], strides=[1]),
                alignment_bytes=64,
            )
            for name, type_, count in self._workspaces
        )
        launch = cpu_function.launch(original, [space.name for space in spaces])
        return Emission("\n".join(lines), (source, *cpu_function.HEADERS), (launch,), spaces)

    def _pointee(self, buffer: BufferRef) -> str:
        element = "std::uint8_t" if self.function.reads_bytes(buffer) else CPP.storage[buffer.type]
        return f"{'' if buffer.written else 'const '}{element}* __restrict"
