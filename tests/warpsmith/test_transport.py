"""Mutual TLS with certificates made on the spot: who gets through, who does not, and what a renewal changes."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from authority import Authority

from warpsmith import permissions, service
from warpsmith.errors import BadInput, NotPermitted, ServiceFault
from warpsmith.settings import Settings, read
from warpsmith.transport import Tls
from warpsmith.v1 import optimization_service_pb2 as api
from warpsmith.v1 import optimization_service_pb2_grpc as api_grpc


class Answering(api_grpc.OptimizationServiceServicer):
    """Gives every run that is asked for."""

    def GetRun(self, request: api.GetRunRequest, context: object) -> api.GetRunResponse:
        del context
        response = api.GetRunResponse()
        response.run.id = request.run_id
        return response

    async def WatchRun(self, request: api.WatchRunRequest, context: object) -> AsyncIterator[api.WatchRunResponse]:
        del request, context
        for number in (1, 2):
            response = api.WatchRunResponse()
            response.event.number = number
            yield response


@pytest.fixture
def authority() -> Authority:
    return Authority("ours")


@pytest.fixture
def serving(authority: Authority, tmp_path: Path) -> Iterator[service.Serving]:
    settings = Settings(
        port=0, drain_seconds=0.1, health_port=0, tls=authority.issue(tmp_path / "server", "orchestrator")
    )
    running = service.start("test", api_grpc.add_OptimizationServiceServicer_to_server, Answering(), settings)
    yield running
    running.stop()


def stub(serving: service.Serving, tls: Tls | None, role: str = "orchestrator") -> api_grpc.OptimizationServiceStub:
    patience = service.Patience(attempts=1, deadline_seconds=5)
    return service.dial(api_grpc.OptimizationServiceStub, f"127.0.0.1:{serving.port}", patience, tls=tls, role=role)


def answers(client: api_grpc.OptimizationServiceStub) -> bool:
    return client.GetRun(api.GetRunRequest(run_id="r1")).run.id == "r1"


def test_two_certificates_of_one_authority_meet(serving: service.Serving, authority: Authority, tmp_path: Path) -> None:
    client = stub(serving, authority.issue(tmp_path / "client", "client"))
    assert answers(client)
    assert [each.event.number for each in client.WatchRun(api.WatchRunRequest(run_id="r1"))] == [1, 2]


@pytest.mark.parametrize("role", ["reasoning", "synthesis", "compile", "correctness", "benchmark", "stranger"])
def test_a_certificate_of_another_role_may_not_call(
    serving: service.Serving, authority: Authority, tmp_path: Path, role: str
) -> None:
    client = stub(serving, authority.issue(tmp_path / "client", role))
    said = f"OptimizationService is called by client or orchestrator, and the certificate names .*{role}"
    with pytest.raises(NotPermitted, match=said):
        answers(client)
    with pytest.raises(NotPermitted, match=said):
        list(client.WatchRun(api.WatchRunRequest(run_id="r1")))


def test_services_are_called_by_those_that_need_them_and_no_other() -> None:
    roles = ("client", "orchestrator", "reasoning", "synthesis", "compile", "correctness", "benchmark")
    may: dict[str, set[str]] = {}
    for service_name in permissions._CALLERS:
        for role in roles:
            shown = {"x509_pem_cert": [b"PEM"], "x509_subject_alternative_name": [role.encode()]}
            with contextlib.suppress(NotPermitted):
                permissions.by_connection(f"/warpsmith.v1.{service_name}/Any", shown)
                may.setdefault(service_name, set()).add(role)
    assert may == {
        **{f"{each}Service": {"orchestrator"} for each in ("Reasoning", "Synthesis", "Compile", "Correctness")},
        "BenchmarkService": {"orchestrator", "correctness"},
        "OptimizationService": {"orchestrator", "client"},
    }


def test_a_client_without_a_certificate_is_refused(serving: service.Serving) -> None:
    with pytest.raises(ServiceFault, match="UNAVAILABLE"):
        answers(stub(serving, None))


def test_a_client_of_another_authority_is_refused(
    serving: service.Serving, authority: Authority, tmp_path: Path
) -> None:
    stranger = Authority("theirs").issue(tmp_path / "client", "client", trusted=authority.certificate)
    with pytest.raises(ServiceFault, match="UNAVAILABLE"):
        answers(stub(serving, stranger))


def test_a_server_of_another_authority_is_refused(
    serving: service.Serving, authority: Authority, tmp_path: Path
) -> None:
    wary = authority.issue(tmp_path / "client", "client", trusted=Authority("theirs").certificate)
    with pytest.raises(ServiceFault, match="CERTIFICATE_VERIFY_FAILED"):
        answers(stub(serving, wary))


def test_a_server_of_another_role_is_refused(serving: service.Serving, authority: Authority, tmp_path: Path) -> None:
    with pytest.raises(ServiceFault, match="UNAVAILABLE"):
        answers(stub(serving, authority.issue(tmp_path / "client", "client"), role="benchmark"))


def test_renewed_certificates_serve_without_a_restart(
    serving: service.Serving, authority: Authority, tmp_path: Path
) -> None:
    client = stub(serving, authority.issue(tmp_path / "client", "client"))
    assert answers(client)
    renewed = Authority("next year's")
    renewed.issue(tmp_path / "server", "orchestrator")
    with pytest.raises(ServiceFault, match="UNAVAILABLE"):
        answers(stub(serving, authority.issue(tmp_path / "late", "client")))
    assert answers(client), "a connection that stands is not cut"
    renewed.issue(tmp_path / "client", "client")
    assert answers(client), "the next call connects with the client's new certificate"


def test_files_that_are_half_replaced_leave_the_last_ones_in_force(
    serving: service.Serving, authority: Authority, tmp_path: Path
) -> None:
    tls = authority.issue(tmp_path / "client", "client")
    client = stub(serving, tls)
    tls.key.unlink()
    assert answers(client)


def test_the_health_port_stays_plain_text(authority: Authority, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = Settings(port=0, health_port=port, tls=authority.issue(tmp_path / "server", "orchestrator"))
    running = service.start("test", api_grpc.add_OptimizationServiceServicer_to_server, Answering(), settings)
    try:
        assert service.wait_until_healthy(f"127.0.0.1:{port}", 5)
        assert not service.wait_until_healthy(f"127.0.0.1:{running.port}", 1)
    finally:
        running.stop()


def test_a_setting_that_is_missing_or_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="set WARPSMITH_TLS_KEY, WARPSMITH_TLS_CA too"):
        read({"WARPSMITH_TLS_CERTIFICATE": "a.crt"})
    names = ("CERTIFICATE", "KEY", "CA")
    settings = read({f"WARPSMITH_TLS_{name}": str(tmp_path / name) for name in names})
    assert settings.tls is not None
    with pytest.raises(BadInput, match=r"CERTIFICATE: cannot be read \(No such file"):
        settings.tls.read()
