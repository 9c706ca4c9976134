"""Between requests: links that fail, thresholds that move, roles that change, requests refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_setup import BLOCK, busy_link, cached, config, instances, place

from harness.core import PD, PRFAAS, Route
from harness.scheduling import events as ev
from harness.scheduling.congestion import LinkSample
from harness.scheduling.scheduler import Scheduler


def outage(scheduler: Scheduler, cluster: str, at_s: float) -> None:
    """A report from before the link went quiet; 1 s later the link is down."""
    sample = LinkSample(at_s, f"{cluster}-p0", "pd-d0", 0, 0.0, 0, 0.01, 0.01, 0, 0.0, 0.0)
    assert scheduler.handle(ev.LinkSamples(cluster, (sample,)), at_s) == []


def test_a_link_that_is_down_gets_nothing_before_the_next_tick_and_comes_back_gradually() -> None:
    scheduler = Scheduler(config(2, 2, threshold_tokens=100))
    outage(scheduler, PRFAAS, 0.0)
    assert place(scheduler, "a", 0.5, 300).route.crosses
    assert not place(scheduler, "b", 1.0, 300).route.crosses
    assert scheduler.handle(ev.Tick(), 1.0) == [ev.SetThreshold(4097, "outage")]
    assert not place(scheduler, "c", 1.5, 300).route.crosses
    outage(scheduler, PRFAAS, 2.0)  # heard of again
    falling = [4097]
    for period in range(60):
        outage(scheduler, PRFAAS, 2.0 + period)
        for action in scheduler.handle(ev.Tick(), 2.0 + period):
            assert isinstance(action, ev.SetThreshold)
            assert action.reason == "recovery"
            falling.append(action.threshold_tokens)
    assert falling == sorted(falling, reverse=True)
    assert len(falling) > 10
    assert falling[-1] == scheduler.threshold_tokens == 100


@pytest.mark.parametrize(("num_prefill", "switches"), [(2, {"bandwidth_aware": False}), (0, {})])
def test_without_feedback_nothing_moves(num_prefill: int, switches: dict[str, bool]) -> None:
    """The switch, and the naive deployment, which has no feedback at all."""
    scheduler = Scheduler(config(2, num_prefill, threshold_tokens=100, **switches))
    busy_link(scheduler, PRFAAS, 5.0, backlog_s=60.0)
    for period in range(10):
        assert scheduler.handle(ev.Tick(), 30.0 + period) == []
    assert place(scheduler, "a", 40.0, 2000).route.crosses
    assert scheduler.links()[PRFAAS].down


def test_the_threshold_rises_where_the_link_cannot_carry_the_demand() -> None:
    scheduler = Scheduler(config(8, 8, threshold_tokens=100, link_bytes_per_s=2.0**15))
    for number in range(200):  # 2 requests a second of 400 or 1000 tokens: 90 KB/s over 32
        now_s = number / 2
        place(scheduler, str(number), now_s, 1000 if number % 2 else 400)
        for event in (ev.PrefillDone(str(number)), ev.Finished(str(number))):
            scheduler.handle(event, now_s)
    (action,) = scheduler.handle(ev.Tick(), 100.0)
    assert isinstance(action, ev.SetThreshold)
    assert action.reason == "link"
    assert action.threshold_tokens == scheduler.threshold_tokens >= 1000
    dispatch = place(scheduler, "next", 100.0, 900)
    assert (dispatch.route.crosses, dispatch.threshold_tokens) == (False, action.threshold_tokens)


def test_a_full_queue_and_a_long_wait_are_refused_at_once() -> None:
    scheduler = Scheduler(config(max_queue=3, max_wait="20s"))
    place(scheduler, "a", 0.0, 320)
    place(scheduler, "b", 0.0, 640)  # prefill from 10 s to 30 s
    (refused,) = scheduler.handle(ev.Arrived("c", 32, 1), 1.0)
    assert isinstance(refused, ev.Reject)
    assert refused.retry_after_s == pytest.approx(9.0)
    assert "29 s" in refused.reason
    assert "max_wait is 20 s" in refused.reason
    place(scheduler, "d", 10.0, 32)
    (refused,) = scheduler.handle(ev.Arrived("e", 32, 1), 20.0)
    assert isinstance(refused, ev.Reject)
    assert "max_queue is 3" in refused.reason
    assert (scheduler.counters.arrived, scheduler.counters.rejected) == (5, 2)
    scheduler.handle(ev.Cancelled("b"), 20.0)
    place(scheduler, "f", 20.0, 32)
    assert Scheduler(config()).config.scheduling.max_wait_s is None


def loaded(**given: object) -> Scheduler:
    """Decode is short for minutes, so that a prefill instance is asked to decode."""
    made = config(0, 3, 1, max_batch=2, role_conversion=True, role_period="30s", **given)  # type: ignore[arg-type]  # keys of the scenario's table
    return Scheduler(made)


def run_until_convert(scheduler: Scheduler) -> tuple[list[ev.Action], float]:
    """Requests that wait for slots, and a tick each second, until something is said."""
    for second in range(600):
        number = str(second)
        place(scheduler, number, float(second), 32, 401)
        scheduler.handle(ev.PrefillDone(number), second + 0.5)
        scheduler.handle(ev.TransferDone(number, 0), second + 0.5)
        if second >= 20:
            scheduler.handle(ev.Finished(str(second - 20)), second + 0.5)
        actions = scheduler.handle(ev.Tick(), second + 0.5)
        if actions or scheduler.converting is not None:
            return actions, second + 0.5
    raise AssertionError("nothing was converted in 600 s")


def test_an_instance_drains_is_converted_and_serves_in_its_new_role() -> None:
    scheduler = loaded()
    actions, now_s = run_until_convert(scheduler)
    name = scheduler.converting
    assert actions == [ev.Convert(str(name), "decode")]  # it was empty already
    assert name in {"pd-p0", "pd-p1", "pd-p2"}
    routes = {place(scheduler, f"x{n}", now_s, 32).route.prefill.name for n in range(6)}
    assert name not in routes
    assert scheduler.handle(ev.Converted(str(name)), now_s + 10) == []
    assert scheduler.converting is None
    assert {one.name: one.role for one in scheduler.instances}[str(name)] == "decode"
    decodes = {place(scheduler, f"y{n}", now_s + 10, 32).route.decode for n in range(40)}
    assert {one.name for one in decodes} == {name}  # its slots are free, the other's are not
    assert all(one.role == "decode" for one in decodes)


def test_a_draining_instance_is_told_by_the_event_that_empties_it() -> None:
    scheduler = loaded()
    for number in range(3):  # each prefill instance has one that takes long to leave
        place(scheduler, f"long{number}", 0.0, 32)
    actions, now_s = run_until_convert(scheduler)
    name = scheduler.converting
    assert actions == []
    held = {"pd-p0": "long0", "pd-p1": "long1", "pd-p2": "long2"}
    for other, rid in held.items():
        if other != name:
            assert scheduler.handle(ev.Finished(rid), now_s) == []
    assert scheduler.handle(ev.PrefillDone(held[str(name)]), now_s) == []  # its KV is still here
    convert = ev.Convert(str(name), "decode")
    assert scheduler.handle(ev.TransferDone(held[str(name)], 0), now_s) == [convert]
    assert scheduler.handle(ev.Tick(), now_s + 1) == []


def test_a_conversion_that_fails_leaves_the_rest_at_work() -> None:
    scheduler = loaded()
    _, now_s = run_until_convert(scheduler)
    name = str(scheduler.converting)
    assert scheduler.handle(ev.InstanceUp(name), now_s) == []  # not before it is converted
    assert scheduler.handle(ev.InstanceDown(name), now_s) == []
    assert scheduler.converting is None
    assert scheduler.handle(ev.Converted(name), now_s) == []  # too late to be believed
    assert {one.name: one.role for one in scheduler.instances}[name] == "prefill"
    scheduler.handle(ev.InstanceUp(name), now_s + 1)
    routes = {place(scheduler, f"x{n}", now_s + 1, 3200).route.prefill.name for n in range(9)}
    assert name in routes


def test_the_last_one_of_its_role_is_not_drained() -> None:
    scheduler = loaded()
    for number in range(3):  # each prefill instance has one that takes long to leave
        place(scheduler, f"long{number}", 0.0, 32)
    _, now_s = run_until_convert(scheduler)
    name = str(scheduler.converting)
    first, last = (f"pd-p{n}" for n in range(3) if f"pd-p{n}" != name)
    scheduler.handle(ev.InstanceDown(first), now_s)
    assert scheduler.converting == name  # another one is left
    scheduler.handle(ev.InstanceDown(last), now_s)
    assert scheduler.converting is None
    assert place(scheduler, "x", now_s, 32).route.prefill.name == name
    # Nor is it converted when what it still had has left.
    for number in range(3):
        assert scheduler.handle(ev.Finished(f"long{number}"), now_s) == []
    assert scheduler.fleet.named(name).in_service
    assert {one.name: one.role for one in scheduler.instances}[name] == "prefill"


def test_roles_stay_unless_asked_to_change() -> None:
    scheduler = Scheduler(config(0, 3, 1, max_batch=2, role_period="30s"))
    with pytest.raises(AssertionError, match="nothing was converted"):
        run_until_convert(scheduler)


@pytest.mark.parametrize("num_decode", [1, 2])
def test_by_capacity_the_first_to_be_done_prefills(num_decode: int) -> None:
    scheduler = Scheduler(config(1, 2, num_decode, balancing="capacity", link_delay_s=1.0))
    names = [place(scheduler, str(n), 0.0, 128).route.prefill.name for n in range(7)]
    # Fast: 1 s away, then 2 s each. Slow: 4 s each.
    assert names == ["prfaas-p0", "pd-p0", "pd-p1", "prfaas-p0", "prfaas-p0", "pd-p0", "pd-p1"]
    assert scheduler.threshold_tokens is None
    outage(scheduler, PRFAAS, 0.0)
    assert not place(scheduler, "x", 5.0, 128).route.crosses


NAMES = [one.name for one in instances(1, 1, 1, clusters=2)]
CLUSTERS = (PRFAAS, f"{PRFAAS}1")
RIDS = st.sampled_from([str(n) for n in range(12)])
key_tuples = st.integers(0, 8).map(lambda n: tuple(range(1, n + 1)))
samples = st.builds(
    LinkSample,
    at_s=st.integers(0, 20).map(float),
    sender=st.sampled_from(NAMES),
    peer=st.just("pd-d0"),
    connection=st.integers(0, 1),
    acked_bytes=st.integers(0, 10).map(lambda n: n * 2.0**19),
    retransmits=st.just(0),
    rtt_s=st.just(0.01),
    min_rtt_s=st.none(),
    unsent_bytes=st.just(0.0),
    backlog_bytes=st.sampled_from([0.0, 2.0**21]),
)
any_event = st.one_of(
    st.builds(ev.Arrived, RIDS, st.integers(1, 300), st.integers(1, 50), key_tuples),
    st.builds(ev.Arrived, RIDS, st.integers(1, 300), st.integers(1, 50), key_tuples),
    st.builds(ev.PrefillDone, RIDS),
    st.builds(ev.TransferDone, RIDS, st.integers(0, 9)),
    st.builds(ev.Finished, RIDS),
    st.builds(ev.Cancelled, RIDS),
    st.builds(ev.InstanceUp, st.sampled_from(NAMES)),
    st.builds(ev.InstanceDown, st.sampled_from(NAMES)),
    st.builds(ev.LinkSamples, st.sampled_from(CLUSTERS), st.lists(samples, max_size=2).map(tuple)),
    st.builds(
        ev.CacheDelta,
        st.sampled_from(NAMES),
        st.integers(1, 3),
        key_tuples,
        st.just(()),
        key_tuples,
    ),
    st.builds(ev.CacheSnapshot, st.sampled_from(NAMES), st.integers(1, 3), key_tuples, key_tuples),
    st.just(ev.Tick()),
)


def check(scheduler: Scheduler, action: ev.Action, event: ev.Event) -> None:
    """A dispatch goes to what is in service, over no link that is down, with sound lengths."""
    if not isinstance(action, ev.Dispatch):
        return
    assert isinstance(event, ev.Arrived)
    assert isinstance(action.route, Route)
    far = action.route.prefill.cluster
    if action.route.crosses:
        assert not scheduler.links()[far].down
    else:
        assert action.route.prefill.cluster == action.route.decode.cluster
    longest = (event.input_tokens - 1) // BLOCK * BLOCK
    assert 0 <= action.resident_tokens <= longest
    assert 0 <= action.fetched_tokens <= action.cached_tokens <= longest
    assert 0 < action.uncached_tokens <= event.input_tokens
    assert action.prefill_service_s > 0
    if action.copy is not None:
        assert action.copy.destination == action.route.prefill.name
        assert action.copy.tokens == action.cached_tokens


@settings(max_examples=150)
@given(
    st.lists(st.tuples(any_event, st.integers(0, 4)), max_size=80),
    st.sampled_from(["push_then_admit", "reserve_first"]),
    st.sampled_from(["threshold", "capacity"]),
)
def test_any_events_keep_links_lengths_and_counts_sound(
    drawn: list[tuple[ev.Event, int]], admission: str, balancing: str
) -> None:
    given_config = config(
        1,
        1,
        1,
        clusters=2,
        threshold_tokens=100 if balancing == "threshold" else None,
        balancing=balancing,  # type: ignore[arg-type]  # drawn from the two
        admission=admission,
        cache=True,
        max_batch=2,
        max_queue=8,
        max_wait="30s",
    )
    scheduler, twin = Scheduler(given_config), Scheduler(given_config)
    live: set[str] = set()
    now_s = 0.0
    for event, gap in drawn:
        now_s += gap / 4
        if isinstance(event, ev.Arrived):
            if event.rid in live:
                continue
            # What is known of the links now, not as of the last report.
            assert scheduler.handle(ev.LinkSamples(PRFAAS, ()), now_s) == []
            twin.handle(ev.LinkSamples(PRFAAS, ()), now_s)
        actions = scheduler.handle(event, now_s)
        assert actions == twin.handle(event, now_s)
        for action in actions:
            check(scheduler, action, event)
            if isinstance(action, ev.Dispatch):
                live.add(action.rid)
        if isinstance(event, ev.Finished | ev.Cancelled):
            live.discard(event.rid)
        counted = scheduler.counters
        ended = counted.rejected + counted.finished + counted.failed + counted.cancelled
        assert scheduler.in_flight == len(live) == counted.arrived - ended
    for rid in live:
        scheduler.handle(ev.Finished(rid), now_s)
    assert set(scheduler.queue_lengths().values()) == {0}


def test_the_index_counts_its_blocks() -> None:
    scheduler = Scheduler(config(cache=True))
    cached(scheduler, "pd-p0", 1, 2, 3)
    cached(scheduler, "pd-d0", 3, 4)
    assert scheduler.cached_blocks == 4
    assert scheduler.links() == {}
    assert {one.cluster for one in scheduler.instances} == {PD}
