"""What stood before a reading of calls that change something, so that exactly those calls can be made again.

The one idea: what a module writes (its state, its inputs) and draws at random is noted ahead of each reading, outside
of what is timed. So the very calls that were timed are held against eager's. A call that is made once more to be looked
at, from the state that others left, would be told by that state, or by inputs that came a second time. Times nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from gpu_bench.values.keys import Key


@dataclass(frozen=True)
class Generators:
    """Where PyTorch's generators stand."""

    host: torch.Tensor
    device: torch.Tensor | None

    @staticmethod
    def now(device: torch.device) -> Generators:
        """As they stand."""
        return Generators(torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None)

    def put_back(self) -> None:
        """Has them draw again what they drew since."""
        torch.set_rng_state(self.host)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device)


@dataclass(frozen=True)
class Before:
    """What stood before the calls of a reading."""

    sets: Sequence[int]
    """The buffer sets of its calls, in their order."""
    generators: Generators
    held: Sequence[tuple[torch.Tensor, torch.Tensor]]
    """Each tensor that the module writes, and a copy."""
    keys: Sequence[Key]
    """What they are."""

    @staticmethod
    def of(sets: Sequence[int], sources: Sequence[Mapping[Key, torch.Tensor]], written: Sequence[Key]) -> Before:
        """`sources` of each call; `written`: those that the module writes."""
        tensors = {each[key].data_ptr(): (key, each[key]) for each in sources for key in written}
        device = next((tensor.device for each in sources for tensor in each.values()), torch.device("cpu"))
        held = [(tensor, tensor.clone()) for _, tensor in tensors.values()]
        return Before(list(sets), Generators.now(device), held, [key for key, _ in tensors.values()])

    def now(self) -> list[torch.Tensor]:
        """Copies of what those tensors hold now."""
        return [tensor.clone() for tensor, _ in self.held]

    def shown_by(self, outputs: Sequence[torch.Tensor]) -> set[int]:
        """Positions of outputs that lie in those tensors' memory."""
        places = {tensor.untyped_storage().data_ptr() for tensor, _ in self.held if tensor.numel()}
        return {n for n, output in enumerate(outputs) if output.untyped_storage().data_ptr() in places}

    def put_back(self) -> None:
        """Makes them hold what they held; the generators stand where they stood."""
        self.leave([copy for _, copy in self.held])
        self.generators.put_back()

    def leave(self, content: Sequence[torch.Tensor]) -> None:
        """Makes them hold what `now` found."""
        for (tensor, _), wanted in zip(self.held, content, strict=True):
            tensor.copy_(wanted)
