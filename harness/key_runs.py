"""Who of many holds which blocks of prompts, by runs of keys and not key by key.

Keys are chained (``harness.block_keys``): a key stands for all the blocks before it too. So two
prompts have their first blocks in common and then none, and a prompt that nobody shares is one run
however long it is. The runs are the edges of a radix tree of which no node is kept: from the end of
a run a prompt goes on with the run that begins with its next key, so a table of the runs by their
first keys is the whole tree. What the same holders have to the end of a run is one integer; where
holders part, a run is cut in two, and it stays so.

Whoever adds blocks has those before them, and whoever gives blocks up has given up those behind.
"""

from collections.abc import Sequence

#: (keys, first, end): the blocks ``first`` to ``end - 1`` of a prompt with these keys.
Span = tuple[Sequence[int], int, int]


def common(keys: Sequence[int], at: int, others: Sequence[int], first: int, most: int) -> int:
    """How many keys are equal from ``keys[at]`` and ``others[first]`` on, which are; ``most`` are
    looked at. O(log n), since equal keys have equal ones before them."""
    if keys[at + most - 1] == others[first + most - 1]:
        return most
    low, high = 1, most - 1
    while low < high:
        middle = (low + high) // 2
        if keys[at + middle] == others[first + middle]:
            low = middle + 1
        else:
            high = middle
    return low


class Run:
    """A stretch of a prompt's keys that the same holders have; ``bits`` says which."""

    __slots__ = ("bits", "end", "first", "keys")

    def __init__(self, keys: Sequence[int], first: int, end: int, bits: int) -> None:
        self.keys = keys
        self.first = first
        self.end = end
        self.bits = bits


class KeyRuns:
    """The runs by their first keys. ``blocks`` is how many blocks anybody holds."""

    def __init__(self) -> None:
        self.by_first: dict[int, Run] = {}
        self.blocks = 0

    def add(self, span: Span, bits: int) -> None:
        """Set ``bits`` for these blocks."""
        keys, at, end = span
        runs = self.by_first
        if at and keys[at] not in runs:
            self._cut(keys, at)
        while at < end:
            run = runs.get(keys[at])
            if run is None:
                runs[keys[at]] = Run(keys, at, end, bits)
                self.blocks += end - at
                return
            length = run.end - run.first
            same = common(keys, at, run.keys, run.first, min(end - at, length))
            if same < length:
                self._split(run, same)
            run.bits |= bits
            at += same

    def remove(
        self, span: Span, bit: int, alone: int, fellows: int = 0, fellows_bit: int = 0
    ) -> None:
        """Clear ``bit`` of these blocks, which are all held, and ``fellows_bit`` where no bit of
        ``fellows`` is left; ``alone`` are both, what a run has that nobody else holds."""
        keys, at, end = span
        runs = self.by_first
        if keys[at] not in runs:
            run = runs.get(keys[0])
            if run is not None and run.keys is keys and run.end == end and run.bits == alone:
                # The usual case: a prompt that nobody else has loses its last blocks.
                run.end = at
                self.blocks -= end - at
                return
            self._cut(keys, at)
        while at < end:
            key = keys[at]
            run = runs[key]
            length = run.end - run.first
            if length > end - at:
                self._split(run, end - at)
                length = end - at
            left = run.bits & ~bit
            if not left & fellows:
                left &= ~fellows_bit
            run.bits = left
            if not left:
                del runs[key]
                self.blocks -= length
            at += length

    def forget(self, bit: int, fellows: int, fellows_bit: int) -> None:
        """``remove`` for all that has ``bit``."""
        for key, run in list(self.by_first.items()):
            if run.bits & bit:
                run.bits &= ~bit
                if not run.bits & fellows:
                    run.bits &= ~fellows_bit
                if not run.bits:
                    del self.by_first[key]
                    self.blocks -= run.end - run.first

    def last(self, keys: Sequence[int], most: int) -> tuple[int, int]:
        """How many of the first ``most`` blocks anybody holds, and who has the last of them."""
        runs, at, bits = self.by_first, 0, 0
        while at < most:
            run = runs.get(keys[at])
            if run is None:
                break
            bits = run.bits
            at += common(keys, at, run.keys, run.first, min(most - at, run.end - run.first))
        return at, bits

    def _cut(self, keys: Sequence[int], at: int) -> None:
        """Let a run begin with the block ``at`` where one goes across."""
        runs, depth = self.by_first, 0
        while depth < at:
            run = runs.get(keys[depth])
            if run is None:
                return
            length = run.end - run.first
            if length > at - depth:
                if run.keys[run.first + at - depth - 1] == keys[at - 1]:
                    self._split(run, at - depth)
                return
            depth += length

    def _split(self, run: Run, length: int) -> None:
        middle = run.first + length
        self.by_first[run.keys[middle]] = Run(run.keys, middle, run.end, run.bits)
        run.end = middle
