"""The memory that KV lands in: one mapping, taken from the system once and used again and again.

A block is contiguous and page-aligned; the first gap that is large enough is taken, so what is
resident stays near the most that was ever in use at once. Pages are touched when KV first lands.
"""

import mmap
from bisect import bisect_left, insort
from dataclasses import dataclass

_PAGE_BYTES = mmap.PAGESIZE


@dataclass(frozen=True, slots=True)
class Block:
    """``length_bytes`` from ``start`` are held; ``view`` is what was asked for of them."""

    start: int
    length_bytes: int
    view: memoryview


class Arena:
    """First fit over a sorted list of gaps. Not thread-safe: its owner holds a lock."""

    def __init__(self, size_bytes: int) -> None:
        assert size_bytes > 0
        self.size_bytes = -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES
        self._memory = memoryview(mmap.mmap(-1, self.size_bytes))
        self._gaps: list[tuple[int, int]] = [(0, self.size_bytes)]  # (start, length), sorted

    @property
    def free_bytes(self) -> int:
        return sum(length for _, length in self._gaps)

    def take(self, nbytes: int) -> Block | None:
        """A block, or None where no gap is large enough."""
        length = -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES
        if length == 0:
            return Block(0, 0, self._memory[:0])
        for index, (start, gap) in enumerate(self._gaps):
            if gap < length:
                continue
            if gap == length:
                del self._gaps[index]
            else:
                self._gaps[index] = (start + length, gap - length)
            return Block(start, length, self._memory[start : start + nbytes])
        return None

    def give_back(self, block: Block) -> None:
        """Every block once; neighbouring gaps become one."""
        if block.length_bytes == 0:
            return
        start, end = block.start, block.start + block.length_bytes
        at = bisect_left(self._gaps, (start, 0))
        if at < len(self._gaps) and self._gaps[at][0] == end:
            end += self._gaps.pop(at)[1]
        if at > 0 and sum(self._gaps[at - 1]) == start:
            start = self._gaps.pop(at - 1)[0]
        insort(self._gaps, (start, end - start))
