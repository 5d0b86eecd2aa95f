"""Tokens: who gets through, who does not, what a new one changes, and that none is sent in plain text."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
from authority import Authority

from orchestrator.serving.dialing import orchestrator_at
from warpsmith import permissions, service, tokens
from warpsmith.errors import BadInput, NotPermitted, ServiceFault, TokenRefused
from warpsmith.permissions import Right
from warpsmith.service import handlers
from warpsmith.settings import Settings, read
from warpsmith.transport import channel
from warpsmith.v1 import optimization_service_pb2 as api
from warpsmith.v1 import optimization_service_pb2_grpc as api_grpc

TOKEN, OTHER = "correct-horse-battery", "staple-correct-horse-battery"


class Answering(api_grpc.OptimizationServiceServicer):
    """Knows one run, and notes who calls."""

    def __init__(self) -> None:
        self.callers: list[permissions.Caller] = []

    def CreateRun(self, request: api.CreateRunRequest, context: object) -> api.CreateRunResponse:
        del request, context
        return api.CreateRunResponse()

    def CancelRun(self, request: api.CancelRunRequest, context: object) -> api.CancelRunResponse:
        del request, context
        return api.CancelRunResponse()

    def ListRuns(self, request: api.ListRunsRequest, context: handlers.Call) -> api.ListRunsResponse:
        del request
        self.callers.append(context.caller)
        response = api.ListRunsResponse()
        response.runs.add(id="20260101-000000-abcdef")
        return response

    async def WatchRun(self, request: api.WatchRunRequest, context: object) -> AsyncIterator[api.WatchRunResponse]:
        del request, context
        yield api.WatchRunResponse()


def written(file: Path, *lines: str) -> Path:
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.fixture
def held(tmp_path: Path) -> Path:
    return written(tmp_path / "held", TOKEN)


@pytest.fixture
def answering() -> Answering:
    return Answering()


@pytest.fixture
def address(held: Path, answering: Answering) -> Iterator[str]:
    settings = Settings(port=0, drain_seconds=0.1, token_file=held)
    running = service.start("test", api_grpc.add_OptimizationServiceServicer_to_server, answering, settings)
    yield f"127.0.0.1:{running.port}"
    running.stop()


def listed(address: str, file: Path | None) -> int:
    return len(orchestrator_at(address, None, file).ListRuns(api.ListRunsRequest()).runs)


def test_the_holder_of_the_token_gets_through_in_calls_and_streams(address: str, held: Path) -> None:
    client = orchestrator_at(address, None, held)
    assert len(client.ListRuns(api.ListRunsRequest()).runs) == 1
    assert len(list(client.WatchRun(api.WatchRunRequest(run_id="r1")))) == 1


def test_no_token_and_a_wrong_one_are_refused_with_what_to_do(address: str, tmp_path: Path) -> None:
    for file in (None, written(tmp_path / "own", OTHER)):
        client = orchestrator_at(address, None, file)
        with pytest.raises(TokenRefused, match=r"^this orchestrator asks for a token.*set WARPSMITH_TOKEN_FILE$"):
            client.ListRuns(api.ListRunsRequest())
        with pytest.raises(TokenRefused):
            list(client.WatchRun(api.WatchRunRequest(run_id="r1")))


@pytest.mark.parametrize("header", [TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN} ", f"Bearer {TOKEN[:-1]}", "Bearer "])
def test_only_the_whole_token_as_a_bearer_counts(address: str, header: str) -> None:
    with channel(address, (), None, "") as plain:
        call = api_grpc.OptimizationServiceStub(plain).ListRuns
        with pytest.raises(grpc.RpcError) as caught:
            call(api.ListRunsRequest(), metadata=(("authorization", header),), timeout=10)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]
        with pytest.raises(grpc.RpcError):
            call(api.ListRunsRequest(), metadata=[("authorization", f"Bearer {each}") for each in (TOKEN, OTHER)])


def test_reflection_asks_for_the_token_too_and_health_does_not(address: str) -> None:
    assert service.wait_until_healthy(address, 5)
    with channel(address, (), None, "") as plain:
        ask = plain.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        with pytest.raises(grpc.RpcError) as caught:
            list(ask(iter([b""]), timeout=10))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]


def test_a_token_is_replaced_without_a_restart_through_a_time_when_both_count(
    address: str, held: Path, tmp_path: Path
) -> None:
    old, new = written(tmp_path / "old", TOKEN), written(tmp_path / "new", OTHER)
    written(held, OTHER, TOKEN)
    assert listed(address, old) == listed(address, new) == 1
    written(held, OTHER)
    with pytest.raises(TokenRefused):
        listed(address, old)
    held.unlink()
    assert listed(address, new) == 1, "a file that is just being replaced leaves the last token in force"


@pytest.mark.parametrize("text", ["", "\n", "short\n", "two words that are long enough\n", "ünïcödé-and-long-enough\n"])
def test_a_file_without_a_usable_token_is_named_at_the_start(tmp_path: Path, text: str) -> None:
    file = tmp_path / "token"
    file.write_text(text)
    with pytest.raises(BadInput, match=rf"^{file}: .*; see WARPSMITH_TOKEN_FILE$"):
        service.start("test", lambda *_: None, Answering(), Settings(port=0, token_file=file))
    with pytest.raises(BadInput, match="cannot be read"):
        orchestrator_at("127.0.0.1:1", None, tmp_path / "none")


RIGHTS = {
    "ListRuns": api.ListRunsRequest(),
    "CreateRun": api.CreateRunRequest(),
    "CancelRun": api.CancelRunRequest(run_id="r1"),
}


@pytest.mark.parametrize(("line", "may"), [("read ann", 1), ("run ann", 3), ("admin", 3), ("", 3)])
def test_a_tokens_right_says_which_methods_it_may_call(address: str, held: Path, line: str, may: int) -> None:
    client = orchestrator_at(address, None, written(held, f"{TOKEN} {line}"))
    for number, (method, request) in enumerate(RIGHTS.items()):
        call = getattr(client, method)
        if number < may:
            call(request)
        else:
            with pytest.raises(NotPermitted, match=f"^{method} needs the right 'run', and ann has 'read'$"):
                call(request)


def test_a_method_without_a_right_of_its_own_needs_every_right() -> None:
    with pytest.raises(NotPermitted, match="needs the right 'admin'"):
        permissions.require_right("/warpsmith.v1.OptimizationService/New", permissions.Caller("ann", Right.RUN))


def test_every_method_of_the_contract_has_a_right() -> None:
    (described,) = api.DESCRIPTOR.services_by_name.values()
    assert {each.name for each in described.methods} == set(permissions._RIGHTS)


def test_a_method_knows_who_calls_it(address: str, held: Path, answering: Answering) -> None:
    listed(address, written(held, f"{TOKEN} run ann vision"))
    assert answering.callers == [permissions.Caller("ann", Right.RUN, "vision")]


@pytest.mark.parametrize("line", [f"{'t' * 32} write", f"{'t' * 32} run ann vision more"])
def test_a_line_that_says_something_else_is_refused(tmp_path: Path, line: str) -> None:
    with pytest.raises(BadInput, match=r"write one of read, run, admin|a line is TOKEN"):
        tokens.TokenFile(written(tmp_path / "held", line))


def test_a_token_goes_to_another_machine_by_tls_alone_unless_asked(held: Path) -> None:
    for address in ("orchestrator:50051", "dns:///orchestrator:50051", "10.0.0.1:50051"):
        with pytest.raises(BadInput, match=f"^{address}: a token is not sent there in plain text: write https://"):
            orchestrator_at(address, None, held)
    for address in ("127.0.0.1:1", "localhost:1", "[::1]:1", "https://example.org", "http://orchestrator:50051"):
        orchestrator_at(address, None, held)


@pytest.mark.parametrize(
    "place", ["https://", "https://host:port", "https://me@host", "https://host/path", "http://a b"]
)
def test_an_address_with_more_than_a_host_and_a_port_is_refused(place: str) -> None:
    with pytest.raises(BadInput, match=r"write https?://HOST or https?://HOST:PORT"):
        orchestrator_at(place)


def test_the_setting_is_read() -> None:
    assert read({}).token_file is None
    assert read({"WARPSMITH_TOKEN_FILE": "/a/token"}).token_file == Path("/a/token")


@pytest.fixture
def ingress(held: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Path]]:
    """What stands at the edge of a cluster: TLS for a host, and no certificate asked of callers."""
    tls = Authority("public").issue(tmp_path / "edge", "localhost")
    shown = [(tls.key.read_bytes(), tls.certificate.read_bytes())]
    monkeypatch.setattr("warpsmith.transport.server_credentials", lambda _: grpc.ssl_server_credentials(shown))
    settings = Settings(port=0, tls=tls, token_file=held, drain_seconds=0.1)
    add = api_grpc.add_OptimizationServiceServicer_to_server
    running = service.start("test", add, Answering(), settings)
    yield f"https://localhost:{running.port}", tls.authority
    running.stop()


def command(place: str, authority: Path, token: Path | None) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": str(authority),
        "WARPSMITH_TOKEN_FILE": str(token or ""),
    }
    arguments = [sys.executable, "-c", "from orchestrator.commands.cli import main; main()", "runs", "--server", place]
    return subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_a_command_reaches_an_orchestrator_behind_tls_with_a_token(ingress: tuple[str, Path], held: Path) -> None:
    said = command(*ingress, held)
    assert (said.returncode, said.stderr) == (0, "")
    assert "20260101-000000-abcdef" in said.stdout


def test_a_command_without_the_token_says_what_is_missing(ingress: tuple[str, Path]) -> None:
    said = command(*ingress, None)
    assert said.returncode == 2
    assert said.stderr.startswith("warpsmith: this orchestrator asks for a token")
    assert len(said.stderr.splitlines()) == 1


def test_a_certificate_that_no_known_authority_has_signed_is_refused(
    ingress: tuple[str, Path], held: Path, tmp_path: Path
) -> None:
    stranger = Authority("theirs").issue(tmp_path / "stranger", "localhost")
    said = command(ingress[0], stranger.authority, held)
    assert said.returncode != 0
    assert "CERTIFICATE_VERIFY_FAILED" in said.stderr
    assert "\nwarpsmith: ListRuns: UNAVAILABLE" in said.stderr
    with pytest.raises(ServiceFault):
        listed(ingress[0].replace("https", "http"), held)
