"""``python -m harness.gateway``: the gateway process, configured by its first line of stdin."""

import sys
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp

from harness.architecture import load_architecture
from harness.child import Spool, each_order, open_orders, read_config, run_child, settle, tell
from harness.core import EngineError, Route
from harness.gateway.config import GatewayConfig
from harness.gateway.front import Front
from harness.gateway.link_watch import LinkWatch
from harness.gateway.upstream import Upstream
from harness.scheduling.config import transfer_tail_function
from harness.scheduling.scheduler import Scheduler, SchedulerConfig
from harness.server import running, serve_http
from harness.surface.generate import MAX_BODY_BYTES


def scheduler_of(config: GatewayConfig) -> Scheduler:
    """The scheduler of the gateway's deployment, on the profiles' costs."""
    profiles = {name: source.load() for name, source in config.profiles.items()}
    return Scheduler(
        SchedulerConfig(
            instances=tuple(worker.instance() for worker in config.workers),
            prefill_s={name: profile.prefill_s for name, profile in profiles.items()},
            decode_step_s=config.decode_step_s,
            decode_max_batch=config.decode_max_batch,
            threshold_tokens=config.threshold_tokens,
            admission=config.admission,
            link_delay_s=config.dispatch_delay_s,
            transfer_tail_s=transfer_tail_function(
                load_architecture(Path(config.architecture), config.kv_dtype),
                layerwise=config.layerwise,
                link_bytes_per_s=config.link_bytes_per_s,
                fabric_bytes_per_s=config.fabric_bytes_per_s,
                link_delay_s=config.kv_delay_s,
            ),
        )
    )


def canary_tokens(config: GatewayConfig) -> int:
    """The shortest prompt that every profile has a cost for."""
    return max(source.load().covered_tokens[0] for source in config.profiles.values())


async def serve() -> None:
    """Serve until stdin ends."""
    orders = await open_orders()
    config = await read_config(orders, GatewayConfig)
    async with AsyncExitStack() as stack:
        requests = stack.enter_context(Spool(config.gateway_spool))
        decisions = stack.enter_context(Spool(config.decisions_spool))
        link = stack.enter_context(Spool(config.link_spool))
        session = await stack.enter_async_context(
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                # Deadlines are the gateway's own; a queue may hold a request for minutes.
                timeout=aiohttp.ClientTimeout(total=None),
                read_bufsize=MAX_BODY_BYTES,
            )
        )
        upstream = Upstream(session, config.workers, config.worker_key)
        instances = [worker.instance() for worker in config.workers]
        routes = [
            Route(prefill, decode)
            for prefill in instances
            if prefill.role == "prefill"
            for decode in instances
            if decode.role == "decode"
        ]
        try:
            await upstream.canary(routes, canary_tokens(config))
        except BaseExceptionGroup as failures:
            raise EngineError(str(failures.exceptions[0])) from failures
        front = Front(config, scheduler_of(config), upstream, requests, decisions)
        watch = LinkWatch(
            session,
            config.workers,
            config.worker_key,
            config.link_bytes_per_s,
            config.time_scale,
            config.byte_scale,
            front.now_s,
            link,
        )
        front.watch = watch
        await stack.enter_async_context(running(watch.follow()))
        port = await serve_http(stack, front.application(), config.host, config.port, EngineError)
        settle()
        tell("ready", port=port, canaries=len(routes))
        async for order in each_order(orders):
            front.start_mono_ns = int(order["start_mono_ns"])


if __name__ == "__main__":
    sys.exit(run_child(serve()))
