"""Who may call what.

The one idea: a caller is what it shows, a certificate or a token, and what it may do stands in the tables here and
nowhere else. Services know each other by certificate: an agent's may call no other agent. People have tokens with a
right. Where a server asks for neither, only its own user reaches it (`local_sockets`), who may do everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum

from warpsmith.errors import BadInput, NotPermitted


class Right(IntEnum):
    """What the holder of a token may do; each one includes those before it."""

    READ = 1
    """Look at runs, and export what they found."""
    RUN = 2
    """Start runs, and stop and resume those that it has started."""
    ADMIN = 3
    """Stop and resume those of others too."""

    @property
    def word(self) -> str:
        """As a token's line names it."""
        return self.name.lower()


@dataclass(frozen=True)
class Caller:
    """Who calls, as far as a server has asked."""

    name: str = ""
    """Of the token's holder, or the role that a certificate names; empty where neither was asked for."""
    right: Right = Right.ADMIN
    project: str = ""
    """That its runs count for."""

    def require_own(self, owner: str, what: str) -> None:
        """Refuses what only the owner may do, or who may do everything.

        Raises:
            NotPermitted: the caller is another one.
        """
        if self.right < Right.ADMIN and self.name != owner:
            raise NotPermitted(f"{what} is of {owner or 'nobody with a name'}; {self.name or 'your token'} may not")


UNASKED = Caller()
"""Who reaches a server that asks neither for a certificate nor for a token."""

_CALLERS: Mapping[str, frozenset[str]] = {
    "ReasoningService": frozenset({"orchestrator"}),
    "SynthesisService": frozenset({"orchestrator"}),
    "CompileService": frozenset({"orchestrator"}),
    "CorrectnessService": frozenset({"orchestrator"}),
    "BenchmarkService": frozenset({"orchestrator", "correctness"}),
    "OptimizationService": frozenset({"client", "orchestrator"}),
}
"""By service, the roles whose certificate it lets in; the page of an orchestrator's pod shows the orchestrator's."""
_RIGHTS: Mapping[str, Right] = {
    "GetRun": Right.READ,
    "ListRuns": Right.READ,
    "ListTrials": Right.READ,
    "WatchRun": Right.READ,
    "ExportBest": Right.READ,
    "DescribeQueue": Right.READ,
    "GetSigningKey": Right.READ,
    "CreateRun": Right.RUN,
    "CancelRun": Right.RUN,
    "ResumeRun": Right.RUN,
}
"""By method, what a token needs; a method that is not listed needs all."""
_CERTIFICATE, _NAMES = "x509_pem_cert", "x509_subject_alternative_name"
"""gRPC's names, in what it knows of a connection, for a peer's certificate and for the names in it."""


def by_connection(method: str, connection: Mapping[str, Iterable[bytes]]) -> Caller:
    """The caller of a method, `/package.Service/Method`; one that shows no certificate was asked for none.

    Raises:
        NotPermitted: its certificate is of a role that may not call the service.
    """
    if _CERTIFICATE not in connection:
        return UNASKED
    shown = sorted(each.decode(errors="replace") for each in connection.get(_NAMES, ()))
    service = method.split("/")[1].rpartition(".")[2]
    allowed = _CALLERS.get(service, frozenset())
    if found := next((name for name in shown if name in allowed), None):
        return Caller(found)
    raise NotPermitted(
        f"{service} is called by {' or '.join(sorted(allowed)) or 'nobody'}, and the certificate names "
        f"{', '.join(shown) or 'no role'}"
    )


def require_right(method: str, holder: Caller) -> None:
    """Refuses a method that needs more than the right of who has shown a token.

    Raises:
        NotPermitted: it does.
    """
    name = method.rpartition("/")[2]
    needed = _RIGHTS.get(name, Right.ADMIN)
    if holder.right < needed:
        shown = holder.name or "this token"
        raise NotPermitted(f"{name} needs the right {needed.word!r}, and {shown} has {holder.right.word!r}")


def right_named(word: str) -> Right:
    """The right of that name.

    Raises:
        BadInput: there is none.
    """
    try:
        return Right[word.upper()]
    except KeyError:
        names = ", ".join(each.word for each in Right)
        raise BadInput(f"{word!r} is no right: write one of {names}") from None
