"""Feeds the reasoner replies with random faults: `python tests/model_server/fuzz_model.py --count 10000 --seed 1`.

Every reply either is used and leads to open options only, or has a reason from a fixed list. Prints how many of each
there were and the memory that the process grew by; ends with 1 where anything else happened, or the process grew by
more than a bound that is the same for every count.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterator

import model_replies as replies
from scripted_model import DONE, STREAM, Asked, HungUp, Reply, ScriptedModel, event, status, streamed

from agent_reasoning.model import language_model_options
from agent_reasoning.model.language_model import LanguageModelReasoner, Lost
from agent_reasoning.model.language_model_answer import Fault
from warpsmith import testing
from warpsmith.errors import ModelReason
from warpsmith.models.openai_client import OpenAiClient, Patience
from warpsmith.settings import ModelSettings
from warpsmith.v1 import analysis_pb2, reasoning_service_pb2

REASONS = {*map(str, Fault), *map(str, ModelReason)}
MOST_GROWN_MIB = 128
"""Of the process, over any count of replies."""
CHOSEN = "chosen"


def request() -> reasoning_service_pb2.ProposeHypothesesRequest:
    """A plan with a dozen options."""
    made = testing.reasoning_request()
    cost = made.analysis.groups[0].cost
    for threads in range(32, 32 * 12, 32):
        move = analysis_pb2.Move(kind=analysis_pb2.MOVE_KIND_SET, group="softmax", arguments={"threads": threads})
        made.analysis.legal_moves.add(move=move, before=cost, after=cost, effect=f"{threads} threads")
    return made


def peak_mib() -> int:
    """Most memory that the process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


class Fuzzer:
    """Makes one reply after another from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._makers: tuple[Callable[[Asked], Reply], ...] = (
            self._mutated, self._mutated, self._mutated, self._json, self._json, self._text,
            self._bytes, self._broken_stream, self._status, self._large,
        )  # fmt: skip

    def __call__(self, asked: Asked) -> Reply:
        """The next reply."""
        return self._random.choice(self._makers)(asked)

    def _mutated(self, asked: Asked) -> Reply:
        """A right answer with some of its characters changed, dropped or doubled."""
        text = list(replies.chosen(*self._random.sample(asked.open_options, 2)))
        for _ in range(self._random.choice((0, 1, 1, 2, 5, 30))):
            place = self._random.randrange(len(text))
            text[place] = self._random.choice(("", text[place] * 2, self._character(), "{", '"', "]", "9" * 400))
        return streamed(
            "".join(text), self._random.choice(("stop", "stop", "length")), self._random.choice((1, 7, 999))
        )

    def _json(self, _: Asked) -> Reply:
        """Right JSON of a wrong shape."""
        return streamed(json.dumps({"hypotheses": self._value(4)}), "stop")

    def _value(self, depth: int) -> object:
        kind = self._random.randrange(9 if depth else 6)
        if kind < 6:
            return (None, True, self._random.randrange(-5, 40), self._random.uniform(-2, 2), 10**30, "x\x00\u202e")[
                kind
            ]
        if kind == 6:
            return [self._value(depth - 1) for _ in range(self._random.randrange(4))]
        names = ("option", "gain", "reason", "hypotheses", "moves")
        return {self._random.choice(names): self._value(depth - 1) for _ in range(self._random.randrange(5))}

    def _text(self, _: Asked) -> Reply:
        """Any characters."""
        text = "".join(self._character() for _ in range(self._random.randrange(400)))
        return streamed(text.replace("\ud800", ""), self._random.choice(("stop", "length", "content_filter")))

    def _character(self) -> str:
        return chr(self._random.choice((self._random.randrange(128), self._random.randrange(0xD800), 0x1F600, 0x202E)))

    def _bytes(self, _: Asked) -> Reply:
        """Any bytes as a stream of events."""
        return Reply(200, STREAM, [self._random.randbytes(self._random.randrange(600)), DONE])

    def _broken_stream(self, asked: Asked) -> Reply:
        """A right stream with a piece of its bytes changed, or broken off."""
        whole = bytearray(b"".join(streamed(replies.chosen(asked.open_options[0]), size=20).parts))
        for _ in range(self._random.randrange(4)):
            whole[self._random.randrange(len(whole))] = self._random.randrange(256)
        cut = self._random.choice((len(whole), self._random.randrange(len(whole))))

        def parts() -> Iterator[bytes]:
            yield bytes(whole[:cut])
            if self._random.random() < 0.2:
                raise HungUp

        return Reply(200, STREAM, parts())

    def _status(self, asked: Asked) -> Reply:
        """An error of any kind, in any words."""
        code = self._random.choice((300, 400, 401, 403, 404, 405, 408, 413, 418, 422, 429, 500, 502, 503, 529))
        if self._random.random() < 0.3:
            return Reply(code, {"content-type": "application/json"}, [self._random.randbytes(100)])
        words = self._random.choice(("", "maximum context length is 5", "the model `y`", "\x1b[31m\n\n", "e" * 10_000))
        return status(code, words, retry_after=self._random.choice(("0", "-1", "soon", "nan")))(asked)

    def _large(self, asked: Asked) -> Reply:
        """Much of something."""
        if self._random.random() < 0.5:
            return streamed(self._random.choice("x{[\u20ac") * self._random.choice((1000, 300_000)), size=65536)
        tail = [event(" " * 1000)] * 50
        return Reply(200, STREAM, [event(replies.chosen(asked.open_options[0])), *tail, event(None, "stop"), DONE])


def fuzz(count: int, seed: int) -> Counter[str]:
    """How many of `count` turns (one reply each, or more) ended in which way; raises where one ends in no known way."""
    question = request()
    options = language_model_options.of(question)
    ends: Counter[str] = Counter()
    before = peak_mib()
    with ScriptedModel(Fuzzer(seed)) as server:
        settings = ModelSettings(url=server.url, first_token_seconds=5.0, total_seconds=10.0)
        client = OpenAiClient(settings, Patience(attempts=1, wait_seconds=0.0, rest_seconds=0.0))
        for _ in range(count):
            # A reasoner of its own, so that one "context too long" does not shorten the prompts of the others.
            match LanguageModelReasoner(client, asked_again=0).choose(question, options):
                case Lost(reason):
                    assert reason in REASONS, reason
                    ends[str(reason)] += 1
                case choices:
                    assert 0 < len(choices) <= question.limit
                    assert all(0 <= choice.option < len(options) for choice in choices)
                    assert all(choice.gain is None or 0.1 <= choice.gain <= 100 for choice in choices)
                    assert all(choice.reason.isprintable() for choice in choices)
                    ends[CHOSEN] += 1
            server.asked.clear()
        client.close()
    assert peak_mib() - before <= MOST_GROWN_MIB
    return ends


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    before = peak_mib()
    ends = fuzz(arguments.count, arguments.seed)
    for reason, number in ends.most_common():
        print(f"{number:7} {reason}")
    print(f"{sum(ends.values()):7} turns; at the peak {peak_mib() - before} MiB more than before")
    return 0


if __name__ == "__main__":
    sys.exit(main())
