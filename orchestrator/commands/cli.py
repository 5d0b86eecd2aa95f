"""The command line: `warpsmith optimize module.py`, and all that looks at what it found.

The one idea: a command reads its arguments, calls OptimizationService and prints. Results go to stdout, everything
else to stderr. Exit codes: 0 done, 1 nothing passed, 2 bad input, 3 infrastructure.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from orchestrator.archiving import archive_commands
from orchestrator.commands import (
    budgets,
    chosen,
    client,
    directory_bench,
    module_runs,
    report,
    trust_commands,
    up_command,
)
from orchestrator.commands.options import (
    DEFAULT_RUNS,
    Agent,
    Budget,
    CsvFile,
    DeviceLimit,
    Fresh,
    Gpus,
    Grad,
    Html,
    Json,
    OpenMetricsFile,
    Precision,
    PrepareAhead,
    Prepared,
    Reasoner,
    ResultsFile,
    RunId,
    Runs,
    Server,
    Shard,
    Strategy,
    Suite,
    Synthesizer,
    Target,
    TimeLimit,
    TokenLimit,
    TrialLimit,
    Trust,
)
from orchestrator.commands.progress import Progress
from orchestrator.commands.terminal import STDOUT, note, tell, tell_file, tell_line, trouble
from orchestrator.exports import export_command
from orchestrator.interchange import interchange_commands, tables
from orchestrator.tasks import intake
from orchestrator.trust import record
from orchestrator.web import web_command
from warpsmith import __version__, printable
from warpsmith.errors import BadInput, NotFound, WarpsmithError
from warpsmith.service import tracing
from warpsmith.v1 import optimization_service_pb2 as messages
from warpsmith.v1 import run_pb2, trial_pb2

app = typer.Typer(
    name="warpsmith",
    help="Turns a PyTorch module into a faster, verified kernel.\n\n"
    "Start with: warpsmith optimize module.py\n\nMachine in doubt: warpsmith doctor",
    epilog="Exit codes: 0 done, 1 nothing passed, 2 bad input, 3 a service or the machine failed, 130 Ctrl-C.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _tell_version(is_asked: bool) -> None:
    if is_asked:
        tell_line(f"warpsmith {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Says which version this is.")
    ] = False,
) -> None:
    del version


INSPECTED_AT_ONCE = 2
_UsageError: Any = typer.BadParameter.__base__
"""click's, of which typer may carry a copy of its own."""

MadeT = TypeVar("MadeT")


