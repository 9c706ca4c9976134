"""One end of the transport benchmark in a process of its own, over the public API only.

    python -m benchmarks.transport_end sender | receiver    < the payload's size + requests

A helper (see ``netem.control``): one JSON line a request and an answer. Requests of both ends:

    {"op": "begin", "settings", ["peer"]}     the receiver answers with its port
    {"op": "stream"}    the sender only: transfers are under way, and each slot has done three
    {"op": "mark"}      moment, CPU seconds of this process, and at the sender the payload of
                        TCP that the peer's kernel has acknowledged, over all connections
    {"op": "end", ["payload_bytes"]}    what crossed in all, after the transfers that were under
                        way; the receiver is told how much to wait for

or, instead of ``stream``, ``{"op": "prefill", "prefill_s", "count", "layerwise"}``: one transfer
after the other, its layers ready at equal steps of a prefill; it answers how long after the prefill
the last byte was acknowledged.

Both ends make the same payload from a seed, and the receiver compares the whole of the first
transfer of each slot.
"""

import asyncio
import os
import resource
import sys
import time
from collections.abc import Callable, Coroutine
from itertools import count as counted
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from harness.child import each_order, open_orders, read_config, run_child, settle, tell
from harness.core import PrfaasError, TransportError
from harness.transport.receiver import KvReceiver, ReceiverLimits
from harness.transport.sender import KvSender
from harness.transport.socket_options import SocketOptions
from harness.transport.tls import TlsFiles

_DEADLINE_S = 60.0
_SEED = 5
#: Transfers of each slot before a stream counts as under way: by then the receiver's memory, room
#: for two of each, has been touched, and its first touch is not in the window.
_FIRST_TRANSFERS = 3


class Payload(msgspec.Struct, frozen=True):
    """The most bytes that a transfer of any run may have; smaller ones take a part of it."""

    max_transfer_bytes: int
    host: str


class Settings(msgspec.Struct, frozen=True):
    """One run. ``tls`` is certificate, key and authority."""

    secret: str
    connections: int
    checksum: bool
    layers: int
    transfer_bytes: int
    in_flight: int
    congestion_control: str | None = None
    tls: tuple[str, str, str] | None = None

    @property
    def layer_bytes(self) -> int:
        return self.transfer_bytes // self.layers

    def tls_files(self) -> TlsFiles | None:
        return None if self.tls is None else TlsFiles(*map(Path, self.tls))


class Receiving:
    """Lands every room of a run and gives it back at once."""

    def __init__(self, payload: memoryview, host: str) -> None:
        self._payload, self._host = payload, host
        self._receiver: KvReceiver | None = None
        self._slots: list[asyncio.Task[None]] = []
        self._received_bytes = 0
        self._landed = asyncio.Condition()

    async def begin(self, settings: Settings) -> dict[str, Any]:
        # A sender may offer its next transfer before the one acknowledged to it is given back here.
        limits = ReceiverLimits(max_buffer_bytes=2 * settings.in_flight * settings.transfer_bytes)
        secret = bytes.fromhex(settings.secret)
        self._receiver = KvReceiver(
            secret,
            limits,
            options=SocketOptions(congestion_control=settings.congestion_control),
            tls=settings.tls_files(),
        )
        port = await self._receiver.start(self._host)
        self._received_bytes = 0
        self._slots = [
            asyncio.create_task(self._land(slot, settings)) for slot in range(settings.in_flight)
        ]
        return {"port": port}

    def mark(self) -> dict[str, Any]:
        for slot in self._slots:
            if slot.done():
                slot.result()
        return {}

    async def end(self, payload_bytes: int) -> dict[str, Any]:
        """Close when what the sender has counted is here: it may know of a landing first."""
        assert self._receiver is not None, "begin first"
        async with asyncio.timeout(_DEADLINE_S), self._landed:
            await self._landed.wait_for(lambda: self._received_bytes >= payload_bytes)
        for slot in self._slots:
            slot.cancel()
        for slot in self._slots:
            try:
                await slot
            except asyncio.CancelledError:
                continue
        await self._receiver.close()
        return {"payload_bytes": self._received_bytes}

    async def _land(self, slot: int, settings: Settings) -> None:
        assert self._receiver is not None
        room = slot
        while True:
            landed = await self._receiver.expect(room, time.monotonic() + _DEADLINE_S)
            if landed.payload_bytes != settings.transfer_bytes or (
                room == slot and not _same(landed.buffer, self._payload[: settings.transfer_bytes])
            ):
                raise TransportError(f"room {room} did not arrive as it was sent")
            landed.release()
            async with self._landed:
                self._received_bytes += landed.payload_bytes
                self._landed.notify_all()
            room += settings.in_flight


