"""Signatures of results: an orchestrator signs what it has measured when a run ends, and anybody can check that.

The one idea: what is signed are the digests of a run's parts, so that a check can say which of them was changed. Keys
are of Ed25519 (RFC 8032), by `cryptography`; the public half comes from the orchestrator, not from the record.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict

from warpsmith import digest
from warpsmith.errors import BadInput
from warpsmith.sandbox import private_files
from warpsmith.v1 import run_pb2

VARIABLE = "WARPSMITH_SIGNING_KEY_FILE"
_MAKE = "openssl genpkey -algorithm ed25519 -out FILE makes one"
_SEAL = "seal"
PARTS: Mapping[str, tuple[str, ...]] = {
    "the module and its inputs": ("task",),
    "the kernel": ("best", "candidate"),
    "the verdict": ("best", "verdict"),
    "the times": ("best", "timing"),
    "the device": ("device",),
    "the baselines": ("reference",),
}
"""Of a run, as JSON: what a person calls it → where it is. Everything else is one part more."""
REST = "the run's own story (its state, message, costs or owner)"


class Signer:
    """Signs for an orchestrator.

    Raises:
        BadInput: the file holds no Ed25519 key, or `cryptography` is missing.
    """

    def __init__(self, file: Path) -> None:
        try:
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
            from cryptography.hazmat.primitives.serialization import load_pem_private_key
        except ImportError:
            raise BadInput(f"{VARIABLE} needs cryptography: pip install 'warpsmith[signing]'") from None
        try:
            key = load_pem_private_key(file.read_bytes(), None)
        except OSError as error:
            raise BadInput(f"{file}: cannot be read ({error.strerror}); see {VARIABLE}") from error
        except (ValueError, TypeError):  # whose words may quote the key
            raise BadInput(f"{file}: holds no private key in PEM without a password: {_MAKE}; see {VARIABLE}") from None
        if not isinstance(key, Ed25519PrivateKey):
            raise BadInput(f"{file}: the key is not of Ed25519: {_MAKE}; see {VARIABLE}")
        self._key = key

    def seal(self, run: run_pb2.Run) -> None:
        """Signs a run as it is now, where it has a result."""
        run.ClearField("seal")
        if not run.HasField("best"):
            return
        parts = digests(MessageToDict(run, preserving_proto_field_name=True))
        run.seal.parts.update(parts)
        run.seal.signature = self._key.sign(_signed(parts))

    def public(self) -> str:
        """The public half, in PEM."""
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        return self._key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


def signer_of(file: Path | None) -> Signer | None:
    """Of the file of `VARIABLE`; None where there is none.

    Raises:
        BadInput: as of `Signer`.
    """
    return None if file is None else Signer(file)


def changes(content: Mapping[str, Any], public: Path) -> list[str]:
    """What of a run, as its record has it in JSON, is not as it was signed for a public key, as sentences.

    Raises:
        BadInput: the file holds no public key of Ed25519.
    """
    sealed = content.get(_SEAL)
    if not isinstance(sealed, Mapping):
        return ["the record is not signed: its orchestrator has no key, or the signature was taken out"]
    parts = sealed.get("parts")
    if not isinstance(parts, Mapping) or not _is_signed(public)(sealed.get("signature"), parts):
        return [f"the signature is not by the key of {public}, or the list of what it signs was changed"]
    return list(_differences(parts, digests(content)))


def digests(content: Mapping[str, Any]) -> dict[str, str]:
    """The digest of each part of a run as JSON."""
    rest = {name: value for name, value in content.items() if name not in (_SEAL, "best")}
    rest["best"] = dict(content.get("best", {}))
    found = {}
    for name, path in PARTS.items():
        holder: Any = rest
        for step in path[:-1]:
            holder = holder.get(step, {})
        found[name] = _digest(holder.pop(path[-1], None))
    return {**found, REST: _digest(rest)}


def _differences(signed: Mapping[str, Any], now: Mapping[str, str]) -> Iterator[str]:
    for name, value in now.items():
        if signed.get(name) != value:
            yield f"{name}: changed after it was signed"
    for name in signed.keys() - now.keys():
        yield f"{str(name)[:80]!r} was signed, and this version does not know what that is"


def _is_signed(public: Path) -> Callable[[Any, Mapping[str, Any]], bool]:
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key
    except ImportError:
        raise BadInput("--key needs cryptography: pip install 'warpsmith[signing]'") from None
    try:
        key = load_pem_public_key(private_files.read(public))
    except OSError as error:
        raise BadInput(f"{public}: cannot be read ({error.strerror})") from error
    except ValueError:
        key = None  # of another kind, as the next one
    if not isinstance(key, Ed25519PublicKey):
        raise BadInput(f"{public}: holds no public key of Ed25519 in PEM; `warpsmith signing-key` prints one")

    def check(signature: Any, parts: Mapping[str, Any]) -> bool:
        import base64

        try:
            key.verify(base64.b64decode(str(signature), validate=True), _signed(parts))
        except (InvalidSignature, ValueError):
            return False
        return True

    return check


def _signed(parts: Mapping[str, Any]) -> bytes:
    """What is signed of the parts' digests: in the order of their names, length-prefixed."""
    return digest.digest("seal", *(str(each) for name in sorted(parts) for each in (name, parts[name]))).encode()


def _digest(content: object) -> str:
    return digest.digest("part", json.dumps(content, sort_keys=True))
