"""Where KV lands: one block of the arena a room, every byte of it taken once.

A room is one transfer. Its layers lie one after another in the block, so that layer k occupies
[starts[k], starts[k] + layer_bytes[k]) and one set of intervals covers all of them.

A frame under way holds a Claim on its bytes, for the kernel may be writing there at any moment:
the block is not used again before the last claim has ended. A frame that is sent again while its
first copy is still under way lands beside, and takes the place only if the first one is lost.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

from harness.core import TransportError
from harness.transport.arena import Block
from harness.transport.frames import MAX_PIECES, Code, DataHead, Done, Offer

#: Pieces out of order that a room may hold; more than any honest striping leaves.
MAX_INTERVALS = 16384


class RoomError(TransportError):
    """A frame does not fit its room; ``code`` is what the sender is told."""

    def __init__(self, code: Code, problem: str) -> None:
        super().__init__(problem)
        self.code = code


class Coverage:
    """The bytes that have arrived, as sorted disjoint intervals; neighbours are merged."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def __len__(self) -> int:
        return len(self._starts)

    def pieces(self, most: int) -> tuple[tuple[int, int], ...]:
        """The first intervals, ``most`` at most."""
        return tuple(zip(self._starts[:most], self._ends[:most], strict=True))

    def covers(self, start: int, end: int) -> bool:
        """Whether every byte of [start, end) has arrived."""
        at = bisect_right(self._starts, start)
        return at > 0 and self._ends[at - 1] >= end

    def add(self, start: int, end: int) -> bool:
        """Add [start, end); False, and no change, when a byte of it has already arrived."""
        starts, ends = self._starts, self._ends
        at = bisect_right(starts, start)
        if (at > 0 and ends[at - 1] > start) or (at < len(starts) and starts[at] < end):
            return False
        joins_left = at > 0 and ends[at - 1] == start
        joins_right = at < len(starts) and starts[at] == end
        if joins_left and joins_right:
            ends[at - 1] = ends[at]
            del starts[at], ends[at]
        elif joins_left:
            ends[at - 1] = end
        elif joins_right:
            starts[at] = start
        else:
            starts.insert(at, start)
            ends.insert(at, end)
        return True


@dataclass(slots=True)
class Received:
    """A transfer that arrived whole. Its memory counts as used until ``release()``.

    ``payload_bytes`` is the receiver's own count of KV bytes. ``meta`` is what came with the end of
    the transfer, or with its offer when the end carried none; ``last_byte_mono_ns`` is when the
    last KV byte was in the buffer (when the offer came, for a transfer of no bytes).
    """

    room: int
    payload_bytes: int
    layers: int
    meta: bytes
    offer_meta: bytes
    last_byte_mono_ns: int
    _buffer: memoryview | None
    _starts: tuple[int, ...]
    _on_release: Callable[[], None] | None = field(repr=False)

    @property
    def buffer(self) -> memoryview:
        """All layers, one after another; read-only."""
        if self._buffer is None:
            raise TransportError(f"the KV buffer of room {self.room} has been released")
        return self._buffer

    def layer(self, layer: int) -> memoryview:
        """The bytes of one layer; read-only."""
        return self.buffer[self._starts[layer] : self._starts[layer + 1]]

    def release(self) -> None:
        """Give the buffer back, after which no view of it may be read; further calls do nothing."""
        if self._on_release is not None:
            release, self._on_release, self._buffer = self._on_release, None, None
            release()


class Owner(Protocol):
    """The connection that a frame comes over."""

    def abort(self, reason: str) -> None: ...
    def let_go(self, claim: "Claim") -> None: ...


@dataclass(slots=True, eq=False)
class Claim:
    """A data frame under way: its bytes go to ``view``, which is its place or lies ``aside``."""

    landing: "Landing"
    owner: "Owner"
    head: DataHead
    start: int
    view: memoryview
    aside: bool
    successor: "Claim | None" = None

    @property
    def end(self) -> int:
        return self.start + self.head.length_bytes


