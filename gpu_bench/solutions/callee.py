"""The called side of a contest: a process that waits for a word, does what it says, and says that it is done.

The one idea: every call is made in the same way. Nothing in the word tells a call whose time counts from one whose
result is looked at: the asking process decides that afterwards. It keeps no time and holds no tensor.
"""

from __future__ import annotations

import gc
import os
import struct
from collections.abc import Callable, Mapping
from typing import NoReturn

VARIABLE = "WARPSMITH_CALL_FDS"
"""Environment variable of such a process: the numbers of the pipe of words and of that of answers."""
WORD = struct.Struct("<BBq")
"""Verb, arm, number."""
LENGTH = struct.Struct("<I")
"""Ahead of what an answer carries."""
CALL, DELIVER, EARLIER, MEMBERS, ANEW = range(1, 6)
"""Call the arm, the number seeding the generators, and say where the results lie; describe them, and put them where
they are looked at if they cannot be read from outside; the same of the call before; take parameters and state from the
shared memory; make the module anew, and then take them."""
DONE, FAILED = b".", b"!"
"""Begins an answer; then comes the number of the word that it is to, modulo 256: an answer to nothing shows."""

Handlers = Mapping[int, Callable[[int, int], bytes | None]]
"""By verb: (arm, number) → what the answer carries, for those of CARRYING."""
CARRYING = (CALL, DELIVER, EARLIER)


def serve(handlers: Handlers) -> NoReturn:
    """Does what words say as long as the process lives. What a handler raises ends it, after an answer that says so."""
    words, answers = map(int, os.environ[VARIABLE].split())
    for descriptor in (words, answers):
        os.set_inheritable(descriptor, False)
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection would add to the time of a call
    count = 0
    try:
        while True:
            verb, arm, number = WORD.unpack(os.read(words, WORD.size))
            count = (count + 1) % 256
            if verb == DELIVER:
                gc.collect()  # of what calls have left: few objects, for all others are frozen
            carried = handlers[verb](arm, number)
            text = carried or b""
            # At once: who asks stops this process as soon as the first bytes are there.
            _write(answers, DONE + bytes([count]) + (LENGTH.pack(len(text)) + text if verb in CARRYING else b""))
    except BaseException:
        os.write(answers, FAILED + bytes([count]))
        raise


def _write(descriptor: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]
