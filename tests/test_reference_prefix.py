"""Cached prefixes of the reference engine: the tokens of one process from whatever was reused."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from harness.profile_file import ProfileSource
from harness.settings import PrefixCache
from harness.surface.generate import GenerateChunk
from tests.reference_setup import BLOCK, CHECKPOINT, LAYERS, Alone, tiny
from tests.worker_setup import ROOT, Peer, Served, workers

pytestmark = pytest.mark.torch

OUTPUT = 8
ENABLED = PrefixCache(True, BLOCK, CHECKPOINT, 2**26)


async def answered(
    peer: Peer, prompt: tuple[int, ...], prefill: str = "prfaas-p0"
) -> tuple[list[int], Served]:
    """The decode half's tokens, and the last words of both."""
    body = peer.body(list(prompt), prefill, OUTPUT)
    found: list[int] = []
    last: list[GenerateChunk] = []

    async def decode() -> None:
        async for chunk in peer.chunks("pd-d0", body):
            found.extend(chunk.output_ids)
            last[:] = [chunk]

    async with asyncio.TaskGroup() as both:
        both.create_task(decode())
        first = both.create_task(peer.half(prefill, body))
    return found, Served(first.result(), last[0])


def related(alone: Alone, held: int, shared: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two prompts whose answers are nowhere nearly tied: one of ``held`` tokens, and a longer one
    that has its first ``shared`` tokens."""
    for number in range(50):
        whole = alone.prompt(held + 45, OUTPUT, number)
        first = whole[:held] if shared == held else (*whole[:shared], *whole[: held - shared][::-1])
        if alone.answer(first, OUTPUT)[1] > 0.012:
            return first, whole
    raise AssertionError("no such prompts among 50")


def steep_profile(path: Path) -> Path:
    """Prefill at 10 ms a token: any fetch is cheaper."""
    profile = json.loads((ROOT / "profiles/prfaas-1t-8xh200.json").read_text())
    profile["prefill"]["points"] = [
        {"new_tokens": n, "prefill_s": 0.01 * n, "provenance": "measured", "source": "set"}
        for n in (1, 1000)
    ]
    path.write_text(json.dumps(profile))
    return path


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    ("held", "shared", "hit"),
    [
        (2 * CHECKPOINT, 2 * CHECKPOINT, 2 * CHECKPOINT),
        (2 * CHECKPOINT + 30, 2 * CHECKPOINT + 13, 2 * CHECKPOINT),
        (2 * CHECKPOINT + BLOCK, 2 * CHECKPOINT + BLOCK, 2 * CHECKPOINT + BLOCK),
    ],
    ids=["at a block", "inside a block", "at a state's exact length"],
)
def test_a_hit_changes_no_token(
    name: str, held: int, shared: int, hit: int, tmp_path: Path
) -> None:
    model = tiny(name, tmp_path)
    alone = Alone(model)
    first, second = related(alone, held, shared)

    async def run() -> list[tuple[list[int], Served]]:
        async with workers(
            model.config("prfaas", "p0", tmp_path, prefix_cache=ENABLED),
            model.config("pd", "d0", tmp_path, prefix_cache=ENABLED),
        ) as peer:
            return [await answered(peer, one) for one in (first, second)]

    told = asyncio.run(run())
    assert [tokens for tokens, _ in told] == [alone.answer(p, OUTPUT)[0] for p in (first, second)]
    prefill, decode = told[1][1].spans
    resident = shared // BLOCK * BLOCK
    assert (prefill.cached_tokens, decode.resident_tokens) == (hit, resident)
    moved = model.architecture.moved_bytes(len(second), resident)
    assert (prefill.kv_wire_bytes_sent, decode.kv_wire_bytes_received) == (moved, moved)


@pytest.mark.parametrize("name", ["kda-mla-3:1", "window-gqa-5:1"])
def test_a_prefix_of_another_instance_is_read_there(name: str, tmp_path: Path) -> None:
    model = tiny(name, tmp_path)
    alone = Alone(model)
    first, second = related(alone, 2 * CHECKPOINT, 2 * CHECKPOINT)
    costs = {"h200": ProfileSource(str(steep_profile(tmp_path / "steep.json")), None)}

    async def run() -> list[tuple[list[int], Served]]:
        async with workers(
            model.config("prfaas", "p0 p1", tmp_path, prefix_cache=ENABLED, profiles=costs),
            model.config("pd", "d0", tmp_path, prefix_cache=ENABLED),
        ) as peer:
            one = await answered(peer, first, "prfaas-p0")
            return [one, await answered(peer, second, "prfaas-p1")]

    told = asyncio.run(run())
    assert [tokens for tokens, _ in told] == [alone.answer(p, OUTPUT)[0] for p in (first, second)]
    prefill, _ = told[1][1].spans
    assert prefill.fetched_tokens == prefill.cached_tokens == 2 * CHECKPOINT


def test_what_the_pool_evicts_is_dropped(tmp_path: Path) -> None:
    """A memory for a few prompts: tensors stay within what the pools say they hold."""
    model = tiny("gdn-gqa-3:1", tmp_path)
    alone = Alone(model)
    prompts = [alone.prompt(CHECKPOINT + 50, OUTPUT, number) for number in range(6)]
    kv_bytes = model.architecture.kv_bytes(150)
    small = [PrefixCache(True, BLOCK, CHECKPOINT, share * kv_bytes) for share in (3, 1.3)]

    async def run() -> tuple[list[list[int]], list[Any]]:
        async with workers(
            model.config("prfaas", "p0", tmp_path, prefix_cache=small[0]),
            model.config("pd", "d0", tmp_path, prefix_cache=small[1]),
        ) as peer:
            found = [(await answered(peer, one))[0] for one in (*prompts, prompts[0])]
            held = []
            for name in ("prfaas-p0", "pd-d0"):
                reference = peer.workers[name.partition("-")[0]]._reference
                assert reference is not None
                assert reference.tensors is not None
                tensors, pool = reference.tensors.by_instance[name], peer.instance(name).memory.pool
                _, blocks, states = pool.snapshot()
                sizes = pool.geometry
                most = len(blocks) * sizes.block_bytes + len(states) * sizes.state_bytes
                held.append((tensors.nbytes, most, len(blocks)))
            return found, held

    found, held = asyncio.run(run())
    assert found == [alone.answer(one, OUTPUT)[0] for one in (*prompts, prompts[0])]
    for nbytes, most, blocks in held:
        assert 0 < nbytes <= most
        assert blocks < 6 * 3


def test_a_full_memory_loses_no_state(tmp_path: Path) -> None:
    """Prompts at once in a memory that they do not fit into together: whatever is kept can be used
    again, and nothing is answered otherwise."""
    model = tiny("kda-mla-3:1", tmp_path)
    alone = Alone(model)
    first = [alone.prompt(2 * CHECKPOINT + 50, OUTPUT, number) for number in range(4)]
    small = PrefixCache(True, BLOCK, CHECKPOINT, 2.6 * model.architecture.kv_bytes(180))

    async def run() -> list[list[int]]:
        async with workers(
            model.config("prfaas", "p0", tmp_path, prefix_cache=small),
            model.config("pd", "d0", tmp_path, prefix_cache=ENABLED),
        ) as peer:
            told = await asyncio.gather(*(answered(peer, one) for one in (*first, *first)))
            return [tokens for tokens, _ in told]

    assert asyncio.run(run()) == [alone.answer(one, OUTPUT)[0] for one in (*first, *first)]
