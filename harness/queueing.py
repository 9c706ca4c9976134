"""Waiting time of a G/G/c queue, first come first served, in closed form.

Arrivals are a stream with gamma gaps of squared coefficient of variation (scv) C_a^2, of which each
request is kept with probability p. The kept gaps have the Laplace-Stieltjes transform and the scv

    A(s) = p a(s) / (1 - (1 - p) a(s)),   a(s) = (1 + C_a^2 p s / rate)^(-1 / C_a^2)
    C^2  = p C_a^2 + 1 - p

where ``rate`` is that of the kept stream. Service has mean S and scv C_s^2; rate S / c < 1. Two
queues are solved for such arrivals:

GI/M/c, exponential service, exactly (Takacs 1962). With 1 - w the root in (0, 1) of
A(c (1 - w) / S) = w, phi_j = A(j / S) and C_j the product over i <= j of phi_i / (1 - phi_i),

    1 / P(W > 0) = 1 + (1 - w) sum_{j=1..c} binom(c, j) / (C_j (1 - phi_j))
                                            (c (1 - phi_j) - j) / (c (1 - w) - j)

and a positive wait is exponential with mean S / (c (1 - w)).

GI/D/c, constant service. Each server takes every c-th arrival, so W is that of one server whose
gaps are sums of c gaps. X_m, the sum of m gaps, is taken as gamma of scv C^2 / m (exact for p = 1),
and Spitzer's identity (1956) gives the cumulants

    -ln P(W = 0) = sum_{n>=1} P(X_nc < n S) / n
    E[W], Var[W] = sum_{n>=1} E[((n S - X_nc)^+)^r] / n,     r = 1, 2

P(W > 0), E[W] and the scv of a positive wait are linear in C_s^2 between them (Page 1972; Kimura
1986): exact for E[W] of M/G/1, and beyond C_s^2 = 1 the line goes on. A positive wait is taken as
gamma of its mean and scv.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt
from scipy.special import gammainc, gammaincc, gammaln

FloatArray = npt.NDArray[np.float64]

#: Gaps of a smaller scv are even.
_EVEN_SCV = 1e-9
#: Terms of Spitzer's sums that are added one by one; the rest are integrated over ln n.
_TERMS = 32
_NODES, _NODE_WEIGHTS = np.polynomial.legendre.leggauss(48)
#: Of the bracket of a quantile, which is some ten times a median.
_HALVINGS = 18
#: Closer to 1 a load is not told from one that the queue does not carry: what is left of the
#: servers is the difference of two numbers that agree in most of their digits.
STABLE_LOAD = 1 - 1e-5
#: Who waits more rarely does not wait.
_NEVER = 1e-12
#: A shorter wait is rounding.
_ROUNDING_S = 1e-9
_SHAPE_QUANTILES = 400
#: A positive wait varies at least this much.
_LEAST_SCV = 1e-3
#: -ln of the probability below which a term of Spitzer's sums is left out.
_NEGLIGIBLE = 40.0


@dataclass(frozen=True, slots=True)
class Service:
    """Time a server takes for a request: mean, squared coefficient of variation and, for those who
    serve one request after another, evenly spaced quantiles, ascending. # (quantiles,)"""

    mean_s: float
    scv: float
    quantiles_s: FloatArray | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Wait:
    """Law of a waiting time: P(W > 0), E[W], and the scv of W where it is positive. A positive wait
    is gamma unless ``shape`` has its quantiles, ascending, as multiples of its mean. # (quantiles,)
    """

    probability: float
    mean_s: float
    positive_scv: float
    shape: FloatArray | None = field(default=None, compare=False, repr=False)

    @staticmethod
    def of(probability: float, mean_s: float, second_s2: float) -> "Wait":
        """From P(W > 0), E[W] and E[W^2]."""
        if mean_s <= 0 or probability < _NEVER:
            return NO_WAIT
        return Wait(probability, mean_s, second_s2 * probability / mean_s**2 - 1)

    @staticmethod
    def among(waits_s: FloatArray) -> "Wait":
        """That of one of ``waits_s``, drawn at random. # (requests,)"""
        positive_s = np.sort(waits_s[waits_s > _ROUNDING_S])
        if len(positive_s) == 0:
            return NO_WAIT
        mean_s = float(positive_s.mean())
        middles = (np.arange(_SHAPE_QUANTILES) + 0.5) / _SHAPE_QUANTILES
        return Wait(
            probability=len(positive_s) / len(waits_s),
            mean_s=float(positive_s.sum()) / len(waits_s),
            positive_scv=float(positive_s.var()) / mean_s**2,
            shape=np.quantile(positive_s, middles) / mean_s,
        )

    @property
    def second_s2(self) -> float:
        """E[W^2]."""
        if self.probability == 0:
            return 0.0
        return self.mean_s**2 / self.probability * (1 + self.positive_scv)

    def plus(self, other: "Wait") -> "Wait":
        """The sum of two independent waits, of the shape of the longer one."""
        total = Wait.of(
            probability=1 - (1 - self.probability) * (1 - other.probability),
            mean_s=self.mean_s + other.mean_s,
            second_s2=self.second_s2 + other.second_s2 + 2 * self.mean_s * other.mean_s,
        )
        return replace(total, shape=max(self, other, key=lambda wait: wait.mean_s).shape)

    def beyond(self, time_s: FloatArray) -> FloatArray:
        """P(W > time), elementwise; 1 below 0."""
        if self.probability == 0:
            return np.where(time_s < 0, 1.0, 0.0)
        if self.shape is None:
            shape, scale_s = self._gamma()
            tail = gammaincc(shape, np.maximum(time_s, 0.0) / scale_s)
        else:
            multiples = time_s * (self.probability / self.mean_s)
            tail = 1 - np.searchsorted(self.shape, multiples, side="right") / len(self.shape)
        return np.where(time_s < 0, 1.0, self.probability * tail)

    def excess(self, slack_s: FloatArray, weights: FloatArray) -> "Wait":
        """The law of (W - slack)^+ for a gamma wait and an independent slack of 0 or more."""
        if self.probability == 0:
            return NO_WAIT
        shape, scale_s = self._gamma()
        x = slack_s / scale_s
        tail, tail_1, tail_2 = (gammaincc(shape + n, x) for n in range(3))
        mean_s = shape * scale_s
        first = mean_s * tail_1 - slack_s * tail
        second = mean_s * ((mean_s + scale_s) * tail_2 - 2 * slack_s * tail_1) + slack_s**2 * tail
        sums = (self.probability * float(weights @ one) for one in (tail, first, second))
        return Wait.of(*sums)

    def _gamma(self) -> tuple[float, float]:
        """Shape and scale of a positive wait."""
        scv = max(self.positive_scv, _LEAST_SCV)
        return 1 / scv, scv * self.mean_s / self.probability


