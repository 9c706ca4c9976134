"""How long the scheduler takes to place one request with the caches of many clusters known.

    python -m benchmarks.gateway_decision [--json] [--decisions 4000] [--policy threshold]

One decision is ``Scheduler.handle(Arrived)`` for a prompt of 128K tokens in blocks of 512, whose
256 keys are given: the longest prefix in each of 24 clusters (12 PrfaaS, 12 PD) of which the index
knows 100,000 blocks, then cluster and instances. Costs and KV sizes are those of the case study,
whose model has states. Prompts share their first blocks, up to a place drawn at random, with what
is cached, or share nothing; prefixes lie on random instances, popular ones on several. Requests
live on for a while, so that instances are busy. Wall time and CPU time of the one thread are given;
on a busy machine only the second says what a decision costs.
"""

import argparse
import json
import math
import os
import random
import statistics
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from harness.core import PD, PRFAAS, Instance
from harness.scenario import load_scenario
from harness.scheduling import events as ev
from harness.scheduling.config import scheduler_config, tail_function
from harness.scheduling.scheduler import Scheduler
from harness.scheduling.scheduler_config import SchedulerConfig

SCENARIO = Path(__file__).parent.parent / "scenarios" / "paper-case-study.toml"
INPUT_TOKENS, BLOCK_TOKENS = 131_072, 512
KEYS = INPUT_TOKENS // BLOCK_TOKENS
CLUSTERS, CACHED_BLOCKS, FAMILIES = 24, 100_000, 400
#: Blocks of the shortest cached prefix, and prompts in a hundred that share nothing.
SHORTEST, STRANGERS = 16, 10
IN_FLIGHT, WARM_UP = 300, 300
TARGET_P50_S, TARGET_P99_S = 200e-6, 1e-3


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of each decision, by the wall and of the thread's CPU; and the longest hit that each
    found in any cluster, in tokens."""

    cached_blocks: int
    wall_s: list[float]
    cpu_s: list[float]
    hit_tokens: list[int]


def configuration(balancing: str = "threshold") -> SchedulerConfig:
    """The case study's costs over 12 PrfaaS and 12 PD clusters, 4/3/5 instances each."""
    settings = [f"prefix_cache.block_tokens={BLOCK_TOKENS}", "prefix_cache.enabled=true"]
    scenario = load_scenario(SCENARIO, settings)
    plain = scheduler_config(scenario, "prfaas_pd")
    counts = ((PRFAAS, "prefill", "h200", 4), (PD, "prefill", "h20", 3), (PD, "decode", "h20", 5))
    instances = tuple(
        Instance(f"{place}{n}-{role[0]}{i}", f"{place}{n}", role, hardware)
        for n in range(CLUSTERS // 2)
        for place, role, hardware, count in counts
        for i in range(count)
    )
    links = {f"{PRFAAS}{n}": plain.links[PRFAAS] for n in range(CLUSTERS // 2)}
    return replace(
        plain,
        instances=instances,
        links=links,
        balancing=balancing,
        transfer_tail_s=tail_function(
            scenario.model.architecture,
            layerwise=scenario.transport.layerwise,
            links=links,
            fabric_bytes_per_s=scenario.fabric.rate_bytes_per_s,
        ),
    )


def fill(scheduler: Scheduler, chance: random.Random) -> list[tuple[int, ...]]:
    """Report cached prefixes until the index knows 100,000 blocks; the families' keys."""
    families = [tuple(chance.getrandbits(64) for _ in range(KEYS)) for _ in range(FAMILIES)]
    seq = dict.fromkeys((one.name for one in scheduler.instances), 0)
    spacing = scheduler.config.prefix_cache.checkpoint_tokens // BLOCK_TOKENS
    number = 0
    while scheduler.cached_blocks < CACHED_BLOCKS:
        keys = families[number % FAMILIES]
        popular = number % FAMILIES < FAMILIES // 10
        for instance in chance.sample(scheduler.instances, 12 if popular else 2):
            longest = KEYS if number >= FAMILIES else chance.randint(SHORTEST, KEYS)
            held = keys[:longest]
            states = {*held[spacing - 1 :: spacing], held[-1]}
            seq[instance.name] += 1
            report = ev.CacheDelta(instance.name, seq[instance.name], held, (), tuple(states))
            assert scheduler.handle(report, 0.0) == []
        number += 1
    return families


def prompts(families: list[tuple[int, ...]], chance: random.Random) -> Iterator[tuple[int, ...]]:
    """Keys of prompts that follow a family up to a block drawn at random."""
    while True:
        shared = 0 if chance.randrange(100) < STRANGERS else chance.randint(1, KEYS)
        own = tuple(chance.getrandbits(64) for _ in range(KEYS - shared))
        yield families[chance.randrange(len(families))][:shared] + own


def measure(decisions: int, *, balancing: str = "threshold", seed: int = 1) -> Timings:
    """Place ``decisions`` requests one after the other."""
    chance = random.Random(seed)
    scheduler = Scheduler(configuration(balancing))
    asked = prompts(fill(scheduler, chance), chance)
    flying: deque[str] = deque()
    timings = Timings(scheduler.cached_blocks, [], [], [])
    for number in range(WARM_UP + decisions):
        now_s = 0.1 * number
        arrived = ev.Arrived(str(number), INPUT_TOKENS, 1024, next(asked))
        wall_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
        (action,) = scheduler.handle(arrived, now_s)
        cpu_s = (time.thread_time_ns() - cpu_ns) / 1e9
        wall_s = (time.perf_counter_ns() - wall_ns) / 1e9
        assert isinstance(action, ev.Dispatch)
        if number >= WARM_UP:
            timings.wall_s.append(wall_s)
            timings.cpu_s.append(cpu_s)
            timings.hit_tokens.append(max(action.hit_tokens.values()))
        flying.append(arrived.rid)
        if len(flying) > IN_FLIGHT:
            ended = flying.popleft()
            for event in (ev.PrefillDone(ended), ev.TransferDone(ended, 0), ev.Finished(ended)):
                scheduler.handle(event, now_s)
    return timings


def p99(values: list[float]) -> float:
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="the result as JSON (also the default)")
    parser.add_argument("--decisions", type=int, default=4000)
    parser.add_argument("--policy", choices=("threshold", "capacity"), default="threshold")
    given = parser.parse_args()
    timings = measure(given.decisions, balancing=given.policy)
    p50_s, p99_s = statistics.median(timings.wall_s), p99(timings.wall_s)
    result = {
        "decision_p50_s": round(p50_s, 7),
        "decision_p99_s": round(p99_s, 7),
        "decision_cpu_p50_s": round(statistics.median(timings.cpu_s), 7),
        "decision_cpu_p99_s": round(p99(timings.cpu_s), 7),
        "n": len(timings.wall_s),
        "policy": given.policy,
        "clusters": CLUSTERS,
        "cached_blocks": timings.cached_blocks,
        "best_hit_mean_tokens": round(statistics.fmean(timings.hit_tokens)),
        "keys": KEYS,
        "meets_target": p50_s <= TARGET_P50_S and p99_s <= TARGET_P99_S,
        "load_average_1min": round(os.getloadavg()[0], 2),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
