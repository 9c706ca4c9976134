"""Instances that change their role, and prefixes that are copied between clusters, live."""

import asyncio
import secrets
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
from harness.block_keys import block_keys_of_text
from harness.settings import PrefixCache
from harness.surface.generate import encode

TOKENS = 4000
IDS = list(range(20_000, 20_000 + TOKENS))
FULL = TOKENS // BLOCK_TOKENS * BLOCK_TOKENS
KEYS = block_keys_of_text(encode(IDS), BLOCK_TOKENS)
OFF = PrefixCache(False, BLOCK_TOKENS, CHECKPOINT_TOKENS, 2**37)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_drained_instance_takes_the_other_role_on_its_port(tmp_path: Path, enabled: bool) -> None:
    async def main() -> None:
        cache = PrefixCache(enabled, BLOCK_TOKENS, CHECKPOINT_TOKENS, 2**37)
        config = engine_config("pd", "p0 p1 d0", tmp_path, convertible=True, prefix_cache=cache)
        async with workers(config) as peer:
            await peer.serve(IDS, "pd-p0", "pd-d0")
            assert await convert(peer, "pd-p0", "decode") == (200, {"role": "decode"})
            assert (await peer.ask("GET", "pd-p0", "/get_server_info"))[1][
                "disaggregation_mode"
            ] == "decode"
            _, decode = (await peer.serve(IDS, "pd-p1", "pd-p0")).spans
            assert decode.kv_wire_bytes_received > 0
            # Its memory came along: what it had computed is resident where it decodes now.
            assert decode.resident_tokens == (FULL if enabled else 0)
            status, said = await peer.ask("PUT", "pd-p0", "/kv/1", {"host": "127.0.0.1", "port": 1})
            assert (status, "decodes" in str(said)) == (400, True)
            # And back, and the one that decoded first the other way.
            assert (await convert(peer, "pd-p0", "prefill"))[0] == 200
            assert (await convert(peer, "pd-p0", "prefill"))[0] == 200
            assert (await convert(peer, "pd-p1", "decode"))[0] == 200
            assert (await convert(peer, "pd-d0", "prefill"))[0] == 200
            prefill, _ = (await peer.serve(IDS, "pd-d0", "pd-p1")).spans
            assert prefill.kv_wire_bytes_sent > 0

    asyncio.run(main())


def test_an_instance_at_work_is_not_converted(tmp_path: Path) -> None:
    async def main() -> None:
        async with workers(engine_config("pd", "p0 d0", tmp_path, convertible=True)) as peer:
            body = peer.body(IDS, "pd-p0", 2)
            half = asyncio.create_task(peer.half("pd-d0", body))
            async with asyncio.timeout(10):
                while not peer.instance("pd-d0").end.open_requests:
                    await asyncio.sleep(0.005)
            status, said = await convert(peer, "pd-d0", "prefill")
            assert (status, "drain it" in str(said)) == (409, True)
            assert peer.instance("pd-d0").role == "decode"
            await peer.half("pd-p0", body)
            await half
            assert (await convert(peer, "pd-d0", "prefill"))[0] == 200

    asyncio.run(main())


def test_a_worker_that_keeps_its_roles_says_so(tmp_path: Path) -> None:
    async def main() -> None:
        async with workers(engine_config("prfaas", "p0", tmp_path, prefix_cache=OFF)) as peer:
            status, said = await convert(peer, "prfaas-p0", "decode")
            assert (status, "scheduling.role_conversion" in str(said)) == (400, True)
            assert (await convert(peer, "prfaas-p0", "neither"))[0] == 400
            for path in ("/cache_deltas", "/cache_snapshot"):
                assert (await peer.ask("GET", "prfaas-p0", path))[0] == 404

    asyncio.run(main())


async def convert(peer: Peer, instance: str, role: str) -> tuple[int, Any]:
    return await peer.ask("POST", instance, "/convert", {"role": role})


async def copy(peer: Peer, source: str, destination: str, tokens: int) -> tuple[int, Any]:
    """As the gateway does it: ask the destination, then the source."""
    asked = {"room": secrets.randbits(60), "keys": KEYS, "tokens": tokens}
    body = asked | {"source": peer.address(source)}
    status, place = await peer.ask("POST", destination, "/expect_prefix", body)
    assert status == 200, place
    status, said = await peer.ask("POST", source, "/copy_prefix", asked | place)
    return status, said


