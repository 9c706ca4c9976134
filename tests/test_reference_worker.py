"""The reference engine behind HTTP: what its decode end answers is what one process computes."""

import asyncio
import itertools
import time
from pathlib import Path
from typing import Any

import pytest
from cutting_proxy import ByteProxy, Fate, FrameProxy, Proxy, Side
from wire_reader import Data

from harness.engine.compute import PrefillJob
from harness.transport.frames import Control
from tests.reference_setup import CHUNK, CONTEXT, LAYERS, MIXED, VOCAB, Alone, tiny
from tests.worker_setup import Peer, workers

pytestmark = pytest.mark.torch

OUTPUT = 10


async def tokens_of(peer: Peer, prompt: tuple[int, ...], output_tokens: int) -> list[int]:
    """The decode half's tokens; the prefill half's first one is the same."""
    body = peer.body(list(prompt), "prfaas-p0", output_tokens)
    found: list[int] = []
    told: list[int] = []

    async def decode() -> None:
        async for chunk in peer.chunks("pd-d0", body):
            found.extend(chunk.output_ids)

    async def prefill() -> None:
        async for chunk in peer.chunks("prfaas-p0", body):
            told.extend(chunk.output_ids)

    async with asyncio.TaskGroup() as both:
        both.create_task(decode())
        both.create_task(prefill())
    assert told == found[:1]
    return found


def through(peer: Peer, proxy: Proxy) -> None:
    """The prefill instance finds the decode side's receiver behind ``proxy``."""
    peer.workers["pd"].kv_routes[peer.address("prfaas-p0")] = ("127.0.0.1", proxy.port)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    ("layerwise", "connections", "admission"),
    [(True, 1, "push_then_admit"), (False, 8, "reserve_first")],
)
def test_a_pair_answers_as_one_process(
    name: str, layerwise: bool, connections: int, admission: str, tmp_path: Path
) -> None:
    model = tiny(name, tmp_path)
    alone = Alone(model)
    prompts = [alone.prompt(tokens, OUTPUT) for tokens in (CHUNK + 41, 3 * CHUNK, 7, 1)]
    changes: dict[str, Any] = {
        "layerwise": layerwise, "connections": connections, "admission": admission,
        "chunk_bytes": 2048,
    }  # fmt: skip

    async def run() -> list[list[int]]:
        async with workers(
            model.config("prfaas", "p0", tmp_path, **changes),
            model.config("pd", "d0", tmp_path, **changes),
        ) as peer:
            return await asyncio.gather(*(tokens_of(peer, one, OUTPUT) for one in prompts))

    assert asyncio.run(run()) == [alone.answer(one, OUTPUT)[0] for one in prompts]


@pytest.mark.parametrize("name", ["kda-mla-3:1", "window-gqa-5:1"])
def test_each_layer_crosses_with_its_own_bytes(name: str, tmp_path: Path) -> None:
    """Counted in the protocol's frames: S_kv by layer, each byte once, in several chunks."""
    model = tiny(name, tmp_path)
    prompt = Alone(model).prompt(3 * CHUNK + 5, OUTPUT)
    expected = model.architecture.layer_kv_bytes(len(prompt))
    starts = [sum(expected[:layer]) for layer in range(len(expected) + 1)]
    seen: list[tuple[int, int]] = []

    def watch(_connection: int, side: Side, frame: Control | Data) -> Fate:
        if side == "sender" and isinstance(frame, Data):
            start = starts[frame.layer] + frame.offset
            seen.append((start, start + len(frame.payload)))
        return "pass"

    async def run() -> list[int]:
        async with (
            workers(
                model.config("prfaas", "p0", tmp_path), model.config("pd", "d0", tmp_path)
            ) as peer,
            FrameProxy(peer.workers["pd"].kv_port, watch) as proxy,
        ):
            through(peer, proxy)
            return await tokens_of(peer, prompt, OUTPUT)

    assert asyncio.run(run()) == Alone(model).answer(prompt, OUTPUT)[0]
    seen.sort()
    ends = [end for _, end in seen]
    assert [start for start, _ in seen] == [0, *ends[:-1]]
    assert ends[-1] == model.architecture.kv_bytes(len(prompt))


@pytest.mark.parametrize("connections", [1, 8])
def test_a_connection_that_is_killed_changes_no_token(connections: int, tmp_path: Path) -> None:
    """Every connection is cut after some thousand bytes, over and over, and resumed."""
    model = tiny(MIXED, tmp_path)
    alone = Alone(model)
    prompt = alone.prompt(4 * CHUNK + 9, OUTPUT)
    changes: dict[str, Any] = {"connections": connections, "chunk_bytes": 1024}
    cuts = itertools.chain([2500, 3700, 4900] * connections, itertools.repeat(0))

    async def run() -> tuple[list[int], int]:
        async with (
            workers(
                model.config("prfaas", "p0", tmp_path, **changes),
                model.config("pd", "d0", tmp_path, **changes),
            ) as peer,
            ByteProxy(peer.workers["pd"].kv_port, cuts) as proxy,
        ):
            through(peer, proxy)
            return await tokens_of(peer, prompt, OUTPUT), proxy.connections

    tokens, opened = asyncio.run(run())
    assert tokens == alone.answer(prompt, OUTPUT)[0]
    assert opened > connections, "some were cut and opened anew"


