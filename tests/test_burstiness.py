"""Streams with a rate of their own: limits, simulated queues, the schedule's arrivals, paths."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from queue_reference import fcfs_waits, on_off_arrivals
from scipy import stats

from harness.burstiness import OnOff, Recorded, phase_type_gaps
from harness.map_queue import map_e2_c, map_m_c
from harness.queueing import NO_WAIT, Renewal, Service, Wait, exponential_service_wait, mixture
from harness.scenario import load_scenario
from harness.workload import build_schedule, index_of_dispersion

PAPER = Path(__file__).parent.parent / "scenarios" / "paper-case-study.toml"


def assert_alike(found: Wait, expected: Wait, rel: float) -> None:
    assert found.probability == pytest.approx(expected.probability, rel=rel)
    assert found.mean_s == pytest.approx(expected.mean_s, rel=rel)
    assert found.positive_scv == pytest.approx(expected.positive_scv, rel=rel)


@settings(deadline=None)
@given(st.floats(0.05, 0.95), st.integers(1, 12), st.floats(1, 9), st.floats(0.1, 1))
def test_one_state_is_no_state(load: float, servers: int, scv: float, kept: float) -> None:
    """Both rates alike: GI/M/c with hyperexponential gaps, by its own root."""
    arrivals = OnOff(load * servers, scv, 10, 30, 1.0, kept)
    wait = map_m_c(*arrivals.process(), 1.0, servers)
    start, inner = phase_type_gaps(scv)
    rate = arrivals.rate_req_per_s / kept

    class Hyperexponential(Renewal):
        __slots__ = ()

        def one_minus_transform(self, s: np.ndarray) -> np.ndarray:
            speeds = -np.diag(inner) * rate
            gap = (start * speeds / (speeds + s[:, None])).sum(axis=1)
            return 1 - kept * gap / (1 - (1 - kept) * gap)

    exact = exponential_service_wait(Hyperexponential(load * servers, scv, kept), 1.0, servers)
    assert_alike(wait, exact, 1e-5)


@pytest.mark.parametrize("servers", [1, 4, 9])
def test_slow_states_are_a_mixture_and_fast_ones_a_mean(servers: int) -> None:
    rates = (0.8 * servers, 0.4 * servers)
    mean = 0.5 * sum(rates)
    shares = [rate / sum(rates) for rate in rates]
    each = [exponential_service_wait(Renewal(rate, 1.0), 1.0, servers) for rate in rates]
    slow = OnOff(mean, 1.0, 1e7, 1e7, rates[0] / mean).wait(Service(1.0, 1.0), servers)
    assert_alike(slow, mixture(each, shares), 1e-3)
    fast = OnOff(mean, 1.0, 1e-5, 1e-5, rates[0] / mean).wait(Service(1.0, 1.0), servers)
    assert_alike(fast, exponential_service_wait(Renewal(mean, 1.0), 1.0, servers), 1e-3)


@settings(deadline=None)
@given(st.floats(0.05, 0.97), st.floats(0.01, 10))
def test_erlang_service_at_one_server_is_pollaczek_khinchine(load: float, mean_s: float) -> None:
    rate = np.array([[load / mean_s]])
    wait = map_e2_c(-rate, rate, mean_s, 1)
    assert wait.probability == pytest.approx(load)
    assert wait.mean_s == pytest.approx(load * mean_s * 1.5 / 2 / (1 - load))


@pytest.mark.parametrize("servers", [2, 5])
def test_erlang_service_at_several_servers_against_a_simulated_queue(servers: int) -> None:
    rng = np.random.default_rng(3)
    rate = 0.8 * servers
    times_s = on_off_arrivals(rate, 3, 3, 1.5, 400_000, rng)
    waits = fcfs_waits(times_s, rng.gamma(2, 0.5, len(times_s)), servers)
    wait = map_e2_c(*OnOff(rate, 1.0, 3, 3, 1.5).process(), 1.0, servers)
    assert wait.mean_s == pytest.approx(waits.mean(), rel=0.06)
    assert wait.probability == pytest.approx((waits > 0).mean(), rel=0.02)


@pytest.mark.parametrize(("servers", "most_off"), [(3, 0.03), (24, 0.1), (25, 0.7)])
def test_slow_states_with_little_varying_service(servers: int, most_off: float) -> None:
    """Each state in its own steady state; beyond 24 servers the mean errs on the long side."""
    rates = (0.85 * servers, 0.55 * servers)
    shares = [rate / sum(rates) for rate in rates]
    each = [Renewal(rate, 1.0).wait(Service(1.0, 0.1), servers) for rate in rates]
    bursts = OnOff(0.5 * sum(rates), 1.0, 1e6, 1e6, rates[0] / (0.5 * sum(rates)))
    wait, expected = bursts.wait(Service(1.0, 0.1), servers), mixture(each, shares)
    assert wait.probability == pytest.approx(expected.probability, rel=0.1)
    assert 0.97 * expected.mean_s < wait.mean_s < (1 + most_off) * expected.mean_s


@pytest.mark.parametrize("spread", [0.0, 0.6])
@pytest.mark.parametrize("kept", [1.0, 0.5])
def test_bursts_against_a_simulated_queue(spread: float, kept: float) -> None:
    """Bursts of 8 services' length above what four servers can do; the CV tells nothing of them."""
    rng = np.random.default_rng(23)
    arrivals = OnOff(2.4 / kept, 1.0, 8, 24, 2.5).part(0, kept)
    count = round(250_000 / kept)  # a mean of so many varies by 5 % from seed to seed
    times_s = on_off_arrivals(2.4 / kept, 8, 24, 2.5, count, rng)
    times_s = times_s[rng.random(count) < kept]
    service_s = rng.lognormal(-(spread**2) / 2, spread, len(times_s))
    waits = fcfs_waits(times_s, service_s, 4)
    wait = arrivals.wait(Service(1.0, float(np.expm1(spread**2))), 4)
    assert wait.mean_s == pytest.approx(waits.mean(), rel=0.12)
    assert wait.probability == pytest.approx((waits > 0).mean(), rel=0.06)
    gaps = np.diff(times_s)
    by_cv = Renewal(2.4, float(gaps.var() / gaps.mean() ** 2)).wait(Service(1.0, 0.3), 4)
    assert by_cv.mean_s < 0.6 * waits.mean()