@app.command(
    epilog="Examples:\n\n  warpsmith optimize softmax.py --budget 60s\n\n"
    "  warpsmith optimize examples/*.py --json > results.json\n\n"
    "  warpsmith optimize mypackage.blocks:Gate --input 'float32[16,16384]' --init 16384 --init eps=1e-5"
)
def optimize(
    modules: Annotated[list[str], typer.Argument(metavar="MODULE...", help="Files, or package.module:Class.")],
    budget: Budget = "60s",
    trials: TrialLimit = 0,
    device_time: DeviceLimit = "",
    tokens: TokenLimit = 0,
    input_: Annotated[
        list[str] | None, typer.Option("--input", help="An input of package.module:Class: 'float32[16,16384]'.")
    ] = None,
    init: Annotated[
        list[str] | None, typer.Option("--init", help="A constructor argument as a Python literal: 8 or eps=1e-5.")
    ] = None,
    class_name: Annotated[str, typer.Option("--class", help="The class in a file.")] = "Model",
    target: Target = "auto",
    precision: Precision = "auto",
    prepared: Prepared = False,
    grad: Grad = "",
    search: Strategy = "",
    fresh: Fresh = False,
    plugin: Agent = None,
    reasoner: Reasoner = "",
    synthesizer: Synthesizer = "",
    trust_input: Trust = False,
    as_json: Json = False,
    server: Server = "",
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Finds a faster kernel for each module and checks it. Ctrl-C keeps the best so far."""
    limits = budgets.limits(budget, trials, device_time, tokens)
    environment = chosen.environment(chosen.agents(plugin, reasoner, synthesizer), search, server, trust_input)
    given = (input_ or (), init or (), target, precision, class_name, prepared, intake.gradients(grad))
    tasks = _all(partial(intake.read, intake.Request(module, *given)) for module in modules)
    progress = Progress()
    pool = ThreadPoolExecutor(INSPECTED_AT_ONCE)
    try:
        inspected = [pool.submit(intake.inspect, task) for task in tasks]
        with client.searching(server, runs, environment) as serving:
            ready = _all(each.result for each in inspected)
            ended = module_runs.optimise_all(serving, ready, limits, search, fresh, progress)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # after Ctrl-C nothing queued is inspected
    _finish(ended, as_json, server, runs)


def _finish(ended: list[run_pb2.Run], as_json: bool, server: str, runs: Path) -> None:
    """Prints what came of runs, and exits."""
    errors = list(filter(None, map(report.error_text, ended)))
    if as_json or len(errors) < len(ended):
        _print_results(ended, as_json)
    if tried := [run for run in ended if run.trial_count]:
        _print_next(tried, server, runs)
    _print_errors(*errors)
    raise typer.Exit(report.exit_code(ended))


@app.command(epilog="Example:\n\n  warpsmith resume last")
def resume(
    run: RunId = "last",
    plugin: Agent = None,
    reasoner: Reasoner = "",
    synthesizer: Synthesizer = "",
    trust_input: Trust = False,
    as_json: Json = False,
    server: Server = "",
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Goes on with a run that was left, cancelled or failed, with what is left of its budget."""
    environment = chosen.environment(chosen.agents(plugin, reasoner, synthesizer), "", server, trust_input)
    progress = Progress()
    with client.searching(server, runs, environment) as serving, progress:
        ended = module_runs.followed(serving, [client.resume(serving.orchestrator, run)], progress)
    _finish(ended, as_json, server, runs)


class _Refused(BadInput):
    """Several errors at once."""

    def __init__(self, each: Sequence[str]) -> None:
        super().__init__("\n".join(each))
        self.each = each


def _all(calls: Iterable[Callable[[], MadeT]]) -> list[MadeT]:
    """What every call gives; where some are refused, one BadInput of them all."""
    made, refused = [], []
    for call in calls:
        try:
            made.append(call())
        except BadInput as error:
            refused.append(str(error))
    if refused:
        raise _Refused(refused)
    return made


@app.command(
    epilog="Examples:\n\n  warpsmith bench KernelBench/KernelBench/level1 --budget 2m\n\n"
    "  warpsmith bench modules/ --gpus 0 --time-limit 1h        (on all GPUs; run again to go on)\n\n"
    "  warpsmith bench modules/ --shard 1/4                     (the first of four machines)"
)
def bench(
    directory: Annotated[Path | None, typer.Argument(help="Every module below it is optimised.")] = None,
    suite: Suite = "",
    budget: Budget = "60s",
    trials: TrialLimit = 0,
    device_time: DeviceLimit = "",
    tokens: TokenLimit = 0,
    shard: Shard = "1/1",
    time_limit: TimeLimit = "",
    results: ResultsFile = None,
    prepare_ahead: PrepareAhead = -1,
    gpus: Gpus = 1,
    target: Target = "auto",
    precision: Precision = "auto",
    prepared: Prepared = False,
    grad: Grad = "",
    search: Strategy = "",
    fresh: Fresh = False,
    plugin: Agent = None,
    reasoner: Reasoner = "",
    synthesizer: Synthesizer = "",
    trust_input: Trust = False,
    as_json: Json = False,
    csv: CsvFile = None,
    openmetrics: OpenMetricsFile = None,
    server: Server = "",
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Optimises every module of a directory or of a suite; goes on where it stopped."""
    part = budgets.shard(shard)
    directory = directory_bench.place(directory, suite, runs)
    entries = directory_bench.entries(directory, part)
    file = results or runs / f"bench-{directory.resolve().name}-{part[0] + 1}of{part[1]}.jsonl"
    limits = budgets.limits(budget, trials, device_time, tokens)
    end = time.monotonic() + (budgets.seconds(time_limit, "--time-limit") if time_limit else float("inf"))
    agents = chosen.agents(plugin, reasoner, synthesizer)
    environment = chosen.environment(agents, search, server, trust_input)
    options = directory_bench.options(limits, target, precision, prepared, intake.gradients(grad), search, agents)
    devices = chosen.gpus(gpus, server, target)
    directory_bench.read_results(file)  # what cannot be read is said before anything starts
    progress = Progress(Console(stderr=True, force_terminal=False))
    with ExitStack() as stack:
        serving = [stack.enter_context(client.searching(server, runs, {**environment, **seen})) for seen in devices]
        asked = (target if gpus == 1 else "cuda", precision, prepared, intake.gradients(grad))
        log = directory_bench.RunLog(file, entries, options)
        made = module_runs.ModuleRuns(serving, limits, *asked, search, fresh, progress, log)
        found = directory_bench.bench(
            entries,
            file,
            made.optimise,
            options=options,
            ahead=directory_bench.ahead(prepare_ahead, target, len(devices)),
            seconds_left=lambda: end - time.monotonic(),
            note=progress.note,
            stop=made.stop,
            check=made.check,
        )
    _tell_results(found, as_json)
    tables.write(found, csv, openmetrics)
    raise typer.Exit(directory_bench.exit_code(found))


def _tell_results(found: Sequence[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"tasks": found}))
    else:
        for result in found:
            tell_line(directory_bench.text(result))
    note(directory_bench.summary(found))


@app.command("runs")
def list_runs(
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most so many.")] = 20,
    as_json: Json = False,
    csv: CsvFile = None,
    openmetrics: OpenMetricsFile = None,
    server: Server = "",
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Lists runs, newest first: when, module, state, seconds of a device, and what came of it."""
    with client.reading(server, runs) as orchestrator:
        found = client.latest(orchestrator, limit)
    told = list(map(report.as_json, found))
    tables.write(told, csv, openmetrics)
    if as_json:
        print(json.dumps({"runs": told}))
        return
    for run in found:
        begun = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.created_at))
        name, state = printable.line(run.task.name, 60), report.state_name(run.state)
        row = f"{name:<28} {state:<10} {report.device_seconds(run):>7.1f} s  {printable.line(run.message)}"
        print(f"{printable.line(run.id, 40)}  {begun}  {row}")


