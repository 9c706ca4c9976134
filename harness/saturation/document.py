"""What ``prfaas simulate --lambda-max`` and ``--optimum`` print: one JSON document each.

Figures in scenario units, null where there is none. A bracket is [low, high] in requests per
second: low meets the SLO and high misses it, null where no load was found that does.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from harness.saturation.bracket import MOST_LOADS, Ended
from harness.saturation.judging import MOST_RATIO, QUANTILE, TPOT_MISS_SHARE
from harness.saturation.lambda_max import DOUBLINGS, FIRST_SEEDS, Effort, LambdaMax
from harness.saturation.optimum import FRESH_SEEDS, SEARCH_SEEDS, Answer, Optimum, Plan
from harness.saturation.trial import HORIZON, OVERLOAD, WARM_UP_SHARE
from harness.scenario import Scenario
from harness.statistics import Interval

#: Of which the others' Lambda_max is a multiple, where the scenario has it.
BASELINE = "homogeneous_pd"

_ENDED: dict[Ended, str] = {
    "undecided": "the loads in between are too near to the SLO for a verdict from so many seeds; "
    "a larger --budget gives each load more",
    "budget": "the budget was used up before the bracket was as narrow as asked; raise --budget",
    "unattainable": "even a load of less than a hundredth of Eq. 6's misses the SLO",
    "unbounded": "no load was found that misses the SLO",
}
_ANSWERS: dict[Answer, str] = {
    "better": "the plan found has a lower P90 of TTFT than the formula's",
    "no_difference_proven": "that the plan found differs from the formula's is not proven",
    "worse": "the plan found is worse than the formula's on fresh seeds: the search was misled",
    "same_plan": "the formula's plan is the best of those tried",
    "nothing_to_choose": "there is neither a threshold nor a split to choose",
}


def lambda_max_document(
    scenario: Scenario, ttft_s: float, effort: Effort, found: Mapping[str, LambdaMax]
) -> dict[str, Any]:
    """Of all deployments."""
    return {
        "scenario": scenario.name,
        "slo": {
            "ttft_s": ttft_s,
            "ttft_quantile": QUANTILE,
            "tpot_s": scenario.slo.tpot_s,
            "tpot_share": 1 - TPOT_MISS_SHARE,
        },
        "confidence": effort.confidence,
        "tolerance": effort.tolerance,
        "budget_requests": effort.budget_requests,
        "method": {
            "seeds": [FIRST_SEEDS * 2**n for n in range(DOUBLINGS + 1)],
            "alpha_of_a_verdict": effort.alpha,
            "most_loads": MOST_LOADS,
            "warm_up_share": WARM_UP_SHARE,
            "least_requests_of_a_run": effort.least_requests,
            "least_length_in_ttft_slos": HORIZON,
            "most_ttft_ratio_of_a_seed": MOST_RATIO,
            "overload": OVERLOAD,
        },
        "notes": [
            f"{name}: {_ENDED[one.bracket.ended]}."
            for name, one in found.items()
            if one.bracket.ended in _ENDED
        ],
        "deployments": {name: _deployment(one, found.get(BASELINE)) for name, one in found.items()},
    }


def _deployment(one: LambdaMax, baseline: LambdaMax | None) -> dict[str, Any]:
    return {
        "lambda_max_at_slo_req_per_s": [one.bracket.low, one.bracket.high],
        "lambda_max_at_slo_estimate_req_per_s": one.estimate_req_per_s,
        "ended": one.bracket.ended,
        "undecided_req_per_s": list(one.bracket.undecided),
        "times_homogeneous_pd": times(one, baseline),
        "saturated_throughput_req_per_s": one.saturated_req_per_s,
        "saturated_throughput_interval": _interval(one.saturated_interval),
        "lambda_max_req_per_s": one.lambda_max_req_per_s,
        "lambda_max_exact_req_per_s": one.lambda_max_exact_req_per_s,
        "num_requests_simulated": one.num_requests,
        "loads": [
            {
                "rate_req_per_s": load.rate_req_per_s,
                "outcome": load.judgement.outcome,
                "num_seeds": load.judgement.num_seeds,
                "ttft_p90_over_slo": load.judgement.ttft_ratio,
                "tpot_missed_share": load.judgement.tpot_missed,
            }
            for load in one.loads
        ],
    }


def times(one: LambdaMax, baseline: LambdaMax | None) -> list[float] | None:
    """How many times the baseline's Lambda_max at the SLO, from bracket to bracket; it holds where
    both do. None where an end is missing, and of the baseline itself."""
    if baseline is None or baseline is one:
        return None
    low, high = one.bracket.low, one.bracket.high
    below, above = baseline.bracket.low, baseline.bracket.high
    if low is None or high is None or below is None or above is None:
        return None
    return [low / above, high / below]


def optimum_document(
    scenario: Scenario, objective: str, num_requests: int, found: Mapping[str, Optimum]
) -> dict[str, Any]:
    """Of all deployments."""
    return {
        "scenario": scenario.name,
        "rate_req_per_s": scenario.load.rate_req_per_s,
        "cv": scenario.workload.cv,
        "objective_of_the_formula": objective,
        "method": {
            "search_seeds": SEARCH_SEEDS,
            "fresh_seeds": FRESH_SEEDS,
            "requests_of_a_run": num_requests,
            "warm_up_share": WARM_UP_SHARE,
        },
        "notes": [f"{name}: {_ANSWERS[one.answer]}." for name, one in found.items()],
        "deployments": {name: _optimum(scenario, one) for name, one in found.items()},
    }


def _optimum(scenario: Scenario, one: Optimum) -> dict[str, Any]:
    counts = scenario.deployments[one.deployment]
    total = counts.num_prefill + counts.num_decode
    return {
        "answer": one.answer,
        "formula": _plan(one.formula, total, one.formula_ttft_p90_s),
        "best": _plan(one.best, total, one.best_ttft_p90_s),
        "best_over_formula": one.ratio,
        "best_over_formula_interval": _interval(one.interval),
        "tried": [
            _plan((plan.threshold_tokens, plan.num_prefill), total, plan.ttft_p90_s)
            for plan in one.tried
        ],
    }


def _plan(plan: Plan, total: int, ttft_p90_s: float | None) -> dict[str, Any]:
    finite = ttft_p90_s is not None and math.isfinite(ttft_p90_s)
    return {
        "threshold_tokens": plan[0],
        "num_prefill": plan[1],
        "num_decode": total - plan[1],
        "ttft_p90_s": ttft_p90_s if finite else None,
    }


def _interval(interval: Interval) -> dict[str, Any]:
    return asdict(interval)
