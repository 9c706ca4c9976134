"""The stages of a deployment as queues: what requests ask of each, whatever the load.

A crossing KV leaves over the sending cluster's link; one that stays, over a path of its own per
sending instance at the fabric's rate. Clusters of one kind share requests at random, in proportion
to what each can carry (``harness.throughput``).
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from harness.architecture import Architecture
from harness.deployment import Deployment
from harness.queueing import Service
from harness.scenario import Scenario
from harness.scheduling.config import decode_batch, decode_step_s
from harness.throughput.by_capacity import far_share
from harness.throughput.costs import Costs, local_rate, remote_rate
from harness.transfer_model import exposure, prefill_pieces
from harness.workload import LengthDistribution

FloatArray = npt.NDArray[np.float64]

#: Shares of the tail, fine about the last per cent.
_TAIL = 0.01 * np.concatenate(
    [1.03 ** (np.arange(54, -55, -1) - 0.5), 1.03**-54.5 * 1.2 ** -np.arange(1.0, 17.0)]
)
#: Cumulative shares that part a distribution into bins for a convolution, finer towards its tail;
#: P50, P90 and P99 lie in the middle of a bin.
_EDGES = np.concatenate([(np.arange(332) + 0.5) / 350, 1 - _TAIL])
#: Shares of the quantiles that a service has.
_QUANTILES = (np.arange(2000) + 0.5) / 2000


@dataclass(frozen=True, slots=True)
class Points:
    """What requests cost alone; ``weights`` sum to 1. # (points,) each

    ``sending_s`` is b / R, ``alone_s`` what of it shows layer-wise after prefill on a free path
    (``harness.transfer_model``) and ``hidden_s`` T_prefill (L - 1) / L.
    """

    prefill_s: FloatArray
    sending_s: FloatArray
    alone_s: FloatArray
    hidden_s: FloatArray
    weights: FloatArray


@dataclass(frozen=True, slots=True)
class Station:
    """One cluster's prefill instances and the rate of their path to decode. ``pd_cluster`` is None
    for a PrfaaS cluster."""

    pd_cluster: int | None
    hardware: str
    num_instances: int
    path_bytes_per_s: float

    @property
    def crosses(self) -> bool:
        return self.pd_cluster is None


@dataclass(frozen=True, slots=True)
class Route:
    """A station and the requests it gets: those with a mark in [low, high), marks being uniform on
    [0, 1). ``hops_s`` is the delay out to it and back from it."""

    station: Station
    low: float
    high: float
    hops_s: float
    service: Service
    sending: Service
    points: Points

    @property
    def share(self) -> float:
        return self.high - self.low


@dataclass(frozen=True, slots=True)
class Decode:
    """One PD cluster's decode slots, its share of the requests and the link into it."""

    share: float
    slots: int
    hold: Service
    ingress_bytes_per_s: float

    def held_too(self, before: Service) -> "Decode":
        """The same slots, held for a time before decoding as well."""
        mean_s = before.mean_s + self.hold.mean_s
        variance_s2 = sum(one.scv * one.mean_s**2 for one in (before, self.hold))
        return replace(self, hold=Service(mean_s, variance_s2 / mean_s**2))


@dataclass(frozen=True, slots=True)
class _Requests:
    """Those of one side of the threshold. ``weights`` sum to 1, unless there are none."""

    share: float
    new_tokens: FloatArray  # (points,)
    cached_tokens: FloatArray  # (points,)
    weights: FloatArray  # (points,)


def prefill_routes(
    scenario: Scenario, deployment: Deployment, lengths: LengthDistribution
) -> tuple[tuple[Route, ...], FloatArray, FloatArray]:
    """Routes that get requests; then T_prefill of all of them and its weights. # (points,) both

    Long requests have the low marks. ScenarioError where a profile does not cover the lengths.
    """
    link, fabric = scenario.link.rate_bytes_per_s, scenario.fabric.rate_bytes_per_s
    remote_shares, local_shares = cluster_shares(scenario, deployment, lengths)
    far, near = _sides(scenario, deployment, lengths)
    stations = [
        (far, share, Station(None, c.hardware, c.num_instances, c.link_bytes_per_s))
        for c, share in zip(deployment.prfaas_clusters(link), remote_shares, strict=True)
    ] + [
        (near, share, Station(index, c.hardware, c.num_prefill, fabric))
        for index, (c, share) in enumerate(
            zip(deployment.pd_clusters(link), local_shares, strict=True)
        )
    ]
    routes, service_s, weights = [], [], []
    low = 0.0
    for requests, part, station in stations:
        share = requests.share * part
        if share > 0:
            prefill_s = scenario.hardware[station.hardware].profile.prefill_s_array(
                requests.new_tokens, requests.cached_tokens
            )
            routes.append(_route(scenario, station, requests, prefill_s, (low, low + share)))
            service_s.append(prefill_s)
            weights.append(requests.weights * share)
            low += share
    return tuple(routes), np.concatenate(service_s), np.concatenate(weights)


def decode_stages(
    scenario: Scenario, deployment: Deployment, lengths: LengthDistribution, steps_scv: float
) -> tuple[Decode, ...]:
    """Each PD cluster's, in order. ``steps_scv``: squared coefficient of variation of the steps."""
    _, shares = cluster_shares(scenario, deployment, lengths)
    steps = max(lengths.mean_output_tokens - 1, 0.0)
    stages = []
    clusters = deployment.pd_clusters(scenario.link.rate_bytes_per_s)
    for cluster, share in zip(clusters, shares, strict=True):
        own = replace(deployment, pd_hardware=cluster.hardware)
        stages.append(
            Decode(
                share=share,
                slots=cluster.num_decode * decode_batch(scenario, own),
                hold=Service(steps * decode_step_s(scenario, own), steps_scv),
                ingress_bytes_per_s=cluster.link_bytes_per_s,
            )
        )
    return tuple(stages)


