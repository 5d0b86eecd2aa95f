"""Everything a service reads from its environment, read once at start.

Nothing that changes generated code comes from here. Addresses of peers are `WARPSMITH_<SERVICE>_ADDRESS`. Files of
lines that it names, of tokens or quotas, are read again when they change, so that nothing restarts (`Lines`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from warpsmith import transport
from warpsmith.errors import BadInput
from warpsmith.transport import Tls

SERVICES = ("reasoning", "synthesis", "compile", "correctness", "benchmark", "orchestrator")
"""Names of the services, as in addresses and metrics."""
CHOSEN_ROLES = {"reasoner": "reasoning", "synthesizer": "synthesis"}
"""Roles that one plugin fills for a whole process, with its service; `WARPSMITH_<ROLE>` names another plugin.
Those that several can join are in `plugins.JOINING`."""

ASSISTED = ("compile", "correctness")
"""Agents that a language model may help, where WARPSMITH_MODEL_ASSISTS names them; by default it helps none."""

TLS_VARIABLES = transport.VARIABLES


@dataclass(frozen=True)
class ModelSettings:
    """Which language model agents may ask, and how patient they are with it."""

    url: str = "http://127.0.0.1:8000/v1"
    """Base address of an OpenAI-compatible API; this is where `vllm serve` listens."""
    name: str = ""
    """Model; empty for the first that the server lists."""
    key_file: Path | None = None
    """File that holds the API key; None where the server wants none."""
    first_token_seconds: float = 30.0
    """Longest wait for the first token, and longest silence after it."""
    total_seconds: float = 120.0
    """Longest time for one whole answer; the end of a turn (`model_turn`) comes first."""
    concurrency: int = 8
    """Questions asked at once by one service."""
    answer_tokens: int = 2048
    """Most tokens of an answer, thinking included."""


@dataclass(frozen=True)
class ClientLimits:
    """What one client of an orchestrator may have at once: who shows a token of one name, or a role's certificate."""

    runs: int = 100
    """Runs that have not ended."""
    watchers: int = 1000
    """Streams of events."""
    request_bytes: int = 16 << 20
    """Of one request, in bytes; the sources of a module are 8 MiB at most."""


@dataclass(frozen=True)
class OidcSettings:
    """Whose signed tokens (JWT) an orchestrator takes, beside those of its file, and what their claims mean."""

    issuer: str
    """Address of an OpenID Connect issuer, as its tokens name it: https://HOST…; its keys are found from there."""
    audience: str = ""
    """For whom a token has to be; the issuer calls it so too."""
    role_claim: str = "roles"
    """Claim that names `read`, `run` or `admin`: a list, or a text with spaces; `a.b` is b within a."""
    role_prefix: str = ""
    """What stands before these names there, such as `warpsmith-`."""
    name_claim: str = "sub"
    """Claim with the name that owns runs; one that nobody can choose for themselves."""
    project_claim: str = "project"
    """Claim with the project that runs count for."""
    leeway_seconds: float = 30.0
    """By how much the issuer's clock may be off."""


@dataclass(frozen=True)
class Settings:
    """How one service process runs."""

    host: str = "127.0.0.1"
    """Interface to listen on; `0.0.0.0` in a pod."""
    port: int | None = None
    """gRPC port, which any user of the machine can reach where there is no mutual TLS; 0 lets the system choose."""
    socket: Path | None = None
    """Unix domain socket to listen at, in a folder that only we can enter; there has to be one, or a port. Of a name
    that ends in `.tls`, by mutual TLS."""
    health_port: int | None = None
    """Port of a second, plaintext server with health only, for probes; None for none."""
    metrics_port: int | None = None
    """Port of the Prometheus endpoint, which any user of the machine can read; 0 lets the system choose."""
    port_file: Path | None = None
    """Where to write "port metrics_port" once serving; local mode reads it."""
    drain_seconds: float = 10.0
    """How long calls under way may go on after a stop was asked for."""
    thread_count: int = 16
    """Calls worked on at once; who watches a run, or asks for health, takes none."""
    parent_pid: int | None = None
    """Process whose end ends this one too; local mode sets it."""
    runs_directory: Path = Path("runs")
    """Where the orchestrator keeps runs when there is no database."""
    database_url: str = ""
    """SQLAlchemy URL of the orchestrator's database; empty for SQLite in the runs directory."""
    archive_patience_seconds: float = 300.0
    """How long what a run has found waits for a database that is locked, full or away, before the run fails."""
    spool_directory: Path | None = None
    """Folder of the orchestrator's own for what then waits, so that it outlives a kill; None for `spool` in the runs
    directory."""
    spool_bytes: int = 64 << 20
    """What it may hold; more waits in memory, and its run with it. 0 for no such folder."""
    takes_up: bool = True
    """Whether the orchestrator takes up runs that others have left; 0 for one that serves a single command."""
    addresses: Mapping[str, str] = field(default_factory=dict)
    """Service name → address of the peer."""
    plugins: Mapping[str, str] = field(default_factory=dict)
    """Role of `CHOSEN_ROLES` → name of the plugin that fills it instead of the built-in one."""
    model: ModelSettings = ModelSettings()
    """The language model of agents that use one."""
    model_assists: frozenset[str] = frozenset()
    """Agents (`compile`, `correctness`) that may ask it beside their own work."""
    tls: Tls | None = None
    """Files of mutual TLS with peers; None for plain text."""
    token_file: Path | None = None
    """File with the token that callers of this service have to show, and that a command shows to an orchestrator
    elsewhere; one a line. None for no token."""
    oidc: OidcSettings | None = None
    """Whose signed tokens count beside those of the file; None for nobody's."""
    limits: ClientLimits = ClientLimits()
    """What one client of the orchestrator may have at once."""
    quota_file: Path | None = None
    """File of the orchestrator with what projects may use of devices in a day of UTC: a line is PROJECT SECONDS, or
    * SECONDS for every other. None for no quota."""
    signing_key_file: Path | None = None
    """File with the private key (Ed25519, PEM) that the orchestrator signs results with; None for no signature."""
    trust_input: bool = False
    """Where no rung of the jail works: run the user's module unconfined, as its user asked, instead of refusing."""

    def address(self, service: str) -> str:
        """Address of a peer.

        Raises:
            BadInput: it is not set; names the variable.
        """
        if service not in self.addresses:
            raise BadInput(f"no address for the {service} service: set {_variable(service)}=host:port or unix:/path")
        return self.addresses[service]


