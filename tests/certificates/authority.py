"""Certificates made on the spot: an authority of one test, which issues the files that cert-manager would mount."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from warpsmith.transport import Tls


class Authority:
    """A certificate authority of one test."""

    def __init__(self, name: str) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = _builder(self._name, self._name, self._key).add_extension(x509.BasicConstraints(True, None), True)
        self.certificate = builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def issue(self, directory: Path, role: str, trusted: bytes = b"") -> Tls:
        """Files with a new certificate for `role`, as cert-manager mounts them; each appears whole."""
        directory.mkdir(exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, role)])
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = _builder(subject, self._name, key)
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(role)]), False)
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), False)
        tls = self.issued(directory)
        _replace(tls.certificate, builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        plain = serialization.NoEncryption()
        form = serialization.PrivateFormat.PKCS8
        _replace(tls.key, key.private_bytes(serialization.Encoding.PEM, form, plain))
        _replace(tls.authority, trusted or self.certificate)
        return tls

    @staticmethod
    def issued(directory: Path) -> Tls:
        """The files of a directory that something was issued to."""
        return Tls(directory / "tls.crt", directory / "tls.key", directory / "ca.crt")


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
    )


def _replace(file: Path, content: bytes) -> None:
    partial = file.with_suffix(".partial")
    partial.write_bytes(content)
    os.replace(partial, file)
