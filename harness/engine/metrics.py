"""Prometheus gauges of a worker's instances, under SGLang's metric names where it has them."""

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from harness.engine.memory import Memory


class EngineMetrics:
    """One registry a worker process: nothing global."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._running = Gauge(
            "sglang:num_running_reqs", "Requests running", ["instance"], registry=self._registry
        )
        self._queued = Gauge(
            "sglang:num_queue_reqs", "Requests waiting", ["instance"], registry=self._registry
        )
        self._busy = Counter(
            "prfaas:busy_seconds", "Planned busy wall time", ["instance"], registry=self._registry
        )
        self._pool = Gauge(
            "prfaas:pool_blocks",
            "Blocks of the prefix cache's memory",
            ["instance", "kind"],
            registry=self._registry,
        )
        self._waiting = Gauge(
            "prfaas:pool_waiting",
            "Requests that wait for room in memory",
            ["instance"],
            registry=self._registry,
        )
        self._busy_s: dict[tuple[str, str], float] = {}

    def observe_pool(self, instance: str, memory: Memory) -> None:
        """Take one sample of an instance's memory."""
        pool = memory.pool
        blocks = {
            "free": pool.free_blocks,
            "cached": pool.cached_blocks,
            "pinned": pool.pinned_blocks,
            "transfer": pool.transfer_blocks,
        }
        for kind, count in blocks.items():
            self._pool.labels(instance, kind).set(count)
        self._waiting.labels(instance).set(len(memory.waiting))

    def observe(self, instance: str, role: str, queued: int, running: int, busy_s: float) -> None:
        """Take one sample of an instance, whose busy time counts for each role by itself."""
        self._queued.labels(instance).set(queued)
        self._running.labels(instance).set(running)
        before_s = self._busy_s.get((instance, role), 0.0)
        self._busy.labels(instance).inc(max(0.0, busy_s - before_s))
        self._busy_s[instance, role] = max(busy_s, before_s)

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self._registry)
