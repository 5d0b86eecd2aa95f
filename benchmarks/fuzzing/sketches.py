"""Random small modules: a seed gives a module in KernelBench's format, with the structure by which it shrinks.

The one idea: the generator proposes and PyTorch disposes. A step is one line of PyTorch over earlier values, drawn from
the tables below; it stays when PyTorch runs it on drawn inputs and its values remain ordinary. So shapes, promotion
and aliasing are never worked out here. For tests of lowering and of schedules, ours or a plugin's; it judges nothing.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import torch
from torch.nn import functional

from benchmarks.fuzzing.sketch_lines import FAMILIES, draw_token

MOST_ELEMENTS: Final = 1 << 14
"""Elements of the largest value: large enough for several threads, small enough for thousands of modules."""
_LARGEST, _SMALLEST = 1e3, 1e-3
"""Bounds of a float value's greatest magnitude: beyond them rounding decides what a module computes."""
_EXTENTS: Final = (1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 31, 32, 64, 65, 97, 128, 257, 1000)
_TYPES: Final = {
    "float32": 10, "float64": 2, "float16": 2, "bfloat16": 2, "int64": 2, "int32": 2, "bool": 1, "uint8": 1, "int8": 1,
    "int16": 1,
}  # fmt: skip
_LAYOUTS: Final = {"contiguous": 8, "reversed": 2, "stepped": 1, "shifted": 1, "expanded": 1}
_TRIES = 40
_IN_PLACE = re.compile(r"\w_\(")
Origin = Literal["input", "parameter", "state"]


