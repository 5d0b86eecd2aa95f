"""What is told of a case's seed: enough to draw what the module draws, and nothing of its inputs.

The one idea: who knows the seed of the inputs can draw them as `get_inputs` does, and may know more of them than they
show: what was in order before it was shuffled, the factors of a product. So torch's generators get a seed of which no
way leads back. Needs no torch.
"""

from __future__ import annotations

import hashlib


def of_generators(seed: int) -> int:
    """What torch's generators begin with in a case of this seed."""
    return int.from_bytes(hashlib.blake2b(f"generators {seed}".encode(), digest_size=8).digest()) >> 1
