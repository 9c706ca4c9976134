"""Schedules: what holds when, from TOML and CSV, scaled, and applied on time and in order."""

import math
import statistics
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netem.link import LinkError, LinkSpec, symmetric
from netem.link_file import profile_names, read_profile
from netem.loss import IndependentLoss
from netem.relayed import open_relay
from netem.variation import (
    OUTAGE_LOSS,
    Change,
    LinkSchedule,
    diurnal,
    microbursts,
    outage,
)
from netem.variation_file import read_schedule, schedule_of
from netem.variation_run import ScheduleRun

GBIT = 125e6
BASE = symmetric("wan", 10 * GBIT, 0.020, 0.001, loss=0.001)


def rates(schedule: LinkSchedule, base: LinkSpec = BASE) -> list[tuple[float, float]]:
    return [
        (step.at_s, step.spec.far_to_near.rate_bytes_per_s / GBIT) for step in schedule.steps(base)
    ]


def test_a_burst_inside_a_dip_ends_in_the_dip() -> None:
    dip = Change(5.0, 15.0, rate_bytes_per_s=4 * GBIT)
    burst = Change(8.0, 8.001, rate_factor=0.5)
    assert rates(LinkSchedule((burst, dip))) == [(5.0, 4), (8.0, 2), (8.001, 4), (15.0, 10)]


def test_an_outage_ends_with_the_loss_there_was() -> None:
    lossy = Change(1.0, loss=IndependentLoss(0.05))
    schedule = LinkSchedule((outage(2.0, 3.0, "far_to_near"), lossy))
    steps = schedule.steps(BASE)
    assert [step.at_s for step in steps] == [1.0, 2.0, 3.0]
    assert steps[1].spec.far_to_near.loss == OUTAGE_LOSS
    assert steps[1].spec.near_to_far.loss == IndependentLoss(0.05)
    assert steps[2].spec == steps[0].spec
    assert steps[0].words == "loss 0.1% to 5%"
    assert steps[1].words == "far to near loss 5% to 100%"


def test_the_change_that_began_last_decides_and_factors_multiply() -> None:
    schedule = LinkSchedule(
        (
            Change(0.0, rate_bytes_per_s=2 * GBIT, delay_s=0.05),
            Change(1.0, 3.0, rate_bytes_per_s=4 * GBIT, rate_factor=0.5),
            Change(2.0, 4.0, rate_factor=0.5),
        )
    )
    # At 1 s it is half of 4, and so no other rate; at 3 s half of 2.
    assert rates(schedule) == [(0.0, 2), (2.0, 1), (4.0, 2)]
    assert schedule.spec_at(BASE, 2.5).rtt_s == pytest.approx(0.1)


#: On a grid: durations near the least a float can hold do not survive being scaled.
instants = st.integers(min_value=0, max_value=10_000).map(lambda milliseconds: milliseconds / 1000)
changes = st.lists(
    st.builds(
        lambda at_s, span_s, way, rate, factor, loss: Change(
            at_s,
            at_s + span_s,
            way,
            rate_bytes_per_s=rate,
            rate_factor=factor,
            loss=None if loss is None else IndependentLoss(loss),
        ),
        instants,
        st.one_of(instants, st.just(math.inf)),
        st.sampled_from(["both", "near_to_far", "far_to_near"]),
        st.one_of(st.none(), st.floats(min_value=1e9, max_value=1e10)),
        st.sampled_from([1.0, 0.5, 0.25]),
        st.one_of(st.none(), st.floats(min_value=0, max_value=0.5)),
    ),
    max_size=8,
)


@given(changes, st.floats(min_value=0, max_value=25))
def test_steps_and_the_link_at_an_instant_agree(given: list[Change], at_s: float) -> None:
    schedule = LinkSchedule(tuple(given))
    spec = BASE
    steps = schedule.steps(BASE)
    assert [step.at_s for step in steps] == sorted({step.at_s for step in steps})
    for step in steps:
        if step.at_s <= at_s:
            spec = step.spec
    assert spec == schedule.spec_at(BASE, at_s)


