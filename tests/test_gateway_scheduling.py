"""The gateway drives the scheduler: what workers say reaches it, and what it says is done."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from gateway_setup import CACHE, REAL_COSTS, Setup, gateway_over

from harness.block_keys import block_keys_of_text
from harness.record.spool import DecisionRow
from harness.scheduling import events as ev
from harness.scheduling.replay import Inputs, Replay

TOKENS = 2048
IDS = list(range(20_000, 20_000 + TOKENS))
LOCAL = "deployments.prfaas_pd.threshold_tokens=1000000"
#: From here on a prompt is offloaded.
BY_LENGTH = "deployments.prfaas_pd.threshold_tokens=1500"


def decisions(setup: Setup, *actions: str) -> list[DecisionRow]:
    setup.driver.decisions.flush()
    rows = [msgspec.convert(row, DecisionRow) for row in setup.rows("decisions")]
    return [row for row in rows if row.action in (actions or ("dispatch",))]


async def heard_of(setup: Setup, cluster: str) -> None:
    """Wait until the index knows that a cluster can use all of ``IDS``."""
    keys = block_keys_of_text(json.dumps(IDS, separators=(",", ":")).encode(), CACHE.block_tokens)
    index = setup.driver.scheduler._index
    assert index is not None
    place = index.clusters.index(cluster)
    await setup.until(lambda _: index.lookup(keys, len(keys)).hit_blocks[place] == len(keys))


def test_a_prefix_that_a_pool_holds_is_found_and_used(tmp_path: Path) -> None:
    async def main() -> None:
        async with gateway_over(
            tmp_path, {"pd": "p0 p1 d0"}, LOCAL, cache=CACHE, engine=REAL_COSTS
        ) as setup:
            await setup.generate(IDS, rid="first")
            await heard_of(setup, "pd")
            longer = [*IDS, *range(60_000, 60_300)]
            _, answer, _ = await setup.generate(longer, rid="second")
            assert answer["meta_info"]["cached_tokens"] == TOKENS
            first, second = decisions(setup)
            assert (first.cached_tokens, first.hit_tokens) == (0, {"pd": 0})
            assert (second.cached_tokens, second.hit_tokens) == (TOKENS, {"pd": TOKENS})
            assert second.uncached_tokens == len(longer) - TOKENS
            assert second.block_keys == len(longer) // CACHE.block_tokens
            # The instance that holds it; the other one has been idle for longer.
            assert second.prefill_instance == first.prefill_instance
            assert setup.row("second")["prefill"]["cached_tokens"] == TOKENS

    asyncio.run(main())


def test_a_delta_that_was_missed_makes_it_ask_for_all(tmp_path: Path) -> None:
    async def main() -> None:
        async with gateway_over(
            tmp_path, {"pd": "p0 d0"}, LOCAL, cache=CACHE, engine=REAL_COSTS
        ) as setup:
            await setup.generate(IDS)
            blocks = TOKENS // CACHE.block_tokens
            await heard_of(setup, "pd")
            setup.driver.tell(ev.CacheDelta("pd-p0", 10_000, added_blocks=(1, 2, 3)))
            assert [row.instance for row in decisions(setup, "resync")] == ["pd-p0"]
            # What it had not heard is not believed; what the worker holds is, once it has said so.
            state = await setup.until(lambda state: state["cached_blocks"] == blocks)
            assert state["cached_blocks"] == blocks

    asyncio.run(main())


def test_a_longer_prefix_is_copied_to_where_the_prompt_is_prefilled(tmp_path: Path) -> None:
    async def main() -> None:
        async with gateway_over(
            tmp_path, {"prfaas": "p0", "pd": "p0 d0"}, BY_LENGTH, cache=CACHE, engine=REAL_COSTS
        ) as setup:
            # Where it was decoded its blocks lie too, with a state that is of no block's end.
            await setup.generate([*IDS, *range(90_000, 90_100)], rid="far")
            assert setup.row("far")["prefill_instance"] == "prfaas-p0"
            await heard_of(setup, "prfaas")
            longer = [*IDS, *range(60_000, 60_300)]
            status, answer, _ = await setup.generate(longer, rid="near")
            assert status == 200
            row = decisions(setup)[-1]
            assert (row.prefill_instance, row.copy_from) == ("pd-p0", "prfaas-p0")
            assert (row.copied_tokens, row.roomy) == (TOKENS, ("prfaas",))
            assert answer["meta_info"]["cached_tokens"] == TOKENS
            assert setup.row("near")["prefill"]["cached_tokens"] == TOKENS
            await setup.idle()

    asyncio.run(main())


def test_an_instance_is_converted_when_it_is_empty(tmp_path: Path) -> None:
    async def main() -> None:
        async with gateway_over(
            tmp_path,
            {"pd": "p0 p1 d0"},
            LOCAL,
            "scheduling.role_conversion=true",
            'scheduling.conversion="2s"',
            engine={"convertible": True},
        ) as setup:
            scheduler = setup.driver.scheduler
            running = asyncio.create_task(setup.generate(IDS, rid="running"))
            await setup.until(lambda state: "running" in state["routes"])
            # What RoleControl says after minutes: one more instance shall decode.
            assert scheduler._conversion.drain("decode", setup.driver.now_s())
            draining = scheduler.converting
            assert draining == "pd-p1"
            setup.driver.tell(ev.Tick())
            began_s = setup.driver.now_s()
            state = await setup.until(lambda state: state["roles"]["pd-p1"] == "decode")
            assert setup.driver.now_s() - began_s >= 2.0
            assert state["converting"] is None
            assert [(row.instance, row.reason) for row in decisions(setup, "convert")] == [
                ("pd-p1", "decode")
            ]
            assert (await running)[0] == 200
            both = [asyncio.create_task(setup.generate(IDS, 30, rid=f"{n}")) for n in range(2)]
            assert [one[0] for one in await asyncio.gather(*both)] == [200, 200]
            used = {setup.row(f"{n}")["decode_instance"] for n in range(2)}
            assert used == {"pd-p1", "pd-d0"}

    asyncio.run(main())


def test_a_worker_that_cannot_convert_is_out_of_service(tmp_path: Path) -> None:
    async def main() -> None:
        async with gateway_over(
            tmp_path, {"pd": "p0 p1 d0"}, LOCAL, "scheduling.role_conversion=true"
        ) as setup:
            setup.driver.scheduler._conversion.drain("decode", setup.driver.now_s())
            converting = setup.driver.scheduler.converting
            setup.driver.tell(ev.Tick())
            await setup.until(lambda state: converting in state["down"], 15.0)
            assert setup.driver.scheduler.converting is None
            assert (await setup.generate(IDS))[0] == 200
            await setup.until(lambda state: not state["down"])

    asyncio.run(main())


def test_a_worker_that_was_started_again_gets_the_role_it_had(tmp_path: Path) -> None:
    async def main() -> None:
        async with gateway_over(
            tmp_path,
            {"pd": "p0 p1 d0"},
            LOCAL,
            "scheduling.role_conversion=true",
            'scheduling.conversion="1s"',
            engine={"convertible": True},
        ) as setup:
            setup.driver.scheduler._conversion.drain("decode", setup.driver.now_s())
            name = setup.driver.scheduler.converting
            setup.driver.tell(ev.Tick())
            await setup.until(lambda state: state["roles"][name] == "decode")
            (one,) = (one for one in setup.workers["pd"]._instances if one.name == name)
            await one.convert("prefill")  # as its process begins
            setup.driver.lose(one.name)
            await setup.until(lambda state: not state["down"])
            assert one.role == "decode"
            both = [asyncio.create_task(setup.generate(IDS, 30, rid=f"{n}")) for n in range(2)]
            assert [one[0] for one in await asyncio.gather(*both)] == [200, 200]

    asyncio.run(main())


def test_a_link_that_goes_down_is_heard_of_between_ticks(tmp_path: Path) -> None:
    async def main() -> None:
        async with gateway_over(
            tmp_path,
            {"prfaas": "p0", "pd": "p0 d0"},
            "deployments.prfaas_pd.threshold_tokens=1",
            mortal="prfaas",
        ) as setup:
            await setup.until(lambda state: state["links"]["prfaas"]["at_s"] is not None)
            assert (await setup.generate(IDS, rid="up"))[0] == 200
            assert setup.row("up")["prefill_instance"] == "prfaas-p0"
            await setup.kill("prfaas")
            state = await setup.until(lambda state: state["links"]["prfaas"]["down"], 15.0)
            assert state["threshold_tokens"] > 1
            assert decisions(setup, "set_threshold")[-1].reason == "outage"
            _, text, _ = await setup.ask("GET", "/metrics")
            assert 'prfaas_link_down{cluster="prfaas"} 1.0' in text
            assert (await setup.generate(IDS, rid="down"))[0] == 200
            assert setup.row("down")["prefill_instance"] == "pd-p0"
            assert decisions(setup)[-1].link_up == ()

    asyncio.run(main())


def inputs_of(row: DecisionRow) -> Inputs:
    """The row's inputs, every one of which has to be there."""
    names = Inputs.__dataclass_fields__
    given: dict[str, Any] = {name: getattr(row, name) for name in names}
    assert all(value is not None for name, value in given.items() if name != "threshold_tokens")
    return Inputs(**given)


