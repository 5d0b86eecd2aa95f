"""CUDA schedule of recurrent networks in one kernel that keeps their weights on chip: `ws_recurrent.cuh`.

The one idea: a step costs what it takes to tell all CTAs of a cell its new hidden state, so a cell is spread as widely
as the card allows and layers run beside each other. Writes pointers, strides and numbers; the skeleton has all loops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agent_synthesis.emit import function_text, generated_struct
from agent_synthesis.emit.cuda import geometry
from agent_synthesis.emit.cuda.kernel_text import wrapped
from agent_synthesis.emit.cuda.schedule import CudaSchedule
from agent_synthesis.emit.expression import Names
from agent_synthesis.emit.spelling import CUDA
from agent_synthesis.nests.calls.recurrence import Network, Tensor, network_of
from agent_synthesis.nests.ir import Nest, needs_int64
from agent_synthesis.schedule import Emission, Footprint
from agent_synthesis.settings import Settings, setting
from warpsmith.errors import IllegalMove
from warpsmith.hardware import Hardware

_HEADERS = (*geometry.HEADERS, "ws_recurrent.cuh")
_LANES, _VECTOR = 32, 128
"""Sums that a warp adds up at a time; columns that its lanes have in one vector each."""
_MOST_CHUNK = 16
"""Rows of the batch beyond which values that a warp loads ahead spill registers."""
_MOST_AHEAD, _OTHER_REGISTERS = 24, 64
"""Loads of a thread that are on their way for a step; registers beside those and its weights: a sum for each lane,
values, addresses."""
_COUNTER_WORDS = 16
_OWN_NAMES = (
    "T", "x_at", "hidden_at", "memory_at", "input_weight", "hidden_weight", "input_bias", "hidden_bias",
    "input_weight_strides", "hidden_weight_strides", "keep_sequence", "keep_hidden", "keep_memory", "step", "cell",
    "row", "column", "value", "between", "words",
)  # fmt: skip
"""What no buffer may be called in the struct and the kernel."""
_STEP_SECONDS, _FMA_SECONDS, _READ_SECONDS = 1.4e-6, 2 / (128 * 1.7e9), 1.3 / 1.7e9
"""Of a step, beside its multiplications: to tell all CTAs of a cell, and the gates; of a multiplication while an SM is
busy with them; to read 128 bytes of shared memory (H100)."""
_FETCH_SECONDS = 1 / (64 * 1.7e9)
"""To bring a byte of a step's input to an SM, at 64 bytes a clock, where registers do not hold it ahead."""


@dataclass(frozen=True)
class RecurrentSettings(Settings):
    """Of `cuda_recurrent`."""

    layers: int = setting(1, "layers that run at once, each a step or two behind the one below")
    threads: int = setting(256, "threads of a block", (256, 512))


