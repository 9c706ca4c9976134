"""Configurations of the scheduler for tests: costs that are exact in binary, no scenario file."""

from collections.abc import Callable, Mapping

from harness.core import PD, PRFAAS, Instance
from harness.deployment import Balancing
from harness.mechanisms import resolve_prefix_cache, resolve_scheduling
from harness.scenario_tables.decisions import PrefixCacheTable, SchedulingTable
from harness.scheduling import events as ev
from harness.scheduling.congestion import LinkSample
from harness.scheduling.scheduler import Scheduler
from harness.scheduling.scheduler_config import Link, SchedulerConfig

STEP_S = 0.025
BLOCK = 16
#: Bytes of KV a token, and of the state at the end of a prompt.
TOKEN_BYTES, STATE_BYTES = 64, 256


def instances(
    num_prfaas: int, num_prefill: int, num_decode: int, *, clusters: int = 1
) -> tuple[Instance, ...]:
    """So many in each of ``clusters`` PrfaaS and PD clusters."""
    names = [(f"{PRFAAS}{n or ''}", f"{PD}{n or ''}") for n in range(clusters)]
    return tuple(
        Instance(f"{cluster}-{role[0]}{i}", cluster, role, hardware)
        for far, near in names
        for cluster, role, hardware, count in (
            (far, "prefill", "fast", num_prfaas),
            (near, "prefill", "slow", num_prefill),
            (near, "decode", "slow", num_decode),
        )
        for i in range(count)
    )


def moved_bytes(total_tokens: int, resident_tokens: int) -> int:
    return TOKEN_BYTES * (total_tokens - resident_tokens) + STATE_BYTES


def growing_bytes(total_tokens: int, resident_tokens: int) -> int:
    """Of a model without states."""
    return TOKEN_BYTES * (total_tokens - resident_tokens)


def config(
    num_prfaas: int = 0,
    num_prefill: int = 1,
    num_decode: int = 1,
    *,
    threshold_tokens: int | None = None,
    max_batch: int = 1_000,
    link_delay_s: float = 0.0,
    clusters: int = 1,
    balancing: Balancing = "threshold",
    cache: bool = False,
    moved: Callable[[int, int], int] = moved_bytes,
    link_bytes_per_s: float = 2.0**20,
    fabric_bytes_per_s: float = 2.0**20,
    prefill_s: Mapping[str, Callable[[int, int], float]] | None = None,
    **scheduling: object,
) -> SchedulerConfig:
    """Prefill takes 1/64 s a token on "fast" and 1/32 s on "slow": exact in binary."""
    built = instances(num_prfaas, num_prefill, num_decode, clusters=clusters)
    return SchedulerConfig(
        instances=built,
        prefill_s=prefill_s or {"fast": lambda new, _: new / 64, "slow": lambda new, _: new / 32},
        decode_step_s=STEP_S,
        decode_max_batch=max_batch,
        threshold_tokens=threshold_tokens,
        balancing=balancing,
        scheduling=resolve_scheduling(SchedulingTable.model_validate(scheduling)),
        prefix_cache=resolve_prefix_cache(
            PrefixCacheTable(enabled=cache, block_tokens=BLOCK, checkpoint_tokens=4 * BLOCK), "test"
        ),
        links={
            one.cluster: Link(link_bytes_per_s, link_delay_s, link_delay_s)
            for one in built
            if one.cluster.startswith(PRFAAS)
        },
        fabric_bytes_per_s=fabric_bytes_per_s,
        moved_bytes=moved,
        transfer_tail_s=lambda _tokens, _resident, _prefill_s, _link: 0.0,
        max_tokens=4096,
        link_silence_s=1.0,
    )


def place(
    scheduler: Scheduler,
    rid: str,
    now_s: float,
    tokens: int,
    output: int = 1,
    keys: tuple[int, ...] = (),
) -> ev.Dispatch:
    (action,) = scheduler.handle(ev.Arrived(rid, tokens, output, keys), now_s)
    assert isinstance(action, ev.Dispatch), action
    return action


def cached(
    scheduler: Scheduler, name: str, *keys: int, states: tuple[int, ...] | None = None, seq: int = 1
) -> None:
    """An instance's pool holds these blocks, with a state at the last one unless told otherwise."""
    at = keys[-1:] if states is None else states
    assert scheduler.handle(ev.CacheDelta(name, seq, keys, (), at), 0.0) == []


def busy_link(
    scheduler: Scheduler, cluster: str, until_s: float, *, backlog_s: float = 1.0, share: float = 1
) -> None:
    """Reports every half second up to ``until_s`` of a link that carries ``share`` of its rate
    while ``backlog_s`` of its rate wait."""
    rate = scheduler.config.links[cluster].bytes_per_s
    for step in range(int(2 * until_s) + 1):
        at_s = step / 2
        sample = LinkSample(
            at_s,
            f"{cluster}-p0",
            "pd-d0",
            0,
            share * rate * at_s,
            0,
            0.01,
            0.01,
            0,
            backlog_s * rate,
            0,
        )
        assert scheduler.handle(ev.LinkSamples(cluster, (sample,)), at_s) == []
