"""What every trace becomes, whatever its format: requests by arrival, in columns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from harness.block_keys import HASH_ID_TOKENS
from harness.core import ScenarioError

TraceFormat = Literal["mooncake", "azure", "burstgpt", "servegen", "run"]
FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

MAX_TRACE_BYTES = 256 * 1024 * 1024
MAX_TOKENS = 2**31


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests by arrival. Arrays are (requests,); ``quantum_s`` is 0 where times are exact.

    ``end_s`` is where the trace, or the part taken of it, ends. ``left_out`` says how many requests
    of the file are not here, by why; ``clipped`` how many lengths were cut to a bound, by which.
    """

    path: Path
    format: TraceFormat
    sha256: str
    quantum_s: float
    end_s: float
    arrival_s: FloatArray
    input_tokens: IntArray
    output_tokens: IntArray
    hash_ids: tuple[tuple[int, ...], ...]
    left_out: Mapping[str, int]
    clipped: Mapping[str, int]

    def kept(self, which: npt.NDArray[np.bool_], why: str) -> "Trace":
        """The requests of ``which``; the others are counted as left out."""
        gone = len(which) - int(which.sum())
        if not gone:
            return self
        return replace(
            self,
            arrival_s=self.arrival_s[which],
            input_tokens=self.input_tokens[which],
            output_tokens=self.output_tokens[which],
            hash_ids=tuple(one for one, stays in zip(self.hash_ids, which, strict=True) if stays),
            left_out={**self.left_out, why: gone},
        )

    def part(self, duration_s: float | None, num_requests: int | None) -> "Trace":
        """The requests of the first ``duration_s`` of trace time, ``num_requests`` at most."""
        count, end_s = len(self.arrival_s), self.end_s
        if duration_s is not None:
            count = int(np.searchsorted(self.arrival_s, duration_s, side="left"))
            end_s = min(end_s, duration_s)
        if num_requests is not None and num_requests < count:
            count = num_requests
            end_s = min(end_s, float(self.arrival_s[count - 1]) + self.quantum_s)
        return replace(
            self,
            end_s=end_s,
            arrival_s=self.arrival_s[:count],
            input_tokens=self.input_tokens[:count],
            output_tokens=self.output_tokens[:count],
            hash_ids=self.hash_ids[:count],
        )

    @property
    def rate_req_per_s(self) -> float:
        """Mean rate over the trace; one second is the shortest span a rate is formed over."""
        return len(self.arrival_s) / max(self.end_s, 1.0)

    def unlimited_cache_tokens(self) -> FloatArray:
        """Tokens of each prompt's prefix that an earlier request had: whole blocks of its hash ids,
        which stand for all before them, in a cache that forgets nothing. # (requests,)"""
        return unlimited_cache_tokens(self.hash_ids)

    def spread_arrivals(self, rng: np.random.Generator) -> FloatArray:
        """Arrival times, spread uniformly and in file order inside each quantum; ascending."""
        draws = rng.random(len(self.arrival_s))
        if not self.quantum_s:
            return self.arrival_s.copy()
        _, quantum = np.unique(self.arrival_s, return_inverse=True)
        ordered = draws[np.lexsort((draws, quantum))]
        width_s = np.minimum(self.quantum_s, self.end_s - self.arrival_s)
        return np.asarray(self.arrival_s + ordered * width_s)


@dataclass(frozen=True, slots=True)
class Rows:
    """What a format's reader found, in the order of the file. Times count from anywhere."""

    arrival_s: FloatArray
    input_tokens: IntArray
    output_tokens: IntArray
    hash_ids: tuple[tuple[int, ...], ...]
    quantum_s: float = 0.0
    end_s: float | None = None
    left_out: Mapping[str, int] | None = None


def unlimited_cache_tokens(chains: Sequence[tuple[int, ...]]) -> FloatArray:
    """Prefix tokens that earlier requests had, by hash ids. # (requests,)"""
    seen: set[int] = set()
    found = np.zeros(len(chains))
    for index, hashes in enumerate(chains):
        hits = 0
        while hits < len(hashes) and hashes[hits] in seen:
            hits += 1
        found[index] = hits * HASH_ID_TOKENS
        seen.update(hashes)
    return found


def malformed(path: Path, number: int, why: object) -> ScenarioError:
    return ScenarioError(
        f"The trace file is malformed at {path}:{number}: {why}. Correct or remove the line."
    )


def tokens(text: str, least: int = 1) -> int:
    """ValueError for anything but a plain count of ``least`` to 2^31."""
    plain = text.isascii() and text.isdigit() and len(text) <= 10
    if not (plain and least <= int(text) <= MAX_TOKENS):
        raise ValueError(f"{text[:80]!r} is not a number of tokens of at least {least}")
    return int(text)


def quantised(
    arrival_s: FloatArray, quantum_s: float, tolerance_s: float
) -> tuple[FloatArray, float]:
    """Arrivals set to their quantum and the quantum, or as they are and 0."""
    nearest = np.round(arrival_s / quantum_s) * quantum_s
    if np.abs(arrival_s - nearest).max() <= tolerance_s:
        return np.asarray(nearest), quantum_s
    return arrival_s, 0.0
