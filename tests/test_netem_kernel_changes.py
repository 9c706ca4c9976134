"""A running link on a real netem kernel takes another description, or stays what it was."""

import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from netem_packets import stream
from test_netem_kernel import GBIT, deep, measured_rate

from netem.attributes import Netem
from netem.link import LinkError, LinkSpec
from netem.loss import GilbertElliott
from netem.qdisc import read_netem
from netem.routed import RoutedPath, open_netem
from netem.rtnetlink import RTM_DELQDISC, TC_H_ROOT, tc_message

pytestmark = [pytest.mark.netem, pytest.mark.netadmin]


def test_a_change_is_in_force_when_it_is_applied_and_takes_no_longer_than_messages_do() -> None:
    """Both hops of both ways, each set and read back; a setting that is the same takes none."""
    slow, fast = deep(2.5e6), deep(5e6)
    with open_netem(slow) as path, stream(path) as flow:
        router = path.places[1]
        read_s, took_s = [], []
        for spec in [fast, slow] * 10:
            start_s = time.monotonic()
            read_netem(router.route, router.to_far)
            middle_s = time.monotonic()
            path.apply(spec)
            read_s.append(middle_s - start_s)
            took_s.append(time.monotonic() - middle_s)
        # 20 ms on a machine on which one message and its answer take half a millisecond.
        assert min(took_s) < 40 * max(statistics.median(read_s), 0.5e-3)
        for spec in (fast, slow):
            path.apply(spec)
            assert path.applied == spec
            rate = spec.rate_bytes_per_s
            assert measured_rate(flow, spec) == pytest.approx(rate, rel=0.003)


def test_a_hop_that_stays_the_same_is_not_touched() -> None:
    """One way's rate changes: the other way goes on in the middle of its loss pattern."""
    spec = deep(loss=GilbertElliott(0.5, 0.001))
    faster = LinkSpec("faster", spec.near_to_far, deep(2 * GBIT).far_to_near)
    with open_netem(spec) as path, stream(path) as flow:
        # A burst of losses has a mean of 1000 packets: the chain is bad by then, and stays so.
        assert sum(flow.lost(100)[50:]) > 40
        path.apply(faster)
        assert flow.lost(1) == [True]


def test_a_running_link_takes_on_everything_but_mtu_and_the_presence_of_a_cap() -> None:
    with open_netem(deep(rtt_s=0.002)) as path, stream(path) as flow:
        assert sum(flow.lost(2000)) == 0
        path.apply(deep(rtt_s=0.002, loss=GilbertElliott(0.1, 0.5), jitter_s=0.0005))
        assert sum(flow.lost(2000)) > 100
        path.apply(deep(rtt_s=0.002))
        assert sum(flow.lost(2000)) == 0
        with pytest.raises(LinkError, match="mtu"):
            path.apply(deep(rtt_s=0.002, mtu_bytes=9000))
        with pytest.raises(LinkError, match="per_flow_cap"):
            path.apply(deep(rtt_s=0.002, per_flow_cap_bytes_per_s=1e6))


def runs(path: RoutedPath) -> list[Netem]:
    """What the kernel runs on the hops of both directions, seeds aside."""
    a, b = path.places[len(path.places) // 2 - 1 :][:2]
    hops = [(a, a.to_far), (b, b.to_far), (b, b.to_near), (a, a.to_near)]
    return [replace(read_netem(place.route, index), seed=None) for place, index in hops]


def test_threads_that_change_a_link_at_once_leave_one_of_their_links() -> None:
    quick, slow = deep(2.5e6, rtt_s=0.004), deep(5e6, rtt_s=0.008)
    together = threading.Barrier(2)

    def apply(spec: LinkSpec) -> None:
        together.wait()
        path.apply(spec)

    with open_netem(quick) as path, ThreadPoolExecutor(2) as pool:
        ran = {quick: runs(path)}
        path.apply(slow)
        ran[slow] = runs(path)
        for _ in range(50):
            list(pool.map(apply, (quick, slow)))
            assert runs(path) == ran[path.applied]


def test_a_change_that_is_refused_half_way_is_taken_back() -> None:
    """fq has no cap above 34 Gbit/s, which is known when the hops of a direction are changed."""
    spec = deep(rtt_s=0.004, per_flow_cap_bytes_per_s=1e6)
    with open_netem(spec) as path:
        before = runs(path)
        with pytest.raises(LinkError, match=r"34\.3 Gbit/s at most"):
            path.apply(deep(50 * GBIT, rtt_s=0.008, per_flow_cap_bytes_per_s=40 * GBIT))
        assert path.applied == spec
        assert runs(path) == before
        path.apply(replace(spec, per_flow_cap_bytes_per_s=2e6))
        assert path.applied.per_flow_cap_bytes_per_s == 2e6


def test_a_change_that_cannot_be_taken_back_says_so() -> None:
    """Somebody took the qdisc of one direction off."""
    spec, other = deep(rtt_s=0.004), deep(rtt_s=0.008)
    with open_netem(spec) as path:
        place = path.places[1]
        place.route.request(RTM_DELQDISC, tc_message(place.to_near, 0, TC_H_ROOT))
        with pytest.raises(LinkError, match=r"in part only .* close it and open another"):
            path.apply(other)
        assert path.applied == spec
