"""The scheduler against central queues computed apart from it, and under any order of events."""

import heapq
from collections.abc import Iterable
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_setup import STEP_S, config, instances, place

from harness.core import PD, PRFAAS, EngineError, ScenarioError
from harness.scheduling import events as ev
from harness.scheduling.scheduler import Scheduler
from harness.scheduling.scheduler_config import Admission


def central_queue_starts(arrivals: Iterable[tuple[float, float]], servers: int) -> list[float]:
    """Start of each (arrival, service) in one first-come-first-served queue of equal servers."""
    free = [Fraction(0)] * servers
    starts = []
    for arrival_s, service_s in arrivals:
        earliest = heapq.heappop(free)
        start = max(Fraction(arrival_s), earliest)
        heapq.heappush(free, start + Fraction(service_s))
        starts.append(float(start))
    return starts


arrival_lists = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 400)), min_size=1, max_size=60
)


@given(arrival_lists, st.integers(1, 5))
def test_least_remaining_work_is_one_central_queue(
    drawn: list[tuple[int, int]], servers: int
) -> None:
    now_s, arrivals = 0.0, []
    for gap, tokens in drawn:
        now_s += gap / 8
        arrivals.append((now_s, tokens))
    expected = central_queue_starts([(at, tokens / 32) for at, tokens in arrivals], servers)

    scheduler = Scheduler(config(num_prefill=servers))
    free_s: dict[str, float] = {}
    reports: list[tuple[float, int, ev.Event]] = []
    for number, (at_s, tokens) in enumerate(arrivals):
        while reports and reports[0][0] <= at_s:
            when_s, _, event = heapq.heappop(reports)
            assert scheduler.handle(event, when_s) == []
        dispatch = place(scheduler, str(number), at_s, tokens)
        # What really happens on the instance that was chosen, not what was expected of it.
        name = dispatch.route.prefill.name
        start_s = max(at_s, free_s.get(name, 0.0))
        free_s[name] = start_s + tokens / 32
        assert dispatch.expected_prefill_start_s == start_s == expected[number]
        heapq.heappush(reports, (start_s, 2 * number + 1, ev.PrefillStarted(str(number))))
        heapq.heappush(reports, (free_s[name], 2 * number, ev.PrefillDone(str(number))))


def test_idle_instances_take_turns() -> None:
    """Always the first of them would fill one path to decode while the others are empty."""
    scheduler = Scheduler(config(num_prefill=3))
    names = []
    for number in range(7):
        dispatch = place(scheduler, str(number), 10.0 * number, 32)
        names.append(dispatch.route.prefill.name)
        scheduler.handle(ev.PrefillDone(str(number)), 10.0 * number + 1)
    assert names == [f"pd-p{number % 3}" for number in range(7)]


def test_a_wrong_service_time_is_corrected_by_reports() -> None:
    scheduler = Scheduler(config())
    place(scheduler, "a", 0.0, 320)  # expected 0 to 10
    place(scheduler, "b", 0.0, 320)  # expected 10 to 20
    scheduler.handle(ev.PrefillStarted("a"), 0.0)
    assert place(scheduler, "c", 25.0, 32).expected_prefill_start_s == 35.0  # a is still running
    scheduler.handle(ev.PrefillDone("a"), 30.0)
    scheduler.handle(ev.PrefillStarted("b"), 31.0)
    assert place(scheduler, "d", 31.0, 32).expected_prefill_start_s == 42.0  # b until 41, c 1 s
    scheduler.handle(ev.PrefillDone("b"), 33.0)
    scheduler.handle(ev.PrefillDone("c"), 34.0)
    scheduler.handle(ev.PrefillDone("d"), 35.0)
    assert place(scheduler, "e", 35.0, 32).expected_prefill_start_s == 35.0


def test_a_reported_start_out_of_order_keeps_the_overtaken_request() -> None:
    scheduler = Scheduler(config())
    for rid, tokens in (("a", 320), ("b", 64), ("c", 32)):
        place(scheduler, rid, 0.0, tokens)
    scheduler.handle(ev.PrefillStarted("b"), 1.0)  # b runs 1 to 3, then a to 13, then c to 14
    assert place(scheduler, "d", 1.0, 32).expected_prefill_start_s == 14.0
    scheduler.handle(ev.PrefillDone("b"), 3.0)
    scheduler.handle(ev.Cancelled("d"), 3.0)
    assert place(scheduler, "e", 10.0, 32).expected_prefill_start_s == 14.0


def test_cancelled_work_frees_its_place() -> None:
    scheduler = Scheduler(config())
    for rid in "abc":
        place(scheduler, rid, 0.0, 320)
    scheduler.handle(ev.Cancelled("b"), 1.0)
    assert place(scheduler, "d", 1.0, 32).expected_prefill_start_s == 20.0
    scheduler.handle(ev.Failed("a", "prefill"), 2.0)
    assert place(scheduler, "e", 2.0, 32).expected_prefill_start_s == 13.0


