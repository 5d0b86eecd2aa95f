"""Results as CSV and as OpenMetrics text, for spreadsheets and for monitoring.

The one idea: what `--json` prints of a result is what a row holds, by the same names; nothing is computed here. Names
and messages are others' text, so none may act in a terminal or begin a spreadsheet's formula.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.openmetrics.exposition import generate_latest

from warpsmith import printable
from warpsmith.errors import BadInput
from warpsmith.sandbox import private_files

Result = Mapping[str, Any]
"""One task's or one solution's, as `--json` prints it."""
SPEEDUPS = {"speedup_fastest": "fastest", "speedup_eager": "eager"}
_FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠")
"""What a spreadsheet takes for the beginning of one."""


def write(results: Sequence[Result], csv_file: Path | None, openmetrics_file: Path | None) -> None:
    """Writes the files that are named; raises BadInput where one cannot be written."""
    for file, text_of in ((csv_file, csv_text), (openmetrics_file, openmetrics_text)):
        if file is not None:
            try:
                private_files.replace(file, text_of(results), mode=0o666)
            except OSError as error:
                raise BadInput(f"{file}: cannot be written ({error.strerror})") from error


def csv_text(results: Sequence[Result]) -> str:
    """A row for each result; numbers below a name have it before theirs, as in `speedup_fastest.median`."""
    rows = [dict(_flat(result)) for result in results]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    output = io.StringIO()
    writer = csv.DictWriter(output, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return output.getvalue()


def _flat(result: Result) -> Iterable[tuple[str, str | float]]:
    for name, value in result.items():
        match value:
            case None | {} if not value:
                continue
            case bool() | str():
                yield name, _cell(str(value))
            case int() | float():
                yield name, value
            case dict() if all(isinstance(each, int | float) for each in value.values()):
                yield from ((f"{name}.{key}", each) for key, each in value.items())
            case dict():  # words by names that are not ours: columns of them would differ from file to file
                yield name, _cell("; ".join(f"{key}: {each}" for key, each in value.items()))
            case _:
                yield name, _cell(" ".join(map(str, value)))


def _cell(text: str) -> str:
    shown = printable.line(text)
    return f"'{shown}" if shown.startswith(_FORMULA) else shown


def openmetrics_text(results: Sequence[Result]) -> str:
    """Gauges of each result, by its file or name and its run."""
    registry = CollectorRegistry()

    def gauge(name: str, what: str, *labels: str, unit: str = "") -> Gauge:
        return Gauge(f"warpsmith_result_{name}", what, ("name", "run", *labels), unit=unit, registry=registry)

    verdicts = gauge("verdict", "1 for the verdict of a result.", "verdict", "kind")
    speedups = gauge(
        "speedup", "Time of a baseline over ours, with its interval of 95 %.", "against", "bound", unit="ratio"
    )
    times = gauge("time", "Median time of each thing that was timed, ours as `candidate`.", "arm", unit="seconds")
    floors = gauge("floor", "Least time at the measured ceilings over ours.", unit="ratio")
    for result in results:
        whose = [
            printable.line(str(result.get(key) or "")) for key in ("file" if result.get("file") else "name", "run")
        ]
        verdicts.labels(*whose, result["verdict"], result.get("kind", "")).set(1)
        for key, against in SPEEDUPS.items():
            for bound, value in (result.get(key) or {}).items():
                speedups.labels(*whose, against, bound).set(value)
        for arm, nanoseconds in result.get("arms_ns", {}).items():
            times.labels(*whose, arm).set(nanoseconds / 1e9)
        if percent := result.get("floor_percent"):
            floors.labels(*whose).set(percent / 100)
    text: bytes = generate_latest(registry)  # type: ignore[no-untyped-call]
    return text.decode()
