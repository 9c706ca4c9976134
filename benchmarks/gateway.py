"""What the gateway adds to a request's TTFT, against posting to the pair itself. Prints JSON.

    python -m benchmarks.gateway [--json] [--quick] [--requests N] [--rounds N]

Behind it is one emulated prefill/decode pair that computes for no time. ``direct``, where the
client posts both halves itself, takes turns with ``gateway``, and then with ``sglang-router`` in
PD mode where it is installed. Added is the difference of equal quantiles of TTFT, a way's less
those of the direct one that it took turns with. ``own`` is what the gateway timed in itself; under
load the pair's own delays differ by way, and the difference then says little without it.

    small       128 tokens, one request at a time
    400kb       68,266 tokens in 400 KB of JSON, one request at a time
    stream_100  128 tokens, 100 requests a second by Poisson arrivals whatever became of the others,
                16 streamed tokens each, 5 ms apart; the same arrivals by every way, in rounds
    decision    the scheduler's part alone: benchmarks/gateway_decision.py

Seconds are wall seconds. The processes ask for the real-time priority that a run's processes get.
Exit status: 0 every target met, 1 one missed.
"""

import argparse
import contextlib
import gc
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.gateway_client import Address, Way, direct, one_at_a_time, open_loop, through
from benchmarks.gateway_decision import measure as time_decisions
from benchmarks.gateway_peers import ROUTER, Served, router, router_lack, serving

GATEWAY, TTFT_CASES = "gateway", ("small", "400kb", "stream_100")
#: Six bytes a token in the body.
SMALL_TOKENS, LARGE_TOKENS = 128, 68_266
STREAM_RATE_PER_S, STREAM_TOKENS, ROUND_S = 100.0, 16, 3.0
DECISIONS = 4000
#: By each way before anything counts.
WARM_UP = 20


@dataclass(frozen=True, slots=True)
class Target:
    """The most that may be added, wall seconds; None: not asked for."""

    p50_s: float
    p99_s: float | None = None


TARGETS = {
    "small": Target(1e-3),
    "400kb": Target(3.5e-3),
    "stream_100": Target(2e-3, 8e-3),
    "decision": Target(200e-6, 1e-3),
}


def prompts(tokens: int) -> Callable[[int], bytes]:
    """Prompts of one length by number, as JSON text; all differ in their first id."""
    rest = b"".join(b",%d" % (10_000 + index % 90_000) for index in range(1, tokens))
    return lambda index: b"[%d%b]" % (10_000 + index % 90_000, rest)


def arrivals(seed: int) -> list[float]:
    """One round's planned instants, seconds."""
    generator, at_s, planned_s = random.Random(seed), 0.0, []
    while (at_s := at_s + generator.expovariate(STREAM_RATE_PER_S)) < ROUND_S:
        planned_s.append(at_s)
    return planned_s


async def streams(ways: dict[str, Way], rounds: int) -> dict[str, list[float]]:
    """TTFTs of all rounds by every way; each round begins with another way."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    names, prompt = list(ways), prompts(SMALL_TOKENS)
    for index in range(rounds):
        planned_s = arrivals(index)
        for name in names[index % len(names) :] + names[: index % len(names)]:
            found[name] += await open_loop(ways[name], prompt, planned_s, STREAM_TOKENS)
    return found


@dataclass(frozen=True, slots=True)
class Times:
    """TTFTs of a way and of the direct one that it took turns with, from when until when."""

    way_s: list[float]
    direct_s: list[float]
    window_ns: tuple[int, int]

    def added_s(self, share: float) -> float:
        return round(quantile_s(self.way_s, share) - quantile_s(self.direct_s, share), 6)


async def measure(
    served: Served, fronts: dict[str, Address], requests: int, rounds: int
) -> dict[str, dict[str, Times]]:
    """By case and front."""
    found: dict[str, dict[str, Times]] = {}
    async with AsyncExitStack() as stack:
        pair = await stack.enter_async_context(direct(served.prefill, served.decode))
        for name, address in fronts.items():
            front = await stack.enter_async_context(through(address))
            ways: dict[str, Way] = {"way": front, "direct": pair}
            await one_at_a_time(ways, prompts(SMALL_TOKENS), WARM_UP)
            gc.freeze()
            for case in TTFT_CASES:
                start_ns = time.monotonic_ns()
                times = await run_case(case, ways, requests, rounds)
                window_ns = (start_ns, time.monotonic_ns())
                found.setdefault(case, {})[name] = Times(times["way"], times["direct"], window_ns)
    return found


async def run_case(
    case: str, ways: dict[str, Way], requests: int, rounds: int
) -> dict[str, list[float]]:
    """TTFTs by way."""
    if case == "stream_100":
        return await streams(ways, rounds)
    tokens = {"small": SMALL_TOKENS, "400kb": LARGE_TOKENS}[case]
    return await one_at_a_time(ways, prompts(tokens), requests)


def quantile_s(values_s: list[float], share: float) -> float:
    """The smallest value that at least ``share`` of them do not exceed."""
    return sorted(values_s)[max(0, math.ceil(share * len(values_s)) - 1)]


def case_of(name: str, found: dict[str, Times], own_s: list[float]) -> dict[str, Any]:
    """A case's figures, rounded to microseconds; ``own_s`` is what the gateway timed."""
    ours, peer, target = found[GATEWAY], found.get(ROUTER), TARGETS[name]
    p50_s, p99_s = ours.added_s(0.5), ours.added_s(0.99)
    return {
        "name": name,
        "requests": len(ours.way_s),
        "added_p50_s": p50_s,
        "added_p99_s": p99_s,
        "target_p50_s": target.p50_s,
        "target_p99_s": target.p99_s,
        "meets_target": p50_s <= target.p50_s and (target.p99_s is None or p99_s <= target.p99_s),
        "own_p50_s": round(quantile_s(own_s, 0.5), 6),
        "own_p99_s": round(quantile_s(own_s, 0.99), 6),
        "direct_p50_s": round(quantile_s(ours.direct_s, 0.5), 6),
        "direct_p99_s": round(quantile_s(ours.direct_s, 0.99), 6),
        "sglang_router": peer
        and {"added_p50_s": peer.added_s(0.5), "added_p99_s": peer.added_s(0.99)},
    }


