"""Programs of trials: the headers that they share, which are nearly all of their text, are kept once.

The one idea: a trial's row says by digest what its message leaves out. A text is there before the row that names it, or
comes in the same transaction, and is never changed or removed.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from orchestrator.archiving.tables import TEXTS
from warpsmith import digest
from warpsmith.v1 import candidate_pb2, trial_pb2

_ADD = sa.text(f"INSERT INTO {TEXTS.name} (digest, content) VALUES (:digest, :content) ON CONFLICT DO NOTHING")
READ_AT_ONCE = 500
"""Digests of one query; SQLite's default limit of variables is 999 in older builds."""


def digest_of(content: bytes) -> str:
    """The name of a text."""
    return digest.digest("text", content)


def left_out(trial: trial_pb2.Trial, known: Container[str]) -> tuple[trial_pb2.Trial, str, dict[str, bytes]]:
    """The trial without what programs share, the names of that for its row, and the texts that are not known yet."""
    shared = [source.text.encode() for source in trial.candidate.program.sources[1:]]
    if not shared:
        return trial, "", {}
    names, rest = list(map(digest_of, shared)), trial_pb2.Trial()
    rest.CopyFrom(trial)
    for source in rest.candidate.program.sources[1:]:
        source.ClearField("text")
    new = {name: text for name, text in zip(names, shared, strict=True) if name not in known}
    return rest, " ".join(names), new


def add(connection: sa.Connection, texts: Mapping[str, bytes]) -> None:
    """Keeps texts that are not there yet; in one order, so that two who add some never wait for each other."""
    if texts:
        connection.execute(_ADD, [{"digest": name, "content": texts[name]} for name in sorted(texts)])


def fetched(rows: Callable[[sa.Select[Any]], Sequence[sa.Row[Any]]], named: Iterable[str]) -> dict[str, str]:
    """The texts that rows of trials name, by digest; `rows` gives what a query finds."""
    names = sorted({name for names in named for name in names.split()})
    texts: dict[str, str] = {}
    for place in range(0, len(names), READ_AT_ONCE):
        asked = sa.select(TEXTS).where(TEXTS.c.digest.in_(names[place : place + READ_AT_ONCE]))
        found = {row.digest: row.content for row in rows(asked)}
        texts |= {name: text.decode(errors="replace") for name, text in found.items() if isinstance(text, bytes)}
    return texts


def put_back(trial: trial_pb2.Trial, names: str, texts: Mapping[str, str]) -> bool:
    """Makes a trial whole again; False where its row names what is not there."""
    digests, shared = names.split(), trial.candidate.program.sources[1:]
    if digests and (len(digests) != len(shared) or not texts.keys() >= set(digests)):
        return False
    for source, name in zip(shared, digests, strict=False):
        source.text = texts[name]
    return True


def dropped(trial: trial_pb2.Trial) -> trial_pb2.Trial:
    """The same trial, from which its program was taken, but for its digest."""
    if trial.HasField("candidate"):
        trial.candidate.program.CopyFrom(candidate_pb2.Program(digest=trial.candidate.program.digest))
    return trial