@pytest.mark.parametrize(("tokens", "cluster"), [(101, PRFAAS), (100, PD)])
def test_the_threshold_divides_by_length(tokens: int, cluster: str) -> None:
    dispatch = place(Scheduler(config(1, 1, threshold_tokens=100)), "a", 0.0, tokens)
    assert dispatch.route.prefill.cluster == cluster
    assert dispatch.route.crosses == (cluster == PRFAAS)
    assert (dispatch.uncached_tokens, dispatch.cached_tokens) == (tokens, 0)
    assert dispatch.prefill_service_s == tokens / (64 if cluster == PRFAAS else 32)


def test_baselines_need_no_threshold() -> None:
    naive = Scheduler(config(2, 0, 1, link_delay_s=0.5))
    dispatch = place(naive, "a", 1.0, 64)
    assert dispatch.route.prefill.name == "prfaas-p0"
    assert dispatch.expected_prefill_start_s == 1.5
    assert place(naive, "b", 1.0, 64).route.prefill.name == "prfaas-p1"
    homogeneous = Scheduler(config(0, 1, 1))
    assert place(homogeneous, "a", 0.0, 10**6).route.prefill.cluster == PD
    with pytest.raises(ScenarioError, match="threshold_tokens"):
        config(1, 1)


@given(
    st.lists(
        st.tuples(st.integers(0, 12), st.integers(1, 64), st.integers(2, 4_000)),
        min_size=1,
        max_size=80,
    ),
    st.integers(1, 3),
)
def test_expected_slots_are_a_central_queue_of_slots(
    drawn: list[tuple[int, int, int]], slots: int
) -> None:
    """One decode instance: slots are granted by landing, each held (output - 1) steps."""
    scheduler = Scheduler(config(num_prefill=100, max_batch=slots))
    now_s, landings = 0.0, []
    for number, (gap, tokens, output) in enumerate(drawn):
        # Lengths keep the order of landing equal to that of arrival.
        now_s += gap + 2.0
        dispatch = place(scheduler, str(number), now_s, tokens, output)
        assert dispatch.expected_kv_landed_s == now_s + tokens / 32
        landings.append((dispatch.expected_kv_landed_s, (output - 1) * STEP_S))
        expected_s = central_queue_starts(landings, slots)[-1]
        assert dispatch.expected_decode_slot_s == pytest.approx(expected_s, abs=1e-6)
        scheduler.handle(ev.PrefillDone(str(number)), dispatch.expected_kv_landed_s)


def test_decode_ties_go_to_the_fewest_requests_then_the_lowest_index() -> None:
    scheduler = Scheduler(config(num_prefill=8, num_decode=3, max_batch=2))
    names = [place(scheduler, str(n), 0.0, 32, 1001).route.decode.name for n in range(6)]
    assert names == ["pd-d0", "pd-d1", "pd-d2"] * 2
    # All slots are taken from 1 s for 25 s; request 4 leaves early.
    scheduler.handle(ev.Finished("4"), 5.0)
    early = place(scheduler, "6", 5.0, 32, 1001)
    assert early.route.decode.name == "pd-d1"
    assert early.expected_decode_slot_s == early.expected_kv_landed_s
    assert place(scheduler, "7", 5.0, 32, 1001).expected_decode_slot_s == pytest.approx(26.0)


def test_reports_move_the_expected_slot() -> None:
    scheduler = Scheduler(config(num_prefill=2, max_batch=1))
    place(scheduler, "a", 0.0, 32, 1001)  # expected 1 to 26
    scheduler.handle(ev.PrefillDone("a"), 1.0)
    scheduler.handle(ev.TransferDone("a", 10), 4.0)
    assert place(scheduler, "b", 4.0, 32).expected_decode_slot_s == pytest.approx(29.0)
    scheduler.handle(ev.DecodeAdmitted("a"), 6.0)
    assert place(scheduler, "c", 6.0, 32).expected_decode_slot_s == pytest.approx(31.0)
    scheduler.handle(ev.Finished("a"), 7.0)
    scheduler.handle(ev.Finished("b"), 7.0)
    scheduler.handle(ev.Finished("c"), 7.0)
    assert place(scheduler, "d", 7.0, 32).expected_decode_slot_s == 8.0


def test_reserve_first_waits_for_a_slot_before_prefill() -> None:
    scheduler = Scheduler(config(num_prefill=2, max_batch=1, admission="reserve_first"))
    first = place(scheduler, "a", 0.0, 32, 1001)
    assert (first.expected_decode_slot_s, first.expected_kv_landed_s) == (0.0, 1.0)
    second = place(scheduler, "b", 0.0, 32, 1001)
    assert second.expected_decode_slot_s == pytest.approx(26.0)
    assert second.expected_prefill_start_s == pytest.approx(26.0)
    assert second.expected_kv_landed_s == pytest.approx(27.0)


