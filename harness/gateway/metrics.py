"""Prometheus figures of the gateway. Times are wall seconds but where a name says otherwise."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from harness.scheduling.congestion import LinkState
from harness.scheduling.scheduler import Scheduler

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: Seconds: from what a fast engine answers in to what a client still waits for.
TTFT_BUCKETS_S = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)
ITL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

_LINK_GAUGES = (
    ("utilisation", "Estimated goodput over capacity"),
    ("waiting_seconds", "What waits for the link over its capacity, scenario time"),
    ("queueing_delay_seconds", "Median RTT above the least, scenario time"),
    ("retransmits_per_second", "Segments sent again, scenario time"),
    ("capacity_bytes_per_second", "What the link is thought to carry, scenario units"),
    ("scarce", "1 when the link is nearly full and something waits"),
    ("down", "1 when nothing moves on it"),
)


class GatewayMetrics:
    """One registry a process: nothing global."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self.requests = Counter(
            "prfaas_gateway_requests", "Requests ended", ["outcome", "phase"], registry=registry
        )
        self.rejects = Counter(
            "prfaas_gateway_rejects", "Requests refused", ["status"], registry=registry
        )
        self.retries = Counter(
            "prfaas_gateway_retries", "Placements after the first", registry=registry
        )
        self.threshold_changes = Counter(
            "prfaas_threshold_changes", "Times the threshold moved", ["reason"], registry=registry
        )
        self.ttft_s = Histogram(
            "prfaas_ttft_seconds",
            "From the request's arrival to its first token",
            buckets=TTFT_BUCKETS_S,
            registry=registry,
        )
        self.itl_s = Histogram(
            "prfaas_itl_seconds",
            "Between two chunks of a stream, over the tokens of the second",
            buckets=ITL_BUCKETS_S,
            registry=registry,
        )
        self._gauges = {
            name: Gauge(f"prfaas_{name}", text, registry=registry)
            for name, text in (
                ("gateway_in_flight", "Requests in flight"),
                ("threshold_tokens", "Uncached lengths above it are offloaded"),
                ("cached_blocks", "Keys in the cache index"),
                ("instances_down", "Instances that do not answer"),
            )
        }
        self._queues = Gauge(
            "prfaas_queue_requests", "Requests assigned", ["instance", "role"], registry=registry
        )
        self._links = {
            name: Gauge(f"prfaas_link_{name}", text, ["cluster"], registry=registry)
            for name, text in _LINK_GAUGES
        }

    def render(self, scheduler: Scheduler, in_flight: int, down: int) -> bytes:
        """The text exposition format, with the scheduler's figures as they are now."""
        self._gauges["gateway_in_flight"].set(in_flight)
        self._gauges["cached_blocks"].set(scheduler.cached_blocks)
        self._gauges["instances_down"].set(down)
        if scheduler.threshold_tokens is not None:
            self._gauges["threshold_tokens"].set(scheduler.threshold_tokens)
        lengths = scheduler.queue_lengths()
        self._queues.clear()  # roles change
        for instance in scheduler.instances:
            self._queues.labels(instance.name, instance.role).set(lengths[instance.name])
        self._observe_links(scheduler.links())
        return generate_latest(self._registry)

    def _observe_links(self, links: Mapping[str, LinkState]) -> None:
        for cluster, state in links.items():
            values = (
                state.utilisation,
                state.waiting_s,
                state.queueing_delay_s,
                state.retransmits_per_s,
                state.capacity_bytes_per_s,
                state.scarce,
                state.down,
            )
            for (name, _), value in zip(_LINK_GAUGES, values, strict=True):
                self._links[name].labels(cluster).set(value)
