"""Mutual authentication of two ends that share a per-run secret.

    receiver -> sender   Challenge(server_nonce)
    sender -> receiver   Hello(role, session, client_nonce, HMAC-SHA256(secret, "client" | fields))
    receiver -> sender   Welcome(HMAC-SHA256(secret, "server" | fields), bounds)

``fields`` are the wire version, the role, the session and both nonces. The nonces are fresh for
each connection, so a recorded Hello proves nothing on another one; the labels differ, so a proof
cannot be reflected. The frames after the handshake are neither encrypted nor authenticated.
"""

import hashlib
import hmac
import secrets
import struct
from typing import Literal

from harness.core import TransportError
from harness.transport.frames import NONCE_BYTES, VERSION

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
