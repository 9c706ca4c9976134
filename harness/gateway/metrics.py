"""Prometheus figures of the gateway."""

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from harness.scheduling.congestion import LinkState


class GatewayMetrics:
    """One registry a process: nothing global."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "prfaas_gateway_requests", "Requests ended", ["outcome"], registry=self._registry
        )
        self._in_flight = Gauge(
            "prfaas_gateway_in_flight", "Requests in flight", registry=self._registry
        )

        self._link = {
            name: Gauge(f"prfaas_link_{name}", text, registry=self._registry)
            for name, text in (
                ("utilisation", "Estimated goodput over capacity"),
                ("waiting_seconds", "What waits for the link over its capacity, scenario time"),
                ("queueing_delay_seconds", "Median RTT above the least, scenario time"),
                ("retransmits_per_second", "Segments sent again, scenario time"),
                ("scarce", "1 when the link is nearly full and something waits"),
            )
        }

    def link(self, state: LinkState) -> None:
        self._link["utilisation"].set(state.utilisation)
        self._link["waiting_seconds"].set(state.waiting_s)
        self._link["queueing_delay_seconds"].set(state.queueing_delay_s)
        self._link["retransmits_per_second"].set(state.retransmits_per_s)
        self._link["scarce"].set(state.scarce)

    def count(self, outcome: str) -> None:
        self._requests.labels(outcome).inc()

    def in_flight(self, count: int) -> None:
        self._in_flight.set(count)

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self._registry)
