"""Signed tokens of an issuer: which count, for what, why others do not, and what holds while the issuer is away."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from jwt.algorithms import RSAAlgorithm

from orchestrator.serving.dialing import orchestrator_at
from warpsmith import permissions, service
from warpsmith.errors import BadInput, NotPermitted, ServiceFault, TokenRefused
from warpsmith.permissions import Caller, Right
from warpsmith.service import oidc
from warpsmith.settings import OidcSettings, Settings, read
from warpsmith.transport import channel
from warpsmith.v1 import optimization_service_pb2 as api
from warpsmith.v1 import optimization_service_pb2_grpc as api_grpc

AUDIENCE, LINE = "warpsmith", "correct-horse-battery"


class IdentityProvider:
    """A company's login: keys of its own, and what it publishes of them."""

    def __init__(self) -> None:
        self.keys: dict[str, rsa.RSAPrivateKey] = {}
        self.asked: list[str] = []
        self.is_silent = False
        self.named = ""
        """Issuer in its document, where that is not its address."""
        owner = self

        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                owner.asked.append(self.path)
                self.send_response(503 if owner.is_silent else 200)
                self.end_headers()
                self.wfile.write(json.dumps(owner.page(self.path)).encode())

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.add_key("first")

    def page(self, path: str) -> Mapping[str, Any]:
        if path == oidc.DISCOVERY:
            return {"issuer": self.named or self.address, "jwks_uri": f"{self.address}/keys"}
        public = {name: RSAAlgorithm.to_jwk(key.public_key(), as_dict=True) for name, key in self.keys.items()}
        return {"keys": [{**jwk, "kid": name, "use": "sig", "alg": "RS256"} for name, jwk in public.items()]}

    def add_key(self, name: str) -> None:
        self.keys[name] = rsa.generate_private_key(public_exponent=65537, key_size=2048)

    def token(self, key: str = "first", signed_by: rsa.RSAPrivateKey | None = None, **claims: Any) -> str:
        whole = {
            "iss": self.address,
            "aud": AUDIENCE,
            "sub": "ann",
            "exp": time.time() + 600,
            "roles": ["run"],
        } | claims
        kept = {name: value for name, value in whole.items() if value is not None}
        return jwt.encode(kept, signed_by or self.keys[key], "RS256", headers={"kid": key})

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Answering(api_grpc.OptimizationServiceServicer):
    """Notes who calls."""

    def __init__(self) -> None:
        self.callers: list[permissions.Caller] = []

    def _note(self, context: Any) -> None:
        self.callers.append(context.caller)

    def CreateRun(self, request: api.CreateRunRequest, context: object) -> api.CreateRunResponse:
        del request
        self._note(context)
        return api.CreateRunResponse()

    def ListRuns(self, request: api.ListRunsRequest, context: object) -> api.ListRunsResponse:
        del request
        self._note(context)
        return api.ListRunsResponse()


@pytest.fixture
def provider() -> Iterator[IdentityProvider]:
    made = IdentityProvider()
    yield made
    made.close()


@pytest.fixture
def answering() -> Answering:
    return Answering()


def serving(settings: Settings, answering: Answering) -> service.Serving:
    return service.start("test", api_grpc.add_OptimizationServiceServicer_to_server, answering, settings)


@pytest.fixture
def address(provider: IdentityProvider, answering: Answering, tmp_path: Path) -> Iterator[str]:
    (tmp_path / "lines").write_text(LINE + "\n")
    told = OidcSettings(provider.address, AUDIENCE)
    running = serving(Settings(port=0, drain_seconds=0.1, token_file=tmp_path / "lines", oidc=told), answering)
    yield f"127.0.0.1:{running.port}"
    running.stop()


def client(address: str, tmp_path: Path, token: str) -> api_grpc.OptimizationServiceStub:
    (tmp_path / "shown").write_text(token + "\n")
    return orchestrator_at(address, None, tmp_path / "shown")


def refusal(address: str, tmp_path: Path, token: str) -> str:
    """Why a token is refused, which never quotes it."""
    with pytest.raises((TokenRefused, NotPermitted)) as caught:
        client(address, tmp_path, token).ListRuns(api.ListRunsRequest())
    assert not [part for part in token.split(".") if part and part in str(caught.value)]
    return str(caught.value)


