"""Queues fed by a Markovian arrival process (MAP): phases that change with and without an arrival.

D_0 (``silent``) holds the rates without, D_1 (``arriving``) those with one. The number in the
system, the phase and the stages that the busy servers are in form a quasi-birth-death process. For
exponential service (MAP/M/c) there are no stages; for Erlang service of two stages (MAP/E_2/c, of
scv 1/2) the state counts the servers in the first. With A_n, B_n, C_n the rates from level n up,
inside and down, stationary vectors are

    pi_{n+1} = pi_n R_n,   R_n = A_n (-(B_{n+1} + R_{n+1} C_{n+2}))^{-1},   n < c

and R_n = R from level c on, by the logarithmic reduction of Latouche and Ramaswami (1993). An
arrival meets level n with weight pi_n D_1 1; E[W] is E[waiting] / rate (Little).
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from harness.queueing import Wait

FloatArray = npt.NDArray[np.float64]

_REDUCTIONS = 64
_NEGLIGIBLE = 1e-14


class Servers(Protocol):
    """Rates between the states of busy servers; a level with n of them busy has some number."""

    def inside(self, busy: int) -> FloatArray:
        """Between states of a level, with minus all that leaves them on the diagonal."""
        ...

    def begin(self, busy: int) -> FloatArray:
        """Which state of the next level each becomes when one more begins."""
        ...

    def end(self, busy: int) -> FloatArray:
        """To the states of the level below, when one ends and nobody waits."""
        ...

    def relay(self, busy: int) -> FloatArray:
        """Between states, when one ends and one that waited begins."""
        ...


@dataclass(frozen=True, slots=True)
class Exponential:
    """One state a level."""

    mean_s: float

    def inside(self, busy: int) -> FloatArray:
        return np.array([[-busy / self.mean_s]])

    def begin(self, _busy: int) -> FloatArray:
        return np.ones((1, 1))

    def end(self, busy: int) -> FloatArray:
        return np.array([[busy / self.mean_s]])

    def relay(self, busy: int) -> FloatArray:
        return self.end(busy)


@dataclass(frozen=True, slots=True)
class Erlang2:
    """State k of 0..n: k of n busy servers are in the first of two stages."""

    mean_s: float

    def inside(self, busy: int) -> FloatArray:
        first = np.arange(busy + 1) * (2 / self.mean_s)
        return np.diag(first[1:], -1) - np.eye(busy + 1) * (2 * busy / self.mean_s)

    def begin(self, busy: int) -> FloatArray:
        return np.eye(busy + 1, busy + 2, k=1)

    def end(self, busy: int) -> FloatArray:
        second = (busy - np.arange(busy + 1)) * (2 / self.mean_s)
        return second[:, np.newaxis] * np.eye(busy + 1, busy)

    def relay(self, busy: int) -> FloatArray:
        second = (busy - np.arange(busy + 1)) * (2 / self.mean_s)
        return second[:, np.newaxis] * np.eye(busy + 1, k=1)


@dataclass(frozen=True, slots=True)
class _AllBusy:
    """Level c, where all servers are busy and nobody waits; (I - R)^-1; arrivals a second by state;
    and of all levels. Level and rate are in units in which level 0 sums to 1.
    # (states,), (states, states), (states,)"""

    level: FloatArray
    later: FloatArray
    seen_req_per_s: FloatArray
    rate_req_per_s: float

    @property
    def probability(self) -> float:
        """That an arrival waits."""
        return float(self.level @ self.later @ self.seen_req_per_s) / self.rate_req_per_s


def map_m_c(silent: FloatArray, arriving: FloatArray, mean_s: float, servers: int) -> Wait:
    """Exponential service; exact. ``silent`` and ``arriving`` # (phases, phases)"""
    busy = _all_busy(silent, arriving, Exponential(mean_s), servers)
    # An arrival that meets c + k waits for k + 1 ends, each after mean_s / c.
    gap_s = mean_s / servers
    met = busy.level @ busy.later / busy.rate_req_per_s
    first = float(met @ busy.later @ busy.seen_req_per_s) * gap_s
    second = float(met @ busy.later @ busy.later @ busy.seen_req_per_s) * 2 * gap_s**2
    return Wait.of(busy.probability, first, second)


def map_e2_c(silent: FloatArray, arriving: FloatArray, mean_s: float, servers: int) -> Wait:
    """Erlang service of two stages. P(W > 0) and E[W] are exact; the second moment is not
    computed, and a positive wait is given scv 1. Takes time that grows with servers^4."""
    busy = _all_busy(silent, arriving, Erlang2(mean_s), servers)
    waiting = float((busy.level @ (busy.later - np.eye(len(busy.level))) @ busy.later).sum())
    return Wait(busy.probability, waiting / busy.rate_req_per_s, 1.0)


def _all_busy(silent: FloatArray, arriving: FloatArray, working: Servers, servers: int) -> _AllBusy:
    def inside(busy: int) -> FloatArray:
        states = working.inside(busy)
        return _kron(states, np.eye(len(silent))) + _kron(np.eye(len(states)), silent)

    relay = _kron(working.relay(servers), np.eye(len(silent)))
    up = _kron(np.eye(len(relay) // len(silent)), arriving)
    r = _rate_matrix(up, inside(servers), relay)
    below = r @ relay  # R_{n+1} C_{n+2}
    steps = []
    for busy in range(servers, 0, -1):
        up = _kron(working.begin(busy - 1), arriving)
        steps.append(up @ np.linalg.inv(-inside(busy) - below))
        below = steps[-1] @ _kron(working.end(busy), np.eye(len(silent)))
    balance = np.vstack([(silent + below).T[:-1], np.ones(len(silent))])
    level = np.linalg.solve(balance, np.eye(len(silent))[-1])
    rate = 0.0
    for step in reversed(steps):
        rate += float(level @ _seen(level, arriving))
        level = level @ step
    later = np.asarray(np.linalg.inv(np.eye(len(r)) - r), dtype=np.float64)
    seen = _seen(level, arriving)
    return _AllBusy(level, later, seen, rate + float(level @ later @ seen))


def _kron(outer: FloatArray, inner: FloatArray) -> FloatArray:
    return np.asarray(np.kron(outer, inner), dtype=np.float64)


def _seen(level: FloatArray, arriving: FloatArray) -> FloatArray:
    return np.tile(arriving.sum(axis=1), len(level) // len(arriving))


def _rate_matrix(up: FloatArray, inside: FloatArray, down: FloatArray) -> FloatArray:
    """R of the levels that are alike, by logarithmic reduction."""
    one = np.eye(len(up))
    inverse = np.linalg.inv(-inside)
    rise, fall = inverse @ up, inverse @ down
    g, path = fall, rise
    for _ in range(_REDUCTIONS):
        again = np.linalg.inv(one - rise @ fall - fall @ rise)
        rise, fall = again @ rise @ rise, again @ fall @ fall
        g, path = g + path @ fall, path @ rise
        if path.max() < _NEGLIGIBLE:
            break
    return np.asarray(up @ np.linalg.inv(-inside - up @ g))
