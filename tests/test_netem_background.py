"""Background traffic: its periods, and what it takes from a real link."""

import time
from itertools import islice

import pytest

from netem.background import BackgroundTraffic, background, periods
from netem.link import LinkError, symmetric
from netem.probes import probes
from netem.relayed import open_relay
from netem.tunnelled import open_forwarder

PATIENCE_S = 60


def test_periods_have_their_means_and_come_from_the_seed() -> None:
    traffic = BackgroundTraffic("near_to_far", 1e6, on_s=0.02, off_s=0.08, seed=3)
    found = list(islice(periods(traffic), 4000))
    assert found == list(islice(periods(traffic), 4000))
    assert all(begin < end for begin, end in found)
    assert found == sorted(found)
    on_s = sum(end - begin for begin, end in found)
    assert on_s / 4000 == pytest.approx(0.02, rel=0.05)
    assert on_s / found[-1][1] == pytest.approx(0.2, rel=0.05)


def test_steady_traffic_never_pauses() -> None:
    assert list(periods(BackgroundTraffic("near_to_far", 1e6))) == [(0.0, float("inf"))]


def test_impossible_traffic_is_refused() -> None:
    with pytest.raises(LinkError, match="a rate and an on period above 0"):
        BackgroundTraffic("near_to_far", 0.0)


def test_the_relay_refuses_it_by_name() -> None:
    with (
        open_relay(symmetric("test", 25e6, 0.01)) as path,
        pytest.raises(LinkError, match="the relay carries no datagrams"),
        background(path, BackgroundTraffic("near_to_far", 1e6)),
    ):
        pass


@pytest.mark.netadmin
def test_it_takes_its_rate_of_one_direction_and_leaves_the_rest() -> None:
    rate = 12.5e6
    with open_forwarder(symmetric("test", rate, 0.004)) as path, probes(path) as ends:
        with background(path, BackgroundTraffic("far_to_near", 0.6 * rate)):
            before = path.counters()
            wanted_bytes = 2_000_000
            deadline_s = time.monotonic() + PATIENCE_S
            while (now := path.counters()).far_to_near.bytes < (
                before.far_to_near.bytes + wanted_bytes
            ) and time.monotonic() < deadline_s:
                pass  # Each look asks the forwarder.
            took_s = (now.mono_ns - before.mono_ns) * 1e-9
            # Never faster; a busy machine may be slower.
            assert took_s > 0.9 * wanted_bytes / (0.6 * rate)
            assert now.near_to_far.packets == before.near_to_far.packets
            # A busy machine holds the traffic up, or TCP, for a while: one time in five is enough.
            rates = (ends.rate("far_to_near", 2, 0.5) for _ in range(5))
            assert any(found < 0.6 * rate for found in rates)
        rates = (ends.rate("far_to_near", 2, 0.5) for _ in range(5))
        assert any(found > 0.6 * rate for found in rates)