@app.command()
def show(
    run: RunId = "last",
    trial: Annotated[int, typer.Option("--trial", help="The source of one trial.")] = 0,
    tree: Annotated[bool, typer.Option("--tree", help="Draws which trial grew from which.")] = False,
    as_record: Annotated[bool, typer.Option("--record", help="The run's record, for `warpsmith verify`.")] = False,
    server: Server = "",
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Shows the trials of a run as a list or a tree, the source of one, or the run's record."""
    with client.reading(server, runs) as orchestrator:
        found = orchestrator.GetRun(messages.GetRunRequest(run_id=run), timeout=30.0).run
        if as_record:
            tell_file(record.text(found))
            return
        if not trial:
            _tell_trials(found, client.trials(orchestrator, found.id), tree)
            return
        chosen = client.trial(orchestrator, found.id, trial)
    if chosen is None:
        raise NotFound(f"run {found.id} has no trial {trial}")
    tell(*(f"// {line}" for line in report.trial_lines(chosen)))
    for source in chosen.candidate.program.sources:
        tell_line(f"// ---- {source.name}")
        tell_file(f"{source.text}\n")


def _tell_trials(run: run_pb2.Run, trials: Iterable[trial_pb2.Trial], as_tree: bool) -> None:
    tell_line(f"{run.task.name}: {report.state_name(run.state)}: {run.message}")
    tell(*report.costs(run))
    if as_tree:
        Console().print(report.tree("plan zero", trials), soft_wrap=True)
        return
    for each in trials:
        tell(*report.trial_lines(each))
        tell(f"    {printable.quotation(each.hypothesis.rationale)}")


@app.command("report", epilog="Example:\n\n  warpsmith report last --html softmax.html")
def report_command(
    run: RunId = "last",
    as_json: Json = False,
    html: Html = None,
    server: Server = "",
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Prints a run's result: arms, speedup, floor, where the gain comes from. With --html as a page for a browser."""
    if html is not None and (as_json or not html.name):
        raise BadInput("--html names a file for the page, and takes no --json beside it: the page holds that too")
    with client.reading(server, runs) as orchestrator:
        found = orchestrator.GetRun(messages.GetRunRequest(run_id=run), timeout=30.0).run
        if html is None:
            _print_results([found], as_json)
            return
        trials = list(client.trials(orchestrator, found.id))
    _give_page(html, found, trials)


def _give_page(place: Path, found: run_pb2.Run, trials: Sequence[trial_pb2.Trial]) -> None:
    from orchestrator.pages import page_file, report_page  # jinja2 takes a moment, which other commands need not wait

    page = report_page.html(found, trials)
    if place in STDOUT:
        tell_file(page)
        return
    page_file.write(place, page)
    tell_line(str(place))


app.command("export", epilog=export_command.EXAMPLE)(export_command.export)


@app.command()
def watch(run: RunId = "last", server: Server = "", runs: Runs = DEFAULT_RUNS) -> None:
    """Watches a run that another command has started; leaving does not stop it."""
    with client.connected(server, runs) as orchestrator:
        found = orchestrator.GetRun(messages.GetRunRequest(run_id=run), timeout=30.0).run
        with Progress() as progress:
            progress.expect(found)
            ended = client.follow(orchestrator, found.id, partial(progress.take, found.id), note=progress.note)
    _print_results([ended], False)
    _print_next([ended], server, runs)


@app.command()
def cancel(run: RunId = "last", server: Server = "", runs: Runs = DEFAULT_RUNS) -> None:
    """Asks a run to stop; its best so far is judged and kept. One whose orchestrator is gone ends as it is."""
    with client.stopping(server, runs) as orchestrator:
        found = client.cancel(orchestrator, run)
    tell_line(f"{found.id}: {report.state_name(found.state)}")


trust_commands.add_to(app)
app.command("kernelbench", epilog=interchange_commands.EXAMPLE)(interchange_commands.kernelbench_command)
app.add_typer(archive_commands.app, name="archive")
app.command("up", epilog=up_command.EXAMPLE)(up_command.up)
app.command("web", epilog=web_command.EXAMPLE)(web_command.web)


def _print_results(ended: list[run_pb2.Run], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"tasks": [report.as_json(run) for run in ended]}))
        return
    # Without a terminal there is no width to keep to: wide enough that no number breaks.
    console = Console(width=None if sys.stdout.isatty() else 180)
    if console.width >= report.TABLE_COLUMNS:
        console.print(report.table(ended))
        return
    tell(*(line for run in ended for line in report.lines(run)))


