"""A queue simulated arrival by arrival, which the closed forms are held against."""

import heapq

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


def fcfs_waits(arrival_s: FloatArray, service_s: FloatArray, servers: int) -> FloatArray:
    """Waits, first come first served; ``arrival_s`` ascends. # (requests,) each"""
    free_s = [0.0] * servers
    waits = np.empty(len(arrival_s))
    for index, (arrives_s, lasts_s) in enumerate(
        zip(arrival_s.tolist(), service_s.tolist(), strict=True)
    ):
        start_s = max(arrives_s, free_s[0])
        heapq.heapreplace(free_s, start_s + lasts_s)
        waits[index] = start_s - arrives_s
    return waits


def on_off_arrivals(
    rate: float, on_s: float, off_s: float, multiple: float, count: int, rng: np.random.Generator
) -> FloatArray:
    """A two-state Markov-modulated Poisson process, thinned from one at the higher rate."""
    share = on_s / (on_s + off_s)
    rates = np.array([multiple, max(0.0, (1 - share * multiple) / (1 - share))]) * rate
    top = rates.max()
    times_s = np.cumsum(rng.standard_exponential(int(1.1 * count * top / rate) + 1000)) / top
    cycles = int(1.5 * times_s[-1] / (on_s + off_s)) + 100
    lasts_s = rng.standard_exponential((cycles, 2)) * (on_s, off_s)
    state = (np.searchsorted(np.cumsum(lasts_s.ravel()), times_s) % 2).astype(np.int64)
    kept = times_s[rng.random(len(times_s)) < rates[state] / top]
    assert len(kept) >= count, "too few were drawn"
    return kept[:count]