def test_a_prefix_is_copied_to_the_other_cluster_and_hit_there(tmp_path: Path) -> None:
    async def main() -> None:
        near = engine_config("pd", "p0 d0", tmp_path)
        async with workers(engine_config("prfaas", "p0", tmp_path), near) as peer:
            worker = peer.workers["pd"]
            route = {peer.address("prfaas-p0"): ("127.0.0.1", worker.kv_port)}
            worker.kv_routes = route
            first, _ = (await peer.serve(IDS, "prfaas-p0", "pd-d0")).spans
            assert first.cached_tokens == 0
            # The decode instance has the blocks; a state is only where they were computed.
            sizes = ARCHITECTURE.layer_kv_bytes(FULL, 0)
            assert await copy(peer, "prfaas-p0", "pd-p0", FULL) == (
                200,
                {"kv_wire_bytes": sum(wire_layer_bytes(sizes, BYTE_SCALE))},
            )
            async with asyncio.timeout(10):
                while peer.instance("pd-p0").memory.pool.match(KEYS, 15) != FULL:
                    await asyncio.sleep(0.005)
            prefill, _ = (await peer.serve(IDS, "pd-p0", "pd-d0")).spans
            assert (prefill.cached_tokens, prefill.fetched_tokens) == (FULL, 0)
            # A second copy moves the state alone.
            status, said = await copy(peer, "prfaas-p0", "pd-p0", FULL)
            state = wire_layer_bytes(ARCHITECTURE.layer_kv_bytes(FULL, FULL), BYTE_SCALE)
            assert (status, said) == (200, {"kv_wire_bytes": sum(state)})

    asyncio.run(main())


def test_a_copy_that_cannot_be_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        small = PrefixCache(True, BLOCK_TOKENS, CHECKPOINT_TOKENS, 1e6)
        far = engine_config("prfaas", "p0", tmp_path)
        async with workers(far, engine_config("pd", "p0 d0", tmp_path, prefix_cache=small)) as peer:
            asked = {"room": 1, "keys": KEYS, "tokens": FULL}
            body = asked | {"source": peer.address("prfaas-p0")}
            status, said = await peer.ask("POST", "pd-p0", "/expect_prefix", body)
            assert (status, "no room" in str(said)) == (409, True)
            place = {"host": "127.0.0.1", "port": 1, "resident_tokens": 0}
            status, said = await peer.ask("POST", "prfaas-p0", "/copy_prefix", asked | place)
            assert (status, "no more" in str(said)) == (409, True)
            status, said = await peer.ask(
                "POST", "pd-p0", "/expect_prefix", body | {"tokens": 10**6}
            )
            assert (status, "full blocks" in str(said)) == (400, True)
            # A destination that hears of it keeps no memory for what will not come.
            body = {"room": 2, "keys": KEYS, "tokens": FULL, "source": "x:1"}
            pool = peer.instance("prfaas-p0").memory.pool
            assert (await peer.ask("POST", "prfaas-p0", "/expect_prefix", body))[0] == 200
            assert pool.transfer_blocks > 0
            for _ in range(2):
                forgotten = await peer.ask("POST", "prfaas-p0", "/forget_prefix", {"room": 2})
                assert forgotten[0] == 200
            async with asyncio.timeout(5):
                while pool.busy:
                    await asyncio.sleep(0.005)
            # What no prompt's keys are would be counted wrongly for ever.
            for keys in ([KEYS[0]] * 15, [-1, *KEYS[1:]]):
                for name, more in (("pd-p0", {"source": "x:1"}), ("prfaas-p0", place)):
                    path = "/expect_prefix" if name == "pd-p0" else "/copy_prefix"
                    wrong = asked | more | {"keys": keys}
                    assert (await peer.ask("POST", name, path, wrong))[0] == 400
            for name in ("prfaas-p0", "pd-p0"):
                assert not peer.instance(name).memory.pool.busy

    asyncio.run(main())