def cluster_shares(
    scenario: Scenario, deployment: Deployment, lengths: LengthDistribution
) -> tuple[list[float], list[float]]:
    """What share of the crossing requests each PrfaaS cluster gets, and of all each PD cluster."""
    link = scenario.link.rate_bytes_per_s
    remote, local = deployment.prfaas_clusters(link), deployment.pd_clusters(link)
    if len(remote) <= 1 and len(local) == 1:
        return [1.0] * len(remote), [1.0]
    costs = Costs(scenario, deployment, lengths)
    split = costs.planned(deployment)
    sent = [float(remote_rate(costs, (one,), split, "exact")[0]) for one in remote]
    kept = [float(local_rate(costs, one, split, "exact")[0]) for one in local]
    return _normalised(sent), _normalised(kept)


def _normalised(rates: list[float]) -> list[float]:
    """An infinite rate is that of a cluster that nothing reaches."""
    if any(rate == np.inf for rate in rates):
        return [1 / len(rates)] * len(rates)
    return [rate / sum(rates) for rate in rates]


def _sides(
    scenario: Scenario, deployment: Deployment, lengths: LengthDistribution
) -> tuple[_Requests, _Requests]:
    """Requests that cross and requests that stay."""
    new, cached = np.rint(lengths.lengths), np.rint(lengths.cached_tokens)
    weights = lengths.weights / lengths.weights.sum()
    if deployment.balancing == "capacity":
        q = far_share(scenario, deployment, lengths)
        far, near = (_Requests(part, new, cached, weights) for part in (q, 1 - q))
        return far, near
    if not deployment.num_prfaas:
        crosses = np.zeros(len(new), dtype=bool)
    elif not deployment.num_prefill:
        crosses = np.ones(len(new), dtype=bool)
    else:
        assert deployment.threshold_tokens is not None, "two clusters prefill without a threshold"
        crosses = new > deployment.threshold_tokens
    share = 1.0 if crosses.all() else float(weights[crosses].sum())
    far, near = (
        _Requests(part, new[side], cached[side], weights[side] / (part or 1.0))
        for part, side in ((share, crosses), (1 - share, ~crosses))
    )
    return far, near


def _route(
    scenario: Scenario,
    station: Station,
    requests: _Requests,
    prefill_s: FloatArray,
    marks: tuple[float, float],
) -> Route:
    architecture = scenario.model.architecture
    total = requests.new_tokens + requests.cached_tokens
    moved_bytes = architecture.moved_bytes_array(total, requests.cached_tokens)
    sending_s = moved_bytes / station.path_bytes_per_s
    columns, weights = condensed(
        np.stack([prefill_s, sending_s, requests.new_tokens, requests.cached_tokens]),
        requests.weights,
    )
    return Route(
        station=station,
        low=marks[0],
        high=marks[1],
        hops_s=scenario.link.rtt_s if station.crosses else 0.0,
        service=_service(prefill_s, requests.weights),
        sending=_service(sending_s, requests.weights),
        points=Points(
            prefill_s=columns[0],
            sending_s=columns[1],
            alone_s=_alone_s(architecture, columns, station.path_bytes_per_s),
            hidden_s=columns[0] * (1 - 1 / len(architecture.layers)),
            weights=weights,
        ),
    )


def _alone_s(
    architecture: Architecture, columns: FloatArray, path_bytes_per_s: float
) -> FloatArray:
    """Exposed layer-wise transfer of requests that have the path for themselves. # (points,)"""
    prefill_s: FloatArray = columns[0]
    new_tokens, cached_tokens = columns[2], columns[3]
    if not prefill_s.size:
        return prefill_s
    pieces = prefill_pieces(
        architecture, new_tokens, lambda _new, _cached: prefill_s[:, np.newaxis], cached_tokens
    )
    return exposure(pieces, path_bytes_per_s).exposed_s


def _service(values_s: FloatArray, weights: FloatArray) -> Service:
    mean_s = float((weights * values_s).sum())
    second = float((weights * values_s**2).sum())
    scv = max(second / mean_s**2 - 1, 0.0) if mean_s > 0 else 0.0
    values_s, weights = _ascending(values_s, weights)
    place = np.searchsorted(np.cumsum(weights), _QUANTILES * (1 - 1e-9))
    return Service(mean_s, scv, values_s[np.minimum(place, len(values_s) - 1)])


def _ascending(values: FloatArray, weights: FloatArray) -> tuple[FloatArray, FloatArray]:
    """In the order of the first row, or of the only one. # (points,) or (rows, points)"""
    key = values if values.ndim == 1 else values[0]
    if not (np.diff(key) < 0).any():
        return values, weights
    order = np.argsort(key, kind="stable")
    return values[..., order], weights[order]


def condensed(columns: FloatArray, weights: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Means of bins of similar first column. # (columns, points), (points,) -> the same, fewer"""
    if columns.shape[1] <= len(_EDGES):
        return columns, weights
    columns, weights = _ascending(columns, weights)
    total = np.cumsum(weights)
    starts = np.unique(np.concatenate([[0], np.searchsorted(total, _EDGES * total[-1])]))
    mass = np.add.reduceat(weights, starts)
    return np.add.reduceat(columns * weights, starts, axis=1) / mass, mass
