"""Mutual authentication of two ends that share a per-run secret.

    receiver -> sender   Challenge(server_nonce)
    sender -> receiver   Hello(role, session, client_nonce, HMAC-SHA256(secret, "client" | fields))
    receiver -> sender   Welcome(HMAC-SHA256(secret, "server" | fields), bounds)

``fields`` are the wire version, the role, the session and both nonces. The nonces are fresh for
each connection, so a recorded Hello proves nothing on another one; the labels differ, so a proof
cannot be reflected. What follows the handshake is neither encrypted nor authenticated, except
over TLS.
"""

import hashlib
import hmac
import secrets
import struct
from typing import Literal

from harness.core import TransportError
from harness.transport.frames import (
    NO_ROOM,
    NONCE_BYTES,
    ROLE_SENDER,
    VERSION,
    Challenge,
    Code,
    Error,
    Hello,
    Welcome,
    WireError,
)

MIN_SECRET_BYTES = 16


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def proof(
    side: Literal["client", "server"],
    secret: bytes,
    role: int,
    session: bytes,
    server_nonce: bytes,
    client_nonce: bytes,
) -> bytes:
    """The proof that ``side`` knows the secret; every field has a fixed width."""
    fields = struct.pack("!BB", VERSION, role) + session + server_nonce + client_nonce
    return hmac.digest(secret, b"prfaas-kv/" + side.encode() + b"/" + fields, hashlib.sha256)


def proofs_match(expected: bytes, given: bytes) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(expected, given)


def check_secret(secret: bytes) -> bytes:
    """Refuse a secret that could be guessed."""
    if len(secret) < MIN_SECRET_BYTES:
        raise TransportError(
            f"the transport's secret has {len(secret)} bytes; give at least {MIN_SECRET_BYTES} "
            "random ones (secrets.token_bytes)"
        )
    return secret


class Accepting:
    """The receiver's half, sans I/O: send ``challenge``, then answer the Hello."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self.challenge = Challenge(new_nonce())

    def answer(self, frame: object, max_payload_bytes: int) -> tuple[bytes, Welcome] | Error:
        """The peer's session and what to tell it, or why it is refused."""
        if not isinstance(frame, Hello):
            problem = f"{type(frame).__name__} where a Hello was due"
            return Error(NO_ROOM, Code.PROTOCOL, problem)
        fields = (self._secret, frame.role, frame.session, self.challenge.nonce, frame.nonce)
        if not proofs_match(proof("client", *fields), frame.proof):
            problem = "the peer does not know this run's secret"
            return Error(NO_ROOM, Code.UNAUTHENTICATED, problem)
        if frame.role != ROLE_SENDER:
            problem = f"role {frame.role} is not served here"
            return Error(NO_ROOM, Code.UNSUPPORTED, problem)
        return frame.session, Welcome(proof("server", *fields), max_payload_bytes)


class Dialling:
    """The sender's half, sans I/O: answer the Challenge, then check the Welcome."""

    def __init__(self, secret: bytes, session: bytes) -> None:
        self._secret, self._session = secret, session
        self._nonce = new_nonce()
        self._expected: bytes | None = None

    def answer(self, frame: object) -> Hello | int:
        """What to say next, or the largest payload once both have proven the secret."""
        match frame:
            case Challenge(nonce) if self._expected is None:
                fields = (self._secret, ROLE_SENDER, self._session, nonce, self._nonce)
                self._expected = proof("server", *fields)
                own = proof("client", *fields)
                return Hello(ROLE_SENDER, self._session, self._nonce, own)
            case Welcome(given, max_payload_bytes) if self._expected is not None:
                if not proofs_match(self._expected, given):
                    raise WireError("it does not know this run's secret")
                if max_payload_bytes == 0:
                    raise WireError("it takes no payload")
                return max_payload_bytes
        raise WireError(f"{type(frame).__name__} in the handshake")