@dataclass(frozen=True)
class Source:
    """A tensor that exists before the forward."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """As torch names it: "float32"."""
    origin: Origin = "input"
    layout: str = "contiguous"
    """Or reversed (dimensions in memory), stepped (every other element), shifted (not from the start), expanded."""

    @property
    def text(self) -> str:
        """The expression that draws it."""
        shape, end = list(self.shape), ""
        match self.layout:
            case "reversed":
                shape, end = shape[::-1], f".permute({tuple(reversed(range(len(shape))))})"
            case "stepped":
                shape, end = [*shape[:-1], 2 * shape[-1]], "[..., ::2]"
            case "shifted":
                shape, end = [*shape[:-1], shape[-1] + 1], "[..., 1:]"
            case "expanded":
                shape, end = [1, *shape[1:]], f".expand({self.shape})"
        if self.dtype == "bool":
            return f"(torch.rand({tuple(shape)}) < 0.5){end}"
        if "int" in self.dtype:
            low = 0 if self.dtype == "uint8" else -9
            return f"torch.randint({low}, 10, {tuple(shape)}, dtype=torch.{self.dtype}){end}"
        return f"torch.randn({tuple(shape)}, dtype=torch.{self.dtype}){end}"


@dataclass(frozen=True)
class Step:
    """One line of the forward: `result = text` with `{0}`, `{1}` … standing for the operands."""

    result: str
    text: str
    operands: tuple[str, ...]

    @property
    def writes(self) -> bool:
        """Whether it writes in place, so that it counts even when its result is not used."""
        return bool(_IN_PLACE.search(self.text))


@dataclass(frozen=True)
class Sketch:
    """A module as data."""

    title: str
    sources: tuple[Source, ...]
    steps: tuple[Step, ...]
    outputs: tuple[str, ...]

    def module_text(self) -> str:
        """The module in KernelBench's format."""
        own = {source.name: f"self.{source.name}" for source in self.sources if source.origin != "input"}
        inputs = [source for source in self.sources if source.origin == "input"]
        lines = [f'"""{self.title}"""', "", "import torch", "import torch.nn.functional as F", "from torch import nn"]
        lines += ["", "", "class Model(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        for source in self.sources:
            if source.origin == "parameter":
                lines.append(f"        self.{source.name} = nn.Parameter({source.text})")
            elif source.origin == "state":
                lines.append(f'        self.register_buffer("{source.name}", {source.text})')
        lines += ["", f"    def forward(self{''.join(f', {source.name}' for source in inputs)}):"]
        for step in self.steps:
            text = step.text.format(*(own.get(name, name) for name in step.operands))
            lines.append(f"        {step.result} = {text}")
        lines.append(f"        return {', '.join(own.get(name, name) for name in self.outputs)}")
        lines += ["", "", "def get_inputs():"]
        lines.append(f"    return [{', '.join(source.text for source in inputs)}]")
        lines += ["", "", "def get_init_inputs():", "    return []", ""]
        return "\n".join(lines)

    def values(self) -> dict[str, torch.Tensor]:
        """Every tensor of one run on values drawn with a fixed seed. Raises what PyTorch raises."""
        scope: dict[str, Any] = {"torch": torch, "F": functional}
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            made: dict[str, torch.Tensor] = {source.name: eval(source.text, scope) for source in self.sources}
            for step in self.steps:
                made[step.result] = eval(step.text.format(*step.operands), scope, dict(made))
        return made

    def pruned(self) -> Sketch:
        """Without steps and sources that no output and no write needs."""
        needed = set(self.outputs)
        steps = []
        for step in reversed(self.steps):
            if step.result in needed or step.writes:
                needed.update(step.operands)
                steps.append(step)
        kept = [source for source in self.sources if source.name in needed] or list(self.sources[:1])
        if all(source.origin != "input" for source in kept):
            kept[0] = replace(kept[0], origin="input")
        return replace(self, sources=tuple(kept), steps=tuple(reversed(steps)))


def generate(seed: int) -> Sketch:
    """The module of a seed: two to nine steps, one to three outputs."""
    return _Generation(random.Random(seed), seed).sketch()


class _Generation:
    def __init__(self, draw: random.Random, seed: int) -> None:
        self._draw = draw
        self._shape = self._base_shape()
        first = self._source(self._shape, origin="input")
        self._sketch = Sketch(f"Random module {seed}.", (first,), (), ())
        self._values = self._sketch.values()
        self._empty_allowed = 0 in self._shape

    def sketch(self) -> Sketch:
        for _ in range(self._draw.randint(2, 9)):
            self._grow()
        if not self._sketch.steps:
            self._sketch = replace(self._sketch, steps=(Step("v0", "{0} + 1", (self._sketch.sources[0].name,)),))
        read = {operand for step in self._sketch.steps for operand in step.operands}
        ends = [step.result for step in self._sketch.steps[:-1] if step.result not in read]
        others = self._draw.sample(ends, min(len(ends), self._draw.choice((0, 0, 1, 2))))
        if self._draw.random() < 0.1:
            others.append(self._draw.choice(self._sketch.steps).result)
        outputs = dict.fromkeys([*others, self._sketch.steps[-1].result])
        return replace(self._sketch, outputs=tuple(outputs)).pruned()

    def _grow(self) -> None:
        """Adds one step that PyTorch runs and that keeps values ordinary; gives up after some tries."""
        for _ in range(_TRIES):
            lines = self._draw.choices([lines for _, lines in FAMILIES], [weight for weight, _ in FAMILIES])[0]
            line, *kinds = self._draw.choice(lines)
            grown = self._with_line(line, kinds)
            try:
                values = grown.values()
            except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, AttributeError, KeyError):
                continue
            if self._ordinary(values, grown):
                self._sketch, self._values = grown, values
                return

    def _with_line(self, line: str, kinds: Sequence[str]) -> Sketch:
        """The sketch with one more step, and with the sources that its operands ask for."""
        first = self._pick()
        sources, operands = list(self._sketch.sources), [first]
        value = self._values[first]
        count = 1 + max((int(number) for number in re.findall(r"\{(\d)\}", line)), default=0)
        for position in range(1, count):
            kind = kinds[position - 1] if position <= len(kinds) else "mate"
            mates = [name for name in self._values if _broadcast(self._values[name], value)]
            if kind == "mate" and mates and self._draw.random() < 0.5:
                operands.append(self._draw.choice(mates))
                continue
            sources.append(self._source_for(kind, value, len(sources)))
            operands.append(sources[-1].name)
        text = re.sub(r"<(\w+)>", lambda token: draw_token(token[1], value, self._draw), line)
        step = Step(f"v{len(self._sketch.steps)}", text, tuple(operands))
        return replace(self._sketch, sources=tuple(sources), steps=(*self._sketch.steps, step))

    def _pick(self) -> str:
        """A value to work on: mostly the last."""
        names = list(self._values)
        return names[-1] if self._draw.random() < 0.65 else self._draw.choice(names)

    def _ordinary(self, values: dict[str, torch.Tensor], grown: Sketch) -> bool:
        """Whether the last step's values, and what it wrote, stay where rounding does not decide."""
        last = grown.steps[-1]
        touched = values.values() if last.writes else [values[last.result]]
        return all(isinstance(value, torch.Tensor) and self._is_ordinary(value) for value in touched)

    def _is_ordinary(self, value: torch.Tensor) -> bool:
        if value.numel() == 0:
            return self._empty_allowed
        if value.numel() > MOST_ELEMENTS or value.dim() > 5 or value.dtype.is_complex:
            return False
        if value.numel() > 4 and bool((value == value.flatten()[0]).all()):
            return False
        if not value.is_floating_point():
            return True
        largest = float(value.abs().max())
        return _SMALLEST <= largest <= _LARGEST  # not NaN either

    # -- sources

    def _base_shape(self) -> tuple[int, ...]:
        rank = self._draw.choices((0, 1, 2, 3, 4), (1, 4, 10, 8, 5))[0]
        shape: list[int] = []
        for _ in range(rank):
            room = MOST_ELEMENTS // 2 // max(1, _product(shape))
            shape.append(self._draw.choice([extent for extent in _EXTENTS if extent <= max(1, room)]))
        self._draw.shuffle(shape)
        if rank and self._draw.random() < 0.02:
            shape[self._draw.randrange(rank)] = 0
        return tuple(shape)

    def _source_for(self, kind: str, value: torch.Tensor, number: int) -> Source:
        """A new tensor that goes with a value: along its last dimension, its channels, or broadcast against it."""
        shape = tuple(value.shape)
        if kind in ("first", "last", "channels", "statistics"):
            dimension = {"first": 0, "last": -1}.get(kind, 1)
            extent = shape[dimension] if len(shape) > max(0, dimension) else 1
            dtype = str(value.dtype).removeprefix("torch.")
            origin: Origin = "state" if kind == "statistics" else "parameter"
            return Source(f"a{number}", (extent,), dtype, origin if value.is_floating_point() else "input")
        if kind == "condition":
            return self._source(self._thinned(shape), number, dtype="bool")
        return self._source(self._thinned(shape), number)

    def _thinned(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A shape that broadcasts to the given one: leading dimensions dropped, some extents one."""
        kept = shape[self._draw.choice((0, 0, 0, 1)) :]
        return tuple(extent if self._draw.random() < 0.7 else 1 for extent in kept)

    def _source(
        self, shape: tuple[int, ...], number: int = 0, *, dtype: str | None = None, origin: Origin | None = None
    ) -> Source:
        draw = self._draw
        dtype = dtype or draw.choices(list(_TYPES), list(_TYPES.values()))[0]
        drawn: Origin = draw.choices(("input", "parameter", "state"), (8, 1, 1))[0]
        origin = origin or drawn
        if origin == "parameter" and "float" not in dtype:
            origin = "input"
        layout = draw.choices(list(_LAYOUTS), list(_LAYOUTS.values()))[0]
        plain = origin != "input" or not shape or 0 in shape
        return Source(f"a{number}", shape, dtype, origin, "contiguous" if plain else layout)


def _product(extents: Sequence[int]) -> int:
    result = 1
    for extent in extents:
        result *= extent
    return result


def _broadcast(value: torch.Tensor, target: torch.Tensor) -> bool:
    pairs = itertools.zip_longest(reversed(value.shape), reversed(target.shape), fillvalue=1)
    return all(own == wanted or 1 in (own, wanted) for own, wanted in pairs)


# ---- shrinking -----------------------------------------------------------------------------------------


FirstFailing = Callable[[Sequence[Sketch]], "Sketch | None"]
"""Of some sketches, the first that fails: several at once, because a compiler may as well take several."""


def shrunk(sketch: Sketch, first_failing: FirstFailing, at_once: int = 12) -> Sketch:
    """The smallest sketch found that still fails, by greedy cuts."""
    while True:
        candidates = smaller(sketch)
        failing = None
        while failing is None and (some := list(itertools.islice(candidates, at_once))):
            failing = first_failing(some)
        if failing is None:
            return sketch
        sketch = failing


def smaller(sketch: Sketch) -> Iterator[Sketch]:
    """Sketches one cut smaller that PyTorch still runs, the deepest cuts first."""
    values = sketch.values()
    seen = {sketch}
    for candidate in _cuts(sketch, values):
        cut = candidate.pruned()
        if cut in seen or _size(cut) >= _size(sketch) or not cut.steps:
            continue
        seen.add(cut)
        try:
            cut.values()
        except Exception:  # PyTorch disposes
            continue
        yield cut


def _size(sketch: Sketch) -> tuple[int, ...]:
    special = sum(
        (source.layout != "contiguous") + (source.dtype != "float32") + (source.origin != "input")
        for source in sketch.sources
    )
    extents = sum(_product(source.shape) + len(source.shape) for source in sketch.sources)
    return len(sketch.steps), len(sketch.outputs), special + len(sketch.sources), extents


def _cuts(sketch: Sketch, values: dict[str, torch.Tensor]) -> Iterator[Sketch]:
    for position, step in enumerate(sketch.steps[:-1]):
        yield replace(sketch, steps=sketch.steps[: position + 1], outputs=(step.result,))
    if len(sketch.outputs) > 1:
        for output in sketch.outputs:
            yield replace(sketch, outputs=(output,))
        for output in sketch.outputs:
            yield replace(sketch, outputs=tuple(name for name in sketch.outputs if name != output))
    for step in sketch.steps:
        yield _renamed(sketch, step, f"{step.result}_given", (_like(values[step.result], f"{step.result}_given"),))
        for operand in dict.fromkeys(step.operands):
            yield _renamed(sketch, step, operand, ())
    for position, source in enumerate(sketch.sources):
        for simpler in (
            replace(source, layout="contiguous"), replace(source, origin="input"), replace(source, dtype="float32"),
        ):  # fmt: skip
            yield _with_source(sketch, position, simpler)
    for extent in sorted({extent for source in sketch.sources for extent in source.shape if extent > 1}, reverse=True):
        for less in dict.fromkeys((1, 2, 3, 5, extent // 2, extent - 1)):
            if 0 < less < extent:
                yield _resized(sketch, extent, less)


def _renamed(sketch: Sketch, gone: Step, name: str, added: tuple[Source, ...]) -> Sketch:
    """The sketch without a step, whose result another value stands for."""
    steps = tuple(
        replace(step, operands=tuple(name if operand == gone.result else operand for operand in step.operands))
        for step in sketch.steps
        if step is not gone
    )
    outputs = dict.fromkeys(name if output == gone.result else output for output in sketch.outputs)
    return replace(sketch, sources=(*sketch.sources, *added), steps=steps, outputs=tuple(outputs))


def _like(value: torch.Tensor, name: str) -> Source:
    return Source(name, tuple(value.shape), str(value.dtype).removeprefix("torch."))


def _with_source(sketch: Sketch, position: int, source: Source) -> Sketch:
    return replace(sketch, sources=(*sketch.sources[:position], source, *sketch.sources[position + 1 :]))


def _resized(sketch: Sketch, old: int, new: int) -> Sketch:
    """An extent changed wherever it stands, in shapes and in lines."""
    sources = tuple(replace(s, shape=tuple(new if extent == old else extent for extent in s.shape))
                    for s in sketch.sources)  # fmt: skip
    # Not the places of operands, and not parts of numbers.
    whole = re.compile(rf"(?<![\w.{{]){old}(?![\w.}}])")
    steps = tuple(replace(step, text=whole.sub(str(new), step.text)) for step in sketch.steps)
    return replace(sketch, sources=sources, steps=steps)
