"""Whether transfers share the links fairly, and with which rates.

``link.sharing``: "layers", one queue of layers for each link; "fair", max-min fair shares of lines
(``harness.simulator.fair_links``); "auto", the default, is fair where the difference matters:

* where ``link.per_flow_cap``, ``transport.pacing`` or the loss of packets gives the N connections
  of a sender and a receiver less than the link has, at any time of the run. Rates are then those of
  ``harness.transfer_rate``: bytes of payload, and (1 - loss) of them;
* where PD clusters have links of their own that could be what binds. Without such a bound the rate
  is that of the link as it stands, as in Lambda_max.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from harness.core import PRFAAS, ScenarioError
from harness.scenario import Scenario
from harness.scheduling.scheduler_config import SchedulerConfig
from harness.simulator.course import Course, is_out, link_course, link_specs
from harness.transfer_rate import (
    BBR_MAX_LOSS,
    CongestionControl,
    Flows,
    SlowStart,
    TcpPath,
    link_path,
    rate_bounds,
)
from netem.link import LinkSpec

_DEFAULT: CongestionControl = "cubic"
_MODELLED: Mapping[str, CongestionControl] = {"cubic": "cubic", "reno": "reno", "bbr": "bbr"}


@dataclass(frozen=True, slots=True)
class Sharing:
    """Bytes/s of what leaves each PrfaaS cluster and enters each PD cluster where that can bind,
    and of one line. ``slow_start`` where lines begin cold."""

    egress: Mapping[str, Course]
    ingress: Mapping[str, Course]
    cap: Course
    slow_start: SlowStart | None

    @staticmethod
    def of(scenario: Scenario, config: SchedulerConfig) -> "Sharing | None":
        """None where links are shared by layers. ScenarioError where the scenario insists on what
        cannot be."""
        asked = scenario.link_sharing
        narrow = _narrow_ingress(scenario, config)
        if asked == "layers" and narrow:
            raise ScenarioError(
                f"'link.sharing' in the scenario file {scenario.path} is \"layers\", but what may "
                f"enter {', '.join(narrow)} is less than what may leave the PrfaaS clusters, which "
                'only fair sharing knows. Give "fair" or "auto".'
            )
        if asked == "fair":
            _check_control(scenario)
        bound = any(_line_is_bound(scenario, spec) for _, spec in link_specs(scenario))
        if not config.links or asked == "layers" or (asked == "auto" and not bound and not narrow):
            return None
        share = _payload_share(scenario.link) if bound else 1.0
        egress = {
            name: link_course(scenario, lambda spec: _bounds(scenario, spec, bound=bound)["link"])
            if name == PRFAAS
            else Course(((0.0, one.bytes_per_s * share),))
            for name, one in config.links.items()
        }
        ingress = {
            name: Course(((0.0, rate * share),))
            for name, rate in config.ingress_bytes_per_s.items()
            if name in narrow
        }
        cap = link_course(scenario, lambda spec: _bounds(scenario, spec, bound=bound)["line"])
        path = link_path(scenario.link)
        slow_start = SlowStart.of(path, Flows(scenario.transport.connections)) if bound else None
        return Sharing(egress, ingress, cap, slow_start)


def _narrow_ingress(scenario: Scenario, config: SchedulerConfig) -> tuple[str, ...]:
    """The PD clusters into which less may come than may leave the PrfaaS clusters together."""
    rates = [spec.rate_bytes_per_s for _, spec in link_specs(scenario)]
    leaves = sum(max(rates) if n == PRFAAS else one.bytes_per_s for n, one in config.links.items())
    ingress = config.ingress_bytes_per_s
    return tuple(name for name, rate in ingress.items() if rate < leaves * (1 - 1e-9))


def _control(scenario: Scenario, loss: float) -> CongestionControl | None:
    """None where nothing is known of what it makes of the loss."""
    control = _MODELLED.get(scenario.transport.congestion_control or _DEFAULT)
    return None if control == "bbr" and loss >= BBR_MAX_LOSS else control


def _check_control(scenario: Scenario) -> None:
    for _, spec in link_specs(scenario):
        loss = spec.far_to_near.loss_rate
        if loss and not is_out(spec) and _control(scenario, loss) is None:
            raise ScenarioError(
                f"'link.sharing' in the scenario file {scenario.path} is \"fair\", but there is no "
                f"model of {scenario.transport.congestion_control} at {loss:.3g} loss. Known: "
                f'cubic, reno, and bbr below {BBR_MAX_LOSS:g}; "auto" leaves loss out for others.'
            )


def _bounds(scenario: Scenario, spec: LinkSpec, *, bound: bool) -> dict[str, float]:
    """Bytes/s of the whole link and of one line. ``bound``: by ``harness.transfer_rate``."""
    if is_out(spec):
        return {"link": 0.0, "line": math.inf}
    if not bound:
        return {"link": spec.rate_bytes_per_s, "line": math.inf}
    rates = _rate_bounds(scenario, spec)
    return {"link": rates.pop("link"), "line": min(rates.values(), default=math.inf)}


def _rate_bounds(scenario: Scenario, spec: LinkSpec) -> dict[str, float]:
    path: TcpPath = link_path(spec)
    control = _control(scenario, path.loss)
    if control is None:
        path = replace(path, loss=0.0)
    pacing, connections = scenario.transport.pacing_bytes_per_s, scenario.transport.connections
    own = None if pacing is None else pacing / connections
    return rate_bounds(path, Flows(connections, control or _DEFAULT, own))


def _line_is_bound(scenario: Scenario, spec: LinkSpec) -> bool:
    if is_out(spec):
        return False
    rates = _rate_bounds(scenario, spec)
    return min(rates.values()) < rates["link"]


def _payload_share(spec: LinkSpec) -> float:
    """Of a link's rate, with the loss it starts with."""
    path = link_path(spec)
    return path.payload_share * (1 - path.loss)
