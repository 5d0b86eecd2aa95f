"""Every RPC of the contract, asked for by everybody who has no right to it over real connections: all are refused, and
no method of a service is entered. The tables here are written out, so that a new RPC has to be added to them.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from authority import Authority

from orchestrator.serving.dialing import orchestrator_at
from warpsmith import service, v1
from warpsmith.errors import NotPermitted, ServiceFault, TokenRefused
from warpsmith.settings import Settings
from warpsmith.transport import Tls

ROLES = ("client", "orchestrator", "reasoning", "synthesis", "compile", "correctness", "benchmark", "stranger")
CALLERS = {
    "reasoning": {"orchestrator"},
    "synthesis": {"orchestrator"},
    "compile": {"orchestrator"},
    "correctness": {"orchestrator"},
    "benchmark": {"orchestrator", "correctness"},
    "optimization": {"orchestrator", "client"},
}
"""Service → roles whose certificate it lets in."""
READ = {"GetRun", "ListRuns", "ListTrials", "WatchRun", "ExportBest", "DescribeQueue", "GetSigningKey"}
RUN = {*READ, "CreateRun", "CancelRun", "ResumeRun"}
TOKENS = {"correct-horse-battery read ann": READ, "correct-horse-battery run ann": RUN, "correct-horse-battery": RUN}
"""Line of a token's file → what its holder may ask for; the last one may do all."""
AT_ONCE = service.Patience(attempts=1, deadline_seconds=20)


class Contract:
    """A service of the contract, of which all methods answer with nothing and say that they were entered."""

    def __init__(self, name: str) -> None:
        self._grpc = importlib.import_module(f"warpsmith.v1.{name}_service_pb2_grpc")
        module = importlib.import_module(f"warpsmith.v1.{name}_service_pb2")
        (described,) = module.DESCRIPTOR.services_by_name.values()
        self.methods = {each.name: each for each in described.methods}
        self._module, self._name = module, described.name
        self.entered: list[str] = []

    @property
    def add(self) -> Any:
        return getattr(self._grpc, f"add_{self._name}Servicer_to_server")

    @property
    def stub(self) -> Any:
        return getattr(self._grpc, f"{self._name}Stub")

    def servicer(self) -> Any:
        made = {name: self._method(name) for name in self.methods}
        return type("Every", (getattr(self._grpc, f"{self._name}Servicer"),), made)()

    def _method(self, name: str) -> Any:
        response = getattr(self._module, self.methods[name].output_type.name)

        def answer(_: object, request: object, context: object) -> Any:
            del request, context
            self.entered.append(name)
            return response()

        async def stream(_: object, request: object, context: object) -> AsyncIterator[Any]:
            yield answer(_, request, context)

        return stream if self.methods[name].server_streaming else answer

    def call(self, client: Any, name: str) -> None:
        """Calls a method with an empty message."""
        replies = getattr(client, name)(getattr(self._module, self.methods[name].input_type.name)())
        if self.methods[name].server_streaming:
            list(replies)


@contextmanager
def served(contract: Contract, settings: Settings) -> Iterator[str]:
    running = service.start("test", contract.add, contract.servicer(), settings)
    yield f"127.0.0.1:{running.port}"
    running.stop()


def test_every_service_of_the_contract_is_in_the_table() -> None:
    names = {each.name for each in pkgutil.iter_modules(v1.__path__)}
    assert {name.removesuffix("_service_pb2") for name in names if name.endswith("_service_pb2")} == set(CALLERS)


@pytest.mark.parametrize("name", CALLERS)
def test_every_rpc_is_refused_to_each_role_that_has_no_business_there(name: str, tmp_path: Path) -> None:
    contract, authority = Contract(name), Authority("ours")
    own = "orchestrator" if name == "optimization" else name
    settings = Settings(port=0, drain_seconds=0.1, tls=authority.issue(tmp_path / "server", own))

    def client(address: str, tls: Tls | None) -> Any:
        return service.dial(contract.stub, address, AT_ONCE, tls=tls, role=own)

    with served(contract, settings) as address:
        for role in ROLES:
            caller = client(address, authority.issue(tmp_path / role, role))
            for method in contract.methods:
                contract.entered.clear()
                if role in CALLERS[name]:
                    contract.call(caller, method)
                    assert contract.entered == [method]
                    continue
                with pytest.raises(NotPermitted):
                    contract.call(caller, method)
                assert contract.entered == []
        strangers = Authority("another").issue(tmp_path / "other", "orchestrator")
        for tls in (None, strangers):
            for method in contract.methods:
                with pytest.raises(ServiceFault):
                    contract.call(client(address, tls), method)
        assert contract.entered == []


def test_every_rpc_of_an_orchestrator_is_refused_to_each_token_without_the_right(tmp_path: Path) -> None:
    contract = Contract("optimization")
    assert set(contract.methods) == RUN
    known, shown = tmp_path / "known", tmp_path / "shown"
    known.write_text("\n".join(TOKENS) + "\n")
    with served(contract, Settings(port=0, drain_seconds=0.1, token_file=known)) as address:
        for line, may in TOKENS.items():
            known.write_text(line + "\n")
            shown.write_text(line.split()[0] + "\n")
            with served(contract, Settings(port=0, drain_seconds=0.1, token_file=known)) as place:
                client = orchestrator_at(place, None, shown)
                for method in contract.methods:
                    contract.entered.clear()
                    if method in may:
                        contract.call(client, method)
                        assert contract.entered == [method]
                        continue
                    with pytest.raises(NotPermitted, match=f"^{method} needs the right 'run'"):
                        contract.call(client, method)
                    assert contract.entered == []
        contract.entered.clear()
        shown.write_text("staple-correct-horse-battery\n")
        for file in (None, shown):
            for method in contract.methods:
                with pytest.raises(TokenRefused):
                    contract.call(orchestrator_at(address, None, file), method)
        assert contract.entered == []