def _print_next(ended: list[run_pb2.Run], server: str, runs: Path) -> None:
    for text in report.next_steps(ended, client.where(server, runs)):
        note(text)


def _print_errors(*errors: str) -> None:
    for text in errors:
        note(f"warpsmith: {printable.line(text)}")


def _print_usage_error(error: Any) -> None:
    """An error of the command line's form, as typer would print it but for what the arguments may hold."""
    message, context = error.format_message(), error.ctx
    if context is None:
        note(f"Error: {printable.line(message)}")
    elif message == context.get_help():  # no arguments
        print(printable.lines(message), file=sys.stderr)
    else:
        print(printable.lines(context.get_usage()), file=sys.stderr)
        note(f"Try '{context.command_path} --help' for help.")
        note("")
        note(f"Error: {printable.line(message)}")


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
"""Errors of a disk, which are no bugs of ours."""


def _leave_unsaid() -> None:
    """What is left to be printed goes nowhere: the interpreter would try once more as it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> None:
    """Entry point of `warpsmith`: every error of ours is one line and an exit code."""
    try:
        with tracing.command():
            code = app(prog_name=app.info.name, standalone_mode=False)
        with contextlib.suppress(BrokenPipeError):  # a pager that was left has seen enough
            sys.stdout.flush()
    except _UsageError as error:
        _print_usage_error(error)
        raise SystemExit(error.exit_code) from None
    except typer.Abort:
        note("Aborted!")
        raise SystemExit(1) from None
    except (BadInput, NotFound) as error:
        _print_errors(*(error.each if isinstance(error, _Refused) else [str(error)]))
        raise SystemExit(2) from None
    except WarpsmithError as error:
        _print_errors(str(error))
        raise SystemExit(3) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            _print_errors(f"{error.filename or 'its output'}: cannot be written: {error.strerror}")
            _leave_unsaid()
            raise SystemExit(3) from None
        # A bug of ours, whose words may be others' all the same.
        trouble(f"warpsmith: {traceback.format_exc()}")
        raise SystemExit(1) from None
    raise SystemExit(code or 0)
