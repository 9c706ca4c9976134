"""The two processes of benchmarks/transfer_exposure.py, one in each site of a link.

    python -m benchmarks.transfer_exposure_ends sender|receiver

Both read JSON lines: first ``{"secret"}``, with the address to listen at for the receiver, which
answers with its port, and with where to send for the sender, which answers with its congestion
control; then one line a transfer, answered by one line. They stop when their input ends. The sender
plays a prefill: pieces are released at absolute instants of the monotonic clock, which all
processes of a host share. Both run at a real-time priority where that is allowed, so that other
work on the machine is not measured.
"""

import asyncio
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from harness.core import TransportError
from harness.transport.receiver import KvReceiver, ReceiverLimits
from harness.transport.sender import KvSender
from harness.transport.socket_options import kernel_tcp, settle_tcp
from netem.site import Site
from netem.testlink import TestLink
from netem.wakeup import wake_precisely

#: From the acceptance of an offer to the start of the prefill.
_LEAD_S = 0.03
#: Beyond which a transfer has failed; the longest of benchmarks.transfer_loss takes minutes.
_DEADLINE_S = 300.0
_BUFFER_BYTES = 512 * 2**20
Messages: TypeAlias = asyncio.Queue[dict[str, Any]]
_ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Play:
    """One transfer to make. ``release_s`` counts from the prefill's start, in order.

    ``cold``: over connections that are opened for it. ``pacing_bytes_per_s``: of each connection.
    """

    room: int
    release_s: list[float]
    sizes_bytes: list[int]
    connections: int
    pacing_bytes_per_s: float | None
    chunk_bytes: int
    cold: bool = False


@dataclass(frozen=True, slots=True)
class Played:
    """``last_byte_s`` and ``acked_s`` count from the prefill's start; ``late_s`` is the largest
    delay of a release, which is the sending process's fault; ``retransmits`` counts segments."""

    last_byte_s: float
    acked_s: float
    late_s: float
    retransmits: int


class Ends:
    """Both processes, ready to play transfers one after another."""

    def __init__(
        self,
        sender: "subprocess.Popen[str]",
        receiver: "subprocess.Popen[str]",
        congestion_control: str,
    ) -> None:
        self.congestion_control = congestion_control
        self._sender, self._receiver = sender, receiver
        self._rooms = 0

    def play(self, play: dict[str, Any]) -> Played:
        """``play``: the fields of a ``Play`` but the room."""
        self._rooms += 1
        one = Play(room=self._rooms, **play)
        _write(self._receiver, {"room": one.room})
        _write(self._sender, asdict(one))
        sent, landed = _read(self._sender), _read(self._receiver)
        if landed["payload_bytes"] != sum(one.sizes_bytes):
            raise TransportError(f"{landed} arrived of {sum(one.sizes_bytes)} bytes")
        return Played(
            last_byte_s=(landed["last_byte_mono_ns"] - sent["start_mono_ns"]) / 1e9,
            acked_s=(sent["acked_mono_ns"] - sent["start_mono_ns"]) / 1e9,
            late_s=sent["late_s"],
            retransmits=sent["retransmits"],
        )


@contextmanager
def open_ends(link: TestLink, congestion_control: str | None = None) -> Iterator[Ends]:
    """A receiver in the near site and a sender in the far one, gone when the context ends.

    ``congestion_control`` None: as the kernel has it, which ``Ends.congestion_control`` tells.
    Sites with a namespace of their own are set so that a pause or a connection before leaves no
    trace; this machine's own is not touched.
    """
    secret = secrets.token_hex(32)
    with ExitStack() as stack:
        receiver = stack.enter_context(_process(link.near, "receiver"))
        _write(receiver, {"secret": secret, "host": link.near.address})
        host, port = link.expose(link.near, _read(receiver)["port"])
        sender = stack.enter_context(_process(link.far, "sender"))
        _write(
            sender,
            {
                "secret": secret,
                "host": host,
                "port": port,
                "control": congestion_control,
                "own_namespace": link.far.namespace is not None,
            },
        )
        yield Ends(sender, receiver, _read(sender)["congestion_control"])


