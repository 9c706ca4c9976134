"""What a prefix pool holds: who pins it, in which order it is evicted, and what is to be told.

A prompt's blocks are held as runs (``harness.key_runs``): consecutive blocks that came together and
are pinned by the same leases, so that a prompt is pinned, released and evicted at once and not
block by block. A run is cut in two where a lease pins only its beginning. The states that came
together are one group in the same way. The order is that of single blocks and states:

    what has no pins waits in the order of its release; a run gives up its last block first, and a
    group of states the last one it was given.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from harness.key_runs import Span, common
from harness.prefix_holders import Holders


class _Run:
    """Blocks ``first`` to ``end - 1`` of a prompt with these keys. ``told``: of its being here."""

    __slots__ = ("end", "first", "keys", "pins", "told")

    def __init__(self, keys: Sequence[int], first: int, end: int, pins: int, told: bool) -> None:
        self.keys = keys
        self.first = first
        self.end = end
        self.pins = pins
        self.told = told


class _States:
    """States by the keys of the blocks at whose ends they are, the one to be evicted first last."""

    __slots__ = ("keys", "pins", "told")

    def __init__(self, keys: list[int], pins: int, told: bool) -> None:
        self.keys = keys
        self.pins = pins
        self.told = told


class Changes(NamedTuple):
    """What came and what went, and may have gone and come again, since the last ``take``: what came
    from the beginnings of prompts on, what went in the order in which it did, from the ends on."""

    added: list[Span]
    removed: list[Span]
    added_states: list[int]
    removed_states: list[int]


class PrefixStore:
    """Blocks and states with their pins; a state takes ``state_blocks``. Sizes are in blocks."""

    def __init__(self, state_blocks: int) -> None:
        self.cached_blocks = 0
        self.pinned_blocks = 0
        self._state_blocks = state_blocks
        self._runs: dict[int, _Run] = {}  # by the first key
        self._states: dict[int, _States] = {}  # by each key
        self._idle: OrderedDict[_Run | _States, None] = OrderedDict()  # without pins, oldest first
        self._new_runs: list[_Run] = []
        self._new_states: list[_States] = []
        self._removed: list[Span] = []
        self._removed_states: list[int] = []
        self._holders: Holders | None = None
        self._bit = 0

    def join(self, holders: Holders) -> None:
        """Tell ``holders`` of all that is held and what becomes of it."""
        assert self._holders is None, "a pool has one place"
        self._holders, self._bit = holders, holders.new_bit()
        for span in self.spans():
            holders.add(span, self._bit)
        holders.add_states(tuple(self._states), self._bit)

    def spans(self) -> list[Span]:
        """All blocks held, those nearest to the beginning of their prompts first."""
        return sorted([(r.keys, r.first, r.end) for r in self._runs.values()], key=_first)

    def blocks(self) -> Iterator[int]:
        """The keys of all blocks held."""
        for run in self._runs.values():
            yield from run.keys[run.first : run.end]

    def states(self) -> tuple[int, ...]:
        """The keys of all states held."""
        return tuple(self._states)

    def held(self, keys: Sequence[int], most: int) -> int:
        """Of the first ``most`` blocks, how many are held from the first on. O(runs log n)."""
        runs, at = self._runs, 0
        while at < most:
            run = runs.get(keys[at])
            if run is None:
                break
            at += common(keys, at, run.keys, run.first, min(most - at, run.end - run.first))
        return at

    def has_state(self, key: int) -> bool:
        """Whether the state at the end of the block is held."""
        return key in self._states

    def pin(self, keys: Sequence[int], at: int, end: int) -> int:
        """Pin what is held of the blocks ``at`` to ``end - 1``; those before them are pinned. Gives
        the first that is not held."""
        runs = self._runs
        while at < end:
            run = runs.get(keys[at])
            if run is None:
                break
            length = run.end - run.first
            same = common(keys, at, run.keys, run.first, min(end - at, length))
            if same < length:
                run = self._cut(run, same)
            if not run.pins:
                self._idle.pop(run, None)  # a beginning just cut off is not there
                self.pinned_blocks += same
            run.pins += 1
            at += same
        return at

    def _cut(self, run: _Run, length: int) -> _Run:
        """The first blocks as a run of their own, which has no place among the idle: who cuts it
        off pins it. The rest keeps its place."""
        middle = run.first + length
        head = _Run(run.keys, run.first, middle, run.pins, run.told)
        self._runs[run.keys[run.first]] = head
        run.first = middle
        self._runs[run.keys[middle]] = run
        if not run.told:
            self._new_runs.append(head)
        return head

    def add(self, keys: Sequence[int], first: int, end: int) -> None:
        """Hold blocks that are not held, pinned once; those before them are."""
        self._runs[keys[first]] = run = _Run(keys, first, end, 1, False)
        self._new_runs.append(run)
        self.cached_blocks += end - first
        self.pinned_blocks += end - first
        if self._holders is not None:
            self._holders.add((keys, first, end), self._bit)

    def unpin(self, keys: Sequence[int], blocks: int) -> None:
        """Unpin the first blocks of a prompt, from last to first."""
        runs, at = self._runs, 0
        found = []
        while at < blocks:
            run = runs[keys[at]]
            found.append(run)
            at += run.end - run.first
        assert at == blocks, "a lease ends where a run does"
        for run in reversed(found):
            run.pins -= 1
            if not run.pins:
                self._idle[run] = None
                self.pinned_blocks -= run.end - run.first

    def pin_state(self, key: int) -> None:
        """Pin one that is held."""
        group = self._states[key]
        if len(group.keys) > 1:
            group = self._single(group, key)
        elif not group.pins:
            del self._idle[group]
        if not group.pins:
            self.pinned_blocks += self._state_blocks
        group.pins += 1

    def _single(self, group: _States, key: int) -> _States:
        """One of several as a group of its own, which has no place among the idle. Of pinned ones
        those after it part from those before it: they will be released on either side of it."""
        place = group.keys.index(key)
        one = self._part(group, [key])
        if group.pins and group.keys[place + 1 :]:
            self._part(group, group.keys[place + 1 :])
        group.keys = group.keys[:place] + ([] if group.pins else group.keys[place + 1 :])
        return one

    def _part(self, group: _States, keys: list[int]) -> _States:
        part = _States(keys, group.pins, group.told)
        for key in keys:
            self._states[key] = part
        if not group.told:
            self._new_states.append(part)
        return part

    def add_states(self, keys: list[int]) -> None:
        """Hold states that are not held, pinned once."""
        group = _States(keys.copy(), 1, False)
        self._states.update(dict.fromkeys(keys, group))
        self._new_states.append(group)
        size = len(keys) * self._state_blocks
        self.cached_blocks += size
        self.pinned_blocks += size
        if self._holders is not None:
            self._holders.add_states(keys, self._bit)

    def unpin_states(self, keys: Sequence[int]) -> None:
        """Unpin states, from last to first."""
        states, before = self._states, None
        for key in reversed(keys):
            group = states[key]
            if group is before:
                continue
            before = group
            group.pins -= 1
            if not group.pins:
                self._idle[group] = None
                self.pinned_blocks -= len(group.keys) * self._state_blocks

    def evict(self, blocks: int) -> None:
        """Make so many blocks free, or more by a state's, least recently released first."""
        idle = self._idle
        while blocks > 0:
            unit = next(iter(idle))
            if type(unit) is _States:
                size, left = self._evict_states(unit, blocks)
            else:
                assert type(unit) is _Run
                size = min(blocks, unit.end - unit.first)
                self._shorten(unit, size)
                left = unit.end - unit.first
            if not left:
                del idle[unit]
            blocks -= size
            self.cached_blocks -= size

    def _evict_states(self, group: _States, blocks: int) -> tuple[int, int]:
        """The last ones of a group, for so many blocks; what they took, and how many are left."""
        count = -(-blocks // self._state_blocks)
        gone = group.keys[: -count - 1 : -1]
        del group.keys[-count:]
        for key in gone:
            del self._states[key]
        if self._holders is not None:
            self._holders.remove_states(gone, self._bit)
        if group.told:
            self._removed_states += gone
        return len(gone) * self._state_blocks, len(group.keys)

    def _shorten(self, run: _Run, blocks: int) -> None:
        keys, end = run.keys, run.end
        run.end = first = end - blocks
        if first == run.first:
            del self._runs[keys[first]]
        span = (keys, first, end)
        if self._holders is not None:
            self._holders.remove(span, self._bit, self._bit)
        if run.told:
            removed = self._removed
            if removed and removed[-1][0] is keys and removed[-1][1] == end:
                removed[-1] = (keys, first, removed[-1][2])
            else:
                removed.append(span)

    def clear(self) -> None:
        """Evict all that has no pins."""
        self.evict(self.cached_blocks - self.pinned_blocks)

    def take(self) -> Changes | None:
        """What has changed since the last call; None when nothing has."""
        if not (self._removed or self._new_runs or self._removed_states or self._new_states):
            return None
        added: list[Span] = []
        for run in self._new_runs:
            run.told = True
            if run.first < run.end:
                added.append((run.keys, run.first, run.end))
        if len(added) > 1:
            added.sort(key=_first)
        states: list[int] = []
        for group in self._new_states:
            group.told = True
            states += group.keys
        removed, removed_states = self._removed, self._removed_states
        if self._new_runs:
            self._new_runs = []
        if self._new_states:
            self._new_states = []
        if removed:
            self._removed = []
        if removed_states:
            self._removed_states = []
        if added or removed or states or removed_states:
            return Changes(added, removed, states, removed_states)
        return None


def _first(span: Span) -> int:
    return span[1]
