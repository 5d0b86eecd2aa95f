"""Signed results: what an orchestrator signs, that each change is named, and that an export is held to its record."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from typer.testing import CliRunner

from orchestrator import testing
from orchestrator.archive import Archive
from orchestrator.commands import cli
from orchestrator.exports import export_files
from orchestrator.exports.export import Exported
from orchestrator.search.beam import Beam
from orchestrator.search_run import SearchRun
from orchestrator.serving.device_gate import DeviceGate
from orchestrator.serving.story import Story
from orchestrator.trust import record, seal, signed_export
from warpsmith import plugins
from warpsmith.errors import BadInput
from warpsmith.v1 import run_pb2


def key_file(place: Path, key: Any = None) -> Path:
    key = key or ed25519.Ed25519PrivateKey.generate()
    place.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return place


@pytest.fixture
def signer(tmp_path: Path) -> seal.Signer:
    return seal.Signer(key_file(tmp_path / "key.pem"))


@pytest.fixture
def public(signer: seal.Signer, tmp_path: Path) -> Path:
    (tmp_path / "key.pub").write_text(signer.public())
    return tmp_path / "key.pub"


@pytest.fixture
def run(signer: seal.Signer, tmp_path: Path) -> run_pb2.Run:
    """A run that found something faster, as the archive keeps it."""
    archive, agents = Archive.in_directory(tmp_path / "runs"), testing.World().agents()
    made = run_pb2.Run(id="20260101-000000-abc", task=testing.task("softmax"), created_at=1.0)
    archive.put_run(made)
    SearchRun(made, agents, DeviceGate(agents.benchmarks), Beam(), Story(archive, made), seal=signer.seal).execute()
    kept = archive.run(made.id)
    archive.close()
    return kept


def written(tmp_path: Path, run: run_pb2.Run, change: Callable[[Any], object] = lambda _: None) -> Path:
    file = tmp_path / "softmax.record.json"
    held = json.loads(record.text(run))
    change(held["run"])
    file.write_text(json.dumps(held))
    return file


def test_what_an_orchestrator_has_signed_and_nobody_changed_is_found_so(
    tmp_path: Path, run: run_pb2.Run, public: Path
) -> None:
    assert signed_export.changes(written(tmp_path, run), public) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda run: run["best"]["timing"]["speedup_fastest"].update(median=99.0), "the times: changed"),
        (lambda run: run["best"]["verdict"].update(detail="fine"), "the verdict: changed"),
        (lambda run: run["best"]["candidate"]["program"].update(digest="0"), "the kernel: changed"),
        (lambda run: run["task"].update(name="other"), "the module and its inputs: changed"),
        (lambda run: run["device"].update(name="faster"), "the device: changed"),
        (lambda run: run["reference"].update(is_kept=True), "the baselines: changed"),
        (lambda run: run.update(user="bob"), "the run's own story"),
        (lambda run: run.pop("seal"), "the record is not signed"),
        (lambda run: run["seal"].pop("parts"), "the signature is not by the key"),
        (lambda run: run["seal"].update(signature="AAAA"), "the signature is not by the key"),
        (lambda run: run["seal"]["parts"].update({"the times": "0"}), "the signature is not by the key"),
    ],
)
def test_each_change_is_named(
    tmp_path: Path, run: run_pb2.Run, public: Path, change: Callable[[Any], object], said: str
) -> None:
    (found,) = signed_export.changes(written(tmp_path, run, change), public)
    assert found.startswith(said)


def test_another_orchestrators_key_is_not_this_ones(tmp_path: Path, run: run_pb2.Run) -> None:
    other = tmp_path / "other.pub"
    other.write_text(seal.Signer(key_file(tmp_path / "other.pem")).public())
    (found,) = signed_export.changes(written(tmp_path, run), other)
    assert found.startswith(f"the signature is not by the key of {other}")


class Exporting:
    """Writes the kernel of a run that is too small for the real ones."""

    def export(self, run: run_pb2.Run) -> Exported:
        return Exported("fast.py", f"# a kernel (run {run.id})\n{run.best.candidate.program.digest}\n")


def test_an_exported_file_is_held_to_its_record(
    tmp_path: Path, run: run_pb2.Run, public: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, text = tmp_path / "fast.py", Exporting().export(run).text
    monkeypatch.setattr(plugins, "load", lambda *_: Exporting())
    export_files.write(place, text, record.text(run))
    assert signed_export.changes(place, public) == []
    place.write_text(text.replace("\n", "\nimport evil\n", 1))
    assert signed_export.changes(place, public) == [
        f"fast.py: line 2 is 'import evil', and the record gives {text.splitlines()[1].strip()[:80]!r}"
    ]


def test_a_run_without_a_result_is_not_signed_and_one_that_goes_on_is_signed_anew(
    signer: seal.Signer, run: run_pb2.Run
) -> None:
    first = run.seal.signature
    run.message = "resumed"
    signer.seal(run)
    assert run.seal.signature != first
    run.ClearField("best")
    signer.seal(run)
    assert not run.HasField("seal")


@pytest.mark.parametrize("content", [None, b"no key", b""])
def test_a_file_without_a_usable_key_is_named_at_the_start(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "key.pem"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(BadInput, match=rf"^{file}: .*; see WARPSMITH_SIGNING_KEY_FILE$"):
        seal.Signer(file)
    with pytest.raises(BadInput, match="is not of Ed25519"):
        seal.Signer(key_file(file, ec.generate_private_key(ec.SECP256R1())))


def test_the_command_says_what_was_changed_and_ends_with_1(tmp_path: Path, run: run_pb2.Run, public: Path) -> None:
    def verified() -> tuple[int, str]:
        done = CliRunner().invoke(cli.app, ["verify", "softmax.record.json", "--key", "key.pub"])
        return done.exit_code, done.stdout

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        written(tmp_path, run)
        assert verified() == (0, "softmax.record.json: as it was signed\n")
        written(tmp_path, run, lambda held: held["device"].update(name="other"))
        code, said = verified()
        assert (code, said.splitlines()[1]) == (1, "  differs: the device: changed after it was signed")
    public.write_text("none")
    with pytest.raises(BadInput, match="holds no public key of Ed25519"):
        signed_export.changes(tmp_path / "softmax.record.json", public)
