"""Mutual TLS 1.3 for KV connections that leave the building.

Each end shows a certificate of one authority, the testbed's own, and admits nobody else: who holds
a certificate of it is a member, so it must not be a public authority. The dialling end also checks
the address it dialled, name or IP, against the certificate's subjectAltName (RFC 6125, RFC 5280):
nodes of a cluster are named by IP, so their certificates carry ``IP:`` entries. The accepting end
does not check the peer's address, which network address translation may have changed. There is no
resumption: every connection proves its certificate.
"""

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness.core import TransportError


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: this end's certificate (its chain may follow), its key, the authority's."""

    certificate: Path
    key: Path
    authority: Path

    def client_context(self) -> ssl.SSLContext:
        """For the dialling end; give ``server_hostname`` the host that was dialled."""
        context = self._context(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = True
        return context

    def server_context(self) -> ssl.SSLContext:
        """For the accepting end; it refuses a peer without a certificate of the authority."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0
        return context

    def _context(self, protocol: int) -> ssl.SSLContext:
        for role in ("certificate", "key", "authority"):
            _check_readable(role, getattr(self, role))
        context = ssl.SSLContext(protocol)
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        _check_certificates("authority", self.authority, context)
        # In a context of its own: the peer's certificate must not be trusted for being ours.
        _check_certificates("certificate", self.certificate, ssl.SSLContext(protocol))
        try:
            context.load_cert_chain(self.certificate, self.key, _no_password(self.key))
        except ssl.SSLError as error:
            problem = (
                f"is not the key of the certificate in {self.certificate}"
                if error.reason == "KEY_VALUES_MISMATCH"
                else f"holds no private key in PEM form ({error.reason or error})"
            )
            raise TransportError(f"TLS: the key file {self.key} {problem}") from error
        return context


def _check_readable(role: str, path: Path) -> None:
    try:
        path.read_bytes()
    except OSError as error:
        raise TransportError(
            f"TLS: the {role} file {path} cannot be read: {error.strerror}"
        ) from error


def _check_certificates(role: str, path: Path, context: ssl.SSLContext) -> None:
    """Have the context trust the certificates of a file; TransportError when it holds none."""
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        raise TransportError(
            f"TLS: the {role} file {path} holds no certificate in PEM form "
            f"({error.reason or error})"
        ) from error


def _no_password(path: Path) -> Callable[[], str]:
    """For a key that is encrypted; the ssl module would ask on the terminal."""

    def refuse() -> str:
        raise TransportError(
            f"TLS: the key file {path} is encrypted; give a key without a password, readable by "
            "this user only"
        )

    return refuse
