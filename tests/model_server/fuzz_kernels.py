"""Feeds the synthesizer replies with random faults: `python tests/model_server/fuzz_kernels.py --count 10000 --seed 1`.

Every reply either gives a kernel or has a reason from a fixed list. A kernel's launches name the group's own buffers,
its text reads back as the same kernel, and its move can be serialized. Half of the kernels are for CUDA. Prints how
many of each end there were, the longest time that reading one took and the memory that the process grew by; fails where
anything else happened, or the process grew by more than a bound that is the same for every count.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections import Counter
from collections.abc import Callable

import kernel_replies as replies
from fuzz_model import MOST_GROWN_MIB, Fuzzer, peak_mib
from scripted_model import Asked, Reply, ScriptedModel, streamed

from agent_synthesis.free_form import answer
from agent_synthesis.free_form.kernel import Complaint, Fault, Kernel, Signature, from_text
from warpsmith.errors import ModelFault, ModelReason
from warpsmith.models.language_model import Message
from warpsmith.models.openai_client import OpenAiClient, Patience
from warpsmith.settings import ModelSettings
from warpsmith.v1 import analysis_pb2

REASONS = {*map(str, Fault), *map(str, ModelReason)}
WRITTEN = "written"
MOST_SECONDS = 1.0
"""For reading one answer, which takes milliseconds on a quiet machine."""
_NAMES = frozenset({"x", "bias", "y", "t"})
SIGNATURES = tuple(Signature("written_y", ("x", "bias"), ("y",), _NAMES, is_cuda=is_cuda) for is_cuda in (False, True))
QUESTION = Message("user", 'extern "C" void written_y(void* const* arguments)')


class KernelFuzzer(Fuzzer):
    """Replies of the reasoner's fuzzer, which are no kernels, and kernels with something wrong."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._makers = (
            self._changed, self._changed, self._changed, self._fenced, self._fenced, self._recorded, self._recorded,
            self._text, self._bytes, self._status, self._long,
        )  # fmt: skip

    def _changed(self, _: Asked) -> Reply:
        """A right answer with some of its characters changed, dropped or doubled."""
        text = list(self._whole("cpp", self._launches()))
        for _ in range(self._random.choice((0, 1, 2, 8, 40))):
            place = self._random.randrange(len(text))
            new = ("", text[place] * 2, self._character(), "`", "~~~", "{", "\n", "9" * 400)
            text[place] = self._random.choice(new)
        finish = self._random.choice(("stop", "stop", "length"))
        return streamed(_encodable("".join(text)), finish, self._random.choice((1, 7, 999)))

    def _fenced(self, _: Asked) -> Reply:
        """Fences of all kinds, opened and closed as it comes."""
        marks = ("```", "~~~", "````", "`", "```cpp", "~~~ c++", "> ```", "   ```json", "<think>", "</think>", "```]")
        source = replies.source("written_y")
        pieces = [*self._random.choices(marks, k=self._random.randrange(8)), source, self._launches(), "words {} []"]
        self._random.shuffle(pieces)
        return streamed("\n".join(pieces), self._random.choice(("stop", "length")))

    def _recorded(self, _: Asked) -> Reply:
        """A right source with a launch record of any shape."""
        names = (
            "launches",
            "workspaces",
            "grid",
            "block",
            "entry",
            "arguments",
            "shared_bytes",
            "name",
            "count",
            "zero",
        )
        record: object = {self._random.choice(names): self._value(3) for _ in range(self._random.randrange(1, 5))}
        if self._random.random() < 0.5:
            record = {"launches": [record] * self._random.choice((1, 2, 9)), "workspaces": self._value(2)}
        return streamed(self._whole(self._random.choice(("cpp", "cuda", "")), json.dumps(record)))

    def _long(self, _: Asked) -> Reply:
        """Much of something, some of it hard on careless patterns."""
        units = ("`", "~", "```\n", "{", "[", "</think", 'extern "C"', "extern ", "<", "// ", "\u20ac", "#include\n")
        unit = self._random.choice(units)
        count = self._random.choice((1000, 60_000)) // len(unit)
        return streamed(unit * count + self._random.choice(("", replies.source("written_y"))), size=65536)

    def _launches(self) -> str:
        grid = self._random.choice((1, [132, 1, 1], 0, "many", 2**40))
        arguments = self._random.choices(("x", "bias", "y", "partial", "z"), k=self._random.randrange(6))
        launch = {"grid": grid, "block": [256], "entry": "written_y", "arguments": arguments}
        scratch = {"name": self._random.choice(("partial", "x", "a b")), "count": self._random.choice((4, -4, 10**12))}
        return json.dumps({"launches": [launch], "workspaces": self._random.choice(([], [scratch]))})

    @staticmethod
    def _whole(language: str, record: str) -> str:
        return f"Here.\n```{language}\n{replies.source('written_y')}```\n```json\n{record}\n```\n"


def _encodable(text: str) -> str:
    return text.encode("utf-8", errors="replace").decode()


def outcome(client: OpenAiClient, signature: Signature) -> tuple[str, float]:
    """How one reply ended and the processor's seconds for reading it; AssertionError for none of the known ways."""
    try:
        said = client.answer([QUESTION], None)
    except ModelFault as fault:
        return str(fault.reason), 0.0
    gc.disable()  # what else this process holds is no part of the time
    begin = time.thread_time()
    read = answer.read(said, signature)
    seconds = time.thread_time() - begin
    gc.enable()
    match read:
        case Complaint(fault, text):
            assert text.isprintable()
            return str(fault), seconds
        case Kernel() as kernel:
            known = {*signature.inputs, *signature.outputs, *(workspace.name for workspace in kernel.workspaces)}
            assert all(set(launch.arguments) <= known for launch in kernel.launches)
            assert from_text(kernel.text, signature) == kernel
            move = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_WRITE, group="y", choice=kernel.name, text=kernel.text)
            assert move.SerializeToString()
            return WRITTEN, seconds


def fuzz(count: int, seed: int) -> tuple[Counter[str], float]:
    """How many of `count` replies ended in which way, and the longest time that reading one took, in seconds."""
    ends: Counter[str] = Counter()
    slowest, before = 0.0, peak_mib()
    fuzzer: Callable[[Asked], Reply] = KernelFuzzer(seed)
    with ScriptedModel(fuzzer) as server:
        settings = ModelSettings(url=server.url, first_token_seconds=5.0, total_seconds=10.0)
        client = OpenAiClient(settings, Patience(attempts=1, wait_seconds=0.0, rest_seconds=0.0))
        for number in range(count):
            reason, seconds = outcome(client, SIGNATURES[number % 2])
            slowest = max(slowest, seconds)
            assert reason in REASONS | {WRITTEN}, reason
            ends[reason] += 1
            server.asked.clear()
        client.close()
    assert peak_mib() - before <= MOST_GROWN_MIB
    assert slowest < MOST_SECONDS, f"reading one reply took {slowest:.1f} s"
    return ends, slowest


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    before = peak_mib()
    ends, slowest = fuzz(arguments.count, arguments.seed)
    for reason, number in ends.most_common():
        print(f"{number:7} {reason}")
    print(f"{sum(ends.values()):7} replies; reading one took at most {1e3 * slowest:.0f} ms")
    print(f"{peak_mib() - before:7} MiB more than before, at the peak")
    return 0


if __name__ == "__main__":
    sys.exit(main())
