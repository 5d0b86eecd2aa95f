"""Options that several commands share, each said once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Server = Annotated[
    str,
    typer.Option(
        "--server",
        envvar="WARPSMITH_ORCHESTRATOR_ADDRESS",
        metavar="PLACE",
        help="An orchestrator elsewhere: https://HOST (with the token of WARPSMITH_TOKEN_FILE, where it asks for one), "
        "or HOST:PORT, by mutual TLS (WARPSMITH_TLS_*) or in plain text; or the runs directory of a `warpsmith up` of "
        "yours. Without it a command reads --runs, and where it searches starts services for as long as it runs.",
    ),
]
Runs = Annotated[Path, typer.Option("--runs", envvar="WARPSMITH_RUNS", help="Where runs are kept.")]
Json = Annotated[bool, typer.Option("--json", help="The result as JSON on stdout.")]
CsvFile = Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Writes the results as CSV too.")]
OpenMetricsFile = Annotated[
    Path | None, typer.Option("--openmetrics", metavar="FILE", help="Writes the results as OpenMetrics text too.")
]
Html = Annotated[
    Path | None,
    typer.Option(
        "--html",
        metavar="FILE",
        help="The result as one HTML file that needs nothing else; `-` for stdout. It replaces an earlier report and "
        "no other file.",
    ),
]
Budget = Annotated[str, typer.Option("--budget", help="Search time for each module: 60s, 5m, 1h.")]
TrialLimit = Annotated[int, typer.Option("--trials", min=0, help="Most trials for each module; 0 for no limit.")]
DeviceLimit = Annotated[str, typer.Option("--device-time", help="Most time on the device for each module: 30s.")]
TokenLimit = Annotated[
    int, typer.Option("--tokens", min=0, help="Most tokens of a language model for each module; 0 for no limit.")
]
Strategy = Annotated[
    str, typer.Option("--search", help="Strategy: beam (default), evolution, exhaustive, random, or a plugin's.")
]
Target = Annotated[str, typer.Option("--target", help="auto, cpu or cuda.")]
Precision = Annotated[str, typer.Option("--precision", help="auto, fp32, tf32, fp16 or bf16.")]
Prepared = Annotated[
    bool,
    typer.Option(
        "--prepared",
        help="What depends on parameters alone may be computed once and kept while they are unchanged, as for "
        "inference. A track of its own: its results stand apart.",
    ),
]
Grad = Annotated[
    str,
    typer.Option(
        "--grad",
        metavar="NAMES",
        help="A training step: the forward, then gradients of these inputs and parameters for given gradients of its "
        "outputs. Names by comma, with * for any (`x,norm.*`); `all` for every one that has a gradient. Given ones are "
        "drawn, or what get_grad_inputs() of the file returns.",
    ),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Start from nothing although earlier runs are known.")]
RunIds = Annotated[
    list[str] | None,
    typer.Argument(
        show_default="last",
        help="Identifiers of runs, their beginnings, or `last`; several only of one module with other inputs.",
    ),
]
RunId = Annotated[str, typer.Argument(help="A run's identifier, its beginning, or `last`.")]
Agent = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin",
        metavar="ROLE=NAME",
        help="An installed plugin to use: another reasoner or synthesizer than the built-in (reasoner=vllm), which may "
        "be a server in any language (reasoner=unix:/home/me/agent/socket, reasoner=host:50061), or a toolchain, "
        "check, executor, schedule or lowering beside the built-in ones. May be given several times.",
    ),
]
Reasoner = Annotated[
    str, typer.Option("--reasoner", metavar="NAME", help="As --plugin reasoner=NAME; vllm asks a language model.")
]
Synthesizer = Annotated[
    str, typer.Option("--synthesizer", metavar="NAME", help="As --plugin synthesizer=NAME; vllm has one write kernels.")
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust-input", help="Where this machine offers no jail: run the module unconfined instead of refusing."
    ),
]
Shard = Annotated[str, typer.Option("--shard", help="Only a part of the modules: 1/4 is the first of four.")]
Suite = Annotated[
    str,
    typer.Option(
        "--suite", help="`models`: networks of transformers and torchvision without weights, in fp32 and bf16."
    ),
]
TimeLimit = Annotated[str, typer.Option("--time-limit", help="Stop starting modules, or solutions, after 1h, 30m …")]
ResultsFile = Annotated[
    Path | None,
    typer.Option(
        "--results",
        help="JSON lines; a module, or solution, with a line of the same source and options is not run again, --fresh "
        "or not.",
    ),
]
PrepareAhead = Annotated[
    int,
    typer.Option(
        "--prepare-ahead",
        min=-1,
        help="Modules that are made ready while another has the GPU; -1 for as many as the processor allows.",
    ),
]
Gpus = Annotated[
    int,
    typer.Option(
        "--gpus",
        min=0,
        help="GPUs to use at once, a module on each; 0 for all that this command can see. Each has services of its "
        "own; where they end, the others take over its modules. `watch`, `cancel` and metrics of other commands reach "
        "those of the last.",
    ),
]

DEFAULT_RUNS = Path("runs")