def read(environment: Mapping[str, str] = os.environ) -> Settings:
    """The settings in an environment.

    Raises:
        BadInput: a value is malformed; names the variable.
    """
    port_file, socket = environment.get("WARPSMITH_PORT_FILE"), environment.get("WARPSMITH_SOCKET")
    token_file, quota_file = environment.get("WARPSMITH_TOKEN_FILE"), environment.get("WARPSMITH_QUOTA_FILE")
    signing_key_file, spool = environment.get("WARPSMITH_SIGNING_KEY_FILE"), environment.get("WARPSMITH_SPOOL")
    return Settings(
        host=environment.get("WARPSMITH_HOST", "127.0.0.1"),
        port=_optional(environment, "WARPSMITH_PORT"),
        socket=Path(socket) if socket else None,
        health_port=_optional(environment, "WARPSMITH_HEALTH_PORT"),
        metrics_port=_optional(environment, "WARPSMITH_METRICS_PORT"),
        port_file=Path(port_file) if port_file else None,
        drain_seconds=float(_integer(environment, "WARPSMITH_DRAIN_SECONDS", 10)),
        thread_count=_integer(environment, "WARPSMITH_THREADS", 16),
        parent_pid=_optional(environment, "WARPSMITH_PARENT_PID"),
        runs_directory=Path(environment.get("WARPSMITH_RUNS", "runs")),
        database_url=environment.get("WARPSMITH_DATABASE_URL", ""),
        archive_patience_seconds=float(_integer(environment, "WARPSMITH_ARCHIVE_PATIENCE_SECONDS", 300)),
        spool_directory=Path(spool) if spool else None,
        spool_bytes=_integer(environment, "WARPSMITH_SPOOL_BYTES", 64 << 20),
        takes_up=bool(_integer(environment, "WARPSMITH_TAKES_UP", 1)),
        addresses={name: environment[_variable(name)] for name in SERVICES if environment.get(_variable(name))},
        plugins={
            role: environment[f"WARPSMITH_{role.upper()}"]
            for role in CHOSEN_ROLES
            if environment.get(f"WARPSMITH_{role.upper()}")
        },
        model=_model(environment),
        model_assists=_assists(environment),
        tls=_tls(environment),
        token_file=Path(token_file) if token_file else None,
        oidc=_oidc(environment),
        limits=_limits(environment),
        quota_file=Path(quota_file) if quota_file else None,
        signing_key_file=Path(signing_key_file) if signing_key_file else None,
        trust_input=bool(_integer(environment, "WARPSMITH_TRUST_INPUT", 0)),
    )


def _tls(environment: Mapping[str, str]) -> Tls | None:
    named = {name: environment.get(name, "") for name in TLS_VARIABLES}
    if not any(named.values()):
        return None
    if missing := [name for name, value in named.items() if not value]:
        raise BadInput(f"mutual TLS needs all of {', '.join(TLS_VARIABLES)}: set {', '.join(missing)} too")
    return Tls(*(Path(value) for value in named.values()))