def test_a_signed_token_says_who_calls_with_which_right_and_for_which_project(
    address: str, provider: IdentityProvider, answering: Answering, tmp_path: Path
) -> None:
    client(address, tmp_path, provider.token(project="vision")).ListRuns(api.ListRunsRequest())
    client(address, tmp_path, provider.token(sub="root", roles=["read", "admin"])).CreateRun(api.CreateRunRequest())
    assert answering.callers == [Caller("ann", Right.RUN, "vision"), Caller("root", Right.ADMIN)]


@pytest.mark.parametrize(("role", "may"), [("read", False), ("run", True), ("admin", True)])
def test_the_right_is_looked_at_call_by_call(
    address: str, provider: IdentityProvider, tmp_path: Path, role: str, may: bool
) -> None:
    asks = client(address, tmp_path, provider.token(roles=role))
    asks.ListRuns(api.ListRunsRequest())
    if may:
        asks.CreateRun(api.CreateRunRequest())
    else:
        with pytest.raises(NotPermitted, match=r"^CreateRun needs the right 'run', and ann has 'read'$"):
            asks.CreateRun(api.CreateRunRequest())


def test_a_line_of_the_file_counts_beside_it(address: str, answering: Answering, tmp_path: Path) -> None:
    client(address, tmp_path, LINE).ListRuns(api.ListRunsRequest())
    assert answering.callers == [Caller("", Right.ADMIN)]


def test_a_refusal_says_why(address: str, provider: IdentityProvider, tmp_path: Path) -> None:
    now, stranger = time.time(), rsa.generate_private_key(public_exponent=65537, key_size=2048)
    said = {
        "expired: get a new one of http": provider.token(exp=now - 60),
        "not valid yet: its issuer's clock": provider.token(nbf=now + 60),
        "for another audience than warpsmith$": provider.token(aud="another"),
        "of another issuer than": provider.token(iss="https://elsewhere.example"),
        "with no key that http://127.0.0.1:.* publishes$": provider.token("second", stranger),
        "its signature is not right$": provider.token("first", stranger),
        "lacks the claim 'exp'$": provider.token(exp=None),
        "lacks the claim 'aud'$": provider.token(aud=None),
        "the token of ann has no role: its claim 'roles' names none of read, run, admin$": provider.token(
            roles=["dev"]
        ),
        "names nobody: its claim 'sub' is no text$": provider.token(sub=None),
        "names no single project": provider.token(project=["one", "two"]),
        "no line of this server's file, and no JWT": "a-word-that-is-long-enough",
    }
    for why, token in said.items():
        with pytest.raises(AssertionError, match=why):
            raise AssertionError(refusal(address, tmp_path, token))


def test_a_token_without_a_signature_or_by_a_shared_secret_is_refused(
    address: str, provider: IdentityProvider, tmp_path: Path
) -> None:
    claims = {"iss": provider.address, "aud": AUDIENCE, "sub": "ann", "exp": time.time() + 600, "roles": ["admin"]}
    headers = {"kid": "first"}
    shared = str(provider.page("/keys")["keys"][0]["n"])
    for token in (jwt.encode(claims, "", "none", headers), jwt.encode(claims, shared, "HS256", headers)):
        assert "signed in another way" in refusal(address, tmp_path, token)


def test_clocks_may_differ_by_the_leeway(address: str, provider: IdentityProvider, tmp_path: Path) -> None:
    now = time.time()
    client(address, tmp_path, provider.token(exp=now - 15, nbf=now + 15)).ListRuns(api.ListRunsRequest())


