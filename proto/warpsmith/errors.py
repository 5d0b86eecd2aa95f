"""The one exception tree, and the one place where it meets gRPC status codes.

    WarpsmithError
    ├── BadInput             the user's file, setting or request is wrong; says what to do
    │   ├── IllegalMove      a move that does not apply to this plan
    │   ├── UnknownPlugin    no plugin of that name; says which are installed
    │   ├── TokenRefused     a server asks for a token, and the call shows none that it knows
    │   └── NotPermitted     who calls is known, and may not do this
    ├── NotFound             a run, trial or artifact that does not exist
    ├── LimitReached         a client, or a project, has all that it may have for now
    └── Infrastructure       ours to mend; never a candidate's score
        ├── ArchiveFault     what was found cannot be kept: a full disk, a lost database
        │   └── RunLost      a run is another orchestrator's to go on with, now or at the next start
        │       └── LeaseLost  the owner of a device says so: work for it was ended, or is refused
        ├── JailUnavailable  no way to confine untrusted code on this machine
        ├── ServiceFault     a peer did not answer, or answered with an error
        │   ├── ServiceGone  nothing answers there, or not any more
        │   │   ├── ServiceDied  it ended in the midst of the work that it was asked for
        │   │   └── DeviceQuarantined  its GPU has failed a test of itself
        │   ├── ServiceLate  no answer came in time: it is stopped, cut off or overrun
        │   ├── MethodMissing  it is of a version that has no such method
        │   └── ModelFault   a language model gave nothing that can be used; `reason` says why
        └── WorkerFault      a jailed worker process failed its call
            ├── WorkerTimeout  no answer by the deadline; the worker was killed
            ├── WorkerCrashed  the process ended
            │   └── WorkerKilled  somebody else ended it
            └── WorkerRaised   the code inside raised

A bad kernel is not an exception: outcomes such as "does not compile" are values in the replies.
"""

from __future__ import annotations

from enum import StrEnum

import grpc


class WarpsmithError(Exception):
    """Root of everything that Warpsmith raises on purpose."""

    model_tokens: int = 0
    """Tokens that a language model took before this was raised, which a budget counts all the same."""


class BadInput(WarpsmithError):
    """What the user gave cannot be used. The message names the file or setting and the remedy."""


class IllegalMove(BadInput):
    """A move that does not apply to the plan it was given."""


class UnknownPlugin(BadInput):
    """No plugin of that name is installed for the role."""


class TokenRefused(BadInput):
    """A server asks for a token, and the call shows none that it knows."""


class NotPermitted(BadInput):
    """Who calls is known, by certificate or token, and may not do this."""


class NotFound(WarpsmithError):
    """The named run, trial or artifact does not exist."""