@dataclass(frozen=True)
class _Tiling:
    """How a cell is spread."""

    network: Network
    settings: RecurrentSettings
    ctas: int
    """Of a cell."""
    units: int
    """Of a CTA."""

    @staticmethod
    def of(hardware: Hardware, network: Network, settings: RecurrentSettings) -> _Tiling:
        """Raises IllegalMove where the layers do not fit on the card at once, each cell with an SM at least."""
        if settings.threads < 32:
            raise IllegalMove(f"{settings.threads} threads a block, which has whole warps")
        most = hardware.sm_count // max(1, settings.layers * network.directions)
        if not 1 <= settings.layers <= network.layers or most < 1:
            raise IllegalMove(f"{settings.layers} layers at once, of {network.layers}, on {hardware.sm_count} SMs")
        units = -(-network.hidden // most)
        return _Tiling(network, settings, -(-network.hidden // units), units)

    @property
    def warp_rows(self) -> int:
        return -(-self.network.gates * self.units // (self.settings.threads // 32))

    @property
    def chunk(self) -> int:
        """Rows of the batch whose sums a warp has at a time, in chunks of about equal size."""
        chunks = -(-self.network.batch // max(1, min(_MOST_CHUNK, _LANES // self.warp_rows)))
        return -(-self.network.batch // chunks)

    @property
    def pitches(self) -> tuple[int, int]:
        """Columns of the two matrices, in whole vectors of a warp."""
        return geometry.round_up(self.most_inputs, _VECTOR), geometry.round_up(self.network.hidden, _VECTOR)

    @property
    def most_inputs(self) -> int:
        """Columns of what a layer reads, of the layer that reads most."""
        network = self.network
        return max(network.inputs, network.directions * network.hidden if network.layers > 1 else 0)

    @property
    def held_registers(self) -> int:
        """Of a thread: its weights, and the input of the next step on its way."""
        return self.warp_rows * sum(self.pitches) // 32 + (self.loads if self.is_ahead else 0)

    @property
    def loads(self) -> int:
        """A thread's, of a step's input."""
        return -(-self.network.batch * self.most_inputs // self.settings.threads)

    @property
    def is_ahead(self) -> bool:
        """Whether the next step's input is on its way while a step is made."""
        return self.loads <= _MOST_AHEAD

    @property
    def shared_bytes(self) -> int:
        padded, rows = geometry.round_up(self.network.batch, self.chunk), self.network.gates * self.units
        floats = padded * sum(self.pitches) + 2 * rows * (padded + 1) + self.units * self.network.batch + 1
        return geometry.round_up(4 * floats, 16)

    @property
    def positions(self) -> int:
        """Cells at once."""
        return self.settings.layers * self.network.directions

    @property
    def sequence_words(self) -> int:
        """Words of 8 bytes for what layers give to the next."""
        network = self.network
        kept = min(network.layers - 1, self.settings.layers + 1)
        count = kept * network.steps * network.batch * network.directions * network.hidden
        return -(-count * network.type.size_bytes // 8)

    @property
    def mail_words(self) -> int:
        """Words by which CTAs tell each other hidden states, and counters of cells."""
        network = self.network
        a_set = network.batch * geometry.round_up(network.hidden, 2)
        return 2 * self.positions * a_set + (network.cells + 1) * _COUNTER_WORDS

    def seconds(self) -> float:
        """Predicted time, for comparing settings of one network."""
        network, layers = self.network, self.settings.layers
        turns = -(-network.layers // layers) * (network.steps + layers - 1)
        values, warps = sum(self.pitches) * network.batch, -(-network.gates * self.units // self.warp_rows)
        work = max(self.warp_rows * warps * values * _FMA_SECONDS, warps * values / 32 * _READ_SECONDS)
        fetched = 0 if self.is_ahead else network.batch * self.most_inputs * network.type.size_bytes
        return turns * (_STEP_SECONDS + work + fetched * _FETCH_SECONDS)


class CudaRecurrent(CudaSchedule):
    """All steps, layers and directions in one cooperative kernel."""

    name = "cuda_recurrent"
    settings = RecurrentSettings

    def accepts(self, nest: Nest) -> bool:
        """A network whose weights fit in the registers of the card, a layer of them at a time."""
        return network_of(nest) is not None and bool(self._legal(nest))

    def defaults(self, nest: Nest) -> RecurrentSettings:
        """The fastest by a model of steps and multiplications."""
        return min(self._legal(nest), key=lambda each: self._tiling(nest, each).seconds())

    def alternatives(self, nest: Nest, current: RecurrentSettings) -> Sequence[RecurrentSettings]:
        """One change away."""
        changed = current.one_change_away(layers=self._layers(nest))
        return geometry.legal(changed, lambda settings: self._require_fits(nest, settings))

    def footprint(self, nest: Nest, settings: RecurrentSettings) -> Footprint:
        """Sequences between layers are written and read."""
        tiling = self._tiling(nest, settings)
        between = (tiling.network.layers - 1) * tiling.network.steps * tiling.network.batch
        between *= tiling.network.directions * tiling.network.hidden * tiling.network.type.size_bytes
        return Footprint(extra_bytes=2 * between, parallel_count=tiling.positions * tiling.ctas, launch_count=1)

    def emit(self, nest: Nest, settings: RecurrentSettings) -> Emission:
        """One kernel, with workspaces for sequences between layers and for words between CTAs."""
        self._require_fits(nest, settings)
        tiling = self._tiling(nest, settings)
        text = _Text(nest, tiling)
        words = geometry.workspace(nest, "words", tiling.mail_words, zero=True)
        between = [geometry.workspace(nest, "between", tiling.sequence_words)] if tiling.network.layers > 1 else []
        launch = geometry.launch(
            nest, grid=tiling.positions * tiling.ctas, threads=settings.threads,
            workspaces=[each.name for each in (*between, words)], cooperative=True, shared_bytes=tiling.shared_bytes,
        )  # fmt: skip
        lines = [*function_text.header(nest, self.name, settings), *text.struct(), *text.kernel()]
        return Emission("\n".join(lines), _HEADERS, (launch,), (*between, words))

    def _layers(self, nest: Nest) -> Sequence[int]:
        """How many might run at once."""
        network = network_of(nest)
        assert network is not None
        return range(1, network.layers + 1)

    def _legal(self, nest: Nest) -> list[RecurrentSettings]:
        threads = RecurrentSettings.declared()["threads"].values
        every = [RecurrentSettings(layers, int(count)) for layers in self._layers(nest) for count in threads]  # type: ignore[arg-type]
        return geometry.legal(every, lambda settings: self._require_fits(nest, settings))

    def _tiling(self, nest: Nest, settings: RecurrentSettings) -> _Tiling:
        network = network_of(nest)
        assert network is not None
        return _Tiling.of(self.hardware, network, settings)

    def _require_fits(self, nest: Nest, settings: RecurrentSettings) -> None:
        """Raises IllegalMove, which names the limit."""
        tiling = self._tiling(nest, settings)
        network = tiling.network
        if tiling.warp_rows > _LANES:
            raise IllegalMove(f"{nest.name}: {tiling.warp_rows} rows a warp, of {_LANES} sums it can add up")
        if network.directions > 1 and settings.layers > 1:
            raise IllegalMove(f"{nest.name}: a layer needs both directions of the one below to the end")
        if max(network.steps * network.layers, network.steps * tiling.ctas) >= 2**31:
            raise IllegalMove(f"{nest.name}: more steps than can be counted")
        geometry.require_block(
            self.hardware, nest, threads=settings.threads, shared_bytes=tiling.shared_bytes,
            held_registers=tiling.held_registers + _OTHER_REGISTERS - geometry.KERNEL_OVERHEAD_REGISTERS,
        )  # fmt: skip


_SIZES = ("steps", "batch", "inputs", "hidden", "layers", "directions")
_TILES = ("layers", "ctas", "units", "threads", "chunk")


class _Text:
    """The struct of pointers and strides, and the kernel that hands it to the skeleton."""

    def __init__(self, nest: Nest, tiling: _Tiling) -> None:
        names = Names(_OWN_NAMES)
        self._nest, self._tiling, self._network = nest, tiling, tiling.network
        self.entry = names.take(nest.name)
        self._names = [names.take(buffer.name) for buffer in nest.buffers]
        self._element = CUDA.storage[self._network.type]

    def struct(self) -> list[str]:
        network = self._network
        lines = [
            f"struct {self.entry}_net {{",
            f"  using T = {self._element};",
            *(f"  {each};" for each in self._pointers()),
        ]
        lines.append(self._reads("x_at", "step", network.values))
        for name, state in zip(("hidden_at", "memory_at"), network.states, strict=False):
            lines.append(self._reads(name, "cell", state))
        of_cell = ("input_weight", "hidden_weight", "input_bias", "hidden_bias")
        for place, name in enumerate(of_cell):
            tensors = [cell[place] if place < len(cell) else None for cell in network.weights]
            pointers = ["nullptr" if each is None else self._names[each.buffer] for each in tensors]
            lines += self._chosen("const T*", name, pointers)
            if place < 2:
                strides = [f"{{{each.strides[0]}, {each.strides[1]}}}" for each in tensors if each is not None]
                lines += self._chosen("ws::WeightStrides", f"{name}_strides", strides)
        for name, first, result in zip(
            ("keep_sequence", "keep_hidden", "keep_memory"), ("step", "cell", "cell"), network.results, strict=False
        ):
            stored = f"{self._names[result.buffer]}[{self._place(result, first)}] = value; " if result else ""
            lines.append(f"  WS_INLINE void {name}(int {first}, int row, int column, T value) const {{ {stored}}}")
        return [*lines, "};", ""]

    def _pointers(self) -> list[str]:
        kinds = ("*" if buffer.written else "* __restrict__" for buffer in self._nest.buffers)
        constant = ("" if buffer.written else "const " for buffer in self._nest.buffers)
        return [
            f"{const}{self._element}{kind} {name}"
            for const, kind, name in zip(constant, kinds, self._names, strict=True)
        ]

    def _reads(self, name: str, first: str, tensor: Tensor) -> str:
        place = f"{self._names[tensor.buffer]}[{self._place(tensor, first)}]"
        return f"  WS_INLINE T {name}(int {first}, int row, int column) const {{ return {place}; }}"

    def _place(self, tensor: Tensor, first: str) -> str:
        """The offset of an element, as text."""
        is_far = needs_int64(self._nest.buffers[tensor.buffer])
        names = (f"ws::int64({name})" if is_far else name for name in (first, "row", "column"))
        return " + ".join(
            name if stride == 1 else f"{name} * {stride}" for name, stride in zip(names, tensor.strides, strict=True)
        )

    def _chosen(self, kind: str, name: str, texts: Sequence[str]) -> list[str]:
        """A function from a cell's number to a value: without a choice where all have the same."""
        if len(set(texts)) == 1:
            return [f"  WS_INLINE {kind} {name}(int) const {{ return {texts[0]}; }}"]
        cases = [f"      case {cell}: return {text};" for cell, text in enumerate(texts[:-1])]
        return [
            f"  WS_INLINE {kind} {name}(int cell) const {{", "    switch (cell) {", *cases,
            f"      default: return {texts[-1]};", "    }", "  }",
        ]  # fmt: skip

    def kernel(self) -> list[str]:
        tiling, network = self._tiling, self._network
        sizes = (network.steps, network.batch, network.inputs, network.hidden, network.layers, network.directions)
        tiles = (tiling.settings.layers, tiling.ctas, tiling.units, tiling.settings.threads, tiling.chunk)
        between = [f"{self._element}* between"] if network.layers > 1 else []
        arguments = [*self._pointers(), *between, "ws::uint64* words"]
        call = f"ws::recurrent<{self.entry}_network>({self.entry}_net{{{', '.join(self._names)}}}, "
        call += f"{'between' if between else f'static_cast<{self._element}*>(nullptr)'}, words);"
        return [
            f"using {self.entry}_network = ws::Recurrent<{self._element}, ws::Cell::k{network.cell.capitalize()},",
            f"    ws::RecurrentSizes{{{_named(_SIZES, sizes)}}},",
            f"    ws::RecurrentTiling{{{_named(_TILES, tiles)}}}>;",
            "",
            f'extern "C" __global__ void __launch_bounds__({tiling.settings.threads}, 1) {self.entry}(',
            *wrapped(arguments),
            *generated_struct.wrapped(call),
            "}",
            "",
        ]


def _named(names: Sequence[str], values: Sequence[int]) -> str:
    return ", ".join(f".{name} = {value}" for name, value in zip(names, values, strict=True))