class Landing:
    """A transfer on its way in. Whoever calls holds the lock of the table of rooms."""

    def __init__(self, offer: Offer, session: bytes, peer: str) -> None:
        self.room = offer.room
        self.transfer = offer.transfer
        self.session = session
        self.peer = peer
        self.layer_bytes = offer.layer_bytes
        self.total_bytes = sum(offer.layer_bytes)
        self.payload_bytes = 0
        self.last_byte_mono_ns = 0
        self.claims: list[Claim] = []
        self.block: Block | None = None
        self.closed = False
        self.flags = offer.flags
        self._offer_meta = offer.meta
        self._done_meta: bytes | None = None
        self._starts = tuple(accumulate(offer.layer_bytes, initial=0))
        self._layer_left = list(offer.layer_bytes)
        self._coverage = Coverage()

    @property
    def pieces(self) -> tuple[tuple[int, int], ...]:
        """What has arrived, as a frame can tell it."""
        return self._coverage.pieces(MAX_PIECES)

    @property
    def whole_layers(self) -> list[int]:
        """The layers that hold bytes, all of which have arrived."""
        return [
            layer
            for layer, (length, left) in enumerate(
                zip(self.layer_bytes, self._layer_left, strict=True)
            )
            if length > 0 and left == 0
        ]

    @property
    def landed(self) -> bool:
        """Whether the sender is done and every byte is there."""
        return self._done_meta is not None and self.payload_bytes == self.total_bytes

    def claim(self, owner: Owner, head: DataHead) -> Claim | None:
        """Room for a frame's payload; None when it has arrived already.

        RoomError when the frame does not belong there.
        """
        assert self.block is not None
        if head.layer >= len(self.layer_bytes):
            raise RoomError(
                Code.PROTOCOL, f"data for layer {head.layer} of {len(self.layer_bytes)}"
            )
        start = self._starts[head.layer] + head.offset
        end = start + head.length_bytes
        if head.offset >= self.layer_bytes[head.layer] or end > self.total_bytes:
            raise RoomError(
                Code.PROTOCOL,
                f"data for bytes {head.offset} to {head.offset + head.length_bytes} of layer "
                f"{head.layer}, which has {self.layer_bytes[head.layer]}, with "
                f"{self.total_bytes - self._starts[head.layer + 1]} bytes after it",
            )
        if self._coverage.covers(start, end):
            return None
        under_way = self.under_way(start, end)
        if under_way is not None and (under_way.start, under_way.end) != (start, end):
            raise self._overlap(head)
        view = self.block.view[start:end]
        if under_way is not None:
            view = memoryview(bytearray(head.length_bytes))
        claim = Claim(self, owner, head, start, view, aside=under_way is not None)
        self.claims.append(claim)
        return claim

    def under_way(self, start: int, end: int) -> Claim | None:
        """A frame that is landing in its place within [start, end)."""
        for claim in self.claims:
            if not claim.aside and claim.start < end and start < claim.end:
                return claim
        return None

    def take(self, claim: Claim, now_ns: int) -> list[int]:
        """The claim's payload is whole and sound; the layers that it completes."""
        assert self.block is not None
        first = self.under_way(claim.start, claim.end) if claim.aside else None
        if first is not None:
            first.successor = claim
            return []
        if self._coverage.covers(claim.start, claim.end):
            return []
        if not self._coverage.add(claim.start, claim.end):
            raise self._overlap(claim.head)
        if len(self._coverage) > MAX_INTERVALS:
            raise RoomError(Code.PROTOCOL, f"more than {MAX_INTERVALS} pieces out of order")
        if claim.aside:
            self.block.view[claim.start : claim.end] = claim.view
        self.payload_bytes += claim.head.length_bytes
        self.last_byte_mono_ns = now_ns
        return self._count(claim)

    def _count(self, claim: Claim) -> list[int]:
        """Take the claim's bytes off those that its layers lack; the layers that lack none now."""
        completed, layer, start = [], claim.head.layer, claim.start
        while start < claim.end:
            upto = min(claim.end, self._starts[layer + 1])
            self._layer_left[layer] -= upto - start
            if upto > start and self._layer_left[layer] == 0:
                completed.append(layer)
            layer, start = layer + 1, upto
        return completed

    def finish(self, done: Done) -> None:
        """The sender says that it has handed everything over; bytes may still be on their way."""
        if done.payload_bytes != self.total_bytes:
            raise RoomError(
                Code.PROTOCOL,
                f"the sender ends after {done.payload_bytes} bytes; it offered {self.total_bytes}",
            )
        if self._done_meta is not None and self._done_meta != done.meta:
            raise RoomError(Code.PROTOCOL, "the end of the transfer came twice, with other words")
        self._done_meta = done.meta

    def deliver(self, on_release: Callable[[], None]) -> Received:
        """Hand the buffer to its user."""
        assert self.landed, self.room
        assert self.block is not None
        return Received(
            room=self.room,
            payload_bytes=self.payload_bytes,
            layers=len(self.layer_bytes),
            meta=self._done_meta or self._offer_meta,
            offer_meta=self._offer_meta,
            last_byte_mono_ns=self.last_byte_mono_ns,
            _buffer=self.block.view.toreadonly(),
            _starts=self._starts,
            _on_release=on_release,
        )

    def _overlap(self, head: DataHead) -> RoomError:
        return RoomError(
            Code.PROTOCOL,
            f"byte {head.offset} of layer {head.layer} or after came in pieces that overlap",
        )
