"""Fresh prompts: token ids that no earlier request shared, from a salt and a running index.

    ids(salt, index, n) = n draws of PCG64 seeded by SHA-256(salt, index), uniform in [low, high)

The default range lies in every vocabulary of a served model and above its special tokens. The salt
is new in every session, so that a resumed profile never meets what the server has cached.
"""

import hashlib
from dataclasses import dataclass

import numpy as np

TOKEN_IDS = (1_000, 30_000)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids as the inside of a JSON array, and how many."""

    text: str
    tokens: int

    def __add__(self, other: "Prompt") -> "Prompt":
        return Prompt(f"{self.text},{other.text}", self.tokens + other.tokens)


class Prompts:
    """Prompts of one session, each a new one."""

    def __init__(self, salt: str, token_ids: tuple[int, int] = TOKEN_IDS) -> None:
        self._salt = salt
        self._low, self._high = token_ids
        self._index = 0

    def fresh(self, tokens: int) -> Prompt:
        """A prompt that shares its first tokens with no other, but by chance."""
        assert tokens > 0, tokens
        digest = hashlib.sha256(f"{self._salt}\0{self._index}".encode()).digest()
        self._index += 1
        random = np.random.default_rng(int.from_bytes(digest[:16], "little"))
        ids = random.integers(self._low, self._high, tokens)
        return Prompt(",".join(map(str, ids.tolist())), tokens)
