"""The gateway before servers that speak as SGLang does: what it makes of their streams, what the
canary finds wrong with a pair, and what it records."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from sglang_setup import DENSE, ROOT, addresses_of, config_of
from sglang_wire import PAGE_TOKENS, Manner, Pair, pair_of_servers

from harness.architecture import load_architecture, paged_kv_bytes
from harness.core import EngineError
from harness.gateway.engine_watch import read_counted
from harness.gateway.gateway import Gateway
from harness.gateway.sglang import decode_times, prefill_times
from harness.surface.generate import MetaInfo

IDS = list(range(100, 300))


@asynccontextmanager
async def served(
    root: Path, manner: Manner, **changes: Any
) -> AsyncIterator[tuple[Gateway, Pair, aiohttp.ClientSession]]:
    async with AsyncExitStack() as stack:
        pair = await stack.enter_async_context(pair_of_servers(manner))
        prefill, decode = addresses_of(pair.ports)
        prefill.bootstrap_host, prefill.bootstrap_port = "10.80.0.1", 8998
        config = config_of(root, [prefill, decode], **changes)
        gateway = await stack.enter_async_context(Gateway(config))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield gateway, pair, session


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def events(answer: aiohttp.ClientResponse) -> list[Any]:
    text = await answer.text()
    found = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert found[-1] == "[DONE]"
    return [json.loads(one) for one in found[:-1]]


@pytest.mark.parametrize("incremental", [False, True])
def test_a_growing_answer_reaches_the_client_piece_by_piece(
    tmp_path: Path, incremental: bool
) -> None:
    async def run() -> None:
        async with served(tmp_path, Manner(incremental=incremental)) as (gateway, pair, session):
            body = {
                "prompt": IDS,
                "max_tokens": 4,
                "stream": True,
                "temperature": 0,
                "ignore_eos": True,
                "rid": "one",
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            }
            url = f"http://127.0.0.1:{gateway.port}/v1/completions"
            async with session.post(url, json=body) as answer:
                chunks = await events(answer)
            *pieces, usage = chunks
            told = [piece["choices"][0]["text"] for piece in pieces]
            first = sum(IDS) % 90_000
            assert told == [f" w{first + 7 * k}" for k in range(4)]
            assert [piece["usage"]["completion_tokens"] for piece in pieces] == [1, 2, 3, 4]
            assert usage["usage"]["prompt_tokens"] == len(IDS)
            # Both halves got the client's wish and the pair's own bootstrap.
            for role in ("prefill", "decode"):
                asked = pair.asked[role][-1]
                assert (asked["bootstrap_host"], asked["bootstrap_port"]) == ("10.80.0.1", 8998)
                assert asked["sampling_params"] == {
                    "max_new_tokens": 4,
                    "ignore_eos": True,
                    "temperature": 0.0,
                }
            rooms = {pair.asked[role][-1]["bootstrap_room"] for role in pair.asked}
            assert len(rooms) == 1

    asyncio.run(run())
    (row,) = (row for row in rows(tmp_path / "gateway.jsonl") if row["rid"] == "one")
    assert row["outcome"] == "completed"
    assert row["prefill"] is None
    assert row["decode"] is None
    times = row["prefill_times"]
    assert times["queue_s"] == pytest.approx(0.006, abs=1e-4)
    assert times["prefill_s"] == pytest.approx(0.001, abs=1e-4)
    assert times["transfer_s"] == pytest.approx(0.002, abs=1e-4)
    assert times["prompt_tokens"] == len(IDS)
    assert row["decode_times"]["admission_s"] == 0.0003
    assert row["decode_times"]["first_token_s"] == pytest.approx(0.0035, abs=1e-4)
    assert row["decode_times"]["prefilled"] is False


def test_the_servers_counters_are_sampled_before_and_after(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(tmp_path, Manner()) as (gateway, _, session):
            url = f"http://127.0.0.1:{gateway.port}/generate"
            body = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 2}}
            async with session.post(url, json=body) as answer:
                assert answer.status == 200
            await gateway.count()

    asyncio.run(run())
    of_prefill = [row for row in rows(tmp_path / "engines.jsonl") if row["instance"] == "pd-p0"]
    moved = of_prefill[-1]["kv_sent_wire_bytes_total"] - of_prefill[0]["kv_sent_wire_bytes_total"]
    assert moved == paged_kv_bytes(load_architecture(DENSE), len(IDS), PAGE_TOKENS) == 4 * 32_768
    assert of_prefill[-1]["kv_transfers_total"] - of_prefill[0]["kv_transfers_total"] == 1
    assert of_prefill[-1]["queued"] == 1


@pytest.mark.parametrize(
    ("manner", "changes", "said"),
    [
        (Manner(decode_pd=False), {"canary_timeout_wall_s": 0.5}, "KV was never taken"),
        (Manner(decode_pd=False, prefill_pd=False), {}, "prefilled the prompt itself"),
        (Manner(counted=False), {}, "counts 0 as sent"),
        (Manner(page_bytes=16_384), {}, "is this the model of the scenario"),
        (Manner(other_weights=1), {}, "have both the same weights"),
        (Manner(abort="Prefill transfer failed for request rank=0"), {}, "transfer failed"),
    ],
)
def test_the_canary_names_a_pair_that_does_not_move_kv(
    tmp_path: Path, manner: Manner, changes: dict[str, Any], said: str
) -> None:
    async def run() -> None:
        async with served(tmp_path, manner, **changes):
            raise AssertionError("a gateway stands before a pair that does not work")

    with pytest.raises(EngineError, match="canary pd-p0 -> pd-d0") as found:
        asyncio.run(run())
    assert said in str(found.value)


def test_a_version_that_counts_nothing_is_not_asked_for_bytes(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(tmp_path, Manner(counted=False), counts_kv=False) as (gateway, _, _):
            assert gateway.canaries == 1

    asyncio.run(run())
    assert all(row["kv_sent_wire_bytes_total"] is None for row in rows(tmp_path / "engines.jsonl"))


def test_a_failed_transfer_is_tried_again_under_another_name(tmp_path: Path) -> None:
    async def run() -> None:
        manner = Manner()
        async with served(tmp_path, manner) as (gateway, pair, session):
            manner.abort = "Decode transfer failed for request rank=0"
            url = f"http://127.0.0.1:{gateway.port}/generate"
            body = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 2}, "rid": "one"}
            async with session.post(url, json=body) as answer:
                assert answer.status == 502
                error = (await answer.json())["error"]
                assert "transfer failed" in error["message"]
                assert error["code"] == "transfer"
            names = [one["rid"] for one in pair.asked["decode"] if one["rid"].startswith("one")]
            assert names == ["one", "one~1"]

    asyncio.run(run())


def test_text_that_nobody_can_count_is_refused(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(tmp_path, Manner()) as (gateway, _, session):
            url = f"http://127.0.0.1:{gateway.port}/v1/completions"
            async with session.post(url, json={"prompt": "words", "max_tokens": 2}) as answer:
                assert answer.status == 400
                assert "gateway.tokenizer" in (await answer.json())["error"]["message"]

    asyncio.run(run())


def test_the_names_of_an_older_version_are_understood() -> None:
    """As 0.5.9 has them: the start of prefill is ``inference_time`` before its end."""
    meta = MetaInfo(
        prompt_tokens=200,
        completion_tokens=1,
        queue_time=0.01,
        request_received_ts=100.0,
        prefill_finished_ts=101.25,
        decode_finished_ts=101.5,
        inference_time=1.0,
        total_retractions=2,
    )
    times = prefill_times(meta, [7])
    assert (times.queue_s, times.prefill_s, times.transfer_s) == (0.5, 0.75, 0.25)
    assert times.first_token == 7
    decoded = decode_times(meta, meta)
    assert (decoded.admission_s, decoded.retractions) == (0.01, 2)
    # It does not say when a batch began, nor whether a decode server prefilled.
    assert decoded.first_token_s is None
    assert decoded.prefilled is None


def test_counters_of_several_ranks_are_summed() -> None:
    text = "\n".join(
        f'sglang:kv_transfer_total_mb_{what}{{model_name="a}}b",tp_rank="{rank}"}} {value}'
        for rank in (0, 1)
        for what, value in (("sum", 1.5), ("count", 3.0), ("bucket", 9.0))
    )
    counted = read_counted(text.encode())
    assert (counted.kv_sent_bytes, counted.kv_transfers) == (3 * 2**20, 6)
    assert counted.queued is None


@pytest.mark.parametrize(
    ("model", "tokens", "expected"),
    [
        ("dense", 100, 2 * 64 * 512),
        ("dense", 64, 64 * 512),
        ("dense", 65, 2 * 64 * 512),
        ("kimi-linear", 700, 704 * 96 + 56_064),
        ("mimo", 700, 704 * 384 + 192 * 768),
        ("mimo", 640, 640 * 384 + 128 * 768),
        ("mimo", 30, 64 * 384 + 64 * 768),
    ],
)
def test_pages_of_growing_kv_and_of_windows(model: str, tokens: int, expected: int) -> None:
    architecture = load_architecture(ROOT / f"profiles/tiny/sglang-tiny-{model}.json")
    assert paged_kv_bytes(architecture, tokens, 64) == expected
    assert paged_kv_bytes(architecture, tokens, 1) == architecture.kv_bytes(tokens)
