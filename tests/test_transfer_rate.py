"""The rate of N connections: worked figures, its bounds, and slow start against a packet count."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.transfer_rate import (
    CongestionControl,
    Flows,
    SlowStart,
    TcpPath,
    link_path,
    payload_bytes_per_s,
    rate_bounds,
    sending_s,
    window_packets,
)
from netem.link import Direction, LinkSpec
from netem.loss import IndependentLoss

MSS = 1448
paths = st.builds(
    TcpPath,
    link_bytes_per_s=st.floats(1e5, 1e11),
    rtt_s=st.floats(1e-4, 0.3),
    per_flow_cap_bytes_per_s=st.none() | st.floats(1e5, 1e11),
    loss=st.just(0.0) | st.floats(1e-7, 0.1),
)
flows = st.builds(
    Flows,
    connections=st.integers(1, 64),
    congestion_control=st.sampled_from(["cubic", "reno", "bbr"]),
    pacing_bytes_per_s=st.none() | st.floats(1e5, 1e11),
)


@pytest.mark.parametrize(
    ("loss", "rtt_s", "control", "window"),
    [
        # RFC 9438 at an RTT of 0.1 s, C = 0.4
        (1e-4, 0.1, "cubic", 187),
        (1e-6, 0.1, "cubic", 5926),
        (1e-8, 0.1, "cubic", 187_400),
        # and of 0.01 s, where CUBIC is Reno-friendly at more loss
        (1e-3, 0.01, "cubic", 38.7),
        (1e-6, 0.01, "cubic", 1225),
        (1e-8, 0.01, "cubic", 33_325),
        (1e-2, 0.01, "reno", 12.2),
    ],
)
def test_windows_are_those_of_the_published_response_functions(
    loss: float, rtt_s: float, control: CongestionControl, window: float
) -> None:
    assert window_packets(loss, rtt_s, control) == pytest.approx(window, rel=0.01)


def _stepped_window(loss: float, rtt_s: float, control: CongestionControl) -> float:
    """Mean of a window that is stepped by round trips, with a loss after every 1 / loss packets."""
    window, peak, since_s, left = 50.0, 50.0, 0.0, 1 / loss
    sent, rounds = 0.0, 50_000
    for _ in range(rounds):
        sent += window
        left -= window
        since_s += rtt_s
        if left <= 0:
            peak, left, since_s = window, 1 / loss, 0.0
            window *= 0.5 if control == "reno" else 0.7
        elif control == "reno":
            window += 1
        else:
            window = 0.4 * (since_s - (peak * 0.3 / 0.4) ** (1 / 3)) ** 3 + peak
    return sent / rounds


@pytest.mark.parametrize(
    ("loss", "rtt_s", "control"),
    [(5e-4, 0.2, "cubic"), (1e-4, 0.1, "cubic"), (1e-3, 0.02, "reno"), (1e-4, 0.2, "reno")],
)
def test_response_functions_are_the_means_of_the_windows_they_describe(
    loss: float, rtt_s: float, control: CongestionControl
) -> None:
    stepped = _stepped_window(loss, rtt_s, control)
    assert window_packets(loss, rtt_s, control) == pytest.approx(stepped, rel=0.05)


def test_the_least_bound_is_met() -> None:
    path = TcpPath(100e6, 0.01, per_flow_cap_bytes_per_s=5e6)
    share = MSS / 1500
    for connections in (1, 4, 16, 20, 64):
        expected = min(connections * 5e6, 100e6) * share
        assert payload_bytes_per_s(path, Flows(connections)) == pytest.approx(expected)
    assert payload_bytes_per_s(path, Flows(64), share=0.25) == pytest.approx(25e6 * share)
    paced = Flows(4, pacing_bytes_per_s=1e6)
    assert payload_bytes_per_s(path, paced) == pytest.approx(4e6), "of payload"


def test_loss_bounds_cubic_and_reno_and_not_bbr() -> None:
    path = TcpPath(1e9, 0.1, loss=1e-4)
    reno, cubic, bbr = (
        rate_bounds(path, Flows(2, control)) for control in ("reno", "cubic", "bbr")
    )
    assert reno["loss"] == pytest.approx(2 * math.sqrt(1.5e4) * MSS / 0.1)
    assert cubic["loss"] == pytest.approx(2 * 187.4 * MSS / 0.1, rel=1e-3)
    assert "loss" not in bbr
    assert bbr["link"] == pytest.approx(1e9 * MSS / 1500 * (1 - 1e-4))
    with pytest.raises(ValueError, match="no model of BBR at 25% loss"):
        rate_bounds(TcpPath(1e9, 0.1, loss=0.25), Flows(1, "bbr"))


def test_a_link_gives_the_path_that_kv_takes() -> None:
    back = Direction(2e6, 0.01, loss=IndependentLoss(0.001))
    link = LinkSpec("lopsided", Direction(1e6, 0.03), back, per_flow_cap_bytes_per_s=5e5)
    assert link_path(link) == TcpPath(2e6, 0.04, 5e5, 0.001, 1500)
    assert link_path(link, "near_to_far").link_bytes_per_s == 1e6


@given(path=paths, one=flows, more=st.integers(1, 8), faster=st.floats(1.0, 10.0))
def test_more_connections_and_a_faster_link_never_slow_a_transfer(
    path: TcpPath, one: Flows, more: int, faster: float
) -> None:
    rate = payload_bytes_per_s(path, one)
    assert rate <= path.link_bytes_per_s
    many = Flows(one.connections * more, one.congestion_control, one.pacing_bytes_per_s)
    assert payload_bytes_per_s(path, many) >= rate
    wider = TcpPath(
        path.link_bytes_per_s * faster, path.rtt_s, path.per_flow_cap_bytes_per_s, path.loss
    )
    assert payload_bytes_per_s(wider, one) >= rate


def _counted_s(packets: int, window: int, rate_packets_per_s: float, rtt_s: float) -> float:
    """Packet by packet: each acknowledgement frees one place and adds one to the window."""
    free_s = [0.0] * window  # when each place in the window may be used, first come
    departed_s = 0.0
    for used in range(packets):
        departed_s = max(departed_s, free_s[used]) + 1 / rate_packets_per_s
        acked_s = departed_s + rtt_s
        free_s += [acked_s, acked_s]
    return departed_s


@pytest.mark.parametrize("packets", [1, 10, 11, 30, 31, 200, 1000, 5000])
@pytest.mark.parametrize("rtt_s", [0.0, 0.02, 0.1])
def test_slow_start_is_that_of_a_count_of_packets(packets: int, rtt_s: float) -> None:
    """To within the packet that each round's first acknowledgement waits for."""
    rate = 8000.0
    modelled = float(
        sending_s(packets * MSS, rate * MSS, SlowStart.of(TcpPath(1e9, rtt_s), Flows()))
    )
    counted = _counted_s(packets, 10, rate, rtt_s)
    assert modelled <= counted + 1e-9
    assert modelled == pytest.approx(counted, abs=10 / rate)


