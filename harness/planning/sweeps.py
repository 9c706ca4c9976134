"""One input from end to end, the plan searched anew at each value: where the gain comes and goes.

Agent traffic (the share of requests that find a prefix cached), link rate, output length and the
speed of the PrfaaS chip move the throughput; the round trip moves TTFT, as counted in
``harness.planning.round_trips``. An impossible value keeps its place with nulls and the reason.
"""

from dataclasses import asdict, dataclass

from harness.deployment import Deployment
from harness.planning.bandwidth import hard_limit_bytes_per_s
from harness.planning.round_trips import RttLimit, RttPoint, rtt_limit, rtt_points
from harness.planning.variants import (
    Optimum,
    Variant,
    base_variant,
    baseline_req_per_s,
    optimum,
    with_agent_share,
    with_chip_speed,
    with_link_rate,
    with_output_length,
)
from harness.scenario import Scenario
from harness.throughput import DEFAULT_OBJECTIVE, Objective
from harness.workload import LengthDistribution

AGENT_SHARES = tuple(tenths / 10 for tenths in range(11))
CHIP_SPEEDS = (0.5, 0.75, 1.0, 1.5, 2.0, 4.0, 8.0)
#: Of the scenario's own value.
LINK_MULTIPLES = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0)
OUTPUT_MULTIPLES = (1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0)


@dataclass(frozen=True, slots=True)
class AgentSharePoint(Optimum):
    """``agent_share`` of the requests find the scenario's cached fraction of their prompt."""

    agent_share: float


@dataclass(frozen=True, slots=True)
class LinkRatePoint(Optimum):
    link_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class OutputLengthPoint(Optimum):
    output_tokens: int


@dataclass(frozen=True, slots=True)
class ChipSpeedPoint(Optimum):
    """Every prefill of the PrfaaS hardware takes 1 / ``chip_speed`` of its time."""

    chip_speed: float


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Below ``hard_limit_bytes_per_s`` every plan carries less than with more link; 0: at no rate;
    None: at every rate."""

    points: tuple[LinkRatePoint, ...]
    hard_limit_bytes_per_s: float | None


@dataclass(frozen=True, slots=True)
class Sweeps:
    """All of the offloading deployment; ratios are to the homogeneous one, re-solved alike."""

    objective: Objective
    cached_fraction: float
    agent_share: tuple[AgentSharePoint, ...]
    rtt: tuple[RttPoint, ...]
    rtt_limit: RttLimit
    bandwidth: Bandwidth
    output_tokens: tuple[OutputLengthPoint, ...]
    chip_speed: tuple[ChipSpeedPoint, ...]


def sweep(
    scenario: Scenario,
    deployments: dict[str, Deployment],
    objective: Objective = DEFAULT_OBJECTIVE,
    lengths: LengthDistribution | None = None,
) -> Sweeps | None:
    """Every sweep of ``deployments["prfaas_pd"]``; None where there is none with a PrfaaS cluster.

    ``deployments`` as solved: the round trips are counted for that plan. ``lengths`` default to the
    scenario's.
    """
    base = base_variant(scenario, deployments, lengths)
    if base is None:
        return None
    # Neither the link nor a chip that it does not have moves the baseline.
    homogeneous = baseline_req_per_s(base, objective)
    return Sweeps(
        objective=objective,
        cached_fraction=scenario.prefix.cached_fraction,
        agent_share=tuple(_agent_share(base, share, objective) for share in AGENT_SHARES),
        rtt=rtt_points(base),
        rtt_limit=rtt_limit(base),
        bandwidth=_bandwidth(base, objective, homogeneous),
        output_tokens=tuple(_output_length(base, m, objective) for m in OUTPUT_MULTIPLES),
        chip_speed=tuple(_chip_speed(base, s, objective, homogeneous) for s in CHIP_SPEEDS),
    )


def _agent_share(base: Variant, share: float, objective: Objective) -> AgentSharePoint:
    found = optimum(base, lambda variant: with_agent_share(variant, share), objective)
    return AgentSharePoint(**asdict(found), agent_share=share)


def _output_length(base: Variant, multiple: float, objective: Objective) -> OutputLengthPoint:
    tokens = max(1, round(base.scenario.workload.output_tokens * multiple))
    found = optimum(base, lambda variant: with_output_length(variant, tokens), objective)
    return OutputLengthPoint(**asdict(found), output_tokens=tokens)


def _chip_speed(
    base: Variant, speed: float, objective: Objective, homogeneous: float | None
) -> ChipSpeedPoint:
    found = optimum(base, lambda variant: with_chip_speed(variant, speed), objective, homogeneous)
    return ChipSpeedPoint(**asdict(found), chip_speed=speed)


def _bandwidth(base: Variant, objective: Objective, homogeneous: float | None) -> Bandwidth:
    """Multiples of the link's rate, and the hard limit itself as a point among them."""
    limit = hard_limit_bytes_per_s(base, objective)
    given = base.scenario.link.rate_bytes_per_s
    rates = {given * multiple for multiple in LINK_MULTIPLES} | ({limit} if limit else set())
    points = [_link_rate(base, rate, objective, homogeneous) for rate in sorted(rates)]
    return Bandwidth(tuple(points), limit)


def _link_rate(
    base: Variant, rate: float, objective: Objective, homogeneous: float | None
) -> LinkRatePoint:
    found = optimum(base, lambda variant: with_link_rate(variant, rate), objective, homogeneous)
    return LinkRatePoint(**asdict(found), link_bytes_per_s=rate)
