"""What requests meet at a load: every stage's wait (equations in ``harness.ttft``)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.special import gammaincinv

from harness.queueing import NO_WAIT, STABLE_LOAD, Arrivals, Renewal, Service, Wait, mixture
from harness.settings import Scheduling
from harness.ttft.stages import Decode, Route
from harness.utilisation import Utilisation

FloatArray = npt.NDArray[np.float64]

#: Rounds in which the time that matters downstream and the dispersion over it are made to agree.
_ROUNDS = 3
#: A path of the fabric that is used less has no queue worth the name.
_IDLE_PATH = 0.02
_HALVINGS = 40
_TURN_POINTS = 32
_EVEN_SCV = 1e-9


@dataclass(frozen=True, slots=True)
class Met:
    """What one route's requests meet. ``total`` is all the waiting in their TTFT, ``rest_s`` what
    else is in it. # (points,)"""

    route: Route
    prefill: Wait
    link: Wait
    decode: Wait
    total: Wait
    rest_s: FloatArray

    @property
    def ttft_mean_s(self) -> float:
        return self.total.mean_s + float(self.route.points.weights @ self.rest_s)

    def transfer_s(self, layerwise: bool) -> float:
        """Mean exposed transfer, round trip included."""
        alone = float(self.route.points.weights @ alone_s(self.route, layerwise))
        return exposed(self.route, self.link, layerwise).mean_s + alone + self.route.hops_s


def alone_s(route: Route, layerwise: bool) -> FloatArray:
    """Exposed transfer of a request that has the path for itself, without hops. # (points,)"""
    points = route.points
    if not layerwise:
        return points.sending_s
    return points.alone_s


def exposed(route: Route, link: Wait, layerwise: bool) -> Wait:
    """What waiting for the path adds to it."""
    if not layerwise:
        return link
    points = route.points
    slack_s = np.maximum(points.alone_s - points.sending_s + points.hidden_s, 0.0)
    return link.excess(slack_s, points.weights)


@dataclass(frozen=True, slots=True)
class Queues:
    """A deployment's stages with a stream of requests."""

    routes: tuple[Route, ...]
    decodes: tuple[Decode, ...]
    arrivals: Arrivals
    scheduling: Scheduling
    layerwise: bool

    def utilisation(self, rate_req_per_s: float) -> Utilisation:
        """Offered work over capacity, of the busiest cluster where there are several."""
        remote = [one for one in self.routes if one.station.crosses]
        local = [one for one in self.routes if not one.station.crosses]
        crossing = sum(o.share * o.sending.mean_s * o.station.path_bytes_per_s for o in remote)
        link = [one.share * one.sending.mean_s for one in remote]
        link += [one.share * crossing / one.ingress_bytes_per_s for one in self.decodes if remote]
        stages = {
            "prfaas_prefill": [
                o.share * o.service.mean_s / o.station.num_instances for o in remote
            ],
            "pd_prefill": [o.share * o.service.mean_s / o.station.num_instances for o in local],
            "pd_decode": [one.share * one.hold.mean_s / one.slots for one in self.decodes],
            "link": link,
            "fabric": [o.share * o.sending.mean_s / o.station.num_instances for o in local],
        }
        return Utilisation(
            **{n: rate_req_per_s * max(loads) if loads else None for n, loads in stages.items()}
        )

    def met(self, rate_req_per_s: float) -> tuple[tuple[Met, ...], Utilisation]:
        """By route; nothing where a stage is not stable. With ``reserve_first`` a slot is held from
        before prefill, and the utilisation of decode counts it."""
        utilisation = self.utilisation(rate_req_per_s)
        if utilisation.busiest()[1] >= STABLE_LOAD:
            return (), utilisation
        arrivals = self.arrivals.at_rate(rate_req_per_s)
        flows = [_Flow.into(route, arrivals) for route in self.routes]
        paths = [flow.path_wait() for flow in flows]
        if self.scheduling.admission == "push_then_admit":
            decodes = [_decode_wait(one, arrivals, flows) for one in self.decodes]
        else:
            before = self._before_decode()
            held = [one.held_too(before) for one in self.decodes]
            load = max(rate_req_per_s * one.share * one.hold.mean_s / one.slots for one in held)
            utilisation = replace(utilisation, pd_decode=load)
            if load >= STABLE_LOAD:
                return (), utilisation
            decodes = [arrivals.part(0, one.share).wait(one.hold, one.slots) for one in held]
        return tuple(
            self._route_met(flow, path, decodes) for flow, path in zip(flows, paths, strict=True)
        ), utilisation

    def _route_met(self, flow: "_Flow", link: Wait, decodes: Sequence[Wait]) -> Met:
        route, own = flow.route, flow.route.station.pd_cluster
        decode = (
            mixture(decodes, [one.share for one in self.decodes]) if own is None else decodes[own]
        )
        total, rest_s = flow.wait, route.points.prefill_s + route.hops_s
        if self.scheduling.ttft_source == "decode":
            total = total.plus(exposed(route, link, self.layerwise))
            rest_s = rest_s + alone_s(route, self.layerwise)
        if self.scheduling.ttft_source == "decode" or self.scheduling.admission == "reserve_first":
            total = total.plus(decode)
        return Met(route, flow.wait, link, decode, total, rest_s)

    def _before_decode(self) -> Service:
        """How long a slot is held before decoding, under ``reserve_first``: from the start of
        prefill until the KV has landed. A wait for prefill counts as one for a slot or the other,
        since a request that has no slot yet is in no prefill queue."""
        mean_s = second_s2 = 0.0
        for route in self.routes:
            weights = route.points.weights
            held_s = route.points.prefill_s + alone_s(route, self.layerwise) + route.hops_s
            mean_s += route.share * float(weights @ held_s)
            second_s2 += route.share * float(weights @ held_s**2)
        return Service(mean_s, second_s2 / mean_s**2 - 1)