class Sending:
    """Keeps transfers under way."""

    def __init__(self, payload: memoryview, _host: str) -> None:
        self._payload = payload
        self._sender: KvSender | None = None
        self._slots: list[asyncio.Task[None]] = []
        self._stopping = False
        self._sent_bytes = 0
        self._room = 0

    async def begin(self, settings: Settings, peer: tuple[str, int]) -> dict[str, Any]:
        self._settings, self._peer = settings, peer
        secret = bytes.fromhex(settings.secret)
        self._sender = KvSender(
            secret,
            settings.connections,
            checksum=settings.checksum,
            congestion_control=settings.congestion_control,
            tls=settings.tls_files(),
        )
        await self._sender.connect(*peer)
        self._stopping, self._sent_bytes, self._room = False, 0, 0
        return {}

    async def stream(self) -> dict[str, Any]:
        """Keep ``in_flight`` transfers going until the end; answers when each slot did three."""
        first = [asyncio.Event() for _ in range(self._settings.in_flight)]
        self._slots = [
            asyncio.create_task(self._send(slot, done)) for slot, done in enumerate(first)
        ]
        started = asyncio.create_task(_all_set(first))
        await asyncio.wait([*self._slots, started], return_when=asyncio.FIRST_COMPLETED)
        self.mark()  # raises what ended a slot
        return {}

    async def prefill(self, prefill_s: float, count: int, layerwise: bool) -> dict[str, Any]:
        """Transfers one by one, each beside a prefill; seconds from its end to the Ack."""
        return {"exposed_s": [await self._prefill(prefill_s, layerwise) for _ in range(count)]}

    def mark(self) -> dict[str, Any]:
        for slot in self._slots:
            if slot.done():
                slot.result()
        assert self._sender is not None, "begin first"
        samples = self._sender.samples()
        if len(samples) != self._settings.connections:
            raise TransportError(
                f"{len(samples)} connections are open, {self._settings.connections} were asked for"
            )
        return {"acked_bytes": sum(sample.bytes_acked or 0 for sample in samples)}

    async def end(self) -> dict[str, Any]:
        assert self._sender is not None, "begin first"
        self._stopping = True
        await asyncio.gather(*self._slots)
        self._slots = []
        last = self.mark()
        await self._sender.close()
        return {"payload_bytes": self._sent_bytes, **last}

    def _layers(self) -> list[memoryview]:
        size = self._settings.layer_bytes
        return [self._payload[k * size : (k + 1) * size] for k in range(self._settings.layers)]

    async def _send(self, slot: int, first_done: asyncio.Event) -> None:
        assert self._sender is not None
        settings, room, layers = self._settings, slot, self._layers()
        sizes = (settings.layer_bytes,) * settings.layers
        for turn in counted(1):
            if self._stopping:
                return
            transfer = await self._sender.open(*self._peer, room, sizes)
            for index, layer in enumerate(layers):
                transfer.send_layer(index, layer)
            receipt = await transfer.finish()
            self._sent_bytes += receipt.payload_bytes
            if turn == _FIRST_TRANSFERS:
                first_done.set()
            room += settings.in_flight

    async def _prefill(self, prefill_s: float, layerwise: bool) -> float:
        assert self._sender is not None
        settings, layers = self._settings, self._layers()
        sizes = (settings.layer_bytes,) * settings.layers
        transfer = await self._sender.open(*self._peer, self._room, sizes)
        self._room += 1
        start_s = time.monotonic()
        end_s = start_s + prefill_s
        for index, layer in enumerate(layers):
            ready_s = start_s + prefill_s * (index + 1) / len(layers)
            wait_s = (ready_s if layerwise else end_s) - time.monotonic()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            transfer.send_layer(index, layer)
        receipt = await transfer.finish()
        self._sent_bytes += receipt.payload_bytes
        return receipt.acked_mono_ns / 1e9 - end_s


async def _all_set(events: list[asyncio.Event]) -> None:
    for event in events:
        await event.wait()


def _same(one: memoryview, other: memoryview) -> bool:
    """As ``==``, which compares memoryviews item by item."""
    return np.array_equal(np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8))


def _spent() -> dict[str, Any]:
    """The moment, and what this process has used up to it."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "mono_ns": time.monotonic_ns(),
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "threads": len(os.listdir("/proc/self/task")),
    }


async def _answer(end: Any, order: dict[str, Any]) -> dict[str, Any]:
    operation = order.pop("op")
    if operation == "mark":
        return {**end.mark(), **_spent()}
    if "settings" in order:
        order["settings"] = msgspec.convert(order["settings"], Settings)
    handle: Callable[..., Coroutine[Any, Any, dict[str, Any]]] = getattr(end, operation)
    return await handle(**order)


async def serve(role: str) -> None:
    orders = await open_orders()
    given = await read_config(orders, Payload)
    data = np.random.default_rng(_SEED).bytes(given.max_transfer_bytes)
    end = {"sender": Sending, "receiver": Receiving}[role](memoryview(data), given.host)
    settle()
    tell("ready")
    async for order in each_order(orders):
        try:
            answer = await _answer(end, order)
        except (PrfaasError, TimeoutError) as error:
            answer = {"error": str(error) or f"no end within {_DEADLINE_S:g} s"}
        tell("answer", **answer)


if __name__ == "__main__":
    sys.exit(run_child(serve(sys.argv[1])))
