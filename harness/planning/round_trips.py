"""What distance costs: control round trips in the service TTFT of offloaded requests.

A request that the PrfaaS cluster prefills pays half a round trip to be dispatched there and half
for its KV to land; a local one pays none. Its service TTFT is

    T_prefill + (1 + handshakes) rtt        handshakes = 0: connections and addresses are known

PD engines also set up each transfer. Assumed here, since it depends on the engine:
``HANDSHAKES`` round trips, one to ask the prefill side's bootstrap server who serves the request
and one to hand over the receive addresses and see them accepted, none of them behind prefill.

No queueing and no transmission time are in it, and Lambda_max does not depend on the round trip as
long as each connection keeps its bandwidth-delay product, rate x rtt / connections, in flight.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harness.deployment import Deployment
from harness.planning.variants import Variant

FloatArray = NDArray[np.float64]

#: One metropolitan area to the other side of the earth.
RTTS_S = (0.0008, 0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15)
HANDSHAKES = 2
_TAIL = 0.9


@dataclass(frozen=True, slots=True)
class RttPoint:
    """Service TTFT of the offloading deployment at one round trip, ``handshake_*`` with
    handshakes. ``added_*``: over no distance at all, without handshakes."""

    rtt_s: float
    ttft_mean_s: float
    ttft_p90_s: float
    added_mean_s: float
    added_p90_s: float
    handshake_ttft_mean_s: float
    handshake_ttft_p90_s: float
    bdp_bytes_per_connection: float


@dataclass(frozen=True, slots=True)
class RttLimit:
    """From which round trip on the homogeneous deployment has the lower service TTFT.

    0: it has from the start. None: no distance makes it so (the P90 of what stays local decides),
    or there is no such deployment.
    """

    handshake_round_trips: int
    near_mean_s: float
    near_p90_s: float
    homogeneous_mean_s: float | None
    homogeneous_p90_s: float | None
    mean_rtt_s: float | None
    p90_rtt_s: float | None
    handshake_mean_rtt_s: float | None
    handshake_p90_rtt_s: float | None


@dataclass(frozen=True, slots=True)
class _Service:
    """Prefill times of a deployment's requests, their weights, and which of them are offloaded.

    # all (points,)
    """

    seconds: FloatArray
    weights: FloatArray
    offloaded: NDArray[np.bool_]

    def mean_s(self, added_s: float = 0.0) -> float:
        return float(self.weights @ (self.seconds + added_s * self.offloaded))

    def p90_s(self, added_s: float = 0.0) -> float:
        return _quantile(self.seconds + added_s * self.offloaded, self.weights, _TAIL)


def rtt_points(base: Variant, rtts_s: Sequence[float] = RTTS_S) -> tuple[RttPoint, ...]:
    """The offloading deployment of ``base``, as it is planned there, at each round trip."""
    service = _service(base, base.offloading)
    near_mean_s, near_p90_s = service.mean_s(), service.p90_s()
    rate = base.scenario.link.rate_bytes_per_s
    points = []
    for rtt_s in rtts_s:
        mean_s, p90_s = service.mean_s(rtt_s), service.p90_s(rtt_s)
        points.append(
            RttPoint(
                rtt_s=rtt_s,
                ttft_mean_s=mean_s,
                ttft_p90_s=p90_s,
                added_mean_s=mean_s - near_mean_s,
                added_p90_s=p90_s - near_p90_s,
                handshake_ttft_mean_s=service.mean_s((1 + HANDSHAKES) * rtt_s),
                handshake_ttft_p90_s=service.p90_s((1 + HANDSHAKES) * rtt_s),
                bdp_bytes_per_connection=rate * rtt_s / base.scenario.transport.connections,
            )
        )
    return tuple(points)


def rtt_limit(base: Variant) -> RttLimit:
    """Where the round trip has used up what the offloading deployment's service TTFT gains."""
    service = _service(base, base.offloading)
    near_mean_s, near_p90_s = service.mean_s(), service.p90_s()
    if base.baseline is None:
        return RttLimit(HANDSHAKES, near_mean_s, near_p90_s, *[None] * 6)
    baseline = _service(base, base.baseline)
    mean_s = _mean_limit_s(service, baseline.mean_s())
    p90_s = _p90_limit_s(service, baseline.p90_s())
    return RttLimit(
        handshake_round_trips=HANDSHAKES,
        near_mean_s=near_mean_s,
        near_p90_s=near_p90_s,
        homogeneous_mean_s=baseline.mean_s(),
        homogeneous_p90_s=baseline.p90_s(),
        mean_rtt_s=mean_s,
        p90_rtt_s=p90_s,
        handshake_mean_rtt_s=None if mean_s is None else mean_s / (1 + HANDSHAKES),
        handshake_p90_rtt_s=None if p90_s is None else p90_s / (1 + HANDSHAKES),
    )