@dataclass(frozen=True, slots=True)
class _Flow:
    """A route's stream and its wait for prefill."""

    route: Route
    stream: Arrivals
    wait: Wait

    @staticmethod
    def into(route: Route, arrivals: Arrivals) -> "_Flow":
        stream = arrivals.part(route.low, route.high)
        return _Flow(route, stream, stream.wait(route.service, route.station.num_instances))

    def smoothing(self, window_s: float, dispersion: float) -> float:
        """1 - w: how much of what leaves prefill over a window is its own rhythm."""
        service = self.route.service
        rate = self.stream.rate_req_per_s
        load = rate * service.mean_s / self.route.station.num_instances
        spread = load * (dispersion + service.scv)
        return spread / (spread + (1 - load) ** 2 * rate * window_s)

    def path_wait(self) -> Wait:
        """For the path that KV takes, which prefill hides the beginning of."""
        if not self.route.station.crosses:
            return self._own_path_wait()
        window_s, dispersion = _relevant(self.stream, self.route.sending, 1)
        own = self.smoothing(window_s, dispersion)
        leaving = Renewal(
            self.stream.rate_req_per_s, (1 - own) * dispersion + own * self.route.service.scv
        )
        return leaving.wait(self.route.sending, 1)

    def _own_path_wait(self) -> Wait:
        """On the fabric, where each of c instances has a path of its own.

        Instances take turns, but none gets a request while it prefills: with G the sum of c gaps,
        shortened so that E[max(G, T)] = c / rate, a path is a G/G/1 queue with gaps max(G, T) whose
        variance counts as Var[S - max(G, T)], since long prompts both send and prefill for long.
        """
        route, sending = self.route, self.route.sending
        paths, points = route.station.num_instances, route.points
        every_s = paths / self.stream.rate_req_per_s
        if sending.mean_s / every_s < _IDLE_PATH:
            return NO_WAIT
        _, dispersion = _relevant(self.stream, sending, paths)
        turns = _gamma_quantiles(dispersion / paths)
        share = points.weights[:, np.newaxis] / len(turns)  # (points, quantiles)
        low_s, high_s = 0.0, every_s
        for _ in range(_HALVINGS):
            turn_s = 0.5 * (low_s + high_s)
            gaps_s = np.maximum(turn_s * turns, points.prefill_s[:, np.newaxis])
            too_long = float((share * gaps_s).sum()) > every_s
            low_s, high_s = (low_s, turn_s) if too_long else (turn_s, high_s)
        between_s2 = float((share * (gaps_s - every_s) ** 2).sum())
        sending_s2 = sending.scv * sending.mean_s**2
        net_s = points.sending_s[:, np.newaxis] - gaps_s
        net_s2 = float((share * (net_s - (share * net_s).sum()) ** 2).sum())
        kept = net_s2 / (between_s2 + sending_s2) if between_s2 + sending_s2 > 0 else 0.0
        arriving = Renewal(1 / every_s, kept * between_s2 / every_s**2)
        return arriving.wait(replace(sending, scv=kept * sending.scv), 1)


def _gamma_quantiles(scv: float) -> FloatArray:
    """Midpoints of a gamma law of mean 1."""
    middles = (np.arange(_TURN_POINTS) + 0.5) / _TURN_POINTS
    if scv < _EVEN_SCV:
        return np.ones(1)
    quantiles = gammaincinv(1 / scv, middles) * scv
    return np.asarray(quantiles / quantiles.mean())


def _decode_wait(decode: Decode, arrivals: Arrivals, flows: Sequence[_Flow]) -> Wait:
    if decode.hold.mean_s == 0:
        return NO_WAIT
    incoming = arrivals.part(0, decode.share)
    window_s, dispersion = _relevant(incoming, decode.hold, decode.slots)
    leaving = 0.0
    for flow in flows:
        own = flow.smoothing(window_s, flow.stream.dispersion(window_s))
        leaving += flow.route.share * ((1 - own) * dispersion + own * flow.route.service.scv)
    return Renewal(incoming.rate_req_per_s, leaving).wait(decode.hold, decode.slots)


def _relevant(incoming: Arrivals, service: Service, servers: int) -> tuple[float, float]:
    """The time that matters to a queue, and the dispersion of its arrivals over it."""
    load = incoming.rate_req_per_s * service.mean_s / servers
    window_s = service.mean_s
    for _ in range(_ROUNDS):
        spread = incoming.dispersion(window_s) + service.scv
        window_s = service.mean_s * max(1.0, spread * load / (2 * servers * (1 - load) ** 2))
    return window_s, incoming.dispersion(window_s)
