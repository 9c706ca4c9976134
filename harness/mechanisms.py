"""The tables of the mechanisms under study as records: scheduling, prefix cache, serving,
transport."""

from harness.kv_blocks import KvBlocks
from harness.resolution import wrong
from harness.scenario_tables.decisions import PrefixCacheTable, SchedulingTable
from harness.scenario_tables.machinery import TransportTable
from harness.scenario_tables.serving import ServingTable
from harness.settings import Model, PrefixCache, Scheduling, Serving, Transport, Workload


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


def resolve_serving(table: ServingTable, where: str) -> Serving:
    batch, chunk = table.prefill_batch_tokens, table.chunk_tokens
    if batch is not None and chunk is not None and chunk > batch:
        why = f"a step of serving.prefill_batch_tokens ({batch}) holds no chunk of {chunk} tokens"
        raise wrong("serving.chunk_tokens", where, why)
    return Serving(
        decode_steps=table.decode_steps,
        decode_memory_bytes=table.decode_memory,
        prefill_batch_tokens=batch,
        chunk_tokens=chunk,
    )


def check_decode_memory(
    serving: Serving, model: Model, pools: PrefixCache, workload: Workload, where: str
) -> None:
    """Refuse a memory in which the longest request of the workload has no place, ever."""
    if serving.decode_memory_bytes is None:
        return
    blocks = KvBlocks.of(model.architecture, pools, serving.decode_memory_bytes)
    longest = workload.max_tokens + workload.output_max_tokens
    if (needed := blocks.taken(longest)) > blocks.capacity:
        raise wrong(
            "serving.decode_memory",
            where,
            f"it holds {blocks.capacity} blocks of {pools.block_tokens} tokens, but a request of "
            f"{longest} tokens, prompt and output, takes {needed} and would wait for ever; give it "
            "more, or bound workload.max_tokens and workload.output_max_tokens",
        )


def refuse_simulated_serving(serving: Serving, where: str) -> None:
    """Refuse for a live run what only simulated instances do."""
    for key, value in (
        ("prefill_batch_tokens", serving.prefill_batch_tokens),
        ("chunk_tokens", serving.chunk_tokens),
    ):
        if value is not None:
            why = "no live engine follows it, only prfaas simulate; leave it out of a live run"
            raise wrong(f"serving.{key}", where, why)


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
