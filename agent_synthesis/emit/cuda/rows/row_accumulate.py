"""What a thread of a row reduction on CUDA adds up of its own part, and what the row's result then is known as.

The one idea: a stage leaves a state that any other thread's can be joined to. So a thread takes exponentials about its
own maximum and squares about its own mean, in registers and at once, and nobody waits before states are exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agent_synthesis.emit import sweeps
from agent_synthesis.emit.cuda import ordinary_numbers
from agent_synthesis.emit.cuda.reduction_stages import narrowed
from agent_synthesis.emit.cuda.rows.row_text import Held, RowKernel
from agent_synthesis.emit.expression import Scope
from agent_synthesis.emit.spelling import accumulator
from agent_synthesis.nests.ir import Expression, Reduction


def accumulate(kernel: RowKernel, number: int) -> str:
    """A thread's own state of a stage; the name of the variable."""
    stage = kernel.stages[number]
    state_type = stage.state_type(kernel.dialect)
    running = kernel.function.names.take(f"own_{stage.name}")
    if not kernel.team.holds_row:  # a sum of sums, so that long rows stay exact
        kernel.root.line(f"{state_type} {running} = {state_type}::empty();")
    if stage.kind == "folds":
        _folds(kernel, number, running)
    else:
        write = _shifted if stage.kind == "shifted" else _moments
        roots = [reduction.value for reduction in stage.reductions]
        kernel.chunks(roots, lambda scope, base, held: write(kernel, scope, base, held, number, running))
    return running


def learn(kernel: RowKernel, number: int, state: str) -> None:
    """From here on the stage's results are known, from the row's state."""
    stage = kernel.stages[number]
    for name, text in stage.results(state).items():
        reduction = next(r for r in stage.reductions if r.name == name)
        identifier = kernel.results[name]
        kernel.root.line(f"const {kernel.dialect.compute(reduction.result)} {identifier} = {text};")
        kernel.function.reductions[name] = identifier
    kernel.root.learn(sweeps.names_of(stage.reductions))
    if stage.kind == "moments" and stage.shared is not None:
        narrow = kernel.dialect.compute(stage.shared.type)
        same = stage.shared.type is stage.reductions[0].type
        kernel.root.define(stage.shared, f"{state}.mean" if same else f"static_cast<{narrow}>({state}.mean)")
    if kernel.rescale is not None and kernel.rescale[0] is stage and stage.shared is not None:
        _, element, own = kernel.rescale
        factor = kernel.function.names.take("rescale")
        top = kernel.function.reductions[stage.name]
        kind = kernel.dialect.compute(stage.reductions[0].type)
        kernel.root.line(f"const {kind} {factor} = {stage.state_type(kernel.dialect)}::exponential({own} - {top});")
        kernel.kept.append((stage.shared, f"({element} * {factor})"))
        kernel.rescale = None


def _folds(kernel: RowKernel, number: int, running: str) -> None:
    """Each reduction by itself."""
    stage = kernel.stages[number]
    state_type = stage.state_type(kernel.dialect)
    lanes = [kernel.function.names.take(f"{reduction.name}_lanes") for reduction in stage.reductions]
    roots = [reduction.value for reduction in stage.reductions]
    keeps = _declare_kept(kernel, kernel.root, number)
    logarithms = ordinary_numbers.logarithms(roots, kernel.text.axis)

    def write(scope: Scope, base: str, held: Held) -> None:
        for reduction, lane in zip(stage.reductions, lanes, strict=True):
            kind = accumulator(reduction, kernel.dialect)
            scope.line(f"ws::Lanes<{stage.functor(reduction)}, {kind}, {kernel.team.pack}> {lane};")

        def visit(where: Scope, reductions: Sequence[Reduction], before: Callable[[Scope], None]) -> None:
            def body(inner: Scope) -> None:
                kernel.define_kept(inner)
                before(inner)
                for reduction, lane in zip(reductions, lanes, strict=True):
                    value = inner.converted(reduction.value, reduction.type)
                    inner.line(f"{lane}.take({kernel.text.lane}, {value});")

            values = [reduction.value for reduction in reductions]
            kernel.each_pack(where, base, lambda s: kernel.text.elements(s, values, body, held=held))

        if logarithms and not keeps:
            ordinary_numbers.fold(scope, stage.reductions, logarithms, lanes, visit)
        else:
            visit(scope, stage.reductions, lambda inner: _keep_in(kernel, inner, keeps))
        parts = stage.state_of([f"{lane}.folded()" for lane in lanes])
        _finish_chunk(kernel, scope, state_type, running, f"{state_type}{parts}")

    kernel.chunks(roots, write)
    kernel.kept += [(part, f"{name}{kernel.slot}[{kernel.text.lane}]") for part, name in keeps]


def _declare_kept(kernel: RowKernel, scope: Scope, number: int) -> list[tuple[Expression, str]]:
    keeps = []
    for part in kernel.to_keep.get(number, ()):
        name = kernel.function.names.take("kept")
        scope.line(f"ws::Pack<{kernel.dialect.compute(part.type)}, {kernel.team.pack}> {name}[kPacks];")
        keeps.append((part, name))
    return keeps


def _keep_in(kernel: RowKernel, inner: Scope, keeps: Sequence[tuple[Expression, str]]) -> None:
    for part, name in keeps:
        place = f"{name}{kernel.slot}[{kernel.text.lane}]"
        inner.line(f"{place} = {inner.value(part).text};")
        inner.define(part, place)


