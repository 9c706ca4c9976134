"""How much a queue's samples depend on each other.

The effective sample size is n / tau, tau = 1 + 2 sum rho_k the integrated autocorrelation time,
summed up to the first lag M >= 5 tau(M) (Sokal's window). A busy period is a stretch in which every
server works, so that whoever comes waits, and inherits what came before.
"""

from collections.abc import Sequence

import numpy as np

from harness.statistics.quantiles import Floats

_WINDOW = 5.0


def autocorrelation_time(values: Sequence[float] | Floats) -> float:
    """tau >= 1 of a stationary series in order; 1 for a constant or a very short one."""
    series = np.asarray(values, dtype=np.float64)
    n = len(series)
    if n < 4:
        return 1.0
    centred = series - series.mean()
    # Twice the length, so that the product does not wrap; a power of two transforms fast.
    size = 1 << (2 * n - 1).bit_length()
    spectrum = np.fft.rfft(centred, size)
    covariance = np.fft.irfft(spectrum * np.conj(spectrum), size)[:n]
    if covariance[0] <= 1e-24 * max(1.0, float(np.abs(series).max()) ** 2) * n:
        return 1.0
    tau = 2.0 * np.cumsum(covariance / covariance[0]) - 1.0
    inside = np.arange(n) >= _WINDOW * tau
    window = int(np.argmax(inside)) if inside.any() else n - 1
    return float(min(n, max(1.0, tau[window])))


def effective_samples(values: Sequence[float] | Floats) -> float:
    """n / tau: how many independent samples say as much about the mean."""
    return len(values) / autocorrelation_time(values) if len(values) else 0.0


def saturated_requests(
    starts_s: Sequence[float] | Floats,
    ends_s: Sequence[float] | Floats,
    servers: int,
    arrivals_s: Sequence[float] | Floats,
    gap_s: float = 0.0,
) -> int:
    """Arrivals inside the longest period in which every server was busy, so that requests waited.

    ``starts_s`` and ``ends_s`` are the service spans of one group of ``servers``; an instance that
    goes on to the next request within ``gap_s`` was busy between. A request that arrives outside
    such a period does not wait, and so does not inherit what came before.
    """
    assert servers > 0, "a group has servers"
    starts, ends = np.asarray(starts_s, np.float64), np.asarray(ends_s, np.float64) + gap_s
    at_s = np.concatenate([starts, ends])
    step = np.concatenate([np.ones(len(starts), np.int64), -np.ones(len(ends), np.int64)])
    # At equal times a start comes before an end: back-to-back services are one period.
    order = np.lexsort((-step, at_s))
    at_s = at_s[order]
    full = np.concatenate([[False], np.cumsum(step[order]) >= servers])
    begins_s, over_s = at_s[full[1:] & ~full[:-1]], at_s[~full[1:] & full[:-1]]
    arrivals = np.sort(np.asarray(arrivals_s, dtype=np.float64))
    inside = np.searchsorted(arrivals, over_s) - np.searchsorted(arrivals, begins_s)
    return int(inside.max(initial=0))