def _at_a_runs_priority() -> str:
    """Child processes inherit it."""
    with contextlib.suppress(OSError, AttributeError):  # only root gets it, on Linux
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        return "real-time"
    return "normal"


def run(requests: int, rounds: int) -> dict[str, Any]:
    """The whole document."""
    priority, lack = _at_a_runs_priority(), router_lack()
    decision_s = time_decisions(DECISIONS).wall_s
    decision_p50_s, decision_p99_s = (quantile_s(decision_s, share) for share in (0.5, 0.99))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        served = stack.enter_context(serving(Path(folder)))
        fronts = {GATEWAY: served.gateway}
        if lack is None:
            fronts[ROUTER] = stack.enter_context(router(served))
        found = uvloop.run(measure(served, fronts, requests, rounds))
        cases = [
            case_of(name, times, served.own_s(*times[GATEWAY].window_ns))
            for name, times in found.items()
        ]
    target = TARGETS["decision"]
    assert target.p99_s is not None
    return {
        "cases": cases,
        "decision_p50_s": round(decision_p50_s, 7),
        "decision_p99_s": round(decision_p99_s, 7),
        "decision_meets_target": decision_p50_s <= target.p50_s and decision_p99_s <= target.p99_s,
        "sglang_router_lack": lack,
        "priority": priority,
        "cores": os.cpu_count(),
        "load_average_1min": round(os.getloadavg()[0], 2),
    }


def table(document: dict[str, Any]) -> str:
    """The same for a reader, in milliseconds."""
    lines = [
        f"{'':12}{'p50':>8}{'target':>8}{'p99':>8}{'target':>8}"
        f"{'own p50':>9}{'own p99':>9}{'direct p50':>12}  {ROUTER}"
    ]
    for case in document["cases"]:
        p99 = "-" if case["target_p99_s"] is None else f"{1e3 * case['target_p99_s']:.2f}"
        peer = case["sglang_router"]
        beside = "-" if peer is None else f"{1e3 * peer['added_p50_s']:.2f}"
        lines.append(
            f"{case['name']:12}{1e3 * case['added_p50_s']:8.2f}{1e3 * case['target_p50_s']:8.2f}"
            f"{1e3 * case['added_p99_s']:8.2f}{p99:>8}"
            f"{1e3 * case['own_p50_s']:9.2f}{1e3 * case['own_p99_s']:9.2f}"
            f"{1e3 * case['direct_p50_s']:12.2f}  {beside}"
        )
    lines.append(
        f"decision    {1e3 * document['decision_p50_s']:8.3f}{0.2:8.2f}"
        f"{1e3 * document['decision_p99_s']:8.3f}{1.0:8.2f}"
    )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gateway", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--quick", action="store_true", help="a tenth of the requests")
    parser.add_argument("--requests", type=int, default=500, metavar="N", help="of a case")
    parser.add_argument("--rounds", type=int, default=6, metavar="N", help="of 3 s, by each way")
    given = parser.parse_args()
    share = 10 if given.quick else 1
    document = run(max(20, given.requests // share), max(1, given.rounds // share))
    print(json.dumps(document, indent=2) if given.json else table(document))
    met = [case["meets_target"] for case in document["cases"]]
    return 0 if all([*met, document["decision_meets_target"]]) else 1


if __name__ == "__main__":
    sys.exit(main())