@contextmanager
def _process(site: Site, role: str) -> Iterator["subprocess.Popen[str]"]:
    argv = [sys.executable, "-m", "benchmarks.transfer_exposure_ends", role]
    pipe = subprocess.PIPE
    process = site.popen(argv, stdin=pipe, stdout=pipe, text=True, cwd=_ROOT)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _write(process: "subprocess.Popen[str]", message: dict[str, Any]) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(message) + "\n")
    process.stdin.flush()


def _read(process: "subprocess.Popen[str]") -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise TransportError(f"an end has ended with status {process.wait()}; its error is above")
    answer: dict[str, Any] = json.loads(line)
    return answer


# In the processes


async def _serve(work: Callable[[Messages], Coroutine[Any, Any, None]]) -> None:
    """Work on what comes in until standard input ends, however the parent did."""
    reader, messages = asyncio.StreamReader(limit=2**24), Messages()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )

    async def read() -> None:
        while line := await reader.readline():
            messages.put_nowait(json.loads(line))

    tasks = [asyncio.create_task(work(messages)), asyncio.create_task(read())]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    for task in done:
        task.result()


def _answer(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


async def receive(messages: Messages) -> None:
    given = await messages.get()
    limits = ReceiverLimits(max_buffer_bytes=_BUFFER_BYTES)
    async with KvReceiver(bytes.fromhex(given["secret"]), limits) as receiver:
        _answer({"port": await receiver.start(given["host"])})
        while True:
            room = (await messages.get())["room"]
            received = await receiver.expect(room, time.monotonic() + _DEADLINE_S)
            _answer(
                {
                    "payload_bytes": received.payload_bytes,
                    "last_byte_mono_ns": received.last_byte_mono_ns,
                }
            )
            received.release()


async def send(messages: Messages) -> None:
    given = await messages.get()
    if given["own_namespace"]:
        settle_tcp()
    _answer({"congestion_control": given["control"] or kernel_tcp().congestion_control})
    kv = memoryview(os.urandom(2**20) * 16)
    secret, where = bytes.fromhex(given["secret"]), (given["host"], given["port"])
    senders: dict[tuple[Any, ...], KvSender] = {}
    while True:
        play = Play(**await messages.get())
        settings = (play.connections, play.pacing_bytes_per_s, play.chunk_bytes)
        if play.cold and (used := senders.pop(settings, None)) is not None:
            await used.close()
        if settings not in senders:
            senders[settings] = _sender(secret, play, given["control"])
        _answer(await _played(senders[settings], where, play, kv))


def _sender(secret: bytes, play: Play, control: str | None) -> KvSender:
    pacing = play.pacing_bytes_per_s
    return KvSender(
        secret,
        connections=play.connections,
        chunk_bytes=play.chunk_bytes,
        pacing_bytes_per_s=None if pacing is None else pacing * play.connections,
        congestion_control=control,
    )


async def _played(
    sender: KvSender, where: tuple[str, int], play: Play, kv: memoryview
) -> dict[str, Any]:
    await sender.connect(*where)
    before = _retransmits(sender)
    transfer = await sender.open(*where, play.room, tuple(play.sizes_bytes))
    start_s, late_s = time.monotonic() + _LEAD_S, 0.0
    for piece, (release_s, size) in enumerate(zip(play.release_s, play.sizes_bytes, strict=True)):
        left_s = start_s + release_s - time.monotonic()
        if left_s > 0:
            await asyncio.sleep(left_s)
        late_s = max(late_s, time.monotonic() - start_s - release_s)
        transfer.send_layer(piece, kv[:size])
    receipt = await transfer.finish(deadline_mono_s=time.monotonic() + _DEADLINE_S)
    return {
        "start_mono_ns": round(start_s * 1e9),
        "acked_mono_ns": receipt.acked_mono_ns,
        "late_s": late_s,
        "retransmits": _retransmits(sender) - before,
    }


def _retransmits(sender: KvSender) -> int:
    return sum(sample.retransmits or 0 for sample in sender.samples())


if __name__ == "__main__":
    wake_precisely()
    asyncio.run(_serve({"sender": send, "receiver": receive}[sys.argv[1]]))