class LimitReached(WarpsmithError):
    """A client, or a project, has all that it may have; `retry_seconds` says when to ask again, 0 for not at all."""

    def __init__(self, message: str, *, retry_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds


class Infrastructure(WarpsmithError):
    """A fault of a machine, a process or a service: never charged to a candidate."""


class ArchiveFault(Infrastructure):
    """What a run found cannot be kept or read: a full disk, a directory without rights, a lost database."""


class RunLost(ArchiveFault):
    """A run is no longer this orchestrator's: another one has taken it up, or one that starts later will."""


class LeaseLost(RunLost):
    """Work for a device is no longer its asker's: the run is another's by now, the same was asked for again, or nobody
    waits for it. It was ended, or is refused."""


class JailUnavailable(Infrastructure):
    """No rung of the jail works here, and the input was not declared trusted."""


class ServiceFault(Infrastructure):
    """A peer service did not answer in time or answered with an error."""


class ServiceGone(ServiceFault):
    """Nothing answers at a peer's address, or it went away in the midst of a call: another try may find it again."""


class ServiceDied(ServiceGone):
    """A peer had begun what it was asked for, and ended in the midst of it: what it was asked for may be why."""


class ServiceLate(ServiceFault):
    """A peer gave no answer in time. It may be stopped for a while, or what it was asked takes too long."""


class MethodMissing(ServiceFault):
    """A peer is of a version that has no such method; another try would hear the same."""


class DeviceQuarantined(ServiceGone):
    """The GPU of a benchmark service has failed a test of itself: another one, or its successor, may answer."""


class ModelReason(StrEnum):
    """Why a language model's server gave no answer; also a label of metrics."""

    SERVER_DOWN = "server_down"
    """Nothing answers at the address, or the connection broke."""
    WRONG_URL = "wrong_url"
    """Something answers there, but it does not know the API's paths."""
    WRONG_MODEL = "wrong_model"
    """The server has no model of that name."""
    KEY_REFUSED = "key_refused"
    """401 or 403."""
    RATE_LIMITED = "rate_limited"
    """429."""
    SERVER_ERROR = "server_error"
    """5xx, or an error in the midst of an answer."""
    REQUEST_REFUSED = "request_refused"
    """The server does not accept this request: a response format that it does not know, for example."""
    CONTEXT_TOO_LONG = "context_too_long"
    """The prompt and the room for the answer are more than the model takes."""
    FIRST_TOKEN_LATE = "first_token_late"
    """No answer began, or it stalled, for longer than the settings allow."""
    ANSWER_LATE = "answer_late"
    """The answer was not whole in the time that the settings allow."""
    TOO_LARGE = "too_large"
    """The answer is larger than any that can be meant."""
    NOT_THE_API = "not_the_api"
    """What came is not what the API says: broken events, no end, wrong types."""


MODEL_AWAY = frozenset({
    ModelReason.SERVER_DOWN, ModelReason.SERVER_ERROR, ModelReason.RATE_LIMITED, ModelReason.FIRST_TOKEN_LATE,
    ModelReason.WRONG_URL, ModelReason.WRONG_MODEL, ModelReason.KEY_REFUSED,
})  # fmt: skip
"""Reasons that are the server's or its settings': the same question may be answered when it is back."""


class ModelFault(ServiceFault):
    """A language model's server gave no answer; `retry_after_seconds` is its own wish, 0 for none."""

    def __init__(self, reason: ModelReason, message: str, *, retry_after_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds


class WorkerFault(Infrastructure):
    """A jailed worker process failed its call."""


class WorkerTimeout(WorkerFault):
    """A worker gave no answer by its deadline and was killed with all its descendants.

    `was_stopped`: its own process stood still then, by a signal of somebody else's.
    """

    def __init__(self, message: str, *, was_stopped: bool = False) -> None:
        super().__init__(message)
        self.was_stopped = was_stopped


class WorkerCrashed(WorkerFault):
    """A worker process ended during a call.

    `signal_number` or `exit_code` says how; `stderr_tail` holds the last lines it printed; `method`: what it was at;
    `by_itself`: it ended before anybody here had it ended.
    """

    def __init__(
        self,
        message: str,
        *,
        signal_number: int | None = None,
        exit_code: int | None = None,
        stderr_tail: str = "",
        method: str = "",
        by_itself: bool = False,
    ) -> None:
        super().__init__(message)
        self.signal_number = signal_number
        self.by_itself = by_itself
        self.method = method
        self.exit_code = exit_code
        self.stderr_tail = stderr_tail


class WorkerKilled(WorkerCrashed):
    """Somebody else ended a worker that had a program in it: no limit was passed, and memory was not short."""


class WorkerRaised(WorkerFault):
    """Code inside a worker raised: `kind` is the exception's class name, `trace` a trimmed traceback."""

    def __init__(self, message: str, *, kind: str = "", trace: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.trace = trace


_STATUS: tuple[tuple[type[WarpsmithError], grpc.StatusCode], ...] = (
    (IllegalMove, grpc.StatusCode.FAILED_PRECONDITION),
    (TokenRefused, grpc.StatusCode.UNAUTHENTICATED),
    (NotPermitted, grpc.StatusCode.PERMISSION_DENIED),
    (BadInput, grpc.StatusCode.INVALID_ARGUMENT),
    (NotFound, grpc.StatusCode.NOT_FOUND),
    (LimitReached, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (WorkerTimeout, grpc.StatusCode.ABORTED),
    (Infrastructure, grpc.StatusCode.UNAVAILABLE),
    (WarpsmithError, grpc.StatusCode.INTERNAL),
)

_RAISED: dict[grpc.StatusCode, type[WarpsmithError]] = {
    grpc.StatusCode.FAILED_PRECONDITION: IllegalMove,
    grpc.StatusCode.INVALID_ARGUMENT: BadInput,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.UNAUTHENTICATED: TokenRefused,
    grpc.StatusCode.PERMISSION_DENIED: NotPermitted,
}

_BY_KIND: dict[str, type[WarpsmithError]] = {
    each.__name__: each for each in (DeviceQuarantined, ServiceDied, ServiceGone, LeaseLost, LimitReached)
}
"""Exceptions that a code alone does not tell from others."""

_CUT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
"""Codes of gRPC's own for a connection that cannot be made, or broke, or a server that ended."""


def to_status(error: WarpsmithError) -> grpc.StatusCode:
    """The gRPC status code under which `error` crosses to another service."""
    return next(code for kind, code in _STATUS if isinstance(error, kind))


def from_status(code: grpc.StatusCode, message: str, kind: str = "") -> WarpsmithError:
    """The exception that a caller raises for a status it received; anything unlisted is a ServiceFault.

    `kind` names the exception that the servicer raised; without one, the call has not reached it, or did not end.
    """
    if known := _BY_KIND.get(kind):
        return known(message)
    if not kind and code in _CUT:
        return ServiceGone(message)
    if not kind and code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return ServiceLate(message)
    if not kind and code is grpc.StatusCode.UNIMPLEMENTED:
        return MethodMissing(f"{message}; the service is of an earlier version, or serves another role")
    if kind == ModelFault.__name__:
        return ModelFault(ModelReason.SERVER_DOWN, message)
    return _RAISED.get(code, ServiceFault)(message)
