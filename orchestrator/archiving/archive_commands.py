"""`warpsmith archive`: whether what is kept can be read, what can be saved of it, a copy, and what its runs cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from orchestrator.archiving import repair, spool, versions
from orchestrator.archiving.costs import costs_command
from orchestrator.commands.options import DEFAULT_RUNS, Runs
from orchestrator.commands.terminal import note, tell, tell_line

app = typer.Typer(
    no_args_is_help=True, help="Checks, recovers and copies the archive of a runs directory, and sums costs."
)

app.command("costs")(costs_command)


@app.command("check")
def check(
    runs: Runs = DEFAULT_RUNS,
    waiting: Annotated[
        Path | None,
        typer.Option("--spool", envvar="WARPSMITH_SPOOL", help="Where what waits is; `spool` in --runs if not set."),
    ] = None,
) -> None:
    """Reads every row that is kept, also while runs go on, and says what waits to be kept; ends with 1 where something
    is damaged."""
    found = repair.check(runs)
    is_latest = found.version == versions.LATEST
    tell_line(
        f"schema version {found.version or 'none: older than versions'}"
        + ("" if is_latest else f"; the next command that writes brings it to {versions.LATEST}")
    )
    _tell(found)
    tell(*spool.findings(waiting or runs / "spool"))
    if not found.is_sound:
        note("`warpsmith archive recover` takes what is readable into a new archive, and sets this one aside")
        raise typer.Exit(1)


@app.command("recover")
def recover(runs: Runs = DEFAULT_RUNS) -> None:
    """Takes what is readable into a new archive, and sets the damaged one aside under another name."""
    found, aside = repair.recover(runs)
    _tell(found)
    tell_line(f"what was damaged is now {aside}")


@app.command("backup")
def back_up(
    copy: Annotated[Path, typer.Argument(metavar="FILE", help="A new file; it is an archive as the first one.")],
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Writes a copy of the archive that is whole, also while runs go on."""
    tell_line(f"{copy}: {repair.back_up(runs, copy)} bytes")


def _tell(found: repair.Findings) -> None:
    tell(*found.problems)
    for table in found.tables:
        lost = ", ".join(
            f"{count} {how}"
            for count, how in ((table.damaged, "damaged"), (table.orphaned, "of runs or texts that are lost"))
            if count
        )
        tell(f"{table.name:<8}{table.readable:>9} readable{', ' if lost else ''}{lost}")
