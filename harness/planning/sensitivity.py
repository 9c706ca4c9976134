"""How far the plan hangs on each of its inputs: Lambda_max with one of them lower and higher.

An input with a scale (output length, TPOT SLO, link rate, sigma, speed of the prefill chip) is
divided and multiplied by ``FACTOR``; mu, a logarithm of lengths, goes down and up by its logarithm;
the share of requests that find a prefix cached by ``SHARE_STEP``, inside [0, 1]. At each end the
plan is searched anew, for the deployment that offloads and for the baseline.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from harness.deployment import Deployment
from harness.planning.variants import (
    Optimum,
    Variant,
    base_variant,
    optimum,
    unchanged,
    with_agent_share,
    with_chip_speed,
    with_length_law,
    with_link_rate,
    with_output_length,
    with_tpot,
)
from harness.scenario import Scenario
from harness.throughput import DEFAULT_OBJECTIVE, Objective
from harness.workload import LengthDistribution

FACTOR = 1.25
SHARE_STEP = 0.25


@dataclass(frozen=True, slots=True)
class Bar:
    """One input: its two values and what is carried at each, in requests a second.

    None where the input does not exist or a value is impossible; ``reason`` says which and why.
    """

    input: str
    label: str
    unit: str
    low: float | None
    high: float | None
    low_req_per_s: float | None
    high_req_per_s: float | None
    low_ratio: float | None
    high_ratio: float | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """``base_*``: with the inputs as they are. Ratios are to the homogeneous deployment, re-solved
    with the same inputs. Bars: the widest first, those without an end last."""

    objective: Objective
    base_req_per_s: float | None
    base_ratio: float | None
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class _Input:
    """An input by its key in the scenario; ``change`` sets it to a value."""

    key: str
    label: str
    unit: str
    low: float
    high: float
    change: Callable[[Variant, float], Variant]


def tornado(
    scenario: Scenario,
    deployments: dict[str, Deployment],
    objective: Objective = DEFAULT_OBJECTIVE,
    lengths: LengthDistribution | None = None,
) -> Sensitivity | None:
    """The bars of ``deployments["prfaas_pd"]``; None where there is none with a PrfaaS cluster."""
    base = base_variant(scenario, deployments, lengths)
    if base is None:
        return None
    middle = optimum(base, unchanged, objective)
    bars = [_bar(base, one, objective) for one in _inputs(base)]
    for (key, label), why in _absent(scenario):
        bars.append(Bar(key, label, "", None, None, None, None, None, None, why))
    return Sensitivity(
        objective=objective,
        base_req_per_s=middle.throughput_req_per_s,
        base_ratio=middle.ratio,
        bars=tuple(sorted(bars, key=_width, reverse=True)),
    )


#: Key and label of the inputs that a trace replaces.
_MU = ("workload.mu", "prompt lengths, all of them (mu)")
_SIGMA = ("workload.sigma", "spread of prompt lengths (sigma)")
_AGENTS = ("prefix.agent_share", "requests with a cached prefix")


def _absent(scenario: Scenario) -> list[tuple[tuple[str, str], str]]:
    """The inputs that the scenario does not have, and why."""
    found = []
    if scenario.workload.trace is not None:
        found += [(one, "a trace has lengths, not a law") for one in (_MU, _SIGMA)]
    if scenario.prefix.model == "trace":
        found.append((_AGENTS, "the trace says which prefixes are cached"))
    return found


def _inputs(base: Variant) -> list[_Input]:
    scenario = base.scenario
    output, tpot_s = scenario.workload.output_tokens, scenario.slo.tpot_s
    rate, chip = scenario.link.rate_bytes_per_s, base.offloading.prfaas_hardware
    found = [
        _Input(
            "workload.output_tokens",
            "output length (L_out)",
            "tokens",
            max(1, round(output / FACTOR)),
            max(1, round(output * FACTOR)),
            lambda variant, value: with_output_length(variant, round(value)),
        ),
        _Input(
            "slo.tpot", "time per output token", "s", tpot_s / FACTOR, tpot_s * FACTOR, with_tpot
        ),
        _Input(
            "link.rate", "link (B_out)", "bytes/s", rate / FACTOR, rate * FACTOR, with_link_rate
        ),
        _Input(
            f"hardware.{chip}.prefill",
            f"prefill speed of {chip} in PrfaaS",
            "times",
            1 / FACTOR,
            FACTOR,
            with_chip_speed,
        ),
    ]
    return found + _agent_input(scenario) + _law_inputs(scenario)


def _agent_input(scenario: Scenario) -> list[_Input]:
    prefix = scenario.prefix
    if prefix.model == "trace":
        return []
    share = prefix.agent_share if prefix.model == "share" else 0.0
    low, high = max(0.0, share - SHARE_STEP), min(1.0, share + SHARE_STEP)
    return [_Input(*_AGENTS, "share", low, high, with_agent_share)]


def _law_inputs(scenario: Scenario) -> list[_Input]:
    mu, sigma = scenario.workload.mu, scenario.workload.sigma
    if mu is None or sigma is None:
        return []
    step = math.log(FACTOR)
    return [
        _Input(
            *_MU,
            "ln tokens",
            mu - step,
            mu + step,
            lambda variant, value: with_length_law(variant, value, sigma),
        ),
        _Input(
            *_SIGMA,
            "ln tokens",
            sigma / FACTOR,
            sigma * FACTOR,
            lambda variant, value: with_length_law(variant, mu, value),
        ),
    ]


def _bar(base: Variant, one: _Input, objective: Objective) -> Bar:
    def at(value: float) -> Optimum:
        return optimum(base, lambda variant: one.change(variant, value), objective)

    low, high = at(one.low), at(one.high)
    reasons = [
        f"{one.key} at {value:g} {one.unit}: {end.reason}"
        for value, end in ((one.low, low), (one.high, high))
        if end.reason is not None
    ]
    return Bar(
        input=one.key,
        label=one.label,
        unit=one.unit,
        low=one.low,
        high=one.high,
        low_req_per_s=low.throughput_req_per_s,
        high_req_per_s=high.throughput_req_per_s,
        low_ratio=low.ratio,
        high_ratio=high.ratio,
        reason=" ".join(reasons) or None,
    )


def _width(bar: Bar) -> float:
    if bar.low_req_per_s is None or bar.high_req_per_s is None:
        return -1.0
    return abs(bar.high_req_per_s - bar.low_req_per_s)
