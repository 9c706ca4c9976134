"""Prometheus gauges of a worker's instances, under SGLang's metric names where it has them."""

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest


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
        self._busy_s: dict[str, float] = {}

    def observe(self, instance: str, queued: int, running: int, busy_s: float) -> None:
        """Take one sample of an instance."""
        self._queued.labels(instance).set(queued)
        self._running.labels(instance).set(running)
        self._busy.labels(instance).inc(max(0.0, busy_s - self._busy_s.get(instance, 0.0)))
        self._busy_s[instance] = max(busy_s, self._busy_s.get(instance, 0.0))

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self._registry)
