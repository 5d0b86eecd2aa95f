"""Mutual TLS between services: what a server shows and demands, and channels that do the same.

The one idea: certificates are mounted files that another program renews, so they are looked at again whenever a
connection or a call begins, and nothing restarts. A server is known by its role (`benchmark`, `orchestrator`), whatever
address it was found at. Who may call what is not decided here, but in `permissions`.
"""

from __future__ import annotations

import re
import ssl
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

import grpc

from warpsmith import local_sockets
from warpsmith.errors import BadInput

VARIABLES = _CERTIFICATE, _KEY, _CA = "WARPSMITH_TLS_CERTIFICATE", "WARPSMITH_TLS_KEY", "WARPSMITH_TLS_CA"
"""Of the environment: PEM files of mutual TLS; all or none."""
HTTPS = "https://"
"""Before an address: by TLS, to a server whose certificate a public authority has signed for that host."""
_NAME_OF_COMMAND = ("grpc.ssl_target_name_override", "orchestrator")
_PLAIN = "http://"
_PLACE = re.compile(r"(?P<host>[\w.-]+|\[[0-9a-fA-F:.]+\])(?::(?P<port>\d{1,5}))?/?")


@dataclass(frozen=True)
class Tls:
    """The PEM files of one process, as cert-manager writes them."""

    certificate: Path
    """Own certificate, with the intermediate ones behind it."""
    key: Path
    """Its private key."""
    authority: Path
    """Certificates that a peer's certificate must come from."""

    def read(self) -> Identity:
        """What the files hold now.

        Raises:
            BadInput: one cannot be read; names it.
        """
        while True:
            before = self._stamp()
            try:
                found = Identity(before, *(each.read_bytes() for each in self._files()))
            except OSError as error:
                raise BadInput(f"{error.filename}: cannot be read ({error.strerror}); see WARPSMITH_TLS_*") from error
            if self._stamp() == before:  # else they were renewed in between, and may not belong together
                return found

    def require_usable(self, role: str) -> None:
        """Refuses files that could not serve as `role`: a connection to oneself is made, in memory.

        Raises:
            BadInput: one cannot be read, they do not belong together, or the certificate is not valid; names it.
        """
        self.read()
        ours, theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            theirs.load_verify_locations(self.authority)
        except ssl.SSLError as error:
            raise BadInput(f"{self.authority}: holds no certificate in PEM ({error.reason}); see {_CA}") from error
        try:
            ours.load_cert_chain(self.certificate, self.key)
        except ssl.SSLError as error:
            what = f"{self.certificate} and {self.key}: are no certificate with its key in PEM ({error.reason})"
            raise BadInput(f"{what}; see {_CERTIFICATE} and {_KEY}") from error
        try:
            _handshake(ours, theirs, role)
        except ssl.SSLCertVerificationError as error:
            raise BadInput(f"{self.certificate}: {error.verify_message}; see {_CERTIFICATE} and {_CA}") from error

    def changed(self, last: Identity) -> Identity:
        """What the files hold now; the last where nothing changed, or where they are just being replaced."""
        if self._stamp() == last.stamp:
            return last
        try:
            return self.read()
        except BadInput:
            return last

    def _files(self) -> tuple[Path, Path, Path]:
        return self.certificate, self.key, self.authority

    def _stamp(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_stamp(each) for each in self._files())


