"""Whether an export is what an orchestrator has signed: records by their signatures, files by making them again.

The one idea: a record holds all that an export is made of, so files need no signature of their own. Nothing is run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from orchestrator.exports import export_shapes
from orchestrator.exports.export import Exported, ExportedFolder
from orchestrator.trust import record, seal
from warpsmith import plugins
from warpsmith.errors import BadInput, WarpsmithError
from warpsmith.sandbox import private_files
from warpsmith.v1 import run_pb2

FLAVOURS = {".py": ("module", "kernelbench"), ".cu": ("cu",), "": ("package", "hub")}
"""Ending of an export → the exporters that write such a one; a folder has none."""


def changes(place: Path, public: Path) -> list[str]:
    """What of a record, or of an export with its records, is not as it was signed for a public key.

    Raises:
        BadInput: no record is there, one cannot be read, or the file of the key holds none.
    """
    records = _records(place)
    if records == [place]:
        return seal.changes(record.held(place)[0], public)
    found = [f"{path.name}: {each}" for path in records for each in seal.changes(record.held(path)[0], public)]
    if found:
        return found
    return list(_other_files(place, [record.read(path)[0] for path in records]))


def _records(place: Path) -> list[Path]:
    if place.is_dir():
        found = sorted(place.rglob("record*.json"))
    elif place.suffix in FLAVOURS:
        found = [place.with_suffix(".record.json")]
        if not found[0].exists():  # of several runs
            found = sorted(place.parent.glob(f"{place.stem}.*.record.json"))
    else:
        found = [place]
    if not found:
        raise BadInput(f"{place}: no record of it is there; `warpsmith export` writes one beside the kernel")
    return found


def _other_files(place: Path, runs: Sequence[run_pb2.Run]) -> Iterator[str]:
    """What differs between files and what this version makes of the records; of several flavours, the nearest."""
    is_folder = place.is_dir()
    kept = _held(place) if is_folder else {place.name: _text(place)}
    tried: list[Mapping[str, str]] = []
    for flavour in FLAVOURS["" if is_folder else place.suffix]:
        try:
            match export_shapes.export_all(plugins.load("exporter", flavour), flavour, runs):
                case ExportedFolder(_, files):
                    tried.append(files)
                case Exported(_, text):
                    tried.append({place.name: text})
        except WarpsmithError:  # a flavour that this is not
            continue
    if not tried:
        yield f"{place}: is made of its records by no flavour of this version"
    else:
        yield from _differences(kept, max(tried, key=lambda made: _common(kept, made)))


def _common(kept: Mapping[str, str], made: Mapping[str, str]) -> int:
    """How many lines two exports have in common, wherever they stand."""
    lines = [
        Counter((name, line) for name, text in each.items() for line in text.splitlines()) for each in (kept, made)
    ]
    return (lines[0] & lines[1]).total()


def _differences(kept: Mapping[str, str], made: Mapping[str, str]) -> Iterator[str]:
    for name, text in made.items():
        if name not in kept:
            yield f"{name}: is missing"
            continue
        if record.is_same(kept[name], text):
            continue
        lines = enumerate(zip_longest(kept[name].splitlines(), text.splitlines()), 1)
        if first := next((each for each in lines if each[1][0] != each[1][1]), None):
            number, (ours, theirs) = first
            is_now = "is missing" if ours is None else f"is {ours.strip()[:80]!r}"
            wanted = "nothing" if theirs is None else repr(theirs.strip()[:80])
            yield f"{name}: line {number} {is_now}, and the record gives {wanted}"
    yield from (f"{name}: is in no record" for name in kept.keys() - made.keys())


def _held(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): _text(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def _text(path: Path) -> str:
    try:
        return private_files.read(path).decode(errors="replace")
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror})") from error
