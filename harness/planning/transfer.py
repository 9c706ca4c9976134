"""What one KV transfer gets of the link, and what of it shows: ``harness.transfer_model``.

The queues of the plan take the whole link for whoever's turn it is. A transfer's N connections may
get less: by the per-flow cap, by pacing, by what loss leaves of a window. This is that rate for a
request of the mean length that crosses, alone on the link, with warm connections, and how many
connections it would take to reach what a link without cap and loss carries.
"""

from typing import Any

from harness.deployment import Deployment
from harness.scenario import Scenario
from harness.transfer_model import exposure, prefill_pieces
from harness.transfer_rate import (
    BBR_MAX_LOSS,
    CongestionControl,
    Flows,
    TcpPath,
    link_path,
    rate_bounds,
)

#: Of what the link carries of payload; the last percents would take ever more connections.
_FILLED = 0.97
_MAX_CONNECTIONS = 64
#: The kernel's default on most systems.
_DEFAULT: CongestionControl = "cubic"
_MODELLED: dict[str, CongestionControl] = {"cubic": "cubic", "reno": "reno", "bbr": "bbr"}


def transfer_alone(
    scenario: Scenario, deployment: Deployment, long_mean_tokens: float | None
) -> dict[str, Any] | None:
    """None where nothing crosses, or where the model knows nothing of the congestion control."""
    if long_mean_tokens is None or deployment.prfaas_hardware is None:
        return None
    control = _MODELLED.get(scenario.transport.congestion_control or _DEFAULT)
    path = link_path(scenario.link)
    if control is None or (control == "bbr" and path.loss >= BBR_MAX_LOSS):
        return None
    bounds = rate_bounds(path, _flows(scenario, control, scenario.transport.connections))
    binds = min(bounds, key=lambda name: bounds[name])
    profile = scenario.hardware[deployment.prfaas_hardware].profile
    pieces = prefill_pieces(
        scenario.model.architecture, [long_mean_tokens], profile.prefill_s_array
    )
    layerwise, at_end = (
        exposure(
            pieces,
            bounds[binds],
            layerwise=pipelined,
            one_way_s=scenario.link.far_to_near.delay_s,
        )
        for pipelined in (True, False)
    )
    return {
        "tokens": long_mean_tokens,
        "connections": scenario.transport.connections,
        "congestion_control": control,
        "rate_bytes_per_s": bounds[binds],
        "binds": binds,
        "connections_to_fill": _connections_to_fill(scenario, control, path),
        "sending_s": float(layerwise.sending_s[0]),
        "exposed_layerwise_s": float(layerwise.exposed_s[0]),
        "exposed_at_end_s": float(at_end.exposed_s[0]),
    }


def _flows(scenario: Scenario, control: CongestionControl, connections: int) -> Flows:
    pacing = scenario.transport.pacing_bytes_per_s
    return Flows(connections, control, None if pacing is None else pacing / connections)


def _connections_to_fill(
    scenario: Scenario, control: CongestionControl, path: TcpPath
) -> int | None:
    """The fewest connections that carry what the link does; None beyond what a sender may open."""
    for connections in range(1, _MAX_CONNECTIONS + 1):
        bounds = rate_bounds(path, _flows(scenario, control, connections))
        if min(bounds.values()) >= _FILLED * bounds["link"]:
            return connections
    return None
