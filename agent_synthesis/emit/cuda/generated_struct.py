"""Structs and kernels of CUDA, whose skeletons are in `include/*.cuh`.

`emit.generated_struct` has what both targets share. This file writes structs of pointers and the kernels that hand them
over; it knows no skeleton.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from agent_synthesis.emit.cuda.kernel_text import KernelText
from agent_synthesis.emit.expression import Scope
from agent_synthesis.emit.generated_struct import Members, constant, function, located, value, wrapped

__all__ = ["Members", "body", "constant", "function", "kernel", "located", "struct", "value", "wrapped"]


def body(text: KernelText, known: Iterable[str]) -> Scope:
    """The block of a function of the struct, in which these axes and '%reductions' are known."""
    return Scope(text.function, None, known, depth=2)


def struct(name: str, text: KernelText, *members: Iterable[str]) -> list[str]:
    """The struct: pointers to the nest's buffers, then its other members."""
    pointers = [f"  {text.argument(buffer)};" for buffer in text.nest.buffers]
    return [f"struct {name} {{", *pointers, *(line for lines in members for line in lines), "};", ""]


def kernel(
    name: str,
    text: KernelText,
    skeleton: str,
    threads: int,
    min_blocks: int,
    workspaces: Mapping[str, str] | None = None,
    entry: str = "",
    *,
    stores: bool = True,
    shared: Mapping[str, str] | None = None,
) -> list[str]:
    """The kernel, which hands the struct, its workspaces and its shared memory to a function of the skeleton.

    `workspaces`: name → pointer type. `shared`: name → type, in which `%` is the struct. Unless it `stores`, it has no
    written buffers.
    """
    workspaces, shared = workspaces or {}, shared or {}
    passed = [buffer for buffer in text.nest.buffers if stores or not buffer.written]
    names = (text.function.buffers[b.name] if b in passed else "nullptr" for b in text.nest.buffers)
    signature = text.signature(entry or text.entry, threads, min_blocks, passed, workspaces)
    # In a function template g++ would not put it where the simulated machine looks for shared memory.
    memory = [f"  alignas(16) __shared__ {type_.replace('%', name)} {of};" for of, type_ in shared.items()]
    pointers = ", ".join(names)
    call = f"ws::{skeleton}({', '.join([f'{name}{{{pointers}}}', *workspaces, *shared])});"
    return [*signature, *memory, *wrapped(call), "}", ""]
