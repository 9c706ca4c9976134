"""Lambda_max at an SLO by simulation, beside Eq. 6 and an overloaded run.

    Lambda_max(SLO) = the highest load at which P90 of TTFT <= slo.ttft and 99 % keep slo.tpot

Each load that the search tries gets a few seeds, and twice as many while there is no verdict, up
to a third of the budget that is left when its turn comes, so that one load near the edge does not
use it up. A wrong verdict anywhere would put the whole bracket in the wrong place, so
``1 - confidence`` is divided over all that might be given: the bracket holds with that confidence
(Bonferroni), up to what a t interval of a skewed quantity is worth.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from harness.cores import Cores
from harness.saturation.bracket import MOST_LOADS, Bracket, bracket
from harness.saturation.judging import TPOT_MISS_SHARE, Judgement, Outcome, Replicate, judge
from harness.saturation.trial import (
    LEAST_REQUESTS,
    OVERLOAD,
    Trial,
    check_searchable,
    num_requests,
    run_overloaded,
    run_trial,
    seeded,
)
from harness.scenario import Scenario
from harness.statistics import Interval, seed_interval
from harness.throughput import deployment_model

#: Seeds of a load at first; and how often they may be doubled.
FIRST_SEEDS = 6
DOUBLINGS = 3
#: Requests of an overloaded run, as a multiple of those of another one at least.
OVERLOADED_LENGTH = 2
#: Where the search begins, as a share of Eq. 6's exact Lambda_max.
START_SHARE = 0.6
#: What one load may use of the budget that is left, beyond its first seeds.
MOST_OF_BUDGET = 1 / 3


@dataclass(frozen=True, slots=True)
class Effort:
    """What a search may cost and how near it shall come. ``budget_requests`` are simulated for a
    deployment at most, ``least_requests`` in a run; ``tolerance`` is the ratio of the bracket's
    ends less 1."""

    budget_requests: int = 2_000_000
    tolerance: float = 0.02
    confidence: float = 0.95
    least_requests: int = LEAST_REQUESTS

    @property
    def alpha(self) -> float:
        """What one verdict may have of being wrong."""
        return (1 - self.confidence) / (MOST_LOADS * (DOUBLINGS + 1))


@dataclass(frozen=True, slots=True)
class LoadTried:
    rate_req_per_s: float
    judgement: Judgement


@dataclass(frozen=True, slots=True)
class LambdaMax:
    """``loads`` in the order in which they were tried. ``estimate_req_per_s``: where P90 crosses
    its bound, interpolated between them; None where it does not, or TPOT is what ends the bracket.
    The overloaded throughput over the seeds of a first look, with its interval; Eq. 6 with T(E[l])
    and with E[T(l)]."""

    deployment: str
    bracket: Bracket
    loads: tuple[LoadTried, ...]
    estimate_req_per_s: float | None
    num_requests: int
    saturated_req_per_s: float
    saturated_interval: Interval
    lambda_max_req_per_s: float
    lambda_max_exact_req_per_s: float


#: Called after each load: how much of the budget is used, and what is known of the load.
Watch = Callable[[int, LoadTried], None]


def lambda_max(
    scenario: Scenario,
    deployment: str,
    ttft_s: float,
    effort: Effort,
    cores: Cores,
    *,
    transfer: bool = True,
    watch: Watch = lambda _used, _tried: None,
) -> LambdaMax:
    """Search the highest load of a deployment whose P90 of TTFT is ``ttft_s`` at most.

    ScenarioError for a closed loop or a trace. The same result with any number of cores.
    """
    check_searchable(scenario)
    model = deployment_model(scenario, scenario.deployments[deployment])
    exact = model.lambda_max_exact_req_per_s
    start = Trial(
        scenario,
        deployment,
        START_SHARE * exact,
        scenario.load.seed,
        effort.least_requests,
        transfer=transfer,
    )
    asked = _Loads(start, ttft_s, effort, cores, watch)
    found = bracket(asked, start.rate_req_per_s, effort.tolerance)
    overloaded = replace(
        start,
        rate_req_per_s=OVERLOAD * exact,
        num_requests=OVERLOADED_LENGTH * effort.least_requests,
    )
    saturated = cores.map(run_overloaded, seeded(overloaded, 0, FIRST_SEEDS))
    return LambdaMax(
        deployment=deployment,
        bracket=found,
        loads=tuple(asked.tried),
        estimate_req_per_s=crossing(asked.tried),
        num_requests=asked.used,
        saturated_req_per_s=sum(saturated) / len(saturated),
        saturated_interval=seed_interval(saturated, effort.confidence),
        lambda_max_req_per_s=model.lambda_max_req_per_s,
        lambda_max_exact_req_per_s=exact,
    )


def crossing(tried: Sequence[LoadTried]) -> float | None:
    """The load at which the geometric mean of P90 / bound is 1, linear in logarithms between the
    last load below and the next one; None where TPOT misses there, or nothing crosses."""
    loads = sorted(tried, key=lambda one: one.rate_req_per_s)
    for below, above in reversed(list(itertools.pairwise(loads))):
        low, high = (math.log(one.judgement.ttft_ratio) for one in (below, above))
        if low <= 0 < high:
            if max(one.judgement.tpot_missed for one in (below, above)) > TPOT_MISS_SHARE:
                return None
            share = -low / (high - low)
            growth = math.log(above.rate_req_per_s / below.rate_req_per_s)
            return below.rate_req_per_s * math.exp(share * growth)
    return None


class _Loads:
    """Asks a load for its verdict, within the budget."""

    def __init__(
        self, template: Trial, ttft_s: float, effort: Effort, cores: Cores, watch: Watch
    ) -> None:
        self._template, self._ttft_s, self._effort = template, ttft_s, effort
        self._cores, self._watch = cores, watch
        self.tried: list[LoadTried] = []
        self.used = 0

    def __call__(self, rate: float) -> Outcome | None:
        each = num_requests(rate, self._ttft_s, self._effort.least_requests)
        trial = replace(self._template, rate_req_per_s=rate, num_requests=each)
        left = self._effort.budget_requests - self.used
        if FIRST_SEEDS * each > left:
            return None
        replicates: list[Replicate] = []
        for doubling in range(DOUBLINGS + 1):
            wanted = FIRST_SEEDS * 2**doubling
            if doubling and wanted * each > MOST_OF_BUDGET * left:
                break
            replicates += self._run(trial, len(replicates), wanted)
            judgement = judge(replicates, self._ttft_s, self._effort.alpha)
            if judgement.outcome != "undecided":
                break
        self.tried.append(LoadTried(rate, judgement))
        self._watch(self.used, self.tried[-1])
        return judgement.outcome

    def _run(self, trial: Trial, have: int, wanted: int) -> list[Replicate]:
        """The seeds that are missing."""
        self.used += (wanted - have) * trial.num_requests
        return self._cores.map(run_trial, seeded(trial, have, wanted - have))
