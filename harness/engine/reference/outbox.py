"""A layer's bytes on their way from the device to where a transport reads them.

On the processor growing KV is a view of the cache and nothing is copied. On a GPU a second stream
waits for what has been queued so far, copies into pinned memory beside the next layer's compute,
and a thread hands the bytes over when the copy's event has come. Windows and states are copied
either way, since the slot goes on to change. The CUDA path is written with care and has not been
run: no test here has a GPU.
"""

import queue
import threading
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from harness.engine.compute import Piece
from harness.engine.reference.cache import Cache

Deliver = Callable[[Piece], None]


class Outbox(Protocol):
    """Called from the thread that computes; ``deliver`` may be called from another."""

    def send(
        self, slot: int, layer: int, first_byte: int, data: Tensor, last: bool, to: Deliver
    ) -> None:
        """``data`` [bytes] uint8 lies from ``first_byte`` of the layer on."""

    def settle(self) -> None:
        """Return when all that was sent has been delivered."""

    def close(self) -> None: ...


class HostOutbox:
    """The cache lies in this machine's memory."""

    def send(
        self,
        slot: int,  # noqa: ARG002 - no memory of its own is needed
        layer: int,
        first_byte: int,
        data: Tensor,
        last: bool,
        to: Deliver,
    ) -> None:
        to(Piece(layer, first_byte, memoryview(data.numpy()), last))

    def settle(self) -> None:
        """Nothing is ever on its way."""

    def close(self) -> None:
        """There is nothing to end."""


class CudaOutbox:
    """Pinned memory as large as a slot's layer, for each slot and layer that was ever sent."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._stream = torch.cuda.Stream(cache.device)
        self._pinned: dict[tuple[int, int], Tensor] = {}
        self._on_way: queue.Queue[tuple[torch.cuda.Event, Piece, Deliver] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._hand_over, name="kv-outbox", daemon=True)
        self._thread.start()

    def send(
        self, slot: int, layer: int, first_byte: int, data: Tensor, last: bool, to: Deliver
    ) -> None:
        here = self._room(slot, layer, first_byte + data.numel())
        place = here[first_byte : first_byte + data.numel()]
        self._stream.wait_stream(torch.cuda.current_stream(self._cache.device))
        with torch.cuda.stream(self._stream):
            place.copy_(data, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self._stream)
        # A state's copy is freed by the compute stream's allocator; not before this one is through.
        data.record_stream(self._stream)
        view = memoryview(place.numpy())
        self._on_way.put((copied, Piece(layer, first_byte, view, last), to))

    def settle(self) -> None:
        self._on_way.join()

    def close(self) -> None:
        self._on_way.put(None)
        self._thread.join()

    def _room(self, slot: int, layer: int, nbytes: int) -> Tensor:
        held = self._pinned.get((slot, layer))
        if held is None:
            nbytes = max(nbytes, self._cache.layer_capacity_bytes(layer))
            held = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            self._pinned[slot, layer] = held
        assert held.numel() >= nbytes, "a slot's layer does not grow beyond its capacity"
        return held

    def _hand_over(self) -> None:
        while (one := self._on_way.get()) is not None:
            copied, piece, to = one
            copied.synchronize()
            to(piece)
            self._on_way.task_done()


def open_outbox(cache: Cache) -> Outbox:
    """For what lies on the cache's device."""
    return CudaOutbox(cache) if cache.device.type == "cuda" else HostOutbox()
