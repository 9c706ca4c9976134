"""Who may join a run: a worker and the master prove to each other that they know one token.

Locust's own protocol lets anyone join. Here both sides send a nonce of 32 random bytes, and then

    proof(side) = HMAC-SHA256(token, side | master's nonce | worker's nonce | worker's name)

so that the token itself never travels, and no proof serves twice or for the other side. What
follows is neither encrypted nor signed: across hosts use a network that is trusted, or a tunnel.
"""

import hashlib
import hmac
import secrets

NONCE_BYTES = 32


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def proof(token: str, side: str, master_nonce: bytes, worker_nonce: bytes, name: str) -> bytes:
    """What ``side`` ("master" or "worker") shows of the token."""
    message = b"\0".join((side.encode(), master_nonce, worker_nonce, name.encode()))
    return hmac.new(token.encode(), message, hashlib.sha256).digest()


def proves(
    shown: object, token: str, side: str, master_nonce: bytes, worker_nonce: bytes, name: str
) -> bool:
    """Whether ``shown`` is that proof; anything may have been shown."""
    right = proof(token, side, master_nonce, worker_nonce, name)
    return isinstance(shown, bytes) and hmac.compare_digest(shown, right)
