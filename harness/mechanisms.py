"""The tables of the mechanisms under study as records: scheduling, prefix cache, transport."""

from harness.resolution import wrong
from harness.scenario_tables.decisions import PrefixCacheTable, SchedulingTable
from harness.scenario_tables.machinery import TransportTable
from harness.settings import PrefixCache, Scheduling, Transport


def resolve_scheduling(table: SchedulingTable) -> Scheduling:
    return Scheduling(
        admission=table.admission,
        ttft_source=table.ttft_source,
        admission_deadline_s=table.admission_deadline,
        cache_aware=table.cache_aware,
        cache_copy=table.cache_copy,
        bandwidth_aware=table.bandwidth_aware,
        role_conversion=table.role_conversion,
        control_period_s=table.control_period,
        demand_window_s=table.demand_window,
        link_target=table.link_target,
        role_period_s=table.role_period,
        conversion_s=table.conversion,
        cache_staleness_s=table.cache_staleness,
        max_wait_s=table.max_wait,
        max_queue_requests=table.max_queue,
    )


def resolve_prefix_cache(table: PrefixCacheTable, where: str) -> PrefixCache:
    if table.checkpoint_tokens % table.block_tokens:
        raise wrong(
            "prefix_cache.checkpoint_tokens",
            where,
            f"{table.checkpoint_tokens} is not a multiple of prefix_cache.block_tokens "
            f"({table.block_tokens}); a state is of use at the end of a full block only",
        )
    return PrefixCache(
        enabled=table.enabled,
        block_tokens=table.block_tokens,
        checkpoint_tokens=table.checkpoint_tokens,
        memory_bytes=table.memory,
    )


def resolve_transport(table: TransportTable) -> Transport:
    return Transport(
        connections=table.connections,
        layerwise=table.layerwise,
        checksum=table.checksum,
        chunk_bytes=table.chunk_bytes,
        striping=table.striping,
        congestion_control=table.congestion_control,
        pacing_bytes_per_s=table.pacing,
        io_threads=table.io_threads,
    )
