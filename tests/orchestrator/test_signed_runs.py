"""From an orchestrator's key to an export that holds: a real orchestrator signs its runs, each flavour is written, and
`warpsmith verify EXPORT --key PUB` accepts it as it is and names what was changed.

Reasoning and synthesis are real too, so that programs are; what compiles, judges and times them are fakes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from typer.testing import CliRunner

from orchestrator.commands import cli
from orchestrator.serving.local import MODULES, LocalServices
from orchestrator.trust import seal

MODULE = """import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return torch.tanh(x) * 0.5 + 1.0


def get_inputs():
    return [torch.rand(64, 64)]
"""
TWICE_AS_FAST = """
from orchestrator import testing
from orchestrator.serving import fake_service

class Quick(fake_service._Fake):
    def _time(self, program):
        return testing.EAGER_NS / 2

testing._has = lambda *_: False
fake_service._Fake = Quick
fake_service.serve_role({role!r})
"""
FAKES = ("compile", "correctness", "benchmark")


@dataclass
class Signed:
    """A server with a key, its public half, and runs by target."""

    server: str
    public: Path
    runs: dict[str, str]

    def command(self, *arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(cli.app, [*arguments])
        return done.exit_code, done.stdout

    def verified(self, place: Path) -> tuple[int, str]:
        return self.command("verify", str(place), "--key", str(self.public))


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Signed]:
    folder = tmp_path_factory.mktemp("signed")
    (folder / "bent.py").write_text(MODULE)
    for role in FAKES:
        (folder / f"quick_{role}.py").write_text(TWICE_AS_FAST.format(role=role))
    private = ed25519.Ed25519PrivateKey.generate()
    (folder / "key.pem").write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    modules = MODULES | {role: f"quick_{role}" for role in FAKES}
    environment = {seal.VARIABLE: str(folder / "key.pem")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        with LocalServices(folder / "runs", modules=modules, environment=environment) as services:
            made = Signed(services.address("orchestrator"), folder / "key.pub", {})
            code, told = made.command("signing-key", "--server", made.server)
            assert code == 0, told
            made.public.write_text(told)
            for target in ("cpu", "cuda"):
                arguments = ("--target", target, "--trials", "2", "--budget", "2m", "--fresh", "--json")
                code, told = made.command("optimize", str(folder / "bent.py"), *arguments, "--server", made.server)
                assert code == 0, told
                (each,) = json.loads(told)["tasks"]
                made.runs[target] = each["run"]
            yield made


@pytest.mark.parametrize(
    ("flavour", "target"),
    [("module", "cpu"), ("package", "cpu"), ("hub", "cuda"), ("cu", "cuda"), ("kernelbench", "cuda")],
)
def test_an_export_of_a_signed_run_is_accepted_and_each_change_of_it_is_named(
    signed: Signed, tmp_path: Path, flavour: str, target: str
) -> None:
    ending = {"package": "", "hub": "", "cu": ".cu"}.get(flavour, ".py")
    place = tmp_path / f"bent{ending}"
    written = signed.command(
        "export", signed.runs[target], "--flavour", flavour, "-o", str(place), "--server", signed.server
    )
    assert written[0] == 0, written
    assert signed.verified(place) == (0, f"{place}: as it was signed\n")
    (record,) = place.rglob("record*.json") if place.is_dir() else [place.with_suffix(".record.json")]
    kernel = max(place.rglob("*.p?"), key=lambda file: file.stat().st_size) if place.is_dir() else place
    text, own = kernel.read_text(), record.read_text()
    kernel.write_text(text + "import evil\n")
    code, said = signed.verified(place)
    assert (code, kernel.name in said, "import evil" in said) == (1, True, True), said
    kernel.write_text(text)
    held = json.loads(own)
    held["run"]["best"]["timing"]["speedup_fastest"]["median"] = 99.0
    record.write_text(json.dumps(held))
    code, said = signed.verified(place)
    assert (code, "the times: changed after it was signed" in said) == (1, True), said
    record.write_text(own.replace("{", '{\n "run": {},', 1))  # a reader who takes the first of two reads another run
    if place.is_dir():
        assert signed.verified(place)[0] == 1
    record.write_text(own)
    if place.is_dir():
        (place / "more.py").write_text("import evil\n")
        code, said = signed.verified(place)
        assert (code, "more.py: is in no record" in said) == (1, True), said
        (place / "more.py").unlink()
    assert signed.verified(place)[0] == 0


def test_another_orchestrators_key_is_refused(signed: Signed, tmp_path: Path) -> None:
    place = tmp_path / "bent.py"
    assert signed.command("export", signed.runs["cpu"], "-o", str(place), "--server", signed.server)[0] == 0
    other = ed25519.Ed25519PrivateKey.generate()
    (tmp_path / "other.pem").write_bytes(other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    (tmp_path / "other.pub").write_text(seal.Signer(tmp_path / "other.pem").public())
    code, said = signed.command("verify", str(place), "--key", str(tmp_path / "other.pub"))
    assert (code, "the signature is not by the key of" in said) == (1, True), said
