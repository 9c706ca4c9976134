"""Many transfers of mixed sizes at once over one pair of instances: fairness, memory, exact bytes.

    python -m benchmarks.transport_sharing [--json] [--transfers N] [--buffer-mib M]

All transfers are offered at once to a receiver in another process, whose buffers hold a small part
of their sum; its user releases each room once it has compared every byte. Sizes are log-normal.

``slowdown`` is how long a small transfer took from its offer, over what one of the same size takes
alone on the same idle pair in the same run. ``share_of_run`` is that time over the time of all, so
1 means that it waited for everything. The receiver's memory is what its peak resident set has
grown by since it listened, over the bytes that its buffers may hold (the credit window).
"""

import argparse
import asyncio
import json
import secrets
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from harness.transport.receiver import KvReceiver, ReceiverLimits
from harness.transport.sender import KvSender

_HOST = "127.0.0.1"
_MEDIAN_BYTES, _SIGMA = 150_000, 1.3
_LEAST_BYTES, _MOST_BYTES = 10_000, 20_000_000
_LONE = 20
#: A small transfer: of the smallest this part of all.
_SMALL = 0.5
_DEADLINE_S = 120.0


@dataclass(frozen=True)
class Sharing:
    """One run."""

    transfers: int = 1000
    buffer_bytes: int = 32 * 2**20
    connections: int = 4
    seed: int = 5

    def sizes(self) -> list[int]:
        """Bytes of each transfer; the first ``_LONE`` are sent alone, one after another."""
        rng = Random(self.seed)
        sizes = [
            min(_MOST_BYTES, max(_LEAST_BYTES, int(rng.lognormvariate(0, _SIGMA) * _MEDIAN_BYTES)))
            for _ in range(self.transfers)
        ]
        small = sorted(sizes)[: int(len(sizes) * _SMALL)]
        return [*small[:: max(1, len(small) // _LONE)][:_LONE], *sizes]

    def source(self) -> memoryview:
        """Where transfers take their bytes from: those of room k start at k."""
        generator = np.random.default_rng(self.seed)
        return memoryview(generator.bytes(_MOST_BYTES + self.transfers + _LONE))


def resident_bytes(what: str) -> int:
    """VmRSS or VmHWM of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {what} in /proc/self/status")


async def receive(sharing: Sharing, secret: bytes) -> None:
    """The receiver's process: says its port, then what came of all rooms."""
    source, sizes = sharing.source(), sharing.sizes()
    limits = ReceiverLimits(
        max_buffer_bytes=max(sharing.buffer_bytes, max(sizes)), max_held_rooms=len(sizes)
    )
    wrong: list[int] = []
    async with KvReceiver(secret, limits) as receiver:
        port = await receiver.start(_HOST)
        futures = [
            receiver.expect(room, time.monotonic() + _DEADLINE_S) for room in range(len(sizes))
        ]
        before_bytes = resident_bytes("VmRSS")
        print(json.dumps({"port": port}), flush=True)
        most_buffered_bytes = 0

        async def land(room: int) -> None:
            nonlocal most_buffered_bytes
            received = await futures[room]
            most_buffered_bytes = max(most_buffered_bytes, receiver.buffered_bytes)
            if received.buffer != source[room : room + sizes[room]]:
                wrong.append(room)
            received.release()

        await asyncio.gather(*map(land, range(len(sizes))))
        print(
            json.dumps(
                {
                    "wrong_rooms": wrong,
                    "credit_window_bytes": limits.max_buffer_bytes,
                    "most_buffered_bytes": most_buffered_bytes,
                    "left_buffered_bytes": receiver.buffered_bytes,
                    "memory_growth_bytes": resident_bytes("VmHWM") - before_bytes,
                }
            ),
            flush=True,
        )


async def send(sharing: Sharing, secret: bytes, port: int) -> dict[str, Any]:
    """The sender's side: seconds of each transfer from its offer to its acknowledgement."""
    source, sizes = sharing.source(), sharing.sizes()
    sender = KvSender(
        secret, sharing.connections, offer_timeout_s=_DEADLINE_S, ack_timeout_s=_DEADLINE_S
    )

    async def one(room: int) -> float:
        started_s, length = time.monotonic(), sizes[room]
        transfer = await sender.open(_HOST, port, room, (length // 2, length - length // 2))
        transfer.send_layer(0, source[room : room + length // 2])
        transfer.send_layer(1, source[room + length // 2 : room + length])
        await transfer.finish()
        return time.monotonic() - started_s

    async with sender:
        await sender.connect(_HOST, port)
        alone_s = [await one(room) for room in range(_LONE)]
        started_s = time.monotonic()
        took_s = await asyncio.gather(*map(one, range(_LONE, len(sizes))))
        all_s = time.monotonic() - started_s
    return summary(sizes[_LONE:], list(took_s), float(np.median(alone_s)), all_s)


def summary(sizes: list[int], took_s: list[float], alone_s: float, all_s: float) -> dict[str, Any]:
    """The figures of the sender's side."""
    order = np.argsort(sizes)
    small = np.asarray(took_s)[order[: int(len(sizes) * _SMALL)]]
    large = np.asarray(took_s)[order[int(len(sizes) * 0.9) :]]
    return {
        "payload_bytes": sum(sizes),
        "seconds": all_s,
        "goodput_bytes_per_s": sum(sizes) / all_s,
        "small_below_bytes": int(sorted(sizes)[int(len(sizes) * _SMALL)]),
        "small_alone_s": alone_s,
        "small_slowdown_p50": float(np.quantile(small, 0.5)) / alone_s,
        "small_slowdown_p99": float(np.quantile(small, 0.99)) / alone_s,
        "small_share_of_run_p50": float(np.quantile(small, 0.5)) / all_s,
        "small_share_of_run_p99": float(np.quantile(small, 0.99)) / all_s,
        "largest_tenth_share_of_run_p50": float(np.quantile(large, 0.5)) / all_s,
    }


async def measure(sharing: Sharing) -> dict[str, Any]:
    """Both ends, the receiver in a process of its own."""
    secret = secrets.token_bytes(32)
    order = json.dumps({**asdict(sharing), "secret": secret.hex()})
    receiver = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.transport_sharing", "--receiver", order),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert receiver.stdout is not None
        port = json.loads(await receiver.stdout.readline())["port"]
        sent = await send(sharing, secret, port)
        received = json.loads(await receiver.stdout.readline())
        await receiver.wait()
    finally:
        if receiver.returncode is None:
            receiver.kill()
            await receiver.wait()
    growth, window = received["memory_growth_bytes"], received["credit_window_bytes"]
    return {**asdict(sharing), **sent, **received, "memory_growth_over_window": growth / window}


def main() -> None:
    parser = argparse.ArgumentParser(description="Many KV transfers at once over one pair.")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--transfers", type=int, default=1000)
    parser.add_argument("--buffer-mib", type=int, default=32)
    parser.add_argument("--receiver", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.receiver is not None:
        order = json.loads(given.receiver)
        secret = bytes.fromhex(order.pop("secret"))
        asyncio.run(receive(Sharing(**order), secret))
        return
    sharing = Sharing(given.transfers, given.buffer_mib * 2**20)
    result = asyncio.run(measure(sharing))
    if given.json:
        print(json.dumps(result))
        return
    for key, value in result.items():
        print(f"{key:32} {value:.4g}" if isinstance(value, float) else f"{key:32} {value}")


if __name__ == "__main__":
    main()
