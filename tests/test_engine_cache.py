"""Workers with a prefix cache: true hits, only what is lacking moves, everything is given back."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from worker_setup import (
    ARCHITECTURE,
    BLOCK_TOKENS,
    BYTE_SCALE,
    CHECKPOINT_TOKENS,
    Peer,
    engine_config,
    workers,
)

from harness.architecture import wire_layer_bytes
from harness.profile_file import load_profile
from harness.settings import PrefixCache
from harness.surface.generate import Registration

ROOT = Path(__file__).parent.parent
PROFILE = load_profile(ROOT / "profiles/prfaas-1t-8xh200.json", "end_slope")
TOKENS = 4000
IDS = list(range(20_000, 20_000 + TOKENS))
#: Shares 2000 tokens: 7 full blocks, with a state after 6.
FORK = [*IDS[:2000], *range(50_000, 52_000)]
LONG = [*IDS, *range(30_000, 57_000)]
#: The last full block of IDS ends here.
FULL = 15 * BLOCK_TOKENS
LESS = FULL - BLOCK_TOKENS


def run(tmp_path: Path, test: Callable[[Peer], Awaitable[None]], **changes: Any) -> None:
    """Run ``test`` against a PD worker, whose pools must be at rest afterwards."""

    async def main() -> None:
        async with workers(engine_config("pd", "p0 p1 d0 d1", tmp_path, **changes)) as peer:
            await test(peer)
            await at_rest(peer)

    asyncio.run(main())


async def at_rest(peer: Peer) -> None:
    """Nothing is pinned, in transfer or waited for; polled, since other tasks make it true."""

    def resting() -> bool:
        memories = [one.memory for worker in peer.workers.values() for one in worker._instances]
        return not any(one.pool.busy or one.waiting for one in memories)

    await until(resting)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def wire_bytes(tokens: int, resident_tokens: int) -> int:
    return sum(wire_layer_bytes(ARCHITECTURE.layer_kv_bytes(tokens, resident_tokens), BYTE_SCALE))


def test_what_is_cached_is_neither_computed_nor_moved(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        #: prompt, prefill, decode -> cached, fetched (None: not even a state), resident
        cases: list[tuple[list[int], str, str, int, int | None, int]] = [
            (IDS, "pd-p0", "pd-d0", 0, None, 0),
            (IDS, "pd-p0", "pd-d0", FULL, None, FULL),
            (FORK, "pd-p0", "pd-d0", 6 * BLOCK_TOKENS, None, 7 * BLOCK_TOKENS),
            (IDS, "pd-p1", "pd-d0", FULL, FULL, FULL),
            (IDS, "pd-p1", "pd-d1", FULL, None, FULL),  # fetched once, held since
            (IDS[:FULL], "pd-p1", "pd-d1", LESS, 0, LESS),  # its state lies at p0
        ]
        for ids, p, d, cached, fetched, resident in cases:
            prefill, decode = (served := await peer.serve(ids, p, d)).spans
            case = (p, d, cached, fetched, resident)
            assert (prefill.cached_tokens, prefill.fetched_tokens) == (cached, fetched or 0), case
            assert (decode.cached_tokens, decode.resident_tokens) == (cached, resident), case
            assert served.prefill.meta_info.cached_tokens == cached
            assert served.decode.meta_info.cached_tokens == cached
            moved = wire_bytes(len(ids), resident)
            assert prefill.kv_wire_bytes_sent == decode.kv_wire_bytes_received == moved
            fetch_s = 0.0
            if fetched is not None:
                fetch_s = ARCHITECTURE.moved_bytes(cached, cached - fetched) / 5e10
            service_s = fetch_s + PROFILE.prefill_s(len(ids) - cached, cached)
            assert prefill.service_wall_s == pytest.approx(service_s / 50.0)

    run(tmp_path, test)


def test_the_stream_of_deltas_tells_what_the_snapshot_holds(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        blocks: set[int] = set()
        states: set[int] = set()
        seqs: list[int] = []

        async def follow() -> None:
            url = peer.url("pd-p0", "/cache_deltas")
            async with peer.session.get(url) as answer:
                following.set()
                while line := await answer.content.readline():
                    delta = json.loads(line)
                    seqs.append(delta["seq"])
                    for held, kind in ((blocks, "blocks"), (states, "states")):
                        held.difference_update(delta[f"removed_{kind}"])
                        held.update(delta[f"added_{kind}"])

        following = asyncio.Event()
        task = asyncio.create_task(follow())
        await following.wait()
        for ids in (IDS, FORK, IDS[::-1]):
            await peer.serve(ids, "pd-p0", "pd-d0")
        _, snapshot = await peer.ask("GET", "pd-p0", "/cache_snapshot")
        await until(lambda: bool(seqs) and seqs[-1] == snapshot["seq"])
        task.cancel()
        assert blocks == set(snapshot["blocks"])
        assert states == set(snapshot["states"])
        assert all(b == a + 1 for a, b in pairwise([0, *seqs]))
        # 15 blocks of each of three prompts, 7 of which two share.
        assert len(blocks) == 3 * 15 - 7

    run(tmp_path, test)


def test_flushing_waits_for_nobody_and_is_refused_while_busy(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        await peer.serve(IDS, "pd-p0", "pd-d0")
        body = peer.body(IDS, "pd-p0", 2)
        half = asyncio.create_task(peer.half("pd-p0", body))  # nobody takes its KV yet
        await until(lambda: peer.instance("pd-p0").memory.pool.busy)
        assert (await peer.ask("POST", "pd-p0", "/flush_cache"))[0] == 400
        await peer.half("pd-d0", body)
        await half
        await at_rest(peer)
        _, scraped = await peer.ask("GET", "pd-p0", "/metrics")
        assert 'prfaas:pool_blocks{instance="pd-p0",kind="free"}' in scraped
        _, info = await peer.ask("GET", "pd-p0", "/get_server_info")
        assert info["prefix_cache"]["block_tokens"] == BLOCK_TOKENS
        for name in ("pd-p0", "pd-d0"):
            pool = peer.instance(name).memory.pool
            assert pool.cached_blocks > 0
            assert (await peer.ask("POST", name, "/flush_cache"))[0] == 200
            assert pool.cached_blocks == 0
        prefill, _ = (await peer.serve(IDS, "pd-p0", "pd-d0")).spans
        assert prefill.cached_tokens == 0

    run(tmp_path, test)


@pytest.mark.parametrize("admission", ["push_then_admit", "reserve_first"])
def test_a_client_that_goes_away_leaves_no_block_behind(tmp_path: Path, admission: str) -> None:
    async def test(peer: Peer) -> None:
        await peer.serve(IDS, "pd-p0", "pd-d0")
        for at in ("queue", "prefill", "decode"):
            await leave(peer, at)
        prefill, decode = (await peer.serve(IDS, "pd-p0", "pd-d0")).spans
        assert (prefill.cached_tokens, decode.resident_tokens) == (FULL, FULL)

    run(tmp_path, test, admission=admission, time_scale=5.0)


async def leave(peer: Peer, at: str) -> None:
    """Begin a long request, go away when it has come so far, and see all of it go."""
    body = peer.body(LONG, "pd-p0", 100_000)
    tasks: list[asyncio.Task[Any]] = []
    prefilling, decoding = peer.instance("pd-p0").end, peer.instance("pd-d0").end
    if at == "queue":
        tasks.append(asyncio.create_task(peer.serve(LONG[::-1], "pd-p0", "pd-d1")))
        await until(lambda: prefilling.running == 1)
    halves = [asyncio.create_task(peer.half(name, body)) for name in ("pd-p0", "pd-d0")]
    reached: dict[str, Callable[[], bool]] = {
        "queue": lambda: prefilling.queued > 0,
        "prefill": lambda: prefilling.running > 0 and peer.instance("pd-p0").memory.pool.busy,
        "decode": lambda: halves[0].done() and decoding.running > 0,
    }
    await until(reached[at])
    tasks += halves
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await at_rest(peer)
    assert decoding.running == 0


def test_a_request_that_is_cancelled_as_its_registration_comes_stops(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        end = peer.instance("pd-p0").end
        registration = asyncio.get_running_loop().create_future()
        waiting = asyncio.create_task(end._registered(registration, 1))
        await asyncio.sleep(0)
        registration.set_result(Registration("127.0.0.1", 1))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    run(tmp_path, test)


def test_requests_wait_for_room_and_all_are_served(tmp_path: Path) -> None:
    """Each instance has room for the KV of about one and a half requests."""
    memory_bytes = 1.5 * ARCHITECTURE.kv_bytes(TOKENS)

    async def test(peer: Peer) -> None:
        prompts = [list(range(first, first + TOKENS)) for first in range(20_000, 90_000, 5_000)]
        served = await asyncio.gather(
            *(
                peer.serve(ids, f"pd-p{n % 2}", f"pd-d{n // 2 % 2}")
                for n, ids in enumerate([*prompts, *prompts])
            )
        )
        assert all(one.decode.meta_info.completion_tokens == 2 for one in served)
        for name in ("pd-p0", "pd-p1", "pd-d0", "pd-d1"):
            pool = peer.instance(name).memory.pool
            assert pool.transfer_blocks == 0
            assert 0 <= pool.free_blocks <= pool.capacity_blocks

    run(
        tmp_path,
        test,
        prefix_cache=PrefixCache(True, BLOCK_TOKENS, CHECKPOINT_TOKENS, memory_bytes),
    )


def test_a_prompt_larger_than_the_memory_is_refused_at_once(tmp_path: Path) -> None:
    memory_bytes = 0.5 * ARCHITECTURE.kv_bytes(TOKENS)

    async def test(peer: Peer) -> None:
        body = peer.body(IDS, "pd-p0", 2)
        results = await asyncio.gather(
            peer.half("pd-p0", body), peer.half("pd-d0", body), return_exceptions=True
        )
        assert all("give prefix_cache.memory more" in str(error) for error in results)
        assert all('"memory"' in str(error) for error in results)

    run(
        tmp_path,
        test,
        prefix_cache=PrefixCache(True, BLOCK_TOKENS, CHECKPOINT_TOKENS, memory_bytes),
    )
