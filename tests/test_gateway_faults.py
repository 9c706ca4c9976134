"""Clients that go away, instances that are lost, limits that are reached: nothing is left behind,
and what happened is said."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from gateway_setup import CACHE, PREFILL_S, Setup, body_of, gateway_over

from harness.core import ScenarioError

IDS = list(range(20_000, 20_600))
OTHER = list(range(40_000, 40_600))
#: A short prompt's 1.9 MB on the wire take 1.9 s. They are many of loopback's packets: what fits
#: into one or two is not held back by a paced rate.
SLOW_KV = {"byte_scale": 100.0, "pacing_bytes_per_s": 1e6}
#: Everything local, or everything offloaded.
LOCAL, REMOTE = (f"deployments.prfaas_pd.threshold_tokens={tokens}" for tokens in (1_000_000, 1))


def phase_is(rid: str, phase: str) -> Any:
    return lambda state: state["routes"].get(rid, {}).get("phase") == phase


async def leave_in(setup: Setup, phase: str, output_tokens: int = 2) -> None:
    """Post, wait until the request is in ``phase``, and go away."""
    asked = asyncio.create_task(setup.generate(IDS, output_tokens, rid="gone"))
    await setup.until(phase_is("gone", phase))
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)


@pytest.mark.parametrize(
    ("phase", "engine", "output_tokens"),
    [
        ("prefill_queue", {}, 2),
        ("prefill", {}, 2),
        ("transfer", SLOW_KV, 2),
        ("decode", {}, 100_000),
    ],
)
def test_a_client_that_goes_away_frees_what_it_held(
    tmp_path: Path, phase: str, engine: dict[str, Any], output_tokens: int
) -> None:
    async def main() -> None:
        async with gateway_over(
            tmp_path, {"pd": "p0 d0"}, LOCAL, cache=CACHE, engine=engine
        ) as setup:
            ahead = None
            if phase == "prefill_queue":
                ahead = asyncio.create_task(setup.generate(OTHER, rid="ahead"))
                await setup.until(phase_is("ahead", "prefill"))
            await leave_in(setup, phase, output_tokens)
            if ahead is not None:
                assert (await ahead)[0] == 200
            await setup.idle()
            row = setup.row("gone")
            assert (row["outcome"], row["failure_phase"]) == ("failed", "cancelled")
            counters = setup.driver.scheduler.counters
            assert counters.cancelled == 1
            assert counters.arrived == counters.finished + counters.cancelled

    asyncio.run(main())


def test_a_request_moves_on_from_an_instance_that_dies_before_the_first_token(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with gateway_over(
            tmp_path,
            {"prfaas": "p0 p1", "pd": "p0 d0"},
            REMOTE,
            "gateway.max_retries=1",
            mortal="prfaas",
        ) as setup:
            asked = asyncio.create_task(setup.generate(IDS, rid="moved"))
            await setup.until(phase_is("moved", "prefill"))
            await setup.kill("prfaas")
            status, answer, _ = await asked
            assert status == 200
            assert answer["meta_info"]["completion_tokens"] == 2
            row = setup.row("moved")
            assert (row["outcome"], row["retries"]) == ("completed", 1)
            assert row["prefill_instance"] == "pd-p0"
            state = await setup.state()
            assert state["down"] == ["prfaas-p0", "prfaas-p1"]
            # Found out once: the next request goes where somebody is.
            assert (await setup.generate(OTHER, rid="next"))[0] == 200
            assert setup.row("next")["retries"] == 0
            placed = [row for row in decisions(setup) if row["rid"] == "moved"]
            assert [row["attempt"] for row in placed] == [0, 1]
            assert [row["prefill_instance"] for row in placed] == ["prfaas-p0", "pd-p0"]
            _, text, _ = await setup.ask("GET", "/metrics")
            assert "prfaas_gateway_retries_total 1.0" in text
            assert "prfaas_instances_down 2.0" in text
            await setup.idle()

    asyncio.run(main())


def decisions(setup: Setup) -> list[dict[str, Any]]:
    setup.driver.decisions.flush()
    return [row for row in setup.rows("decisions") if row["action"] in ("dispatch", "reject")]


def test_nothing_is_sent_twice_once_a_token_has_gone_out(tmp_path: Path) -> None:
    async def main() -> None:
        async with gateway_over(tmp_path, {"pd": "p0 d0"}, LOCAL, mortal="pd") as setup:
            body = body_of(IDS, 100_000, "begun") | {"stream": True}
            async with setup.session.post(setup.url("/generate"), json=body) as answer:
                assert answer.status == 200
                assert (await answer.content.readline()).startswith(b"data: ")
                await setup.kill("pd")
                rest = await answer.content.read()
            assert b'"error"' in rest
            assert b"[DONE]" not in rest
            row = setup.row("begun")
            assert (row["outcome"], row["failure_phase"], row["retries"]) == ("failed", "decode", 0)

    asyncio.run(main())


def test_without_an_instance_the_answer_is_503_and_it_comes_back(tmp_path: Path) -> None:
    async def main() -> None:
        async with gateway_over(tmp_path, {"pd": "p0 d0"}, LOCAL) as setup:
            worker = setup.workers["pd"]
            setup.driver.lose("pd-p0")
            status, answer, headers = await setup.generate(IDS)
            assert (status, headers["Retry-After"]) == (503, "1")
            assert "no prefill instance is up" in answer["error"]["message"]
            assert worker.ports
            # It answers when it is asked again, a probe later.
            await setup.until(lambda state: not state["down"])
            assert (await setup.generate(IDS))[0] == 200

    asyncio.run(main())


@pytest.mark.parametrize(
    ("overrides", "said", "retry_s"),
    [
        (("scheduling.max_queue=2",), "scheduling.max_queue is 2", 1),
        ((f'scheduling.max_wait="{1.5 * PREFILL_S}s"',), "scheduling.max_wait", 1),
    ],
)
def test_a_full_queue_and_a_long_wait_are_refused_early(
    tmp_path: Path, overrides: tuple[str, ...], said: str, retry_s: int
) -> None:
    async def main() -> None:
        async with gateway_over(tmp_path, {"pd": "p0 d0"}, LOCAL, *overrides) as setup:
            first = [asyncio.create_task(setup.generate(IDS, rid=f"{n}")) for n in range(2)]
            await setup.until(lambda state: len(state["routes"]) == 2)
            # Two are ahead: its prefill would start in almost two prefill times.
            status, answer, headers = await setup.generate(IDS)
            assert (status, answer["error"]["type"]) == (429, "rejected")
            assert said in answer["error"]["message"]
            assert headers["Retry-After"] == str(retry_s)
            assert [one[0] for one in await asyncio.gather(*first)] == [200, 200]
            (refused,) = [row for row in decisions(setup) if row["action"] == "reject"]
            assert said in refused["reason"]
            phases = [row["failure_phase"] for row in setup.rows("gateway")]
            assert sorted(map(str, phases)) == ["None", "None", "rejected"]
            _, text, _ = await setup.ask("GET", "/metrics")
            assert 'prfaas_gateway_rejects_total{status="429"} 1.0' in text
            # What did come is in the histograms: two first tokens, and one more after each.
            assert "prfaas_ttft_seconds_count 2.0" in text
            assert "prfaas_itl_seconds_count 2.0" in text

    asyncio.run(main())


@pytest.mark.parametrize(
    ("limit", "engine", "phase"),
    [
        ("prefill_queue_timeout", {"admission": "reserve_first"}, "prefill_queue"),
        ("prefill_timeout", {}, "prefill"),
        ("transfer_timeout", SLOW_KV, "transfer"),
        ("between_tokens_timeout", {"stream_interval_tokens": 1000}, "between_tokens"),
    ],
)
def test_a_phase_that_takes_too_long_is_named(
    tmp_path: Path, limit: str, engine: dict[str, Any], phase: str
) -> None:
    async def main() -> None:
        async with gateway_over(
            tmp_path, {"pd": "p0 d0"}, LOCAL, f"gateway.{limit}=1s", engine=engine
        ) as setup:
            holding = None
            if phase == "prefill_queue":
                holding = asyncio.create_task(setup.generate(OTHER, rid="ahead"))
                await setup.until(lambda state: "ahead" in state["routes"])
            status, answer, _ = await setup.generate(IDS, 1000, rid="late")
            assert status == 502
            assert answer["error"]["code"] == phase
            assert setup.row("late")["failure_phase"] == phase
            if holding is not None:
                await holding
            await setup.idle()

    asyncio.run(main())


def test_without_a_key_only_loopback_is_served(tmp_path: Path) -> None:
    async def main(host: str) -> None:
        async with gateway_over(tmp_path, {"pd": "p0 d0"}, LOCAL, host=host) as setup:
            assert (await setup.ask("GET", "/v1/models"))[0] == 200

    asyncio.run(main("127.0.0.1"))
    with pytest.raises(ScenarioError, match=r"no API key and would listen on 0\.0\.0\.0"):
        asyncio.run(main("0.0.0.0"))


def test_a_body_beyond_the_bound_is_refused_whichever_way_it_comes(tmp_path: Path) -> None:
    async def main() -> None:
        bound = "gateway.max_body=10kB"
        async with gateway_over(tmp_path, {"pd": "p0 d0"}, LOCAL, bound) as setup:

            async def without_a_length() -> Any:
                for _ in range(20):
                    yield b" " * 1000

            for body in (b" " * 20_000, without_a_length()):
                async with setup.session.post(setup.url("/generate"), data=body) as answer:
                    assert answer.status == 413

    asyncio.run(main())


def test_text_needs_the_tokenizer_that_was_named(tmp_path: Path) -> None:
    async def main() -> None:
        path = tmp_path / "tokenizer.json"
        path.write_text("{}")
        named = f"gateway.tokenizer={path}"
        async with gateway_over(tmp_path, {"pd": "p0 d0"}, LOCAL, named):
            pass

    with pytest.raises(ScenarioError, match=r"pip install tokenizers|cannot read the tokenizer"):
        asyncio.run(main())