def test_dispersion_is_that_of_the_schedule() -> None:
    """I(t) against counts in windows of the arrivals that a run would have."""
    keys = [
        "workload.arrivals='on_off'",
        "workload.on_duration='10s'",
        "workload.off_duration='30s'",
        "workload.on_rate_multiple=3",
        "workload.cv=1.5",
        "load.rate_req_per_s=4",
        "load.num_requests=150000",
    ]
    scenario = load_scenario(PAPER, keys)
    schedule = build_schedule(scenario.workload, scenario.load)
    arrivals = OnOff(4.0, 2.25, 10, 30, 3.0)
    for window_s in (4.0, 20.0, 100.0):
        counted = index_of_dispersion(schedule, window_s)
        assert counted == pytest.approx(arrivals.dispersion(window_s), rel=0.1)


@settings(deadline=None)
@given(st.floats(0.125, 25))
def test_gaps_in_phases_have_the_moments_of_gamma_gaps(scv: float) -> None:
    start, inner = phase_type_gaps(scv)
    inverse = np.linalg.inv(-inner)
    first, second, third = (
        factor * float((start @ np.linalg.matrix_power(inverse, power)).sum())
        for power, factor in ((1, 1), (2, 2), (3, 6))
    )
    assert start.min() >= -1e-12
    assert start.sum() == pytest.approx(1)
    assert first == pytest.approx(1)
    assert second == pytest.approx(1 + scv)
    if scv >= 1:
        assert third == pytest.approx((1 + scv) * (1 + 2 * scv))


@settings(deadline=None)
@given(st.floats(0.1, 5), st.floats(0.2, 9), st.floats(0.05, 1), st.floats(1, 4))
def test_the_process_has_the_rate(rate: float, scv: float, kept: float, multiple: float) -> None:
    arrivals = OnOff(rate, scv, 10, 30, multiple, kept)
    silent, arriving = arrivals.process()
    whole = silent + arriving
    assert whole.sum(axis=1) == pytest.approx(np.zeros(len(whole)), abs=1e-9)
    balance = np.vstack([whole.T[:-1], np.ones(len(whole))])
    stationary = np.linalg.solve(balance, np.eye(len(whole))[-1])
    assert float(stationary @ arriving.sum(axis=1)) == pytest.approx(rate)


