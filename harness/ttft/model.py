"""A deployment's TTFT over its load (equations in ``harness.ttft``)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.core import PD, PRFAAS
from harness.deployment import Deployment
from harness.queueing import Arrivals, Branch, sojourn_quantiles
from harness.scenario import Scenario
from harness.ttft.accuracy import Accuracy, accuracy, beyond_instances
from harness.ttft.arrivals import workload_stream
from harness.ttft.queues import Met, Queues
from harness.ttft.stages import FloatArray, decode_stages, prefill_routes
from harness.utilisation import Utilisation
from harness.workload import LengthDistribution, length_distribution

_QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Parts:
    """Means in seconds. A transfer is what prefill does not hide of it and, where it crosses, the
    round trip; the scenario's transport makes one of the two. ``decode_admission_s`` is the wait
    for a slot, which ``reserve_first`` has before prefill."""

    prefill_queue_s: float
    prefill_s: float
    transfer_layerwise_s: float
    transfer_at_end_s: float
    decode_admission_s: float


@dataclass(frozen=True, slots=True)
class RouteTtft:
    """The requests that one cluster prefills; ``share`` of all."""

    cluster: str
    hardware: str
    num_instances: int
    share: float
    waiting_probability: float
    ttft_mean_s: float
    parts: Parts


@dataclass(frozen=True, slots=True)
class Ttft:
    """``load`` is the utilisation of the busiest stage. Where that is 1 or more,
    ``unstable_stage`` names it and there is no TTFT at the rate. ``service_*`` is T_prefill alone,
    as in Table 6 of arXiv 2604.15039."""

    rate_req_per_s: float
    load: float
    unstable_stage: str | None
    service_ttft_mean_s: float
    service_ttft_p50_s: float
    service_ttft_p90_s: float
    service_ttft_p99_s: float
    ttft_mean_s: float | None
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    ttft_p99_s: float | None
    parts: Parts | None
    routes: tuple[RouteTtft, ...]
    utilisation: Utilisation
    accuracy: Accuracy


@dataclass(frozen=True, slots=True)
class TtftPoint:
    """A point of a curve; ``accuracy`` says what to mind about it, if anything."""

    rate_req_per_s: float
    ttft_mean_s: float | None
    ttft_p90_s: float | None
    accuracy: str | None


class TtftModel:
    """One deployment under one workload, made once for any number of loads."""

    def __init__(
        self,
        scenario: Scenario,
        deployment: Deployment,
        lengths: LengthDistribution | None = None,
        stream: tuple[Arrivals, float] | None = None,
    ) -> None:
        """``lengths`` and ``stream`` (that of ``workload_stream``) default to the scenario's.
        ScenarioError where a profile does not cover the lengths."""
        lengths = lengths or length_distribution(scenario)
        arrivals, steps_scv = stream or workload_stream(scenario)
        routes, service_s, weights = prefill_routes(scenario, deployment, lengths)
        self._queues = Queues(
            routes=routes,
            decodes=decode_stages(scenario, deployment, lengths, steps_scv),
            arrivals=arrivals,
            scheduling=scenario.scheduling,
            layerwise=scenario.transport.layerwise,
        )
        self._otherwise = _otherwise(scenario, deployment)
        self._beyond = beyond_instances(
            (one.station.num_instances, one.service.scv) for one in routes if one.share > 0
        )
        self._service_mean_s = float((weights * service_s).sum())
        self._service_quantiles_s = _weighted_quantiles(service_s, weights)

    def mean_s(self, rate_req_per_s: float) -> float | None:
        """Mean TTFT alone, the cheapest; None where a stage is not stable."""
        return _mean_s(self._queues.met(rate_req_per_s)[0])

    def point(self, rate_req_per_s: float) -> TtftPoint:
        """Mean and P90 alone."""
        met, utilisation = self._queues.met(rate_req_per_s)
        return TtftPoint(
            rate_req_per_s=rate_req_per_s,
            ttft_mean_s=_mean_s(met),
            ttft_p90_s=_quantiles_s(met, (0.9,))[0],
            accuracy=self._accuracy(utilisation).note,
        )

    def predict(self, rate_req_per_s: float) -> Ttft:
        """All there is to say at one rate."""
        met, utilisation = self._queues.met(rate_req_per_s)
        stage, load = utilisation.busiest()
        p50_s, p90_s, p99_s = _quantiles_s(met, _QUANTILES)
        service_p50_s, service_p90_s, service_p99_s = self._service_quantiles_s
        return Ttft(
            rate_req_per_s=rate_req_per_s,
            load=load,
            unstable_stage=None if met else stage,
            service_ttft_mean_s=self._service_mean_s,
            service_ttft_p50_s=service_p50_s,
            service_ttft_p90_s=service_p90_s,
            service_ttft_p99_s=service_p99_s,
            ttft_mean_s=_mean_s(met),
            ttft_p50_s=p50_s,
            ttft_p90_s=p90_s,
            ttft_p99_s=p99_s,
            parts=_overall(met) if met else None,
            routes=tuple(_route_ttft(one) for one in met),
            utilisation=utilisation,
            accuracy=self._accuracy(utilisation),
        )

    def _accuracy(self, utilisation: Utilisation) -> Accuracy:
        return accuracy(self._queues.arrivals, utilisation, self._otherwise, self._beyond)


def _otherwise(scenario: Scenario, deployment: Deployment) -> str | None:
    """What sets a deployment apart from those of the measurement."""
    if deployment.more_prfaas or deployment.more_pd:
        return "several clusters of a kind"
    return "reserve_first" if scenario.scheduling.admission == "reserve_first" else None


def _mean_s(met: Sequence[Met]) -> float | None:
    return sum(one.route.share * one.ttft_mean_s for one in met) if met else None


def _quantiles_s(met: Sequence[Met], shares: Sequence[float]) -> list[float] | list[None]:
    if not met:
        return [None] * len(shares)
    branches = [
        Branch(one.route.share, one.total, one.rest_s, one.route.points.weights) for one in met
    ]
    return sojourn_quantiles(branches, shares)


def _parts(one: Met) -> Parts:
    return Parts(
        prefill_queue_s=one.prefill.mean_s,
        prefill_s=one.route.service.mean_s,
        transfer_layerwise_s=one.transfer_s(layerwise=True),
        transfer_at_end_s=one.transfer_s(layerwise=False),
        decode_admission_s=one.decode.mean_s,
    )


def _overall(met: Sequence[Met]) -> Parts:
    parts = [(one.route.share, _parts(one)) for one in met]
    names = Parts.__dataclass_fields__
    return Parts(**{name: sum(share * getattr(p, name) for share, p in parts) for name in names})


def _route_ttft(one: Met) -> RouteTtft:
    station = one.route.station
    return RouteTtft(
        cluster=PRFAAS if station.crosses else PD,
        hardware=station.hardware,
        num_instances=station.num_instances,
        share=one.route.share,
        waiting_probability=one.prefill.probability,
        ttft_mean_s=one.ttft_mean_s,
        parts=_parts(one),
    )


def _weighted_quantiles(values: FloatArray, weights: FloatArray) -> list[float]:
    """The least value up to which the share lies."""
    order = np.argsort(values, kind="stable")
    total = np.cumsum(weights[order])
    places = np.searchsorted(total, np.asarray(_QUANTILES) * total[-1])
    return [float(values[order[place]]) for place in places]