@given(changes, st.sampled_from([1.0, 2.0, 8.0]), st.sampled_from([1.0, 4.0, 16.0]))
def test_scaling_a_schedule_and_its_link_is_scaling_what_they_make(
    given: list[Change], time_scale: float, byte_scale: float
) -> None:
    schedule = LinkSchedule(tuple(given))
    fast = symmetric("fast", 1e12, 0.020)  # rates stay above the least there may be
    scaled = schedule.scaled(time_scale, byte_scale)
    for step in schedule.steps(fast):
        found = scaled.spec_at(fast.scaled(time_scale, byte_scale), step.at_s / time_scale)
        for name in ("near_to_far", "far_to_near"):
            wanted = getattr(step.spec.scaled(time_scale, byte_scale), name)
            one = getattr(found, name)
            assert one.rate_bytes_per_s == pytest.approx(wanted.rate_bytes_per_s)
            assert (one.delay_s, one.loss) == (wanted.delay_s, wanted.loss)


def test_an_impossible_link_is_found_before_the_run() -> None:
    schedule = LinkSchedule((Change(3.0, delay_s=0.0005),))
    with pytest.raises(LinkError, match="at 3s of the schedule: link 'wan': a jitter of 1ms"):
        schedule.steps(BASE)


def test_a_day_swings_about_the_rate_and_its_mean_is_the_rate() -> None:
    found = rates(LinkSchedule(diurnal(0.15, 86400.0, 86400.0)))
    values = [rate for _, rate in found][:-1]  # after the last step it is the link's own again
    assert statistics.fmean(values) == pytest.approx(10.0, rel=0.01)
    assert max(values) == pytest.approx(11.5, rel=0.01)
    assert min(values) == pytest.approx(8.5, rel=0.01)
    assert values.index(max(values)) < values.index(min(values))


def test_bursts_have_their_depth_durations_and_frequency_and_are_repeatable() -> None:
    bursts = microbursts(0.9, 100e-6, 5e-3, 0.1, 200.0, seed=4)
    assert bursts == microbursts(0.9, 100e-6, 5e-3, 0.1, 200.0, seed=4)
    assert bursts != microbursts(0.9, 100e-6, 5e-3, 0.1, 200.0, seed=5)
    assert len(bursts) == pytest.approx(2000, rel=0.1)
    durations_s = [burst.until_s - burst.at_s for burst in bursts]
    assert min(durations_s) >= 100e-6 - 1e-9
    assert max(durations_s) <= 5e-3 + 1e-9
    assert statistics.fmean(durations_s) == pytest.approx(2.55e-3, rel=0.05)
    found = [rate for _, rate in rates(LinkSchedule(bursts[:50]))]
    assert found == pytest.approx([1.0, 10.0] * 50)


TOML = """
[[change]]
at = "5s"
for = "2s"
direction = "far_to_near"
rate = "1gbit"
[[change]]
at = "6s"
rtt = "40ms"
jitter = "2ms"
loss = { model = "bursts", rate = "1%", mean_burst_packets = 5 }
[[outage]]
at = "8s"
for = "500ms"
[[measurements]]
file = "measured.csv"
"""
CSV = """time_s,rate_gbit,rtt_ms,loss
10,9.5,20,0.1%
11,,25,
12,8.25,20,0%
"""


def test_a_toml_schedule_with_measurements(tmp_path: Path) -> None:
    (tmp_path / "schedule.toml").write_text(TOML)
    (tmp_path / "measured.csv").write_text(CSV)
    steps = read_schedule(tmp_path / "schedule.toml", 60.0).steps(BASE)
    found = {step.at_s: step.spec for step in steps}
    assert list(found) == [5.0, 6.0, 7.0, 8.0, 8.5, 10.0, 11.0, 12.0]
    assert found[5.0].far_to_near.rate_bytes_per_s == GBIT
    assert found[5.0].near_to_far == BASE.near_to_far
    assert found[6.0].rtt_s == pytest.approx(0.040)
    assert found[6.0].near_to_far.loss_rate == pytest.approx(0.01)
    assert found[8.0].loss_rate == pytest.approx(1.0)
    assert found[8.5] == found[7.0]
    assert found[10.0].rate_bytes_per_s == 9.5 * GBIT
    # An empty cell leaves what else holds: the link's rate, the loss of the change at 6 s.
    assert found[11.0].rate_bytes_per_s == 10 * GBIT
    assert found[11.0].loss_rate == pytest.approx(0.01)
    assert found[12.0].loss_rate == 0