def test_a_new_key_is_found_and_unknown_ones_ask_the_issuer_once(
    address: str, provider: IdentityProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = time.monotonic()
    monkeypatch.setattr("jwt.jwks_client.time", SimpleNamespace(monotonic=lambda: clock))
    client(address, tmp_path, provider.token()).ListRuns(api.ListRunsRequest())
    asked = provider.asked.count("/keys")
    stranger = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    clock += oidc.REFRESH_SECONDS + 1
    for number in range(5):
        refusal(address, tmp_path, provider.token(f"made-up-{number}", stranger))
    assert provider.asked.count("/keys") == asked + 1
    provider.add_key("second")
    clock += oidc.REFRESH_SECONDS + 1
    client(address, tmp_path, provider.token("second")).ListRuns(api.ListRunsRequest())
    assert provider.asked.count("/keys") == asked + 2


def test_while_the_issuer_is_away_known_tokens_count_until_they_expire_and_new_ones_say_so(
    address: str, provider: IdentityProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    known, fresh = provider.token(exp=now + 600), provider.token(sub="bob")
    client(address, tmp_path, known).ListRuns(api.ListRunsRequest())
    provider.is_silent = True
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 3600)
    for module in ("jwk_set_cache", "jwks_client"):
        monkeypatch.setattr(f"jwt.{module}.time", later)
    with pytest.raises(ServiceFault, match=r"gives no keys .* cannot be verified now; try again later|in vain"):
        client(address, tmp_path, fresh).ListRuns(api.ListRunsRequest())
    client(address, tmp_path, known).ListRuns(api.ListRunsRequest())
    monkeypatch.setattr(oidc, "time", SimpleNamespace(monotonic=time.monotonic, time=lambda: now + 600 + 31))
    with pytest.raises(ServiceFault):
        client(address, tmp_path, known).ListRuns(api.ListRunsRequest())


def test_an_issuer_that_names_itself_otherwise_gives_no_keys(
    provider: IdentityProvider, answering: Answering, tmp_path: Path
) -> None:
    provider.named = "https://elsewhere.example"
    running = serving(Settings(port=0, drain_seconds=0.1, oidc=OidcSettings(provider.address, AUDIENCE)), answering)
    with pytest.raises(ServiceFault, match=r"is of another issuer|in vain"):
        client(f"127.0.0.1:{running.port}", tmp_path, provider.token()).ListRuns(api.ListRunsRequest())
    running.stop()


def test_reflection_asks_for_a_token_too(address: str, provider: IdentityProvider) -> None:
    with channel(address, (), None, "") as plain:
        ask = plain.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        with pytest.raises(grpc.RpcError) as caught:
            list(ask(iter([b""]), timeout=10, metadata=(("authorization", f"Bearer {provider.token(aud='other')}"),)))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]
        shown = (("authorization", f"Bearer {provider.token()}"),)
        list(ask(iter([b"\x3a\x00"]), timeout=10, metadata=shown))


@pytest.mark.parametrize(
    ("claims", "settings", "right"),
    [
        ({"realm_access": {"roles": ["warpsmith-run"]}}, {"role_claim": "realm_access.roles"}, Right.RUN),
        ({"https://a.b/roles": "warpsmith-read warpsmith-admin"}, {"role_claim": "https://a.b/roles"}, Right.ADMIN),
    ],
)
def test_claims_have_the_names_that_settings_say(
    claims: dict[str, Any], settings: dict[str, str], right: Right
) -> None:
    told = OidcSettings("https://a", "w", role_prefix="warpsmith-", name_claim="email", **settings)
    assert oidc.caller_of({"email": "ann@a.b"} | claims, told) == Caller("ann@a.b", right)
    with pytest.raises(NotPermitted, match=r"none of warpsmith-read, warpsmith-run, warpsmith-admin$"):
        oidc.caller_of({"email": "ann@a.b", told.role_claim: "admin"}, told)


def test_the_settings_are_read_and_an_issuer_without_an_audience_is_refused() -> None:
    assert read({}).oidc is None
    told = {"WARPSMITH_OIDC_ISSUER": "https://login", "WARPSMITH_OIDC_AUDIENCE": "w"}
    assert read(told).oidc == OidcSettings("https://login", "w")
    with pytest.raises(BadInput, match="needs WARPSMITH_OIDC_AUDIENCE"):
        read({"WARPSMITH_OIDC_ISSUER": "https://login"})


@pytest.mark.parametrize("issuer", ["http://login.example", "login.example", "file:///etc/passwd"])
def test_an_issuer_in_plain_text_is_refused_at_the_start(issuer: str) -> None:
    with pytest.raises(BadInput, match="an issuer is asked by https:// only"):
        oidc.Issuer(OidcSettings(issuer, AUDIENCE))
