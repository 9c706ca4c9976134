"""What benchmarks/gateway.py makes of its times, and one small run of it."""

import asyncio
import json
import time
from pathlib import Path

import pytest

from benchmarks.gateway import GATEWAY, Times, arrivals, case_of, prompts, quantile_s, table
from benchmarks.gateway_client import Address, body_of, direct, one_at_a_time, open_loop, through
from benchmarks.gateway_peers import ROUTER, serving
from harness.core import LoadError
from harness.surface.openai import parse_generate

OWN = [0.0004, 0.0005, 0.0006]
PLAIN = [0.004 + 1e-6 * n for n in range(200)]


def beyond(added_s: float) -> Times:
    return Times([one + added_s for one in reversed(PLAIN)], PLAIN, (0, 1))


def test_added_is_the_difference_of_equal_quantiles() -> None:
    case = case_of("small", {GATEWAY: beyond(0.0008)}, OWN)
    assert case["added_p50_s"] == pytest.approx(0.0008)
    assert case["added_p99_s"] == pytest.approx(0.0008)
    assert (case["own_p50_s"], case["own_p99_s"]) == (0.0005, 0.0006)
    assert case["meets_target"]
    assert case["sglang_router"] is None
    case = case_of("small", {GATEWAY: beyond(0.0012), ROUTER: beyond(0.0)}, OWN)
    assert not case["meets_target"]
    assert case["sglang_router"] == {"added_p50_s": 0.0, "added_p99_s": 0.0}


def test_a_tail_that_is_too_long_misses_the_target() -> None:
    times = Times([0.005] * 190 + [0.02] * 10, [0.004] * 200, (0, 1))
    case = case_of("stream_100", {GATEWAY: times}, OWN)
    assert case["added_p50_s"] <= case["target_p50_s"]
    assert case["added_p99_s"] > case["target_p99_s"]
    assert not case["meets_target"]


def test_quantiles_are_values_that_were_seen() -> None:
    assert quantile_s([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile_s([1.0] * 99 + [9.0], 0.99) == 1.0
    assert quantile_s([1.0] * 98 + [9.0] * 2, 0.99) == 9.0


def test_prompts_have_their_length_and_arrivals_their_rate() -> None:
    body = body_of(prompts(68_266)(3), 2)
    assert 400_000 <= len(body) <= 410_000
    assert parse_generate(body).prompt_tokens == 68_266
    assert prompts(128)(3) != prompts(128)(4)
    assert arrivals(1) == arrivals(1) != arrivals(2)
    assert len([at for seed in range(20) for at in arrivals(seed)]) == pytest.approx(6000, rel=0.05)


@pytest.mark.slow
def test_every_way_gives_its_first_token(tmp_path: Path) -> None:
    async def main() -> None:
        with serving(tmp_path) as served:
            async with (
                through(served.gateway) as gateway,
                direct(served.prefill, served.decode) as pair,
            ):
                start_ns = time.monotonic_ns()
                ways = {"gateway": gateway, "direct": pair}
                found = await one_at_a_time(ways, prompts(128), 3)
                found |= {"stream": await open_loop(gateway, prompts(128), [0.0, 0.01, 0.02], 4)}
                assert {name: len(times) for name, times in found.items()} == dict.fromkeys(
                    ("gateway", "direct", "stream"), 3
                )
                assert all(0 < one < 5 for times in found.values() for one in times)
            async with asyncio.timeout(10):  # a row is written when its answer is
                while len(own_s := served.own_s(start_ns, time.monotonic_ns())) < 6:
                    await asyncio.sleep(0.01)
            assert all(0 < one < 5 for one in own_s)
            assert served.own_s(0, start_ns) == []
            stranger = Address(served.gateway.host, served.gateway.port, "wrong")
            async with through(stranger) as way:
                with pytest.raises(LoadError, match="401"):
                    await asyncio.wait_for(way.ttft_s(b"[1,2]", 2), 10)

    asyncio.run(main())


def test_the_table_has_every_case() -> None:
    cases = [
        case_of(name, {GATEWAY: beyond(0.0005)}, OWN) for name in ("small", "400kb", "stream_100")
    ]
    document = {"cases": cases, "decision_p50_s": 1e-4, "decision_p99_s": 4e-4}
    text = table(json.loads(json.dumps(document)))
    assert [line.split()[0] for line in text.splitlines()[1:]] == [
        *("small", "400kb", "stream_100"),
        "decision",
    ]