def test_a_lost_instance_is_avoided_and_its_requests_cancelled() -> None:
    scheduler = Scheduler(config(1, 1, 2, threshold_tokens=100))
    long = place(scheduler, "long", 0.0, 200)
    short = place(scheduler, "short", 0.0, 50)
    landed = place(scheduler, "landed", 0.0, 200)
    assert [d.route.prefill.cluster for d in (long, short, landed)] == [PRFAAS, PD, PRFAAS]
    scheduler.handle(ev.PrefillDone("landed"), 1.0)
    scheduler.handle(ev.TransferDone("landed", 10), 1.0)
    assert scheduler.handle(ev.InstanceDown("prfaas-p0"), 2.0) == [
        ev.Cancel("long", "instance prfaas-p0 went down")
    ]
    assert scheduler.handle(ev.InstanceDown("prfaas-p0"), 2.0) == []
    assert place(scheduler, "next", 2.0, 200).route.prefill.cluster == PD
    scheduler.handle(ev.InstanceUp("prfaas-p0"), 3.0)
    assert place(scheduler, "back", 3.0, 200).route.prefill.cluster == PRFAAS
    with pytest.raises(EngineError, match=r"pd-d7.*pd-d0"):
        scheduler.handle(ev.InstanceDown("pd-d7"), 3.0)


@pytest.mark.parametrize("lost", [("pd-p0",), ("pd-d0", "pd-d1")])
def test_without_an_instance_requests_are_refused(lost: tuple[str, ...]) -> None:
    scheduler = Scheduler(config(0, 1, 2))
    for name in lost:
        scheduler.handle(ev.InstanceDown(name), 0.0)
    (action,) = scheduler.handle(ev.Arrived("a", 10, 1), 0.0)
    assert isinstance(action, ev.Reject)
    assert action.retry_after_s > 0
    assert scheduler.in_flight == 0
    assert (scheduler.counters.arrived, scheduler.counters.rejected) == (1, 1)


def test_a_length_the_profile_refuses_leaves_no_trace() -> None:
    def refuse(_new: int, _cached: int) -> float:
        raise ScenarioError("not covered")

    scheduler = Scheduler(config(prefill_s={"slow": refuse}))
    with pytest.raises(ScenarioError, match="not covered"):
        scheduler.handle(ev.Arrived("a", 10, 1), 0.0)
    assert scheduler.counters.arrived == scheduler.in_flight == 0
    assert set(scheduler.queue_lengths().values()) == {0}


RIDS = st.sampled_from([str(n) for n in range(12)])
any_event = st.one_of(
    st.builds(ev.Arrived, RIDS, st.integers(1, 300), st.integers(1, 50)),
    st.builds(ev.PrefillStarted, RIDS),
    st.builds(ev.PrefillDone, RIDS),
    st.builds(ev.TransferDone, RIDS, st.integers(0, 9)),
    st.builds(ev.DecodeAdmitted, RIDS),
    st.builds(ev.Finished, RIDS),
    st.builds(ev.Failed, RIDS, st.just("prefill")),
    st.builds(ev.Cancelled, RIDS),
    st.builds(ev.InstanceUp, st.sampled_from([i.name for i in instances(2, 2, 2)])),
    st.builds(ev.InstanceDown, st.sampled_from([i.name for i in instances(2, 2, 2)])),
)


@settings(max_examples=200)
@given(
    st.lists(st.tuples(any_event, st.integers(0, 8)), max_size=120),
    st.sampled_from(["push_then_admit", "reserve_first"]),
)
def test_any_order_of_events_conserves_requests(
    drawn: list[tuple[ev.Event, int]], admission: Admission
) -> None:
    setting = config(2, 2, 2, threshold_tokens=100, max_batch=2, admission=admission)
    scheduler, twin = Scheduler(setting), Scheduler(setting)
    live: set[str] = set()
    now_s = 0.0
    for event, gap in drawn:
        now_s += gap / 4
        if isinstance(event, ev.Arrived) and event.rid in live:
            with pytest.raises(AssertionError, match="twice"):
                scheduler.handle(event, now_s)
            continue
        actions = scheduler.handle(event, now_s)
        assert actions == twin.handle(event, now_s)
        for action in actions:
            if isinstance(action, ev.Dispatch):
                live.add(action.rid)
                assert action.expected_prefill_start_s >= now_s
                assert action.expected_decode_slot_s >= now_s
            elif isinstance(action, ev.Cancel):
                assert action.rid in live
        if isinstance(event, ev.Finished | ev.Failed | ev.Cancelled):
            live.discard(event.rid)
        counted = scheduler.counters
        ended = counted.rejected + counted.finished + counted.failed + counted.cancelled
        assert scheduler.in_flight == len(live) == counted.arrived - ended
        lengths = scheduler.queue_lengths()
        assert sum(n for name, n in lengths.items() if name.startswith("pd-d")) == len(live)
        assert sum(lengths.values()) <= 2 * len(live)
    for rid in live:
        scheduler.handle(ev.Finished(rid), now_s)
    assert set(scheduler.queue_lengths().values()) == {0}
    assert scheduler.in_flight == 0
    # Nothing of the past weighs on what comes next.
    for instance in setting.instances:
        scheduler.handle(ev.InstanceUp(instance.name), now_s)
    fresh = place(scheduler, "fresh", now_s, 320)
    assert fresh.expected_prefill_start_s == now_s
    assert fresh.expected_decode_slot_s >= fresh.expected_prefill_start_s
