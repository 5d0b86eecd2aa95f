"""Memory that workers share, on a GPU: pinned pages that grow, and outboxes one after the other."""

from __future__ import annotations

import os

import pytest
import torch

from gpu_bench.values.keys import Key
from gpu_bench.workers import outbox
from gpu_bench.workers.outbox import Outbox, Passage
from gpu_bench.workers.sharing import SharedMemory, lay_out

pytestmark = pytest.mark.gpu


def test_a_file_that_grows_is_pinned_anew_and_no_kernel_hears_of_it() -> None:
    torch.zeros(1, device="cuda")
    descriptor = os.memfd_create("outputs")
    shared = SharedMemory(descriptor)
    for count in (1 << 18, 1 << 22, 1 << 24, 1 << 23, 1 << 26):
        regions, size = lay_out([(Key.output(0), torch.empty(count, dtype=torch.int32, device="meta"))])
        os.ftruncate(descriptor, size)
        (place,) = shared.tensors(regions)
        place.copy_(torch.arange(count, device="cuda"))
        assert int(place[-1]) == count - 1
        assert float((torch.ones(4, device="cuda") * 2).sum()) == 8.0
    os.close(descriptor)


def test_an_outbox_that_nobody_looks_into_any_more_is_no_longer_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    passage, size = Passage(), 4 << 30
    monkeypatch.setenv(outbox.PASSAGE_VARIABLE, str(passage.inherited))
    torch.zeros(1, device="cuda")
    before, _ = torch.cuda.mem_get_info()
    for value in range(3):
        made = Outbox.make(size)
        assert made is not None
        passage.send(made.descriptor)
        memory = outbox.received(size)
        made.close()
        part = memory[-4:].fill_(value)
        del memory
        assert part.tolist() == [value] * 4, "a view of it is held"
        del part
        free, _ = torch.cuda.mem_get_info()
        assert free > before - size // 4
    passage.close()