@given(
    sizes=st.lists(st.floats(0.0, 1e9), min_size=2, max_size=6),
    rate=st.floats(1e5, 1e10),
    rtt_s=st.floats(0.0, 0.3),
    connections=st.integers(1, 64),
)
def test_a_cold_path_takes_longer_by_its_rounds_at_most(
    sizes: list[float], rate: float, rtt_s: float, connections: int
) -> None:
    slow_start = SlowStart.of(TcpPath(1e9, rtt_s), Flows(connections))
    sent = np.sort(sizes)
    warm, cold = sending_s(sent, rate), sending_s(sent, rate, slow_start)
    rounds_s = float(slow_start.rounds(rate)) * rtt_s
    assert np.all(np.diff(cold) >= -1e-9)
    assert np.all(cold >= warm - 1e-9)
    assert np.all(cold <= warm + rounds_s + 1e-9)


def test_impossible_paths_and_flows_are_refused() -> None:
    for link_bytes_per_s, rtt_s, loss in ((0.0, 0.01, 0.0), (1e6, -1.0, 0.0), (1e6, 0.01, 1.0)):
        with pytest.raises(ValueError, match="a path needs"):
            TcpPath(link_bytes_per_s, rtt_s, loss=loss)
    for connections, pacing in ((0, None), (1, 0.0)):
        with pytest.raises(ValueError, match="a transfer needs"):
            Flows(connections, pacing_bytes_per_s=pacing)