def _finish_chunk(kernel: RowKernel, scope: Scope, state_type: str, running: str, parts: str) -> None:
    if kernel.team.holds_row:
        scope.line(f"const {state_type} {running} = {parts};")
    else:
        scope.line(f"{running} = {state_type}::join({running}, {parts});")


def _shifted(kernel: RowKernel, scope: Scope, base: str, held: Held, number: int, running: str) -> None:
    """A maximum, and exponentials about the one that the thread has in registers."""
    stage = kernel.stages[number]
    top, total = stage.reductions
    names, kind, pack = kernel.function.names, kernel.dialect.compute(top.type), kernel.team.pack
    state_type = stage.state_type(kernel.dialect)
    greatest, pivot = names.take(f"{top.name}_lanes"), names.take("pivot")
    scope.line(f"ws::Lanes<ws::Maximum, {kind}, {pack}> {greatest};")

    def first(inner: Scope) -> None:
        kernel.define_kept(inner)
        inner.line(f"{greatest}.take({kernel.text.lane}, {inner.converted(top.value, top.type)});")

    kernel.each_pack(scope, base, lambda s: kernel.text.elements(s, [top.value], first, held=held))
    own = names.take(f"thread_{top.name}")
    scope.line(f"const {kind} {own} = {greatest}.folded();")
    scope.line(f"const {kind} {pivot} = {state_type}::pivot({own});")
    sum_lanes = names.take(f"{total.name}_lanes")
    scope.line(f"ws::Lanes<ws::Sum, {kind}, {pack}> {sum_lanes};")
    assert stage.shared is not None
    number_of = kernel.function.interner.number
    wanted = {number_of(part) for part in kernel.to_keep.get(number, ())}
    kept = names.take("shifted") if number_of(stage.shared) in wanted and kernel.team.holds_row else ""
    if kept:
        scope.line(f"ws::Pack<{kind}, {pack}> {kept}[kPacks];")
    kernel.function.reductions[top.name] = pivot

    def second(inner: Scope) -> None:
        kernel.define_kept(inner)
        if kept:
            _keep_in(kernel, inner, [(stage.shared, kept)])  # type: ignore[list-item]
        inner.line(f"{sum_lanes}.take({kernel.text.lane}, {inner.converted(total.value, total.type)});")

    def visit(s: Scope) -> None:
        kernel.text.elements(s, [total.value], second, held=held, known=[f"%{top.name}"])

    kernel.each_pack(scope, base, visit)
    _finish_chunk(kernel, scope, state_type, running, f"{state_type}{{{own}, {sum_lanes}.folded()}}")
    if kept:
        kernel.rescale = (stage, f"{kept}{kernel.slot}[{kernel.text.lane}]", own)


def _moments(kernel: RowKernel, scope: Scope, base: str, held: Held, number: int, running: str) -> None:
    """A sum, and squares about the mean of what the thread has in registers."""
    stage = kernel.stages[number]
    total, squares = stage.reductions
    names, pack = kernel.function.names, kernel.team.pack
    kind, squares_kind = kernel.dialect.compute(total.type), kernel.dialect.compute(squares.type)
    # A thread's few elements add up in the narrower type, also where the row's sum is a wider one.
    own_value = narrowed(total.value, squares.type)
    state_type = stage.state_type(kernel.dialect)
    lanes, count, mean = names.take(f"{total.name}_lanes"), names.take("count"), names.take("thread_mean")
    scope.line(f"ws::Lanes<ws::Sum, {squares_kind}, {pack}> {lanes};")
    even = kernel.team.is_even
    suffix = "f" if kind == "float" else ""
    if not even:
        scope.line(f"{squares_kind} {count} = 0;")

    def first(inner: Scope) -> None:
        kernel.define_kept(inner)
        inner.line(f"{lanes}.take({kernel.text.lane}, {inner.converted(own_value, squares.type)});")
        if kernel.team.skewed:
            inner.line(f"{count} += 1;")

    def visit(s: Scope) -> None:
        kernel.text.elements(s, [own_value], first, held=held)
        if not even and not kernel.team.skewed:
            s.line(f"{count} += {pack};")

    kernel.each_pack(scope, base, visit)
    if even:
        scope.line(f"constexpr {squares_kind} {count} = {kernel.team.packs * pack};")
        scope.line(f"const {kind} {mean} = {lanes}.folded() * (1.0{suffix} / {count});")
    else:
        least = f"max({count}, 1.0{'' if squares_kind == 'double' else 'f'})"
        own_sum = f"{lanes}.folded()" if kind == squares_kind else f"static_cast<{kind}>({lanes}.folded())"
        scope.line(f"const {kind} {mean} = {own_sum} / {least};")
    square_lanes = names.take(f"{squares.name}_lanes")
    scope.line(f"ws::Lanes<ws::Sum, {squares_kind}, {pack}> {square_lanes};")

    def second(inner: Scope) -> None:
        kernel.define_kept(inner)
        assert stage.shared is not None
        inner.define(stage.shared, mean if kind == squares_kind else f"static_cast<{squares_kind}>({mean})")
        inner.line(f"{square_lanes}.take({kernel.text.lane}, {inner.converted(squares.value, squares.type)});")

    def again(s: Scope) -> None:
        kernel.text.elements(s, [squares.value], second, held=held, known=[f"%{total.name}"])

    kernel.each_pack(scope, base, again)
    _finish_chunk(kernel, scope, state_type, running, f"{state_type}{{{mean}, {count}, {square_lanes}.folded()}}")
