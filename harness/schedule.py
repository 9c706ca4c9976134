"""A run's schedule by columns: a million requests in some 30 MB, each a ``Request`` on access.

The columns are the schedule; ``rid`` follows from ``index``, and ``cached_tokens`` is 0, since a
schedule plans no hits: what a prefix cache finds comes from the hash ids. Hash ids lie in one flat
array of which each request has a run, so that turns of one conversation share what they have in
common. ``sha256`` is over the columns' little-endian bytes, however they are held:

    "prfaas-schedule 1" ++ index ++ planned_s ++ input_tokens ++ output_tokens
    ++ number of hash ids of each ++ all hash ids in order
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import numpy.typing as npt

from harness.core import Request

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_VERSION = b"prfaas-schedule 1\0"
#: Requests made at a time while iterating, which bounds what that takes beside the columns.
_CHUNK = 4096


@dataclass(frozen=True, slots=True, eq=False)
class HashChains:
    """``flat[first[i] : first[i] + count[i]]`` are the hash ids of request i. Runs may overlap."""

    flat: npt.NDArray[np.uint32] | IntArray
    first: IntArray
    count: IntArray

    @staticmethod
    def of(chains: Sequence[Sequence[int]]) -> "HashChains | None":
        """Hash ids below 2^63, one sequence a request; None where no request has any."""
        count = np.fromiter(map(len, chains), np.int64, len(chains))
        if not count.any():
            return None
        flat = np.fromiter((one for chain in chains for one in chain), np.int64, int(count.sum()))
        return HashChains(flat, np.cumsum(count) - count, count)

    def __getitem__(self, which: slice) -> "HashChains":
        return HashChains(self.flat, self.first[which], self.count[which])

    def at(self, row: int) -> tuple[int, ...]:
        first = int(self.first[row])
        return tuple(self.flat[first : first + int(self.count[row])].tolist())

    def joined(self, start: int, stop: int) -> IntArray:
        """The hash ids of requests ``start`` to ``stop``, one after another."""
        count = self.count[start:stop]
        within = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
        return np.asarray(self.flat[np.repeat(self.first[start:stop], count) + within], np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Schedule(Sequence[Request]):
    """Requests in order of ``planned_s``. Arrays are (requests,); nobody writes to them.

    A slice is a schedule over the same memory. Equal to any sequence of the same requests.
    """

    indexes: IntArray
    planned_s: FloatArray
    input_tokens: IntArray
    output_tokens: IntArray
    chains: HashChains | None

    def __len__(self) -> int:
        return len(self.indexes)

    @overload
    def __getitem__(self, which: int) -> Request: ...
    @overload
    def __getitem__(self, which: slice) -> "Schedule": ...
    def __getitem__(self, which: int | slice) -> "Request | Schedule":
        if isinstance(which, slice):
            return Schedule(
                self.indexes[which],
                self.planned_s[which],
                self.input_tokens[which],
                self.output_tokens[which],
                None if self.chains is None else self.chains[which],
            )
        return _request(
            int(self.indexes[which]),
            float(self.planned_s[which]),
            int(self.input_tokens[which]),
            int(self.output_tokens[which]),
            () if self.chains is None else self.chains.at(which),
        )

    def __iter__(self) -> Iterator[Request]:
        for start in range(0, len(self), _CHUNK):
            part = slice(start, start + _CHUNK)
            rows = zip(
                self.indexes[part].tolist(),
                self.planned_s[part].tolist(),
                self.input_tokens[part].tolist(),
                self.output_tokens[part].tolist(),
                strict=True,
            )
            if self.chains is None:
                yield from (_request(*row, ()) for row in rows)
            else:
                yield from (
                    _request(*row, self.chains.at(start + place)) for place, row in enumerate(rows)
                )

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Schedule):
            return len(self) == len(other) and self.sha256() == other.sha256()
        if isinstance(other, Sequence):
            return len(self) == len(other) and all(map(_equal, self, other))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]  # equal to a tuple, whose hash it could not have

    def sha256(self) -> str:
        """The same for the same requests on every machine; a changed bit anywhere changes it."""
        digest = hashlib.sha256(_VERSION)
        digest.update(_bytes(self.indexes, "<i8"))
        digest.update(_bytes(self.planned_s, "<f8"))
        digest.update(_bytes(self.input_tokens, "<i8"))
        digest.update(_bytes(self.output_tokens, "<i8"))
        if self.chains is not None:
            digest.update(_bytes(self.chains.count, "<i8"))
            for start in range(0, len(self), _CHUNK):
                digest.update(_bytes(self.chains.joined(start, start + _CHUNK), "<i8"))
        return digest.hexdigest()


def _request(
    index: int, planned_s: float, new: int, out: int, hash_ids: tuple[int, ...]
) -> Request:
    return Request(f"{index:06d}", index, planned_s, new, out, hash_ids)


def _equal(one: object, other: object) -> bool:
    return one == other


def _bytes(column: FloatArray | IntArray, kind: str) -> memoryview:
    return np.ascontiguousarray(column, dtype=kind).data.cast("B")
