"""Who is free first, by a heap against a look at everyone, whatever happens to the instances."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_setup import instances

from harness.core import EngineError
from harness.scheduling.backlog import DecodeBacklog, PrefillBacklog
from harness.scheduling.conversion import Conversion
from harness.scheduling.fleet import Fleet
from harness.scheduling.order import PrefillOrder, SlotOrder, earliest_slot

COUNT = 4
which = st.integers(0, COUNT - 1)
steps = st.one_of(
    st.tuples(st.just("add"), which, st.integers(1, 40)),
    st.tuples(st.just("add"), which, st.integers(1, 40)),
    st.tuples(st.just("started"), which, st.integers(0, 3)),
    st.tuples(st.just("remove"), which, st.integers(0, 3)),
    st.tuples(st.just("wait"), st.integers(0, 80), st.none()),
    st.tuples(st.sampled_from(["up", "down", "drain"]), which, st.none()),
)


def look_at_everyone(backlogs: list[PrefillBacklog], now_s: float) -> PrefillBacklog | None:
    serving = [one for one in backlogs if one.in_service]
    return min(
        serving, key=lambda one: (one.free_at_s(now_s), one.last_given, one.index), default=None
    )


@settings(max_examples=150)
@given(st.lists(steps, max_size=60))
def test_the_first_that_is_free_is_found(drawn: list[tuple[str, int, int | None]]) -> None:
    backlogs = [PrefillBacklog(one, n) for n, one in enumerate(instances(0, COUNT, 0))]
    order = PrefillOrder()
    for one in backlogs:
        order.enter(one)
    queued: list[list[str]] = [[] for _ in backlogs]
    now_s, given_so_far = 0.0, 0
    for step, at, value in drawn:
        if step == "wait":
            now_s += at / 4
        else:
            one, rids = backlogs[at], queued[at]
            if step == "add":
                assert value is not None
                given_so_far += 1
                rids.append(str(given_so_far))
                one.add(rids[-1], value / 4, max(now_s, one.free_at_s(now_s)))
                one.last_given = given_so_far
            elif step == "started" and value is not None and value < len(rids):
                one.started(rids[value], now_s)
            elif step == "remove" and value is not None and value < len(rids):
                one.remove(rids.pop(value), now_s)
            elif step in ("up", "down"):
                one.up = step == "up"
            elif step == "drain":
                one.draining = not one.draining
            order.enter(one)
        assert order.least(now_s) is look_at_everyone(backlogs, now_s)
        assert len(order) == sum(one.in_service for one in backlogs)


slot_steps = st.one_of(
    st.tuples(st.just("add"), which, st.integers(0, 60), st.integers(0, 40)),
    st.tuples(st.just("add"), which, st.integers(0, 60), st.integers(0, 40)),
    st.tuples(st.just("add"), which, st.integers(0, 60), st.integers(0, 40)),
    st.tuples(
        st.sampled_from(["landed", "admitted", "remove"]), which, st.integers(0, 5), st.just(0)
    ),
    st.tuples(st.just("wait"), st.integers(0, 40), st.just(0), st.just(0)),
    st.tuples(st.sampled_from(["up", "down"]), which, st.just(0), st.just(0)),
)


@settings(max_examples=300)
@given(st.lists(slot_steps, max_size=80), st.integers(0, 30))
def test_the_earliest_slot_is_found(drawn: list[tuple[str, int, int, int]], lands_in: int) -> None:
    """The order of instances against a look at every one of them."""
    backlogs = [DecodeBacklog(one, n, 2) for n, one in enumerate(instances(0, 0, COUNT))]
    order = SlotOrder(2)
    for one in backlogs:
        order.enter(one)
    queued: list[list[str]] = [[] for _ in backlogs]
    now_s = 0.0
    for number, (step, at, value, more) in enumerate(drawn):
        if step == "wait":
            now_s += at / 4
        else:
            one, rids = backlogs[at], queued[at]
            if step == "add":
                rids.append(str(number))
                landed_s = now_s + value / 4
                one.add(rids[-1], landed_s, 5.0, landed_s + 5.0 + more / 4)
            elif step in ("up", "down"):
                one.up = step == "up"
                order.enter(one)
            elif value < len(rids) and step == "remove":
                one.remove(rids.pop(value))
            elif value < len(rids):
                (one.landed if step == "landed" else one.admitted)(rids[value], now_s)
        landed_s = now_s + lands_in / 4
        assert order.earliest(landed_s, now_s) == earliest_slot(backlogs, landed_s)


def test_the_heap_does_not_grow_with_what_has_passed() -> None:
    (instance,) = instances(0, 1, 0)
    backlog, order = PrefillBacklog(instance, 0), PrefillOrder()
    for number in range(5_000):
        backlog.add("far", 1e9, 0.0)
        order.enter(backlog)
        backlog.remove("far", 0.0)
        backlog.last_given = number
        order.enter(backlog)
    assert len(order._busy) < 100
    assert order.least(0.0) is backlog


def test_an_instance_is_spared_where_another_of_its_role_stays() -> None:
    fleet = Fleet(instances(1, 2, 1), max_batch=4)
    assert fleet.spare("prefill", 0.0) is None  # the only decode instance
    busy = fleet.named("pd-p0")
    assert isinstance(busy, PrefillBacklog)
    busy.add("a", 5.0, 0.0)
    spare = fleet.spare("decode", 0.0)
    assert spare is fleet.named("pd-p1")
    fleet.convert(spare, "decode")
    assert isinstance(fleet.named("pd-p1"), DecodeBacklog)
    assert [one.role for one in fleet.instances] == ["prefill", "prefill", "decode", "decode"]
    assert fleet.spare("decode", 0.0) is None
    assert fleet.spare("prefill", 0.0) is not None
    with pytest.raises(EngineError, match="pd-p7"):
        fleet.named("pd-p7")


def test_what_an_earlier_conversion_says_late_changes_nothing() -> None:
    fleet = Fleet(instances(0, 2, 1), max_batch=4)
    first, other = fleet.named("pd-p0"), fleet.named("pd-p1")
    assert isinstance(first, PrefillBacklog)
    assert isinstance(other, PrefillBacklog)
    other.add("a", 5.0, 0.0)
    conversion = Conversion(fleet)
    assert conversion.drain("decode", 0.0)
    assert len(conversion.when_empty()) == 1
    assert conversion.give_up("pd-p0")
    first.up = True
    fleet.changed(first)
    first.held = 1
    assert conversion.drain("decode", 0.0)
    assert not conversion.done("pd-p0")  # of the one that was given up
    assert conversion.instance == "pd-p0"
    # Nor does a request's late word about a prefill instance that has become another one.
    first.held = 0
    assert len(conversion.when_empty()) == 1
    assert conversion.done("pd-p0")
    fleet.convert(fleet.named("pd-p0"), "prefill")
    fleet.changed(first)
    order = fleet.clusters["pd"].order
    assert len(order) == 2
    assert order.least(0.0) is fleet.named("pd-p0")
