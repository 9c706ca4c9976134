"""How many requests a second a deployment can carry, and at which threshold and split most.

Equations 3 to 6 of arXiv 2604.15039, with l the uncached input length, t the threshold and
p = P(l > t):

    Th_prfaas  = min(N_prfaas / T_prfaas(l_long), B_out / S_kv(l_long))     l_long  = E[l | l > t]
    Th_pd_p    = N_p / T_pd(l_short)                                        l_short = E[l | l <= t]
    Th_pd_d    = N_d BS_max / (T_decode L_out)
    Lambda_max = min(Th_prfaas / p, Th_pd_p / (1 - p), Th_pd_d)

The paper puts mean lengths into T: T(E[l]), "paper" below. A queue sees E[T(l)], which is larger
wherever T is convex, so "exact" has E[T_prfaas | l > t], E[T_pd | l <= t], E[S_kv | l > t] and
L_out - 1 decode steps, since prefill computes the first token. Utilisation, bottleneck and, unless
asked otherwise, the search go by the exact one.

Times in seconds, sizes in bytes, rates in requests a second over the whole deployment.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from harness.architecture import Architecture
from harness.deployment import Deployment
from harness.profile import Profile
from harness.scenario import Scenario
from harness.scheduling.config import decode_step_s
from harness.utilisation import Utilisation
from harness.workload import LengthDistribution, length_distribution

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
Objective = Literal["exact", "paper"]

MAX_THRESHOLDS = 4096
#: Plans whose Lambda_max differ by less than this share are told apart by their prefill capacity.
_TIE = 1e-9


@dataclass(frozen=True, slots=True)
class StageRates:
    """Requests a second of the whole deployment at which each stage saturates; None: no such
    stage, or no request meets it."""

    prfaas_prefill: float | None
    pd_prefill: float | None
    pd_decode: float
    link: float | None

    def bottleneck(self) -> tuple[str, float]:
        """The stage that saturates first, and the rate at which it does: Lambda_max."""
        rates = {f.name: getattr(self, f.name) for f in fields(self)}
        present = {name: rate for name, rate in rates.items() if rate is not None}
        name = min(present, key=present.__getitem__)
        return name, present[name]

    def utilisation(self, rate_req_per_s: float) -> Utilisation:
        """Utilisation of each stage at an offered rate."""
        return Utilisation(
            prfaas_prefill=self.prfaas_prefill and rate_req_per_s / self.prfaas_prefill,
            pd_prefill=self.pd_prefill and rate_req_per_s / self.pd_prefill,
            pd_decode=rate_req_per_s / self.pd_decode,
            link=self.link and rate_req_per_s / self.link,
        )


@dataclass(frozen=True, slots=True)
class DeploymentModel:
    """A deployment's plan and what the equations say of it; None where a term does not apply.

    The three thetas and ``lambda_max_req_per_s`` are the paper's, ``lambda_max_exact_req_per_s``
    and ``bottleneck`` the exact ones. ``egress_bytes_per_s`` crosses the link at the paper's
    Lambda_max.
    """

    name: str
    threshold_tokens: int | None
    num_prfaas: int | None
    num_prefill: int | None
    num_decode: int
    theta_prfaas_req_per_s: float | None
    theta_pd_prefill_req_per_s: float | None
    theta_pd_decode_req_per_s: float
    lambda_max_req_per_s: float
    lambda_max_exact_req_per_s: float
    offload_fraction: float | None
    long_mean_tokens: float | None
    short_mean_tokens: float | None
    egress_bytes_per_s: float | None
    bottleneck: str
    paper_rates: StageRates
    exact_rates: StageRates

    def utilisation(self, rate_req_per_s: float) -> Utilisation:
        """Exact utilisation of each stage at an offered rate."""
        return self.exact_rates.utilisation(rate_req_per_s)

    def load_scale_for(self, max_utilisation: float, rate_req_per_s: float) -> float:
        """Factor on the offered rate that brings the busiest stage to ``max_utilisation``."""
        return self.utilisation(rate_req_per_s).load_scale_for(max_utilisation)


def deployment_model(
    scenario: Scenario, deployment: Deployment, lengths: LengthDistribution | None = None
) -> DeploymentModel:
    """What the equations say of a deployment as it is planned.

    ``lengths`` of uncached input and the mean output default to the scenario's. ScenarioError where
    a profile does not cover them.
    """
    costs = _Costs(scenario, deployment, lengths or length_distribution(scenario))
    local = costs.local_count(deployment)
    paper, exact = (costs.rates(local, deployment, objective) for objective in _OBJECTIVES)
    p, long_tokens, short_tokens = (float(values[0]) for values in costs.split(local))
    lambda_max = paper.bottleneck()[1]
    bottleneck, lambda_exact = exact.bottleneck()
    remote, local_share = deployment.num_prfaas > 0, deployment.num_prefill > 0
    reached = [r for r in (paper.prfaas_prefill, paper.link) if r is not None]
    return DeploymentModel(
        name=deployment.name,
        threshold_tokens=deployment.threshold_tokens,
        num_prfaas=deployment.num_prfaas or None,
        num_prefill=deployment.num_prefill or None,
        num_decode=deployment.num_decode,
        theta_prfaas_req_per_s=p * min(reached) if reached else None,
        theta_pd_prefill_req_per_s=paper.pd_prefill and (1 - p) * paper.pd_prefill,
        theta_pd_decode_req_per_s=paper.pd_decode,
        lambda_max_req_per_s=lambda_max,
        lambda_max_exact_req_per_s=lambda_exact,
        offload_fraction=p if remote else None,
        long_mean_tokens=long_tokens if remote and p > 0 else None,
        short_mean_tokens=short_tokens if local_share and p < 1 else None,
        egress_bytes_per_s=(
            lambda_max * scenario.link.rate_bytes_per_s / paper.link if paper.link else None
        ),
        bottleneck=bottleneck,
        paper_rates=paper,
        exact_rates=exact,
    )


def solve(
    scenario: Scenario,
    deployment: Deployment,
    objective: Objective = "exact",
    lengths: LengthDistribution | None = None,
) -> Deployment:
    """The same instances with the threshold and the N_p / N_d that maximise Lambda_max.

    Every N_p with N_p + N_d fixed and at least one of each, and, where both clusters prefill, up to
    4096 thresholds taken from the length distribution. ``objective`` chooses the equations to
    maximise; "exact" by default, since the plan is run on a queue. Among equals (decode limits a
    whole range of t) the one with most prefill capacity wins. Without local prefill there is
    nothing to choose.
    """
    if deployment.num_prefill == 0:
        return deployment
    costs = _Costs(scenario, deployment, lengths or length_distribution(scenario))
    local = costs.candidates(deployment)
    prefill_s, local_s, link_s, slots_s = costs.per_request(local, objective)
    best: tuple[float, float, int, int] | None = None
    for split in _splits(deployment):
        with np.errstate(divide="ignore"):
            prefill = np.minimum(
                deployment.num_prfaas / prefill_s if deployment.num_prfaas else np.inf,
                split.num_prefill / local_s,
            )
            carried = np.minimum(prefill, 1 / link_s)
        lambda_max = np.minimum(carried, split.num_decode / slots_s)
        equal = lambda_max >= lambda_max.max() * (1 - _TIE)
        at = int(np.argmax(np.where(equal, carried, -1.0)))
        found = (float(lambda_max[at]), float(carried[at]), at, split.num_prefill)
        if best is None or _better(found, best):
            best = found
    assert best is not None, "a deployment with prefill and decode has a split"
    _, _, at, num_prefill = best
    threshold = int(costs.lengths[local[at] - 1]) if deployment.num_prfaas else None
    return replace(
        deployment,
        threshold_tokens=threshold,
        num_prefill=num_prefill,
        num_decode=deployment.num_prefill + deployment.num_decode - num_prefill,
    )


_OBJECTIVES: tuple[Objective, Objective] = ("paper", "exact")


def _splits(deployment: Deployment) -> Iterator[Deployment]:
    total = deployment.num_prefill + deployment.num_decode
    for num_prefill in range(1, total):
        yield replace(deployment, num_prefill=num_prefill, num_decode=total - num_prefill)


def _better(found: tuple[float, float, int, int], best: tuple[float, float, int, int]) -> bool:
    if abs(found[0] - best[0]) <= _TIE * best[0]:
        return found[1] > best[1]
    return found[0] > best[0]


class _Costs:
    """What a request costs each stage, for every split of the lengths into short and long.

    A split is the number k of shortest lengths that stay local; running sums over the sorted
    lengths give each expectation in O(1).
    """

    def __init__(
        self, scenario: Scenario, deployment: Deployment, given: LengthDistribution
    ) -> None:
        order = np.argsort(given.lengths, kind="stable")
        self.lengths = np.asarray(given.lengths, dtype=np.float64)[order]  # [points]
        weights = np.asarray(given.weights, dtype=np.float64)[order]
        weights = weights / weights.sum()
        self._share = _running(weights)
        self._tokens = _running(weights * self.lengths)
        self._architecture = scenario.model.architecture
        self._kv_bytes = _running(weights * kv_bytes_array(self._architecture, self.lengths))
        pd = scenario.hardware[deployment.pd_hardware].profile
        self._local = pd if deployment.num_prefill else None
        self._remote = None
        if deployment.num_prfaas:
            assert deployment.prfaas_hardware is not None, "PrfaaS instances have a hardware"
            self._remote = scenario.hardware[deployment.prfaas_hardware].profile
        self._local_s = _running_costs(self._local, self.lengths, weights)
        self._remote_s = _running_costs(self._remote, self.lengths, weights)
        self._link_bytes_per_s = scenario.link.rate_bytes_per_s
        self._slot_step_s = decode_step_s(scenario, deployment) / pd.decode_max_batch
        self._output_tokens = given.mean_output_tokens

    def candidates(self, deployment: Deployment) -> IntArray:
        """Splits worth trying: after each distinct length, evenly thinned to MAX_THRESHOLDS."""
        if not deployment.num_prfaas:
            return np.array([len(self.lengths)])
        last = np.flatnonzero(np.append(np.diff(self.lengths) > 0, True)) + 1
        if len(last) > MAX_THRESHOLDS:
            last = last[np.linspace(0, len(last) - 1, MAX_THRESHOLDS).round().astype(np.int64)]
        return last

    def local_count(self, deployment: Deployment) -> IntArray:
        """The split of a deployment as planned."""
        if not deployment.num_prfaas:
            return np.array([len(self.lengths)])
        if not deployment.num_prefill:
            return np.array([0])
        assert deployment.threshold_tokens is not None, "two clusters prefill without a threshold"
        return np.array([np.searchsorted(self.lengths, deployment.threshold_tokens, "right")])

    def split(self, local: IntArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """p, l_long and l_short at each split; the means are nan where that side is empty."""
        p = np.where(local == len(self.lengths), 0.0, 1.0 - self._share[local])
        with np.errstate(invalid="ignore", divide="ignore"):
            long_tokens = np.where(p > 0, (self._tokens[-1] - self._tokens[local]) / p, np.nan)
            short_tokens = self._tokens[local] / self._share[local]
        # A mean of equal lengths may round beyond them, and so beyond what a profile covers.
        low, high = self.lengths[0], self.lengths[-1]
        return p, np.clip(long_tokens, low, high), np.clip(short_tokens, low, high)

    def per_request(
        self, local: IntArray, objective: Objective
    ) -> tuple[FloatArray, FloatArray, FloatArray, float]:
        """Seconds a mean request takes of one PrfaaS instance, of one local prefill instance, of
        the link (each [splits]) and of one decode instance."""
        zero = np.zeros(len(local))
        kv_bytes = zero
        if objective == "exact":
            remote_s = self._remote_s[-1] - self._remote_s[local]
            local_s = self._local_s[local]
            if self._remote is not None:
                kv_bytes = self._kv_bytes[-1] - self._kv_bytes[local]
        else:
            p, long_tokens, short_tokens = self.split(local)
            remote_s = _times_mean_cost(p, self._remote, long_tokens)
            local_s = _times_mean_cost(1 - p, self._local, short_tokens)
            if self._remote is not None:
                kv_bytes = p * kv_bytes_array(self._architecture, np.nan_to_num(long_tokens))
        # Differences of running sums leave rounding where a side is empty.
        empty = local == len(self.lengths)
        remote_s, kv_bytes = np.where(empty, zero, remote_s), np.where(empty, zero, kv_bytes)
        steps = self._output_tokens - (objective == "exact")
        # One-token outputs take no step; a slot still turns over.
        slots_s = max(steps, 1.0) * self._slot_step_s
        return remote_s, local_s, kv_bytes / self._link_bytes_per_s, slots_s

    def rates(self, local: IntArray, deployment: Deployment, objective: Objective) -> StageRates:
        """Saturating rates at one split."""
        remote_s, local_s, link_s, slots_s = self.per_request(local, objective)
        remote, near, link = float(remote_s[0]), float(local_s[0]), float(link_s[0])
        return StageRates(
            prfaas_prefill=deployment.num_prfaas / remote if remote > 0 else None,
            pd_prefill=deployment.num_prefill / near if near > 0 else None,
            pd_decode=deployment.num_decode / slots_s,
            link=1 / link if link > 0 else None,
        )


def kv_bytes_array(architecture: Architecture, tokens: FloatArray) -> FloatArray:
    """S_kv of each length, rounded to whole tokens. # [lengths]"""
    whole = np.rint(tokens).astype(np.int64).tolist()
    total = np.zeros(len(whole))
    for layer, count in Counter(architecture.layers).items():
        total += count * np.array([layer.kv_bytes(length) for length in whole], dtype=np.float64)
    return total


def _running(values: FloatArray) -> FloatArray:
    """Sum of the first k values at index k. # [points + 1]"""
    return np.concatenate(([0.0], np.cumsum(values)))


def _running_costs(profile: Profile | None, lengths: FloatArray, weights: FloatArray) -> FloatArray:
    if profile is None:
        return np.zeros(len(lengths) + 1)
    return _running(weights * profile.prefill_s_array(lengths))


def _times_mean_cost(
    share: FloatArray, profile: Profile | None, mean_tokens: FloatArray
) -> FloatArray:
    """share x T(E[l]); 0 where there is no such side."""
    cost = np.zeros(len(share))
    if profile is not None:
        some = share > 0
        cost[some] = share[some] * profile.prefill_s_array(mean_tokens[some])
    return cost
