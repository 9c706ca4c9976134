"""The reference engine behind HTTP: what its decode end answers is what one process computes."""

import asyncio
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from harness.engine_settings import Reference
from tests.reference_setup import CHUNK, LAYERS, MIXED, VOCAB, Alone, tiny
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
