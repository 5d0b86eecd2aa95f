"""`warpsmith up`: the services alone, for as long as the command.

The one idea: who may call them is decided by where they listen: at Unix sockets in a folder of the caller's own, which
other commands of the same user find by the runs directory, and at a port with mutual TLS for all others. Where the
environment has the files of mutual TLS, the sockets are served by it too, and nothing in plain text. A service that
ends is started again; runs that were left in the directory are taken up.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, suppress
from typing import Annotated

import typer

from orchestrator.commands import chosen, client
from orchestrator.commands.options import DEFAULT_RUNS, Agent, Reasoner, Runs, Synthesizer, Trust
from orchestrator.commands.terminal import note, tell
from orchestrator.serving.dialing import orchestrator_at
from orchestrator.serving.local import MODULES, LocalServices
from orchestrator.serving.reviving import Reviving
from orchestrator.serving.taking_up import trials_text
from orchestrator.serving.vllm_server import VllmServer
from orchestrator.web.web_command import DEFAULT_PLACE, TokenFile, WebListen, WebNames, page
from warpsmith import settings
from warpsmith.errors import BadInput, WarpsmithError
from warpsmith.transport import Tls
from warpsmith.v1 import optimization_service_pb2 as messages
from warpsmith.v1.optimization_service_pb2_grpc import OptimizationServiceStub

LOOK_SECONDS = 0.25
"""Pause before it is looked again whether a service has ended; one that is away keeps runs waiting."""
LAST_WORD_SECONDS = 3.0
"""How long an orchestrator that is about to be ended may take to say what is under way."""
WATCHING_THREADS = "64"
"""Of each service beside a page: who watches a run holds one of the orchestrator's."""
EXAMPLE = (
    "Example:\n\n  warpsmith up --with-vllm Qwen/Qwen2.5-Coder-7B-Instruct --vllm-arguments '--dtype bfloat16'\n\n"
    "  warpsmith optimize softmax.py --server runs     (in another terminal)"
)


def up(
    listen: Annotated[
        str,
        typer.Option(
            "--listen",
            metavar="HOST:PORT",
            help="Where the orchestrator listens for commands elsewhere, by mutual TLS (WARPSMITH_TLS_*).",
        ),
    ] = "",
    with_vllm: Annotated[
        str, typer.Option("--with-vllm", metavar="MODEL", help="Serve a model too, for reasoner and synthesizer.")
    ] = "",
    vllm_arguments: Annotated[str, typer.Option("--vllm-arguments", help="Further arguments of `vllm serve`.")] = "",
    with_web: Annotated[
        bool, typer.Option("--web", help="Shows runs in a browser too, and takes modules there.")
    ] = False,
    web_listen: WebListen = DEFAULT_PLACE,
    token_file: TokenFile = None,
    web_name: WebNames = None,
    plugin: Agent = None,
    reasoner: Reasoner = "",
    synthesizer: Synthesizer = "",
    trust_input: Trust = False,
    runs: Runs = DEFAULT_RUNS,
) -> None:
    """Keeps the services up until Ctrl-C, for your commands with --server RUNS; goes on with runs that were left."""
    if with_vllm:
        reasoner, synthesizer = reasoner or "vllm", synthesizer or "vllm"
    environment = chosen.environment(chosen.agents(plugin, reasoner, synthesizer), "", "", trust_input)
    known = _usable_settings()
    place = _place(listen, known.tls) if listen else None
    start_page = page(web_listen, token_file, web_name) if with_web else None
    if start_page is not None:
        environment.setdefault("WARPSMITH_THREADS", os.environ.get("WARPSMITH_THREADS", WATCHING_THREADS))
    with client.ending_on_sigterm(), ExitStack() as stack:
        if with_vllm:
            model = stack.enter_context(VllmServer(with_vllm, runs, arguments=vllm_arguments, note=note))
            note(f"{'model':<14}{model.url}")
            environment |= model.environment
        services = stack.enter_context(LocalServices(runs, listen=place, stays=True, environment=environment))
        reviving = Reviving(services, note)
        for name in MODULES:
            note(f"{name:<14}{services.address(name)}")
        if services.listening:
            note(f"{'by TLS':<14}{services.listening}")
        tell(services.address("orchestrator"))
        orchestrator = orchestrator_at(services.address("orchestrator"), known.tls, known.token_file if place else None)
        stack.callback(_tell_left, orchestrator)
        shown = None
        if start_page is not None:
            shown = stack.enter_context(start_page(orchestrator))
            note(f"{'page':<14}{shown.url if token_file is not None else shown.login_url}")
        try:
            while True:
                reviving.look()
                if shown is not None:
                    shown.check()
                time.sleep(LOOK_SECONDS)
        except KeyboardInterrupt:
            note("stopping")


def _tell_left(orchestrator: OptimizationServiceStub) -> None:
    """Says of each run under way that it is kept, and what goes on with it; nothing where nobody answers."""
    with suppress(WarpsmithError):
        for run in orchestrator.DescribeQueue(messages.DescribeQueueRequest(), timeout=LAST_WORD_SECONDS).runs:
            kept = f"run {run.id} ({run.task.name}) is left after {trials_text(run.trial_count)}, and kept"
            note(f"{kept}: the next `warpsmith up` goes on with it")


def _usable_settings() -> settings.Settings:
    """What the environment says; raises BadInput where its files of mutual TLS cannot serve."""
    known = settings.read()
    if known.tls is not None:
        known.tls.require_usable("orchestrator")
    return known


def _place(listen: str, tls: Tls | None) -> tuple[str, int]:
    """Host and port of HOST:PORT.

    Raises:
        BadInput: it is none, or no certificate is there to show: others on the machine or the network could call.
    """
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal():
        raise BadInput(f"--listen {listen}: write HOST:PORT")
    if tls is None:
        names = ", ".join(settings.TLS_VARIABLES)
        raise BadInput(f"--listen {listen}: a port is a public place, on loopback too; set {names} (mutual TLS)")
    return host, int(port)
