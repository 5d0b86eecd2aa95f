"""The commands for those who do not take our word: `verify` a record, `judge` a solution, `doctor --attack` the jail.

The one idea: as in `cli`, a command reads its arguments, asks the services and prints; it decides nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.commands import client, doctor, doctor_attack
from orchestrator.commands.options import (
    DEFAULT_RUNS,
    CsvFile,
    Json,
    OpenMetricsFile,
    Precision,
    ResultsFile,
    Runs,
    Server,
    Target,
    TimeLimit,
    Trust,
)
from orchestrator.commands.terminal import tell
from orchestrator.interchange import interchange_commands
from orchestrator.interchange.interchange_commands import Baseline, ClaimedRight, Only, Samples, Wanted
from orchestrator.serving.device_gate import DeviceGate
from orchestrator.tasks import intake
from orchestrator.trust import judge, record, signed_export, verify
from warpsmith import printable
from warpsmith.errors import BadInput
from warpsmith.sandbox import jail
from warpsmith.v1 import optimization_service_pb2 as messages
from warpsmith.v1 import task_pb2

VERIFY_EXAMPLE = (
    "Examples:\n\n  warpsmith verify fast_softmax.record.json\n\n"
    "  warpsmith verify fast_softmax.py --key orchestrator.pub       (the record beside it, and the file itself)"
)
JUDGE_EXAMPLE = (
    "Examples:\n\n  warpsmith judge solution.py KernelBench/KernelBench/level1/23_Softmax.py --target cuda\n\n"
    "  warpsmith judge KernelBench/runs/somebody KernelBench --csv judged.csv       (run again to go on)"
)


def verify_command(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="RECORD",
            help="Of `warpsmith export` or `show --record`; with --key an export too.",
        ),
    ],
    trust_input: Trust = False,
    as_json: Json = False,
    key: Annotated[
        Path | None,
        typer.Option("--key", metavar="PUB", help="Says what was changed since this key's owner signed."),
    ] = None,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Judges a recorded result again from nothing, and says what differs; with --key, checks its signature alone."""
    if key is not None:
        raise typer.Exit(_signed(file, key, as_json))
    run, contradictions = record.read(file)
    with client.verifying(runs, _trusting(trust_input)) as agents:
        found = verify.verify(agents, DeviceGate(agents.benchmarks), run, contradictions)
    print(json.dumps({"tasks": [verify.as_json(found)]})) if as_json else tell(*verify.rows(found))
    raise typer.Exit(found.exit_code)


def judge_command(
    solution: Annotated[
        Path,
        typer.Argument(metavar="SOLUTION", help="A file that defines ModelNew, or the folder of a KernelBench run."),
    ],
    reference: Annotated[
        Path, typer.Argument(metavar="REFERENCE", help="A file that defines Model and get_inputs, or the checkout.")
    ],
    only: Only = None,
    samples: Samples = 0,
    claimed_right: ClaimedRight = False,
    baseline: Baseline = None,
    time_limit: TimeLimit = "",
    results: ResultsFile = None,
    target: Target = "auto",
    precision: Precision = "auto",
    trust_input: Trust = False,
    as_json: Json = False,
    csv: CsvFile = None,
    openmetrics: OpenMetricsFile = None,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Judges others' solutions, one or a run of them, by the rules for our own: right, honest, and how much faster."""
    environment = _trusting(trust_input)
    wanted = Wanted(
        only or [],
        samples,
        claimed_right,
        baseline,
        time_limit,
        results,
        target,
        precision,
        as_json,
        csv,
        openmetrics,
        runs,
    )
    if solution.is_dir():
        raise typer.Exit(interchange_commands.judge_run(solution, reference, wanted, environment))
    if any((only, samples, claimed_right, baseline, time_limit, results, csv, openmetrics)):
        raise BadInput(f"{solution}: is no folder; --only, --samples, --baseline and the like go with that of a run")
    judge.read(solution, task_pb2.TARGET_UNSPECIFIED)
    task = intake.inspect(intake.read(intake.Request(str(reference), target=target, precision=precision)))
    with client.judging(runs, environment) as (correctness, benchmark):
        found = judge.judge(correctness, benchmark, task, solution)
    print(json.dumps({"tasks": [judge.as_json(found)]})) if as_json else tell(*judge.rows(found))
    raise typer.Exit(found.exit_code)


def doctor_command(
    attack: Annotated[bool, typer.Option("--attack", help="Attacks the jail of this machine, rung by rung.")] = False,
    as_json: Json = False,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Says what this machine can do, and how to mend what it cannot; with --attack, whether its jail holds."""
    if attack:
        attacked = doctor_attack.attack()
        print(json.dumps(doctor_attack.as_json(attacked))) if as_json else tell(*doctor_attack.rows(attacked))
        raise typer.Exit(doctor_attack.exit_code(attacked))
    findings = []
    for finding in doctor.examine(runs):
        findings.append(finding)
        if not as_json:
            tell(f"{finding.health.value:<8}{finding.name:<10}{printable.line(finding.detail)}")
            if finding.fix:
                tell(f"{'':<18}fix: {printable.line(finding.fix)}")
    if as_json:
        print(json.dumps({"findings": [doctor.as_json(finding) for finding in findings]}))
    raise typer.Exit(3 if any(finding.health is doctor.Health.BAD for finding in findings) else 0)


def signing_key_command(server: Server = "", runs: Runs = DEFAULT_RUNS) -> None:
    """Prints the public key that an orchestrator signs results for, for `warpsmith verify --key`."""
    with client.connected(server, runs) as orchestrator:
        print(orchestrator.GetSigningKey(messages.GetSigningKeyRequest(), timeout=30.0).public_key, end="")


def add_to(app: typer.Typer) -> None:
    """Gives the application these commands."""
    app.command("verify", epilog=VERIFY_EXAMPLE)(verify_command)
    app.command("judge", epilog=JUDGE_EXAMPLE)(judge_command)
    app.command("signing-key")(signing_key_command)
    app.command("doctor")(doctor_command)


def _signed(file: Path, key: Path, as_json: bool) -> int:
    """Says what of an export was changed after it was signed; 1 where something was."""
    found = signed_export.changes(file, key)
    if as_json:
        print(json.dumps({"file": str(file), "verdict": "DIFFERS" if found else "HOLDS", "differences": found}))
    else:
        tell(f"{file}: {'was changed, or is not signed' if found else 'as it was signed'}")
        tell(*(f"  differs: {printable.line(each, 300)}" for each in found))
    return 1 if found else 0


def _trusting(trust_input: bool) -> dict[str, str]:
    """Environment of the services; trust holds for this process too."""
    if not trust_input:
        return {}
    jail.trust_input()
    return {"WARPSMITH_TRUST_INPUT": "1"}
