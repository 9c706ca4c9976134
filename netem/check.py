"""The requested link against the measured one, with stated tolerances."""

from dataclasses import dataclass

from netem.control import helper
from netem.link import MTU_BYTES, LinkSpec
from netem.site import Path
from netem.units import format_duration_s, format_rate

FLOWS = 4
#: The larger of both tolerances applies to the median round trip, above and below. The first is
#: wall time: a machine's wake-ups are as late under a scaled link as under one that is not.
RTT_TOLERANCE_S, RTT_TOLERANCE = 0.5e-3, 0.15
#: Payload is 1448 of every 1500 bytes: 3.5 % of the first is no fault of the link.
RATE_TOLERANCE_BELOW, RATE_TOLERANCE_ABOVE = 0.10, 0.05

_BULK_S = 0.8
_MIN_WARM_UP_S, _MAX_WARM_UP_S, _WARM_UP_RTTS = 0.2, 1.5, 15
_MEASURE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class LinkCheck:
    """What real probe processes in both sites measured. Rates are TCP payload over all flows."""

    rtt_min_s: float
    rtt_p50_s: float
    rtt_samples: int
    rate_near_to_far_bytes_per_s: float
    rate_far_to_near_bytes_per_s: float
    flows: int
    bulk_s: float


def measure_path(path: Path, flows: int = FLOWS, bulk_s: float = _BULK_S) -> LinkCheck:
    """Idle round trips, then bulk each way; about 3 s on a short link.

    The warm-up before each bulk window is 15 round trips, between 0.2 and 1.5 s.
    """
    warm_up_s = min(max(_MIN_WARM_UP_S, _WARM_UP_RTTS * path.applied.rtt_s), _MAX_WARM_UP_S)
    with helper(
        "the link probe server in site far",
        ["netem.probe", "serve"],
        {"host": path.far.address},
        popen=path.far.popen,
    ) as (_, server):
        host, port = path.expose(path.far, server["port"])
        configuration = {
            "host": host,
            "port": port,
            "flows": flows,
            "warm_up_s": warm_up_s,
            "bulk_s": bulk_s,
        }
        with helper(
            "the link probe in site near",
            ["netem.probe", "measure"],
            configuration,
            popen=path.near.popen,
            timeout_s=_MEASURE_TIMEOUT_S,
        ) as (client, _):
            answer = client.ask({"op": "measure"})
        path.withdraw(path.far, server["port"])
    return LinkCheck(
        rtt_min_s=answer["rtt_min_s"],
        rtt_p50_s=answer["rtt_p50_s"],
        rtt_samples=answer["rtt_samples"],
        rate_near_to_far_bytes_per_s=answer["sent_bytes_per_s"],
        rate_far_to_near_bytes_per_s=answer["received_bytes_per_s"],
        flows=flows,
        bulk_s=bulk_s,
    )


def link_failures(
    check: LinkCheck, applied: LinkSpec, *, rtt_tolerance_s: float = RTT_TOLERANCE_S
) -> tuple[str, ...]:
    """Where the measured link leaves the tolerances around ``applied``; empty when it holds.

    ``rtt_tolerance_s`` is wall time, never scaled; ``RTT_TOLERANCE`` of the applied round trip
    takes its place where that is more. Every failure names the bound it broke.
    """
    failures = []
    off_s = check.rtt_p50_s - applied.rtt_s
    bound_s = max(rtt_tolerance_s, RTT_TOLERANCE * applied.rtt_s)
    if abs(off_s) > bound_s:
        failures.append(
            f"round trip {_duration(check.rtt_p50_s)} at p50 instead of "
            f"{_duration(applied.rtt_s)} (tolerance {_duration(bound_s)}, the larger of "
            f"{_duration(rtt_tolerance_s)} and {RTT_TOLERANCE:.0%})"
        )
    rates = {
        "near to far": check.rate_near_to_far_bytes_per_s,
        "far to near": check.rate_far_to_near_bytes_per_s,
    }
    reachable = min(applied.rate_bytes_per_s, _loss_limited_rate(applied, check.flows))
    lowest = reachable * (1 - RATE_TOLERANCE_BELOW)
    highest = applied.rate_bytes_per_s * (1 + RATE_TOLERANCE_ABOVE)
    for direction, rate in rates.items():
        if not lowest <= rate <= highest:
            failures.append(
                f"{direction} {_rate(rate)} instead of {_rate(applied.rate_bytes_per_s)} "
                f"(tolerance {_rate(lowest)} to {_rate(highest)})"
            )
    return tuple(failures)


def _loss_limited_rate(applied: LinkSpec, flows: int) -> float:
    """What loss leaves to TCP: half of Mathis' MSS / RTT * 1.22 / sqrt(p) per flow.

    Half, because the formula is that of long flows and the window here is short.
    """
    if applied.loss == 0:
        return applied.rate_bytes_per_s
    return float(flows * 0.5 * MTU_BYTES / max(applied.rtt_s, 1e-4) * 1.22 / applied.loss**0.5)


def _duration(value_s: float) -> str:
    return format_duration_s(float(f"{value_s:.3g}"))


def _rate(value_bytes_per_s: float) -> str:
    return format_rate(float(f"{value_bytes_per_s * 8:.3g}") / 8)