NO_WAIT = Wait(0.0, 0.0, 1.0)


def mixture(waits: Sequence[Wait], shares: Sequence[float]) -> Wait:
    """The wait of a request that meets one of ``waits`` by chance; the shares sum to 1."""
    pairs = list(zip(waits, shares, strict=True))
    return Wait.of(
        sum(share * one.probability for one, share in pairs),
        sum(share * one.mean_s for one, share in pairs),
        sum(share * one.second_s2 for one, share in pairs),
    )


class Arrivals(Protocol):
    """A stream of requests; each kind of arrivals solves its own queue."""

    @property
    def rate_req_per_s(self) -> float: ...

    def at_rate(self, rate_req_per_s: float) -> Self:
        """The same pattern at another rate."""
        ...

    def part(self, low: float, high: float) -> Self:
        """The requests whose mark lies in [low, high), marks being uniform on [0, 1)."""
        ...

    def wait(self, service: Service, servers: int) -> Wait:
        """At one queue with that many servers. ValueError where it is not stable."""
        ...

    def dispersion(self, window_s: float, /) -> float:
        """Index of dispersion: Var / mean of the number that arrives in such a window."""
        ...


@dataclass(frozen=True, slots=True)
class Renewal:
    """Gamma gaps of scv ``gap_scv``, each request kept with probability ``kept``."""

    rate_req_per_s: float
    gap_scv: float
    kept: float = 1.0

    def at_rate(self, rate_req_per_s: float) -> "Renewal":
        return Renewal(rate_req_per_s, self.gap_scv, self.kept)

    def part(self, low: float, high: float) -> "Renewal":
        share = high - low
        return Renewal(self.rate_req_per_s * share, self.gap_scv, self.kept * share)

    def wait(self, service: Service, servers: int) -> Wait:
        check_stable(self.rate_req_per_s, service, servers)
        constant = constant_service_wait(self, service.mean_s, servers)
        if service.scv == 0:
            return constant
        exponential = exponential_service_wait(self, service.mean_s, servers)
        return corrected(constant, constant, exponential, service.scv)

    def dispersion(self, _window_s: float, /) -> float:
        """Its limit for long windows, which a few gaps are."""
        return self.kept * self.gap_scv + 1 - self.kept

    def one_minus_transform(self, s: FloatArray) -> FloatArray:
        """1 - A(s) of the kept gaps, without cancellation."""
        base_s = s * self.kept / self.rate_req_per_s
        if self.gap_scv >= _EVEN_SCV:
            base_s = np.log1p(self.gap_scv * base_s) / self.gap_scv
        missing = -np.expm1(-base_s)
        return np.asarray(missing / (self.kept + (1 - self.kept) * missing))


def check_stable(rate_req_per_s: float, service: Service, servers: int) -> None:
    """ValueError where the queue would grow for ever."""
    if not 0 <= rate_req_per_s * service.mean_s < servers:
        raise ValueError(
            f"{rate_req_per_s:g} req/s of {service.mean_s:g} s each do not fit {servers} servers"
        )


def corrected(base: Wait, constant: Wait, exponential: Wait, scv: float) -> Wait:
    """``base`` and ``scv`` times what exponential service adds to constant service."""
    probability = base.probability + scv * (exponential.probability - constant.probability)
    mean_s = base.mean_s + scv * (exponential.mean_s - constant.mean_s)
    positive_scv = base.positive_scv + scv * (exponential.positive_scv - constant.positive_scv)
    if mean_s <= 0 or probability < _NEVER:
        return NO_WAIT
    return Wait(min(probability, 1.0), mean_s, positive_scv)


