"""What the profiler reads of a server or a pair: settings without secrets, roles, ports, KV."""

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from harness.architecture import paged_kv_bytes
from harness.core import EngineError, ScenarioError
from harness.profiler.asked import Settings
from harness.profiler.plan import Cell
from harness.profiler.probe import Probe, open_session
from harness.profiler.prompts import Prompts
from harness.profiler.session import Measured, measure
from harness.profiler.target import Info, Pair, Single
from tests.profiler_server import LIMIT_TOKENS, KnownServer, serving
from tests.worker_setup import ARCHITECTURE, ROOT

RECORDED = ROOT / "tests/sglang_cpu/recorded/both.server_info.json"
KEY = "a key that nobody may see"


async def info_of(**told: Any) -> Info:
    async with serving(KnownServer(told=told)) as url, open_session({}) as session:
        return await Single(Probe(session, url, "sglang", 10.0), "sglang").info()


async def with_pair(prefill: KnownServer, decode: KnownServer, port: int | None, use: Any) -> Any:
    """What ``use(pair)`` gives; the servers say their roles unless they say others."""
    prefill.told = {"disaggregation_mode": "prefill"} | prefill.told
    decode.told = {"disaggregation_mode": "decode"} | decode.told
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(open_session({}))
        urls = [await stack.enter_async_context(serving(one)) for one in (prefill, decode)]
        first, second = (Probe(session, url, "sglang", 10.0) for url in urls)
        return await use(Pair(first, second, port))


def pair_info(prefill: dict[str, Any], decode: dict[str, Any]) -> Info:
    servers = KnownServer(told=prefill), KnownServer(told=decode)
    got: Info = asyncio.run(with_pair(*servers, None, Pair.info))
    return got


def test_flags_hold_no_secret_and_nothing_that_a_start_changes() -> None:
    told = {
        "api_key": KEY,
        "launch_command": f"sglang serve --api-key {KEY} --tp 2",
        "startup_time": 31.4,
        "some_echo": f"--api-key={KEY}",
        "tp_size": 2,
    }
    flags = asyncio.run(info_of(**told)).flags
    assert not [name for name, value in flags.items() if KEY in str(value)]
    assert not {"launch_command", "startup_time", "api_key", "random_seed"} & set(flags)
    assert flags["tp_size"] == 2
    servers = KnownServer(told=told), KnownServer(told=told)
    assert KEY not in str(asyncio.run(with_pair(*servers, None, Pair.info)))


def test_slots_and_memory_are_of_all_groups_as_resolved() -> None:
    resolved = [{"effective_max_running_requests_per_dp": 24, "page_size": 64}]
    told = {"max_running_requests": None, "internal_states": resolved, "dp_size": 2, "tp_size": 8}
    info = asyncio.run(info_of(**told))
    assert (info.max_running, info.capacity_tokens, info.page_tokens) == (48, 80_000, 64)
    assert info.tp == 4
    recorded = asyncio.run(info_of(**json.loads(RECORDED.read_text())))
    assert (recorded.max_running, recorded.capacity_tokens) == (16, 19_968)


def test_a_pair_is_what_both_say() -> None:
    info = pair_info(
        {"context_length": 2048, "page_size": 64, "disable_radix_cache": False, "tp_size": 4},
        {"context_length": 4096, "page_size": 1, "max_running_requests": 7},
    )
    assert (info.limit_tokens, info.page_tokens, info.has_cache) == (2048, 64, True)
    assert (info.max_running, info.tp) == (7, 4)
    assert (info.flags["prefill.context_length"], info.flags["context_length"]) == (2048, 4096)
    other = pair_info({"context_length": 4096}, {"context_length": 1024, "page_size": 16})
    assert (other.limit_tokens, other.page_tokens, other.has_cache) == (1024, 1, False)


@pytest.mark.parametrize(
    ("given", "told", "expected"), [(None, 8998, 8998), (7000, 8998, 7000), (None, None, None)]
)
def test_a_pair_meets_at_the_port_that_its_prefill_server_tells(
    given: int | None, told: int | None, expected: int | None
) -> None:
    servers = KnownServer(told={"disaggregation_bootstrap_port": told}), KnownServer()

    async def use(pair: Pair) -> str:
        await pair.info()
        await pair.prefill(Prompts("ports").fresh(64))
        return pair.urls[0]

    url = asyncio.run(with_pair(*servers, given, use))
    ports = {expected or int(url.rpartition(":")[2])}
    assert servers[0].bootstrap_ports == servers[1].bootstrap_ports == ports


def test_a_server_of_another_role_is_refused() -> None:
    with pytest.raises(ScenarioError, match=r"is of decode .* but prefill is asked for"):
        pair_info({"disaggregation_mode": "decode"}, {})
    with pytest.raises(ScenarioError, match=r"serves whole requests .* but decode is asked for"):
        pair_info({}, {"disaggregation_mode": "null"})
    with pytest.raises(ScenarioError, match=r"is of prefill .* --prefill-url and --decode-url"):
        asyncio.run(info_of(disaggregation_mode="prefill"))
    assert asyncio.run(info_of(disaggregation_mode="null")).limit_tokens == LIMIT_TOKENS


def test_an_abort_is_an_error_with_the_engines_words() -> None:
    async def ask() -> None:
        server = KnownServer(aborts="KVTransferError: nobody came")
        async with serving(server) as url, open_session({}) as session:
            await Single(Probe(session, url, "sglang", 10.0), "sglang").prefill(
                Prompts("abort").fresh(64)
            )

    with pytest.raises(EngineError, match="aborted the request: KVTransferError: nobody came"):
        asyncio.run(ask())


def test_a_request_may_take_longer_than_five_minutes() -> None:
    async def limits() -> tuple[float | None, int]:
        async with open_session({}) as session:
            assert session.connector is not None
            return session.timeout.total, session.connector.limit

    assert asyncio.run(limits()) == (None, 0)


def test_a_pair_whose_counter_is_of_one_rank_is_profiled_by_geometry(tmp_path: Path) -> None:
    """At 1,024 tokens the counter has half of what the geometry has, at 256 all of it."""

    def counted(tokens: int) -> int:
        return paged_kv_bytes(ARCHITECTURE, tokens, 64) // (2 if tokens == 1024 else 1)

    servers = KnownServer(told={"page_size": 64, "tp_size": 2}, kv_bytes=counted), KnownServer()
    asked = Settings(
        tmp_path, ARCHITECTURE, "8xH20", 8, bound=0.9, budget_s=60.0, seed=1,
        lengths=(256, 1024, 5000), wants_decode=False,
    )  # fmt: skip

    def silent(_cell: Cell | None, _done: int, _left: int) -> None:
        """Nobody watches."""

    async def use(pair: Pair) -> Measured:
        return await measure(pair, asked, silent)

    got: Measured = asyncio.run(with_pair(*servers, None, use))
    measurement = got.file.measurement
    assert measurement is not None
    assert {row.tokens: row.moved_bytes for row in measurement.kv} == {
        tokens: counted(tokens) for tokens in (256, 1024)
    }
    times_s = got.findings.prefill_s()
    for row in measurement.kv:
        assert row.geometry_bytes == paged_kv_bytes(ARCHITECTURE, row.tokens, 64)
        assert row.phi_bytes_per_s == pytest.approx(row.geometry_bytes / times_s[row.tokens])
    (note,) = [one for one in measurement.notes if "counted" in one]
    assert note.startswith("KV of 1,024 tokens")
    assert "tp 2" in note
    assert any(one.startswith("prefill 5,000: not measured") for one in measurement.notes)