def test_requests_that_go_away_leave_slots_for_others(tmp_path: Path) -> None:
    """More cancelled prefills and decodes than there are slots; then one that is answered."""
    model = tiny(MIXED, tmp_path, prefill_slots=1)
    alone = Alone(model)
    prompt = alone.prompt(5 * CHUNK, OUTPUT)

    async def run() -> tuple[list[int], int, int]:
        async with workers(
            model.config("prfaas", "p0", tmp_path, decode_max_batch=1),
            model.config("pd", "d0", tmp_path, decode_max_batch=1),
        ) as peer:
            for _ in range(4):
                await abandoned(peer, prompt, "prefill_started")
                await abandoned(peer, prompt, "")
            found = await tokens_of(peer, prompt, OUTPUT)
            ends = [peer.instance(name).end for name in ("prfaas-p0", "pd-d0")]
            return found, ends[0].open_requests, ends[1].running

    assert asyncio.run(run()) == (alone.answer(prompt, OUTPUT)[0], 0, 0)


async def abandoned(peer: Peer, prompt: tuple[int, ...], event: str) -> None:
    """Both halves, given up when the prefill half says ``event``; or, for "", when the decode half
    has told a token."""
    body = peer.body(list(prompt), "prfaas-p0", 60)

    async def until_told(instance: str, wanted: bool) -> None:
        async for chunk in peer.chunks(instance, body):
            spans = chunk.meta_info.prfaas
            if wanted and (spans.event if spans else "") == event:
                return

    halves = [
        asyncio.create_task(until_told("prfaas-p0", bool(event))),
        asyncio.create_task(until_told("pd-d0", not event)),
    ]
    await halves[0 if event else 1]
    for half in halves:
        half.cancel()
    await asyncio.gather(*halves, return_exceptions=True)


def test_what_cannot_be_computed_is_said_and_others_go_on(tmp_path: Path) -> None:
    """An id outside the vocabulary, and more tokens than a context has."""
    model = tiny(MIXED, tmp_path)
    alone = Alone(model)
    prompt = alone.prompt(40, OUTPUT)

    async def run() -> tuple[list[str], list[int]]:
        async with workers(
            model.config("prfaas", "p0", tmp_path, transfer_deadline_wall_s=3.0),
            model.config("pd", "d0", tmp_path, transfer_deadline_wall_s=3.0),
        ) as peer:
            told = []
            for ids, output in (((VOCAB,), 4), (prompt, CONTEXT), ((1,) * (CONTEXT + 1), 4)):
                body = peer.body(list(ids), "prfaas-p0", output)
                halves = (peer.half(name, body) for name in ("prfaas-p0", "pd-d0"))
                both = await asyncio.gather(*halves, return_exceptions=True)
                told.append(" / ".join(str(one) for one in both))
            return told, await tokens_of(peer, prompt, OUTPUT)

    told, found = asyncio.run(run())
    assert "vocabulary" in told[0]
    assert "engine.context_tokens" in told[1]
    assert "room for" in told[2]
    assert found == alone.answer(prompt, OUTPUT)[0]


def test_a_layers_bytes_leave_before_the_last_chunk_is_computed(tmp_path: Path) -> None:
    """Layer-wise, growing KV of the first chunks is final long before the prefill's end."""
    model = tiny("gdn-gqa-3:1", tmp_path)
    given = model.config("prfaas", "p0", tmp_path, report_layers=True)
    prompt = Alone(model).prompt(5 * CHUNK, OUTPUT)
    pieces: list[tuple[int, int]] = []

    async def run() -> None:
        async with workers(given) as peer:
            engine = peer.instance("prfaas-p0").end._engine
            now_ns = time.monotonic_ns()
            job = PrefillJob(
                len(prompt), now_ns, now_ns, 4,
                lambda piece: pieces.append((piece.layer, piece.first_byte)), lambda: None,
                read_ids=lambda: prompt,
            )  # fmt: skip
            await engine.prefill(job)
            engine.release(job)
            await asyncio.sleep(0)

    asyncio.run(run())
    token_bytes = model.architecture.layers[3].growing_bytes_per_token
    growing = [(3, chunk * CHUNK * token_bytes) for chunk in range(5)]
    assert pieces == [*growing[:4], (0, 0), (1, 0), (2, 0), growing[4]]
