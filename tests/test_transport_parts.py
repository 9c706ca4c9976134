"""Layers that are handed over in parts, as a prefill in chunks computes them."""

import asyncio
import itertools
import random
from collections.abc import Iterator

import pytest
from transport_peer import SECRET, run, soon

from harness.core import TransportError
from harness.transport.receiver import KvReceiver
from harness.transport.sender import KvSender, Transfer


def cuts(rng: random.Random, size: int) -> Iterator[tuple[int, int]]:
    """Parts of a layer in order, some of them empty."""
    bounds = sorted([0, size, *(rng.randrange(size + 1) for _ in range(rng.randrange(5)))])
    yield from itertools.pairwise(bounds)


@pytest.mark.parametrize("connections", [1, 4])
@pytest.mark.parametrize("striping", ["chunked", "whole"])
@pytest.mark.parametrize("reports", [True, False])
def test_parts_of_layers_arrive_as_the_layers(
    connections: int, striping: str, reports: bool
) -> None:
    """Parts of several layers in turn, in whatever sizes; a layer is reported once, when whole."""

    async def main() -> None:
        rng = random.Random(connections)
        async with (
            KvReceiver(SECRET) as receiver,
            KvSender(SECRET, connections, chunk_bytes=4096, striping=striping) as sender,  # type: ignore[arg-type]  # a parameter of the test
        ):
            port = await receiver.start("127.0.0.1")
            for room in range(6):
                layers = [rng.randbytes(rng.randrange(1, 60_000)) for _ in range(9)]
                parts = {k: list(cuts(rng, len(layer))) for k, layer in enumerate(layers)}
                reported: list[int] = []
                expected = receiver.expect(room, soon())
                transfer = await sender.open(
                    "127.0.0.1", port, room, tuple(map(len, layers)),
                    on_layer=reported.append if reports else None,
                )  # fmt: skip
                while parts:
                    layer = rng.choice(list(parts))
                    start, end = parts[layer].pop(0)
                    transfer.send_part(layer, start, memoryview(layers[layer])[start:end])
                    if not parts[layer]:
                        del parts[layer]
                    await asyncio.sleep(0)
                await transfer.finish()
                received = await expected
                assert [bytes(received.layer(k)) for k in range(received.layers)] == layers
                received.release()
                await asyncio.sleep(0)
                assert sorted(reported) == (list(range(9)) if reports else [])

    run(main())


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ([(0, 0, 10), (0, 20, 30)], "bytes 20 to 30 of layer 0 .*those from 10 on come next"),
        ([(0, 0, 10), (0, 5, 20)], "bytes 5 to 20 of layer 0 .*those from 10 on come next"),
        ([(0, 0, 101)], "bytes 0 to 101 of layer 0 .*of its 100"),
        ([(0, 0, 100), (0, 0, 1)], "layer 0 was handed over twice"),
        ([(2, 0, 1)], "layer 2 of 2"),
        ([(0, 0, 60), (1, 0, 100)], "1 layers were never handed over, the first is 0"),
    ],
)
def test_parts_that_do_not_make_a_layer_are_refused(
    parts: list[tuple[int, int, int]], told: str
) -> None:
    async def main() -> None:
        async with KvReceiver(SECRET) as receiver, KvSender(SECRET, 1) as sender:
            port = await receiver.start("127.0.0.1")
            transfer = await sender.open("127.0.0.1", port, 1, (100, 100))
            with pytest.raises(TransportError, match=told):
                await hand_over(transfer, parts)
            transfer.abort("enough")

    run(main())


async def hand_over(transfer: Transfer, parts: list[tuple[int, int, int]]) -> None:
    for layer, start, end in parts:
        transfer.send_part(layer, start, bytes(end - start))
    await transfer.finish()
