"""Threshold and split with the least P90 of TTFT at the scenario's load, by simulation.

    (t, N_p)* = argmin over t, N_p of  E[ln P90(t, N_p)]        N_p + N_d as in the deployment

Splits: the formula's and its neighbours, and on from there while the best is at an edge. For each,
t over the shares of the lengths, coarse to fine, with common random numbers: every plan meets the
same arrivals. The least of many noisy scores is too good by chance, so the plan found is compared
with the formula's on seeds that the search has not seen, paired by seed. The plan is held while it
is tried: neither the threshold nor the roles follow the queues.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from harness.cores import Cores
from harness.deployment import Deployment
from harness.saturation.refining import minimise
from harness.saturation.trial import (
    LEAST_REQUESTS,
    Trial,
    check_searchable,
    held,
    run_trial,
    seeded,
)
from harness.scenario import Scenario
from harness.statistics import Interval, seed_ratio_interval
from harness.throughput import DEFAULT_OBJECTIVE, Objective, solve
from harness.workload import LengthDistribution, length_distribution

#: Seeds that the search compares plans by, and further ones that judge what it has found.
SEARCH_SEEDS, FRESH_SEEDS = 4, 16

Answer = Literal["better", "no_difference_proven", "worse", "same_plan", "nothing_to_choose"]
Plan = tuple[int | None, int]
"""Threshold in tokens, and N_p."""


@dataclass(frozen=True, slots=True)
class PlanTried:
    """A plan and the geometric mean over the search's seeds of its P90 of TTFT; infinite where
    failures reach it."""

    threshold_tokens: int | None
    num_prefill: int
    ttft_p90_s: float


@dataclass(frozen=True, slots=True)
class Optimum:
    """``formula`` and ``best`` are (threshold_tokens, num_prefill); their P90 of TTFT, geometric
    means over the fresh seeds, and best / formula with its interval, paired by seed."""

    deployment: str
    rate_req_per_s: float
    formula: Plan
    best: Plan
    formula_ttft_p90_s: float | None
    best_ttft_p90_s: float | None
    ratio: float | None
    interval: Interval
    answer: Answer
    tried: tuple[PlanTried, ...]


#: Called with the number of plans that have been tried.
Watch = Callable[[int], None]


def optimum(
    scenario: Scenario,
    deployment: str,
    cores: Cores,
    *,
    objective: Objective = DEFAULT_OBJECTIVE,
    confidence: float = 0.95,
    num_requests: int = LEAST_REQUESTS,
    transfer: bool = True,
    watch: Watch = lambda _tried: None,
) -> Optimum:
    """Search a deployment's plan and compare it with the one that the equations of ``objective``
    choose, in runs of ``num_requests``.

    ScenarioError for a closed loop or a trace. The same result with any number of cores.
    """
    check_searchable(scenario)
    lengths = length_distribution(scenario)
    formula = solve(scenario, scenario.deployments[deployment], objective, lengths)
    load = scenario.load
    template = Trial(
        held(scenario),
        deployment,
        load.rate_req_per_s,
        load.seed,
        num_requests,
        transfer=transfer,
    )
    search = _Plans(template, formula, lengths, cores, watch)
    planned = plan_of(formula)
    if not splits_of(formula):
        none = Interval(None, None, confidence, "there is neither a threshold nor a split")
        return _result(scenario, formula, planned, (None, None, None), none, search.tried)
    best = search.best()
    old, *others = search.p90s(
        [planned] if best == planned else [planned, best], SEARCH_SEEDS, FRESH_SEEDS
    )
    new = others[0] if others else old
    interval = Interval(None, None, confidence, "both are one plan")
    if best != planned:
        interval = seed_ratio_interval(new, old, confidence)
    means = _geometric(old), _geometric(new)
    ratio = means[1] / means[0] if all(map(math.isfinite, means)) else None
    return _result(scenario, formula, best, (*means, ratio), interval, search.tried)


def plan_of(deployment: Deployment) -> Plan:
    return deployment.threshold_tokens, deployment.num_prefill


def _result(
    scenario: Scenario,
    formula: Deployment,
    best: Plan,
    figures: tuple[float | None, float | None, float | None],
    interval: Interval,
    tried: Sequence[PlanTried],
) -> Optimum:
    old, new, ratio = figures
    return Optimum(
        formula.name,
        scenario.load.rate_req_per_s,
        plan_of(formula),
        best,
        old,
        new,
        ratio,
        interval,
        answer_of(tried, best == plan_of(formula), interval),
        tuple(tried),
    )


def answer_of(tried: Sequence[PlanTried], same: bool, interval: Interval) -> Answer:
    """What may be said of the plan found: ``interval`` is of its P90 over the formula's."""
    if not tried:
        return "nothing_to_choose"
    if same:
        return "same_plan"
    if interval.low is None or interval.high is None:
        return "no_difference_proven"
    if interval.high < 1:
        return "better"
    return "worse" if interval.low > 1 else "no_difference_proven"


