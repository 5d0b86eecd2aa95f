"""Blocks of memory that the process of a kernel may map: they come back whenever Python lets go of a tensor."""

from __future__ import annotations

from gpu_bench.running.arena import Arena


def test_blocks_that_come_back_while_one_is_looked_for_disturb_nothing() -> None:
    arena = Arena()
    tensors = [arena.raw(1) for _ in range(9)]
    first, last = tensors[0].data_ptr(), tensors[-1].data_ptr()

    class LetsGo(int):
        def __lt__(self, other: int) -> bool:
            del tensors[1:]
            return int.__lt__(self, other)

    found = arena.block_at(LetsGo(first))
    assert found is not None
    assert found.address == first
    assert arena.block_at(last) is None
