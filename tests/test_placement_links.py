"""Placement where several clusters' links are to choose from: what is to cross is counted."""

from dataclasses import replace

import pytest
from scheduler_setup import config, moved_bytes, place

from harness.core import PD
from harness.scheduling import events as ev
from harness.scheduling.scheduler import Scheduler
from harness.scheduling.scheduler_config import Link

RATE = 2.0**12
TOKENS = 64
#: Seconds that one of these takes on a link.
SENDING_S = moved_bytes(TOKENS, 0) / RATE


def scheduler(
    ingress: dict[str, float], egress: dict[str, float] | None = None, prefills: int = 8
) -> Scheduler:
    """Two PrfaaS and two PD clusters; everything is prefilled by PrfaaS."""
    base = config(prefills, 0, 4, clusters=2, bandwidth_aware=False)
    links = {name: Link(rate, 0.0, 0.0) for name, rate in (egress or {}).items()}
    return Scheduler(replace(base, ingress_bytes_per_s=ingress, links=links or base.links))


def done(one: Scheduler, rid: str, now_s: float) -> None:
    for event in (
        ev.PrefillStarted(rid),
        ev.PrefillDone(rid),
        ev.TransferDone(rid, moved_bytes(TOKENS, 0)),
    ):
        assert one.handle(event, now_s) == []


def test_what_crosses_goes_where_the_link_has_room() -> None:
    one = scheduler({PD: RATE, f"{PD}1": RATE / 4})
    first = [place(one, str(n), 0.0, TOKENS).route.decode.cluster for n in range(10)]
    # Four times as much goes over the one that is four times as fast.
    assert first.count(PD) == 8
    assert first.count(f"{PD}1") == 2
    for n in range(10):
        done(one, str(n), 100.0)
    # All of it has landed: there is room again, and the first cluster is as good as the other.
    assert place(one, "again", 100.0, TOKENS).route.decode.cluster == PD
    assert one.fleet.clusters[f"{PD}1"].crossing_bytes == 0
    assert one.fleet.clusters["prfaas"].crossing_bytes == moved_bytes(TOKENS, 0)


def test_a_slow_link_gets_what_it_can_carry_though_its_instances_are_idle() -> None:
    one = scheduler({PD: 2.0**30}, {"prfaas": RATE, "prfaas1": RATE / 4}, prefills=20)
    far = [place(one, str(n), 0.0, TOKENS).route.prefill.cluster for n in range(15)]
    assert far.count("prfaas1") == pytest.approx(3, abs=1)


def test_expected_landing_waits_for_what_leaves_before() -> None:
    one = scheduler({PD: 2.0**30}, {"prfaas": RATE, "prfaas1": 2.0})
    landed_s = [place(one, str(n), 0.0, TOKENS).expected_kv_landed_s for n in range(4)]
    # The first goes to each cluster as if alone. Then one link is blocked for long, and the others
    # have an instance each and the other link for all of them.
    assert landed_s == [1.0, 1.0, SENDING_S, 2 * SENDING_S]


@pytest.mark.parametrize("end", ["failed", "cancelled"])
def test_what_never_lands_is_not_waited_for(end: str) -> None:
    one = scheduler({PD: RATE, f"{PD}1": RATE / 4})
    place(one, "a", 0.0, TOKENS)
    event = ev.Failed("a", "prefill") if end == "failed" else ev.Cancelled("a")
    one.handle(event, 1.0)
    assert all(cluster.crossing_bytes == 0 for cluster in one.fleet.clusters.values())


def test_one_link_counts_nothing() -> None:
    one = Scheduler(config(2, 0, 2))
    place(one, "a", 0.0, TOKENS)
    assert all(cluster.crossing_bytes == 0 for cluster in one.fleet.clusters.values())
