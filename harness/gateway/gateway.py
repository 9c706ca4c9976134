"""The gateway as a whole: an async context manager around everything that it is made of."""

import ipaddress
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from harness.architecture import load_architecture, paged_kv_bytes
from harness.child import Spool
from harness.core import EngineError, Route, ScenarioError
from harness.gateway.cache_watch import follow_caches
from harness.gateway.canary import RealPairs, canary
from harness.gateway.config import GatewayConfig
from harness.gateway.decision_log import DecisionLog
from harness.gateway.driver import Driver
from harness.gateway.engine_watch import EngineWatch
from harness.gateway.front import Front
from harness.gateway.link_watch import LinkWatch
from harness.gateway.metrics import GatewayMetrics
from harness.gateway.prompts import Prompts
from harness.gateway.upstream import Upstream
from harness.scheduling.config import configure
from harness.scheduling.scheduler import Scheduler
from harness.server import running, serve_http


class Gateway:
    """Serves at ``port`` while it is open; ``canaries`` pairs of instances were tried before."""

    def __init__(self, config: GatewayConfig) -> None:
        _check_key(config)
        self._config = config
        self._stack = AsyncExitStack()
        self._driver: Driver | None = None
        self._watch: EngineWatch | None = None
        self.port = 0
        self.canaries = 0

    @property
    def driver(self) -> Driver:
        assert self._driver is not None, "the gateway is not open"
        return self._driver

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await self._open(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    async def count(self) -> None:
        """Read the counters of real servers now. EngineError where one of them does not tell."""
        if self._watch is not None:
            await self._watch.count()

    async def _open(self, stack: AsyncExitStack) -> None:
        config = self._config
        requests = stack.enter_context(Spool(config.gateway_spool))
        decisions = stack.enter_context(Spool(config.decisions_spool))
        log = stack.enter_context(DecisionLog(decisions))
        link = stack.enter_context(Spool(config.link_spool))
        is_real = config.engine == "sglang"
        prompts = Prompts(config.tokenizer, bytes_are_tokens=not is_real)
        upstream = Upstream(
            config.workers, config.worker_key, config.timeouts.connect_wall_s, config.engine
        )
        stack.callback(upstream.close)
        self.canaries = await _try_pairs(config, upstream)
        metrics = GatewayMetrics()
        driver = self._driver = await stack.enter_async_context(
            Driver(_scheduler_maker(config), upstream, log, metrics, config.time_scale)
        )
        if is_real:
            # SGLang says nothing of its connections: no estimate of the link, and no feedback.
            engines = stack.enter_context(Spool(config.engines_spool))
            self._watch = EngineWatch(upstream, config.workers, engines)
            await stack.enter_async_context(self._watch)
        else:
            watch = LinkWatch(
                upstream, config.workers, driver, link, config.time_scale, config.byte_scale
            )
            await stack.enter_async_context(running(watch.follow()))
        if config.policy.prefix_cache.enabled:
            names = [worker.name for worker in config.workers]
            await stack.enter_async_context(running(follow_caches(upstream, driver, names)))
        front = Front(config, driver, upstream, prompts, requests, metrics)
        self.port = await serve_http(
            stack, front.application(), config.host, config.port, EngineError
        )


def _check_key(config: GatewayConfig) -> None:
    """Without a key nobody but this host's own processes may reach the gateway."""
    if config.api_key is None and not ipaddress.ip_address(config.host).is_loopback:
        raise ScenarioError(
            f"the gateway has no API key and would listen on {config.host}, where others reach it; "
            "give it a key, or let it listen on 127.0.0.1"
        )


def _scheduler_maker(config: GatewayConfig) -> Callable[[], Scheduler]:
    """Makes schedulers of the gateway's deployment, on the profiles' costs."""
    profiles = {name: source.load() for name, source in config.profiles.items()}
    architecture = load_architecture(Path(config.architecture), config.kv_dtype)
    configured = configure(config.policy, profiles, architecture)
    return lambda: Scheduler(configured)


async def _try_pairs(config: GatewayConfig, upstream: Upstream) -> int:
    """A canary through every pair, which leaves no prefix behind; gives their number."""
    instances = [worker.instance() for worker in config.workers]
    routes = [
        Route(prefill, decode)
        for prefill in instances
        if prefill.role == "prefill"
        for decode in instances
        if decode.role == "decode"
    ]
    # The shortest prompt that every profile has a cost for.
    tokens = max(source.load().covered_tokens[0] for source in config.profiles.values())
    real = None
    if config.engine == "sglang":
        architecture = load_architecture(Path(config.architecture), config.kv_dtype)
        kv_bytes = paged_kv_bytes(architecture, tokens, config.page_tokens)
        real = RealPairs(upstream, kv_bytes if config.counts_kv else None)
    await canary(upstream, routes, tokens, config.canary_timeout_wall_s, real)
    if config.policy.prefix_cache.enabled:
        for worker in config.workers:
            await upstream.ask_when_idle(worker.name, "/flush_cache", 400)
    return len(routes)