class _Plans:
    """Plans of one deployment, each tried once with the search's seeds."""

    def __init__(
        self,
        template: Trial,
        formula: Deployment,
        lengths: LengthDistribution,
        cores: Cores,
        watch: Watch,
    ) -> None:
        self._template, self._formula = template, formula
        self._cores, self._watch = cores, watch
        self._lengths = lengths
        self._scores: dict[Plan, float] = {}
        self._splits = set(splits_of(formula))
        self._has_threshold = formula.threshold_tokens is not None

    @property
    def tried(self) -> tuple[PlanTried, ...]:
        return tuple(PlanTried(*plan, math.exp(score)) for plan, score in self._scores.items())

    def best(self) -> Plan:
        """The plan with the least score, the formula's own among them."""
        planned = plan_of(self._formula)
        self.score([planned])
        done: set[int] = set()
        middle = planned[1]
        while new := [n for n in (middle - 1, middle, middle + 1) if n in self._splits - done]:
            self._search(new)
            done.update(new)
            best = min(self._scores, key=lambda plan: (self._scores[plan], plan[1], plan[0] or 0))
            middle = best[1]
        return best

    def _search(self, splits: Sequence[int]) -> None:
        """Try plans of these N_p: one where there is no threshold to choose, else many."""
        inner = [n for n in splits if self._has_threshold and n > 0]
        fixed = 0 if self._has_threshold else None
        self.score([(fixed, n) for n in splits if n not in inner])
        if inner:
            minimise(
                lambda points: self.score([(self._threshold(q), inner[i]) for i, q in points]),
                len(inner),
            )

    def score(self, plans: Sequence[Plan]) -> list[float]:
        """Mean of ln P90 over the search's seeds, of each plan."""
        new = [plan for plan in dict.fromkeys(plans) if plan not in self._scores]
        for plan, p90s in zip(new, self.p90s(new, 0, SEARCH_SEEDS), strict=True):
            self._scores[plan] = float(np.log(p90s).mean())
        self._watch(len(self._scores))
        return [self._scores[plan] for plan in plans]

    def p90s(self, plans: Sequence[Plan], first: int, count: int) -> list[list[float]]:
        """P90 of TTFT of each plan, by seed."""
        trials = [one for plan in plans for one in seeded(self._trial(plan), first, count)]
        found = [one.ttft_p90_s for one in self._cores.map(run_trial, trials)]
        return [found[at : at + count] for at in range(0, len(found), count)]

    def _trial(self, plan: Plan) -> Trial:
        threshold_tokens, num_prefill = plan
        formula = self._formula
        deployment = replace(
            formula,
            threshold_tokens=threshold_tokens,
            num_prefill=num_prefill,
            num_decode=formula.num_prefill + formula.num_decode - num_prefill,
        )
        scenario = replace(self._template.scenario, deployments={formula.name: deployment})
        return replace(self._template, scenario=scenario)

    def _threshold(self, share: float) -> int:
        """The length below which that share of the requests stays."""
        order = np.argsort(self._lengths.lengths, kind="stable")
        reached = np.cumsum(self._lengths.weights[order])
        at = min(int(np.searchsorted(reached, share * reached[-1])), len(order) - 1)
        return round(float(self._lengths.lengths[order][at]))


def splits_of(formula: Deployment) -> range:
    """Every N_p there could be; empty where nothing is to choose.

    Without a PrfaaS cluster somebody prefills; somebody decodes always. N_p = 0 goes with
    threshold 0.
    """
    if formula.balancing == "capacity" and formula.num_prfaas:
        return range(0)
    if not formula.num_prefill and formula.threshold_tokens is None:
        return range(0)
    return range(0 if formula.num_prfaas else 1, formula.num_prefill + formula.num_decode)


def _geometric(values: Sequence[float]) -> float:
    return math.exp(float(np.log(values).mean()))