def exponential_service_wait(arrivals: Renewal, mean_s: float, servers: int) -> Wait:
    """GI/M/c; exact."""
    free = _free_share(arrivals, mean_s, servers)
    j = np.arange(1.0, servers + 1)
    missing = arrivals.one_minus_transform(j / mean_s)  # 1 - phi_j
    log_binomial = gammaln(servers + 1) - gammaln(j + 1) - gammaln(servers - j + 1)
    with np.errstate(divide="ignore"):  # phi_j rounds to 0: gaps so long that nobody waits
        log_c = np.cumsum(np.log1p(-missing) - np.log(missing))
    # Numerator and denominator both vanish at j = c (1 - w): there the ratio of their slopes.
    step = 1e-4
    above, below = (arrivals.one_minus_transform((j + h) / mean_s) for h in (step, -step))
    at_zero = 1 - servers * (above - below) / (2 * step)
    denominator = servers * free - j
    near = np.abs(denominator) < 1e-5
    ratio = np.where(near, at_zero, (servers * missing - j) / np.where(near, 1.0, denominator))
    with np.errstate(over="ignore"):  # an infinite term: nobody waits
        terms = np.exp(log_binomial - log_c) / missing * ratio
    probability = 1 / (1 + free * float(terms.sum()))
    positive_s = mean_s / (servers * free)
    return Wait(probability, probability * positive_s, 1.0)


def _free_share(arrivals: Renewal, mean_s: float, servers: int) -> float:
    """1 - w: the root in (0, 1) of 1 - A(c x / S) = x, by cutting the bracket into 64."""
    low, high = 0.0, 1.0
    for _ in range(9):
        x = np.linspace(low, high, 65)[1:-1]
        above = arrivals.one_minus_transform(servers * x / mean_s) > x
        count = int(np.count_nonzero(above))
        low, high = (x[count - 1] if count else low), (x[count] if count < len(x) else high)
    return float(0.5 * (low + high))


def constant_service_wait(arrivals: Renewal, mean_s: float, servers: int) -> Wait:
    """GI/D/c; exact for gamma gaps, and so for ``kept`` 1."""
    scv, rate = arrivals.dispersion(math.inf), arrivals.rate_req_per_s
    if scv < _EVEN_SCV or mean_s == 0:
        return NO_WAIT
    load = rate * mean_s / servers
    # Chernoff: P(X_nc < n S) <= exp(-n decay).
    decay = servers / scv * (load - 1 - math.log(load))
    n, weight = _terms(_NEGLIGIBLE / decay)
    shape, scale_s = n * servers / scv, scv / rate
    time_s, sum_s = n * mean_s, shape * scale_s
    x = time_s / scale_s
    density = np.exp(shape * np.log(x) - x - gammaln(shape + 1))
    below = gammainc(shape, x)
    below_1 = below - density
    below_2 = below_1 - density * x / (shape + 1)
    first = time_s * below - sum_s * below_1
    second = time_s**2 * below - 2 * time_s * sum_s * below_1 + sum_s * (sum_s + scale_s) * below_2
    mean = float(weight @ first)
    probability = -math.expm1(-float(weight @ below))
    return Wait.of(probability, mean, float(weight @ second) + mean**2)


def _terms(last: float) -> tuple[FloatArray, FloatArray]:
    """Points and weights that stand for the sum over n of f(n) / n up to ``last``."""
    n = np.arange(1.0, _TERMS + 1)
    start = _TERMS + 0.5
    if last <= start:
        return n, 1 / n
    half = 0.5 * math.log(last / start)
    nodes = start * np.exp(half * (_NODES + 1))
    return np.concatenate([n, nodes]), np.concatenate([1 / n, half * _NODE_WEIGHTS])


@dataclass(frozen=True, slots=True)
class Branch:
    """A share of the requests: its wait, and independent of it what follows. # arrays (points,)"""

    share: float
    wait: Wait
    values_s: FloatArray
    weights: FloatArray


def sojourn_quantiles(branches: Sequence[Branch], shares: Sequence[float]) -> list[float]:
    """Quantiles of wait + value over all branches: bisection on the exact convolution."""
    target = 1 - np.asarray(shares)  # (quantiles,)
    low = np.full(len(target), min(float(one.values_s.min()) for one in branches))
    high = np.full(len(target), max(float(one.values_s.max()) for one in branches))
    while (_beyond(branches, high) > target).any():
        high *= 2
    for _ in range(_HALVINGS):
        middle = 0.5 * (low + high)
        above = _beyond(branches, middle) > target
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    return [float(value) for value in high]


def _beyond(branches: Sequence[Branch], time_s: FloatArray) -> FloatArray:
    total = np.zeros(len(time_s))
    for one in branches:
        after = one.wait.beyond(time_s[:, None] - one.values_s[None, :])  # (quantiles, points)
        total += one.share * (after @ one.weights)
    return total