def _oidc(environment: Mapping[str, str]) -> OidcSettings | None:
    issuer = environment.get("WARPSMITH_OIDC_ISSUER", "")
    if not issuer:
        return None
    if not environment.get("WARPSMITH_OIDC_AUDIENCE"):
        raise BadInput("WARPSMITH_OIDC_ISSUER needs WARPSMITH_OIDC_AUDIENCE: else tokens for others would count here")
    default = OidcSettings(issuer)
    return OidcSettings(
        issuer=environment["WARPSMITH_OIDC_ISSUER"],
        audience=environment["WARPSMITH_OIDC_AUDIENCE"],
        role_claim=environment.get("WARPSMITH_OIDC_ROLE_CLAIM") or default.role_claim,
        role_prefix=environment.get("WARPSMITH_OIDC_ROLE_PREFIX", ""),
        name_claim=environment.get("WARPSMITH_OIDC_NAME_CLAIM") or default.name_claim,
        project_claim=environment.get("WARPSMITH_OIDC_PROJECT_CLAIM") or default.project_claim,
        leeway_seconds=_positive(environment, "WARPSMITH_OIDC_LEEWAY_SECONDS", default.leeway_seconds),
    )


def _limits(environment: Mapping[str, str]) -> ClientLimits:
    default = ClientLimits()
    return ClientLimits(
        runs=int(_positive(environment, "WARPSMITH_MOST_RUNS", default.runs)),
        watchers=int(_positive(environment, "WARPSMITH_MOST_WATCHERS", default.watchers)),
        request_bytes=int(_positive(environment, "WARPSMITH_MOST_REQUEST_BYTES", default.request_bytes)),
    )


def _model(environment: Mapping[str, str]) -> ModelSettings:
    key_file = environment.get("WARPSMITH_MODEL_KEY_FILE")
    default = ModelSettings()
    return ModelSettings(
        url=environment.get("WARPSMITH_MODEL_URL") or default.url,
        name=environment.get("WARPSMITH_MODEL", ""),
        key_file=Path(key_file) if key_file else None,
        first_token_seconds=_positive(environment, "WARPSMITH_MODEL_FIRST_TOKEN_SECONDS", default.first_token_seconds),
        total_seconds=_positive(environment, "WARPSMITH_MODEL_TOTAL_SECONDS", default.total_seconds),
        concurrency=int(_positive(environment, "WARPSMITH_MODEL_CONCURRENCY", default.concurrency)),
        answer_tokens=int(_positive(environment, "WARPSMITH_MODEL_ANSWER_TOKENS", default.answer_tokens)),
    )


def _assists(environment: Mapping[str, str]) -> frozenset[str]:
    named = frozenset(environment.get("WARPSMITH_MODEL_ASSISTS", "").replace(",", " ").split())
    if unknown := named - set(ASSISTED):
        raise BadInput(f"WARPSMITH_MODEL_ASSISTS={','.join(sorted(unknown))}: name some of {', '.join(ASSISTED)}")
    return named


def _positive(environment: Mapping[str, str], name: str, default: float) -> float:
    value = _integer(environment, name, 0) if environment.get(name) else default
    if value <= 0:
        raise BadInput(f"{name}={environment[name]!r} is not above zero")
    return value


def _variable(service: str) -> str:
    return f"WARPSMITH_{service.upper()}_ADDRESS"


def _optional(environment: Mapping[str, str], name: str) -> int | None:
    return None if environment.get(name, "") in ("", "none") else _integer(environment, name, 0)


def _integer(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise BadInput(f"{name}={text!r} is not a whole number") from None


LineT = TypeVar("LineT")


class Lines(Generic[LineT]):
    """What the lines of a file say that a setting names, empty ones left out; it is read again when it changes.

    `read` makes it of one line and raises BadInput, `kind` is what a line holds, `variable` names the file, which is
    ASCII.
    """

    def __init__(self, file: Path, read: Callable[[str], LineT], kind: str, variable: str) -> None:
        self.file, self._read, self._kind, self._variable = file, read, kind, variable
        self._stamp: tuple[int, int, int] | None = None
        self._last: tuple[LineT, ...] = ()
        self._last = self.now()

    def now(self) -> tuple[LineT, ...]:
        """What the file says now; what it said last where it is just being replaced.

        Raises:
            BadInput: it never held a line that can be used; names it.
        """
        try:
            found = self.file.stat()
            stamp = found.st_mtime_ns, found.st_ino, found.st_size
            if stamp != self._stamp:
                lines = (line.strip() for line in self.file.read_text("ascii").splitlines())
                read = tuple(self._read(line) for line in lines if line)
                if not read:
                    raise BadInput(f"holds no {self._kind}")
                self._last, self._stamp = read, stamp
        except (OSError, UnicodeDecodeError, BadInput) as error:
            if not self._last:
                said = error if isinstance(error, BadInput) else f"cannot be read as a {self._kind} ({error})"
                raise BadInput(f"{self.file}: {said}; see {self._variable}") from error
        return self._last