def test_every_named_profile_has_a_schedule_that_can_be_applied() -> None:
    varying = 0
    for name in profile_names():
        profile = read_profile(name)
        schedule = schedule_of(profile.variation, name, 2.0, Path())
        steps = schedule.steps(profile.spec)
        varying += bool(steps)
        assert all(step.spec.rate_bytes_per_s > 0 for step in steps)
    assert varying >= 3


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ('[[change]]\nat = "5s"\nrte = "1gbit"', "Unknown key 'change.0.rte'.*did you mean 'rate'"),
        ('[[change]]\nat = "5"\nrate = "1gbit"', "'change.0.at'.*has no unit"),
        ('[[change]]\nrate = "1gbit"', "'change.0.at' is missing"),
        ('[[change]]\nat = "5s"', "changes nothing"),
        ('[[change]]\nat = "5s"\nrtt = "1ms"\ndirection = "near_to_far"', "give 'delay' instead"),
        ('[[change]]\nat = "5s"\nrate = "1gbit"\nrate_factor = "5%"', "either 'rate' or 'rate_f"),
        ('[[change]]\nat = "5s"\ndirection = "up"\nrate = "1gbit"', "'change.0.direction'"),
        ('[[outage]]\nat = "5s"', "'outage.0.for' is missing"),
        ('[microburst]\ndepth = "90%"\nmin_duration = "1s"\nmax_duration = "1ms"', "must hold"),
        (
            '[microburst]\ndepth = "9%"\nmin_duration = "1ns"\nmax_duration = "1ns"\nevery = "1us"',
            "more than 200000",
        ),
        ('[diurnal]\nswing = "150%"', "'diurnal.swing'"),
        ("not toml", "is not usable TOML"),
    ],
)
def test_a_faulty_schedule_is_refused_by_key(tmp_path: Path, toml: str, words: str) -> None:
    path = tmp_path / "schedule.toml"
    path.write_text(toml)
    with pytest.raises(LinkError, match=words) as refusal:
        read_schedule(path, 60.0)
    assert "schedule.toml" in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("time_s,rate_gbit\n1,x\n", "Line 2, column 'rate' of .*'xgbit' is not a rate"),
        ("time_s,rate\n1,9\n", "Line 2, column 'rate'.*has no unit"),
        ("time_s,rate_parsec\n1,9\n", "has the unit 'parsec'"),
        ("time_s,speed\n1,9\n", "Unknown column 'speed'"),
        ("time_s,rat_gbit\n1,9\n", "did you mean 'rate'"),
        ("rate_gbit,rtt_ms\n1,9\n", "must have 'time'"),
        ("time_s,rate_gbit,rate_mbit\n1,9,9\n", "each other column once"),
        ("time_s,rate_gbit\n1,9\n1,8\n", "Line 2 .*: the next line is not later"),
        ("time_s,rate_gbit\n1,9,8\n", "Line 2 .* has 3 cells instead of 2"),
        ("time_s,rate_gbit\n,9\n", "Line 2 .* has no time"),
        ("time_s,rate_gbit\n", "a header and 1 to"),
        ("", "a header and 1 to"),
        ("time_s,rtt_ms,delay_ms\n1,2,3\n", "'rtt' .* is both delays"),
        ("time_s,loss_percent\n1,200\n", "more than 100%"),
    ],
)
def test_faulty_measurements_are_refused_by_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "link.csv"
    path.write_text(text)
    with pytest.raises(LinkError, match=words) as refusal:
        read_schedule(path, 60.0)
    assert "link.csv" in str(refusal.value)


