"""Prometheus figures of the gateway."""

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest


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

    def count(self, outcome: str) -> None:
        self._requests.labels(outcome).inc()

    def in_flight(self, count: int) -> None:
        self._in_flight.set(count)

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self._registry)