def _handshake(server: ssl.SSLContext, client: ssl.SSLContext, role: str) -> None:
    """Both ends of a connection say in turn what they have to, until the client is content."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    called = client.wrap_bio(to_client, to_server, server_hostname=role)
    serving = server.wrap_bio(to_server, to_client, server_side=True)
    while True:
        try:
            return called.do_handshake()
        except ssl.SSLWantReadError:
            with suppress(ssl.SSLWantReadError):
                serving.do_handshake()


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


@dataclass(frozen=True)
class Identity:
    """One reading of the files. `stamp` tells it from others."""

    stamp: tuple[tuple[int, int, int] | None, ...]
    certificate: bytes
    key: bytes
    authority: bytes


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """Demands a client's certificate, and looks at the files again for every connection.

    Raises:
        BadInput: a file cannot be read.
    """
    shown = tls.read()

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal shown
        now = tls.changed(shown)
        if now is shown:
            return None
        shown = now
        return _configuration(now)

    # The stubs do not know that None says "as before", which gRPC's own documentation does.
    fetcher = cast("Callable[[], grpc.ServerCertificateConfiguration]", renewed)
    return grpc.dynamic_ssl_server_credentials(_configuration(shown), fetcher, require_client_authentication=True)


def _configuration(identity: Identity) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(identity.key, identity.certificate)], identity.authority)


def channel(address: str, options: Sequence[tuple[str, Any]], tls: Tls | None, role: str) -> grpc.Channel:
    """A channel to `address`, in plain text without `tls`; with it, only to a server whose certificate names `role`.

    A Unix socket has to be one that no other user could have put there, and needs no certificate, unless its name says
    so (`local_sockets.is_by_tls`): then those behind it are one command's, which shows its orchestrator's. With
    `https://` before it, the server has to show a certificate for its host from an authority of gRPC's own list, or of
    the file that GRPC_DEFAULT_SSL_ROOTS_FILE_PATH names; `tls` and `role` do not count there, nor with `http://`.

    Raises:
        BadInput: a file of `tls` cannot be read, or there is none and the socket wants a certificate; the socket or the
            port is another user's, or the address is malformed.
    """
    if address.startswith(HTTPS):
        return grpc.secure_channel(_place(address, HTTPS, "443"), grpc.ssl_channel_credentials(), options=options)
    if address.startswith(_PLAIN):
        return channel(_place(address, _PLAIN, "80"), options, None, role)
    if local_sockets.is_one(address):
        local_sockets.require_own(address)
        if not local_sockets.is_by_tls(address):
            return grpc.insecure_channel(address, options=options)
        if tls is None:
            raise BadInput(f"{address}: is served by mutual TLS: set {', '.join(VARIABLES)} as for its `warpsmith up`")
        return _RenewedChannel(address, [*options, _NAME_OF_COMMAND], tls)
    if tls is None:
        local_sockets.require_own_port(address)
        return grpc.insecure_channel(address, options=options)
    return _RenewedChannel(address, [*options, ("grpc.ssl_target_name_override", role)], tls)


def _place(address: str, scheme: str, port: str) -> str:
    match = _PLACE.fullmatch(address.removeprefix(scheme))
    if match is None:
        raise BadInput(f"{address}: write {scheme}HOST or {scheme}HOST:PORT")
    return f"{match['host']}:{match['port'] or port}"


class _RenewedChannel(grpc.Channel):
    """Opens another channel when the files have changed; calls under way end on the one that they began on."""

    def __init__(self, address: str, options: Sequence[tuple[str, Any]], tls: Tls) -> None:
        self._address, self._options, self._tls = address, options, tls
        self._lock = threading.Lock()
        self._identity = tls.read()
        self._now = self._open()

    def _open(self) -> grpc.Channel:
        own = self._identity
        credentials = grpc.ssl_channel_credentials(own.authority, own.key, own.certificate)
        return grpc.secure_channel(self._address, credentials, options=self._options)

    def current(self) -> grpc.Channel:
        """The channel for a call that begins now."""
        with self._lock:
            identity = self._tls.changed(self._identity)
            if identity is not self._identity:
                self._identity = identity
                self._now = self._open()
            return self._now

    def unary_unary(self, *arguments: Any, **named: Any) -> Any:
        return _Calls(self, lambda channel: channel.unary_unary(*arguments, **named))

    def unary_stream(self, *arguments: Any, **named: Any) -> Any:
        return _Calls(self, lambda channel: channel.unary_stream(*arguments, **named))

    def stream_unary(self, *arguments: Any, **named: Any) -> Any:
        return _Calls(self, lambda channel: channel.stream_unary(*arguments, **named))

    def stream_stream(self, *arguments: Any, **named: Any) -> Any:
        return _Calls(self, lambda channel: channel.stream_stream(*arguments, **named))

    def subscribe(self, *arguments: Any, **named: Any) -> None:
        self.current().subscribe(*arguments, **named)

    def unsubscribe(self, callback: Any) -> None:
        self.current().unsubscribe(callback)

    def close(self) -> None:
        self.current().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Calls:
    """One method of a renewed channel: each call finds the channel of its moment."""

    def __init__(self, channel: _RenewedChannel, method: Callable[[grpc.Channel], Any]) -> None:
        self._channel, self._method = channel, method
        self._made: tuple[grpc.Channel, Any] | None = None

    def _callable(self) -> Any:
        now, made = self._channel.current(), self._made
        if made is None or made[0] is not now:
            self._made = made = now, self._method(now)
        return made[1]

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._callable()(*arguments, **named)

    def with_call(self, *arguments: Any, **named: Any) -> Any:
        """As gRPC's own."""
        return self._callable().with_call(*arguments, **named)

    def future(self, *arguments: Any, **named: Any) -> Any:
        """As gRPC's own."""
        return self._callable().future(*arguments, **named)