def test_a_file_that_is_not_there_is_said_to(tmp_path: Path) -> None:
    for name in ("none.csv", "none.toml"):
        with pytest.raises(LinkError, match=name):
            read_schedule(tmp_path / name, 60.0)


class Journal:
    """A link that only remembers what was applied to it."""

    def __init__(self, *refuses: LinkSpec) -> None:
        self.applied: list[LinkSpec] = []
        self.prepared: list[LinkSpec] = []
        self._refuses = refuses

    def prepare(self, spec: LinkSpec) -> None:
        self.prepared.append(spec)

    def apply(self, spec: LinkSpec) -> None:
        if spec in self._refuses:
            raise LinkError("it cannot be done")
        self.applied.append(spec)


def test_steps_are_applied_in_order_none_early_and_then_undone() -> None:
    schedule = LinkSchedule(tuple(Change(0.01 * n, rate_bytes_per_s=n * GBIT) for n in (1, 2, 3)))
    journal = Journal()
    with ScheduleRun(journal, BASE, schedule) as run:
        assert run.wait(60)
    specs = [step.spec for step in schedule.steps(BASE)]
    assert journal.applied == [*specs, BASE]
    assert journal.prepared == specs
    assert [one.planned_s for one in run.log] == [0.01, 0.02, 0.03]
    assert all(one.applied_s >= one.planned_s for one in run.log)
    assert run.log[0].change == "rate 10gbit to 1gbit"


def test_leaving_early_stops_the_schedule_and_restores_the_link() -> None:
    schedule = LinkSchedule(
        (Change(0.0, rate_bytes_per_s=GBIT), Change(3600.0, rate_bytes_per_s=2 * GBIT))
    )
    journal = Journal()
    with ScheduleRun(journal, BASE, schedule) as run:
        assert not run.wait(0.2)
    assert [one.change for one in run.log] == ["rate 10gbit to 1gbit"]
    assert journal.applied[-1] == BASE
    assert "link-schedule" not in {thread.name for thread in threading.enumerate()}


def test_a_step_that_fails_ends_the_run_undoes_the_rest_and_is_raised() -> None:
    schedule = LinkSchedule(
        (Change(0.0, rate_bytes_per_s=GBIT), Change(0.01, delay_s=0.02), Change(0.02, 9.0))
    )
    journal = Journal(schedule.spec_at(BASE, 0.01))
    with (
        pytest.raises(LinkError, match="it cannot be done"),
        ScheduleRun(journal, BASE, schedule) as run,
    ):
        assert run.wait(60)
    assert journal.applied == [schedule.spec_at(BASE, 0.0), BASE]


def test_a_link_that_cannot_be_restored_is_said_to() -> None:
    schedule = LinkSchedule((Change(0.0, rate_bytes_per_s=GBIT),))
    with (
        pytest.raises(LinkError, match="it cannot be done"),
        ScheduleRun(Journal(BASE), BASE, schedule) as run,
    ):
        assert run.wait(60)


def test_a_running_relay_follows_a_schedule() -> None:
    base = symmetric("wan", 25e6, 0.010)
    schedule = LinkSchedule((Change(0.05, 0.15, rate_bytes_per_s=5e6),))
    with open_relay(base) as path, ScheduleRun(path, base, schedule) as run:
        assert run.wait(60)
        assert path.applied.rate_bytes_per_s == 25e6
    assert [one.change for one in run.log] == [
        "rate 200mbit to 40mbit",
        "rate 40mbit to 200mbit",
    ]


def test_an_outage_on_the_relay_is_refused_by_name() -> None:
    base = symmetric("wan", 25e6, 0.010)
    schedule = LinkSchedule((outage(0.0, 1.0),))
    with (
        open_relay(base) as path,
        pytest.raises(LinkError, match="the relay cannot apply loss of 100%"),
        ScheduleRun(path, base, schedule) as run,
    ):
        assert run.wait(60)