@settings(deadline=None)
@given(
    st.lists(st.floats(0, 20), min_size=2, max_size=60),
    st.integers(1, 5),
    st.floats(0.01, 3),
)
def test_a_recorded_path_with_constant_service(
    gaps: list[float], servers: int, mean_s: float
) -> None:
    """Each server takes every c-th arrival: W_k = max over i <= k of (k - i) S - (t_k - t_i)."""
    times_s = np.cumsum([*gaps, 1.0])
    recorded = Recorded.of(times_s, np.zeros(len(times_s)))
    mean_s = min(mean_s, 0.9 * servers / recorded.rate_req_per_s)
    waits = []
    for first in range(servers):
        own = times_s[first::servers]
        ahead = np.arange(len(own)) * mean_s - own
        waits += (ahead - np.minimum.accumulate(ahead)).tolist()
    wait = recorded.wait(Service(mean_s, 0.0), servers)
    assert wait.mean_s == pytest.approx(np.mean(waits), abs=1e-8)
    assert wait.second_s2 == pytest.approx(np.mean(np.square(waits)), abs=1e-6)


def test_a_rate_that_drifts() -> None:
    """Twice the rate in the middle third, above what the servers do: P50 and P90 as well."""
    rng = np.random.default_rng(3)
    ticks = np.cumsum(rng.standard_exponential(60_000))
    ends = np.array([0, 0.25, 0.75, 1]) * ticks[-1]
    times_s = np.interp(ticks, ends, np.array([0, 1 / 3, 2 / 3, 1]) * ticks[-1] / 3)
    service_s = np.exp(0.5 * rng.standard_normal(len(times_s)) - 0.125)
    marks = (stats.rankdata(-service_s) - 0.5) / len(service_s)
    recorded = Recorded.of(times_s, marks)
    assert recorded.rate_req_per_s == pytest.approx(3, rel=0.01)
    slower = recorded.at_rate(2.8)
    waits = fcfs_waits(slower.times_s, service_s, 4)
    scv = float(np.expm1(0.25))
    wait = slower.wait(Service(1.0, scv, np.sort(service_s)), 4)
    assert wait.mean_s == pytest.approx(waits.mean(), rel=1e-9)
    assert wait.mean_s > 100 * Renewal(2.8, 1.0).wait(Service(1.0, scv), 4).mean_s
    for share in (0.5, 0.9, 0.99):
        place_s = np.array([np.quantile(waits, share)])
        assert float(wait.beyond(place_s)[0]) == pytest.approx(1 - share, abs=0.01)
    later = wait.plus(Wait(0.1, 1.0, 1.0))
    assert later.mean_s == pytest.approx(wait.mean_s + 1)
    assert float(later.beyond(np.array([-1.0]))[0]) == 1


def test_recorded_poisson_arrivals_are_poisson() -> None:
    rng = np.random.default_rng(4)
    times_s = np.cumsum(rng.standard_exponential(200_000))
    recorded = Recorded.of(times_s, rng.random(len(times_s))).at_rate(3.2)
    quantiles_s = stats.gamma(2, scale=0.5).ppf((np.arange(1000) + 0.5) / 1000)
    served = recorded.wait(Service(1.0, 0.5, quantiles_s), 4)
    assert_alike(served, Renewal(3.2, 1.0).wait(Service(1.0, 0.5), 4), 0.06)
    half = recorded.part(0.25, 0.75)
    assert half.rate_req_per_s == pytest.approx(1.6)
    assert len(half.times_s) == pytest.approx(100_000, rel=0.02)
    assert half.dispersion(30.0) == pytest.approx(1.0, abs=0.06)


def test_what_is_too_much_is_refused_and_nothing_waits_for_nothing() -> None:
    bursts = OnOff(5.0, 1.0, 10, 30, 2.0)
    few = Recorded.of(np.array([0.0, 1.0, 2.0]), np.array([0.1, 0.5, 0.9]))
    for arrivals in (bursts, few.at_rate(5.0)):
        with pytest.raises(ValueError, match="do not fit 4 servers"):
            arrivals.wait(Service(1.0, 0.0), 4)
        assert arrivals.wait(Service(0.0, 0.0), 4) == NO_WAIT
    assert few.part(0.2, 0.3).wait(Service(1.0, 0.0), 4) == NO_WAIT
    assert few.part(0.2, 0.3).dispersion(1.0) == 1.0


def test_dispersion_of_recorded_arrivals_over_windows_that_are_nearly_all_empty() -> None:
    """As counted window by window, and in no time where there are 10^12 of them."""
    rng = np.random.default_rng(8)
    times_s = np.cumsum(rng.exponential(50.0, 2000))
    arrivals = Recorded.of(times_s, rng.random(2000))
    windows = int((times_s[-1] - times_s[0]) / 0.25 + 1e-9)
    counts = np.bincount(((times_s - times_s[0]) / 0.25).astype(int))[:windows]
    assert arrivals.dispersion(0.25) == pytest.approx(counts.var(ddof=1) / counts.mean())
    assert arrivals.dispersion(1e-7) == pytest.approx(1.0, rel=1e-3)
