"""The smallest CUDA schedule there is: one thread an element. `pip install ./examples/schedule` adds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agent_synthesis.emit import function_text
from agent_synthesis.emit.cuda import geometry, kernel_text
from agent_synthesis.emit.cuda.schedule import CudaSchedule
from agent_synthesis.emit.expression import Scope
from agent_synthesis.nests import iteration_space
from agent_synthesis.nests.ir import Nest
from agent_synthesis.schedule import Emission, Footprint
from agent_synthesis.settings import Settings, setting


@dataclass(frozen=True)
class Threads(Settings):
    """What can be set."""

    threads: int = setting(256, "threads of a block", (128, 256, 512))


class OneThreadAnElement(CudaSchedule):
    """No thread has more than an element."""

    name = "one_thread_an_element"
    settings = Threads

    def accepts(self, nest: Nest) -> bool:
        """Nests that reduce nothing and read what they overwrite only in place."""
        return not nest.reductions and bool(nest.parallel) and iteration_space.is_safe_in_place(nest)

    def defaults(self, nest: Nest) -> Threads:
        """A good block for anything."""
        del nest
        return Threads()

    def alternatives(self, nest: Nest, current: Threads) -> Sequence[Threads]:
        """Other block sizes."""

        def check(other: Threads) -> None:
            geometry.require_block(self.hardware, nest, threads=other.threads)

        return geometry.legal(current.one_change_away(), check)

    def footprint(self, nest: Nest, settings: Threads) -> Footprint:
        """Nothing beyond the nest's own bytes."""
        return Footprint(0, -(-nest.row_count // settings.threads), 1)

    def emit(self, nest: Nest, settings: Threads) -> Emission:
        """One kernel: the point's number gives its axes, and `stores` writes loads, values and stores."""
        threads = settings.threads
        geometry.require_block(self.hardware, nest, threads=threads)
        *others, axis = nest.parallel
        text = kernel_text.KernelText(nest, axis.name, 1)
        body = Scope(text.function, None)
        body.line(f"const {text.offset} point = static_cast<{text.offset}>(blockIdx.x) * {threads} + threadIdx.x;")
        body.line(f"if (point >= {nest.row_count}) return;")
        places = geometry.coordinates(nest.parallel, "point")
        for other in others:
            body.line(f"const {text.offset} {text.function.axes[other.name]} = {places[other.name]};")
        body.line(f"const {text.offset} {text.begin} = {places[axis.name]};")
        body.learn(other.name for other in others)
        text.stores(body, nest.stores)
        lines = [
            *function_text.header(nest, self.name, settings),
            *text.signature(text.entry, threads, 1),
            *body.lines,
        ]
        grid = -(-nest.row_count // threads)
        record = geometry.launch(nest, grid=grid, threads=threads)
        return Emission("\n".join([*lines, "}", ""]), geometry.HEADERS, (record,))
