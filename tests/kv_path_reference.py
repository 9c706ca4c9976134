"""A path that serves piece by piece, apart from ``harness.kv_path``: one after another."""

from collections.abc import Iterable


def departures(
    pieces: Iterable[tuple[float, int, float]], rate: float, free_s: float = float("-inf")
) -> dict[int, float]:
    """When the last piece of each key has left; pieces are (ready_s, key, bytes)."""
    left: dict[int, float] = {}
    for ready_s, key, size in sorted(pieces, key=lambda piece: piece[:2]):
        free_s = max(free_s, ready_s) + size / rate
        left[key] = free_s
    return left