def test_a_runs_decisions_follow_from_what_was_recorded_of_them(tmp_path: Path) -> None:
    """Also with prefixes, an instance that is down, and a threshold that was moved."""

    async def main() -> None:
        async with gateway_over(
            tmp_path,
            {"prfaas": "p0 p1", "pd": "p0 p1 p2 d0 d1"},
            BY_LENGTH,
            cache=CACHE,
            engine=REAL_COSTS,
        ) as setup:
            replay = Replay(setup.driver.scheduler.instances, setup.driver.scheduler.config.policy)
            asked = []
            for number in range(40):
                if number == 20:
                    setup.driver.lose("pd-p1")
                length = (300, 900, TOKENS, 1400)[number % 4]
                first = 20_000 if number % 3 else 20_000 + 7 * number
                ids = list(range(first, first + length))
                asked.append(asyncio.create_task(setup.generate(ids, 2 + number, f"{number}")))
                await asyncio.sleep(0.01 * (number % 5))
            assert {status for status, _, _ in await asyncio.gather(*asked)} == {200}
            rows = decisions(setup)
            assert len(rows) >= 40
            assert any(row.hit_tokens and max(row.hit_tokens.values()) for row in rows)
            assert len({row.prefill_instance for row in rows}) >= 4
            for row in rows:
                inputs = inputs_of(row)
                assert replay.uncached_tokens(inputs) == row.uncached_tokens
                assert replay.route(inputs) == (row.prefill_instance, row.decode_instance), row
            # The check can fail: other inputs give another route.
            far = next(row for row in rows if row.prefill_instance.startswith("prfaas"))
            near, _ = replay.route(replace(inputs_of(far), threshold_tokens=10**6))
            assert near.startswith("pd-")

    asyncio.run(main())