def _mean_limit_s(service: _Service, bound_s: float) -> float | None:
    """What may be added to offloaded requests before the mean reaches ``bound_s``."""
    offloaded = float(service.weights[service.offloaded].sum())
    if offloaded == 0:
        return None
    return max(0.0, (bound_s - service.mean_s()) / offloaded)


def _p90_limit_s(service: _Service, bound_s: float) -> float | None:
    """What may be added to offloaded requests before the P90 passes ``bound_s``.

    Of the offloaded as many have to stay below the bound as the local ones leave to be covered.
    """
    remote, local = service.offloaded, ~service.offloaded
    within = float(service.weights[local & (service.seconds <= bound_s)].sum())
    needed = _TAIL - within
    offloaded = float(service.weights[remote].sum())
    if needed <= 0:
        return None
    if needed > offloaded:
        return 0.0
    last_s = _quantile(service.seconds[remote], service.weights[remote], needed / offloaded)
    return max(0.0, bound_s - last_s)


def _service(base: Variant, deployment: Deployment) -> _Service:
    """Several clusters of one side share its requests as their prefill capacities."""
    whole = np.rint(base.lengths.lengths)
    far = np.full(len(whole), bool(deployment.num_prfaas))
    if deployment.num_prefill and deployment.threshold_tokens is not None:
        far = whole > deployment.threshold_tokens
    remote = [(c.hardware, c.num_instances) for c in deployment.prfaas_clusters(0.0)]
    local = [(c.hardware, c.num_prefill) for c in deployment.pd_clusters(0.0) if c.num_prefill]
    parts = [*_shared(base, remote, far), *_shared(base, local, ~far)]
    return _Service(
        seconds=np.concatenate([seconds for seconds, _, _ in parts]),
        weights=np.concatenate([weights for _, weights, _ in parts]),
        offloaded=np.concatenate([far[chosen] for _, _, chosen in parts]),
    )


def _shared(
    base: Variant, clusters: Sequence[tuple[str, int]], chosen: NDArray[np.bool_]
) -> list[tuple[FloatArray, FloatArray, NDArray[np.bool_]]]:
    """(prefill seconds, weights) of the chosen lengths on each cluster, and which they are."""
    lengths, weights = base.lengths, base.lengths.weights[chosen]
    if not weights.sum() > 0:
        return []
    seconds = [
        base.scenario.hardware[hardware].profile.prefill_s_array(
            lengths.lengths[chosen], lengths.cached_tokens[chosen]
        )
        for hardware, _ in clusters
    ]
    rates = np.array(
        [count / float(weights @ cost) for (_, count), cost in zip(clusters, seconds, strict=True)]
    )
    shares = rates / rates.sum()
    return [(cost, weights * share, chosen) for cost, share in zip(seconds, shares, strict=True)]


def _quantile(values: FloatArray, weights: FloatArray, share: float) -> float:
    """The least value that ``share`` of the weight does not exceed."""
    order = np.argsort(values)
    running = np.cumsum(weights[order])
    # Rounding in the sum must not move a quantile to the next value.
    at = np.searchsorted(running, share * running[-1] * (1 - 1e-12))
    return float(values[order[min(int(at), len(order) - 1)]])
